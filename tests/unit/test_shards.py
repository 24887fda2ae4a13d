"""Datasets and their ledger: what is registered, what is refused, and what agents are told."""

from __future__ import annotations

from typing import Any

import pytest
from drive import Drive

from dlrover_core.data.cut import Place
from dlrover_core.data.cut import pack as pack_cut
from dlrover_core.data.streams import ENDLESS
from dlrover_core.history.audit import Audit
from dlrover_core.history.ledger import ledger_of
from dlrover_core.history.words import say
from dlrover_core.job import checkpoints, job, shards
from dlrover_core.job.checkpoints import (
    CheckpointCommitted,
    CommitCheckpoint,
    ReportHeld,
    ReportKeeping,
    ReportRestored,
)
from dlrover_core.job.shards import (
    Dataset,
    DatasetRegistered,
    Datasets,
    Ledger,
    LedgerBroken,
    RegisterDataset,
    ShardSlice,
    Terms,
)
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.kernel.state import digest, pack, unpack
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.shown import consumed
from dlrover_core.spec import GroupSpec

A, B = "worker-0-0", "worker-1-0"
TRAIN = Terms("train", 1000, 7, "shuffle", "f00d", 3, 32, shards.CURSOR)


@pytest.fixture
def running() -> Drive:
    """Two nodes of one worker each, in generation 1."""
    return Drive(nodes_max=2, nproc=1).up()


def register(drive: Drive, node: str = A, generation: int = 1, **terms: Any) -> Any:
    """A node registers a dataset."""
    return drive.do(RegisterDataset(node, generation, *TRAIN._replace(**terms)))


def told(drive: Drive, node: str) -> tuple[Terms, ...]:
    """What a node's order says of datasets."""
    return desired(drive.state).orders[node].part(Datasets).known


def test_a_dataset_is_registered_once(running: Drive) -> None:
    """The first word is recorded and told to every node; the same again leaves no record."""
    assert told(running, A) == ()
    assert isinstance(register(running), Accepted)
    assert running.facts(DatasetRegistered) == [DatasetRegistered("worker", *TRAIN)]
    assert told(running, A) == told(running, B) == (TRAIN,)
    assert register(running) == Accepted(0)
    assert running.new == []
    assert "worker trains on 'train': 1000 samples" in say(running.facts(DatasetRegistered)[0])
    assert "3 epochs, 32 samples a step" in say(running.facts(DatasetRegistered)[0])


@pytest.mark.parametrize("other", [{"size": 999}, {"seed": 8}, {"order": "file"}, {"fingerprint": "beef"}])
def test_another_one_of_that_name_is_refused_with_both_told(running: Drive, other: dict[str, Any]) -> None:
    """Size, seed, order and fingerprint say which dataset it is."""
    register(running)
    refused = register(running, **other)
    assert isinstance(refused, NotDone)
    assert str(TRAIN) in refused.reason
    assert str(TRAIN._replace(**other)) in refused.reason
    assert told(running, A) == (TRAIN,)
    assert isinstance(register(running, name="other", **other), Accepted)
    assert [one.name for one in told(running, A)] == ["train", "other"]


STREAM = {"name": "clicks", "size": ENDLESS, "order": "file"}


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("stream_first", [True, False])
def test_a_name_that_a_partition_of_a_stream_has_is_refused(
    running: Drive, *, leased: bool, stream_first: bool
) -> None:
    """Quarantined samples and cuts are told by such names. Others go beside, and so do both orders of registration."""
    other = {"name": "clicks/eval", **({"assignment": shards.LEASE, "epochs": 1} if leased else {})}
    first, second = (STREAM, other) if stream_first else (other, STREAM)
    assert isinstance(register(running, **first), Accepted)
    refused = register(running, **second)
    assert isinstance(refused, NotDone)
    assert refused.reason.startswith(
        f"name: {second['name']!r}, beside dataset {first['name']!r}: 'clicks/eval' would be taken"
    )
    assert refused.reason.endswith("give one of them a name so that none begins with 'clicks/'")
    assert isinstance(register(running, **{**second, "name": "click"}), Accepted)
    assert isinstance(register(running, **first), Accepted)


def test_a_job_that_has_such_names_goes_on(running: Drive) -> None:
    """As a log of an earlier version may: what is registered already is not refused when it is said again."""
    register(running, name="clicks/eval")
    running.state.shards.ledgers["worker"].datasets["clicks"] = Dataset(TRAIN._replace(**STREAM))
    for terms in (STREAM, {"name": "clicks/eval"}):
        assert register(running, **terms) == Accepted(0)


