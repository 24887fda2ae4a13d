"""The agent's half of the step slot: anonymous memory that one worker writes into. The worker's is its framework's own."""

from __future__ import annotations

import mmap
import os
import struct

from dlrover_core.data import in_work
from dlrover_core.diagnosis.slots import SLOT_BYTES
from dlrover_core.diagnosis.stall import Pulse

BYTES = 88
_NOW = struct.Struct("=qqqq")  # step, when, usual time of a step, phase
_LONGEST = struct.Struct("=qqqq")  # pause that ended by itself, by phase
_SIGNAL = struct.Struct("=q")
_STEP = struct.Struct("=q")
_WAITED = struct.Struct("=q")  # when a loader process of the worker last said that it waits for data
_LONGEST_AT, _SIGNAL_AT, _TOTAL_AT, _WAITED_AT = 32, 64, 72, 80


def blank(fd: int) -> None:
    """Have the slot say what it says of a worker that has not begun."""
    os.pwrite(fd, _STEP.pack(StepSlot.NONE).ljust(BYTES, b"\0"), 0)
    in_work.blank(lambda data, at: os.pwrite(fd, data, at))


class StepSlot:
    """What one worker tells of its steps; nothing outlives its users."""

    NONE = -1

    def __init__(self) -> None:
        self.fd = os.memfd_create("dlrover-step", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        blank(self.fd)
        self._memory = mmap.mmap(self.fd, SLOT_BYTES)

    def read(self) -> int:
        """The last step, `NONE` before the first."""
        return int(_STEP.unpack_from(self._memory, 0)[0])

    def pulse(self, begun_us: int, now_us: int) -> Pulse:
        """All of it; ``begun_us`` is when the worker began, for one that has made no step."""
        step, moved_us, usual_us, phase = map(int, _NOW.unpack_from(self._memory, 0))
        longest = _LONGEST.unpack_from(self._memory, _LONGEST_AT)
        (total,) = _SIGNAL.unpack_from(self._memory, _TOTAL_AT)
        (waited_us,) = _WAITED.unpack_from(self._memory, _WAITED_AT)
        phase = min(max(phase, 0), len(longest) - 1)  # whatever a broken worker writes
        idle_us = max(0, now_us - max(moved_us or begun_us, waited_us))
        return Pulse(step, idle_us, max(0, usual_us), max(0, int(longest[phase])), phase, max(0, int(total)))

    def in_work(self, error: str) -> str:
        """What a dead worker had in work of its data, as `InWork.text`; empty: nothing. ``error``: what it said of its end."""
        found = in_work.found(self._memory, error)
        return found.text if found is not None else ""

    @property
    def shows_on(self) -> int:
        """The signal on which the worker shows its stacks; 0: none is known to be its own."""
        return max(0, int(_SIGNAL.unpack_from(self._memory, _SIGNAL_AT)[0]))

    def close(self) -> None:
        """Give the memory back once the worker has, too."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1
