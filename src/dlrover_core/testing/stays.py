"""Withdrawn notices, as a promise: a node that its platform leaves where it is stays, and nobody is started in its stead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dlrover_core.job import job, nodes, notices, plans
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.testing.promises import Look, Promise


class Stays(Promise):
    """A notice is withdrawn only of a node that has one. If the node was to leave because of it alone, it stays.

    At the end of that moment no planned change takes the node out, and no successor is wanted beside it. It is released as
    a leaving node only after it was told to leave again, by its platform or by a person.
    """

    name = "stays"

    def __init__(self) -> None:
        self._noticed: set[str] = set()
        self._staying: set[str] = set()
        self._asked: list[str] = []

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        if self._asked and not record.cause:
            for name in self._asked:
                self._alone(state, name, record)
            self._asked.clear()
        super().__call__(state, record)

    @staticmethod
    def _alone(state: JobState, name: str, record: Record) -> None:
        node = state.nodes.nodes.get(name)
        if node is None or node.released or node.state not in COMING or name in state.plans.leaving:
            return  # it has gone meanwhile, or was told to leave
        plan = state.plans.by_group.get(state.set_of(name))
        assert plan is None or name not in plan.leaving, f"{record.seq}: {name} stays, and plan {plan} takes it out"
        besides = [
            one.node
            for one in state.nodes.of(node.group)
            if one.index == node.index and one is not node and not one.released and one.state in COMING
        ]
        assert not besides, f"{record.seq}: {name} stays, and {besides} are wanted beside it"

    def _given(self, _state: JobState, fact: notices.NoticeGiven, _record: Record) -> None:
        self._noticed.add(fact.node)

    def _withdrawn(self, _state: JobState, fact: notices.NoticeWithdrawn, record: Record) -> None:
        assert fact.node in self._noticed, f"{record.seq}: the notice of {fact.node} is withdrawn, which has none"
        self._noticed.discard(fact.node)
        if fact.stays:
            self._staying.add(fact.node)
            self._asked.append(fact.node)

    def _leaves(self, _state: JobState, fact: plans.NodeDrained, _record: Record) -> None:
        self._staying.discard(fact.node)

    def _scaled(self, _state: JobState, _fact: job.GroupScaled, _record: Record) -> None:
        self._staying.clear()

    def _released(self, _state: JobState, fact: nodes.NodeReleased, record: Record) -> None:
        leaves = fact.reason in (nodes.DRAINED, nodes.LEAVING)
        assert not (leaves and fact.node in self._staying), (
            f"{record.seq}: {fact.node} is {fact.reason}, and was to stay"
        )
        self._over(_state, fact, record)

    def _over(self, _state: JobState, fact: nodes.NodeReleased | nodes.NodeGone, _record: Record) -> None:
        self._noticed.discard(fact.node)
        self._staying.discard(fact.node)

    def _created(self, _state: JobState, _fact: job.JobCreated, _record: Record) -> None:
        for known in (self._noticed, self._staying, self._asked):
            known.clear()

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        job.GroupScaled: _scaled,
        notices.NoticeGiven: _given,
        notices.NoticeWithdrawn: _withdrawn,
        plans.NodeDrained: _leaves,
        nodes.NodeReleased: _released,
        nodes.NodeGone: _over,
    }
