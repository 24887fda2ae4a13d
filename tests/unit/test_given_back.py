"""Sets beside a set that waits: while nobody trains that the job's end waits for, they give their nodes back with it."""

from __future__ import annotations

from typing import Any

import pytest
from drive import BEGIN, SECOND, Drive

from dlrover_core.history.report import report_of
from dlrover_core.history.words import say
from dlrover_core.job import incidents, nodes, queueing, silence, waiting, world
from dlrover_core.job.checkpoints import CheckpointCommitted, CommitCheckpoint, ReportHeld, ReportKeeping, SaveOrdered
from dlrover_core.rules import membership
from dlrover_core.rules import queueing as rules
from dlrover_core.rules.desired import desired
from dlrover_core.rules.reasons import reasons
from dlrover_core.spec import GroupSpec

NO_ROOM = "no room: every host is taken"
TRAINER = GroupSpec("trainer", 2, 2, nproc=1)
ROLLOUT = GroupSpec("rollout", 2, 2, nproc=1, coupling="each", ends=False)
EVALUATOR = GroupSpec("evaluator", 1, 1, nproc=1)
BEFORE, AFTER = "rollout-0-0", "rollout-1-0"


def wait(drive: Drive, *names: str) -> None:
    """The platform has no place for these nodes."""
    drive.do(nodes.ObserveNodes(tuple(nodes.Observed(name, "pending", waits=NO_ROOM) for name in names)))


def place(drive: Drive, *names: str) -> None:
    """These nodes run, and their agents have reported."""
    for name in names:
        drive.observe(name, "running")
        drive.join(name)


def held_up(*groups: GroupSpec, **settings: Any) -> Drive:
    """Both rollout workers run, and no trainer has a host."""
    drive = Drive(groups=groups or (TRAINER, ROLLOUT), **settings)
    wait(drive, *(f"trainer-{index}-0" for index in range(drive.spec.group("trainer").nodes_max)))
    place(drive, BEFORE, AFTER)
    assert drive.state.world.at("rollout-0").active
    return drive


def hold_s(drive: Drive) -> float:
    """How long the trainers wait before they and those beside them give back."""
    return rules.hold_us(drive.state, "trainer") / SECOND


def stop(drive: Drive, *names: str) -> None:
    """The workers of these nodes have stopped, as ordered."""
    for name in names:
        drive.do(world.ReportStopped(name, drive.state.world.of(name).generation))


def given_back(drive: Drive) -> list[str]:
    """The sets that have given their nodes back, in that order."""
    return [fact.group for fact in drive.facts(queueing.GivenBack)]


def test_those_beside_it_give_back_with_it() -> None:
    """Trainers wait for the room that rollout workers hold: these stop with grace, their nodes go, all ask again at once."""
    drive = held_up()
    drive.wait(hold_s(drive) - 1)
    assert given_back(drive) == []
    drive.wait(1)
    assert given_back(drive) == ["rollout-0", "rollout-1", "trainer"]
    facts = drive.facts(queueing.GivenBack)
    assert [fact.held for fact in facts] == [(BEFORE,), (AFTER,), ()]
    assert len({fact.until for fact in facts}) == 1
    ended = drive.facts(world.WorldDissolved)
    assert [(fact.group, fact.planned) for fact in ended] == [("rollout-0", True), ("rollout-1", True)]
    assert {node.node for node in drive.state.nodes.nodes.values() if not node.released} == {BEFORE, AFTER}
    orders = desired(drive.state).orders
    assert not orders[BEFORE].leave, "first its workers stop"
    assert orders[BEFORE].grace_us == round(drive.spec.stop_grace_s * SECOND)
    stop(drive, BEFORE, AFTER)
    assert {node.released for node in drive.state.nodes.nodes.values()} == {nodes.GIVEN_BACK}
    assert desired(drive.state).orders[BEFORE].grace_us == round(drive.spec.stop_grace_s * SECOND)
    for name in list(drive.state.nodes.nodes):
        drive.observe(name, "gone")
    drive.wait((facts[0].until - drive.now) / SECOND - 1)
    assert desired(drive.state).launch == ()
    drive.wait(1)
    assert [fact.group for fact in drive.facts(queueing.AskedAgain)] == ["trainer", "rollout-0", "rollout-1"]
    assert [one.node for one in desired(drive.state).launch][:2] == ["trainer-0-1", "trainer-1-1"], (
        "who is served asks first"
    )
    place(drive, "trainer-0-1", "trainer-1-1", "rollout-0-1", "rollout-1-1")
    assert all(one.active for one in drive.state.world.worlds.values())
    assert drive.facts(incidents.IncidentOpened) == []
    assert drive.state.incidents.charged("rollout-0").restarts == drive.state.incidents.restarts == 0
    assert drive.state.incidents.relaunches == {}
    assert drive.state.queueing.times == {}


