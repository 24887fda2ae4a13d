"""Poison: which failures quarantine a sample, and which never do."""

from __future__ import annotations

from typing import Any

import pytest
from drive import Drive

from dlrover_core.data.cut import Place, cut_of
from dlrover_core.data.cut import pack as pack_cut
from dlrover_core.data.in_work import InWork, parsed
from dlrover_core.data.poison import Heard, Spot, heard, told
from dlrover_core.diagnosis import ladder
from dlrover_core.history.audit import Audit, LeftOut
from dlrover_core.history.ledger import ledger_of
from dlrover_core.history.render_ledger import lines, proofs
from dlrover_core.history.render_ledger import row as render_row
from dlrover_core.job import checkpoints, incidents, poison, shards, world
from dlrover_core.job.poison import Quarantine, RangeQuarantined, RangeSuspected
from dlrover_core.job.state import JobState
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules.desired import desired

BAD = "Traceback (most recent call last):\nValueError: bad sample"


def job(**more: Any) -> Drive:
    """Two nodes of one worker each, that train."""
    return Drive(**{"nodes_max": 2, "nproc": 1, "max_restarts": 4, **more}).up()


def strike(drive: Drive, work: InWork, *, code: int = 1, error: str = BAD, step: int = -1, place: str = "") -> None:
    """Rank 1 ends with these samples in work; rank 0 in its wake; the next generation trains."""
    generation = drive.world.generation
    drive.exit("worker-1-0", 1, code, error, step=step, work=work.text, place=place)
    drive.cascade("worker-0-0", 0, generation=generation)
    drive.wait(400)
    if drive.state.job.live and drive.world.generation > generation:
        for member in drive.world.members:
            drive.do(world.ReportStarted(member.node, drive.world.generation))
            drive.offer(member.node)


def of(index: int, *, epoch: int = 0, most: int = 8, fetched: bool = True) -> InWork:
    """One sample, at a position of its own."""
    return InWork("train", epoch, index * 7 % 64, index * 7 % 64 + 1, index, most, fetched)


def spots(drive: Drive) -> tuple[Spot, ...]:
    """What agents are told."""
    return drive.state.poison.of("worker").spots


def test_the_same_failure_twice_at_one_sample_quarantines_it() -> None:
    """The second time the class is DATA, no restart is charged, and all ranks leave the sample out from their next start on."""
    drive = job()
    strike(drive, of(17))
    assert drive.facts(RangeSuspected)[0].finding == poison.FIRST
    assert drive.facts(RangeQuarantined) == []
    charged = drive.state.incidents.restarts
    generation = drive.world.generation
    strike(drive, of(17, epoch=1))
    (found,) = drive.facts(RangeQuarantined)
    assert (found.dataset, found.sample, found.strikes, found.since) == ("train", 17, 2, generation + 1)
    verdict = drive.facts(incidents.Diagnosed)[-1]
    assert (verdict.verdict, verdict.signature, verdict.blamed) == ("DATA", "exception.ValueError", "")
    chosen = drive.facts(incidents.ActionChosen)[-1]
    assert (chosen.action, chosen.budget) == (ladder.RESTART_PROCESSES, ladder.QUARANTINE)
    assert drive.state.incidents.restarts == charged
    assert spots(drive) == (Spot("train", generation + 1, 17),)
    assert desired(drive.state).orders["worker-0-0"].part(Quarantine).spots == spots(drive)


def test_a_failure_whose_sample_differs_each_time_quarantines_nothing() -> None:
    """Ranges and samples that are struck once each are no evidence against any of them."""
    drive = job(max_restarts=9)
    for at, index in enumerate((3, 9, 27, 14, 5)):
        strike(drive, of(index), code=-9, error="", step=10 * at)
    assert drive.facts(RangeQuarantined) == []
    assert {one.finding for one in drive.facts(RangeSuspected)} == {poison.FIRST}


