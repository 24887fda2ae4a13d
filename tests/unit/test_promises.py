"""Promises that can be broken: each is shown a history that breaks it, and it alone notices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest
from drive import Drive
from promised import BLANK, blank, over, relaunched, restarted, running, show, shown, waiting

from dlrover_core.data.cut import Place, pack
from dlrover_core.diagnosis import ladder
from dlrover_core.job import (
    checkpoints,
    incidents,
    job,
    nodes,
    notices,
    operations,
    plans,
    progress,
    queueing,
    shards,
    silence,
    world,
)
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import CommandFailed
from dlrover_core.kernel.events import Origin, Record
from dlrover_core.rules import queueing as queueing_rules
from dlrover_core.spec import GroupSpec
from dlrover_core.testing import invariants

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.msgpack"))


def altered(records: list[Record], cls: type, nth: int = -1, **fields: Any) -> set[str]:
    """What breaks when the nth event of a kind has other fields."""
    place = [record.seq for record in records if isinstance(record.event, cls)][nth]

    def show(record: Record) -> Record:
        return record._replace(event=record.event._replace(**fields)) if record.seq == place else record  # type: ignore[attr-defined]

    return shown(records, show)


def moved(records: list[Record], place: int, **fields: Any) -> set[str]:
    """What breaks when a record has another place."""
    return shown(records, lambda record: record._replace(**fields) if record.seq == place else record)


def salvaged() -> Drive:
    """A job saves; a worker died, what all held was ordered to be written; the next generation was restored."""
    drive = Drive(numbered=True).up()
    keeping = checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 1, 10, 3, False, 4096, 0)
    drive.say(keeping)
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 10, 2, 1, 1))
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 20, 2, 1, 1))
    drive.exit("worker-1-0", 3, step=25)
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(checkpoints.ReportHeld(node, 1, (24, 25)))
    drive.say(keeping._replace(generation=2))
    drive.say(checkpoints.ReportRestored("worker-0-0", 2, 25, "memory", 1))
    drive.say(checkpoints.ReportStorage("worker-0-0", "file:///c", "no space"))
    return blank(drive.run(26))


def consumed() -> Drive:
    """A job with data resumes from its checkpoint of step 10, and stores step 20."""
    drive = running()

    def cut(step: int) -> bytes:
        return pack((Place("train", 0, 4 * step, ""),))

    keeping = checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 1, 10, 3, False, 4096, 0)
    drive.say(keeping)
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 10, 2, 1, 1, (cut(10),)))
    drive.exit("worker-1-0", 3, step=25)
    drive.say(keeping._replace(generation=2))
    drive.say(checkpoints.ReportRestored("worker-0-0", 2, 10, "storage", 1, (), 1, cut(10)))
    drive.do(checkpoints.CommitCheckpoint("worker", 2, 20, 2, 1, 1, (cut(20),)))
    return blank(drive)


def freed() -> Drive:
    """A job that saves is suspended without nodes: what they hold is being written."""
    drive = Drive(numbered=True).up()
    drive.say(checkpoints.ReportKeeping("worker-0-0", 1, "file:///c", 1, 10, 3, False, 4096, 0))
    drive.do(job.SuspendJob("lunch", keep_nodes=False))
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(world.ReportStopped(node, 1, 5))
        drive.say(checkpoints.ReportHeld(node, 1, (5,)))
    return blank(drive)


def drained(drive: Drive) -> Drive:
    """A person wants a node's host free, at once."""
    drive.do(operations.DrainNode("worker-0-0", "maintenance"))
    return drive


def queued() -> Drive:
    """One node is there, the platform has no place for the other one."""
    drive = Drive(numbered=True)
    drive.observe("worker-0-0", "running")
    drive.join("worker-0-0")
    drive.do(nodes.ObserveNodes((nodes.Observed("worker-1-0", "pending", waits="no room"),)))
    return blank(drive)


def given_back() -> Drive:
    """What was half placed is given back, and gone."""
    drive = queued()
    drive.wait(queueing_rules.hold_us(drive.state, "worker") / 1_000_000)
    for node in ("worker-0-0", "worker-1-0"):
        drive.observe(node, "gone")
    return blank(drive)


def asked_again() -> Drive:
    """It is asked for again."""
    drive = given_back()
    drive.wait(600)
    return drive


def silent() -> Drive:
    """A node has been silent for a second."""
    drive = Drive(numbered=True).up()
    drive.do(silence.NoteSilence("worker-1-0", 15_000_000))
    drive.wait(1)
    return blank(drive)


