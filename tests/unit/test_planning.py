"""Planned changes of a world: nobody is stopped but at a boundary at which everybody has saved, and nothing waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from boundaries import Saves, up
from drive import Drive
from orders import Told

from dlrover_core.history import render, status_of
from dlrover_core.job import checkpoints, checks, incidents, job, nodes, notices, operations, plans, progress, world
from dlrover_core.job.hangs import HangSuspected, NoteStall
from dlrover_core.job.orders import Order
from dlrover_core.kernel.engine import Accepted, Command, NotDone, Reply
from dlrover_core.kernel.events import Origin
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.rules.plans import TRIES_MAX
from dlrover_core.rules.reasons import reasons
from dlrover_core.sim.run import Input
from dlrover_core.testing.crashes import walk

SECOND = 1_000_000


def order(drive: Drive, node: str) -> Order:
    """What an agent should be doing."""
    return Told(desired(drive.state).orders[node])


def scale(drive: Drive, nodes_max: int, nodes_min: int = 0) -> Reply:
    """Ask for other sizes."""
    return drive.do(operations.ScaleGroup("worker", nodes_min, nodes_max, "test"))


def drain(drive: Drive, node: str = "worker-1") -> Reply:
    """Ask for a node's leave."""
    return drive.do(operations.DrainNode(node, "test"))


def formed(drive: Drive) -> world.WorldFormed:
    """The newest world, as it was formed."""
    found = drive.facts(world.WorldFormed)[-1]
    assert isinstance(found, world.WorldFormed)
    return found


def dropped(drive: Drive) -> list[str]:
    """Why plans were dropped."""
    return [fact.reason for fact in drive.facts(plans.WorldPlanDropped)]


def refused(reply: Reply) -> str:
    """Why it was refused."""
    assert isinstance(reply, NotDone), reply
    return reply.reason


# ---- growth


def grown(**settings: Any) -> Saves:
    """2 -> 4, and both newcomers are there."""
    drive = up(nodes_min=2, nodes_max=2, **settings)
    scale(drive, 4, 2)
    drive.join("worker-2-0")
    drive.join("worker-3-0")
    return drive


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


# ---- leaving


def test_a_drain_plans_the_successor_first() -> None:
    """It is launched beside the one that leaves, off its host; ranks are armed when it is there, and it is in the next world."""
    drive = up(nodes_min=2, nodes_max=2)
    drive.state.nodes.nodes["worker-1-0"].host = "bad-host"
    drain(drive)
    assert drive.names() == ["NodeDrained", "NodePlanned", "WorldPlanned"]
    assert (drive.plan.joining, drive.plan.leaving) == (("worker-1-1",), ("worker-1-0",))
    launch = desired(drive.state).launch
    assert [one.node for one in launch] == ["worker-1-1"]
    assert launch[0].avoid
    assert drive.asked()["worker-0-0"] == (0, False)
    drive.observe("worker-1-1", "running")
    drive.join("worker-1-1")
    assert drive.asked()["worker-0-0"] == drive.asked()["worker-1-0"] == (1, False)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert drive.whole(30)[-2:] == ["WorldDissolved", "WorldFormed"]
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert (formed(drive).resume_step, formed(drive).resume_tier) == (30, "memory")
    # It serves what it holds until the next world trains.
    assert not order(drive, "worker-1-0").leave
    assert order(drive, "worker-1-0").generation == 0
    drive.trains(31)
    assert order(drive, "worker-1-0").leave
    assert order(drive, "worker-1-0").outcome == nodes.DRAINED
    assert drive.state.incidents.number == 0
    assert not drive.state.plans.leaving


