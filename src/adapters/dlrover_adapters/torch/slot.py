"""The step slot: what a worker notes of its steps, in memory that it shares with its agent.

Native 64-bit integers, each in its own place, so that whoever reads in between sees an old one or a new one. The agent's half is
`dlrover_adapters.agent.slot`; the first is the step, which others read too.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading

from dlrover_core.data.in_work import Notes
from dlrover_core.diagnosis.slots import SLOT_BYTES

PHASES = {"train": 0, "evaluation": 1, "eval": 1, "checkpoint": 2}
OTHER_PHASE = 3
SHARE = 0.1
"""Of the newest step's time in the usual one."""

_NOW = struct.Struct("=qqqq")  # step, when, usual time of a step, phase
_LONGEST = struct.Struct("=q")
_LONGEST_AT, _SIGNAL_AT, _TOTAL_AT, _WAITED_AT = 32, 64, 72, 80


class Slot:
    """The worker's half: times in microseconds of the monotonic clock, which all processes of a host share."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, SLOT_BYTES)
        self.notes = Notes(self.memory, os.getpid())
        # Its own descriptor, for children that are spawned: the caller closes the other.
        self.fd = os.dup(fd)
        self._step, self._moved_us, self._usual_us, self._phase = -1, 0, 0, 0
        self._longest = [0, 0, 0, 0]
        self._stepped, self._outside_us = False, 0
        self._open: list[int] = []
        # Phases may come from several threads; and a signal handler of the script's may announce one in the middle of a step.
        self._lock = threading.RLock()

    def step(self, number: int, now_us: int) -> None:
        """A step is done. What it took is the time since the one before, less that of phases in between."""
        with self._lock:
            gap = max(1, self._outside_us + now_us - self._moved_us)
            if self._stepped:
                self._usual_us = (
                    gap if not self._usual_us else max(1, int(self._usual_us + SHARE * (gap - self._usual_us)))
                )
                self._note_longest(gap)
            self._stepped, self._outside_us = True, 0
            self._step, self._moved_us = number, now_us
            self._tell()

    def phase(self, name: str, now_us: int) -> int:
        """A phase begins, within those that are under way or beside them; its number, for `back`."""
        number = PHASES.get(name, OTHER_PHASE)
        with self._lock:
            self._open.append(number)
            self._change(now_us)
        return number

    def back(self, number: int, now_us: int) -> None:
        """A phase of this number is over. Another thread's that began later, or another of this number, goes on."""
        with self._lock:
            if number in self._open:
                del self._open[len(self._open) - 1 - self._open[::-1].index(number)]
            self._change(now_us)

    def _change(self, now_us: int) -> None:
        """The phase is that which began last of those under way. What the one before took is legal from now on."""
        gap = now_us - self._moved_us
        if self._phase and self._moved_us:
            self._note_longest(gap)
        elif self._stepped:
            self._outside_us += gap
        self._phase = self._open[-1] if self._open else 0
        self._moved_us = now_us
        self._tell()

    def _tell(self) -> None:
        _NOW.pack_into(self.memory, 0, self._step, self._moved_us, self._usual_us, self._phase)

    def _note_longest(self, gap: int) -> None:
        if gap > self._longest[self._phase]:
            self._longest[self._phase] = gap
            _LONGEST.pack_into(self.memory, _LONGEST_AT + 8 * self._phase, gap)

    def total(self, number: int) -> None:
        """The script means to make so many steps; 0: nobody knows."""
        _LONGEST.pack_into(self.memory, _TOTAL_AT, number)

    def waited(self, now_us: int) -> None:
        """A process that draws data for this worker waits for them now. Its own place: it is written beside the worker."""
        _LONGEST.pack_into(self.memory, _WAITED_AT, now_us)

    def shows_on(self, number: int) -> None:
        """A signal of this number makes the process show its stacks; 0: none does."""
        _LONGEST.pack_into(self.memory, _SIGNAL_AT, number)
