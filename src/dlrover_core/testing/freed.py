"""Nodes that are freed, as a promise: nothing is lost that could be kept, and nobody is started meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dlrover_core.job import nodes
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.testing.promises import Look, Promise


class Freed(Promise):
    """A job suspended without nodes plans none. It releases none, nor does a set that gives its nodes back, before the workers
    have stopped, and before what was ordered to be written is on storage.

    Only whoever accepts a loss gives nodes back that cannot write.
    """

    name = "freed"

    def _planned(self, state: JobState, fact: nodes.NodePlanned, record: Record) -> None:
        assert not state.job.freed, f"{record.seq}: {fact.node} is planned for a job that is suspended without nodes"

    def _released(self, state: JobState, fact: nodes.NodeReleased, record: Record) -> None:
        if fact.reason not in (nodes.SUSPENDED, nodes.GIVEN_BACK):
            return
        suspension, name = state.job.suspension, state.set_of(fact.node)
        suspended, back = state.job.freed, name in state.queueing.back
        frees = suspended if fact.reason == nodes.SUSPENDED else back
        assert frees, f"{record.seq}: {fact.node} is {fact.reason}, and the job is {state.job.state}"
        self._stopped(state, fact.node, record)
        order = state.checkpoints.of(name).order
        lose = suspension is not None and suspension.lose
        assert order is None or lose, f"{record.seq}: {fact.node} is released, and step {order.step} is being written"

    @staticmethod
    def _stopped(state: JobState, name: str, record: Record) -> None:
        node, current = state.nodes.nodes.get(name), state.world.of(name)
        runs = node is not None and node.joined and current.member(name) is not None
        stopped = current.listed("stopped", name) or current.listed("finished", name)
        assert not runs or stopped, f"{record.seq}: {name} is released, and its workers have not stopped"

    looks: ClassVar[Mapping[type, Look]] = {
        nodes.NodePlanned: _planned,
        nodes.NodeReleased: _released,
    }
