"""Promises about time: what can go on goes on soon, and after the last fault everything runs again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dlrover_core.job import checks, incidents, job, names, nodes, plans, progress, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.rules import membership
from dlrover_core.sim.faults import KINDS, Fault, amount
from dlrover_core.sim.striking import REPAIR_S
from dlrover_core.spec import JobSpec, us
from dlrover_core.testing.promises import Look, Promise
from dlrover_core.testing.recovering import Absorbing

# How long a fault lasts that says how much, or how often, and not how long.
LASTS_S = 60.0


class Prompt(Promise):
    """Enough nodes are there, with a store: then a world forms before the last call is over, or a pause.

    Where everybody of the last world is there nobody waits for a last call. Who comes for the first time may prolong it.
    """

    name = "prompt"
    MARGIN_S = 5.0

    def __init__(self) -> None:
        self._groups: tuple[str, ...] = ()
        self._able_since: dict[str, int] = {}
        self._until: dict[str, int] = {}
        self._again_at = 0

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        again = type(record.event) in _CALLS_AGAIN
        for group, until in self._until.items():
            late_s = (record.at - until) / 1e6
            assert again or record.cause or late_s <= 0, (
                f"{record.seq}: no world of {group} formed, {late_s:.1f} s after it could"
            )
        if again:
            self._groups = tuple(group.name for group in state.job.spec.groups)
            self._again_at = record.at
        for group in self._groups:
            current = state.world.worlds.get(group) or world.World()
            if current.active or not self._able(group, state):
                if self._until:
                    self._able_since.pop(group, None)
                    self._until.pop(group, None)
            else:
                since = self._able_since.setdefault(group, record.at)
                self._until[group] = self._latest(group, current, max(since, self._again_at), state)

    def _latest(self, group: str, last: world.World, since: int, state: JobState) -> int:
        spec = state.job.spec
        waits_s = 0.0 if self._whole(group, last, state) else spec.last_call_s
        return max(since, state.incidents.of(group).not_before(spec.restart_pause_s)) + us(waits_s + self.MARGIN_S)

    @staticmethod
    def _able(group: str, state: JobState) -> bool:
        spec, away = state.job.spec.group(group), membership.departing(state, group)
        if not state.job.forms or state.nodes.tally.ready.get(group, 0) < spec.floor or group in state.checks.running:
            return False
        here = [node for node in state.nodes.nodes.values() if node.group == group and node.ready]
        ready = [node.node for node in here if node.node not in away]
        held = any(one.held and one.group == group for one in state.incidents.by_number.values())
        return (
            not held
            and len(ready) // spec.unit * spec.unit >= spec.floor
            and any(state.world.offers.get(node) for node in ready)
        )

    @staticmethod
    def _whole(group: str, last: world.World, state: JobState) -> bool:
        """Is everybody there who was in the last world, and who leads it?"""
        most = state.job.spec.group(group).nodes_max
        there = [state.nodes.nodes.get(member.node) for member in last.members]
        whole = all(node is not None and node.ready and node.index < most for node in there)
        return whole and bool(there) and bool(state.world.offers.get(last.members[0].node))


_CALLS_AGAIN = frozenset(
    (job.JobCreated, job.LeaderStarted, job.MasterPaused, job.JobResumed, job.GroupScaled, nodes.NodeJoined)
)


class Reasons(Promise):
    """At the end of every moment a group without a world has a reason: a world that can form forms in that very moment."""

    name = "reasons"

    def __init__(self) -> None:
        self._at = 0
        self._could: tuple[str, ...] = ()

    def _look(self, state: JobState, _fact: object, record: Record) -> None:
        late = self._could if record.at > self._at else ()
        assert not late, f"{record.seq}: a world of {late[0]} could form before, and nobody looked"
        self._at = record.at
        self._could = tuple(group for group in membership.waiting_groups(state) if self._can(state, group))

    @staticmethod
    def _can(state: JobState, group: str) -> bool:
        enough = state.nodes.tally.ready.get(group, 0) >= state.job.spec.group(group).floor
        return enough and isinstance(membership.next_by_time(state, group, state.at), membership.NextWorld)

    looks: ClassVar[Mapping[type, Look]] = dict.fromkeys(
        {
            incidents.ActionChosen,
            *(kind for facts in (job, nodes, world, checks, plans) for kind in facts.FACTS.evolve),
        },
        _look,
    )


class Liveness(Promise):
    """Once the last fault is over, the job trains again within ``within_s``, or has ended.

    ``within_s`` is, unless set, every patience of the spec once: a node that nobody hears of, one whose launch was lost, a last
    call, a pause. While a job is suspended nobody waits for it.
    """

    name = "liveness"
    within_s: float = 0.0

    def __init__(self) -> None:
        self._began = 0
        self._idle_since = -1
        self._groups: dict[str, bool] = {}
        self._idle: list[tuple[int, int]] = []
        self._halted = True

    def _stands(self, at: int) -> None:
        """From now on nobody trains, though somebody should."""
        if self._idle_since < 0 and not self._halted:
            self._idle_since = at

    def _goes(self, at: int) -> None:
        if self._idle_since >= 0:
            self._idle.append((self._idle_since, at))
            self._idle_since = -1

    def _created(self, _state: JobState, fact: job.JobCreated, record: Record) -> None:
        self._groups = {group.name: False for group in JobSpec.from_json(fact.spec).groups}
        self._began = self._began or record.at
        self._halted = False
        self._goes(record.at)
        self._stands(record.at)

    def _stops(self, _state: JobState, fact: Any, record: Record) -> None:
        self._groups[fact.group] = False
        self._stands(record.at)

    def _steps(self, _state: JobState, fact: progress.FirstStep, record: Record) -> None:
        self._groups[names.group_of(fact.node)] = True
        if all(self._groups.values()):
            self._goes(record.at)

    def _halts(self, _state: JobState, _fact: object, record: Record) -> None:
        self._goes(record.at)
        self._halted = True

    def _resumes(self, _state: JobState, _fact: object, record: Record) -> None:
        self._halted = False
        self._stands(record.at)

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        world.WorldFormed: _stops,
        world.WorldDissolved: _stops,
        progress.FirstStep: _steps,
        **dict.fromkeys((*Absorbing.ENDS, job.JobStopping, job.JobSuspended), _halts),
        job.JobResumed: _resumes,
    }

    def end(self, run: Any) -> None:
        """See the class."""
        over_s = max(self._began / 1e6, *(self._heals_s(run, fault, seq) for fault, seq in run.struck), 0.0)
        last = self._began + us(run.virtual_s)
        idle = [*self._idle, *([(self._idle_since, max(last, self._idle_since))] if self._idle_since >= 0 else [])]
        # Waiting is measured on the leaders' clocks, and what makes those jump may do so in the midst of it.
        jumps_s = sum(abs(amount(fault)) for fault, _ in run.struck if fault.kind in ("clock_jump", "clock_skew"))
        within_s = (self.within_s or _patience_s(run)) + jumps_s
        for since, until in idle:
            waited_s = until / 1e6 - max(since / 1e6, over_s)
            assert waited_s <= within_s, (
                f"nobody trained for {waited_s:.1f} s after the last fault was over; {within_s:g} s are enough"
            )

    def _heals_s(self, run: Any, fault: Fault, seq: int) -> float:
        """When a fault is over, on the leader's clock."""
        at = run.records[seq - 1].at if 0 < seq <= len(run.records) else self._began
        lasts_s = amount(fault) if KINDS[fault.kind].unit == "s" else LASTS_S
        if fault.kind == "lose_host":
            lasts_s += REPAIR_S
        elif fault.kind == "create_stuck":
            # All of them, one after the other, in the same place.
            stuck = sum(amount(one) for one, _ in run.struck if one.kind == fault.kind)
            lasts_s = stuck * run.state.job.spec.launch_s
        return float(at / 1e6 + lasts_s)


def _patience_s(run: Any) -> float:
    """Every patience that the job has, once."""
    spec, scenario = run.state.job.spec, run.plan.scenario
    waits = spec.silence_s + spec.unreachable_s + spec.mass_silence_s + spec.launch_s + spec.last_call_s
    works = scenario.boot_s + scenario.start_s + scenario.load_s + scenario.notice_s + 2 * scenario.step_s
    return float(waits + spec.stop_grace_s + spec.kill_wait_s + spec.restart_pause_s + works)