def hasty() -> Drive:
    """A program that fails at once has done so three times, and is not started again yet."""
    drive = Drive(max_restarts=9).up()
    for _ in range(3):
        drive.exit("worker-1-0", 3, 1, "Traceback\nValueError: no")
        for node in ("worker-0-0", "worker-1-0"):
            drive.offer(node)
        if drive.world.active:
            for node in ("worker-0-0", "worker-1-0"):
                drive.do(world.ReportStarted(node, drive.world.generation))
    return blank(drive)


def hasty_without_a_step() -> Drive:
    """The same, of a program that never made one."""
    drive = Drive(max_restarts=9)
    for node in ("worker-0-0", "worker-1-0"):
        drive.observe(node, "running")
        drive.join(node)
    for _ in range(3):
        drive.exit("worker-1-0", 3, 1, "Traceback\nValueError: no")
        for node in ("worker-0-0", "worker-1-0"):
            drive.offer(node)
    assert not drive.world.active
    return blank(drive)


def unnoticed() -> Drive:
    """The last store that a world needs is on offer, and nobody looks for a second."""
    drive = Drive()
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(nodes.ReportJoined(node, "h", "a", 2))
    drive.engine._emit(world.StoreOffered("worker-0-0", "a:1"), drive.now, 0, None)
    drive.now += 1_000_000
    drive.wait(0)
    assert drive.world.active
    return drive


def _booted_anew() -> Drive:
    """An agent's process died and another one speaks for its node."""
    drive = Drive(numbered=True).up()
    drive.do(nodes.ReportLeft(BLANK), origin=Origin("worker-0-0", 8, 1))
    return blank(drive)


def departed() -> Drive:
    """A node is gone and will not come back; its successor is not there yet."""
    drive = waiting()
    drive.observe("worker-1-0", "gone")
    return blank(drive)


def leaving() -> Drive:
    """A node of a job that saves with us is to leave; its successor is not there yet."""
    drive = Drive(nodes_min=2, nproc=1).up()
    drive.do(checkpoints.ReportKeeping("worker-0-0", 1, "memory:x", 1, 10, 3, True, 1))
    drive.do(operations.DrainNode("worker-1-0", "maintenance"))
    return blank(drive)


def left() -> Drive:
    """It has left at a boundary, and its successor trains."""
    drive = leaving()
    drive.join("worker-1-1")
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(checkpoints.ReportArmed(node, 1))
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(checkpoints.ReportHeld(node, 1, (40,), 1))
    return blank(drive.run(41))


def several(*, fails: bool = False) -> Drive:
    """Trainers, rollouts that train alone, an evaluator: all run, and the trainers make steps. Of one rollout a worker died."""
    groups = (
        GroupSpec("trainer", 2, 2),
        GroupSpec("rollout", 2, 2, coupling="each", ends=False, store=False),
        GroupSpec("evaluator", ends=False, critical=False, store=False, max_restarts=0),
    )
    drive = Drive(groups=groups)
    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.join(node)
    for node in drive.state.nodes.nodes:
        drive.do(world.ReportStarted(node, 1))
    drive.do(progress.ReportFirstStep("trainer-0-0", 1, 1, told=True))
    dies = "evaluator-0-0" if fails else "rollout-1-0"
    drive.do(incidents.ReportExit(dies, 1, 0, 1, step=1, error="ValueError: bad batch"))
    return blank(drive)


def given_up() -> Drive:
    """The same, and the evaluator has failed for good."""
    drive = several(fails=True)
    drive.wait(600)
    return blank(drive)


