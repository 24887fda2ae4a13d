"""Waiting is not failing: what a node that its platform cannot place costs the others, its place and its job: nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from drive import SECOND, Drive

from dlrover_adapters.cli.told import Teller
from dlrover_core.history import render, status_of
from dlrover_core.history.report import report_of
from dlrover_core.history.timeline import CLASSES
from dlrover_core.history.words import say
from dlrover_core.job import incidents, job, nodes, queueing, waiting
from dlrover_core.rules import membership
from dlrover_core.rules import queueing as rules
from dlrover_core.rules.desired import desired

HOUR_S = 3600.0
NO_ROOM = "Unschedulable: 0/8 nodes are available"


def wait(drive: Drive, node: str, why: str = NO_ROOM) -> None:
    """The node's platform has no place for it."""
    drive.do(nodes.ObserveNodes((nodes.Observed(node, "pending", waits=why),)))


def refuse(drive: Drive, node: str, why: str = "quota exceeded") -> None:
    """Its backend does not take it for now."""
    drive.do(nodes.ObserveNodes((nodes.Observed(node, nodes.REFUSED, waits=why),)))


@pytest.mark.parametrize("how", [wait, refuse])
def test_hours_in_a_queue_cost_nothing(how: Callable[[Drive, str], None]) -> None:
    """Two nodes wait six hours: no incident, no budget, nothing lost; then they come, and the world forms."""
    drive = Drive(nodes_max=2, nproc=1)
    for node in ("worker-0-0", "worker-1-0"):
        how(drive, node)
        assert drive.names() == ["NodePending"]
    drive.wait(6 * HOUR_S)
    assert drive.new == []
    for node in ("worker-0-0", "worker-1-0"):
        drive.observe(node, "running")
        drive.join(node)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert drive.state.incidents.number == 0
    assert drive.state.incidents.relaunches == {}


def test_launch_s_stands_still_meanwhile() -> None:
    """What a node waits is no time of its own: it has all of launch_s before and after together."""
    drive = Drive(nodes_max=1, nproc=1, launch_s=900.0)
    drive.wait(500)
    wait(drive, "worker-0-0")
    drive.wait(5 * HOUR_S)
    assert drive.facts(nodes.NodeLost) == []
    drive.observe("worker-0-0", "pending")
    assert drive.facts(nodes.NodePending)[-1] == nodes.NodePending("worker-0-0")
    drive.wait(399)
    assert drive.facts(nodes.NodeLost) == []
    drive.wait(1)
    assert [fact.reason for fact in drive.facts(nodes.NodeLost)] == ["did not start within 900 s"]


def test_nobody_counts_on_it() -> None:
    """The others form their world at once, not after a last call; and after a loss too."""
    drive = Drive(nodes_min=1, nodes_max=3, nproc=1, last_call_s=300.0)
    for node in ("worker-0-0", "worker-1-0"):
        drive.join(node)
    assert not drive.members
    wait(drive, "worker-2-0")
    assert drive.members == ["worker-0-0", "worker-1-0"]
    drive.run(1)
    drive.observe("worker-1-0", "failed", -9, "OOMKilled")
    wait(drive, "worker-1-1")
    assert drive.members == ["worker-0-0"]
    assert drive.state.incidents.number == 1


def test_a_refused_node_is_asked_for_again() -> None:
    """It stays planned, so its launch is desired; its first acceptance ends the wait."""
    drive = Drive(nodes_max=1, nproc=1)
    refuse(drive, "worker-0-0")
    assert drive.facts(nodes.NodePending) == [nodes.NodePending("worker-0-0", "quota exceeded", accepted=False)]
    assert [launch.node for launch in desired(drive.state).launch] == ["worker-0-0"]
    refuse(drive, "worker-0-0")
    assert drive.new == []
    drive.listed()
    assert drive.new == [], "what its backend does not have is not gone"
    drive.observe("worker-0-0", "pending")
    assert drive.state.nodes.nodes["worker-0-0"].waits == ""
    refuse(drive, "worker-0-0")
    assert drive.new == [], "a late refusal of what is there says nothing"


