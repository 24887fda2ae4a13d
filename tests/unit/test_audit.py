"""The audit of a job's data: what it proves from a log, and which ranges it names where it cannot."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from drive import Drive
from msgpack import packb

from dlrover_adapters.cli import data
from dlrover_adapters.cli.main import main
from dlrover_core.data.cut import Place
from dlrover_core.data.cut import pack as pack_cut
from dlrover_core.data.ranges import Ranges
from dlrover_core.data.streams import ENDLESS
from dlrover_core.history import leased, render, render_ledger, report_of
from dlrover_core.history.audit import MISSING, TWICE, UNLIKE, Audit, Proof, proof_values
from dlrover_core.history.leased import leased_of
from dlrover_core.history.ledger import ledger_of
from dlrover_core.history.report import report_values
from dlrover_core.history.status import status_of
from dlrover_core.job import checkpoints, job
from dlrover_core.job.checkpoints import (
    CheckpointCommitted,
    CommitCheckpoint,
    ReportHeld,
    ReportKeeping,
    ReportRestored,
)
from dlrover_core.job.leases import HearLease
from dlrover_core.job.lineage import Lineage
from dlrover_core.job.shards import LEASE, RegisterDataset
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended
from dlrover_core.logs import open_log
from dlrover_core.spec import GroupSpec

A, B = "worker-0-0", "worker-1-0"
SIZE, BATCH = 100, 4


def cut(samples: int, source: str = "f00d") -> bytes:
    """The cut after so many samples."""
    return pack_cut((Place("train", samples // SIZE, samples % SIZE, source),))


class Told(Drive):
    """A job of two nodes with one dataset of 3 epochs of 100 samples, 4 a step."""

    def begin(self, generation: int = 1, batch: int = BATCH) -> Told:
        """A generation begins to save."""
        self.do(RegisterDataset(A, generation, "train", SIZE, 7, "shuffle", "f00d", 3, batch, "cursor"))
        self.do(ReportKeeping(A, generation, "file:///c", 2, 10, 3, True, 4096, 1))
        return self

    def commit(self, step: int, samples: int = -1, generation: int = 1, source: str = "f00d") -> None:
        """A checkpoint of a step, ten seconds after what was before."""
        self.now += 10_000_000
        packed = cut(step * BATCH if samples < 0 else samples, source)
        self.do(CommitCheckpoint("worker", generation, step, 2, 4096, 7, (packed,)))

    def resume(self, generation: int, step: int, samples: int = -1, of: int = 1, node: str = A) -> None:
        """A node's ranks have resumed a generation."""
        packed = cut(step * BATCH if samples < 0 else samples)
        self.do(ReportRestored(node, generation, step, checkpoints.STORAGE, 5, (), of, packed))

    def again(self, generation: int) -> None:
        """A worker dies, and the next generation begins."""
        self.exit(B, 1, step=27)
        self.begin(generation)


@pytest.fixture
def told() -> Told:
    """It began anew, and has two checkpoints, of steps 10 and 20."""
    drive = Told(nodes_max=2, nproc=1)
    drive.up().do(ReportRestored(A, 1, 0, checkpoints.NOTHING, 5))
    drive.begin()
    drive.commit(10)
    drive.commit(20)
    return drive


def proofs(drive: Drive) -> tuple[Proof, ...]:
    """The audit of its log, as read from its bytes."""
    audit = Audit()
    for batch in drive.batches:
        for record in CODEC.decode(batch.payload).records:
            audit.feed(record)
    return audit.proofs()


def found(drive: Drive) -> list[tuple[Any, ...]]:
    """What is wrong: kind, the range over all epochs, and samples."""
    (proof,) = proofs(drive)
    return [
        (one.kind, one.epoch * SIZE + one.first, one.to_epoch * SIZE + one.to, one.samples) for one in proof.findings
    ]


