"""What workers write, read behind their backs: new lines of one output file, in pieces that a matcher can take.

Workers write into files (`logs`), so reading costs them nothing and cannot hold them up. A file may grow faster than is worth
reading, may have holes punched into it, may be cut short by its owner, and may hold anything but lines. Whoever reads is always
within a bound of the end, and takes at most so much at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .last_words import LastWords

LINE_BYTES_MAX = 4096
OVERLAP_BYTES = 512
"""A longer line is taken in pieces, which have so much in common: what is looked for is shorter."""


class Output(NamedTuple):
    """One output file of one worker."""

    path: str
    generation: int
    rank: int
    pid: int


class Known(NamedTuple):
    """What a death is known by, as `ReportExit` has it; empty: nothing, or nobody has looked."""

    signature: str = ""
    place: str = ""


class OutputWatch(Protocol):
    """Who is told of workers' output files, and knows deaths by their last words."""

    def follow(self, output: Output) -> None:
        """A worker writes into it from now on. On the agent's loop; returns at once, as the next."""
        ...

    def finish(self, path: str) -> None:
        """Its writer is dead; the file may vanish soon."""
        ...

    def known(self, exit_code: int, words: LastWords) -> Known:
        """What this death is known by. In a thread; must not be slow, for a restart waits for it."""
        ...


class Tail:
    """The end of a growing file. Raises `OSError` where it cannot be opened."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.offset, self.skipped = 0, 0
        self._begun = b""
        # Held open: it is read to its end even when it has no name any more.
        self._fd = os.open(output.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self, bytes_max: int, *, last: bool = False) -> tuple[str, int]:
        """New lines, and how long ago the newest was written, in microseconds. ``last``: the writer is dead, take all.

        What is further behind than ``bytes_max`` is left out; `skipped` counts it.
        """
        status = os.fstat(self._fd)
        if status.st_size < self.offset:  # cut short, or a hole was taken out of it: the newest is at the end
            self.offset, self._begun = max(0, status.st_size - bytes_max), b""
        if status.st_size == self.offset and not (last and self._begun):
            return "", 0
        if status.st_size - self.offset > bytes_max:
            self.skipped += status.st_size - bytes_max - self.offset
            self.offset, self._begun = status.st_size - bytes_max, b""
        data = self._begun + self._take(status.st_size - self.offset)
        end = len(data) if last else data.rfind(b"\n") + 1
        self._begun = data[end:]
        if len(self._begun) > LINE_BYTES_MAX:
            end, self._begun = len(data), self._begun[-OVERLAP_BYTES:]
        age_us = max(0, time.time_ns() - status.st_mtime_ns) // 1000
        return lines_of(data[:end]), age_us

    def _take(self, size: int) -> bytes:
        """The next ``size`` bytes, but nothing of what was taken out of the file."""
        end = self.offset + size
        with contextlib.suppress(OSError):
            try:
                self.offset = min(end, os.lseek(self._fd, self.offset, os.SEEK_DATA))
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole
                    self.offset = end
        data = os.pread(self._fd, end - self.offset, self.offset)
        self.offset += len(data)
        return data

    def close(self) -> None:
        """Read no more."""
        os.close(self._fd)


def lines_of(data: bytes) -> str:
    """Bytes of any kind as lines of bounded length: what redraws itself is lines too, and what is no text is replaced."""
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    if b"\r" in data:
        data = data.replace(b"\r", b"\n")
    return _bounded(data).decode("utf-8", errors="replace")


def _bounded(data: bytes) -> bytes:
    """With its long lines in pieces. It goes from one newline to the last within reach, and so looks at no byte often."""
    pieces: list[bytes] = []
    begin = taken = 0
    while len(data) - begin > LINE_BYTES_MAX:
        newline = data.rfind(b"\n", begin, begin + LINE_BYTES_MAX + 1)
        if newline >= 0:
            begin = newline + 1
        else:
            pieces.append(data[taken : begin + LINE_BYTES_MAX])
            begin = taken = begin + LINE_BYTES_MAX - OVERLAP_BYTES
    return b"\n".join([*pieces, data[taken:]])