def test_edges_are_facts_and_words_come_now_and_then() -> None:
    """That a node waits, and waits no more, is recorded at once; other words for the same wait once a minute."""
    drive = Drive(nodes_max=1, nproc=1)
    for words in ("0/8", "0/9"):
        wait(drive, "worker-0-0", words)
    assert [fact.waits for fact in drive.facts(nodes.NodePending)] == ["0/8"]
    drive.wait(60)
    wait(drive, "worker-0-0", "0/9")
    drive.observe("worker-0-0", "pending")
    wait(drive, "worker-0-0", "0/9")
    assert [fact.waits for fact in drive.facts(nodes.NodePending)] == ["0/8", "0/9", "", "0/9"]
    assert say(drive.facts(nodes.NodePending)[0]) == "node worker-0-0 waits: 0/8"


def test_status_and_reason_say_why() -> None:
    """People read why a node waits, and why its group has no world."""
    drive = Drive(nodes_max=2, nproc=1)
    drive.join("worker-0-0")
    wait(drive, "worker-1-0")
    assert [row.note for row in status_of(drive.state).nodes] == ["", f"waits: {NO_ROOM}"]
    found = membership.why_waiting(drive.state, "worker", drive.now)
    assert found is not None
    assert found.words == f"1 of at least 2 nodes are there; missed: worker-1-0 (waits: {NO_ROOM})"


def test_a_job_that_has_queued_has_a_report() -> None:
    """The time in the queue is a class of its own, with a word on what it means."""
    drive = Drive(nodes_max=2, nproc=1)
    for node in ("worker-0-0", "worker-1-0"):
        wait(drive, node)
    drive.wait(100)
    drive.observe("worker-0-0", "running")
    drive.observe("worker-1-0", "running")
    text = render.report(report_of(drive.records))
    assert re.search(r"queued +100\.000 s .* no world, and the platform had no place for a node", text)
    assert set(render.MEANINGS) == set(CLASSES)


def test_who_started_it_is_told_that_nodes_wait(tmp_path: Path) -> None:
    """Without a terminal there is no live line: one line says that nodes wait, one that none does; more words change nothing."""
    drive = Drive(nodes_max=2, nproc=1)
    said = tmp_path / "said"
    with said.open("w") as file:
        teller = Teller("j", file.fileno())
        for act in (
            lambda: wait(drive, "worker-0-0"),
            lambda: refuse(drive, "worker-1-0"),
            lambda: drive.observe("worker-0-0", "running"),
            lambda: drive.observe("worker-1-0", "running"),
            lambda: drive.join("worker-0-0"),
        ):
            act()
            teller.committed(drive.state, drive.new)
    assert said.read_text().splitlines() == [
        f"[j] 1 node waits for the platform: worker-0-0: {NO_ROOM}",
        "[j] no node waits for its platform any more",
    ]


# ---- what is half placed is given back


def hold_s(drive: Drive, name: str = "worker") -> float:
    """How long the set holds its nodes: gang_s, and a part of a quarter of it."""
    found = rules.hold_us(drive.state, name) / SECOND
    assert drive.spec.gang_s < found < drive.spec.gang_s * 1.25
    return found


def half(**settings: object) -> Drive:
    """One node of two is there, the other one waits."""
    drive = Drive(nodes_max=2, nproc=1, **settings)
    drive.observe("worker-0-0", "running")
    drive.join("worker-0-0")
    wait(drive, "worker-1-0")
    return drive