def test_an_undisturbed_job_is_proved(told: Told) -> None:
    """Cuts grow by one batch a step, over the end of an epoch, too."""
    told.commit(30)
    (proof,) = proofs(told)
    assert proof[:9] == ("worker", "train", SIZE, 3, 1, 20, 120, 3, 1)
    assert (proof.resumed, proof.witnessed, proof.uneven, proof.findings) == (0, 0, 0, ())
    text = "\n".join(render_ledger.proofs([proof]))
    assert "train: proved: each sample is in the lineage once" in text
    assert "120 samples in the model, up to position 20 of epoch 2 of 3; 3 states of 1 generation told" in text


def test_roll_backs_are_proved(told: Told) -> None:
    """What was rolled back is in no lineage: trained again is not trained twice. The words of both sides agree."""
    told.do(ReportHeld(A, 1, (26,), 0, (), cut(104)))
    told.again(2)
    told.resume(2, 10)
    told.resume(2, 10, node=B)
    told.commit(20, generation=2)
    told.again(3)
    told.resume(3, 20, of=2)
    told.commit(30, generation=3)
    (proof,) = proofs(told)
    assert (proof.findings, proof.states, proof.generations, proof.resumed, proof.witnessed) == ((), 3, 3, 2, 2)
    (row,) = ledger_of(told.state)
    assert row.again == 104 - 40
    assert "2 generations resumed from a state, 2 of them from one that had told before" in "\n".join(
        render_ledger.proofs([proof])
    )


def test_a_state_that_nobody_had_told_of_is_no_witness(told: Told) -> None:
    """It was held in memory by nodes that died before they could say so."""
    told.again(2)
    told.resume(2, 24)
    (proof,) = proofs(told)
    assert (proof.findings, proof.resumed, proof.witnessed) == ((), 1, 0)


@pytest.mark.parametrize(
    ("at", "kind", "begin", "end"), [(48, MISSING, 40, 48), (36, TWICE, 36, 40), (108, MISSING, 40, 108)]
)
def test_a_resume_with_other_samples_names_the_range(told: Told, at: int, kind: str, begin: int, end: int) -> None:
    """Later than the state was: samples are missing; earlier: they are in the model twice."""
    told.again(2)
    told.resume(2, 10, at)
    assert found(told) == [(kind, begin, end, end - begin)]
    (finding,) = proofs(told)[0].findings
    assert finding.why.startswith("step 10 of generation 1 had consumed 40 of epoch 1, worker-0-0 resumed it in gen")
    told.again(3)
    told.resume(3, 10)
    assert found(told) == [], "it was rolled back"


def test_cuts_that_shrink_are_samples_twice(told: Told) -> None:
    """A later state has consumed less."""
    told.commit(30, 60)
    assert found(told) == [(TWICE, 60, 80, 20)]


def test_ranks_that_differ_are_in_doubt(told: Told) -> None:
    """By node; from another state, or at another position of the same."""
    told.again(2)
    told.resume(2, 10)
    told.resume(2, 10, 44, node=B)
    assert found(told) == [(MISSING, 40, 44, 4)]
    told.again(3)
    told.resume(3, 10)
    told.resume(3, 20, node=B)
    assert found(told) == [(UNLIKE, 40, 40, 0)]
    assert (
        "worker-1-0 resumed step 20 of generation 1 in generation 3, others step 10" in proofs(told)[0].findings[0].why
    )


def test_nodes_that_hold_different_cuts_of_one_state_are_in_doubt(told: Told) -> None:
    """At a boundary, all ranks have consumed the same."""
    told.exit(B, 1, step=27)
    told.do(ReportHeld(A, 1, (26,), 0, (), cut(104)))
    told.do(ReportHeld(B, 1, (26,), 0, (), cut(108)))
    told.begin(2)
    told.resume(2, 26)
    assert found(told) == [(UNLIKE, 104, 108, 4)]


def test_another_source_is_in_doubt(told: Told) -> None:
    """Positions of other data mean other samples."""
    told.commit(30, source="beef")
    assert [one[0] for one in found(told)] == [UNLIKE]


