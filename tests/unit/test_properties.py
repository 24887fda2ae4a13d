"""Random histories over the real model: whatever agents, backends and time do, these hold after each command."""

from __future__ import annotations

from typing import Any

import pytest
from drive import PEER_LOST, Drive
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_core.job import incidents, job, nodes, operations, progress, silence, world
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import CommandFailed
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules import membership
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL

# (what, which node, a number): small on purpose, so that events meet.
_acts = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "join", "join", "join", "offer", "offer", "run", "run", "step", "exit", "exit", "cascade", "old exit",
                "pending", "failed", "gone", "succeeded", "listed", "silent", "heard", "left", "fault", "withdraw",
                "started", "stopped", "finished", "tick", "tick", "wait", "wait long", "stop", "take over", "new run", "progress",
                "scale", "scale", "drain", "suspend", "resume", "resume",
            ]
        ),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    min_size=20,
    max_size=80,
)  # fmt: skip
_specs = st.sampled_from(
    [
        {"nodes_min": 2, "nodes_max": 2, "nproc": 2},
        {"nodes_min": 1, "nodes_max": 4, "nproc": 1, "relaunch_max": 1},
        {"nodes_min": 2, "nodes_max": 6, "nproc": 2, "unit": 2, "max_restarts": 9},
        {"nodes_min": 3, "nodes_max": 4, "nproc": 1, "on_join": "never", "max_restarts": 1, "relaunch_max": 9},
        {"nodes_min": 1, "nodes_max": 1, "nproc": 3, "max_restarts": 50, "relaunch_max": 50},
    ]
)  # fmt: skip


def _node(drive: Drive, which: int) -> str:
    """A node that exists, or the first incarnation of a place."""
    here = list(drive.state.nodes.nodes)
    return here[which % len(here)] if here else f"worker-{which}-0"


def _commands(drive: Drive, what: str, which: int, number: int) -> list[Any]:
    """The commands of one act."""
    node, newest = _node(drive, which), drive.world
    generation = newest.generation
    rank = newest.member(node).first_rank if newest.member(node) else number  # type: ignore[union-attr]
    nproc = drive.spec.groups[0].nproc
    if what == "offer":
        drive._stores += 1
    one = {
        "join": lambda: nodes.ReportJoined(node, f"host-{which}", node, nproc),
        "offer": lambda: world.OfferStore(node, f"{node}:{drive._stores}"),
        "withdraw": lambda: world.WithdrawStore(node, next(iter(drive.state.world.offers.get(node, ())), "")),
        "step": lambda: progress.ReportFirstStep(node, generation, number, told=bool(number % 2)),
        "progress": lambda: progress.NoteProgress("worker", generation, number * 10),
        "exit": lambda: incidents.ReportExit(node, generation, rank, -9, step=number),
        "cascade": lambda: incidents.ReportExit(node, generation, rank, 1, error=PEER_LOST),
        "old exit": lambda: incidents.ReportExit(node, generation - number, rank, 1, asked=number == 2),
        "listed": lambda: nodes.ObserveNodes(
            tuple(nodes.Observed(name, "running") for name in list(drive.state.nodes.nodes)[:which]), True
        ),
        "silent": lambda: silence.NoteSilence(node, 1),
        "heard": lambda: silence.NoteHeard(node),
        "left": lambda: nodes.ReportLeft(node),
        "fault": lambda: nodes.ReportFault(node, ("broken", "hardware: x", "check_failed", "")[number]),
        "started": lambda: world.ReportStarted(node, generation),
        "stopped": lambda: world.ReportStopped(node, generation, number),
        "finished": lambda: world.ReportFinished(node, generation),
        "stop": lambda: job.StopJob("asked") if number == 0 else job.NotePause(number),
        "scale": lambda: operations.ScaleGroup("worker", number, which + 1, "asked"),
        "drain": lambda: operations.DrainNode(node if number else f"worker-{which}", "asked"),
        "suspend": lambda: job.SuspendJob("asked"),
        "resume": lambda: job.ResumeJob("asked"),
        "new run": lambda: job.CreateJob(f"run-{len(drive.records)}" if number == 0 else "run-1", drive.spec.to_json()),
    }
    if what in one:
        return [one[what]()]
    if what in {"pending", "failed", "gone", "succeeded"}:
        return [
            nodes.ObserveNodes(
                (nodes.Observed(node, what, number, ("", "OOMKilled", "hardware: x", "SIGKILL")[number]),)
            )
        ]
    return []


def _act(drive: Drive, what: str, which: int, number: int) -> None:
    if what == "take over":
        drive.take_over()
    elif what in {"wait", "wait long", "tick"}:
        drive.wait({"wait": 20, "wait long": 1000, "tick": 0}[what])
    elif what == "run":
        # The ordinary course, so that histories reach the interesting places.
        for name in list(drive.state.nodes.nodes):
            if not drive.state.nodes.nodes[name].joined:
                drive.join(name)
        if drive.members:
            drive.run(number + 1)
    for command in _commands(drive, what, which, number):
        drive.do(command)


