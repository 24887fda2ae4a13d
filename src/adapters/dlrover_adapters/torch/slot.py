"""The step slot: what a worker notes of its steps, in memory that it shares with its agent.

Native 64-bit integers, each in its own place, so that whoever reads in between sees an old one or a new one. The agent's half is
`dlrover_adapters.agent.slot`; the first is the step, which others read too.
"""

from __future__ import annotations

import mmap
import struct

BYTES = 80
PHASES = {"train": 0, "evaluation": 1, "eval": 1, "checkpoint": 2}
OTHER_PHASE = 3
SHARE = 0.1
"""Of the newest step's time in the usual one."""

_NOW = struct.Struct("=qqqq")  # step, when, usual time of a step, phase
_LONGEST = struct.Struct("=q")
_LONGEST_AT, _SIGNAL_AT = 32, 64


class Slot:
    """The worker's half: times in microseconds of the monotonic clock, which all processes of a host share."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BYTES)
        self._step, self._moved_us, self._usual_us, self._phase = -1, 0, 0, 0
        self._longest = [0, 0, 0, 0]
        self._stepped = False

    def step(self, number: int, now_us: int) -> None:
        """A step is done."""
        gap = now_us - self._moved_us
        if self._stepped:
            self._usual_us = gap if not self._usual_us else int(self._usual_us + SHARE * (gap - self._usual_us))
            if gap > self._longest[self._phase]:
                self._note_longest(gap)
        self._step, self._moved_us, self._stepped = number, now_us, True
        _NOW.pack_into(self._memory, 0, number, now_us, self._usual_us, self._phase)

    def phase(self, name: str, now_us: int) -> int:
        """Another phase begins; the number of the one that was. What it took is legal from now on."""
        was, gap = self._phase, now_us - self._moved_us
        if was and self._moved_us and gap > self._longest[was]:
            self._note_longest(gap)
        self._phase = PHASES.get(name, OTHER_PHASE)
        self._change(now_us)
        return was

    def back(self, phase: int, now_us: int) -> None:
        """The phase is over, and the one before it goes on."""
        self.phase("train", now_us)
        self._phase = phase
        self._change(now_us)

    def _change(self, now_us: int) -> None:
        # The way from here to the next step is no step's time.
        self._moved_us, self._stepped = now_us, False
        _NOW.pack_into(self._memory, 0, self._step, now_us, self._usual_us, self._phase)

    def _note_longest(self, gap: int) -> None:
        self._longest[self._phase] = gap
        _LONGEST.pack_into(self._memory, _LONGEST_AT + 8 * self._phase, gap)

    def shows_on(self, number: int) -> None:
        """A signal of this number makes the process show its stacks; 0: none does."""
        _LONGEST.pack_into(self._memory, _SIGNAL_AT, number)
