"""What agents tell with every heartbeat and no log holds: the port of those who listen.

A new leader begins without any of it and hears it again. What follows from it becomes commands (`findings`), which are said again
until the log has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.wire import Part


class Beat(NamedTuple):
    """An agent lives. ``step`` is the highest its workers have made (-1 unknown), ``lag_us`` its loop's lag.

    ``parts``: what concerns tell: `diagnosis.stall.Pulse`, `runtime.paces`, `runtime.keeping`.
    """

    generation: int
    step: int
    lag_us: int
    parts: tuple[Part, ...] = ()


class BeatSeen(NamedTuple):
    """The leader lives. ``parts``: what concerns tell: `runtime.keeping`."""

    token: int
    parts: tuple[Part, ...] = ()


class Levels:
    """Base class of a concern that takes in heartbeats. It ignores all of them itself."""

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """A heartbeat of a node. True: what follows from it is not to wait for the next look."""
        return False

    def forget(self, node: str) -> None:
        """The node is gone."""

    def findings(self, state: JobState, now_us: int) -> Iterable[Command]:
        """What is to be decided upon now, by the leader's clock; asked about once per heartbeat."""
        return ()

    def answer(self, state: JobState, node: str) -> Part | None:
        """What the node is told with the answer to its heartbeat."""
        return None

    def close(self) -> None:
        """This master leads no more."""
