"""Virtual time: what happens when, and in which order at one instant.

Instants are integer microseconds since the run began. What happens at one instant is a batch of its own: whatever that leads
to at the same instant comes after all of it. Within the batch each entity's doings keep their order; that of different
entities is theirs as they were noted, or, with a seed, one that follows from the seed, the instant and their names alone.
So a fault that is left out shuffles nobody else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

SECOND_US = 1_000_000

Doing = tuple[int, Callable[..., None], tuple[Any, ...]]


def key_of(name: str) -> int:
    """What stands for an entity when simultaneous doings are put in order."""
    return zlib.crc32(name.encode())


class Clock:
    """All that is still to happen. ``now`` is the instant that is being lived."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0
        self._salt = zlib.crc32(str(seed).encode()) if seed else 0
        self._instants: list[int] = []
        self._doings: dict[int, list[Doing]] = {}

    @property
    def now_s(self) -> float:
        """The same in seconds."""
        return self.now / SECOND_US

    @property
    def idle(self) -> bool:
        """Is nothing left to happen?"""
        return not self._instants

    def later(self, after_us: int, who: int, call: Callable[..., None], *args: Any) -> None:
        """Call it ``after_us`` from now, on behalf of the entity ``who``."""
        at = self.now + after_us
        doings = self._doings.get(at)
        if doings is None:
            self._doings[at] = [(who, call, args)]
            heappush(self._instants, at)
        else:
            doings.append((who, call, args))

    def at(self, instant: int, who: int, call: Callable[..., None], *args: Any) -> None:
        """Call it at an instant; at once, where that has passed."""
        self.later(max(0, instant - self.now), who, call, *args)

    def run(self, until: Callable[[], bool], limit_us: int) -> bool:
        """Live instant by instant until that holds; False: nothing is left to happen, or it is ``limit_us``."""
        while not until():
            if not self._instants or self._instants[0] > limit_us:
                return False
            self.now = at = heappop(self._instants)
            doings = self._doings.pop(at)
            if self._salt and len(doings) > 1:
                salt = (self._salt ^ at) & 0xFFFFFFFF
                doings.sort(key=lambda doing: ((doing[0] ^ salt) * 0x9E3779B1) & 0xFFFFFFFF)
            for _, call, args in doings:
                call(*args)
        return True
