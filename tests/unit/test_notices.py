"""Notices of platforms: the newest counts, later or sooner; one that is withdrawn leaves everything as it was."""

from __future__ import annotations

import pytest
from boundaries import Saves, up
from drive import SECOND, Drive

from dlrover_core.history import render, status_of
from dlrover_core.history.words import say
from dlrover_core.job import incidents, job, nodes, notices, operations, plans, silence
from dlrover_core.kernel.engine import Accepted
from dlrover_core.rules import slots
from dlrover_core.rules.desired import desired
from dlrover_core.runtime.departures import DIED

NODE, NEXT = "worker-1-0", "worker-1-1"


def notice(drive: Drive, within_s: float, words: str = "preemption") -> list[str]:
    """The platform will take the node away in so long; the kinds of what follows."""
    drive.do(notices.NoticeNode(NODE, words, round(within_s * SECOND)))
    return drive.names()


def withdraw(drive: Drive) -> list[str]:
    """The platform will not; the kinds of what follows."""
    drive.do(notices.NoticeNode(NODE, "", 0))
    return drive.names()


def left_s(drive: Drive) -> float:
    """How long the node has until it leaves by force."""
    return (drive.state.plans.leaving[NODE].deadline - drive.now) / SECOND


def two(**settings: object) -> Saves:
    """Two nodes that train, and save."""
    return up(nodes_min=2, nodes_max=2, **settings)


# ---- the newest counts


@pytest.mark.parametrize("then_s", [15.0, 500.0])
def test_the_newest_deadline_counts(then_s: float) -> None:
    """Later or sooner than the one before: the node leaves by it, and nothing else changes."""
    drive = two()
    notice(drive, 60)
    drive.wait(5)
    assert notice(drive, then_s) == ["NoticeGiven"]
    assert drive.facts(notices.NoticeGiven)[-1].moves
    assert left_s(drive) == then_s
    assert [fact.node for fact in drive.facts(nodes.NodePlanned)][-1:] == [NEXT]
    assert len(drive.facts(plans.NodeDrained)) == 1


def test_a_later_deadline_is_waited_for() -> None:
    """Nobody is stopped at the deadline that counted before."""
    drive = two()
    notice(drive, 60)
    notice(drive, 600)
    drive.wait(580)
    assert (drive.world.generation, drive.plan.leaving, drive.plan.asked_at) == (1, (NODE,), 0)
    drive.wait(11)
    assert drive.plan.asked_at


def test_a_notice_without_a_time_is_followed_by_one_with_it() -> None:
    """As a platform says first that it will evict, and then when."""
    drive = two(plan_s=100.0)
    notice(drive, 0, "EvictionByEvictionAPI")
    assert left_s(drive) == 100
    assert notice(drive, 30, "deletion") == ["NoticeGiven"]
    assert left_s(drive) == 30
    assert drive.state.notices.by_node[NODE].words == "deletion"


def test_the_same_notice_again_is_no_news() -> None:
    """Every list repeats it, a moment late or early."""
    drive = two()
    notice(drive, 60)
    drive.wait(10)
    assert notice(drive, 49) == notice(drive, 51) == []
    assert left_s(drive) == 50


def test_a_drain_that_a_person_asked_for_is_only_made_sooner() -> None:
    """Whoever wants the node to leave in 100 s wants it even where the platform takes it later, or not at all."""
    drive = two(plan_s=100.0)
    drive.do(operations.DrainNode(NODE, "repair"))
    notice(drive, 1000)
    assert left_s(drive) == 100
    notice(drive, 40)
    assert left_s(drive) == 40
    assert withdraw(drive) == ["NoticeWithdrawn"]
    assert left_s(drive) == 40


def test_a_notice_waits_until_it_can_be_heeded() -> None:
    """It comes while nobody can agree on a boundary; once ranks can, the node leaves at one."""
    drive = Saves(nodes_min=2, nodes_max=2)
    drive.up()
    assert notice(drive, 60) == ["NoticeGiven"]
    drive.wait(10)
    drive.keeps()
    assert [(fact.node, fact.deadline - drive.now) for fact in drive.facts(plans.NodeDrained)] == [(NODE, 50 * SECOND)]


# ---- withdrawn


def test_a_node_whose_notice_is_withdrawn_stays() -> None:
    """Nobody is launched in its stead, its place is not free, and it leaves again when it must."""
    drive = two()
    notice(drive, 60)
    assert [one.node for one in desired(drive.state).launch] == [NEXT]
    assert withdraw(drive) == ["NoticeWithdrawn", "WorldPlanDropped", "NodeReleased", "NodeGone"]
    assert desired(drive.state).launch == ()
    assert not slots.vacant(drive.state, "worker", 1)
    assert drive.state.plans.leaving == {}
    drive.wait(1000)
    assert drive.world.generation == 1
    assert drive.facts(incidents.IncidentOpened) == []
    notice(drive, 60)
    assert [one.node for one in desired(drive.state).launch] == ["worker-1-2"]


