"""Lines of a log as their program wrote them: wrapped ones whole again, prefixes off, several in one line apart.

A terminal breaks lines at its width, a progress bar overwrites its line, a collector puts several into one JSON text, and
containers that are numbered are ranks. What is left is one `Row` a line, with who wrote it (`who`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import exceptions, who
from dlrover_core.diagnosis.who import Who

# A terminal's usual widths: one line of just that length is reason enough.
_WIDTHS = (80, 100, 120, 132, 160, 180, 200, 240)
_NUMBERED = re.compile(r"(?:worker|rank|trainer)[-_](\d{1,6})")
_FILE_RANK = re.compile(
    r"(?:^|[._-])(?:rank|worker|trainer)[-_]?(\d{1,6})(?:[._-](?:stdout|stderr|out|err|log|txt|gz)){0,3}$"
)
_FOLDER_RANK = re.compile(r"(?:^|/)(\d{1,6})/(?:stdout|stderr|error)\.\w+$")
# A frame of an error stack of MPI's, of which only the first line names its writer; and so many are looked at.
_STACKED = re.compile(r"^(?:P?MPI|MPID|MPIR|MPIDI|MPIDU|MPL)\w*\(\d+\)\.*: ?")
STACK_LINES = 32

# What makes a line worth reading that no signature may know: exceptions of any name, launchers' words, and who is where.
MARKS = (
    r"Traceback \(most recent call last\)",
    r"^Caused by: ",
    r"\bRoot Cause \(first observed failure\)",
    r"\bexitcode *: ",
    r"\bexits with return code = ",
    r"\bsrun: error: ",
    r"\bProcess name: \[\[",
    r"\bRUNNING AT \S",
    r"\bexited on signal \d",
    r"\bContainer rank \d+ status failed\b",
    r"\bMPICH ERROR \[Rank \d",
    r": rank \d+ (?:died from signal|exited with code) \d",
    r"\bterminated with (?:signal|exit code)",
    r"\bbusId \w+\b.{0,60}\bInit COMPLETE",
    r"\bglobal_ranks=\[",
    r"\bnode[_-]rank\b",
    r"\b(?:error|fatal|failed|cannot|unable to|could not)\b",
)


class Text(NamedTuple):
    """A log, or what is worth reading of it. ``numbers``: each line's in its file; ``whole``: nothing was left out."""

    name: str
    numbers: Sequence[int]
    lines: Sequence[str]
    whole: bool = True


class Row(NamedTuple):
    """One line of what a program wrote. ``raw``: as it stood in the log."""

    number: int
    raw: str
    body: str
    who: Who
    stamps: tuple[str, ...]
    level: str


def rows_of(text: Text) -> Iterator[Row]:
    """The lines without prefixes; a JSON line that holds several is several."""
    for number, line in _unwrapped(text):
        for part in line.split("\r") if "\r" in line else (line,):
            peeled = who.peel(part)
            for body in peeled.body.split("\n") if "\n" in peeled.body else (peeled.body,):
                yield Row(number, part, body, peeled.who, peeled.stamps, peeled.level)


def _unwrapped(text: Text) -> Iterator[tuple[int, str]]:
    """Lines that a terminal had broken at its width are whole again."""
    lines = [line.rstrip("\r\n") for line in text.lines]
    lengths = Counter(map(len, lines))
    width = max(lengths, default=0)
    full = {line for line in lines if len(line) == width}
    if not text.whole or not 60 <= width <= 260 or len(full) < (1 if width in _WIDTHS else 3):
        yield from zip(text.numbers, lines, strict=True)
        return
    held: tuple[int, str] | None = None
    for number, line in zip(text.numbers, lines, strict=True):
        if held is not None and _begins(line):
            yield held
            held = None
        held = (held[0], held[1] + line) if held is not None else (number, line)
        if len(line) < width:
            yield held
            held = None
    if held is not None:
        yield held


def _begins(line: str) -> bool:
    """Does a line begin anew, with a time or a writer of its own?"""
    peeled = who.peel(line)
    known = line.startswith(("Traceback", "  File ")) or exceptions.ANEW.match(line) or exceptions.PROGRESS.match(line)
    return bool(peeled.stamps or known) or peeled.who != Who()


def numbered(rows: list[Row]) -> tuple[list[Row], str]:
    """Containers that are numbered, such as ``worker-3``, are ranks where there are several in one log.

    Where all of a log is one container's, the container tells no line from another: its name is given apart.
    """
    pods = Counter(row.who.pod for row in rows)
    most, times = pods.most_common(1)[0] if pods else ("", 0)
    if most and len(pods) <= 2 and times * 10 >= len(rows) * 9:
        return [row._replace(who=row.who._replace(pod="")) for row in rows], most
    numbers = {found[1] for row in rows if row.who.pod and (found := _NUMBERED.fullmatch(row.who.pod))}
    if len(numbers) < 2:
        return rows, ""
    renamed = [
        row._replace(who=row.who._replace(rank=int(found[1]), pod=""))
        if row.who.rank < 0 and (found := _NUMBERED.fullmatch(row.who.pod))
        else row
        for row in rows
    ]
    return renamed, ""


def stack_head(rows: Sequence[Row], index: int) -> int:
    """The first line of the error stack of MPI's that a row stands in; of any other row the row itself."""
    if not _STACKED.match(rows[index].body):
        return index
    above = range(index - 1, max(-1, index - STACK_LINES), -1)
    return next((at for at in above if not _STACKED.match(rows[at].body)), index)


def rank_of_file(name: str) -> int:
    """The rank that a file's name or folder gives, or -1."""
    found = _FOLDER_RANK.search(name) or _FILE_RANK.search(name.rsplit("/", 1)[-1])
    return int(found[1]) if found else -1
