"""Hangs: from the leader's suspicion over what agents show to evidence that recovery acts on."""

from __future__ import annotations

from typing import Any

import pytest
from drive import SECOND, Drive

from dlrover_core.diagnosis import hanging
from dlrover_core.diagnosis.hanging import Facts
from dlrover_core.diagnosis.stacks import Frame
from dlrover_core.job import hangs, incidents, job, world
from dlrover_core.job.evidence import EvidenceSeen
from dlrover_core.job.hangs import HangDismissed, HangNamed, HangSuspected, NoteMoving, NoteStall, ReportStacks
from dlrover_core.kernel.engine import NotDone
from dlrover_core.kernel.state import digest
from dlrover_core.rules.desired import desired

TRAIN = Frame("/job/train.py", 42, "step")
REDUCE = Frame("torch/distributed/distributed_c10d.py", 3252, "all_reduce")


def seen(rank: int, **differs: Any) -> str:
    """A rank that waits in a collective, or what differs from that."""
    told = {"state": "S", "idle_us": 61 * SECOND, "stack": (REDUCE, TRAIN), "gil": "free", **differs}
    return hanging.to_text(Facts(rank, **told))


def sleeps(rank: int, **differs: Any) -> str:
    """A rank that is elsewhere."""
    return seen(rank, **{"stack": (TRAIN,), "source": "time.sleep(1e6)", **differs})


def stalled(idle_s: float = 61, **settings: Any) -> Drive:
    """Two nodes with two ranks each have trained, and stand still for a while."""
    drive = Drive(**settings).up()
    drive.wait(idle_s)
    drive.do(NoteStall("worker", 1, 7, round(idle_s * SECOND), 60 * SECOND, "floor"))
    return drive


def probes(drive: Drive) -> set[int]:
    """What the orders of all say."""
    return {order.part(hangs.Probe).hang for order in desired(drive.state).orders.values()}


def test_a_hang_is_suspected_looked_at_named_and_ended() -> None:
    """Everybody is asked; once all have shown what they are at the guilty rank is named, and the processes restarted."""
    drive = stalled()
    assert drive.facts(HangSuspected) == [HangSuspected(1, "worker", 1, 7, 61 * SECOND, 60 * SECOND, "floor")]
    assert probes(drive) == {1}
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    assert not drive.facts(HangNamed)
    drive.wait(0.5)
    drive.do(ReportStacks("worker-1-0", 1, (seen(2), sleeps(3)), "/state/hang-1-worker-1-0.txt"))
    named = drive.facts(HangNamed)[0]
    assert (named.node, named.ranks, named.signature) == ("worker-1-0", (3,), "hang.rank")
    told = drive.facts(EvidenceSeen)[0]
    assert told.text == (
        "rank 3 hangs on worker-1 in step (train.py:42: time.sleep(1e6)), 62 s without a step: its stack is in no "
        "collective, others' are; the others wait in all_reduce; stacks: /state/hang-1-worker-1-0.txt"
    )
    assert (told.node, told.rank, told.subject, told.generation) == ("worker-1-0", 3, "3", 1)
    assert told.age_us == round(61.5 * SECOND), "it began with the last step"
    assert drive.state.incidents.by_number[1].signature == "hang.rank"
    assert drive.facts(world.WorldFormed)[-1].generation == 2
    assert probes(drive) == {0}


def test_who_does_not_answer_is_waited_for_and_then_named() -> None:
    """An agent that shows nothing holds nothing up: after `hang_collect_s` its rank is the one that nobody could look at."""
    drive = stalled()
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    drive.wait(14)
    assert not drive.facts(HangNamed)
    drive.wait(1)
    assert (drive.facts(HangNamed)[0].ranks, drive.facts(HangNamed)[0].node) == ((2, 3), "worker-1-0")


def test_nobody_answers_and_the_job_goes_on_all_the_same() -> None:
    """Old agents, or all of them deaf: nobody can be named, and the processes are restarted."""
    drive = stalled()
    drive.wait(15)
    assert drive.facts(HangNamed)[0].signature == "hang.global"
    assert drive.facts(world.WorldFormed)[-1].generation == 2