def test_the_rank_0_node_can_be_drained() -> None:
    """Its successor takes its ranks, and its own store serves."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive, "worker-0")
    drive.join("worker-0-1")
    drive.whole(30)
    assert drive.members == ["worker-0-1", "worker-1-0"]
    assert formed(drive).store.startswith("worker-0-1:")


def test_a_job_of_one_node_moves() -> None:
    """Migration: the only node goes, and its successor trains on from the step at which it stopped."""
    drive = up(nodes_min=1, nodes_max=1)
    drain(drive, "worker-0")
    drive.join("worker-0-1")
    drive.whole(30)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-1"], 30)


def test_a_drain_without_a_successor_goes_to_the_boundary_before_its_deadline() -> None:
    """No other host is to be had: shortly before the deadline it leaves at a boundary all the same; the smaller world trains."""
    drive = up(nodes_min=1, nodes_max=2)
    drain(drive)
    drive.wait(89)
    assert drive.asked()["worker-0-0"] == (0, False)
    drive.wait(1)
    assert drive.asked()["worker-0-0"] == (1, False)
    drive.whole(50)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-0"], 50)
    drive.trains(51)
    assert order(drive, "worker-1-0").leave
    # The successor that came late is taken in at the next boundary.
    drive.join("worker-1-1")
    drive.whole(60)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-0", "worker-1-1"], 60)


def test_who_left_without_a_successor_is_waited_for_with_its_step() -> None:
    """The world needs two: it waits at the boundary's step for the successor, and resumes there."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.wait(90)
    assert drive.whole(50)[-1] == "WorldDissolved"
    assert drive.members == []
    assert not order(drive, "worker-1-0").leave
    drive.join("worker-1-1")
    drive.wait(30)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-0", "worker-1-1"], 50)


def test_a_drain_is_forced_at_its_deadline() -> None:
    """A script that never comes to a boundary: at the deadline the world is stopped with grace, as without our checkpoint."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.join("worker-1-1")
    drive.wait(99)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    drive.wait(1)
    assert dropped(drive) == ["worker-1-0: time to leave is over"]
    assert order(drive, "worker-1-0").outcome == nodes.DRAINED
    assert drive.facts(world.WorldDissolved)[-1].planned
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert drive.state.incidents.number == 0


def test_a_forced_drain_without_a_successor_waits_for_it() -> None:
    """Its successor is on its way already: nobody is planned twice."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.wait(100)
    assert drive.members == []
    assert order(drive, "worker-1-0").leave
    drive.join("worker-1-1")
    drive.wait(30)
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert len([fact for fact in drive.facts(nodes.NodePlanned) if fact.index == 1]) == 2


def test_a_successor_that_dies_is_replaced_in_the_plan() -> None:
    """The plan is made anew with the next one; the deadline stays."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    deadline = drive.plan.deadline
    drive.join("worker-1-1")
    drive.arm("worker-0-0")
    drive.observe("worker-1-1", "failed", -9)
    assert dropped(drive) == ["the successor of a leaving node is gone"]
    drive.observe("worker-1-1", "gone")
    drive.wait(20)
    assert (drive.plan.joining, drive.plan.deadline) == (("worker-1-2",), deadline)
    drive.join("worker-1-2")
    drive.whole(44)
    assert drive.members == ["worker-0-0", "worker-1-2"]


def test_a_failure_during_a_drain_leaves_out_who_leaves_if_it_can() -> None:
    """The successor is there: the forced world is without the one that leaves, which goes when the world trains."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.join("worker-1-1")
    drive.do(checkpoints.OfferReplica("worker-1-0", "10.0.0.1:1"))
    drive.exit("worker-0-0", 0)
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert order(drive, "worker-0-0").lenders == (), "there was no boundary: nobody knows what it has to lend"
    drive.trains(3)
    assert order(drive, "worker-1-0").leave


def test_a_failure_during_a_drain_keeps_who_leaves_if_it_must() -> None:
    """The successor is not there yet: the world goes on as it was, and the drain is planned again once it saves."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.exit("worker-0-0", 0)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert drive.world.generation == 2
    assert not drive.planned
    drive.trains(3)
    assert drive.plan.leaving == ("worker-1-0",)
    drive.join("worker-1-1")
    drive.whole(60)
    assert drive.members == ["worker-0-0", "worker-1-1"]


def test_who_leaves_and_dies_is_not_replaced_twice() -> None:
    """Its successor is on its way: it takes the place, and the failure plans nobody else."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.observe("worker-1-0", "failed", -9)
    assert not drive.planned
    assert not drive.state.plans.leaving
    drive.join("worker-1-1")
    drive.wait(60)
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert "worker-1-2" not in drive.state.nodes.nodes


