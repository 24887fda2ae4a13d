"""What must hold of planned changes after every event: see `Plans`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dlrover_core.job import checkpoints, job, nodes, notices, plans, world
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.spec import us
from dlrover_core.testing.promises import Look, Promise


class Plans(Promise):
    """Plans are numbered on, one of a group is open at a time, and each ends: its world forms, or it is dropped, in time.

    A boundary may be chosen only once all members are armed for this very plan. Once all of them wait there with a step in
    common, the next world goes on from that step; no other world claims to be planned. Whoever is to leave has left in time.
    """

    name = "plans"
    MARGIN_S = 5.0

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[str, plans.WorldPlanned] = {}
        self._armed: dict[str, set[str]] = {}
        self._held: dict[str, dict[str, tuple[int, ...]]] = {}
        self._going: dict[str, bool] = {}
        self._step: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self._led_at = 0

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class. Time is asked of what is not caused by anything: whoever decides late decides in that batch."""
        super().__call__(state, record)
        if record.cause or not state.job.live or type(record.event) in _LEADS:
            return
        margin = us(self.MARGIN_S)
        for node, deadline in self._leaving.items():
            late = record.at - max(deadline, self._led_at)
            assert late <= margin, f"{record.seq}: {node} was to leave {late / 1e6:.1f} s ago"
        for group, plan in self._open.items():
            waiting = group in self._step or plan.leaving
            late = record.at - max(plan.deadline, self._led_at)
            assert waiting or late <= margin, f"{record.seq}: plan {plan.plan} should be over since {late / 1e6:.1f} s"

    def _created(self, _state: JobState, _fact: job.JobCreated, record: Record) -> None:
        for group in list(self._open):
            self._over(group)
        self._step.clear()
        self._leaving.clear()
        self._led_at = record.at

    def _leads(self, _state: JobState, _fact: object, record: Record) -> None:
        self._led_at = record.at

    def _drained(self, _state: JobState, fact: plans.NodeDrained, _record: Record) -> None:
        if fact.deadline:
            self._leaving[fact.node] = min(fact.deadline, self._leaving.get(fact.node, fact.deadline))

    def _moved(self, _state: JobState, fact: notices.NoticeGiven, record: Record) -> None:
        """The platform takes the node away at another time, and that is when it has to have left."""
        if fact.moves and fact.node in self._leaving:
            self._leaving[fact.node] = max(record.at, fact.deadline)

    def _stays(self, _state: JobState, fact: notices.NoticeWithdrawn, _record: Record) -> None:
        if fact.stays:
            self._leaving.pop(fact.node, None)

    def _planned(self, state: JobState, fact: plans.WorldPlanned, record: Record) -> None:
        group = fact.group
        assert fact.plan == self._number + 1, f"{record.seq}: plan {fact.plan} follows {self._number}"
        assert group not in self._open, f"{record.seq}: plan {fact.plan} begins while {self._open[group]} is open"
        assert state.world.worlds[group].active, f"{record.seq}: plan {fact.plan} changes a world that does not run"
        members = state.world.worlds[group].places
        assert all(name in members for name in fact.leaving), f"{record.seq}: {fact.leaving} leave, and are no members"
        assert not any(name in members for name in fact.joining), f"{record.seq}: {fact.joining} join, and are members"
        self._number, self._open[group] = fact.plan, fact
        self._armed[group], self._held[group], self._going[group] = set(), {}, False
        for name in fact.leaving:
            self._leaving[name] = min(fact.deadline, self._leaving.get(name, fact.deadline))

    def _over(self, group: str) -> None:
        self._open.pop(group, None)
        self._armed.pop(group, None)
        self._held.pop(group, None)
        self._going.pop(group, None)

    def _dropped(self, _state: JobState, fact: plans.WorldPlanDropped, record: Record) -> None:
        plan = self._open.get(fact.group)
        assert plan is not None and plan.plan == fact.plan, f"{record.seq}: plan {fact.plan} is dropped, and not open"
        # Of a pause that is taken back one set may be there, and another not.
        pauses = not (plan.joining or plan.leaving)
        there = self._step.pop(fact.group, None) if pauses else self._step.get(fact.group)
        assert pauses or there is None, f"{record.seq}: plan {fact.plan} is dropped, and everybody was there"
        self._over(fact.group)

    def _arms(self, state: JobState, fact: checkpoints.RanksArmed, record: Record) -> None:
        group = state.set_of(fact.node)
        plan, current = self._open.get(group), state.world.of(fact.node)
        assert plan is not None and plan.plan == fact.plan, f"{record.seq}: {fact} for a plan that is over"
        assert current.active and fact.node in current.places, f"{record.seq}: {fact.node} is armed, and no member"
        self._armed[group].add(fact.node)

    def _asked(self, state: JobState, fact: plans.BoundaryAsked, record: Record) -> None:
        plan = self._open.get(fact.group)
        assert plan is not None and plan.plan == fact.plan, f"{record.seq}: {fact} for a plan that is over"
        missing = set(state.world.worlds[fact.group].places) - self._armed[fact.group]
        assert not fact.go or not missing, f"{record.seq}: the boundary may be chosen, and {missing} are not armed"
        self._going[fact.group] = fact.go

    def _holds(self, state: JobState, fact: checkpoints.StepsHeld, _record: Record) -> None:
        group = state.set_of(fact.node)
        plan, current = self._open.get(group), state.world.of(fact.node)
        if plan is None or fact.plan != plan.plan or not self._going[group] or fact.generation != current.generation:
            return
        held = self._held[group]
        held[fact.node] = fact.steps
        if set(held) == set(current.places):
            common = set.intersection(*(set(steps) for steps in held.values()))
            if common:
                self._step[group] = max(common)

    def _formed(self, _state: JobState, fact: world.WorldFormed, record: Record) -> None:
        step = self._step.pop(fact.group, None)
        if step is not None:
            told = fact.resume_step, fact.resume_tier
            assert told == (step, checkpoints.MEMORY), f"{record.seq}: everybody waited at {step}, {told} is resumed"
        claims = fact.reason.startswith("planned change")
        assert step is not None or not claims, (
            f"{record.seq}: generation {fact.generation} was not planned: {fact.reason}"
        )
        self._over(fact.group)

    def _suspended(self, _state: JobState, _fact: job.JobSuspended, _record: Record) -> None:
        """Whoever waits at the boundary of the pause is stopped there."""
        for group in [group for group, plan in self._open.items() if not (plan.joining or plan.leaving)]:
            self._step.pop(group, None)
            self._over(group)

    def _left(self, _state: JobState, fact: Any, _record: Record) -> None:
        self._leaving.pop(fact.node, None)

    def _scaled(self, state: JobState, fact: job.GroupScaled, _record: Record) -> None:
        """Whoever is wanted again stays."""
        leaving = state.plans.leaving
        for name in [name for name in self._leaving if group_of(name) == fact.group and name not in leaving]:
            assert int(name.rsplit("-", 2)[1]) < fact.nodes_max, f"{name} is forgotten, and not wanted"
            del self._leaving[name]

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        **dict.fromkeys((job.LeaderStarted, job.MasterPaused), _leads),
        job.GroupScaled: _scaled,
        job.JobSuspended: _suspended,
        plans.NodeDrained: _drained,
        notices.NoticeGiven: _moved,
        notices.NoticeWithdrawn: _stays,
        plans.WorldPlanned: _planned,
        plans.WorldPlanDropped: _dropped,
        plans.BoundaryAsked: _asked,
        checkpoints.RanksArmed: _arms,
        checkpoints.StepsHeld: _holds,
        world.WorldFormed: _formed,
        **dict.fromkeys(
            (nodes.NodeReleased, nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, nodes.NodeLeft, nodes.NodeSucceeded),
            _left,
        ),
    }


_LEADS = (job.LeaderStarted, job.MasterPaused)
