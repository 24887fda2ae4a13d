"""Bugs planted on purpose, each a few lines of real code made wrong: the harness has to find every one of them.

Each is something that somebody could write on a bad day and that reads well. `planted` lets one be, for as long as its ``with``
block lasts; `LEVELS` of a bug are those of the harness at which its code runs at all. Those of `planted_groups` need jobs of
several groups: `GROUPS` is the level of the engine with these.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from dlrover_core.diagnosis import ladder
from dlrover_core.job import incidents, job, nodes, orders, progress, world
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import PAUSE, Wait
from dlrover_core.kernel import engine
from dlrover_core.kernel import state as kernel_state
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import AlreadyAppended, Appended
from dlrover_core.logs import memory
from dlrover_core.rules import desired, layout, membership, slots, worlds
from dlrover_core.rules import incidents as incident_rules
from dlrover_core.rules import silence as silence_rules
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import outbox, restoring, sessions, standby
from dlrover_core.sim.faults import ENGINE, LOOP
from dlrover_core.sim.run import Run
from dlrover_core.sim.scenario import Plan
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.invariants import DEFAULT, Together
from dlrover_core.testing.shrink import promise_of, shrink
from dlrover_core.testing.swarm import draw, draw_scenario
from dlrover_core.testing.swarm_groups import draw_groups

Patches = Iterator[AbstractContextManager[Any]]

NODES_MAX = 8
"""Of the jobs that seeds draw: small ones have every kind of trouble, and many of them are run in a second."""
TRIALS, FAULTS_LEFT_MAX = 1_000, 3
# A pause follows upon the third failure in a row, and what came before the first is a step. The other's four are what is left of
# those that its seed drew: none of them can be spared, though two of other kinds would do.
FAULTS_IT_TAKES = {"pause_skipped": 4, "resend_ignored": 4}
GROUPS = "groups"
LOOP_NODES_MAX, LOOP_STEPS_MAX = 4, 40
"""The same where every heartbeat of every agent is sent."""


class Bug(NamedTuple):
    """What is wrong, in a line, where its code runs, and the patches that make it so."""

    says: str
    levels: tuple[str, ...]
    patches: Callable[[], Patches]


BUGS: dict[str, Bug] = {}


def bug(name: str, *levels: str) -> Callable[[Callable[[], Patches]], Callable[[], Patches]]:
    """A bug, which its docstring describes, and the levels at which its code runs; none: at both."""

    def add(patches: Callable[[], Patches]) -> Callable[[], Patches]:
        BUGS[name] = Bug((patches.__doc__ or "").strip(), levels or (ENGINE, LOOP), patches)
        return patches

    return add


@contextlib.contextmanager
def planted(name: str) -> Iterator[Bug]:
    """Our code with one bug more."""
    one = BUGS[name]
    with contextlib.ExitStack() as stack:
        for patch in one.patches():
            stack.enter_context(patch)
        yield one


# ---- where the code of concerns is looked up


def evolves(cls: type, old: Any, new: Any) -> AbstractContextManager[Any]:
    """Another way to fold an event, in place of ``old``."""
    known = MODEL._evolve[cls]
    assert any(one is old for _, one in known), f"{old} does not fold {cls.__name__}"
    return mock.patch.dict(
        MODEL._evolve, {cls: tuple((slice_of, new if one is old else one) for slice_of, one in known)}
    )


def reacts(cls: type, old: Any, new: Any) -> AbstractContextManager[Any]:
    """Another reaction to an event, in place of ``old``."""
    known = MODEL._react[cls]
    assert old in known, f"{old} does not react to {cls.__name__}"
    return mock.patch.dict(MODEL._react, {cls: tuple(new if one is old else one for one in known)})


def _decides(cls: type, new: Any) -> AbstractContextManager[Any]:
    return mock.patch.dict(MODEL._decide, {cls: new})


def _rules(old: engine.Rules, **changes: Any) -> AbstractContextManager[Any]:
    """Rules' ``due`` or ``tick`` replaced."""
    changed = tuple(replace(one, **changes) if one is old else one for one in MODEL.rules)
    return mock.patch.object(MODEL, "rules", changed)


def nothing(*_: object) -> tuple[()]:
    """No event."""
    return ()


# ---- the kernel


@bug("lost_dedup")
def _lost_dedup() -> Patches:
    """A command that comes twice is decided twice."""
    yield mock.patch.object(engine.Engine, "_known", return_value=None)


