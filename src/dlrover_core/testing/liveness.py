"""Promises about time: what can go on goes on soon, and after the last fault everything runs again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dlrover_core.job import checks, incidents, job, nodes, plans, progress, queueing, world
from dlrover_core.job.sets import sets_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.rules import coupling, membership
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
            self._groups = tuple(state.sets.all(state.job.spec))
            self._again_at = record.at
        for group in self._groups:
            current = state.world.at(group)
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
        if not state.job.forms or group in state.checks.running or group in state.job.given_up:
            return False
        if group in state.queueing.back:
            return False  # nodes that still write to storage are released then
        groups, spec = state.sets.groups(group), state.job.spec
        floors = {one: spec.group(one).floor if spec.group(one).coupled else 1 for one in groups}
        # Never more than these are ready, and counting them anew after every event takes most of a large run's time.
        if any(state.nodes.tally.ready.get(one, 0) < floors[one] for one in groups):
            return False
        away = membership.departing(state, group)
        ready = [node for node in state.nodes.in_set(group) if node.ready and node.node not in away]
        if any(one.end_pending and state.set_of(one.node) == group for one in state.incidents.by_number.values()):
            return False
        for name in groups:
            unit, there = spec.group(name).unit, sum(node.group == name for node in ready)
            if there // unit * unit < floors[name]:
                return False
        leads = [node for node in ready if node.group == groups[0]]
        return not state.sets.stored(group) or any(state.world.offers.get(node.node) for node in leads)

    @staticmethod
    def _whole(group: str, last: world.World, state: JobState) -> bool:
        """Is everybody there who was in the last world, and who leads it?"""
        most = {one.name: one.nodes_max for one in state.job.spec.groups}
        there = [state.nodes.nodes.get(member.node) for member in last.members]
        whole = all(node is not None and node.ready and node.index < most[node.group] for node in there)
        stored = state.sets.stored(group)
        return whole and bool(there) and (not stored or bool(state.world.offers.get(last.members[0].node)))


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
        self._could = tuple(group for group in membership.waiting_sets(state) if self._can(state, group))

    @staticmethod
    def _can(state: JobState, group: str) -> bool:
        enough = all(
            here >= coupling.floor_of(state, group, one) for one, here in coupling.ready_by_group(state, group)
        )
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
    call, a pause. While a job is suspended nobody waits for it, nor during the pause of a set that gave its nodes back: the pause
    was chosen before there was room, and ends by itself.
    """

    name = "liveness"
    within_s: float = 0.0

    def __init__(self) -> None:
        self._began = 0
        self._idle_since = -1
        self._groups: dict[str, bool] = {}
        self._idle: list[tuple[int, int]] = []
        self._pauses: list[tuple[int, int]] = []
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
        spec = JobSpec.from_json(fact.spec)
        self._groups = dict.fromkeys(sets_of(fact.spec).all(spec), False)
        self._began = self._began or record.at
        self._halted = False
        self._goes(record.at)
        self._stands(record.at)

    def _stops(self, _state: JobState, fact: Any, record: Record) -> None:
        self._groups[fact.group] = False
        self._stands(record.at)

    def _steps(self, state: JobState, fact: progress.FirstStep, record: Record) -> None:
        self._groups[state.set_of(fact.node)] = True
        if all(self._groups.values()):
            self._goes(record.at)

    def _given_up(self, _state: JobState, fact: job.SetGivenUp, record: Record) -> None:
        self._groups.pop(fact.set, None)
        if all(self._groups.values()):
            self._goes(record.at)

    def _place_given_up(self, state: JobState, fact: nodes.NodeReleased, record: Record) -> None:
        name = state.set_of(fact.node)
        if fact.reason == "given up" and state.sets.place(name) >= 0:
            self._groups.pop(name, None)
            if all(self._groups.values()):
                self._goes(record.at)

    def _gives_back(self, _state: JobState, fact: queueing.GivenBack, record: Record) -> None:
        self._pauses.append((record.at, fact.until))

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
        job.SetGivenUp: _given_up,
        nodes.NodeReleased: _place_given_up,
        **dict.fromkeys((*Absorbing.ENDS, job.JobStopping, job.JobSuspended), _halts),
        job.JobResumed: _resumes,
        queueing.GivenBack: _gives_back,
    }

    def end(self, run: Any) -> None:
        """See the class."""
        room_s = run.plan.scenario.room_s if run.plan.scenario.short else 0.0
        over_s = max(self._began / 1e6 + room_s, *(self._heals_s(run, fault, seq) for fault, seq in run.struck), 0.0)
        last = self._began + us(run.virtual_s)
        idle = [*self._idle, *([(self._idle_since, max(last, self._idle_since))] if self._idle_since >= 0 else [])]
        # Waiting is measured on the leaders' clocks, and what makes those jump may do so in the midst of it.
        jumps_s = sum(abs(amount(fault)) for fault, _ in run.struck if fault.kind in ("clock_jump", "clock_skew"))
        within_s = (self.within_s or _patience_s(run)) + jumps_s
        for since, until in idle:
            waited_s = _outside_s(self._pauses, max(since / 1e6, over_s), until / 1e6)
            assert waited_s <= within_s, (
                f"nobody trained for {waited_s:.1f} s after the last fault was over; {within_s:g} s are enough"
            )

    def _heals_s(self, run: Any, fault: Fault, seq: int) -> float:
        """When a fault is over, on the leader's clock."""
        at = run.records[seq - 1].at if 0 < seq <= len(run.records) else self._began
        lasts_s = amount(fault) if KINDS[fault.kind].unit == "s" else LASTS_S
        if fault.kind in ("lose_host", "dark_host"):
            lasts_s += REPAIR_S
        elif fault.kind == "preempt_later":
            lasts_s *= 2
        elif fault.kind == "create_stuck":
            # All of them, one after the other, in the same place.
            stuck = sum(amount(one) for one, _ in run.struck if one.kind == fault.kind)
            lasts_s = stuck * run.state.job.spec.launch_s
        return float(at / 1e6 + lasts_s)


def _outside_s(pauses: list[tuple[int, int]], since_s: float, until_s: float) -> float:
    """How much of this time lies in none of the pauses."""
    outside_s, at_s = 0.0, since_s
    for begin, end in sorted(pauses):
        outside_s += max(0.0, min(begin / 1e6, until_s) - at_s)
        at_s = max(at_s, end / 1e6)
    return outside_s + max(0.0, until_s - at_s)


def _patience_s(run: Any) -> float:
    """Every patience that the job has, once."""
    spec, scenario = run.state.job.spec, run.plan.scenario
    waits = spec.silence_s + spec.unreachable_s + spec.mass_silence_s + spec.launch_s + spec.last_call_s
    # What one set of a job waits for may be held by another one of it.
    waits += spec.gang_s * 1.25 if scenario.groups else 0.0
    works = scenario.boot_s + scenario.start_s + scenario.load_s + scenario.notice_s + 2 * scenario.step_s
    return float(waits + spec.stop_grace_s + spec.kill_wait_s + spec.restart_pause_s + works)