@pytest.mark.parametrize("how", ["heartbeat", "facts"])
def test_a_late_step_ends_the_suspicion(how: str) -> None:
    """A step that is made while ranks are looked at, by whomever it is told, and nothing is done."""
    drive = stalled()
    if how == "heartbeat":
        drive.do(NoteMoving("worker", 1))
    else:
        drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1, idle_us=SECOND))))
        drive.do(ReportStacks("worker-1-0", 1, (seen(2), sleeps(3))))
    assert drive.facts(HangDismissed) == [HangDismissed(1, "worker", "a step was made meanwhile")]
    assert not drive.facts(HangNamed)
    assert probes(drive) == {0}
    assert isinstance(drive.do(ReportStacks("worker-0-0", 1, ())), NotDone)
    drive.wait(60)
    assert not drive.facts(incidents.IncidentOpened)


def test_a_busy_rank_has_patience_that_ends() -> None:
    """Rank 0 evaluates while others wait: it is looked at again and again, and a hang only when a phase would be one."""
    drive, at, looks = stalled(), 61.0, []
    while not drive.facts(HangNamed):
        number = len(drive.facts(HangSuspected))
        for node, first in (("worker-0-0", 0), ("worker-1-0", 2)):
            ranks = range(first, first + 2)
            idle = round(at * SECOND)
            facts = [sleeps(one, idle_us=idle, busy=True) if one == 0 else seen(one, idle_us=idle) for one in ranks]
            drive.do(ReportStacks(node, number, tuple(facts)))
        if drive.facts(HangNamed):
            break
        patience = drive.facts(HangDismissed)[-1].patience_us / SECOND
        looks.append(patience)
        drive.wait(patience - at)
        for idle in (patience - 1, patience):
            drive.do(NoteStall("worker", 1, 7, round(idle * SECOND), 60 * SECOND, "floor"))
        at = patience
    assert looks == [122, 244, 488, 976, 1800]
    assert len(drive.facts(HangSuspected)) == 6
    assert drive.facts(HangNamed)[0].ranks == (0,)


def test_patience_is_for_one_standstill() -> None:
    """Once a step was made the next standstill is judged by itself."""
    drive = stalled()
    drive.do(ReportStacks("worker-0-0", 1, (sleeps(0, busy=True), seen(1))))
    drive.do(ReportStacks("worker-1-0", 1, (seen(2), seen(3))))
    drive.do(NoteStall("worker", 1, 7, 61 * SECOND, 60 * SECOND, "floor"))
    assert len(drive.facts(HangSuspected)) == 1
    drive.do(NoteStall("worker", 1, 8, 61 * SECOND, 60 * SECOND, "floor"))
    assert len(drive.facts(HangSuspected)) == 2


def test_only_reported_where_that_is_wanted() -> None:
    """With ``hang_action`` report the rank is named and nothing is done; the same standstill is told once."""
    drive = stalled(hang_action="report")
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    drive.do(ReportStacks("worker-1-0", 1, (seen(2), sleeps(3))))
    assert drive.facts(EvidenceSeen)[0].signature == "hang.reported"
    assert not drive.facts(incidents.IncidentOpened)
    drive.do(NoteStall("worker", 1, 7, 600 * SECOND, 60 * SECOND, "floor"))
    assert len(drive.facts(HangSuspected)) == 1
    drive.do(NoteStall("worker", 1, 9, 61 * SECOND, 60 * SECOND, "floor"))
    assert len(drive.facts(HangSuspected)) == 2


def test_nothing_of_a_suspicion_survives_its_world() -> None:
    """A worker dies while ranks are looked at: the next world is neither suspected nor asked (DLRover's #1749)."""
    drive = stalled()
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    drive.exit("worker-1-0", 3)
    assert drive.facts(world.WorldFormed)[-1].generation == 2
    assert drive.state.hangs.hangs == {}
    assert probes(drive) == {0}
    drive.wait(60)
    assert not drive.facts(HangNamed)
    drive.do(NoteStall("worker", 1, 7, 99 * SECOND, 60 * SECOND, "floor"))
    assert len(drive.facts(HangSuspected)) == 1, "of a generation that is over"


