"""The output file of a detached job: bounded while all of its processes append to it, and read as it grows.

Its writers have it open as their standard output, so nobody can rename it under them. As with files of workers
(`agent.log_bounds`), the middle is given back where it lies: beginning and end stay.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.agent.log_bounds import LogBounds
from dlrover_adapters.cli.detached import record

PIECE_BYTES = 1 << 16


class _File(NamedTuple):
    path: str
    keep: bool = True


class Bounds:
    """Keeps the file in ``directory`` within ``bytes_max``; 0: no bound."""

    def __init__(self, directory: Path, bytes_max: int) -> None:
        self._file, self._bounds = _File(str(directory / record.OUTPUT)), LogBounds(bytes_max)
        if bytes_max:
            self._bounds.watch(self._file)

    def look(self) -> None:
        """Give back what is too much now."""
        self._bounds.look()

    def close(self) -> None:
        """The last time: close the hole, where the file system can do that."""
        self._bounds.finish(self._file)


def read(fd: int) -> bytes:
    """The next piece of the file, past what was given back; empty: there is none yet."""
    at = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        begin = os.lseek(fd, at, os.SEEK_DATA)
        stop = os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError:  # nothing but a hole is left, or the file has become shorter
        os.lseek(fd, 0, os.SEEK_END)
        return b""
    os.lseek(fd, begin, os.SEEK_SET)
    return os.read(fd, min(PIECE_BYTES, stop - begin))