def test_a_successor_that_has_come_is_let_go() -> None:
    """The plan is dropped, who was to follow leaves by plan, ranks go on; the host is the one of who stays."""
    drive = two()
    host = drive.state.hosts.host_of(NODE) or drive.state.nodes.nodes[NODE].host
    notice(drive, 60)
    drive.observe(NEXT, "running", host="h9")
    drive.join(NEXT)
    drive.arm("worker-0-0")
    drive.do(notices.NoticeNode(NODE, "", 0))
    assert drive.names() == ["NoticeWithdrawn", "WorldPlanDropped", "NodeReleased"]
    assert drive.facts(notices.NoticeWithdrawn) == [notices.NoticeWithdrawn(NODE, True, host)]
    assert drive.state.nodes.nodes[NEXT].released in nodes.BY_PLAN
    assert drive.state.hosts.host_of(NODE) == host
    assert set(drive.asked().values()) == {(0, False)}
    assert drive.members == ["worker-0-0", NODE]
    assert isinstance(drive.do(operations.DrainNode("worker-1", "test")), Accepted)
    assert NODE in drive.state.plans.leaving


def test_a_node_that_fails_after_all_is_replaced() -> None:
    """That it had a successor once does not leave its place empty."""
    drive = two()
    notice(drive, 60)
    withdraw(drive)
    drive.observe(NODE, "failed", 1)
    assert [one.node for one in desired(drive.state).launch] == ["worker-1-2"]


def test_it_is_too_late_once_the_world_is_without_it() -> None:
    """It lends what it holds until the next world trains, and goes."""
    drive = two()
    notice(drive, 60)
    drive.join(NEXT)
    drive.whole(8)
    assert withdraw(drive) == ["NoticeWithdrawn"]
    assert not drive.facts(notices.NoticeWithdrawn)[0].stays
    assert drive.members == ["worker-0-0", NEXT]
    drive.trains(9)
    assert drive.state.nodes.nodes[NODE].released == nodes.DRAINED


def test_only_what_was_announced_is_withdrawn() -> None:
    """Of a node without a notice nothing follows, nor of one that nobody knows."""
    drive = two()
    assert withdraw(drive) == []
    drive.do(notices.NoticeNode("nobody-9-9", "", 0))
    assert drive.names() == []


def test_backends_say_it_with_every_observation() -> None:
    """A notice is told again and again; its absence counts where there was one, and only of a node that runs."""
    known = notices.NoticeSlice(by_node={NODE: notices.Notice("preemption", 0, 0)})
    seen = [nodes.Observed(NODE, "running"), nodes.Observed("worker-0-0", "running")]
    assert list(notices.told(known, seen)) == [notices.NoticeNode(NODE, "", 0)]
    assert list(notices.told(known, [nodes.Observed(NODE, "failed", 1), nodes.Observed(NODE, "lost")])) == []
    warned = nodes.Observed("worker-0-0", "running", notice="drain", notice_us=5)
    assert list(notices.told(known, [warned])) == [notices.NoticeNode("worker-0-0", "drain", 5)]


def test_a_new_run_has_no_notices() -> None:
    """What was announced of nodes of an earlier run is past."""
    drive = two()
    notice(drive, 60)
    drive.do(job.StopJob("enough"))
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.notices == notices.NoticeSlice()


# ---- an agent that is told to go


def test_an_agent_takes_the_deadline_and_the_host_of_its_platform() -> None:
    """Its SIGTERM comes with the platform's word: by that time it leaves, and its successor keeps off the host."""
    drive = two(stop_grace_s=10.0)
    host = drive.state.nodes.nodes[NODE].host
    notice(drive, 45)
    drive.do(operations.LeaveNode(NODE, "SIGTERM"))
    fact = drive.facts(plans.NodeDrained)[-1]
    assert (fact.host, fact.deadline - drive.now) == (host, 45 * SECOND)
    assert fact.reason == "SIGTERM; its platform says: preemption"
    assert host in drive.facts(nodes.NodePlanned)[-1].avoid


def test_who_deletes_a_node_says_nothing_of_its_host() -> None:
    """`kubectl delete pod` of a person: the node leaves at a boundary, and its successor avoids no host."""
    drive = two()
    notice(drive, 45, nodes.DELETED)
    assert [fact.host for fact in drive.facts(plans.NodeDrained)] == [""]
    assert drive.facts(nodes.NodePlanned)[-1] == nodes.NodePlanned(NEXT, "worker", 1, 1)
    drive.do(operations.LeaveNode(NODE, "SIGTERM"))
    assert drive.facts(plans.NodeDrained)[-1].host == ""
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ()


def test_an_agent_that_was_told_to_go_goes() -> None:
    """A notice that is withdrawn then comes too late: the process ends."""
    drive = two()
    notice(drive, 45)
    drive.do(operations.LeaveNode(NODE, "SIGTERM"))
    assert withdraw(drive) == ["NoticeWithdrawn"]
    assert NODE in drive.state.plans.leaving