@pytest.mark.parametrize("way", ["trains", "over", "off", "alone"])
def test_who_keeps_its_nodes(way: str) -> None:
    """While another set trains that the job's end waits for, without gang_s, or where a set serves nobody, all keep theirs."""
    groups = {"trains": (TRAINER, ROLLOUT, EVALUATOR), "over": (TRAINER, ROLLOUT, EVALUATOR)}
    groups["alone"] = (TRAINER, GroupSpec("rollout", 2, 2, nproc=1, coupling="each"))
    drive = held_up(*groups.get(way, ()), **{"gang_s": 0.0} if way == "off" else {})
    if way in ("trains", "over"):
        place(drive, "evaluator-0-0")
    if way == "over":
        drive.do(world.ReportFinished("evaluator-0-0", 1))
    drive.wait(3600)
    if way == "over":
        assert given_back(drive)[:3] == ["rollout-0", "rollout-1", "trainer"], (
            "the evaluator has finished: nobody trains"
        )
    else:
        assert given_back(drive) == []


def test_what_serves_and_waits_gives_back_its_place_in_the_queue() -> None:
    """A rollout worker that only waits would be placed meanwhile, and hold the room again."""
    drive = Drive(groups=(TRAINER, ROLLOUT))
    wait(drive, "trainer-1-0", "rollout-0-0", "rollout-1-0")
    place(drive, "trainer-0-0")
    drive.wait(hold_s(drive))
    assert given_back(drive) == ["trainer", "rollout-0", "rollout-1"]
    assert {node.released for node in drive.state.nodes.nodes.values()} == {nodes.GIVEN_BACK}
    assert desired(drive.state).launch == ()


def keeps(drive: Drive, url: str) -> None:
    """A rollout worker saves with FlashCheckpoint."""
    drive.do(ReportKeeping(BEFORE, 1, url, 1, 10, 1, False, 4096, 0))


def test_what_only_memory_holds_is_kept() -> None:
    """A set whose state is on no storage keeps its node; the others give theirs back."""
    drive = held_up()
    keeps(drive, "")
    drive.wait(hold_s(drive))
    assert given_back(drive) == ["rollout-1", "trainer"]
    assert drive.state.world.at("rollout-0").active


def test_a_set_that_waits_and_holds_the_only_state_keeps_its_nodes() -> None:
    """Those beside it give back alone: what they hold may be the very room that it waits for, and it is first in the queue."""
    drive = Drive(groups=(TRAINER, ROLLOUT))
    place(drive, "trainer-0-0", "trainer-1-0", BEFORE, AFTER)
    drive.do(ReportKeeping("trainer-0-0", 1, "", 1, 10, 1, False, 4096, 1))
    drive.observe("trainer-1-0", "failed", -9, "preempted")
    drive.observe("trainer-1-0", "gone")
    stop(drive, "trainer-0-0")
    drive.do(ReportHeld("trainer-0-0", 1, (5,), 0, ((1, 5),)))
    wait(drive, "trainer-1-1")
    relaunches = dict(drive.state.incidents.relaunches)
    drive.wait(hold_s(drive))
    assert given_back(drive) == ["rollout-0", "rollout-1"]
    stop(drive, BEFORE, AFTER)
    assert not drive.state.nodes.nodes["trainer-0-0"].released
    place(drive, "trainer-1-1")
    assert drive.state.world.at("trainer").generation == 2
    assert drive.state.incidents.relaunches == relaunches
    drive.wait(600)
    assert [fact.group for fact in drive.facts(queueing.AskedAgain)] == ["rollout-0", "rollout-1"]


def test_what_they_hold_is_written_first() -> None:
    """A node is released once its state is on storage; if the pause is over before, it stays, and goes on."""
    for late in (False, True):
        drive = held_up()
        keeps(drive, "file:///c")
        drive.wait(hold_s(drive))
        stop(drive, AFTER, BEFORE)
        assert not drive.state.nodes.nodes[BEFORE].released, "it has not said what it holds"
        drive.do(ReportHeld(BEFORE, 1, (5,)))
        assert [fact.step for fact in drive.facts(SaveOrdered)] == [5]
        assert not drive.state.nodes.nodes[BEFORE].released
        assert drive.state.nodes.nodes[AFTER].released
        told = [one.words for one in reasons(drive.state, drive.now) if one.group == "rollout-0"]
        assert told[0].startswith("it has given back its nodes, because there was no room for all that the job needs")
        if late:
            drive.wait(600)
            assert drive.state.world.at("rollout-0").generation == 2
            assert not drive.state.nodes.nodes[BEFORE].released
        else:
            drive.do(CommitCheckpoint("rollout-0", 1, 5, 1, 4096, 1))
            assert drive.facts(CheckpointCommitted)
            assert drive.state.nodes.nodes[BEFORE].released == nodes.GIVEN_BACK
        assert drive.facts(incidents.IncidentOpened) == []


