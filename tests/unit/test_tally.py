"""Counts kept beside the state: right after anything, and what makes thousands of arrivals cheap."""

from __future__ import annotations

import pytest
from drive import Drive

from dlrover_core.job import job, nodes, world
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Engine
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules import membership, slots
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL

MANY = 400


def node(number: int) -> str:
    """The first incarnation in a place."""
    return f"worker-{number}-0"


def test_arrivals_look_at_all_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come, nobody's coming makes the master look at everybody: only the world that forms does."""
    looks = 0
    look = membership.ready_nodes

    def counting(state: JobState, group: str) -> list[nodes.Node]:
        nonlocal looks
        looks += 1
        return look(state, group)

    monkeypatch.setattr(membership, "ready_nodes", counting)
    drive = Drive(nodes_min=MANY, nodes_max=MANY)
    for number in range(MANY):
        drive.do(nodes.ReportJoined(node(number), "host", "10.0.0.1", 2))
    # Rank 0's store comes last: all the others' must not lay out a world each.
    for number in reversed(range(MANY)):
        drive.do(world.OfferStore(node(number), f"10.0.0.1:{number}"))
    for number in range(MANY):
        drive.do(world.ReportStarted(node(number), 1))
    assert drive.world.active
    assert len(drive.world.started) == MANY
    assert looks == 1


def test_members_orders_are_made_once() -> None:
    """What a member of a standing world is told is one object for as long as the world stands; the next world's is another."""
    drive = Drive(nodes_min=3, nodes_max=3).up()
    before = desired(drive.state).orders
    drive.do(world.WithdrawStore(node(0), "no such store"))
    after = desired(drive.state).orders
    assert [after[one] is before[one] for one in before] == [True] * 3
    drive.exit(node(1), 3)
    assert [order.generation for order in desired(drive.state).orders.values()] == [2, 2, 2]


def test_counts_are_no_part_of_the_state() -> None:
    """A state with counts and the same without are packed, hashed and compared as one; the counts are found again."""
    drive = Drive(nodes_min=1, nodes_max=4, relaunch_max=0).up()
    drive.observe(node(3), "failed", 1)
    again = unpack(JobState, pack(drive.state))
    assert again == drive.state
    assert digest(again) == drive.engine.digest()
    assert again.nodes.tally.ready == drive.state.nodes.tally.ready == {"worker": 3}
    assert slots.wanted(again, "worker") == slots.wanted(drive.state, "worker")


def test_counts_survive_a_failed_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command had changed before it failed counts for nothing."""
    drive = Drive(nodes_min=2, nodes_max=2)
    drive.do(nodes.ReportJoined(node(0), "host", "10.0.0.1", 2))

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setitem(MODEL._react, nodes.NodeJoined, (broken,))
        drive.do(nodes.ReportJoined(node(1), "host", "10.0.0.1", 2))
    assert drive.state.nodes.tally.ready == {"worker": 1}
    drive.do(nodes.ReportJoined(node(1), "host", "10.0.0.1", 2))
    assert drive.state.nodes.tally.ready == {"worker": 2}


def test_a_new_run_counts_anew() -> None:
    """Nodes of an earlier run count for nothing in the next."""
    drive = Drive(nodes_min=2, nodes_max=2).up()
    assert drive.state.nodes.tally.ready == {"worker": 2}
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert sum(drive.state.nodes.tally.ready.values()) == 0
    folded = Engine(MODEL, CODEC, MODEL.fold(drive.records), token=2)
    assert folded.state == drive.state
