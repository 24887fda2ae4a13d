"""What agents report with every heartbeat and no log holds (levels), and the port of the concerns that listen.

A new leader starts without levels and hears them again. Decisions that follow from them become commands (`findings`),
repeated until the log has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.wire import Part


class Beat(NamedTuple):
    """An agent's heartbeat.

    step:   highest step of its workers; -1: unknown
    lag_us: how late its event loop was
    parts:  parts of concerns: `diagnosis.stall.Pulse`, `runtime.paces`, `runtime.keeping`
    """

    generation: int
    step: int
    lag_us: int
    parts: tuple[Part, ...] = ()


class BeatSeen(NamedTuple):
    """The leader's answer to a heartbeat. ``parts``: of concerns, as in `runtime.keeping`."""

    token: int
    parts: tuple[Part, ...] = ()


class Levels:
    """Base class of a concern that listens to heartbeats. This one ignores them."""

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """Take in a node's heartbeat. True: a finding must not wait for the next look."""
        return False

    def reported(self, command: Command) -> None:
        """A node has sent a command, which is not decided yet."""

    def forget(self, node: str) -> None:
        """The node is gone."""

    def findings(self, state: JobState, now_us: int) -> Iterable[Command]:
        """Commands to submit now, by the leader's clock; asked for once per heartbeat interval."""
        return ()

    def answer(self, state: JobState, node: str) -> Part | None:
        """This concern's part of the answer to the node's heartbeat."""
        return None

    def close(self) -> None:
        """This master leads no more."""
