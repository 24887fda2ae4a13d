"""Planned changes of a world: nobody is stopped but at a boundary at which everybody has saved, and nothing waits for ever."""

from __future__ import annotations

import pytest
from boundaries import Saves, up
from drive import Drive
from planning import SECOND, drain, dropped, formed, grown, order, refused, scale

from dlrover_core.job import checkpoints, job, notices, plans, world
from dlrover_core.job.hangs import HangSuspected, NoteStall
from dlrover_core.rules.model import MODEL
from dlrover_core.rules.plans import TRIES_MAX
from dlrover_core.rules.reasons import reasons

# ---- growth


def test_a_growth_stops_nobody_before_everybody_waits_at_the_boundary() -> None:
    """2 -> 4: members are armed, then the boundary may be chosen, then all wait there; then, in one batch, the world is 4."""
    drive = grown()
    assert (drive.world.generation, drive.plan.joining) == (1, ("worker-2-0", "worker-3-0"))
    assert drive.asked()["worker-0-0"] == drive.asked()["worker-1-0"] == (1, False)
    assert drive.asked()["worker-2-0"] == (0, False), "newcomers have nothing to get ready"
    drive.arm("worker-0-0")
    assert not drive.plan.go_at
    drive.arm("worker-1-0")
    assert drive.asked()["worker-0-0"] == (1, True)
    assert drive.hold(41, "worker-0-0") == ["StepsHeld"]
    assert drive.hold(41, "worker-1-0") == ["StepsHeld", "WorldDissolved", "WorldFormed"]
    assert (formed(drive).resume_step, formed(drive).resume_tier) == (41, "memory")
    assert formed(drive).reason == "planned change 1: worker-2-0, worker-3-0 join"
    assert drive.members == ["worker-0-0", "worker-1-0", "worker-2-0", "worker-3-0"]
    assert drive.facts(world.WorldDissolved)[-1].planned
    assert not drive.planned
    assert drive.state.incidents.number == 0


def test_newcomers_are_taken_together() -> None:
    """The plan begins when everybody wanted is there, or `grow_window_s` after the first."""
    drive = up(nodes_min=2, nodes_max=2)
    scale(drive, 4, 2)
    drive.join("worker-2-0")
    assert not drive.planned
    drive.wait(59)
    assert not drive.planned
    drive.wait(1)
    assert drive.plan.joining == ("worker-2-0",)
    # Who comes before the boundary is taken in, too.
    drive.join("worker-3-0")
    drive.whole(7)
    assert len(drive.members) == 4


@pytest.mark.parametrize("on_join", ["restart", "planned"])
def test_with_our_checkpoint_a_restart_is_a_planned_change(on_join: str) -> None:
    """No step lost is always better: ``restart`` and ``planned`` do the same where ranks can agree."""
    drive = grown(on_join=on_join)
    assert drive.planned
    drive.whole(5)
    assert formed(drive).resume_step == 5


@pytest.mark.parametrize(("on_join", "grows"), [("restart", True), ("planned", False), ("never", False)])
def test_without_a_boundary_only_restart_grows(on_join: str, grows: bool) -> None:
    """A script that cannot agree on a boundary behaves as under torchrun, unless it is told to grow at boundaries alone."""
    drive = Saves(nodes_min=2, nodes_max=2, on_join=on_join)
    drive.up()
    drive.keeps(planned=False)
    scale(drive, 4, 2)
    drive.join("worker-2-0")
    drive.join("worker-3-0")
    drive.wait(1000)
    assert (drive.world.generation == 2) is grows
    assert not drive.facts(plans.WorldPlanned)


def test_never_means_never() -> None:
    """With ``never`` ranks that could agree are not asked to."""
    drive = grown(on_join="never")
    drive.wait(1000)
    assert not drive.facts(plans.WorldPlanned)
    assert drive.world.generation == 1


def test_late_word_that_ranks_can_agree_begins_a_plan() -> None:
    """Nodes that came before the script said that it saves are planned for when it does."""
    drive = Saves(nodes_min=2, nodes_max=4, grow_window_s=30.0)
    for node in ("worker-0-0", "worker-1-0"):
        drive.join(node)
    drive.wait(30)
    assert len(drive.members) == 2
    drive.run(1)
    drive.join("worker-2-0")
    drive.keeps()
    drive.join("worker-3-0")
    assert drive.planned
    assert drive.world.generation == 1