STORIES = (
    several,
    given_up,
    leaving,
    left,
    running,
    restarted,
    relaunched,
    waiting,
    silent,
    hasty,
    hasty_without_a_step,
    over,
    departed,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_good_histories_keep_every_promise(story: Callable[[], Drive]) -> None:
    """Nothing is broken by what is as it should be."""
    drive = story()
    assert invariants.check_history(drive.records) == drive.state
    assert shown(drive.records, lambda record: record) == set()


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_recorded_histories_keep_every_promise(path: Path) -> None:
    """Nor by what was recorded when the promises were younger."""
    payloads = msgpack.unpackb(path.read_bytes())
    records = [record for payload in payloads for record in CODEC.decode(payload).records]
    assert invariants.check_history(records).seq == len(records)


class Case(NamedTuple):
    """A history, what is shown in it, and the promise that breaks."""

    promise: str
    story: Callable[[], Drive]
    breaks: Callable[[list[Record]], set[str]]


def form(**fields: Any) -> Callable[[list[Record]], set[str]]:
    """What breaks when the second world is another one."""
    return lambda records: altered(records, world.WorldFormed, 1, **fields)


def change(cls: type, nth: int = -1, **fields: Any) -> Callable[[list[Record]], set[str]]:
    """What breaks when an event has other fields."""
    return lambda records: altered(records, cls, nth, **fields)


def misplace(place: int, **fields: Any) -> Callable[[list[Record]], set[str]]:
    """What breaks when a record has another place."""
    return partial(_misplaced, place, fields)


def _misplaced(place: int, fields: dict[str, Any], records: list[Record]) -> set[str]:
    return moved(records, place if place > 0 else len(records) + 1 + place, **fields)


def dropped(records: list[Record]) -> set[str]:
    """What breaks when a record is left out."""
    return shown(records, lambda record: record._replace(seq=record.seq + (record.seq > 9)))


def without_effect(records: list[Record]) -> set[str]:
    """What breaks when a restart's world has another cause."""
    place = next(r.seq for r in records if isinstance(r.event, world.WorldFormed) and r.event.generation == 2)
    return moved(records, place, cause=records[place - 1].cause - 1)


def unclosed(records: list[Record]) -> set[str]:
    """What breaks when an incident is not closed by the first step after it."""
    place = next(record.seq for record in records if isinstance(record.event, incidents.IncidentClosed))
    return moved(records, place, event=job.Archived(1, 1, ""))


FORMED = world.WorldFormed("worker", 4, (("worker", 0, 2, 0, 2),), "worker-0-0:7", "too soon")
GIVE_UP = {"action": ladder.AWAIT_EVIDENCE, "rule": "workers.exhausted: none left", "budget_left": 0}
BIG = "x" * (incidents.TAIL_BYTES_MAX + 1)

CASES = {
    "a number twice": Case("order", running, misplace(9, seq=8)),
    "a number left out": Case("order", running, dropped),
    "time goes back": Case("order", running, misplace(-1, at=1)),
    "a token goes back": Case("order", running, misplace(-1, token=0)),
    "an effect before its cause": Case("order", running, misplace(-1, cause=10**6)),
    "an effect long after its cause": Case("order", restarted, misplace(-1, cause=1)),
    "two leaders with one token": Case(
        "order",
        lambda: blank(_led_twice()),
        show(job.LeaderStarted("another", "0")),
    ),
    "a command twice": Case("commands", running, show(nodes.NodePending("worker-0-0"), Origin("worker-0-0", 7, 1))),
    "a command left out": Case("commands", running, show(nodes.NodePending("worker-0-0"), Origin("worker-0-0", 7, 99))),
    "a decision that raised": Case("commands", running, show(CommandFailed("Tick", "ValueError", "here:1"))),
    "a word of the gone": Case("commands", departed, show(nodes.NodePending("worker-0-0"), Origin("worker-1-0", 7, 1))),
    "a generation is left out": Case("worlds", restarted, form(generation=3)),
    "a place twice": Case("worlds", restarted, form(members=(("worker", 0, 1, 0, 2), ("worker", 0, 1, 0, 2)))),
    "a stranger": Case("worlds", restarted, form(members=(("worker", 0, 1, 0, 2), ("worker", 5, 1, 0, 2)))),
    "other ranks": Case("worlds", restarted, form(members=(("worker", 0, 2, 0, 1),))),
    "a store twice": Case("worlds", restarted, form(store="worker-0-0:1")),
    "a store of nobody": Case("worlds", restarted, form(store="worker-9-9:1")),
    "a store of another node": Case("worlds", restarted, form(store="worker-1-0:3")),
    "an older world started": Case("worlds", restarted, change(world.WorkersStarted, -1, generation=1)),
    "an older world dissolved": Case("worlds", waiting, change(world.WorldDissolved, -1, generation=0)),
    "an older boot again": Case(
        "commands", _booted_anew, show(nodes.NodePending("worker-0-0"), Origin("worker-0-0", 7, 1))
    ),
    "started twice": Case("worlds", running, show(world.WorkersStarted("worker-0-0", 1))),
    "started as a stranger": Case("worlds", running, show(world.WorkersStarted("worker-7-0", 1))),
    "a second first step": Case("worlds", running, show(progress.FirstStep(1, 9, "worker-0-0"))),
    "a step of the past": Case("worlds", restarted, change(progress.FirstStep, -1, generation=1)),
    "a store of the departed": Case("worlds", waiting, show(world.StoreOffered("worker-1-0", "a:1"))),
    "a store withdrawn that was not there": Case("worlds", running, show(world.StoreWithdrawn("worker-0-0", "a:1"))),
    "smaller than allowed": Case(
        "sizes", restarted, change(job.JobCreated, spec=Drive(nodes_min=3, nodes_max=4).spec.to_json())
    ),
    "formed while suspended": Case("sizes", lambda: _then_restarted(running()), show(job.JobSuspended("lunch"))),
    "stopped for nothing": Case("provoked", running, show(world.WorldDissolved("worker", 1, "a new leader"))),
    "planned beside the living": Case("places", running, show(nodes.NodePlanned("worker-1-1", "worker", 1, 1))),
    "an incarnation left out": Case("places", relaunched, change(nodes.NodePlanned, node="worker-1-3", incarnation=3)),
    "no patience": Case("patience", silent, show(nodes.NodeLost("worker-1-0", "silent"))),
    "given up while it waits": Case("waiting", queued, show(nodes.NodeLost("worker-1-0", "did not start"))),
    "failed unseen while it waits": Case(
        "waiting", queued, show(nodes.NodeFailed("worker-1-0", -1, "late", seen=False))
    ),
    "planned in a pause": Case("waiting", given_back, show(nodes.NodePlanned("worker-0-1", "worker", 0, 1))),
    "planned for a job without nodes": Case("freed", freed, show(nodes.NodePlanned("worker-9-0", "worker", 9, 0))),
    "given back before it is written": Case(
        "freed", lambda: drained(freed()), change(nodes.NodeReleased, reason=nodes.SUSPENDED)
    ),
    "given back by a job that runs": Case(
        "freed", lambda: drained(Drive(numbered=True).up()), change(nodes.NodeReleased, reason=nodes.SUSPENDED)
    ),
    "no notice, and it is withdrawn": Case("stays", running, show(notices.NoticeWithdrawn("worker-0-0"))),
    "asked for too early": Case("waiting", asked_again, change(queueing.GivenBack, until=10**12)),
    "nothing given back": Case("waiting", given_back, change(queueing.GivenBack, held=())),
    "an incident left out": Case("incidents", restarted, change(incidents.IncidentOpened, incident=5)),
    "closed twice": Case("incidents", restarted, show(incidents.IncidentClosed(1, 1, 0))),
    "judged when closed": Case("incidents", restarted, show(incidents.Diagnosed(1, "USER", "x", (1,), 0.5))),
    "an action too many": Case(
        "incidents", waiting, show(incidents.ActionChosen(1, ladder.FAIL_JOB, "worker-1-0", "x", 0))
    ),
    "mended before it broke": Case("incidents", over, change(incidents.IncidentClosed, incident=1, down_us=-1)),
    "opened by nobody's death": Case("incidents", restarted, change(incidents.IncidentOpened, generation=2)),
    "mended and not closed": Case("incidents", restarted, unclosed),
    "released and not told": Case("told", running, show(nodes.NodeReleased("worker-0-0", "drained"))),
    "silent for ever": Case("patience", silent, misplace(-1, at=10**11)),
    "no world though one could form": Case("prompt", hasty_without_a_step, misplace(-1, at=10**11)),
    "nobody looks though a world could form": Case(
        "reasons", unnoticed, lambda records: shown(records, lambda one: one)
    ),
    "an action without effect": Case("effects", restarted, without_effect),
    "a job that is not failed": Case("effects", relaunched, change(incidents.ActionChosen, action=ladder.FAIL_JOB)),
    "a restart for nothing": Case("budgets", restarted, change(incidents.ActionChosen, budget_left=3)),
    "overdrawn": Case("budgets", restarted, change(incidents.ActionChosen, budget_left=-1)),
    "one node relaunched twice": Case("budgets", relaunched, change(incidents.ActionChosen, node="worker-1-0")),
    "given up too early": Case("budgets", restarted, change(incidents.ActionChosen, **GIVE_UP)),
    "no pause": Case("pauses", hasty_without_a_step, show(FORMED)),
    "a plan's number left out": Case("plans", leaving, change(plans.WorldPlanned, plan=7)),
    "a plan for who is no member": Case("plans", leaving, change(plans.WorldPlanned, leaving=("worker-9-0",))),
    "a boundary before all are armed": Case("plans", left, change(plans.BoundaryAsked, 0, go=True)),
    "another step than the boundary's": Case("plans", left, form(resume_step=39)),
    "a plan nobody made is dropped": Case("plans", running, show(plans.WorldPlanDropped("worker", 1, "x"))),
    "left too late": Case("plans", leaving, misplace(-1, at=10**11)),
    "planned after the end": Case("absorbing", over, show(nodes.NodePlanned("worker-9-0", "worker", 9, 0))),
    "suspended after the end": Case("absorbing", over, show(job.JobSuspended("late"))),
    "ended twice": Case("absorbing", over, show(job.JobFailed("x", 1, "y"))),
    "it says twice that it saves": Case("checkpoints", salvaged, change(checkpoints.KeepingStarted, generation=1)),
    "an older step is committed": Case("checkpoints", salvaged, change(checkpoints.CheckpointCommitted, step=5)),
    "committed of who does not save": Case(
        "checkpoints", salvaged, change(checkpoints.CheckpointCommitted, generation=7)
    ),
    "a checkpoint without parts": Case("checkpoints", salvaged, change(checkpoints.CheckpointCommitted, parts=0)),
    "ordered what nobody holds": Case("checkpoints", salvaged, change(checkpoints.SaveOrdered, step=26)),
    "ordered what only some hold": Case("checkpoints", salvaged, change(checkpoints.StepsHeld, steps=(24,))),
    "ordered what is on storage": Case("checkpoints", salvaged, change(checkpoints.SaveOrdered, step=20)),
    "told twice what is held": Case("checkpoints", salvaged, change(checkpoints.StepsHeld, node="worker-0-0")),
    "a stranger holds something": Case("checkpoints", salvaged, change(checkpoints.StepsHeld, node="worker-7-0")),
    "restored twice": Case("checkpoints", salvaged, show(checkpoints.Restored("worker-0-0", 2, 25, "memory", 1))),
    "restored in the past": Case("checkpoints", salvaged, change(checkpoints.Restored, generation=1)),
    "storage fails twice": Case("checkpoints", salvaged, show(checkpoints.StorageFailed("worker-0-0", "c", "x"))),
    "storage is back that was there": Case("checkpoints", salvaged, show(checkpoints.StorageBack("worker-1-0", "c"))),
    "restarted for another set": Case("apart", several, change(incidents.WorkerExited, node="trainer-0-0")),
    "a place in two sets": Case("coupled", several, change(world.WorldFormed, -1, members=(("rollout", 0, 1, 0, 1),))),
    "a set given up that is needed": Case("ends", given_up, change(job.SetGivenUp, set="trainer")),
    "relaunched while it waits": Case(
        "waiting", queued, show(incidents.ActionChosen(1, ladder.SUSPECTS, "worker-1-0", "x", 0))
    ),
    "a restore with other samples": Case(
        "cuts", consumed, change(checkpoints.Restored, cut=pack((Place("train", 0, 44, ""),)))
    ),
    "a state that has consumed less": Case(
        "cuts", consumed, change(checkpoints.CheckpointCommitted, cut=pack((Place("train", 0, 36, ""),)))
    ),
    "a ledger that is broken": Case("cuts", consumed, show(shards.LedgerBroken("worker", "", 2, 20, "twice"))),
    "a tail without end": Case("bounded", restarted, change(incidents.WorkerExited, tail=BIG)),
    "evidence without end": Case("bounded", restarted, change(incidents.Diagnosed, evidence=tuple(range(99)))),
}


def _led_twice() -> Drive:
    drive = running()
    drive.take_over()
    return drive


def _then_restarted(drive: Drive) -> Drive:
    drive.exit("worker-1-0", 3)
    return drive


@pytest.mark.parametrize("what", CASES)
def test_each_promise_can_be_broken(what: str) -> None:
    """A history that breaks one promise breaks that one, and no other notices it first."""
    case = CASES[what]
    assert case.breaks(case.story().records) == {case.promise}


def test_every_promise_is_broken_once() -> None:
    """There is no promise that nothing here breaks."""
    beside = {"reference", "liveness", "slices", "addresses"}  # here below, in test_slices.py and test_clusters.py
    assert {case.promise for case in CASES.values()} | beside == {cls.name for cls in invariants.DEFAULT}
