"""How long to wait before the API server is asked again: full jitter, or what the server itself asks for.

A server that comes back finds thousands of clients; full jitter spreads them (Brooker, "Exponential Backoff and Jitter", 2015).
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_S, LONGEST_S = 0.2, 20.0
"""Bounds of the pause: under 21 s, which is kopf's longest."""
CALM_S = 60.0
ASKED_MAX_S = 60.0
"""The longest pause that a server's Retry-After is given."""


class BackOff:
    """Pauses between tries. ``chance`` gives numbers from 0 to 1; times are seconds of any one steady clock."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._failures = 0
        self._well_since: float | None = None

    def failed(self, now: float, retry_after_s: float | None = None) -> float:
        """A try has failed: how long to wait. A minute without failure before it makes it the first one."""
        if self._well_since is not None and now - self._well_since >= CALM_S:
            self._failures = 0
        self._well_since = None
        ceiling: float = min(LONGEST_S, FIRST_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        pause = ceiling * self._chance()
        if retry_after_s is None:
            return pause
        # Not all who were sent away at once may come back at once.
        return min(retry_after_s, ASKED_MAX_S) + min(pause, FIRST_S)

    def went_well(self, now: float) -> None:
        """A try has succeeded, or a stream still delivers."""
        if self._well_since is None:
            self._well_since = now