def test_a_dataset_that_grew_is_recorded(running: Drive) -> None:
    """More samples at the end of one source, by its fingerprint's words; fewer are another dataset."""
    before = {"size": 10, "fingerprint": "size=10 seed=7 order=shuffle source=lines:10:0f"}
    after = {"size": 12, "fingerprint": "size=12 seed=7 order=shuffle source=lines:12:a0"}
    register(running, **before)
    assert isinstance(register(running, **after), Accepted)
    assert told(running, B) == (TRAIN._replace(**after),)
    for other in (before, {**after, "seed": 8}, {**after, "size": 13}, {**after, "fingerprint": "beef", "size": 13}):
        assert isinstance(register(running, **other), NotDone), other
    assert told(running, B) == (TRAIN._replace(**after),)


def test_new_terms_of_use_are_recorded(running: Drive) -> None:
    """More epochs or another batch are the same dataset."""
    register(running)
    register(running, epochs=5, global_batch=64)
    assert told(running, B) == (TRAIN._replace(epochs=5, global_batch=64),)


def test_a_global_batch_that_was_not_known_is_filled_in(running: Drive) -> None:
    """Ranks register before their loop begins, and again once it has divided the batch; the first word takes nothing back."""
    register(running, global_batch=0)
    register(running)
    assert told(running, B) == (TRAIN,)
    assert register(running, global_batch=0) == Accepted(0)
    assert running.new == []
    register(running, global_batch=0, epochs=5)
    assert told(running, B) == (TRAIN._replace(epochs=5),)


def test_a_remainder_that_is_left_out_is_no_sample(running: Drive) -> None:
    """Of 1000 samples in batches of 512 an epoch trains 512; until the batch is known, all are taken for trained."""
    dropped = TRAIN._replace(epochs=2, last="drop", global_batch=512)
    assert [one.counted for one in (TRAIN, dropped, dropped._replace(global_batch=0))] == [1000, 512, 1000]
    running.do(ReportKeeping(A, 1, "file:///c", 2, 10, 3, True, 4096, 1))
    register(running, epochs=2, last="drop", global_batch=512)
    commit(running, 2, cut(0, 2))
    ledger, audit = running.state.shards.ledgers["worker"], Audit()
    assert ledger.about("train", 2) == 1024
    assert consumed(ledger, 2) == [{"dataset": "train", "size": 512, "epochs": 2, "about": 1024}]
    (row,) = ledger_of(running.state)
    assert (row.samples, row.whole, row.about, row.left_us) == (1024, 1024, 1024, 0)
    for record in running.records:
        audit.feed(record)
    (proof,) = audit.proofs()
    assert (proof.samples, proof.uneven, proof.findings) == (1024, 0, ())
    assert "without its remainder" in say(running.facts(DatasetRegistered)[0])


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ({"size": 0}, "size: 0 samples"),
        ({"size": 2**62 + 1}, "size: "),
        ({"name": ""}, "name: "),
        ({"name": "x" * 200}, "name: 'xxx"),
        ({"order": "x" * 200}, "order: "),
        ({"epochs": -1}, "epochs: -1"),
        ({"global_batch": -2}, "global_batch: -2"),
        ({"last": "pad"}, "last: 'pad' is neither"),
        ({"assignment": "luck"}, "assignment: 'luck' is none of cursor, lease"),
    ],
)
def test_bad_terms_are_refused_by_name(running: Drive, terms: dict[str, Any], named: str) -> None:
    """Field, value and remedy."""
    refused = register(running, **terms)
    assert isinstance(refused, NotDone)
    assert refused.reason.startswith(named)


def test_only_rank_0_of_the_running_generation_registers(running: Drive) -> None:
    """Other nodes compare what they are told; whoever is late is refused."""
    for reply in (register(running, B), register(running, A, 2), register(running, "worker-9-0")):
        assert isinstance(reply, NotDone)
    assert not running.facts(DatasetRegistered)


def test_datasets_are_bounded(running: Drive) -> None:
    """A message has no room for more."""
    for number in range(shards.DATASETS_MAX):
        register(running, name=f"d{number}")
    refused = register(running, name="more")
    assert isinstance(refused, NotDone)
    assert "mix several into one" in refused.reason
    assert len(told(running, A)) == shards.DATASETS_MAX


def test_masters_and_runs(running: Drive) -> None:
    """A new master knows them; a new run begins without; a state without datasets has the bytes that it had before."""
    before = pack(running.state)
    register(running)
    again = unpack(JobState, pack(running.state))
    assert again.shards == running.state.shards != ShardSlice()
    assert digest(MODEL.fold(running.records)) == digest(running.state)
    running.take_over()
    assert told(running, A) == (TRAIN,)
    assert unpack(JobState, before).shards == ShardSlice()
    running.do(job.CreateJob("run-2", running.spec.to_json()))
    assert running.state.shards == ShardSlice()


