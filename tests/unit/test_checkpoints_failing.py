"""What is saved when a generation ends, a node goes or the job ends: which states are ordered to be written, and by whom."""

from __future__ import annotations

import pytest
from drive import Drive
from saved import URL, A, B, C, commit, held, order, refusal, saving

from dlrover_core.job import job, nodes, operations, waiting, world
from dlrover_core.job.checkpoints import (
    CheckpointCommitted,
    ReportHeld,
    ReportKeeping,
    SaveOrdered,
    StepsHeld,
)
from dlrover_core.rules import save_on_failure
from dlrover_core.rules.reasons import reasons

# ---- saved on failure


def test_what_all_hold_is_written_when_a_generation_ends() -> None:
    """Once everybody has told, the newest step that is whole is ordered, once; who writes is told, and nobody else."""
    drive = saving(spread=2)
    commit(drive, 10)
    drive.exit(B, 1)
    assert held(drive, A, 12, 14) == ["StepsHeld"]
    assert held(drive, B, 10, 12) == ["StepsHeld", "SaveOrdered"]
    (ordered,) = drive.facts(SaveOrdered)
    assert (ordered.group, ordered.generation, ordered.step) == ("worker", 1, 12)
    assert [(order(drive, node).persist, order(drive, node).persist_of) for node in (A, B)] == [(12, 1), (12, 1)]
    assert [order(drive, node).persist_places for node in (A, B)] == [(0,), (1,)]
    drive.wait(60)
    assert drive.facts(SaveOrdered) == [ordered]
    assert "decided upon" in refusal(drive, ReportHeld(A, 1, (12, 14)))


def test_what_is_kept_in_memory_alone_is_not_ordered_to_be_written() -> None:
    """Without a storage there is none to write to, and nobody says that it is being written."""
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.do(ReportKeeping(A, 1, "", 2, 0, 3, True, 4096, 1))
    drive.exit(A, 137)
    held(drive, A, 38, 40)
    assert held(drive, B, 38, 40) == ["StepsHeld"]
    assert order(drive, A).persist == -1


def test_a_save_that_was_ordered_is_committed_for_that_reason() -> None:
    """Its event says why, and the order is over."""
    drive = saving()
    drive.exit(B, 1)
    held(drive, A, 12)
    held(drive, B, 12)
    # Every node holds all tensors, and each has objects of its own.
    assert [order(drive, node).persist_places for node in (A, B)] == [(0,), (1,)]
    assert commit(drive, 12) == ["CheckpointCommitted"]
    assert drive.facts(CheckpointCommitted)[-1].why == drive.facts(SaveOrdered)[0].why
    assert order(drive, A).persist == -1


def test_a_newer_commit_makes_an_order_needless() -> None:
    """What the next generation has written is newer than what was left of the one before."""
    drive = saving()
    drive.exit(B, 1)
    held(drive, A, 12)
    held(drive, B, 12)
    drive.run(13)
    drive.do(ReportKeeping(A, 2, URL, 2, 10, 3, True, 4096, 1))
    commit(drive, 20, generation=2)
    assert order(drive, A).persist == -1
    assert commit(drive, 12) == []


def test_words_that_come_before_the_end_count() -> None:
    """Workers may be gone, and their node may say what is left of them, before it is known that the generation has ended."""
    drive = saving()
    assert held(drive, B, 12) == ["StepsHeld"]
    assert held(drive, A, 12) == ["StepsHeld"]
    drive.exit(B, 1)
    assert drive.names()[-1] == "SaveOrdered"


def test_nobody_waits_for_ever_for_a_word() -> None:
    """Who does not say what it holds is waited for a few seconds; then what the others hold is written."""
    drive = saving()
    drive.exit(B, 1)
    held(drive, A, 12, copies=((1, 12),))
    drive.wait(save_on_failure.HELD_WAIT_S - 0.5)
    assert drive.facts(SaveOrdered) == []
    wait = next(one for one in reasons(drive.state, drive.now) if one.why == waiting.SAVE)
    assert (
        wait.words == f"step 12 in memory is written to storage: it waits for {B} to say what they hold of generation 1"
    )
    assert (wait.until - drive.now, wait.nodes) == (500_000, (B,))
    drive.wait(1)
    assert not any(one.why == waiting.SAVE for one in reasons(drive.state, drive.now))
    assert [one.step for one in drive.facts(SaveOrdered)] == [12]


def test_a_dead_node_is_not_waited_for() -> None:
    """With its last survivor's word everything is known that ever will be."""
    drive = saving(nodes=3)
    drive.observe(C, "failed", -9)
    held(drive, A, 12, 14)
    assert held(drive, B, 14, copies=((2, 12), (2, 14))) == ["StepsHeld", "SaveOrdered"]
    assert drive.facts(SaveOrdered)[0].step == 14


