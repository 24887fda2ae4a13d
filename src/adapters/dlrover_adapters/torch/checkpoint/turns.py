"""Saves by torch.distributed.checkpoint that were begun at once, one after the other, in the order in which they were begun.

Torch gives each `async_save` a thread of its own and lets them run beside each other: on one process group their collectives are
taken for each other's, one planner has the state of the other, and which comes first is chance, on each rank another. A writer's
first hook can wait, so the second save begins when the first is over. No hook says when that is: on ranks but the first none is
called after the last collective, nor anywhere where a save fails. So the thread itself is looked at.
"""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from .shelf import ASIDE_MAX_S, ASIDE_S, Lasting

ARRIVE_S = 60.0
"""A thread of torch's that has not begun to save after so long is not waited for: it may be one that never will."""
_TORCHS = "torch.distributed.checkpoint.state_dict_saver"
_EXECUTOR = "AsyncCheckpointExecutor"
"""The threads of ``async_save``, each for one save. Of a torch that names them otherwise only the order of arrival is known."""


class _Came(NamedTuple):
    """A thread that has come, and for whom it waits, or did."""

    thread: threading.Thread
    behind: frozenset[threading.Thread]


class Turns:
    """Of one writer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came: list[_Came] = []

    def wait(self, step: int) -> None:
        """Until all saves of other threads that were begun before are over. Later ones wait for this thread's then."""
        me = threading.current_thread()
        with self._lock:
            came = [one for one in self._came if one.thread is not me and one.thread.is_alive()]
            # Who was begun later and came sooner waits for us.
            behind = dict.fromkeys([*_begun_before(me), *(one.thread for one in came if me not in one.behind)])
            self._came = [*came, _Came(me, frozenset(behind))]
        with Lasting() as lasting:
            for one in behind:
                while not self._over(one, lasting.seconds):
                    lasting.look("step %s waits for the save before it: wait for its future before the next save", step)
                    one.join(ASIDE_MAX_S if lasting.announced else ASIDE_S)

    def _over(self, thread: threading.Thread, waited_s: float) -> bool:
        """Does it save no more? One that has not come yet is about to, unless it is in the middle of another writer's save."""
        if not thread.is_alive():
            return True
        inside = _inside(thread)
        if any(one.thread is thread for one in list(self._came)):
            return "save" not in inside
        return "_save_state_dict" in inside or waited_s >= ARRIVE_S


def _begun_before(me: threading.Thread) -> list[threading.Thread]:
    """Torch's threads that were started before this one, those too that have not got as far: `enumerate` has that order."""
    found = [one for one in threading.enumerate() if one is me or one.name.startswith(_EXECUTOR)]
    return found[: found.index(me)] if me.name.startswith(_EXECUTOR) else [one for one in found if one is not me]


def _inside(thread: threading.Thread) -> set[str]:
    """The functions of torch's module of saves that it is in."""
    found, frame = set(), sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") == _TORCHS:
            found.add(frame.f_code.co_name)
        frame = frame.f_back
    return found
