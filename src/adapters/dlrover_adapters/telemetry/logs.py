"""structlog for our processes: one line per event, into the job's control log, never between a script's own lines."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(path: Path | None, level: str, **bound: str) -> None:
    """Log at ``level`` and above to ``path`` (appending), or to stderr; ``bound`` is in every line.

    Lines of several processes share the file: each is one write of less than a pipe's atomic size, opened for appending.
    """
    stream: TextIO = (
        sys.stderr if path is None else path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    )
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
