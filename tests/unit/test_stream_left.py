"""Messages of a stream that are quarantined: by partition and offset, as a restart plans their positions anew."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from drive import Drive

torch = pytest.importorskip("torch")

from dlrover_adapters.agent.slot import StepSlot  # noqa: E402
from dlrover_adapters.torch import ElasticBatch, ElasticDataset, ElasticStream, steps  # noqa: E402
from dlrover_adapters.torch.checkpoint.positions import DataSource  # noqa: E402
from dlrover_core.data.cut import pack, unpack  # noqa: E402
from dlrover_core.data.in_work import InWork  # noqa: E402
from dlrover_core.data.poison import VARIABLE, Spot, told  # noqa: E402
from dlrover_core.data.streams import ENDLESS, Extent, Message  # noqa: E402
from dlrover_core.errors import SpecError  # noqa: E402
from dlrover_core.history.audit import Audit  # noqa: E402
from dlrover_core.history.ledger import ledger_of  # noqa: E402
from dlrover_core.history.render_ledger import lines  # noqa: E402
from dlrover_core.job.checkpoints import CommitCheckpoint, ReportKeeping  # noqa: E402
from dlrover_core.job.shards import RegisterDataset  # noqa: E402


class Two:
    """Two partitions of ten messages: 0 to 9, and 100 to 109."""

    name, fingerprint = "toy", "toy:1"

    def __init__(self) -> None:
        self.committed: list[Mapping[str, int]] = []

    def extents(self) -> Mapping[str, Extent]:
        """All of them."""
        return dict.fromkeys("01", Extent(0, 10))

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """At once."""
        return [Message(at, 100 * int(partition) + at) for at in range(offset, min(offset + most, 10))]

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Written down."""
        self.committed.append(dict(offsets))

    def close(self) -> None:
        """Nothing is open."""


def trained(data: ElasticStream, batches: int, micros: int = 1) -> list[list[int]]:
    """The micro-batches of so many global steps, each of which is counted."""
    found: list[list[int]] = []
    for number, one in enumerate(data, 1):
        found.append(one.tolist())
        if number % micros == 0:
            data.step()
        if number == batches * micros:
            break
    return found


def left_out(monkeypatch: pytest.MonkeyPatch, *messages: tuple[str, int]) -> None:
    """The agent says so."""
    monkeypatch.setenv(VARIABLE, told([Spot(f"toy/{partition}", 1, offset) for partition, offset in messages], 1))


def test_a_message_is_left_out_wherever_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its position counts; the cut says that it was passed, and a later run, which no agent tells, leaves it out by the cut."""
    left_out(monkeypatch, ("1", 3), ("1", 9), ("toy", 2))
    stream = Two()
    data = ElasticStream(stream, global_batch=8, micro_batch=4)
    assert trained(data, 1, micros=2) == [[0, 1, 2, 3], [100, 101, 102]]
    places = {one.dataset: one.position for one in data.places}
    assert places == {"toy": 8, "toy/0": 4, "toy/1": 4, "toy/1/quarantined/3": 1}
    cut = unpack(DataSource({("data",): data}).cut())
    monkeypatch.delenv(VARIABLE)
    other = ElasticStream(stream, global_batch=4)
    again = DataSource({("data",): other})
    assert list(again.accept(cut)) == []
    again.load({"cut": cut, "data.cut": cut} | dict.fromkeys(again.roots(), cut))
    assert (other.offsets, other.samples) == ({"0": 4, "1": 4}, 8)
    assert trained(other, 1) == [[4, 5, 104, 105]]
    assert "toy/1/quarantined/3" in {one.dataset for one in other.places}
    data.stored({one.dataset: one for one in cut})
    assert stream.committed[-1] == {"0": 4, "1": 4}


def test_a_mean_is_over_the_messages_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of which nothing is left is a repetition of weight zero."""
    left_out(monkeypatch, ("0", 0), ("0", 1))
    model = torch.nn.Linear(1, 1)
    batch = ElasticBatch(model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=8, micro_batch=2)
    data, weights = ElasticStream(Two()), []
    for x in batch.over(torch.utils.data.DataLoader(data, batch_size=None)):
        weights.append(round(batch.weight, 6))
        if batch.backward(model(x.float().unsqueeze(1)).mean()):
            break
    assert weights == [0.0, *[round(1 / 3, 6)] * 3]


