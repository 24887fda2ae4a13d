"""The diary of a script: a line for all that it does, which the benchmark reads."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Diary:
    """Appends lines ``what attempt rank pid step nanoseconds``, by CLOCK_MONOTONIC, that no other process can tear."""

    def __init__(self, path: str | Path, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {rank} {os.getpid()}"

    def note(self, what: str, step: int, at: int = 0) -> None:
        """Write one line."""
        os.write(self._fd, f"{what} {self._who} {step} {at or time.monotonic_ns()}\n".encode())