def test_a_growth_that_comes_to_no_boundary_is_dropped_and_tried_a_few_times() -> None:
    """A script that never arms trains on; the plan is made again after pauses that grow, and then no more."""
    drive = grown()
    drive.wait(100)
    assert dropped(drive) == ["the ranks reached no boundary within 100 s"]
    assert not drive.planned
    assert drive.asked()["worker-0-0"] == (0, False)
    drive.wait(20)
    assert drive.plan.number == 2
    drive.wait(10_000)
    numbers = [fact.plan for fact in drive.facts(plans.WorldPlanned)]
    assert numbers == [1, 2, 3]
    assert len(dropped(drive)) == TRIES_MAX
    assert MODEL.due(drive.state) is None
    assert (drive.world.generation, drive.members) == (1, ["worker-0-0", "worker-1-0"])
    # Another generation has another chance.
    drive.exit("worker-0-0", 0)
    assert len(drive.members) == 4


def test_ranks_wait_at_a_boundary_for_so_long_and_go_on() -> None:
    """One node never comes to the boundary: after `boundary_s` the others go on, and nobody was stopped."""
    drive = grown()
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.wait(19)
    assert drive.planned
    drive.wait(1)
    assert dropped(drive) == ["1 nodes waited 20 s at its boundary for the others"]
    assert drive.world.generation == 1
    assert drive.world.active
    drive.wait(20)
    drive.whole(12)
    assert formed(drive).resume_step == 12


def test_a_new_leader_lets_them_wait_anew() -> None:
    """While nobody led nobody could say that it waits there."""
    drive = grown(numbered=False)
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.wait(15)
    drive.take_over()
    drive.wait(10)
    assert drive.planned
    drive.hold(9, "worker-1-0")
    assert formed(drive).resume_step == 9


def test_nodes_without_a_common_step_go_on() -> None:
    """A world never forms from pieces of two steps."""
    drive = grown()
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.hold(8, "worker-1-0")
    assert dropped(drive) == ["the nodes hold no step in common at its boundary"]
    assert drive.world.active
    assert drive.world.generation == 1


def test_words_of_another_plan_count_for_nothing() -> None:
    """Armed for a plan that was dropped is not armed for the next one; who is armed already is told so."""
    drive = grown()
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.wait(40)
    assert drive.plan.number == 2
    assert not drive.plan.armed
    assert refused(drive.do(checkpoints.ReportArmed("worker-0-0", 1))) == "plan 1 is over"
    assert refused(drive.do(checkpoints.ReportArmed("worker-2-0", 2))) == "plan 2 is over"
    drive.arm("worker-0-0")
    assert "already" in refused(drive.arm("worker-0-0"))
    drive.do(checkpoints.ReportHeld("worker-0-0", 1, (9,), 1))
    drive.do(checkpoints.ReportHeld("worker-0-0", 1, (9,), 2))
    assert not drive.plan.at_boundary, "nobody can wait at a boundary that was not to be chosen"


def test_who_waits_at_a_boundary_does_not_hang() -> None:
    """Standing still there is what was asked for."""
    drive = grown()
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.do(NoteStall("worker", 1, 9, 61 * SECOND, 60 * SECOND, 0))
    assert not drive.facts(HangSuspected)


def test_a_failure_takes_in_who_is_there() -> None:
    """A worker dies while its ranks look for the boundary: the forced world is the larger one, and the plan is over."""
    drive = grown()
    drive.arm("worker-0-0")
    drive.exit("worker-1-0", 1)
    assert len(drive.members) == 4
    assert not drive.planned
    assert drive.state.incidents.number == 1


def test_a_member_that_dies_at_the_boundary_ends_the_plan() -> None:
    """The world breaks while others wait: the plan is dropped, the next world forms with those who are there."""
    drive = grown()
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.observe("worker-1-0", "failed", -9)
    assert not drive.planned
    drive.observe("worker-1-0", "gone")
    drive.join("worker-1-1")
    drive.wait(60)
    assert drive.members == ["worker-0-0", "worker-1-1", "worker-2-0", "worker-3-0"]


def test_a_newcomer_that_dies_is_not_waited_for() -> None:
    """One of two newcomers dies: the change is made for the other. Both: it is dropped."""
    drive = grown()
    drive.observe("worker-3-0", "failed", -9)
    assert drive.planned
    drive.arm("worker-0-0")
    drive.observe("worker-2-0", "failed", -9)
    assert dropped(drive) == ["the nodes that were to join are gone"]
    assert drive.world.generation == 1


def test_ranks_that_end_take_part_in_nothing_more() -> None:
    """A script that ends while a change is prepared ends: its plan is dropped, the job succeeds."""
    drive = grown()
    drive.arm()
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(world.ReportFinished(node, 1))
    assert dropped(drive) == ["its world has ended"]
    assert drive.state.job.state == "succeeded"