def _check(drive: Drive) -> None:
    group = drive.state.job.spec.groups[0]
    current = drive.world
    for record in drive.new:
        assert type(record.event) is not CommandFailed, record
        if type(record.event) is world.WorldFormed and current.active:
            # As it is formed: sizes that are asked for later change no world that goes on.
            assert group.floor <= len(current.members) <= group.nodes_max
            assert drive.state.job.forms or drive.state.job.over
    if current.active:
        assert len(current.members) % group.unit == 0
        assert drive.state.job.state != "suspended"
    ranks = [rank for one in current.members for rank in range(one.first_rank, one.first_rank + one.nproc)]
    assert ranks == list(range(current.size))
    assert len({one.node for one in current.members}) == len(current.members)
    assert drive.state.incidents.restarts >= 0
    if drive.state.job.live:
        assert drive.state.incidents.restarts <= drive.spec.max_restarts
        assert all(used <= group.relaunch_max for used in drive.state.incidents.relaunches.values())
        members = {member.node for member in current.members} if current.active else set()
        alive = {node.node for node in drive.state.nodes.nodes.values() if node.ready}
        assert members - set(current.finished) <= alive
    kept, _ = drive.state.nodes.tally, drive.state.nodes.recount()
    anew = drive.state.nodes.tally
    assert {name: count for name, count in kept.ready.items() if count} == anew.ready
    assert (kept.alive, kept.suspects, kept.shunned) == (anew.alive, anew.suspects, anew.shunned)
    assert kept.given_up == anew.given_up
    drive.state.nodes._tally = kept  # type: ignore[misc]  # the one that is kept goes on being tested
    wanted = desired(drive.state)
    assert len(wanted.names) <= group.nodes_max
    assert {one.name for one in wanted.launch} <= wanted.names


def _check_history(drive: Drive) -> None:
    """What must hold for the whole log: generations, stores, incarnations, causes, and the fold."""
    formed = drive.facts(world.WorldFormed)
    assert [fact.generation for fact in formed] == list(range(1, len(formed) + 1))
    assert len({fact.store for fact in formed}) == len(formed)
    seen: dict[tuple[str, int], int] = {}
    for fact in drive.facts(nodes.NodePlanned):
        assert fact.incarnation == seen.get((fact.group, fact.index), -1) + 1
        seen[fact.group, fact.index] = fact.incarnation
    assert [record.seq for record in drive.records] == list(range(1, len(drive.records) + 1))
    assert all(0 <= record.cause < record.seq for record in drive.records)
    assert all(before.at <= after.at for before, after in zip(drive.records, drive.records[1:], strict=False))
    folded = MODEL.fold(record for batch in drive.batches for record in CODEC.decode(batch.payload).records)
    assert digest(folded) == drive.engine.digest()
    assert digest(unpack(JobState, pack(drive.state))) == drive.engine.digest()
    assert folded == drive.state


@settings(max_examples=examples(150, 500))
@given(_specs, _acts)
def test_invariants(spec: dict[str, Any], acts: list[tuple[str, int, int]]) -> None:
    """No lost rank, no two worlds of one generation, sizes within bounds, none illegal, no store twice; fold == state."""
    drive = Drive(**spec)
    for what, which, number in acts:
        _act(drive, what, which, number)
        _check(drive)
    _check_history(drive)


@settings(max_examples=examples(80, 200))
@given(_specs, _acts, st.data())
def test_a_take_over_anywhere_changes_nothing_but_the_leader(
    spec: dict[str, Any], acts: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """The next master's state is the last one's, but for the token and whose silence starts afresh."""
    drive = Drive(**spec)
    for what, which, number in acts:
        _act(drive, what, which, number)
    before = desired(drive.state)
    drive.take_over()
    assert desired(drive.state) == before
    assert drive.names() == ["LeaderStarted"]


@settings(max_examples=examples(80, 200))
@given(_specs, _acts)
def test_a_job_never_waits_for_nothing(spec: dict[str, Any], acts: list[tuple[str, int, int]]) -> None:
    """A living job trains, waits for a node that should come, a store, a deadline, or its resumption: it is never just stuck."""
    drive = Drive(**spec)
    for what, which, number in acts:
        _act(drive, what, which, number)
    if drive.state.job.forms and not drive.members:
        waited_for = MODEL.due(drive.state) is not None
        ready = membership.ready_nodes(drive.state, "worker")
        without_store = any(not drive.state.world.offers.get(node.node) for node in ready)
        assert waited_for or without_store, (drive.names(drive.records)[-20:], drive.state)


@pytest.mark.parametrize("poison", [("unknown",), (), incidents.ReportExit("worker-0-0", 1, 0, "x")])  # type: ignore[arg-type]
def test_nonsense_is_survived(poison: Any) -> None:
    """A command that no agent can send costs a record and nothing else."""
    drive = Drive().up()
    before = drive.members
    drive.do(poison)
    drive.exit("worker-1-0", 3)
    assert drive.members == before
    _check_history(drive)
