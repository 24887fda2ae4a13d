"""Why decisions wait, and since when: told once as it begins and once as it ends, whoever notices it."""

from __future__ import annotations

from collections.abc import Callable

import structlog

log = structlog.get_logger("dlrover.master")


class Trouble:
    """What is wrong with the log now. ``reason`` is empty while nothing is; ``since`` is in microseconds by ``now``, or 0."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.reason = ""
        self.since = 0

    def begin(self, reason: str, since: int | None = None) -> None:
        """Something is wrong, or still is, if in other words; ``since`` then, or since now."""
        if not self.reason:
            self.since = self._now() if since is None else since
            log.error("control plane degraded", reason=reason, remedy="training goes on; decisions wait for the log")
        self.reason = reason

    def end(self) -> int:
        """All is well; returns the microseconds for which it was not."""
        if not self.reason:
            return 0
        lasted = self._now() - self.since
        log.warning("control plane back", after_us=lasted)
        self.reason, self.since = "", 0
        return lasted
