"""Messages that are removed before they are consumed: `lost="skip"` goes on without them, and says which they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_streams import fill

pytest.importorskip("torch")

from dlrover_adapters.data.folder_stream import PARTITION, FolderStream
from dlrover_adapters.data.stream_plan import Book, Run, divided
from dlrover_adapters.torch import ElasticStream
from dlrover_core.data.streams import Extent, StreamError

FILES = "abcd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files of three messages, 0 to 11, which were all seen."""
    for number, name in enumerate(FILES):
        fill(tmp_path, f"{name}.jsonl", *range(3 * number, 3 * number + 3))
    FolderStream(tmp_path)
    return tmp_path


def remove(folder: Path, names: str) -> None:
    """Retention."""
    for name in names:
        (folder / f"{name}.jsonl").unlink()


def opened(folder: Path, lost: str = "skip", batch: int = 4) -> ElasticStream:
    """A run."""
    return ElasticStream(FolderStream(folder), name="toy", global_batch=batch, lost=lost)


def train(data: ElasticStream, batches: int) -> list[list[int]]:
    """So many global batches."""
    found, drawn = [], iter(data)
    for _ in range(batches):
        found.append(next(drawn).tolist())
        data.step()
    return found


@pytest.mark.parametrize(
    ("gone", "wanted", "told", "end"),
    [
        ("b", [[0, 1, 2, 6], [7, 8, 9, 10]], ["offset 3 ", "is 6: 3 messages"], 11),
        ("bc", [[0, 1, 2, 9]], ["offset 3 ", "is 9: 6 messages"], 10),
        ("ac", [[3, 4, 5, 9]], ["offset 0 ", "is 3: 3 messages", "offset 6 ", "is 9: 3 messages"], 10),
        ("cd", [[0, 1, 2, 3]], [], 4),
    ],
)
def test_files_that_are_gone_in_the_middle_are_passed_over(
    gone: str, wanted: list[list[int]], told: list[str], end: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch goes over the hole, and each hole that it passes is told once, by its ends."""
    data = opened(folder)
    before = data.state_dict() | {"offsets": '{"0": 0}'}
    remove(folder, gone)
    data.load_state_dict(before)
    assert train(data, len(wanted)) == wanted
    assert all(one in caplog.text for one in told)
    assert caplog.text.count("messages were removed") == len(told) // 2
    assert (data.offsets, data.samples) == ({PARTITION: end}, 4 * len(wanted))


def test_what_comes_after_the_last_hole_is_read(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest files are gone, and new ones come."""
    data = opened(folder, batch=3)
    assert train(data, 1) == [[0, 1, 2]]
    state = data.state_dict()
    remove(folder, "bd")
    data = opened(folder, batch=3)
    data.load_state_dict(state)
    assert train(data, 1) == [[6, 7, 8]]
    fill(folder, "e.jsonl", 12, 13, 14)
    assert train(data, 1) == [[12, 13, 14]]
    assert [one in caplog.text for one in ("offset 3 ", "offset 9 ")] == [True, True]
    assert caplog.text.count("messages were removed") == 2


@pytest.mark.parametrize("lost", ["skip", "refuse"])
def test_what_is_removed_once_it_is_planned_costs_one_restart(lost: str, folder: Path) -> None:
    """All ranks have the plan, so the read fails and says what follows: with "skip" the next run goes on behind it."""
    data = opened(folder, lost)
    drawn = iter(data)
    assert next(drawn).tolist() == [0, 1, 2, 3]
    data.step()
    state = data.state_dict()
    remove(folder, "bc")
    with pytest.raises(
        StreamError, match=r"offset 4 is no longer there, the first that is left is 9: 5 messages"
    ) as caught:
        next(drawn)
    assert ("after their batch had been planned" in str(caught.value)) == (lost == "skip")
    assert ('give lost="skip"' in str(caught.value)) == (lost == "refuse")
    again = opened(folder, lost, batch=3)
    again.load_state_dict(state)
    if lost == "skip":
        assert train(again, 1) == [[9, 10, 11]]
    else:
        with pytest.raises(StreamError, match='give lost="skip"'):
            train(again, 1)


def test_batches_have_no_message_of_a_hole() -> None:
    """What is planned, and the offsets after it."""
    holes = {"0": [Extent(2, 4), Extent(7, 9)]}
    extents = {"0": Extent(0, 10), "1": Extent(0, 4)}
    assert divided(extents, {"0": 0, "1": 0}, 10, 9, holes) == [(("0", 6), ("1", 4))]
    assert divided(extents, {"0": 0, "1": 0}, 11, 9, holes) == []
    book = Book(0, {})
    book.add({"0": 0, "1": 0}, [(("0", 2), ("1", 1)), (("0", 4), ("1", 2))], holes)
    first, second = book.planned
    assert (first.runs, first.after) == ((Run("0", 0, 2), Run("1", 0, 1)), {"0": 2, "1": 1})
    assert second.runs == (Run("0", 4, 3), Run("0", 9, 1), Run("1", 1, 2))
    assert second.pieces(5, 8) == [Run("0", 6, 1), Run("0", 9, 1), Run("1", 1, 1)]
    assert book.planned_to == {"0": 10, "1": 3}
    inside = Book(0, {})
    inside.add({"0": 8}, [(("0", 1),)], holes)
    assert inside.planned[0].runs == (Run("0", 9, 1),)
