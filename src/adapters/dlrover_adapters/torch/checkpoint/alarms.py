"""Decides which errors of a save end training, and reports all other errors as alarms.

An error about the *truth* of the state is raised: what would be saved is not what the script means, so every later save would be
wrong, too. That is decided here and nowhere else (`about_truth`). Every other error (the store, the agent, memory, a disk, a
``state_dict`` that raises) leaves that save out and rings an alarm: it is logged, told to the agent and counted, and training
goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dlrover_core.errors import CoreError, SpecError

from .sources import Mismatch

TRUTH = (SpecError, Mismatch)
"""A state that cannot be saved as it was given, or that is another one than on other ranks or in the checkpoint."""
KINDS_MAX = 16
WORDS_MAX = 500
_NO_THREAD = "can't start new thread"
"""What CPython says where the system has no thread for it."""
_log = logging.getLogger("dlrover.torch")


def about_truth(error: BaseException) -> bool:
    """Whether this error of a save ends training. Exceptions that end the process, such as Ctrl-C, do too."""
    return isinstance(error, TRUTH) or not isinstance(error, Exception)


class Alarms:
    """Errors that did not end training. ``count``: all of them; ``newest``: the last one; ``tell``: passes words to the agent."""

    def __init__(self) -> None:
        self.count = 0
        self.newest: Exception | None = None
        self.tell: Callable[[str], None] = lambda _: None
        self._kinds: dict[str, int] = {}

    def ring(self, what: str, error: Exception) -> None:
        """Count an error that kept ``what`` from happening. Of each type log the 1st, 2nd, 4th, 8th ..., and tell the agent.

        The first of a type is logged with its traceback, unless its words say what happened: ours do, the system's, and that
        no thread can be started.
        """
        self.count += 1
        self.newest = error
        kind = type(error).__name__ if len(self._kinds) < KINDS_MAX else ""
        times = self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if times & (times - 1) == 0:
            words = f"{what}: {type(error).__name__}: {error}"[:WORDS_MAX]
            no_thread = _NO_THREAD in str(error)
            if no_thread:
                words += "; a limit of processes is reached: see ulimit -u, and pids.max"
            traced = error if times == 1 and not no_thread and not isinstance(error, (CoreError, OSError)) else None
            _log.error("%s (%d errors by now). Training goes on", words, self.count, exc_info=traced)
            self.tell(words)
