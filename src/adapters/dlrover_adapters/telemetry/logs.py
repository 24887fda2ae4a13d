"""structlog for our processes: one line per event, into the job's control log, never between a script's own lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

LOOK_S = 1.0
_PASSING = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ENOENT))
"""What may be better later: a disk that is full or read-only, a folder that was removed."""


class LogFile:
    """A file whose lines are lost, and counted, while its disk takes none: what is logged there must not end anybody.

    A file that was removed is made anew, once its folder is there again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd, self._half = path, -1, False
        self._looked = 0.0
        self.lost = 0
        try:
            self._open()
        except OSError as error:
            if error.errno not in _PASSING:
                raise

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._half = fd, False

    def write(self, text: str) -> int:
        """Append a line, whole wherever there is room for all of it."""
        self._look()
        if self.lost and self._append(f"{self.lost} lines were lost here: the disk took none\n"):
            self.lost = 0
        if self.lost or not self._append(text):
            self.lost += 1
        return len(text)

    def _look(self) -> None:
        """Now and then: is the open file still the one at the path?"""
        now = time.monotonic()
        if now - self._looked < LOOK_S and self._fd >= 0:
            return
        self._looked = now
        try:
            if self._fd < 0 or not os.path.samestat(os.fstat(self._fd), self._path.stat()):
                self._open()
        except OSError:
            with contextlib.suppress(OSError):
                self._open()

    def _append(self, text: str) -> bool:
        if self._fd < 0:
            return False
        line = ("\n" if self._half else "") + text
        data = line.encode("utf-8", "backslashreplace")
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            return False
        self._half = written < len(data)
        return not self._half

    def flush(self) -> None:
        """Nothing is held back."""


SAY_EVERY_S = 10.0
_NO_THREAD = "can't start new thread"
_MORE_THREADS = "a limit of processes is reached: see ulimit -u, and pids.max of the control group"
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def set_up(path: Path | None, level: str, **bound: object) -> None:
    """Log at ``level`` and above to ``path`` (appending), or to stderr; ``bound`` is in every line.

    Lines of several processes share the file: each is one write of less than a pipe's atomic size, opened for appending.
    """
    stream = sys.stderr if path is None else cast(TextIO, LogFile(path))
    renderer = structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "role", "event"))
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


class Uncaught:
    """An event loop's exception handler: it says in a line that no connection can be taken, and leaves the rest to asyncio.

    asyncio itself prints a traceback for each of as many tries as the backlog is long, and tries again a second later.
    """

    def __init__(self) -> None:
        self._say_at = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say it, once in `SAY_EVERY_S`."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_ROOM and "accept" in context.get("message", "")):
            loop.default_exception_handler(context)
        elif loop.time() >= self._say_at:
            self._say_at = loop.time() + SAY_EVERY_S
            structlog.get_logger("dlrover").warning("connections wait until they can be taken", reason=str(error))


def run_threaded(main: Callable[[], int], otherwise: int) -> int:
    """Run a process of ours. Where the system has no thread for it, log that in a line and return ``otherwise``."""
    try:
        return main()
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        structlog.get_logger("dlrover").error("this process ends: it can start no thread", remedy=_MORE_THREADS)
        return otherwise