@pytest.mark.parametrize("spread", [0, 1])
def test_what_died_with_its_only_holder_is_not_ordered(spread: int) -> None:
    """Where a node is gone and nobody has a copy of its part, nothing is whole: nothing is ordered, and nothing waits.

    Not where every node holds all tensors either: its ranks' random numbers and positions in the data are gone.
    """
    drive = saving(nodes=3, spread=spread)
    drive.observe(C, "failed", -9)
    held(drive, A, 12)
    held(drive, B, 12)
    drive.wait(60)
    assert drive.facts(SaveOrdered) == []


def test_an_older_step_is_ordered_where_the_newest_lacks_a_part() -> None:
    """The partner's copy is a save behind: that older step is written, if nothing newer is on storage."""
    drive = saving()
    commit(drive, 8)
    drive.observe(B, "failed", -9)
    held(drive, A, 10, 12, copies=((1, 8), (1, 10)))
    assert [one.step for one in drive.facts(SaveOrdered)] == [10]
    drive = saving()
    commit(drive, 10)
    drive.observe(B, "failed", -9)
    held(drive, A, 10, 12, copies=((1, 8), (1, 10)))
    drive.wait(60)
    assert drive.facts(SaveOrdered) == []


def test_nodes_hear_when_it_is_decided_what_is_written() -> None:
    """Until then they keep what the ended generation left; a generation of which nothing is written is decided upon, too."""
    drive = saving()
    assert order(drive, A).decided == 0
    drive.exit(B, 1)
    held(drive, A, 12)
    assert [order(drive, node).decided for node in (A, B)] == [0, 0]
    held(drive, B, 12)
    assert [(order(drive, node).decided, order(drive, node).persist) for node in (A, B)] == [(1, 12), (1, 12)]
    drive = saving()
    drive.observe(B, "failed", -9)
    assert order(drive, A).decided == 0
    held(drive, A, 12)
    assert (order(drive, A).decided, order(drive, A).persist) == (1, -1)
    drive = saving()
    commit(drive, 12)
    drive.exit(B, 1)
    held(drive, A, 12)
    held(drive, B, 12)
    assert (order(drive, A).decided, order(drive, A).persist) == (1, -1)


def test_copies_stand_in_for_what_died() -> None:
    """A partner's copy is as good: whoever keeps it is told to write those parts too."""
    drive = saving(nodes=3, spread=0)
    drive.observe(C, "failed", -9)
    held(drive, A, 10, 12, copies=((2, 12),))
    held(drive, B, 12)
    assert drive.facts(SaveOrdered)[0].step == 12
    assert [order(drive, node).persist_places for node in (A, B)] == [(0, 2), (1,)]


def test_who_dies_while_it_should_write_is_replaced() -> None:
    """Another one that has a copy takes over; where there is none, the order is over."""
    drive = saving(nodes=3)
    drive.exit(C, 2)
    for node, place in ((A, 2), (B, 0), (C, 1)):
        held(drive, node, 12, copies=((place, 12),))
    assert [order(drive, node).persist_places for node in (A, B, C)] == [(0,), (1,), (2,)]
    drive.observe(A, "failed", -9)
    assert [order(drive, node).persist_places for node in (B, C)] == [(1, 0), (2,)]
    drive.observe(B, "failed", -9)
    assert drive.state.checkpoints.of("worker").order is None


def test_what_is_on_storage_is_not_written_again() -> None:
    """Where memory holds nothing newer than the newest commit, nothing is ordered."""
    drive = saving()
    commit(drive, 20)
    drive.exit(B, 1)
    held(drive, A, 18, 20)
    held(drive, B, 18, 20)
    drive.wait(60)
    assert drive.facts(SaveOrdered) == []


def test_a_planned_end_without_a_loss_writes_nothing() -> None:
    """Where everybody is still there and goes on, a world that was ended by plan has lost nothing."""
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.do(ReportKeeping(A, 1, URL, 2, 10, 3, False, 4096, 1))
    drive.do(operations.ScaleGroup("worker", 3, 3, "more"))
    drive.observe(C, "running")
    drive.join(C)
    drive.wait(120)
    assert (drive.world.generation, drive.world.active) == (2, True)
    held(drive, A, 12)
    held(drive, B, 12)
    drive.wait(60)
    assert drive.facts(SaveOrdered) == []


def test_a_suspended_job_is_written() -> None:
    """Nobody knows when, and on which machines, a suspended job goes on: what it holds goes to storage."""
    drive = saving()
    drive.do(job.SuspendJob("lunch"))
    held(drive, A, 12)
    held(drive, B, 12)
    assert [one.step for one in drive.facts(SaveOrdered)] == [12]
    assert order(drive, A).persist == 12
    assert order(drive, A).generation == 0


# ---- saved as nodes go


def test_a_drained_node_brings_its_part_to_safety() -> None:
    """Nobody else holds it: who is released tells what its workers left, is told to write it, and only then has left."""
    drive = saving(spread=0, planned=False)
    drive.do(operations.DrainNode(B, "maintenance"))
    assert order(drive, B).leave
    held(drive, A, 12)
    assert held(drive, B, 12, 14) == ["StepsHeld", "SaveOrdered"]
    told = order(drive, B)
    assert (told.leave, told.persist, told.persist_of, told.persist_places) == (True, 12, 1, (1,))
    commit(drive, 12)
    told = order(drive, B)
    assert (told.leave, told.persist, told.committed, told.committed_of) == (True, -1, 12, 1)