def test_uneven_steps_are_remarked(told: Told) -> None:
    """One batch ahead is no fault by itself: a script may draw other data in a step."""
    told.commit(30, 124)
    (proof,) = proofs(told)
    assert (proof.findings, proof.uneven) == ((), 1)
    assert "1 time the position did not move by one batch a step" in "\n".join(render_ledger.proofs([proof]))


def test_a_new_run_goes_on_from_storage(told: Told) -> None:
    """What an earlier run had stored bears witness."""
    told.do(job.CreateJob("run-2", told.spec.to_json()))
    told.up()
    generation = told.world.generation
    member = told.members[0]
    told.do(RegisterDataset(member, generation, "train", SIZE, 7, "shuffle", "f00d", 3, BATCH, "cursor"))
    told.do(ReportKeeping(member, generation, "file:///c", 2, 10, 3, True, 4096, 1))
    told.resume(generation, 20, 84, of=0, node=member)
    assert found(told) == [(MISSING, 80, 84, 4)]
    (proof,) = proofs(told)
    assert "step 20 of an earlier run had consumed 80" in proof.findings[0].why
    assert proof.witnessed == 1


def test_a_job_without_data_proves_nothing() -> None:
    """There is nothing to say; where no state has told, that is said."""
    drive = Told(nodes_max=2, nproc=1)
    drive.up()
    assert proofs(drive) == ()
    drive.begin()
    (proof,) = proofs(drive)
    assert "nothing to prove yet" in "\n".join(render_ledger.proofs([proof]))
    assert proof_values((proof,))["proved"] is True


# ---- how far they are


def test_how_far_the_data_are(told: Told) -> None:
    """Position, rate over the newest states, time left, and an estimate by steps since."""
    (row,) = ledger_of(told.state)
    assert (row.epoch, row.position, row.samples, row.step, row.generation) == (0, 80, 80, 20, 1)
    assert (row.per_s, row.whole) == (4.0, 300)
    assert row.left_us == 55_000_000
    told.exit(B, 1, step=27)
    told.begin(2)
    (row,) = ledger_of(told.state)
    assert row.about == 80
    text = "\n".join(render_ledger.lines([row], told.now + 3_000_000))
    assert "train: epoch 1 of 3, position 80 of 100" in text
    assert "80 samples in the model, known by step 20 of generation 1, 3.000 s ago" in text
    assert "4.0 samples/s, 55.0 s left" in text


def test_of_a_stream_no_end_is_told() -> None:
    """It has none, so there is neither a time left nor a share."""
    drive = Told(nodes_max=2, nproc=1)
    drive.up().do(ReportRestored(A, 1, 0, checkpoints.NOTHING, 5))
    drive.do(RegisterDataset(A, 1, "train", ENDLESS, 7, "file", "f00d", 1, BATCH, "cursor"))
    drive.do(ReportKeeping(A, 1, "file:///c", 2, 10, 3, True, 4096, 1))
    for step in (10, 20):
        drive.now += 10_000_000
        packed = pack_cut((Place("train", 0, step * BATCH, "f00d"),))
        drive.do(CommitCheckpoint("worker", 1, step, 2, 4096, 7, (packed,)))
    (row,) = ledger_of(drive.state)
    assert (row.per_s, row.whole, row.left_us) == (4.0, 0, -1)
    text = "\n".join(render_ledger.lines([row], drive.now))
    assert "train: position 80 of a stream" in text
    assert "4.0 samples/s" in text
    assert "left" not in text


def test_a_report_has_a_row(told: Told) -> None:
    """One line for each dataset, and all of it as values."""
    told.again(2)
    told.resume(2, 10, 48)
    report = report_of(told.records)
    text = render.report(report)
    assert "train: epoch 1 of 3, position 40 of 100, 40 samples in the model, 40 samples trained again" in text
    assert "1 state did not go together: see 'dlrover data verify'" in text
    assert json.loads(json.dumps(report_values(report)))["data"][0]["again"] == 40