def test_sets_have_ledgers_of_their_own() -> None:
    """The trainer's "train" is not the evaluator's."""
    drive = Drive(groups=(GroupSpec("worker", 1, 1, nproc=1), GroupSpec("evaluator", 1, 1, nproc=1, ends=False))).up()
    drive.do(RegisterDataset("worker-0-0", 1, *TRAIN))
    drive.do(RegisterDataset("evaluator-0-0", 1, *TRAIN._replace(size=10)))
    assert [one.size for one in told(drive, "worker-0-0")] == [1000]
    assert [one.size for one in told(drive, "evaluator-0-0")] == [10]


def test_broken_slices_are_named() -> None:
    """`check` finds what it is meant to find."""
    slice_ = ShardSlice({"worker": Ledger({"train": Dataset(TRAIN)})})
    assert list(slice_.check()) == []
    slice_.ledgers["worker"].datasets["other"] = Dataset(TRAIN)
    assert "of another name ['other']" in "".join(slice_.check())


# ---- the ledger


def cut(position: int, epoch: int = 0, source: str = "f00d") -> bytes:
    """The cut of the dataset."""
    return pack_cut((Place("train", epoch, position, source),))


@pytest.fixture
def saving(running: Drive) -> Drive:
    """The two nodes save and train on a dataset; the first checkpoint is that of step 10."""
    register(running)
    running.do(ReportKeeping(A, 1, "file:///c", 2, 10, 3, True, 4096, 1))
    running.do(ReportRestored(A, 1, 0, checkpoints.NOTHING, 5))
    commit(running, 10, cut(320))
    return running


def commit(drive: Drive, step: int, *cuts: bytes, generation: int = 1) -> list[str]:
    """All parts of a step are on storage, and its writers say this of data."""
    drive.do(CommitCheckpoint("worker", generation, step, 2, 4096, 7, cuts))
    return drive.names()


def again(drive: Drive, generation: int = 2) -> Drive:
    """A worker dies, and the next generation begins."""
    drive.exit(B, 1, step=27)
    assert drive.world.generation == generation
    drive.do(ReportKeeping(A, generation, "file:///c", 2, 10, 3, True, 4096, 1))
    return drive


def place(drive: Drive) -> tuple[int, int]:
    """Epoch and position of the dataset, as far as known."""
    found = drive.state.shards.ledgers["worker"].place("train")
    return found.epoch, found.position


def test_commits_carry_the_cut(saving: Drive) -> None:
    """The ledger is as far as the newest state that was told of; bytes that are no cut are left out."""
    assert saving.facts(CheckpointCommitted)[-1].cut == cut(320)
    assert place(saving) == (0, 320)
    assert commit(saving, 20, b"\xc1\xc1", cut(640)) == ["CheckpointCommitted"]
    assert saving.facts(CheckpointCommitted)[-1].cut == cut(640)
    assert commit(saving, 30) == ["CheckpointCommitted"]
    assert place(saving) == (0, 640)
    assert saving.state.shards.ledgers["worker"].broken == 0


def test_a_commit_that_has_consumed_less_is_an_alarm(saving: Drive) -> None:
    """Cuts only grow along a lineage."""
    assert commit(saving, 20, cut(300)) == ["CheckpointCommitted", "LedgerBroken"]
    (broken,) = saving.facts(LedgerBroken)
    assert "position is 300 here, 320 there" in broken.why
    assert "samples are lost or trained twice: step 20" in MODEL.alarm(broken)
    assert say(broken).startswith("the data of step 20 of generation 1 do not go together: beside step 10")
    assert saving.state.shards.ledgers["worker"].broken == 1


def test_writers_that_differ_are_an_alarm(saving: Drive) -> None:
    """All ranks have the same cut at a step."""
    assert commit(saving, 20, cut(640), cut(672)) == ["CheckpointCommitted", "LedgerBroken"]
    assert "its writers differ: dataset 'train': position is 640 here, 672 there" in saving.facts(LedgerBroken)[0].why


def test_what_a_roll_back_trains_again_is_counted(saving: Drive) -> None:
    """From the newest cut that was known to the one that was restored; each node's word counts once."""
    saving.do(ReportHeld(A, 1, (24, 26), 0, (), cut(832)))
    again(saving)
    saving.do(ReportHeld(A, 1, (24, 26), 0, (), cut(832)))
    assert place(saving) == (0, 832)
    saving.do(ReportRestored(A, 2, 10, checkpoints.STORAGE, 5, (), 1, cut(320)))
    saving.do(ReportRestored(B, 2, 10, checkpoints.STORAGE, 5, (), 1, cut(320)))
    assert place(saving) == (0, 320)
    assert saving.state.shards.ledgers["worker"].datasets["train"].again == 512
    assert commit(saving, 20, cut(640), generation=2) == ["CheckpointCommitted"]
    assert not saving.facts(LedgerBroken)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"cut": cut(352)}, "position is 352 here, 320 there"),
        ({"cut": cut(288)}, "position is 288 here, 320 there"),
        ({"step": 9}, "its ranks resumed from step 9 of generation 1, others from step 10 of generation 1"),
    ],
)
def test_ranks_whose_restores_differ_are_named(saving: Drive, told: dict[str, Any], why: str) -> None:
    """By their node, with both values."""
    again(saving)
    good = ReportRestored(A, 2, 10, checkpoints.STORAGE, 5, (), 1, cut(320))
    saving.do(good)
    saving.do(good._replace(node=B, **told))
    (broken,) = saving.facts(LedgerBroken)
    assert broken.node == B
    assert why in broken.why
    assert place(saving) == (0, 320), "the first word counts"


