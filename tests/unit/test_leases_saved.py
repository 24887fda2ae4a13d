"""The log's witness of what saved models were trained on by leases: restores and audits are compared with it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.chaos.lease_seeds import audited
from tests.unit.drive import Drive

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.data.trained import (
    Counted,
    Trained,
    added,
    all_counted,
    checksum,
    counted,
    pack_counted,
    unpack_counted,
)
from dlrover_core.errors import SpecError
from dlrover_core.history.lease_audit import lines
from dlrover_core.job.checkpoints import CheckpointCommitted, CommitCheckpoint, ReportKeeping
from dlrover_core.job.leases import SAVED_MAX, LeasesRestored, LeasesSaved, RestoreLeases, Saved
from dlrover_core.job.shards import MODEL_LEASE, RegisterDataset
from dlrover_core.kernel.engine import Accepted

RANK_0, RANK_1 = Ranges([(0, 4), (8, 10)]), Ranges([(4, 8)])


def said(spans: Ranges, ranks: int = 1, world: int = 2) -> bytes:
    """What one node says of its ranks."""
    return pack_counted(world, ranks, counted([Trained("train", "f00d", spans)]))


def saving() -> Drive:
    """Two nodes with a rank each, which restored nothing and then saved step 5 of generation 1."""
    job = Drive(nodes_max=2, nproc=1, max_restarts=10).up()
    job.do(RegisterDataset("worker-0-0", 1, "train", 20, 7, "file", "f00d", 1, 0, MODEL_LEASE))
    job.do(RestoreLeases("worker-0-0", 1, "train", 0, 0, Ranges().pack()))
    job.do(ReportKeeping("worker-0-0", 1, "file:///ckpt", 1, 1, 0, False, 0))
    return job


def committed(job: Drive, *trained: bytes, step: int = 5) -> list[Any]:
    """The step is on storage; what the log says of it."""
    job.do(CommitCheckpoint("worker", 1, step, 2, 1, 1, (), trained))
    return [record.event for record in job.new]


def again(job: Drive, spans: Ranges, step: int = 5) -> Any:
    """The next generation goes on from the step."""
    if job.world.generation == 1:
        job.exit("worker-1-0", 1)
        job.run(6)
    return job.do(RestoreLeases("worker-0-0", job.world.generation, "train", 1, step, spans.pack()))


def test_what_ranks_say_adds_up_to_what_all_of_them_say() -> None:
    """However many ranges it is, and over any number of nodes; a rank that is missing leaves nothing."""
    every = counted([Trained("train", "f00d", RANK_0 | RANK_1)])
    assert every == (Counted("train", 10, 45),)
    assert added([counted([Trained("train", "f00d", one)]) for one in (RANK_0, RANK_1)]) == every
    assert checksum(Ranges([(10**9, 10**9 + 3)])) == 3 * 10**9 + 3
    assert all_counted([said(RANK_0), said(RANK_1)]) == every
    assert unpack_counted(said(RANK_0)) == (2, 1, (Counted("train", 6, 23),))
    for lacking in ([said(RANK_0)], [said(RANK_0), b""], [said(RANK_0), said(RANK_1), said(RANK_1)], []):
        assert all_counted(lacking) == ()
    assert all_counted([said(RANK_0, world=3), said(RANK_1)]) == ()


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x07",
        b"\x94\x02\x01\x01\x90",
        b"\x94\x01\x01\x02\x90",
        b"\x94\x01\x01\xa1a\x90",
        b"\x94\x01\x01\x01\x91\x92\xa1a\x01",
        b"\x94\x01\x01\x01\x91\x93\xa0\x01\x01",
        b"\x94\x01\x01\x01\x91\x93\xa1a\xff\x01",
        b"\x94\x01\x01\x01\x91\x93\xa1a\xc3\x01",
    ],
)
def test_bytes_that_say_nothing_of_ranks(packed: bytes) -> None:
    """Whoever packed them."""
    with pytest.raises(SpecError, match="trained: the bytes are damaged"):
        unpack_counted(packed)


def test_the_log_knows_what_a_state_on_storage_was_trained_on() -> None:
    """Once all of its ranks have said so; of a dataset that it does not know, and where a rank is missing, it says nothing."""
    job = saving()
    before = committed(job, said(RANK_0), b"", step=3)
    assert [type(one) for one in before] == [CheckpointCommitted]
    other = pack_counted(2, 1, counted([Trained("other", "", RANK_1)]))
    assert [type(one) for one in committed(job, other, other, step=4)] == [CheckpointCommitted]
    assert committed(job, said(RANK_0), said(RANK_1))[1:] == [LeasesSaved("worker", "train", 1, 5, 10, 45)]
    assert committed(job, said(RANK_0), said(RANK_1)) == []
    for step in range(6, 6 + SAVED_MAX):
        committed(job, said(RANK_0, ranks=2), step=step)
    saved = job.state.leases.of("worker")["train"].saved
    assert (len(saved), saved[-1]) == (SAVED_MAX, Saved(1, 5 + SAVED_MAX, 6, 23))


def test_a_state_is_not_resumed_with_other_samples_than_it_was_saved_with() -> None:
    """A rank that was forgotten, or another rank's samples in its place; also by a leader that has only read the log."""
    job = saving()
    committed(job, said(RANK_0), said(RANK_1))
    job.take_over()
    for wrong in (RANK_0, Ranges([(0, 11)]), Ranges([(0, 9), (12, 13)])):
        refused = again(job, wrong).reason
        assert "'train': step 5 of generation 1 was trained on 10 samples" in refused
        assert f"now worker-0-0 says other ones, {wrong.count}: to go on would train samples twice or never" in refused
    assert isinstance(again(job, RANK_0 | RANK_1), Accepted)
    assert job.state.leases.of("worker")["train"].acked == ((0, 10),)


def test_a_state_that_was_never_on_storage_is_taken_at_its_word() -> None:
    """The log has no witness of it."""
    job = saving()
    committed(job, said(RANK_0), said(RANK_1))
    assert isinstance(again(job, Ranges([(0, 3)]), step=6), Accepted)


@pytest.mark.parametrize(
    ("spans", "kind", "told"),
    [
        (Span(0, 7), "missing", "3 samples, positions 0 to 7"),
        (Span(0, 12), "not leased", "2 samples, positions 0 to 12"),
        (Span(1, 11), "not leased", "1 sample, positions 1 to 11"),
    ],
)
def test_the_audit_compares_the_two_words(spans: Span, kind: str, told: str) -> None:
    """From the log alone: of the ranks that saved, and of those that resumed, though a leader has believed the second."""
    job = saving()
    committed(job, said(RANK_0), said(RANK_1))
    again(job, RANK_0 | RANK_1)
    (proof,) = audited(job.records)
    assert (proof.compared, [one.kind for one in proof.findings]) == (
        1,
        ["not leased"],
    )  # nobody was granted any in generation 1
    assert "1 resumed from a state, 1 of them with the word of its savers in the log" in "".join(lines((proof,)))
    records = [
        one._replace(event=one.event._replace(spans=Ranges([spans]).pack()))
        if isinstance(one.event, LeasesRestored) and one.event.step
        else one
        for one in job.records
    ]
    (proof,) = audited(records)
    assert (proof.findings[-1].kind, proof.compared) == (kind, 1)
    assert told in list(lines((proof,)))[-1]
    assert "was trained on 10 samples when it was saved" in proof.findings[-1].why