@bug("gap_accepted")
def _gap_accepted() -> Patches:
    """A command whose predecessor was lost is decided as if nothing were missing."""
    known = engine.Engine._known

    def careless(self: Any, origin: Any) -> Any:
        answer = known(self, origin)
        return None if isinstance(answer, engine.Resend) else answer

    yield mock.patch.object(engine.Engine, "_known", careless)


@bug("snapshot_early", ENGINE)
def _snapshot_early() -> Patches:
    """A snapshot is taken before the last event that it is said to hold has been folded in."""
    true = engine.Engine.rebase

    def rebase(self: Any) -> bytes:
        base = kernel_state.unpack(JobState, self._base)
        early = MODEL.fold(list(self._beyond(base.seq))[:-1], base)
        true(self)
        return kernel_state.pack(early)

    yield mock.patch.object(engine.Engine, "rebase", rebase)


@bug("fold_begins_late", LOOP)
def _fold_begins_late() -> Patches:
    """After a snapshot folding begins one event late: the first one beyond it is left out."""
    true = kernel_state.unpack

    def unpack(cls: type, data: bytes) -> Any:
        made = true(cls, data)
        made.seq += 1
        return made

    yield mock.patch.object(restoring, "unpack", unpack)


@bug("slice_not_packed")
def _slice_not_packed() -> Patches:
    """A snapshot holds everything but one slice: which places had which budget left."""
    true = kernel_state.pack

    def pack(whole: object) -> bytes:
        return true(replace(whole, incidents=incidents.IncidentSlice()) if isinstance(whole, JobState) else whole)

    yield mock.patch.object(engine, "pack", pack)


# ---- worlds


@bug("world_formed_twice")
def _world_formed_twice() -> Patches:
    """The end of the last call is looked at though the world has formed meanwhile: it forms once more."""

    def waiting(whole: JobState) -> Iterator[str]:
        for group in whole.job.spec.groups if whole.job.forms else ():
            current = whole.world.at(group.name)
            if not (current.active and current.started) and not membership.end_pending(whole, group.name):
                yield group.name

    yield mock.patch.object(membership, "waiting_sets", waiting)


@bug("rank_held_twice")
def _rank_held_twice() -> Patches:
    """Whoever takes a vacated place is also seated among the late ones, and the last of these is left out."""
    true = layout.layout

    def seats(before: Any, ready: Any, count: int) -> list[nodes.Node]:
        ordered = true(before, ready, count)
        newcomer = next((node for node in ordered if node.node not in before and before), None)
        return [*ordered[:-1], newcomer] if newcomer is not None and len(ordered) > 1 else ordered

    yield mock.patch.object(layout, "layout", seats)


@bug("ghost_member")
def _ghost_member() -> Patches:
    """A node that is gone stays in its world: its loss ends no world."""
    for cls in (nodes.NodeGone, nodes.NodeLost, nodes.NodeFailed):
        yield reacts(cls, worlds._on_loss, nothing)


@bug("store_used_twice")
def _store_used_twice() -> Patches:
    """A store that has served a generation stays on offer."""

    def formed(slice_: world.WorldSlice, fact: world.WorldFormed, record: Record) -> None:
        with mock.patch.object(world, "_take_offer", nothing):
            world._on_formed(slice_, fact, record)

    yield evolves(world.WorldFormed, world._on_formed, formed)


@bug("finish_forgotten")
def _finish_forgotten() -> Patches:
    """Whoever takes over does not know who had finished already."""
    slice_of = next(
        one for one, _ in MODEL._evolve[world.WorldFormed] if one(MODEL.new()).__class__ is world.WorldSlice
    )

    def forget(slice_: world.WorldSlice, fact: object, record: Record) -> None:
        for current in slice_.worlds.values():
            current.finished = []
            current._memory = {}

    known = MODEL._evolve[job.LeaderStarted]
    yield mock.patch.dict(MODEL._evolve, {job.LeaderStarted: (*known, (slice_of, forget))})


@bug("last_call_forgotten")
def _last_call_forgotten() -> Patches:
    """The last call ends, and nobody wakes up for it."""
    yield _rules(worlds.RULES, due=lambda _state: None, tick=nothing)


# ---- nodes