def test_a_status_has_a_row(told: Told) -> None:
    """How far the data are, and all of it as values."""
    status = status_of(told.state)
    assert "train: epoch 1 of 3, position 80 of 100, 80 samples in the model" in render.status(status, told.now)
    assert re.search(r"80 samples in the model, [\d.]+ samples/s, .+ left\n", render.status(status, told.now))
    assert status.data == ledger_of(told.state)


def test_cuts_of_a_newer_release_are_skipped(told: Told) -> None:
    """Who cannot read them says nothing of them, and reads the rest."""
    made, audit = Lineage(), Audit()
    made.learn(1, 10, packb([99, []]), 1)
    assert (made.known, made.generation) == ([], 1)
    for record in told.records:
        fact = record.event
        newer = isinstance(fact, CheckpointCommitted) and fact.step == 20
        audit.feed(record._replace(event=fact._replace(cut=packb([99, []]))) if newer else record)  # type: ignore[union-attr]
    (proof,) = audit.proofs()
    assert (proof.samples, proof.findings) == (40, ())


def test_sets_are_named_where_there_are_several() -> None:
    """Two sets may have datasets of one name."""
    drive = Drive(groups=(GroupSpec("worker", 1, 1, nproc=1), GroupSpec("evaluator", 1, 1, nproc=1, ends=False))).up()
    for node in ("worker-0-0", "evaluator-0-0"):
        drive.do(RegisterDataset(node, 1, "train", SIZE, 7, "shuffle", "", 0, BATCH, "cursor"))
    text = list(render_ledger.row(ledger_of(drive.state)))
    assert text[0] == "worker: train: epoch 1, position 0 of 100, 0 samples in the model"
    assert text[1].startswith("evaluator: train: ")


# ---- dlrover data


def logged(drive: Drive, folder: Path) -> str:
    """The url of a log with its history."""
    url = f"sqlite:{folder / 'log.db'}"

    async def write() -> None:
        async with open_log(url, CODEC) as log:
            lead = await log.lead("j", "m", 60.0)
            for batch in drive.batches:
                assert isinstance(await lead.append(batch), Appended)

    asyncio.run(write())
    return url


