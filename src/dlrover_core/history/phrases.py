"""Values in words: a duration, a size, an exit code, a text from outside.

Text from outside (last lines, reasons, errors) passes `safe` before it reaches a terminal: a worker's output may hold anything.
Events in words: `history.words`.
"""

from __future__ import annotations

import signal
from datetime import datetime, timezone
from typing import Any

from dlrover_core.history.plain import fields_of
from dlrover_core.kernel.events import Event
from dlrover_core.words import without_sequences

VALUE_CHARS_MAX = 80


def safe(text: str) -> str:
    """``text`` without escape sequences and control characters, but with its line breaks."""
    bare = without_sequences(text).replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    return "".join(one if one == "\n" or one.isprintable() else "?" for one in bare)


def one_line(text: str, chars_max: int = 200) -> str:
    """``text`` safe, in one line, cut with '...' where it is longer."""
    line = " ".join(safe(text).split())
    return line if len(line) <= chars_max else line[: chars_max - 3] + "..."


def duration(us: int) -> str:
    """Microseconds as a person says them: '0.081 s', '12.3 s', '4 min 05 s', '2 h 03 min', '5 d 07 h'."""
    if us < 0:
        return "-" + duration(-us)
    if us < 9_999_500:
        return f"{us / 1e6:.3f} s"
    if us < 59_950_000:
        return f"{us / 1e6:.1f} s"
    seconds = (us + 500_000) // 1_000_000
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    if seconds < 48 * 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02} h"


def size(bytes_: int) -> str:
    """Bytes as a person says them: '512 B', '1.5 GiB'."""
    amount, unit = float(bytes_), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"


def exit_of(exit_code: int) -> str:
    """'killed by SIGKILL', 'exit code 1'."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"killed by {known.get(-exit_code, f'signal {-exit_code}')}"


def value(one: Any, chars_max: int = VALUE_CHARS_MAX) -> str:
    """One field's value, short."""
    if isinstance(one, str):
        text = one_line(one, chars_max)
        return text if text and " " not in text and "=" not in text else '"' + text.replace('"', "'") + '"'
    if isinstance(one, list):
        return one_line("[" + ",".join(value(item) for item in one) + "]", chars_max)
    if isinstance(one, dict):
        return one_line("{" + ",".join(f"{name}:{value(item)}" for name, item in one.items()) + "}", chars_max)
    return str(one)


def key_values(event: Event) -> str:
    """Every field of an event as ``name=value``, long values cut."""
    return " ".join(f"{name}={value(one)}" for name, one in fields_of(event).items())


def stamp(at: int) -> str:
    """Microseconds since the epoch as UTC, to the second: the same wherever it is read."""
    return f"{datetime.fromtimestamp(at // 1_000_000, timezone.utc):%Y-%m-%d %H:%M:%S}Z"