@bug("incarnation_again")
def _incarnation_again() -> Patches:
    """A relaunched node gets the name of the one before it."""

    def plan(whole: JobState, group: str, index: int) -> Iterator[Any]:
        slot = whole.nodes.slots.get(f"{group}-{index}")
        incarnation = max(slot.incarnation, 0) if slot else 0
        yield nodes.NodePlanned(f"{group}-{index}-{incarnation}", group, index, incarnation, ())

    yield mock.patch.object(slots, "plan", plan)


@bug("told_though_released")
def _told_though_released() -> Patches:
    """A node that is released is not told so: it waits for a world like everybody."""
    true = desired._idle

    def idle(whole: JobState, node: nodes.Node, current: world.World, place: int) -> orders.Order:
        with mock.patch.object(node, "released", ""):
            return true(whole, node, current, place)

    yield mock.patch.object(desired, "_idle", idle)


@bug("place_not_free")
def _place_not_free() -> Patches:
    """A successor is launched while its predecessor may still run."""
    yield mock.patch.object(desired, "_taken", return_value={})


@bug("silence_counted")
def _silence_counted() -> Patches:
    """The master's own absence counts as the silence of everybody else."""
    yield evolves(job.MasterPaused, job._on_calm, nothing)
    yield evolves(job.LeaderStarted, job._on_calm, nothing)
    yield mock.patch.object(sessions.Sessions, "calm", nothing)


@bug("suspect_forgotten")
def _suspect_forgotten() -> Patches:
    """Who is silent is suspected, and nothing ever comes of it."""
    true = silence_rules._patience

    def patience(whole: JobState, node: nodes.Node) -> int | None:
        return None if node.state == "suspect" else true(whole, node)

    yield mock.patch.object(silence_rules, "_patience", patience)


# ---- incidents


@bug("budget_charged_twice")
def _budget_charged_twice() -> Patches:
    """A restart is charged when it is chosen, and again when its world forms."""

    def chosen(slice_: incidents.IncidentSlice, fact: incidents.ActionChosen, record: Record) -> None:
        incidents._on_chosen(slice_, fact, record)
        slice_.restarts += fact.action == ladder.RESTART_PROCESSES

    yield evolves(incidents.ActionChosen, incidents._on_chosen, chosen)


@bug("budget_not_given_back")
def _budget_not_given_back() -> Patches:
    """A restart that a node's death explains stays charged."""
    yield mock.patch.object(incidents, "_give_back_restarts", nothing)


@bug("incident_never_closed")
def _incident_never_closed() -> Patches:
    """The first step after a restart ends no incident."""
    yield reacts(progress.FirstStep, incident_rules._mended, nothing)


@bug("old_exit_opens")
def _old_exit_opens() -> Patches:
    """A worker's death that is told late, of a generation that is over, breaks the present one."""

    def on_exit(whole: JobState, fact: incidents.WorkerExited, record: Record) -> Iterator[Any]:
        newest = whole.world.of(fact.node)
        late = fact._replace(generation=newest.generation) if newest.active else fact
        yield from incident_rules._on_exit(whole, late, record)

    yield reacts(incidents.WorkerExited, incident_rules._on_exit, on_exit)


@bug("pause_skipped")
def _pause_skipped() -> Patches:
    """What held a world back ends, and nobody looks."""
    true = membership.next_by_time

    def next_by_time(whole: JobState, group: str, now: int) -> membership.NextWorld | Wait:
        called = membership.last_call(whole, group)
        skipped = membership.paused(whole, group) > 0 and now < called
        return Wait(group, PAUSE, "nobody looks", called) if skipped else true(whole, group, now)

    yield mock.patch.object(membership, "next_by_time", next_by_time)


# ---- masters, agents, logs: code that runs at the level of the loop only


@bug("log_ignores_tokens", LOOP)
def _log_ignores_tokens() -> Patches:
    """A log takes whatever it is given, of leaders that were deposed too, behind whatever they did not know of."""

    def land(self: Any, lead: Any, batch: Any) -> Any:
        kept = lead.kept
        done = kept.by_identity.get((batch.token, batch.counter))
        if done is not None:
            return AlreadyAppended(done)
        kept.batches.append(batch)
        kept.lasts.append(batch.last_seq)
        kept.by_identity[batch.token, batch.counter] = batch.last_seq
        self._bell.ring(lead.job)
        return Appended(batch.last_seq)

    yield mock.patch.object(memory.MemoryLog, "_land", land)


