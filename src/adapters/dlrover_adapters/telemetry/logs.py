"""structlog for our processes: one line per event, into the job's control log, never between a script's own lines."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import TextIO, cast

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LogFile:
    """A file whose lines are lost, and counted, while its disk has no room: what is logged there must not end anybody."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._half = False
        self.lost = 0

    def write(self, text: str) -> int:
        """Append a line, whole wherever there is room for all of it."""
        if self.lost and self._append(f"{self.lost} lines were lost here: the disk was full\n"):
            self.lost = 0
        if self.lost or not self._append(text):
            self.lost += 1
        return len(text)

    def _append(self, text: str) -> bool:
        line = ("\n" if self._half else "") + text
        data = line.encode("utf-8", "backslashreplace")
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            return False
        self._half = written < len(data)
        return not self._half

    def flush(self) -> None:
        """Nothing is held back."""


def set_up(path: Path | None, level: str, **bound: object) -> None:
    """Log at ``level`` and above to ``path`` (appending), or to stderr; ``bound`` is in every line.

    Lines of several processes share the file: each is one write of less than a pipe's atomic size, opened for appending.
    """
    stream = sys.stderr if path is None else cast(TextIO, LogFile(path))
    renderer = (
        structlog.dev.ConsoleRenderer(colors=False)
        if path is None
        else structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "role", "event"))
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(**bound)