def test_a_batch_of_which_nothing_is_left_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a loop that counts its micro-batches, and where the whole batch is poison."""
    left_out(monkeypatch, ("0", 0), ("0", 1))
    with pytest.raises(SpecError, match="a larger micro_batch, or use ElasticBatch"):
        trained(ElasticStream(Two(), global_batch=4, micro_batch=2), 1)
    left_out(monkeypatch, ("0", 0))
    with pytest.raises(
        SpecError, match="all 1 messages of a global batch of stream 'toy' are quarantined: give a larger"
    ):
        trained(ElasticStream(Two(), global_batch=1), 1)


def test_a_message_of_which_parse_makes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By partition and offset, past what is left out before it."""
    left_out(monkeypatch, ("0", 1), ("1", 0))
    data = ElasticStream(Two(), parse=lambda value: None if value == 102 else value, global_batch=8)
    with pytest.raises(SpecError, match="parse: None for the message at offset 2 of partition 1 of stream 'toy'"):
        trained(data, 1)


def test_a_loader_process_that_is_spawned_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream reaches it pickled, with what is left out of the batches that are planned."""
    left_out(monkeypatch, ("1", 3))
    data = ElasticStream(Two(), global_batch=8)
    trained(data, 1)
    there = pickle.loads(pickle.dumps(data))  # noqa: S301
    assert there.places == data.places
    assert there.left.positions(0) == data.left.positions(0)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(RuntimeError, match="SpecError: num_workers: stream 'toy' is read in the process that trains"):
        next(iter(loader))


@pytest.mark.parametrize("stream_first", [True, False])
def test_a_dataset_that_is_called_as_a_partition_is(*, stream_first: bool) -> None:
    """Its place would be taken for a partition's: refused before training, in either order."""
    data = [ElasticStream(Two()), ElasticDataset("toy/eval", size=10, fetch=str)]
    first, second = data if stream_first else reversed(data)
    with pytest.raises(SpecError, match=r"name: .*'toy/eval' would be taken for a partition of stream 'toy'"):
        DataSource({("a",): first, ("b",): second})
    DataSource({("a",): data[0], ("b",): ElasticDataset("toys/eval", size=10, fetch=str)})


def test_the_agent_knows_at_which_message_parse_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By partition and offset, past what is left out before it. An error that the script outlives is no cause of a later one."""
    left_out(monkeypatch, ("1", 1))
    slot = StepSlot()
    monkeypatch.setattr(steps, "_signal", steps.StepSignal(1, 0, str(tmp_path / "nobody"), slot.fd))
    bad = {102}

    def parse(value: int) -> Any:
        if value in bad:
            raise ValueError("no JSON")
        return value

    data = ElasticStream(Two(), parse=parse, global_batch=8, poison="fail")
    with pytest.raises(ValueError, match="no JSON") as raised:
        trained(data, 1)
    assert slot.in_work("ValueError: no JSON") == InWork("toy/1", 0, 2, 3, 2, 0, True).text
    notes: list[str] = getattr(raised.value, "__notes__", ["index 2 of dataset 'toy/1'"])
    assert "index 2 of dataset 'toy/1'" in notes[0]
    bad.clear()
    assert trained(data, 1) == [[0, 1, 2, 3, 100, 102, 103]]
    assert slot.in_work("RuntimeError: of something else") == ""
    slot.close()


def test_people_see_which_messages_of_a_partition_are_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition's row and proof name them, and the stream's row counts them as no samples of the model."""
    left_out(monkeypatch, ("1", 3))
    data = ElasticStream(Two(), global_batch=8)
    trained(data, 1)
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.do(RegisterDataset("worker-0-0", 1, "toy", ENDLESS, 0, "file", data.place.fingerprint, 1, 8, "cursor"))
    drive.do(ReportKeeping("worker-0-0", 1, "file:///c", 2, 10, 3, True, 4096, 1))
    drive.do(CommitCheckpoint("worker", 1, 1, 2, 4096, 7, (pack(data.places),)))
    shown = list(lines(ledger_of(drive.state)))
    assert shown[1].startswith("  7 samples in the model")
    assert shown[-1] == "  quarantined: sample 3; left out 1 time so far"
    audit = Audit()
    for record in drive.records:
        audit.feed(record)
    assert {proof.dataset: proof.left_out for proof in audit.proofs()} == {"toy": 1, "toy/0": 0, "toy/1": 1}


def test_a_stream_is_not_leased() -> None:
    """The refusal says why, and what to give instead."""
    with pytest.raises(
        SpecError, match=r"assign: 'lease': a stream has no size to divide into leases.*leave assign= out"
    ):
        ElasticStream(Two(), assign="lease")