def test_a_finished_set_makes_room_once_its_last_state_is_on_storage() -> None:
    """Its nodes have nothing left to do, and another set of the job has none; the job ends with both."""
    drive = Drive(groups=(TRAINER, EVALUATOR))
    place(drive, "trainer-0-0", "trainer-1-0")
    wait(drive, "evaluator-0-0")
    drive.do(ReportKeeping("trainer-0-0", 1, "file:///c", 1, 10, 1, False, 4096, 0))
    drive.do(world.ReportFinished("trainer-0-0", 1, 20, "it is being written", 20))
    drive.do(world.ReportFinished("trainer-1-0", 1, 20))
    drive.wait(1)
    assert drive.facts(nodes.NodeReleased) == []
    drive.do(CommitCheckpoint("trainer", 1, 20, 2, 4096, 1))
    drive.wait(0)
    released = [nodes.NodeReleased(name, nodes.UNNEEDED) for name in ("trainer-0-0", "trainer-1-0")]
    assert drive.facts(nodes.NodeReleased) == released
    for name in ("trainer-0-0", "trainer-1-0"):
        drive.do(nodes.ReportLeft(name))
        drive.observe(name, "gone")
    place(drive, "evaluator-0-0")
    drive.do(world.ReportFinished("evaluator-0-0", 1, 5))
    assert drive.state.job.state == "succeeded"
    assert drive.facts(incidents.IncidentOpened) == []
    assert len(drive.facts(nodes.NodePlanned)) == 3


def test_who_dies_or_falls_silent_meanwhile_is_no_failure() -> None:
    """A node that is lost while its workers are to stop is released with the others, charged to nobody."""
    drive = held_up(unreachable_s=20.0, mass_silence_s=20.0)
    drive.wait(hold_s(drive))
    drive.observe(BEFORE, "failed", -9)
    for name in (BEFORE, "trainer-0-0", "trainer-1-0"):
        drive.observe(name, "gone")
    drive.do(silence.NoteSilence(AFTER, 30 * SECOND))
    drive.wait(30)
    drive.take_over()
    drive.wait(600)
    assert [fact.node for fact in drive.facts(nodes.NodeLost)] == [AFTER]
    assert drive.facts(incidents.IncidentOpened) == []
    planned = [fact.node for fact in drive.facts(nodes.NodePlanned) if fact.incarnation == 1]
    assert planned == ["trainer-0-1", "trainer-1-1", "rollout-0-1", "rollout-1-1"]


def test_people_are_told() -> None:
    """Events, the reason of a set, and the report say what the nodes are given back for, and that the time is queued."""
    drive = held_up()
    drive.wait(hold_s(drive))
    fact = drive.facts(queueing.GivenBack)[0]
    assert say(fact) == (
        f"rollout-0 gives back 1 node, that others may have them, and asks again: trainer-0-0 waits: {NO_ROOM}, and 1 more"
    )
    found = membership.why_waiting(drive.state, "rollout-0", drive.now)
    assert found is not None
    assert (found.why, found.until) == (waiting.ROOM, fact.until)
    keeping = [one.words for one in reasons(drive.state, drive.now) if one.group == "rollout-0"][1:]
    assert keeping == ["workers of 1 node have not stopped yet"]
    assert say(drive.facts(queueing.GivenBack)[-1]).startswith(
        "trainer leaves its place in the queue, as other sets of the"
    )
    stop(drive, BEFORE, AFTER)
    assert report_of(drive.records).goodput.by_class["queued"] == pytest.approx(drive.now - BEGIN, rel=0.01)


def test_room_that_serving_sets_wait_for_is_no_time_in_a_queue() -> None:
    """The report counts as queued only what the job's end waits for: trainers that train are in no queue."""
    drive = Drive(groups=(TRAINER, ROLLOUT))
    wait(drive, "rollout-0-0", "rollout-1-0")
    place(drive, "trainer-0-0", "trainer-1-0")
    drive.wait(3600)
    assert given_back(drive) == []
    assert report_of(drive.records).goodput.by_class.get("queued", 0) == 0
