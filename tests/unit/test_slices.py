"""Every slice says which of its formulas a spoilt state breaks, by its symbols and with the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
from drive import Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.job import checkpoints, operations, plans, world
from dlrover_core.job.checks import ReportCheck
from dlrover_core.job.incident_lifecycle import Action
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.rules.model import MODEL
from dlrover_core.testing.invariants import Slices, watched


def training() -> JobState:
    """Two nodes train; one has finished."""
    drive = Drive().up()
    drive.do(world.ReportFinished("worker-1-0", 1, 7, "no room", 5))
    return drive.state


def planned() -> JobState:
    """A drain is at its boundary: both nodes are armed, one waits there."""
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.do(checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 2, 10, 3, True, 1 << 30, 2))
    drive.do(operations.DrainNode("worker-1-0", "a bad one"))
    drive.join("worker-1-1")
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(checkpoints.ReportArmed(node, 1))
    drive.do(checkpoints.ReportHeld("worker-0-0", 1, (7,), 1))
    assert list(drive.state.plans.by_group["worker"].at_boundary) == ["worker-0-0"]
    return drive.state


def checked() -> JobState:
    """Four nodes are checked in pairs; one has reported."""
    drive = Drive(precheck="full", nodes_max=4)
    for one in range(4):
        drive.join(f"worker-{one}-0")
    drive.do(ReportCheck("worker-1-0", 1, 1, ok=True))
    assert len(drive.state.checks.running["worker"].groups) == 2
    return drive.state


def saved() -> JobState:
    """A generation has ended with a step in memory that is being written; the next one saves, too."""
    drive = Drive(nodes_max=2, nproc=1).up()
    keeping = checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 2, 10, 3, True, 1 << 30, 2)
    drive.do(keeping)
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 10, 2, 1, 1))
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 20, 2, 1, 1))
    drive.exit("worker-1-0", 1, -9, step=27)
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(checkpoints.ReportHeld(node, 1, (24, 26), 0, ((0, 26),)))
    drive.do(keeping._replace(generation=2))
    kept = drive.state.checkpoints.of("worker")
    assert (kept.order is not None, kept.now is not None, kept.ended is not None) == (True, True, True)
    return drive.state


def failed() -> JobState:
    """A worker died twice and everybody was restarted twice."""
    drive = Drive().up()
    for step in (60, 90):
        drive.wait(60)
        drive.exit("worker-1-0", 3, 1, "ValueError: no", step=step)
        drive.run(step + 1)
    assert drive.state.incidents.restarts == 2
    return drive.state


def _world(**changes: Any) -> Callable[[JobState], None]:
    return lambda state: _set(state.world.worlds, "worker", **changes)


def _plan(**changes: Any) -> Callable[[JobState], None]:
    return lambda state: _set(state.plans.by_group, "worker", **changes)


def _check(**changes: Any) -> Callable[[JobState], None]:
    return lambda state: _set(state.checks.running, "worker", **changes)


def _kept(**changes: Any) -> Callable[[JobState], None]:
    return lambda state: _set(state.checkpoints.groups, "worker", **changes)


def _held(**changes: Any) -> Callable[[JobState], None]:
    def spoil(state: JobState) -> None:
        kept = state.checkpoints.groups["worker"]
        assert kept.ended is not None
        kept.ended = replace(kept.ended, **changes)

    return spoil


def _order(**changes: Any) -> Callable[[JobState], None]:
    def spoil(state: JobState) -> None:
        kept = state.checkpoints.groups["worker"]
        assert kept.order is not None
        kept.order = replace(kept.order, **changes)

    return spoil


def _incidents(**changes: Any) -> Callable[[JobState], None]:
    return lambda state: [setattr(state.incidents, name, value) for name, value in changes.items()] and None


def _set(parts: dict[str, Any], name: str, **changes: Any) -> None:
    parts[name] = replace(parts[name], **changes)


def _members(state: JobState) -> None:
    current = state.world.worlds["worker"]
    _set(state.world.worlds, "worker", members=(current.members[0], current.members[1]._replace(first_rank=3)))


def _waiting(state: JobState) -> None:
    newest = state.incidents.by_number[2]
    newest.actions.append(Action(ladder.AWAIT_EVIDENCE, "worker-1-0", "waiting"))


def _both(state: JobState) -> None:
    state.checks.good["worker"] = {ONE: 1}
    state.checks.unclear[ONE] = 1


def _stranger(state: JobState) -> None:
    plan = state.plans.by_group["worker"]
    state.plans.by_group["other"] = replace(plan)


class Spoilt(NamedTuple):
    """A good state, what is done to it, and how the violation begins that names it."""

    of: str
    good: Callable[[], JobState]
    spoil: Callable[[JobState], None]
    says: str


ONE = "worker-0-0"
SPOILT = (
    Spoilt("world", training, _world(before=2), "worker: count: g = 1, b = 2, 2 members"),
    Spoilt("world", training, _world(members=()), "worker: count: g = 1, b = 0, 0 members"),
    Spoilt("world", training, _world(store=""), "worker: life: active with 2 members and the store ''"),
    Spoilt("world", training, _world(called_at=10**12), "worker: life: the last call counts from 1000000000000"),
    Spoilt("world", training, _world(size=5), "worker: ranks: s = 5, the members run 4"),
    Spoilt("world", training, _members, "worker: ranks: a node begins at 3, the one before it ends at 2"),
    Spoilt("world", training, _world(started=[ONE, ONE]), f"worker: reports: started = ['{ONE}', '{ONE}'], M = "),
    Spoilt("world", training, _world(stopped=["worker-7-0"]), "worker: reports: stopped = ['worker-7-0'], M = "),
    Spoilt("world", training, _world(unstored={ONE: (1, "x")}), f"worker: reports: U = ['{ONE}'], F = ['worker-1-0']"),
    Spoilt(
        "world", training, lambda state: state.world.offers.update({ONE: ("a", "a")}), f"offers: O({ONE}) = ('a', 'a')"
    ),
    Spoilt("plans", planned, _plan(number=2), "number: p = [2], N = 1"),
    Spoilt("plans", planned, _stranger, "number: p = [1, 1], N = 1"),
    Spoilt("plans", planned, _plan(generation=3), "aim: plan 1 of worker changes 3, K = 1"),
    Spoilt("plans", planned, _plan(joining=("worker-1-0",)), "worker: aim: J = ('worker-1-0',), L = ('worker-1-0',)"),
    Spoilt("plans", planned, _plan(asked_at=0), "worker: stages: a = 0, g = 1"),
    Spoilt("plans", planned, _plan(held_at=0), "worker: stages: a = 1000000000, g = 1000000000, h = 0, A = "),
    Spoilt(
        "plans",
        planned,
        lambda state: state.plans.leaving.update(x=plans.Leaving("drained", 5, 4)),
        "leave: x leaves since 5, and until 4",
    ),
    Spoilt("checks", checked, _check(number=9), "number: c = [9], N = 1"),
    Spoilt("checks", checked, _check(fresh=5), "worker: people: f = 5, m = "),
    Spoilt("checks", checked, _check(round=2), "worker: round: r = 2, G1 = ()"),
    Spoilt("checks", checked, _check(groups=((0, 1), (1, 2))), "worker: groups: G = ((0, 1), (1, 2)) of 4 places"),
    Spoilt("checks", checked, _check(stores=("a",)), "worker: groups: B = ('a',), Q = [1], G = "),
    Spoilt(
        "checks",
        checked,
        _both,
        f"verdict: ['{ONE}'] are good and unclear",
    ),
    Spoilt(
        "checks", checked, lambda state: state.checks.since_world.update(worker=0), "verdict: counted are {'worker': 0}"
    ),
    Spoilt("checkpoints", saved, _kept(committed=[(1, 20), (1, 10)]), "worker: commits: K = [(1, 20), (1, 10)]"),
    Spoilt("checkpoints", saved, _held(ended_at=0), "worker: life: (generation, has ended) of e and n = [(1, False), "),
    Spoilt("checkpoints", saved, _kept(formed=1), "worker: life: (generation, has ended) of e and n = "),
    Spoilt("checkpoints", saved, _order(step=20), "worker: order: o = (1, 20), the newest of K is (1, 20)"),
    Spoilt(
        "checkpoints", saved, _held(gone=[ONE]), f"worker: members: H = ['{ONE}', 'worker-1-0'], X = ['{ONE}'], M = "
    ),
    Spoilt("checkpoints", saved, _held(copies={"x": ()}), "worker: members: C = ['x'], H = "),
    Spoilt("checkpoints", saved, _held(heard_at=0), "worker: heard: t = 0, H = "),
    Spoilt("checkpoints", saved, _order(writers={ONE: (0,)}), f"worker: parts: W = {{'{ONE}': (0,)}}, p = 2"),
    Spoilt("checkpoints", saved, _order(able={ONE: (0,)}), "worker: parts: W = "),
    Spoilt("incidents", failed, _incidents(number=1), "number: I = [1, 2], N = 1"),
    Spoilt("incidents", failed, _incidents(restarts=1), "charged: A = 2, R = 1"),
    Spoilt("incidents", failed, _incidents(software=[2, 1]), "hour: Q = [2, 1]"),
    Spoilt("incidents", failed, _incidents(relaunches={"worker-1": 0}), "places: B = {'worker-1': 0}"),
    Spoilt("incidents", failed, _waiting, "held: incident 2 is closed, ["),
)


@pytest.mark.parametrize("spoilt", SPOILT, ids=lambda one: f"{one.of}: {one.says[:40]}")
def test_a_spoilt_state_is_named(spoilt: Spoilt) -> None:
    """The good state breaks nothing; the spoilt one breaks one formula, whose symbols are told with their values."""
    state = spoilt.good()
    slice_ = getattr(state, spoilt.of)
    assert list(slice_.check()) == []
    spoilt.spoil(state)
    said: Iterator[str] = slice_.check()
    assert next(said).startswith(spoilt.says)


def test_a_broken_fold_is_noticed_after_the_event() -> None:
    """The promise asks the slices that an event changes: a fold that goes wrong is named with its record."""
    drive = Drive().up()
    folds = MODEL._evolve[world.WorkersStarted]

    def twice(slice_: world.WorldSlice, fact: world.WorkersStarted, record: Record) -> None:
        for _ in range(2):
            world._on_started(slice_, fact, record)

    broken = tuple((slice_of, twice if fold is world._on_started else fold) for slice_of, fold in folds)
    first = next(record.seq for record in drive.records if isinstance(record.event, world.WorkersStarted))
    with (
        mock.patch.dict(MODEL._evolve, {world.WorkersStarted: broken}),
        pytest.raises(AssertionError, match=f"slices: {first}: world: worker: reports: started = "),
    ):
        watched(drive.records, Slices)


def test_large_jobs_are_asked_after_every_so_many_events() -> None:
    """What costs as much as the job is large is asked as much less often; the end is looked at in any case."""
    state, promise = Drive(nodes_max=100).state, Slices()
    state.world.worlds["worker"] = world.World(before=1)
    record = Record(1, 1, 1, 0, world.StoreOffered("worker-0-0", "a"), None)
    with pytest.raises(AssertionError, match="1: world: worker: count"):
        promise(state, record)
    state.world.worlds.clear()
    promise(state, record)
    state.world.worlds["worker"] = world.World(before=1)
    promise(state, record._replace(seq=100))
    with pytest.raises(AssertionError, match="101: world: worker: count"):
        promise(state, record._replace(seq=101))
