"""Nodes that leave as planned, or at a notice: at a boundary at which everybody has saved, with a successor, or by a deadline."""

from __future__ import annotations

from typing import Any

from boundaries import Saves, up
from planning import SECOND, drain, dropped, formed, grown, order, refused, scale

from dlrover_core.history import render, status_of
from dlrover_core.job import checkpoints, checks, incidents, job, nodes, notices, operations, plans, progress, world
from dlrover_core.kernel.engine import Accepted, Command, Reply
from dlrover_core.kernel.events import Origin
from dlrover_core.rules.desired import desired
from dlrover_core.rules.reasons import reasons
from dlrover_core.sim.run import Input
from dlrover_core.testing.crashes import walk

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