def test_the_command(told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dlrover data` shows, and `dlrover data verify` proves; for people and for programs."""
    url = logged(told, tmp_path)
    assert main(["data", "j", "--log", url]) == 0
    assert "train: epoch 1 of 3, position 80 of 100" in capsys.readouterr().out
    assert main(["data", "--log", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["position"] == 80
    assert main(["data", "verify", "j", "--log", url]) == 0
    assert "proved: each sample is in the lineage once" in capsys.readouterr().out
    assert main(["data", "verify", "--log", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proved"] is True


def test_the_command_names_what_is_wrong(told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with 1."""
    told.again(2)
    told.resume(2, 10, 48)
    url = logged(told, tmp_path)
    assert main(["data", "verify", "j", "--log", url]) == 1
    said = capsys.readouterr().out
    assert "train: NOT proved" in said
    assert "8 samples, positions 40 of epoch 1 to 48 of epoch 1 exclusive: missing: step 10 of generation 1 had" in said
    assert main(["data", "verify", "j", "--log", url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["datasets"][0]["findings"][0]["kind"] == MISSING


def test_what_is_not_audited_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Leases that no model is saved with: people are not told to lease samples, which they do."""
    drive = Told(nodes_max=2, nproc=1)
    drive.up().do(RegisterDataset(A, 1, "eval", SIZE, 7, "shuffled", "", 1, 0, LEASE))
    assert main(["data", "verify", "j", "--log", logged(drive, tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "'eval' is leased with lineage=\"server\", where the log itself is the list of what was used" in said
    assert "dlrover data j shows it" in said


def test_the_command_follows_until_the_job_ends(told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each change; at the end of the job it ends, too."""
    told.do(job.StopJob("home"))
    for node in (A, B):
        told.observe(node, "gone")
    assert told.state.job.over
    url = logged(told, tmp_path)
    assert main(["data", "j", "--follow", "--log", url]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("Z  ")[1].split(", ")[1] for line in said] == [
        "position 0 of 100",
        "position 40 of 100",
        "position 80 of 100",
    ]
    assert main(["data", "j", "-f", "--json", "--log", url]) == 0
    assert [json.loads(line)["samples"] for line in capsys.readouterr().out.splitlines()] == [0, 40, 80]


def test_the_command_follows_leases_with_rate_and_time_left(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the report has them, once a second at most."""
    told.do(RegisterDataset(A, 1, "eval", SIZE, 7, "shuffled", "", 1, 0, LEASE))
    told.do(HearLease(A, "eval", 80, 1, 0, Ranges().pack(), 0, Ranges().pack(), 1))
    told.now += 10_000_000
    told.do(HearLease(A, "eval", 0, 1, 0, Ranges([(0, 20)]).pack(), 0, Ranges().pack(), 1))
    for used in range(21, 30):  # within a second: they are one change, which the job's end tells
        told.now += 100_000
        told.do(HearLease(A, "eval", 0, 1, 0, Ranges([(0, used)]).pack(), 0, Ranges().pack(), 1))
    told.do(job.StopJob("home"))
    for node in (A, B):
        told.observe(node, "gone")
    url = logged(told, tmp_path)
    assert main(["data", "j", "--follow", "--log", url]) == 0
    said = [line.split("Z  ")[1] for line in capsys.readouterr().out.splitlines() if "eval" in line]
    assert said[:2] == [
        "worker: eval: 0 of 100 samples used (lease)",
        "worker: eval: 20 of 100 samples used, 60 held by 1 node (lease), 2.0 samples/s, 40.0 s left",
    ]
    assert len(said) == 3
    assert said[2].startswith("worker: eval: 29 of 100 samples used")


def leasing(told: Told) -> list[Record]:
    """A dataset is leased, and used up in ten words within a second; then nothing more is recorded."""
    told.do(RegisterDataset(A, 1, "eval", SIZE, 7, "shuffled", "", 1, 0, LEASE))
    told.do(HearLease(A, "eval", 100, 1, 0, Ranges().pack(), 0, Ranges().pack(), 1))
    for used in range(10, 101, 10):
        told.now += 50_000
        told.do(HearLease(A, "eval", 0, 1, 0, Ranges([(0, used)]).pack(), 0, Ranges().pack(), 1))
    return list(told.records)


def test_the_command_tells_the_last_change_of_a_job_gone_quiet(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another record; meanwhile leases are not counted anew for every word."""
    counted: list[int] = []
    monkeypatch.setattr(data, "QUIET_S", 0.01)
    monkeypatch.setattr(leased, "leased_of", lambda state: counted.append(state.at) or leased_of(state))
    ended = False

    async def records() -> AsyncIterator[Record]:
        nonlocal ended
        try:
            for record in leasing(told):
                yield record
            await asyncio.Event().wait()
        finally:
            ended = True

    async def last() -> tuple[int, ...]:
        found: list[int] = []
        following = records()
        async with aclosing(data._changes(following)) as changes:  # type: ignore[type-var]
            async for _, rows in changes:
                found += [row.used for row in rows if isinstance(row, leased.LeasedRow)]
                if found[-1:] == [100]:
                    break
        return tuple(found)

    assert asyncio.run(asyncio.wait_for(last(), 60)) == (0, 100)
    assert ended
    assert len(counted) <= 4


@pytest.mark.parametrize("words", [["digits", "more"], ["prove", "digits"]])
def test_the_command_says_what_it_takes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Two words are `verify` and a job."""
    with pytest.raises(SystemExit) as ended:
        main(["data", *words])
    assert ended.value.code == 2
    assert "there is 'dlrover data JOB', and 'dlrover data verify JOB'" in capsys.readouterr().err


def test_the_command_of_a_job_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what to give to which class."""
    url = logged(Drive(nodes_max=1, nproc=1).up(), tmp_path)
    for words in (["data", "j"], ["data", "verify", "j"]):
        assert main([*words, "--log", url]) == 3
        assert "give FlashCheckpoint(data=...) an ElasticDataset" in capsys.readouterr().err
    assert main(["data", "j", "--log", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


# ---- ends, sources that grew, datasets that were added


def test_the_end_is_the_end_of_the_last_epoch(told: Told) -> None:
    """No epoch after the last one is named."""
    told.commit(75)
    (proof,) = proofs(told)
    assert (proof.epoch, proof.position, proof.samples) == (3, 0, 300)
    text = "\n".join(render_ledger.proofs([proof]))
    assert "300 samples in the model, up to the end of epoch 3 of 3; 3 states" in text
    assert "epoch 4" not in text


def source(size: int) -> str:
    """The fingerprint of a source with so many samples."""
    return f"size={size} seed=7 order=file source=s{size}"


class Grown(Told):
    """A job whose source grows: each run of its ranks registers what it has."""

    def registered(self, generation: int, size: int) -> None:
        """By the ranks of a generation."""
        self.do(RegisterDataset(A, generation, "train", size, 7, "file", source(size), 9, BATCH, "cursor"))
        self.do(ReportKeeping(A, generation, "file:///c", 2, 10, 3, True, 4096, 1))

    def at(self, step: int, epoch: int, position: int, size: int, generation: int) -> bytes:
        """A state is on storage; its cut."""
        packed = pack_cut((Place("train", epoch, position, source(size)),))
        self.do(CommitCheckpoint("worker", generation, step, 2, 4096, 7, (packed,)))
        return packed


def test_epochs_of_a_source_that_grew_count_as_many_samples_as_they_had() -> None:
    """The epoch in flight ends with the samples that it began with, and none of the earlier ones had more."""
    drive = Grown(nodes_max=2, nproc=1)
    drive.up().do(ReportRestored(A, 1, 0, checkpoints.NOTHING, 5))
    drive.registered(1, 100)
    packed = drive.at(60, 2, 40, 100, 1)  # two epochs of 100, and 40
    drive.exit(B, 1, step=61)
    drive.registered(2, 160)
    drive.do(ReportRestored(A, 2, 60, checkpoints.STORAGE, 5, (), 1, packed))
    (proof,) = proofs(drive)
    assert (proof.findings, proof.samples, proof.size) == ((), 240, 160)
    drive.at(120, 4, 20, 160, 2)  # 300 of three epochs, 160 of the next, and 20
    (proof,) = proofs(drive)
    assert (proof.findings, proof.samples) == ((), 480)
    (row,) = ledger_of(drive.state)
    assert (row.samples, row.about) == (480, 480)


def test_a_dataset_that_was_added_begins_where_its_script_says(told: Told) -> None:
    """It is no fault, and what had been consumed of it elsewhere is told apart."""
    told.again(2)
    told.do(RegisterDataset(A, 2, "more", SIZE, 7, "shuffle", "", 3, BATCH, "cursor"))
    joined = Place("train", 0, 80, "f00d"), Place("more", 1, 12)
    for node in (A, B):
        told.do(ReportRestored(node, 2, 20, checkpoints.STORAGE, 5, (), 1, pack_cut(sorted(joined))))
    told.do(
        CommitCheckpoint(
            "worker", 2, 30, 2, 4096, 7, (pack_cut((Place("more", 1, 52), joined[0]._replace(position=96))),)
        )
    )
    assert told.state.shards.ledgers["worker"].broken == 0
    train, more = proofs(told)
    assert (train.findings, more.findings, train.begun) == ((), (), 0)
    assert (more.samples, more.begun) == (152, 112)
    text = "\n".join(render_ledger.proofs([more]))
    assert "of them, 112 samples are not this log's: the dataset was added at that position" in text
    told.again(3)
    told.do(ReportRestored(A, 3, 30, checkpoints.STORAGE, 5, (), 2, pack_cut((joined[0]._replace(position=96),))))
    assert told.state.shards.ledgers["worker"].broken == 1, "then it is lost"