@bug("resend_ignored", LOOP)
def _resend_ignored() -> Patches:
    """An agent that is asked again for what it said goes on with what comes next."""
    yield mock.patch.object(outbox.Outbox, "expected", nothing)


@bug("outbox_not_rewound", LOOP)
def _outbox_not_rewound() -> Patches:
    """What was sent on a connection that is lost is not said again on the next one."""
    yield mock.patch.object(outbox.Outbox, "rewind", nothing)


@bug("standby_skips", LOOP)
def _standby_skips() -> Patches:
    """A standby that takes over goes on one record after the last one that it has not folded."""
    true = standby.caught_up

    async def caught_up(event_log: Any, name: str, whole: JobState) -> JobState:
        whole.seq += 1
        return await true(event_log, name, whole)

    yield mock.patch.object(standby, "caught_up", caught_up)


# ---- the search


class Found(NamedTuple):
    """Which seed found a bug, as which broken promise, and what it took at least. Not ``whole``: shrinking ran out of replays."""

    seed: int
    level: str
    promise: str
    drawn: int
    least: Plan
    replays: int
    whole: bool

    def told(self, first: int = 0) -> dict[str, Any]:
        """For a file of results, of a search that began with the seed ``first``."""
        return {
            "level": self.level,
            "seeds": self.seed - first + 1,
            "promise": self.promise,
            "drawn": self.drawn,
            "faults": [str(fault) for fault in self.least.faults],
            "replays": self.replays,
            "whole": self.whole,
            "token": self.least.token(),
        }


def run(plan: Plan) -> Run:
    """Run a plan at its level, every promise asked after every event. Raises what a broken one raises."""
    promises = Together(*DEFAULT)
    if plan.level == ENGINE:
        told = simulate(plan, watch=[promises], keep=False)
    else:
        from dlrover_core.testing.stage import play

        told = play(plan, watch=[promises])
    promises.end(told)
    return told


def drawn(seed: int, level: str) -> Plan:
    """The plan of a seed at a level."""
    if level == GROUPS:
        return draw_groups(seed, level=ENGINE)
    if level == ENGINE:
        return draw(seed, level=level, nodes=NODES_MAX)
    scenario = draw_scenario(seed, LOOP_NODES_MAX)
    small = replace(scenario, steps=min(scenario.steps, LOOP_STEPS_MAX), step_s=min(scenario.step_s, 1.0))
    return draw(seed, small, level=level)


def _broken(plan: Plan) -> Exception | None:
    try:
        run(plan)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a find
        return error
    return None


def search(name: str, seeds: Iterable[int], level: str = "") -> Found | None:
    """The first of these seeds that breaks a promise with this bug and none without it, shrunk; None: there is none."""
    level = level or BUGS[name].levels[0]
    for seed in seeds:
        plan = drawn(seed, level)
        with planted(name):
            error = _broken(plan)
        if error is None or _broken(plan) is not None:
            continue
        with planted(name):
            least = shrink(plan, run, error=error)
        return Found(seed, level, promise_of(error), len(plan.faults), least.plan, least.replays, whole=least.whole)
    return None


def all_bugs() -> dict[str, Bug]:
    """These, and those of other modules."""
    from tests.chaos import planted_groups

    return planted_groups.BUGS


def campaign(first: int, trials: int, results: Path, machine: dict[str, Any]) -> int:
    """Search for every bug, at the cheapest of its levels. How many were not found, or not shrunk; all else is in ``results``."""
    told: dict[str, Any] = {"campaign": "planted", "seed": first, "machine": machine, "trials": trials, "bugs": {}}
    missed = 0
    for name, one in all_bugs().items():
        began = time.monotonic()
        found = search(name, range(first, first + trials))
        shrunk = found is not None and len(found.least.faults) <= FAULTS_IT_TAKES.get(name, FAULTS_LEFT_MAX)
        missed += not shrunk
        told["bugs"][name] = {"says": one.says} | (found.told(first) if found is not None else {"seeds": 0})
        results.write_text(json.dumps(told, indent=1) + "\n")
        took_s = time.monotonic() - began
        what = f"seed {found.seed}, {len(found.least.faults)} faults, {found.promise}" if found else "not found"
        sys.stderr.write(f"{name}: {what} ({took_s:.1f} s)\n")
    return missed