def test_half_a_group_is_given_back_and_asked_for_again() -> None:
    """After gang_s all of its nodes go, no incident opens, and after a pause it asks again with whole budgets."""
    drive = half()
    drive.wait(hold_s(drive) - 1)
    assert drive.facts(queueing.GivenBack) == []
    drive.wait(1)
    back = drive.facts(queueing.GivenBack)[0]
    assert (back.group, back.held, back.times) == ("worker", ("worker-0-0",), 1)
    assert back.reason == f"worker-1-0 waits: {NO_ROOM}"
    assert {node.released for node in drive.state.nodes.nodes.values()} == {nodes.GIVEN_BACK}
    assert desired(drive.state).names == frozenset()
    assert desired(drive.state).launch == ()
    found = membership.why_waiting(drive.state, "worker", drive.now)
    assert found is not None
    assert (found.why, found.until) == (waiting.ROOM, back.until)
    for node in ("worker-0-0", "worker-1-0"):
        drive.observe(node, "gone")
    pause_s = (back.until - drive.now) / SECOND
    assert 600 / 16 <= pause_s <= 600
    drive.wait(pause_s - 1)
    assert desired(drive.state).launch == ()
    drive.wait(1)
    assert drive.names()[:3] == ["AskedAgain", "NodePlanned", "NodePlanned"]
    assert [launch.node for launch in desired(drive.state).launch] == ["worker-0-1", "worker-1-1"]
    assert drive.state.incidents.number == 0
    assert drive.state.incidents.relaunches == {}


def test_two_jobs_pause_differently() -> None:
    """Pauses follow from the run, the group and the number of tries, and from nothing that is random."""
    pauses = {rules.pause_us(half().state, "worker", times) for times in range(1, 50)}
    assert len(pauses) == 49
    assert min(pauses) >= 600 * SECOND // 16
    assert max(pauses) <= 600 * SECOND
    other = half()
    other.state.job.run = "run-2"
    assert rules.pause_us(other.state, "worker", 1) != rules.pause_us(half().state, "worker", 1)
    assert rules.hold_us(other.state, "worker") != rules.hold_us(half().state, "worker")


def test_what_makes_progress_is_not_given_back() -> None:
    """The time is counted from the last node that was placed; who can train, or holds nothing, keeps what it has."""
    drive = Drive(nodes_max=3, nproc=1)
    drive.observe("worker-0-0", "running")
    for node in ("worker-1-0", "worker-2-0"):
        wait(drive, node)
    drive.wait(500)
    drive.observe("worker-1-0", "running")
    drive.wait(500)
    assert drive.facts(queueing.GivenBack) == []
    drive.wait(hold_s(drive) - 500)
    assert len(drive.facts(queueing.GivenBack)) == 1
    for settings in (
        {"nodes_min": 1, "nodes_max": 2},
        {"nodes_max": 2, "gang_s": 0.0},
        {"nodes_max": 2, "joining": True},
    ):
        drive = Drive(nproc=1, launch_s=10**6, **settings)
        drive.join("worker-0-0")
        wait(drive, "worker-1-0")
        drive.wait(HOUR_S)
        assert drive.facts(queueing.GivenBack) == []
    drive = Drive(nodes_max=2, nproc=1)
    for node in ("worker-0-0", "worker-1-0"):
        wait(drive, node)
    drive.wait(6 * HOUR_S)
    assert drive.facts(queueing.GivenBack) == [], "it holds nothing"


def test_nothing_is_planned_while_a_group_pauses() -> None:
    """A loss, a scale or a take-over meanwhile plans nobody; what dies meanwhile is no failure."""
    drive = half()
    drive.wait(hold_s(drive))
    planned = len(drive.facts(nodes.NodePlanned))
    drive.take_over()
    drive.observe("worker-0-0", "failed", -9)
    drive.observe("worker-0-0", "gone")
    assert len(drive.facts(nodes.NodePlanned)) == planned
    assert drive.facts(incidents.IncidentOpened) == []


# ---- room


def test_room_that_turns_is_told_at_once_and_other_numbers_now_and_then() -> None:
    """Whether anything would start is news; that others come and go is so once in room_s."""
    drive = Drive(nodes_max=1, nproc=1)
    for room in (5, 5, 4, 0, 0, 7):
        drive.do(queueing.NoteRoom("worker", room))
    assert [fact.room for fact in drive.facts(queueing.RoomChanged)] == [5, 0, 7]
    drive.wait(60)
    drive.do(queueing.NoteRoom("worker", 6))
    assert drive.facts(queueing.RoomChanged)[-1].room == 6
    assert say(drive.facts(queueing.RoomChanged)[-1]) == "6 more nodes of worker would start now"


