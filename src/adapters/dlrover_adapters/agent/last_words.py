"""What a dead worker left behind: the tail of its output and torch's error file. Blocking; called off the loop."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, NamedTuple

from dlrover_core.runtime.launcher import TAIL_BYTES_MAX
from dlrover_core.words import plain

from .logs import RankFiles

ERROR_FILE_BYTES_MAX = 4 * 1024 * 1024
TIMESTAMP_DIGITS_MAX = 12
PLAIN_CHARS_MAX = 6 * TAIL_BYTES_MAX
"""A tail in which each character had to be escaped is not cut before its end."""


class LastWords(NamedTuple):
    """``error_at_us`` is on the monotonic clock, as `WorkerExit.died_us` is; 0 without an error. ``trace``: its traceback."""

    tail: str
    error: str
    error_at_us: int
    trace: str = ""


def last_words(files: RankFiles) -> LastWords:
    """Read them. What cannot be read is empty: evidence is welcome, never required."""
    tail = read_tail(files.stderr.path) or read_tail(files.stdout.path)
    error, at_us = read_error(files.error)
    return LastWords(tail, error, at_us, read_trace(files.error) if error else "")


def read_tail(path: str) -> str:
    """The last `TAIL_BYTES_MAX` bytes, not beginning inside a character; undecodable bytes are replaced."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES_MAX))
            data = file.read(TAIL_BYTES_MAX)
    except OSError:
        return ""
    while size > TAIL_BYTES_MAX and data and data[0] & 0xC0 == 0x80:
        data = data[1:]
    return bounded(data.decode("utf-8", errors="replace"), keep_end=True)


def bounded(text: str, *, keep_end: bool = False) -> str:
    """``text`` as plain text, cut to `TAIL_BYTES_MAX` bytes of UTF-8."""
    data = plain(text, PLAIN_CHARS_MAX).encode()
    cut = data[-TAIL_BYTES_MAX:] if keep_end else data[:TAIL_BYTES_MAX]
    return cut.decode("utf-8", errors="ignore")


def read_error(path: str) -> tuple[str, int]:
    """The message of torch's error file, and when it was written; ``("", 0)`` without one.

    Torch writes whole seconds into it, in which all ranks of a world may fail. The file's own time is as good as the clock, so it
    is taken wherever both agree.
    """
    try:
        with open(path, "rb") as file:
            written_ns = os.fstat(file.fileno()).st_mtime_ns
            data = file.read(ERROR_FILE_BYTES_MAX)
    except OSError:
        return "", 0
    message, timestamp_s = _parse(data)
    if not message:
        return "", 0
    agree = timestamp_s == 0 or abs(written_ns / 1e9 - timestamp_s) < 2
    wall_ns = written_ns if agree else timestamp_s * 1_000_000_000
    age_us = max(0, time.time_ns() - wall_ns) // 1000
    return bounded(message), max(1, time.monotonic_ns() // 1000 - age_us)


def read_trace(path: str) -> str:
    """The traceback in torch's error file, if it has one."""
    told: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
        told = json.loads(file.read(ERROR_FILE_BYTES_MAX))
    for name in ("message", "extraInfo", "py_callstack"):
        told = told.get(name) if isinstance(told, dict) else None
    return told if isinstance(told, str) else ""


def _parse(data: bytes) -> tuple[str, int]:
    """Message and timestamp of either form that torch writes: a text, or a map with ``extraInfo``."""
    told: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(data)
    message = told.get("message") if isinstance(told, dict) else None
    if isinstance(message, str):
        return message, 0
    if not isinstance(message, dict):
        return "", 0
    extra = message.get("extraInfo")
    timestamp = str(extra.get("timestamp", "")) if isinstance(extra, dict) else ""
    sensible = timestamp.isdecimal() and len(timestamp) <= TIMESTAMP_DIGITS_MAX
    return str(message.get("message", "")), int(timestamp) if sensible else 0