def test_suspended_in_the_middle() -> None:
    """A pause ends the plan; after it the world forms with everybody."""
    drive = grown()
    drive.arm()
    drive.do(job.SuspendJob("lunch"))
    assert dropped(drive) == ["its world has ended"]
    assert order(drive, "worker-0-0").plan == 0
    drive.wait(1000)
    drive.do(job.ResumeJob("back"))
    assert len(drive.members) == 4


# ---- several at once


def test_two_drains_are_one_change() -> None:
    """The second wish comes before ranks were told of the first: one boundary serves both."""
    drive = up(nodes_min=3, nodes_max=3)
    drain(drive, "worker-1")
    drain(drive, "worker-2")
    assert dropped(drive) == ["merged with another change"]
    assert drive.plan.leaving == ("worker-1-0", "worker-2-0")
    drive.join("worker-1-1")
    assert not drive.plan.asked_at
    drive.join("worker-2-1")
    drive.whole(9)
    assert drive.members == ["worker-0-0", "worker-1-1", "worker-2-1"]
    assert drive.world.generation == 2


def test_a_drain_during_a_growth_follows_it() -> None:
    """Ranks look for the growth's boundary: the drain waits for the next one, and loses no step either."""
    drive = grown()
    drain(drive)
    assert drive.plan.number == 1
    assert drive.plan.leaving == ()
    drive.whole(10)
    assert drive.members == ["worker-0-0", "worker-1-0", "worker-2-0", "worker-3-0"]
    drive.trains(11)
    assert drive.plan.leaving == ("worker-1-0",)
    drive.join("worker-1-1")
    drive.whole(15)
    assert drive.members == ["worker-0-0", "worker-1-1", "worker-2-0", "worker-3-0"]
    assert formed(drive).resume_step == 15


def test_a_drain_that_cannot_wait_for_a_growth_replaces_it() -> None:
    """The growth comes to no boundary: before its deadline is near the drain takes its place."""
    drive = grown(plan_s=1000.0)
    drive.do(notices.NoticeNode("worker-1-0", "preemption", 60 * SECOND))
    drive.wait(49)
    assert drive.plan.number == 1
    drive.wait(1)
    assert dropped(drive) == ["another change cannot wait for it"]
    assert drive.plan.leaving == ("worker-1-0",)
    drive.whole(10)
    assert "worker-1-0" not in drive.members
    assert formed(drive).resume_step == 10


# ---- why nothing happens


def awaited(drive: Drive) -> list[tuple[str, str, int]]:
    """What the sets wait for: kind, words, and the seconds left."""
    return [(one.why, one.words, max(0, one.until - drive.now) // SECOND) for one in reasons(drive.state, drive.now)]


def test_a_world_that_could_be_larger_says_what_it_waits_for() -> None:
    """By a plain restart or at a boundary: others have time to come."""
    for drive in (up(nodes_min=2, nodes_max=2), Saves(nodes_min=2, nodes_max=2, on_join="restart").up()):
        assert awaited(drive) == []
        scale(drive, 4, 2)
        assert awaited(drive) == [], "nobody is there yet"
        drive.join("worker-2-0")
        drive.now += 20 * SECOND
        assert awaited(drive) == [("grow", "3 of 4 nodes could train; the others have time to come", 40)]
        drive.join("worker-3-0")
        assert [why for why, _, _ in awaited(drive)] in ([], ["plan"]), "it restarts, or is changed at a boundary"


def test_a_world_whose_first_node_has_no_store_does_not_grow_and_says_so() -> None:
    """Rank 0 stays where it is, and a larger world needs a new store there."""
    drive = Saves(nodes_min=2, nodes_max=2, on_join="restart").up()
    for address in drive.state.world.offers["worker-0-0"]:
        drive.do(world.WithdrawStore("worker-0-0", address))
    scale(drive, 3, 2)
    drive.join("worker-2-0")
    words = "3 nodes could train; worker-0-0, which keeps rank 0, offers no store for a larger world"
    assert awaited(drive) == [("grow", words, 0)]
    assert drive.world.generation == 1
    drive.offer("worker-0-0")
    drive.wait(60)
    assert drive.world.generation == 2


def test_plans_that_came_to_nothing_are_told() -> None:
    """When the next one is tried; and that none is, in the end."""
    drive = grown()
    drive.wait(100)
    assert awaited(drive) == [("plan", "1 planned change of this generation came to nothing", 20)]
    drive.wait(10_000)
    assert awaited(drive) == [("plan", "3 planned changes of this generation came to nothing: no other is tried", 0)]


def test_who_leaves_and_has_no_successor_yet_is_told() -> None:
    """A leave is planned once its successor is on the way; the reason says whose is not, and until when that is awaited."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    del drive.state.nodes.nodes["worker-1-1"]
    drive.state.plans.by_group.clear()
    assert awaited(drive) == [("plan", "worker-1-0 to leave once a successor is on the way", 90)]