def test_a_restore_with_other_samples_than_its_state_had_is_an_alarm(saving: Drive) -> None:
    """Samples between the two are lost or trained twice."""
    again(saving).do(ReportRestored(A, 2, 10, checkpoints.PEER, 5, (), 1, cut(352)))
    assert [one.node for one in saving.facts(LedgerBroken)] == [A]


def test_another_source_is_an_alarm(saving: Drive) -> None:
    """Positions of other data mean other samples."""
    assert commit(saving, 20, cut(640, source="beef")) == ["CheckpointCommitted", "LedgerBroken"]
    assert "source 'beef', registered is 'f00d'" in saving.facts(LedgerBroken)[0].why


@pytest.mark.parametrize("wrong", [{"cut": b"\xc1"}, {"of": 1}, {"of": 7}, {"of": -1}])
def test_restores_that_cannot_be_are_refused(saving: Drive, wrong: dict[str, Any]) -> None:
    """A cut is a cut, and a generation resumes from an earlier one."""
    again(saving)
    told = ReportRestored(A, 2, 10, checkpoints.STORAGE, 5, (), 1, cut(320))._replace(**wrong)
    if wrong == {"of": 1}:
        told = told._replace(generation=1)
    assert isinstance(saving.do(told), NotDone)
    assert isinstance(saving.do(ReportHeld(A, 1, (24,), 0, (), b"\xc1")), NotDone)


def test_a_job_without_data_has_no_ledger(running: Drive) -> None:
    """Its history folds to the bytes that it always did."""
    running.do(ReportKeeping(A, 1, "file:///c", 2, 10, 3, True, 4096, 1))
    running.do(ReportRestored(A, 1, 0, checkpoints.NOTHING, 5))
    commit(running, 10)
    assert running.state.shards == ShardSlice()
    commit(running, 20, cut(64))
    assert running.state.shards.ledgers["worker"].lineage.newest[0].position == 64


def test_a_status_says_how_far_the_data_are(saving: Drive) -> None:
    """By the newest step, where each takes a global batch; never more than all epochs."""
    ledger = saving.state.shards.ledgers["worker"]
    assert [ledger.about("train", step) for step in (0, 10, 12, 10_000)] == [320, 320, 384, 3000]
    assert ledger.about("other", 12) == 0
    assert consumed(ledger, 12) == [{"dataset": "train", "size": 1000, "epochs": 3, "about": 384}]


def test_events_say_how_far_the_data_are(saving: Drive) -> None:
    """In words, beside what they say of the state."""
    told = [CheckpointCommitted("worker", 1, 10, "file:///c", 2, 1, 1, "due", cut(1320, 1))]
    told += [checkpoints.Restored(A, 2, 10, checkpoints.PEER, 5, (), 1, cut(1320, 1))]
    told += [checkpoints.StepsHeld(A, 1, (10,), 0, (), cut(1320, 1))]
    assert all(say(one).endswith("; data: train at 1,320 of epoch 2") for one in told)
    assert not any("data:" in say(one._replace(cut=b"")) or "data:" in say(one._replace(cut=b"x")) for one in told)


def test_an_epoch_in_flight_of_a_source_that_grew_is_no_alarm(saving: Drive) -> None:
    """Its positions are of the source as it was, until the epoch ends."""
    words = "seed=7 order=shuffle source=lines"
    register(saving, name="grown", size=10, fingerprint=f"size=10 {words}:10:0f")
    register(saving, name="grown", size=12, fingerprint=f"size=12 {words}:12:a0")
    before = Place("grown", 0, 5, f"size=10 {words}:10:0f")
    after = before._replace(position=7, fingerprint=f"size=14 {words}:14:b0")
    train = Place("train", 0, 640, "f00d")
    assert commit(saving, 20, pack_cut((before, train))) == ["CheckpointCommitted"]
    assert commit(saving, 21, pack_cut((after, train))) == ["CheckpointCommitted", "LedgerBroken"]