def test_a_new_leader_goes_on_where_the_last_one_was() -> None:
    """It dies in the middle: the answers that are in the log count, and what was learnt about pauses too."""
    drive = stalled()
    drive.do(hangs.NotePauseLegal("worker", 1, 300 * SECOND))
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    before = digest(drive.state.hangs)
    drive.take_over()
    assert digest(drive.state.hangs) == before
    assert drive.state.hangs.learnt_us("worker", 1) == 300 * SECOND
    assert probes(drive) == {1}
    drive.do(ReportStacks("worker-1-0", 1, (seen(2), sleeps(3))))
    assert drive.facts(HangNamed)[0].ranks == (3,)


def test_nobody_is_named_for_the_silence_of_the_leader() -> None:
    """Between two leaders nobody could answer, nor was a step seen: the next one waits for answers from its own beginning."""
    drive = stalled()
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    drive.wait(10)
    drive.now += 600 * SECOND
    drive.take_over()
    drive.wait(14)
    assert not drive.facts(HangNamed)
    drive.do(ReportStacks("worker-1-0", 1, (seen(2, idle_us=40 * SECOND), sleeps(3, idle_us=75 * SECOND))))
    assert "75 s without a step" in drive.facts(HangNamed)[0].text
    drive = stalled()
    drive.take_over()
    drive.wait(15)
    assert drive.facts(HangNamed)[0].signature == "hang.global"


def test_no_suspicion_is_older_than_a_pause() -> None:
    """Everything was stopped, and the leader had looked before that was recorded."""
    drive = Drive().up()
    drive.wait(600)
    drive.do(job.NotePause(500 * SECOND))
    drive.do(NoteStall("worker", 1, 7, 600 * SECOND, 60 * SECOND, "floor"))
    assert not drive.facts(HangSuspected)
    drive.wait(60)
    drive.do(NoteStall("worker", 1, 7, 60 * SECOND, 60 * SECOND, "floor"))
    assert drive.facts(HangSuspected)


def test_pauses_are_learnt_by_phase_and_only_longer_ones() -> None:
    """Evaluation says nothing about checkpoints; a new run has learnt nothing."""
    drive = Drive().up()
    for phase, pause_s in ((1, 200), (1, 150), (2, 30), (9, 999), (-1, 999)):
        drive.do(hangs.NotePauseLegal("worker", phase, pause_s * SECOND))
    assert [drive.state.hangs.learnt_us("worker", phase) // SECOND for phase in range(4)] == [0, 200, 30, 0]
    drive.exit("worker-1-0", 3)
    assert drive.state.hangs.learnt_us("worker", 1) == 200 * SECOND
    drive.do(job.StopJob("enough"))


@pytest.mark.parametrize(
    ("node", "hang", "why"),
    [
        ("worker-0-0", 2, "is not looked at"),
        ("worker-9-0", 1, "worker-9-0"),
        ("worker-0-0", 1, "has shown its stacks already"),
    ],
)
def test_answers_that_nobody_waits_for_are_refused(node: str, hang: int, why: str) -> None:
    """Of another hang, of a stranger, or for the second time."""
    drive = stalled()
    drive.do(ReportStacks("worker-0-0", 1, (seen(0), seen(1))))
    refused = drive.do(ReportStacks(node, hang, ()))
    assert isinstance(refused, NotDone)
    assert why in refused.reason


def test_a_broken_agent_does_no_harm() -> None:
    """Facts that are none, of ranks that are elsewhere, or too long: the verdict is made without them."""
    drive = stalled()
    drive.do(ReportStacks("worker-0-0", 1, ("garbage", seen(77), "x" * 9000, sleeps(1))))
    drive.do(ReportStacks("worker-1-0", 1, (seen(2), seen(3))))
    assert drive.facts(HangNamed)[0].ranks == (1,)
    assert max(len(one) for fact in drive.facts(hangs.StacksSeen) for one in fact.facts) <= hanging.FACTS_BYTES_MAX


def test_nobody_is_suspected_where_nobody_shall_be() -> None:
    """``hang_s`` 0 is never; a dissolved world stands still by order; a stopped job too."""
    assert not stalled(hang_s=0).facts(HangSuspected)
    drive = Drive().up()
    drive.observe("worker-1-0", "failed", -9)
    drive.do(NoteStall("worker", 1, 7, 61 * SECOND, 60 * SECOND, "floor"))
    assert not drive.facts(HangSuspected)