def test_a_drain_is_asked_for_once() -> None:
    """Who leaves already cannot be drained again; its successor can, once it is there."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    assert refused(drain(drive, "worker-1-0")) == "node worker-1-0 leaves already: drained"
    assert "on no host yet" in refused(drain(drive, "worker-1"))


def test_an_agent_that_must_go_hastens_its_drain() -> None:
    """Its host is switched off sooner than was asked for: it goes within `stop_grace_s`, at a boundary."""
    drive = up(nodes_min=1, nodes_max=2)
    drain(drive)
    drive.do(operations.LeaveNode("worker-1-0", "SIGTERM"))
    assert drive.state.plans.leaving["worker-1-0"].deadline == drive.now + 10 * SECOND
    drive.wait(5)
    assert drive.asked()["worker-1-0"] == (1, False)
    drive.whole(20)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-0"], 20)


def test_an_agent_that_leaves_by_itself_leaves_at_a_boundary() -> None:
    """SIGTERM to an agent: half of its time for a successor, half for the boundary."""
    drive = up(nodes_min=1, nodes_max=2)
    assert isinstance(drive.do(operations.LeaveNode("worker-1-0", "SIGTERM")), Accepted)
    drive.join("worker-1-1")
    drive.whole(20)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-0", "worker-1-1"], 20)
    drive.trains(21)
    assert order(drive, "worker-1-0").outcome == nodes.LEAVING


def test_shrinking_loses_no_step() -> None:
    """4 -> 2: those beyond the maximum work on until the boundary, and go when the smaller world trains."""
    drive = up(nodes_min=2, nodes_max=4)
    scale(drive, 2, 2)
    assert drive.names() == ["GroupScaled", "WorldPlanned", "BoundaryAsked"]
    assert len(drive.members) == 4
    drive.whole(70)
    assert (drive.members, formed(drive).resume_step) == (["worker-0-0", "worker-1-0"], 70)
    drive.trains(71)
    assert order(drive, "worker-3-0").outcome == nodes.SCALED_DOWN


def test_shrinking_is_forced_at_its_deadline() -> None:
    """As it would be without our checkpoint."""
    drive = up(nodes_min=2, nodes_max=4)
    scale(drive, 2, 2)
    drive.wait(100)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert order(drive, "worker-2-0").outcome == nodes.SCALED_DOWN


def test_a_failure_while_shrinking_shrinks() -> None:
    """Whoever is too many is not taken into the forced world, and a death among them plans nobody."""
    drive = up(nodes_min=2, nodes_max=4)
    scale(drive, 2, 2)
    drive.observe("worker-3-0", "failed", -9)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert "worker-3-1" not in drive.state.nodes.nodes
    drive.trains(5)
    assert order(drive, "worker-2-0").leave


def test_growing_again_before_the_boundary_keeps_everybody() -> None:
    """4 -> 2 -> 4: nobody leaves, the plan is dropped, and no world ends."""
    drive = up(nodes_min=2, nodes_max=4)
    scale(drive, 2, 2)
    drive.arm()
    scale(drive, 4, 2)
    assert dropped(drive) == ["a node that was to leave stays, or is gone"]
    drive.wait(1000)
    assert drive.world.generation == 1
    assert not drive.state.plans.leaving
    assert {node.node for node in drive.state.nodes.nodes.values()} == {f"worker-{one}-0" for one in range(4)}


def test_shrinking_before_newcomers_came_drops_them() -> None:
    """2 -> 4 -> 2 while the newcomers wait at the door: they go, and no world ends."""
    drive = grown()
    scale(drive, 2, 2)
    assert dropped(drive) == ["the nodes that were to join are gone"]
    assert order(drive, "worker-3-0").leave
    assert drive.world.generation == 1


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


# ---- notices, migration


def test_a_notice_of_the_platform_is_a_drain_with_its_deadline() -> None:
    """What is announced to be taken away leaves before, once, however often it is said."""
    drive = up(nodes_min=2, nodes_max=2)
    for _ in range(3):
        drive.do(notices.NoticeNode("worker-1-0", "preemption", 60 * SECOND))
    facts = drive.facts(plans.NodeDrained)
    assert [(fact.node, fact.deadline - drive.now) for fact in facts] == [("worker-1-0", 60 * SECOND)]
    assert "preemption" in facts[0].reason
    drive.join("worker-1-1")
    drive.whole(8)
    assert drive.members == ["worker-0-0", "worker-1-1"]


def test_a_notice_changes_nothing_without_a_boundary() -> None:
    """Where ranks cannot agree nobody is stopped before it must be."""
    drive = Saves(nodes_min=2, nodes_max=2)
    drive.up()
    drive.do(notices.NoticeNode("worker-1-0", "preemption", 60 * SECOND))
    drive.do(notices.NoticeNode("nobody-1-0", "preemption", 60 * SECOND))
    assert not drive.facts(plans.NodeDrained)
    assert drive.names() == []


def test_without_our_checkpoint_a_drain_is_what_it_was() -> None:
    """The world ends at once, with grace; the successor is planned, and no plan is made."""
    drive = Saves(nodes_min=2, nodes_max=2)
    drive.up()
    drain(drive)
    assert drive.names() == ["NodeDrained", "WorldDissolved", "NodeReleased", "NodePlanned"]
    assert drive.facts(plans.NodeDrained)[0].deadline == 0


def test_plans_can_be_turned_off() -> None:
    """``plan_s`` 0: everything is as without our checkpoint."""
    drive = up(nodes_min=2, nodes_max=2, plan_s=0.0)
    drain(drive)
    assert "WorldDissolved" in drive.names()


def test_a_successor_is_checked_before_it_is_taken_in() -> None:
    """Beside a running world: ranks are armed when its check is passed."""
    drive = Saves(nodes_min=1, nodes_max=1, precheck="basic")
    for node in list(drive.state.nodes.nodes):
        drive.join(node)
    check = drive.state.checks.running["worker"]
    drive.do(checks.ReportCheck("worker-0-0", check.number, 1, True, True, 1, 1, ""))
    drive.trains()
    drain(drive, "worker-0")
    drive.join("worker-0-1")
    assert drive.asked()["worker-0-0"] == (0, False)
    check = drive.state.checks.running["worker"]
    drive.do(checks.ReportCheck("worker-0-1", check.number, 1, True, True, 1, 1, ""))
    assert drive.asked()["worker-0-0"] == (1, False)
    drive.whole(4)
    assert drive.members == ["worker-0-1"]


def test_a_new_run_remembers_no_plans() -> None:
    """What an earlier run had planned is over with it."""
    drive = grown()
    number = drive.plan.number
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert not drive.planned
    assert not drive.state.plans.leaving
    assert drive.state.plans.number == number


def test_a_leader_that_takes_over_goes_on_with_it() -> None:
    """At every point of a drain the master dies: all is in the state, and the end is the same."""

    def story(dies_before: int) -> list[str]:
        drive = up(nodes_min=2, nodes_max=2)
        acts = [
            lambda: drain(drive),
            lambda: drive.join("worker-1-1"),
            lambda: drive.arm("worker-0-0"),
            lambda: drive.arm("worker-1-0"),
            lambda: drive.hold(20, "worker-0-0"),
            lambda: drive.hold(20, "worker-1-0"),
            lambda: drive.trains(21),
        ]
        for place, act in enumerate(acts):
            if place == dies_before:
                drive.take_over()
            act()
        assert (formed(drive).resume_step, drive.members) == (20, ["worker-0-0", "worker-1-1"])
        assert order(drive, "worker-1-0").leave
        return [name for name in drive.names(drive.records) if name != "LeaderStarted"]

    ends = [story(place) for place in range(8)]
    assert all(end == ends[-1] for end in ends)


class Noted(Saves):
    """It remembers every command, as a master was given it."""

    def __init__(self, **settings: Any) -> None:
        self.inputs: list[Input] = []
        super().__init__(**settings)

    def do(self, command: Command, origin: Origin | None = None) -> Reply:
        """Handle one command now."""
        self.inputs.append(Input(self.now, command, origin, len(self.records)))
        return super().do(command, origin)


def test_the_master_dies_before_every_command_of_many_changes() -> None:
    """A successor reads all that it needs, wants the same, and decides the same, at each place of growth, drains and drops."""
    drive = Noted(nodes_min=2, nodes_max=2)
    drive.up()
    drive.keeps()
    scale(drive, 3, 2)
    drive.join("worker-2-0")
    drive.arm()
    drive.hold(9, "worker-0-0")
    drive.wait(45)
    drain(drive, "worker-0")
    drive.whole(12)
    drive.trains(13)
    drive.join("worker-0-1")
    drive.whole(20)
    drive.trains(21)
    drive.do(notices.NoticeNode("worker-1-0", "preemption", 30 * SECOND))
    drive.wait(31)
    drive.join("worker-1-1")
    drive.wait(31)
    drive.trains(22)
    scale(drive, 2, 2)
    drive.whole(30)
    drive.trains(31)
    assert [fact.resume_step for fact in drive.facts(world.WorldFormed)] == [-1, 12, 20, -1, 30]
    assert len(dropped(drive)) == 2
    done = walk(drive.inputs, drive.records)
    assert done.successors > 60


def test_the_end_of_the_first_step_is_the_end_of_who_left() -> None:
    """A node that has left the world and never hears of a first step goes at its deadline."""
    drive = up(nodes_min=2, nodes_max=2)
    drain(drive)
    drive.join("worker-1-1")
    drive.whole(5)
    assert not order(drive, "worker-1-0").leave
    drive.wait(100)
    assert order(drive, "worker-1-0").leave
    assert drive.world.active
    assert not drive.facts(progress.FirstStep)[1:]
    assert not drive.facts(incidents.IncidentOpened)


def test_who_leaves_at_a_boundary_stops_its_workers_with_grace() -> None:
    """As those who stay do: its end was planned, whatever others, who wait for a world, are told."""
    drive = up(nodes_min=3, nodes_max=3)
    drive.do(operations.ScaleGroup("worker", 2, 2, "test"))
    drive.do(checkpoints.OfferReplica("worker-2-0", "10.0.0.1:1"))
    drive.whole(41)
    assert order(drive, "worker-0-0").lenders == (("10.0.0.1:1", 2, 1),)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    grace_us = 10 * SECOND
    assert [order(drive, f"worker-{place}-0").grace_us for place in range(3)] == [grace_us] * 3
    assert (order(drive, "worker-2-0").generation, order(drive, "worker-2-0").leave) == (0, False)


def test_the_status_says_what_is_planned() -> None:
    """Who comes and goes, what it waits for, and how long it may take; nothing once it is over."""
    drive = up(nodes_min=2, nodes_max=2, nproc=4)

    def said() -> str:
        told = status_of(drive.state)._replace(waits=reasons(drive.state, drive.now))
        lines = render.status(told, drive.now).splitlines()
        return next((line.strip() for line in lines if "planned change" in line), "")

    assert said() == ""
    drain(drive)
    change = "worker: planned change 1 (worker-1-1 joins, worker-1-0 leaves) waits for "
    assert said() == f"{change}worker-1-1 to be ready, 1 min 40 s left"
    drive.now += 40 * SECOND
    drive.join("worker-1-1")
    assert said() == f"{change}worker-0-0, worker-1-0 to look for its boundary, 1 min 00 s left"
    drive.arm("worker-0-0")
    assert said() == f"{change}worker-1-0 to look for its boundary, 1 min 00 s left"
    drive.arm("worker-1-0")
    drive.hold(41, "worker-0-0")
    assert said() == f"{change}worker-1-0 to reach its boundary, 1 min 00 s left"
    drive.hold(41, "worker-1-0")
    assert said() == ""


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