# ---- hosts that cannot be reached


def test_a_lost_host_of_a_living_agent_is_named() -> None:
    """The platform cannot reach it, the agent is heard: said once, and taken back; nobody is replaced."""
    drive = Drive(nodes_max=2).up()
    drive.observe(NODE, "lost", reason="NodeNotReady")
    assert drive.names() == ["HostUnreached"]
    drive.observe(NODE, "lost", reason="NodeNotReady")
    assert drive.names() == []
    assert "NodeNotReady" in render.status(status_of(drive.state))
    drive.observe(NODE, "running")
    assert drive.names() == ["HostReached"]
    drive.do(silence.NoteSilence(NODE, 16 * SECOND))
    assert drive.names() == ["NodeSuspected"]


def test_a_lost_host_whose_agent_falls_silent_is_lost_at_once() -> None:
    """The second word of the two is enough, whichever it is."""
    drive = Drive(nodes_max=2).up()
    drive.observe(NODE, "lost", reason="NodeNotReady")
    drive.do(silence.NoteSilence(NODE, 16 * SECOND))
    assert [(fact.node, fact.reason) for fact in drive.facts(nodes.NodeLost)] == [(NODE, "NodeNotReady")]
    assert [planned.node for planned in drive.facts(nodes.NodePlanned)][-1] == NEXT
    assert drive.state.notices.unreached == {}


def test_a_lost_host_is_why_its_agent_died() -> None:
    """The platform loses the host, then the agent's connection ends: the platform's word is the cause of the incident."""
    drive = Drive(nodes_max=2).up()
    drive.observe(NODE, "lost", reason="NODE_DIED: UNEXPECTED_TERMINATION: health check failed")
    drive.do(silence.NoteDead(NODE, DIED))
    (failed,) = drive.facts(nodes.NodeFailed)
    assert (failed.reason, failed.seen) == (
        f"NODE_DIED: UNEXPECTED_TERMINATION: health check failed; {DIED}",
        False,
    )
    assert [(one.verdict, one.signature) for one in drive.facts(incidents.Diagnosed)] == [("PLAT", "ray.node_died")]


def test_a_lost_host_whose_agent_died_is_lost_at_once() -> None:
    """Its platform has nothing more to say of the node: the next one is launched without another word, and elsewhere."""
    drive = Drive(nodes_max=2).up()
    host = drive.state.nodes.nodes[NODE].host
    drive.observe(NODE, "lost", reason="NodeNotReady")
    drive.do(silence.NoteDead(NODE, DIED))
    assert [(one.node, one.reason) for one in drive.facts(nodes.NodeLost)] == [(NODE, "NodeNotReady")]
    assert [(one.node, host in one.avoid) for one in desired(drive.state).launch] == [(NEXT, True)]
    assert len(drive.facts(incidents.IncidentOpened)) == 1
    assert drive.state.notices.unreached == {}


@pytest.mark.parametrize("back", ["running", ""])
def test_an_agent_that_died_on_a_host_that_is_reached(back: str) -> None:
    """Nobody has lost the host, or it is there again: the end of the connection is all that is known."""
    drive = Drive(nodes_max=2).up()
    if back:
        drive.observe(NODE, "lost", reason="NODE_DIED: EXPECTED")
        drive.observe(NODE, back)
    drive.do(silence.NoteDead(NODE, DIED))
    assert [one.reason for one in drive.facts(nodes.NodeFailed)] == [DIED]


# ---- in words


def test_status_and_events_say_it() -> None:
    """Which node, what, when, and what became of it."""
    drive = two()
    notice(drive, 60)
    told = render.status(status_of(drive.state))
    assert "the platform will take it away" in told
    assert "preemption" in told
    assert say(drive.facts(notices.NoticeGiven)[0]).startswith(f"the platform will take {NODE} away, at ")
    withdraw(drive)
    assert say(drive.facts(notices.NoticeWithdrawn)[0]).startswith(
        f"the platform will not take {NODE} away after all, and stays"
    )
    assert "take it away" not in render.status(status_of(drive.state))


def test_who_is_ended_needs_no_notice() -> None:
    """Of a node that is released already nothing follows."""
    drive = two()
    drive.observe(NODE, "failed", 1)
    assert notice(drive, 60) == []


def test_a_leaving_node_is_told_how_long_its_platform_leaves_it() -> None:
    """An agent that was told to go waits so long for its planned change; without a deadline it is told nothing."""
    drive = two()

    def told() -> dict[str, int]:
        parts = {node: order.part(notices.Departure).within_us for node, order in desired(drive.state).orders.items()}
        return {node: round(within_us / SECOND) for node, within_us in parts.items() if within_us}

    notice(drive, 60)
    assert told() == {NODE: 60}
    drive.wait(10)
    notice(drive, 500)
    assert told() == {NODE: 500}
    withdraw(drive)
    assert told() == {}
    drive.do(operations.DrainNode(NODE, "repair"))
    assert told() == {}, "a person says it, and no platform"