def test_who_has_left_holds_nothing() -> None:
    """With its agent its memory is gone: nobody is waited for, and nothing is ordered that cannot be written."""
    drive = saving(spread=0, planned=False)
    drive.do(operations.DrainNode(B, "maintenance"))
    held(drive, B, 12)
    drive.do(nodes.ReportLeft(B))
    held(drive, A, 12)
    drive.wait(120)
    assert drive.facts(SaveOrdered) == []


def farewell(drive: Drive, how: str) -> None:
    """The job ends, while its ranks train."""
    if how == "stopped":
        drive.do(job.StopJob("enough"))
    else:
        drive.exit(B, 1, 1, "Traceback (most recent call last):\nValueError: bad batch", step=42)
        for node in (A, B):
            drive.do(world.ReportStopped(node, 1, 42))
    assert not drive.state.job.live


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_what_all_hold_is_written_as_the_job_ends(how: str) -> None:
    """Nodes were stopped at different steps: the newest that all hold is ordered, of those who are leaving."""
    drive = saving(spread=0, max_restarts=0)
    commit(drive, 30)
    farewell(drive, how)
    held(drive, A, 40, 42)
    assert drive.facts(SaveOrdered) == []
    assert "SaveOrdered" in held(drive, B, 38, 40)
    (ordered,) = drive.facts(SaveOrdered)
    assert (ordered.generation, ordered.step) == (1, 40)
    told = [order(drive, node) for node in (A, B)]
    assert [(one.leave, one.persist, one.persist_of, one.persist_places) for one in told] == [
        (True, 40, 1, (0,)), (True, 40, 1, (1,))
    ]  # fmt: skip
    assert commit(drive, 40) == ["CheckpointCommitted"]
    assert [(order(drive, node).committed, order(drive, node).persist) for node in (A, B)] == [(40, -1)] * 2


def test_words_before_the_stop_count() -> None:
    """Workers that died of the same signal may be gone before anybody has told that the job stops."""
    drive = saving()
    for node in (A, B):
        held(drive, node, 40)
    drive.do(job.StopJob("enough"))
    assert drive.names()[-1] == "SaveOrdered"


def test_nobody_is_waited_for_at_the_end_either() -> None:
    """A node that does not say what it holds has the time of a stop; a new leader waits no longer."""
    drive = saving()
    drive.do(job.StopJob("enough"))
    held(drive, A, 40, copies=((1, 40),))
    drive.take_over()
    drive.wait(60)
    assert [one.step for one in drive.facts(SaveOrdered)] == [40]


def test_a_job_that_has_succeeded_orders_nothing() -> None:
    """Its script has written what it wanted to be written."""
    drive = saving()
    drive.exit(B, 1)
    held(drive, A, 12)
    for node in (A, B):
        drive.do(world.ReportFinished(node, 2))
    assert drive.state.job.state == "succeeded"
    held(drive, B, 12)
    drive.wait(60)
    assert drive.facts(SaveOrdered) == []


def test_committed_is_a_state_not_a_step() -> None:
    """Generations have steps of the same number: orders say of which one it is that is committed."""
    drive = saving()
    commit(drive, 20)
    assert (order(drive, A).committed, order(drive, A).committed_of) == (20, 1)
    drive.exit(B, 1)
    drive.do(ReportKeeping(A, 2, URL, 2, 10, 3, True, 4096, 1))
    assert (order(drive, A).committed, order(drive, A).committed_of) == (20, 1)
    commit(drive, 20, generation=2)
    assert (order(drive, A).committed, order(drive, A).committed_of) == (20, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        ReportHeld("worker-9-0", 1, (1,)),
        ReportHeld(A, 2, (1,)),
        ReportHeld(A, 0, (1,)),
        ReportHeld(A, 1, tuple(range(9))),
        ReportHeld(A, 1, (-1,)),
        ReportHeld(A, 1, (1,), 0, ((0, 1),) * 17),
        ReportHeld(A, 1, (1,), 0, ((-1, 1),)),
    ],
)
def test_words_that_make_no_sense_are_refused(wrong: ReportHeld) -> None:
    """A stranger's word, one about another generation, and one that is too long."""
    drive = saving()
    drive.exit(B, 1)
    refusal(drive, wrong)


def test_the_boundary_of_a_plan_is_no_end() -> None:
    """At the boundary of a planned change nodes say what they hold while their workers wait: nothing has ended."""
    drive = saving()
    drive.do(ReportHeld(A, 1, (13,), 5))
    drive.do(ReportHeld(B, 1, (13,), 5))
    assert drive.facts(StepsHeld)[-1] == StepsHeld(B, 1, (13,), 5)
    drive.exit(B, 1)
    assert drive.facts(SaveOrdered) == []
