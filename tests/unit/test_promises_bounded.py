"""What promises remember and write is bounded, and liveness: what must happen within a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from drive import Drive
from promised import blank, over, relaunched, restarted, running, waiting

from dlrover_core.job import (
    hosts,
    job,
    nodes,
    operations,
    world,
)
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import STRANGERS_MAX, Sender
from dlrover_core.kernel.events import Event, Origin, Record
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.run import Broken
from dlrover_core.sim.scenario import Scenario
from dlrover_core.testing import invariants
from dlrover_core.testing.promises import Promise, Together


@pytest.mark.parametrize(
    ("hurt", "fact"),
    [
        (lambda state: state.senders["worker-0-0"].replies.extend([(1, "")] * 99), None),
        (lambda state: state.senders.update({f"s/{n}": Sender(1, 1, []) for n in range(STRANGERS_MAX + 9)}), None),
        (
            lambda state: state.hosts.hosts.update({f"h{n}": hosts.HostMemory() for n in range(2000)}),
            hosts.HostQuarantined("h", 9, ""),
        ),
        (lambda state: state.world.offers.update({"worker-0-0": ("a",) * 9}), world.StoreOffered("worker-0-0", "a")),
    ],
    ids=["replies", "senders", "quarantine", "stores"],
)  # fmt: skip
def test_what_is_remembered_is_bounded(hurt: Callable[[JobState], None], fact: Event | None) -> None:
    """A state that remembers too much of something breaks the promise that it is bounded."""
    drive = running()
    promise = invariants.Bounded()
    record = drive.records[-1]._replace(origin=Origin("worker-0-0", 7, 99), seq=16 * 9)
    promise(drive.state, record)
    hurt(drive.state)
    with pytest.raises(AssertionError):
        promise(drive.state, record if fact is None else record._replace(event=fact))


def test_an_hour_writes_so_much_and_no_more() -> None:
    """Bytes of log and generations per hour have bounds, counted anew each hour."""

    class Tight(invariants.Bounded):
        BYTES_PER_HOUR, BYTES_PER_NODE_HOUR = 0, 300

    class Steady(invariants.Bounded):
        GENERATIONS_PER_HOUR = 2

    drive = relaunched()
    with pytest.raises(Broken, match="bytes of log in this hour"):
        invariants.watched(drive.records, Tight)
    with pytest.raises(Broken, match="3 generations this hour"):
        invariants.watched(drive.records, Steady)


@pytest.mark.parametrize(
    "hurt",
    [
        lambda state: setattr(state.nodes.nodes["worker-0-0"], "joined", False),
        lambda state: state.nodes.nodes.pop("worker-0-0"),
        lambda state: setattr(state.nodes.tally, "alive", 7),
        lambda state: state.nodes.tally.ready.update(worker=1),
        lambda state: state.nodes.tally.loose.add("worker-0-0"),
        lambda state: state.nodes.tally.given_up.setdefault("worker", set()).add(1),
        lambda state: setattr(state.world.worlds["worker"], "active", False),
        lambda state: state.world.worlds["worker"].places.update({"worker-9-0": 9}),
        lambda state: state.world.worlds["worker"].finished.append("worker-0-0"),
        lambda state: state.world.offers.pop("worker-0-0"),
    ],
    ids=["joined", "gone", "alive", "ready", "loose", "given up", "active", "places", "finished", "offers"],
)
def test_the_reference_finds_what_differs(hurt: Callable[[Any], object]) -> None:
    """A node, a count or a world of the real state that says something else than the plain one is found."""
    drive = restarted()
    promise = invariants.Reference()
    state = MODEL.new()
    for record in drive.records:
        MODEL.apply(state, record)
        promise(state, record)
    assert state.nodes.tally.alive == 2
    assert len(state.world.worlds["worker"].places) == 2
    promise.end(SimpleNamespace(state=state))
    hurt(state)
    with pytest.raises(AssertionError):
        promise.end(SimpleNamespace(state=state))


def test_the_reference_looks_every_so_often() -> None:
    """It need not wait for the end: what differs is found while the job runs."""

    class Eager(invariants.Reference):
        every = 1

    def miscounted(state: JobState, _record: Record) -> None:
        state.nodes.tally.alive = 5

    with pytest.raises(Broken, match=r"reference: at .* is counted, and should be"):
        invariants.watched(restarted().records, miscounted, Eager)


def _run_of(drive: Drive, virtual_s: float, *struck: tuple[Fault, int]) -> Any:
    plan = SimpleNamespace(scenario=Scenario())
    return SimpleNamespace(
        records=drive.records,
        state=drive.state,
        plan=plan,
        virtual_s=virtual_s,
        struck=list(struck),
        outcome="succeeded",
    )


def _lives(run: Any, within_s: float) -> bool:
    class Quick(invariants.Liveness):
        pass

    Quick.within_s = within_s
    promise, state = Quick(), MODEL.new()
    for record in run.records:
        MODEL.apply(state, record)
        promise(state, record)
    return not _ends_badly_with(promise, run)


def _ends_badly_with(promise: Promise, run: Any) -> bool:
    try:
        promise.end(run)
    except AssertionError:
        return True
    return False


def test_liveness() -> None:
    """A job that does not train again in time is not alive: counted from the end of the last fault, unless it is suspended."""
    stuck = waiting()
    died = next(record.seq for record in stuck.records if isinstance(record.event, nodes.NodeFailed))
    assert _lives(_run_of(stuck, 10.0), 20.0)
    assert not _lives(_run_of(stuck, 30.0), 20.0)
    assert not _lives(_run_of(stuck, 10_000.0), 0.0), "every patience of the spec together is not as long"
    assert _lives(_run_of(stuck, 30.0, (Fault("step 1", "kill_host", 1, 15.0), died)), 20.0)
    assert not _lives(_run_of(stuck, 60.0, (Fault("step 1", "kill_host", 1, 15.0), died)), 20.0)
    paused = running()
    paused.do(job.SuspendJob("for long"))
    assert _lives(_run_of(paused, 1e6), 20.0)
    assert _lives(_run_of(over(), 1e6), 20.0)


def test_invariants_of_users() -> None:
    """A function, a class, and tuples of them are all asked; what breaks is named with the record and the event."""

    def nobody_leads(state: JobState, record: Record) -> None:
        assert state.token < 2, "somebody leads"

    class NoNodeTwice(Promise):
        name = "no node is planned twice"

        def __init__(self) -> None:
            self.planned = 0

        def _planned(self, _state: JobState, fact: nodes.NodePlanned, _record: Record) -> None:
            assert fact.node
            self.planned += 1

        looks = {nodes.NodePlanned: _planned}  # noqa: RUF012  # as a user writes it

    drive = restarted()
    watch = Together(NoNodeTwice, (invariants.DEFAULT, (nobody_leads,)))
    assert invariants.watched(drive.records, NoNodeTwice, nobody_leads) == drive.state
    assert [type(part) for part in watch.parts[:2]] == [NoNodeTwice, invariants.Order]
    drive.take_over()
    with pytest.raises(Broken, match=r"(?s)^nobody_leads: somebody leads.*\(record \d+: LeaderStarted") as broken:
        invariants.watched(drive.records, NoNodeTwice, nobody_leads)
    assert broken.value.seq == len(drive.records)


def test_a_promise_asked_by_itself_answers_alike() -> None:
    """Called as one watcher among others, without `Together`, a promise sees and says the same."""
    drive = blank(Drive().up())
    drive.do(operations.ScaleGroup("worker", 1, 3, "more"))
    for cls in invariants.OF_LOGS:
        promise, state = cls(), MODEL.new()
        for record in drive.records:
            MODEL.apply(state, record)
            promise(state, record)
    with pytest.raises(AssertionError, match="for nothing"):
        invariants.Provoked()(drive.state, drive.records[-1]._replace(event=world.WorldDissolved("worker", 1, "x")))