def test_another_failure_at_the_same_sample_does_not_count() -> None:
    """A sample may be at hand when a node's memory ends, and again when its program fails."""
    drive = job()
    strike(drive, of(17), code=-11, error="")
    strike(drive, of(17))
    assert drive.facts(RangeQuarantined) == []


def test_a_range_is_halved_until_it_is_one_sample() -> None:
    """Each retry divides the range, so that sixteen samples take four retries; a signal that others send takes no more here."""
    drive = job()
    first, to, struck = 32, 48, 37
    for _ in range(5):
        index = 5 if to - first == 1 else -1
        strike(drive, InWork("train", 0, first, to, index, 8, False), code=-9, error="")
        middle = (first + to) // 2
        first, to = (first, middle) if struck < middle else (middle, to)
    assert [one.to - one.first for one in drive.facts(RangeSuspected)] == [16, 8, 4, 2]
    assert (drive.facts(RangeQuarantined)[0].sample, drive.facts(RangeQuarantined)[0].strikes) == (5, 5)
    assert drive.state.incidents.restarts == 1


def test_a_signal_that_others_send_has_to_strike_thrice() -> None:
    """A SIGKILL at a sample twice may be anybody's."""
    drive = job()
    for _ in range(2):
        strike(drive, of(17), code=-9, error="")
    assert drive.facts(RangeQuarantined) == []
    strike(drive, of(17), code=-9, error="")
    assert drive.facts(RangeQuarantined)[0].strikes == 3


def test_a_range_that_cannot_be_narrowed_is_left_to_the_ordinary_rules() -> None:
    """A loop that counts its micro-batches cannot divide them: the job ends as it would, and the log names the positions."""
    drive = job()
    for _ in range(4):
        strike(drive, InWork("train", 0, 32, 48, -1, 8, False), place="train.py:3 in step")
        if drive.state.job.state != "running":
            break
    assert [one.finding for one in drive.facts(RangeSuspected)] == [poison.FIRST, poison.STUCK, poison.STUCK]
    assert drive.state.job.state == "failed"
    assert "user.repeats" in drive.facts(incidents.ActionChosen)[-1].rule


@pytest.mark.parametrize(
    ("most", "samples", "why"),
    [(0, (17,), 'poison="fail"'), (2, (17, 18, 19), "quarantine_max"), (8, tuple(range(1, 10)), "quarantine_max")],
)
def test_what_may_not_be_quarantined_ends_the_job_with_its_name(most: int, samples: tuple[int, ...], why: str) -> None:
    """By the script's wish, or by the number that it allows; within it a whole batch may be poison, with no new step between."""
    drive = job(max_restarts=20)
    for index in samples:
        for _ in range(2):
            strike(drive, of(index, most=most))
    assert [one.sample for one in drive.facts(RangeQuarantined)] == list(samples[:-1])
    assert drive.state.job.state == "failed"
    rule = drive.facts(incidents.ActionChosen)[-1].rule
    assert rule.startswith(f"data.poison: sample {samples[-1]} of dataset 'train'")
    assert why in rule


def test_a_run_that_has_never_made_a_step_ends_after_three_samples_in_a_row() -> None:
    """A script that fails at every sample."""
    drive = Drive(nodes_max=2, nproc=1, max_restarts=20)
    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.join(node)
    for member in drive.world.members:
        drive.do(world.ReportStarted(member.node, drive.world.generation))
    for index in (1, 2, 3, 4):
        for _ in range(2):
            strike(drive, of(index))
    assert [one.sample for one in drive.facts(RangeQuarantined)] == [1, 2, 3]
    assert drive.state.job.state == "failed"
    assert "3 samples in a row" in drive.facts(incidents.ActionChosen)[-1].rule


def test_a_consequence_of_another_failure_strikes_no_sample() -> None:
    """Rank 0 loses its peer with a sample at hand: it is its peer's that is suspected."""
    drive = job()
    generation = drive.world.generation
    drive.exit("worker-0-0", 0, 1, "RuntimeError: Connection closed by peer", work=of(40).text)
    drive.exit("worker-1-0", 1, 1, BAD, generation, work=of(17).text)
    assert [one.sample for one in drive.facts(RangeSuspected)] == [17]