def test_a_place_that_was_given_up_is_tried_again_on_room() -> None:
    """An hour after it was given up, once there is room; with a whole budget. Without room, or unknown, never."""
    drive = Drive(nodes_min=1, nodes_max=2, nproc=1, relaunch_max=0).up()
    drive.observe("worker-1-0", "failed", -9, "hardware")
    assert drive.state.nodes.slots["worker-1"].given_up
    drive.observe("worker-1-0", "gone")
    drive.wait(2 * HOUR_S)
    assert drive.facts(nodes.PlaceReopened) == []
    drive.do(queueing.NoteRoom("worker", 0))
    drive.wait(60)
    assert drive.facts(nodes.PlaceReopened) == []
    drive.do(queueing.NoteRoom("worker", 3))
    drive.wait(0)
    assert drive.facts(nodes.PlaceReopened) == [nodes.PlaceReopened("worker", 1)]
    assert "worker-1-1" in drive.state.nodes.nodes


# ---- avoided hosts


def test_avoided_hosts_are_allowed_after_a_last_call() -> None:
    """A node that waits because of them for last_call_s is planned anew without, charged to nobody; the next one avoids again."""
    drive = Drive(nodes_max=2, nproc=1, last_call_s=30.0, relaunch_max=3).up()
    drive.observe("worker-1-0", "failed", 1, "check_failed: slow link")
    charged = dict(drive.state.incidents.relaunches)
    drive.observe("worker-1-0", "gone")
    wait(drive, "worker-1-1", f"{nodes.AVOIDED}: host-of-worker-1-0")
    drive.wait(29)
    assert drive.facts(queueing.HostsAllowed) == []
    drive.wait(1)
    assert drive.facts(queueing.HostsAllowed) == [queueing.HostsAllowed("worker", 1, ("host-of-worker-1-0",))]
    assert drive.facts(nodes.NodePlanned)[-1] == nodes.NodePlanned("worker-1-2", "worker", 1, 2)
    drive.observe("worker-1-1", "gone")
    assert [(one.node, one.avoid) for one in desired(drive.state).launch] == [("worker-1-2", ())]
    assert drive.state.incidents.relaunches == charged
    assert drive.state.incidents.number == 1
    drive.join("worker-1-2")
    assert drive.state.queueing.anywhere == []
    drive.observe("worker-1-2", "failed", 1)
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("host-of-worker-1-0",)


def test_the_last_call_begins_when_only_avoided_hosts_are_left() -> None:
    """That a wait has become one for other hosts is told at once, and counts from then: it may have waited for room before."""
    drive = Drive(nodes_max=1, nproc=1, last_call_s=30.0)
    wait(drive, "worker-0-0")
    drive.wait(10)
    wait(drive, "worker-0-0", f"{nodes.AVOIDED}: host-7")
    drive.wait(29)
    assert drive.facts(queueing.HostsAllowed) == []
    drive.wait(1)
    assert [fact.index for fact in drive.facts(queueing.HostsAllowed)] == [0]


def test_other_waits_do_not_allow_them() -> None:
    """Who waits for room as such would gain nothing."""
    drive = Drive(nodes_max=1, nproc=1, last_call_s=30.0)
    wait(drive, "worker-0-0")
    drive.wait(300)
    assert drive.facts(queueing.HostsAllowed) == []


def test_a_new_run_knows_nothing_of_the_queue() -> None:
    """What an earlier run waited for is past."""
    drive = half()
    drive.do(queueing.NoteRoom("worker", 0))
    drive.wait(hold_s(drive))
    drive.do(job.StopJob("enough"))
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.queueing == queueing.QueueSlice()
    assert len(desired(drive.state).launch) == 2
