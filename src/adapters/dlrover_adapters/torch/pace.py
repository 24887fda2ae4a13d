"""Which optimizer calls are training steps.

A script may step several optimizers per training step: GANs two, optimizer-in-backward one per parameter. One of them keeps
the *pace*: the first that is seen to repeat, because everything before its second call is one round. Another takes over when
it proves slower (a discriminator that is stepped five times per generator step), or when the pace falls silent.

All ranks count alike, because they call the same optimizers in the same order.
"""

from __future__ import annotations

import weakref

SLOWER_ROUNDS = 2
"""Rounds in a row in which the pace was called more than once between two calls of another: one may be a skipped step (AMP)."""

SILENT_CALLS = 100
"""Calls of one other optimizer without one of the pace: a new phase of training has begun. Above any critic's inner loop."""


class _Seen:
    __slots__ = ("calls", "pace_calls", "silent", "slower")

    def __init__(self) -> None:
        self.calls = 0
        self.pace_calls = 0  # of the pace, at the last call of this one
        self.silent = 0  # calls of this one since the last of the pace
        self.slower = 0  # rounds in a row that were slower than the pace


class Pace:
    """Tells for each optimizer call whether it completes a step."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[object, _Seen] = weakref.WeakKeyDictionary()
        self._pace: weakref.ref[object] | None = None
        self._first: weakref.ref[object] | None = None
        self._pace_calls = 0

    def called(self, optimizer: object) -> bool:
        """Count one call of ``optimizer``; True when it completes a training step."""
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _Seen()
        seen.calls += 1
        pace = self._pace() if self._pace is not None else None
        if pace is optimizer:
            self._pace_calls += 1
            return True
        if pace is None:
            return self._without_pace(optimizer, seen)
        return self._beside_pace(optimizer, seen)

    def _without_pace(self, optimizer: object, seen: _Seen) -> bool:
        """Until one repeats, the first one's call is the step: its agent waits for the first of all."""
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
            return True
        if seen.calls < 2:
            return False
        self._follow(optimizer)
        return True

    def _beside_pace(self, optimizer: object, seen: _Seen) -> bool:
        round_of_pace = self._pace_calls - seen.pace_calls
        seen.pace_calls = self._pace_calls
        seen.silent = seen.silent + 1 if round_of_pace == 0 else 0
        seen.slower = seen.slower + 1 if seen.calls > 1 and round_of_pace > 1 else 0
        if seen.slower < SLOWER_ROUNDS and seen.silent < SILENT_CALLS:
            return False
        self._follow(optimizer)
        return seen.silent >= SILENT_CALLS  # a slower one's call falls into a step that the old pace has counted

    def _follow(self, optimizer: object) -> None:
        self._pace = weakref.ref(optimizer)
        self._pace_calls += 1