def test_what_agents_say_is_checked() -> None:
    """Samples in work that make no sense are none."""
    drive = job()
    drive.exit("worker-1-0", 1, 1, BAD, work="fetch -1 5 3 x y")
    assert drive.facts(incidents.WorkerExited)[0].work == ""
    assert drive.facts(RangeSuspected) == []


def test_a_generation_hears_what_holds_for_it() -> None:
    """All ranks of a generation go by the same list, whenever their agents have heard of more."""
    rows = (Spot("a", 3, 17), Spot("a", 4, 5), Spot("b", 3, -1, 1, 32, 48), Spot("a", 2, 9))
    words = told(rows, 3)
    assert heard(words, "a") == Heard((9, 17), ())
    assert heard(words, "b") == Heard((), ((1, 32, 48),))
    assert heard(words, "c") == heard("", "a") == Heard()
    assert told(rows, 1) == ""


def test_work_is_written_and_read() -> None:
    """A record's text says what the worker noted; names may have spaces."""
    work = InWork("my data", 2, 32, 48, -1, 8, False)
    assert parsed(work.text) == work
    for wrong in (
        "",
        "fetch",
        "step 0 0 0 0 8 train",
        "step 0 5 3 -1 8 train",
        "step 0 1 2 -2 8 train",
        "walk 0 1 2 1 8 a",
    ):
        assert parsed(wrong) is None


def test_the_state_survives_its_packing() -> None:
    """A successor takes over from a snapshot with all that is known."""
    drive = job()
    for _ in range(2):
        strike(drive, of(17))
    strike(drive, of(5))
    again = unpack(JobState, pack(drive.state))
    assert digest(again) == digest(drive.state)
    assert again.poison.of("worker").spots == spots(drive)
    drive.take_over()
    strike(drive, of(5))
    assert [one.sample for one in drive.facts(RangeQuarantined)] == [17, 5]


def test_the_ledger_and_the_audit_name_what_is_left_out() -> None:
    """Consumed positions less those left out are in the model; a count that shrinks is found."""
    drive = job()
    drive.do(shards.RegisterDataset("worker-0-0", 1, "train", 100, 7, "shuffled", "f00d", 1, 4, "cursor"))
    for _ in range(2):
        strike(drive, of(17))
    drive.do(checkpoints.ReportKeeping("worker-0-0", 3, "file:///c", 2, 10, 3, True, 1 << 30, 1))

    def commit(step: int, *places: Place) -> None:
        drive.do(checkpoints.CommitCheckpoint("worker", 3, step, 1, 1 << 20, 1, (pack_cut(cut_of(places)),)))

    commit(10, Place("train", 0, 40, "f00d"), Place("train/quarantined/17", 0, 1))
    (row,) = ledger_of(drive.state)
    assert (row.samples, row.left_out, row.quarantined) == (40, 1, (17,))
    assert "  quarantined: sample 17; left out 1 time so far" in list(lines([row]))
    assert "39 samples in the model, 1 sample quarantined (sample 17)" in next(render_row([row]))
    (proof,) = audited(drive)
    assert proof.findings == ()
    assert proof.quarantined == (LeftOut(17, 1, "exception.ValueError, 2 times, incident 2"),)
    told = list(proofs([proof]))
    assert told[0] == "train: proved: each sample is in the lineage once, but for 1 sample in quarantine"
    assert "  sample 17 is quarantined (exception.ValueError, 2 times, incident 2): left out 1 time" in told
    commit(12, Place("train", 0, 48, "f00d"))
    assert [one.kind for one in audited(drive)[0].findings] == ["twice"]


def audited(drive: Drive) -> tuple[Any, ...]:
    """The audit of all that was recorded."""
    audit = Audit()
    for record in drive.records:
        audit.feed(record)
    return audit.proofs()
