"""Why decisions wait, and since when: logged once as it begins and once as it ends."""

from __future__ import annotations

from collections.abc import Callable

import structlog

log = structlog.get_logger("dlrover.master")


class Trouble:
    """The present trouble with the log. ``reason``: empty: none; ``since``: microseconds by ``now``; 0: none."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self.reason = ""
        self.since = 0

    def begin(self, reason: str, since: int | None = None) -> None:
        """There is trouble, or there still is with other words; ``since`` then, or since now."""
        if not self.reason:
            self.since = self._now() if since is None else since
            log.error("control plane degraded", reason=reason, remedy="training goes on; decisions wait for the log")
        self.reason = reason

    def end(self) -> int:
        """The trouble is over; returns how long it lasted, in microseconds."""
        if not self.reason:
            return 0
        lasted = self._now() - self.since
        log.warning("control plane back", after_us=lasted)
        self.reason, self.since = "", 0
        return lasted
