"""Streams: the folder keeps the port's promises, the kit finds streams that do not, and a stream is trained on as a file is."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_streams import Toy, ToyStand, fill

from dlrover_adapters.data import Reader, fingerprint_of
from dlrover_adapters.data import folder_stream as folders
from dlrover_adapters.data.folder_stream import LIST, PARTITION, FolderStream
from dlrover_adapters.data.following import Followed
from dlrover_adapters.torch import ElasticStream
from dlrover_core.data.streams import (
    ENDLESS,
    AccessRefused,
    Extent,
    Message,
    OffsetGone,
    SegmentChanged,
    Stream,
    StreamError,
    StreamGone,
    StreamUnavailable,
)
from dlrover_core.errors import SpecError
from dlrover_core.testing import stream_conformance
from dlrover_core.testing.stream_conformance import StreamConformance


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a file looks often."""
    monkeypatch.setattr(folders, "LOOK_S", 0.001)


class FolderStand:
    """A folder that files are moved into."""

    partition = PARTITION

    def __init__(self, folder: Path) -> None:
        self.folder, self.written, self.files = folder, 0, 0
        self.stream: Stream = FolderStream(folder)

    def write(self, count: int) -> None:
        """One file more, whose name sorts before all others."""
        part = self.folder / f"{999 - self.files}.jsonl.tmp"
        part.write_text("".join(f"{one}\n" for one in range(self.written, self.written + count)))
        part.rename(part.with_suffix(""))
        self.written, self.files = self.written + count, self.files + 1
        # Files that came before anybody looked have come at once, in the order of their names.
        self.another()

    def values(self, messages: Sequence[Message]) -> list[int]:
        """Each line is a number."""
        return [one.value for one in messages]

    def another(self) -> Stream:
        """Another reader."""
        return FolderStream(self.folder)

    def trim(self) -> bool:
        """The first file goes."""
        (self.folder / "999.jsonl").unlink()
        return True


class TestFolder(StreamConformance):
    """The growing folder."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @contextlib.contextmanager
    def make_stand(self) -> Iterator[FolderStand]:
        """A new folder."""
        yield FolderStand(self.folder)


class GroupOffsets(Toy):
    """Goes on where it was committed, whatever is asked."""

    committed = 0

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """From what was committed."""
        return super().read(partition, max(offset, self.committed), most, wait_s)

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Believed by readers."""
        GroupOffsets.committed = offsets["a"]


class Skips(Toy):
    """Begins at what is left, as `auto.offset.reset` does."""

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """Never an error."""
        first, end = self.extents()["a"]
        return super().read(partition, min(max(first, offset), end), most, wait_s)


class Hasty(Toy):
    """Waits for nothing."""

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """At once."""
        return super().read(partition, offset, most, 0)


class Greedy(Toy):
    """Gives all that there is."""

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """More than was asked for."""
        return super().read(partition, offset, 1000, wait_s)


class Anonymous(Toy):
    """Takes every partition for its own, and every reader for another stream."""

    fingerprint = ""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fingerprint = f"toy:{id(self)}"

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """Of whatever partition."""
        return super().read("a", offset, most, wait_s)


class Held(Toy):
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("a connection is open")


BROKEN = {
    GroupOffsets: {"test_other_readers_and_commits_change_nothing"},
    Skips: {"test_what_is_not_there_is_told", "test_what_was_removed_is_told"},
    Hasty: {"test_a_read_waits"},
    Greedy: {"test_messages_come_in_order"},
    Anonymous: {"test_other_readers_and_commits_change_nothing", "test_what_is_not_there_is_told"},
    Held: {"test_it_goes_to_other_processes"},
}


@pytest.mark.parametrize("kind", [Toy, *BROKEN])
def test_the_kit(kind: type[Toy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right stream passes all of the kit; each wrong one fails the story that is about it."""
    monkeypatch.setattr(stream_conformance, "WAIT_S", 5.0)

    class Kit(StreamConformance):
        @contextlib.contextmanager
        def make_stand(self) -> Iterator[ToyStand]:
            yield ToyStand(tmp_path / "toy.json", kind)

    failed = set()
    for name in dir(Kit):
        if name.startswith("test_"):
            GroupOffsets.committed = 0
            try:
                getattr(Kit(), name)()
            except (AssertionError, TypeError):
                failed.add(name)
    if kind is Toy:
        assert failed == set()
    elif kind is not Hasty:  # which reads the message if it was written first
        assert failed >= BROKEN[kind]


def test_files_keep_their_order(tmp_path: Path) -> None:
    """In the order in which they came, for every reader; what is not complete is left alone, and what is empty."""
    fill(tmp_path, "b.jsonl", 1, 2)
    stream = FolderStream(tmp_path)
    for name in ("_temporary", ".hidden.jsonl", "c.jsonl.tmp", "d.jsonl.inprogress"):
        fill(tmp_path, name, 9)
    fill(tmp_path, "empty.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    fill(tmp_path, "a.jsonl", 3)
    assert stream.extents() == {PARTITION: Extent(0, 3)}
    fill(tmp_path, "empty.jsonl", 4)
    for reader in (stream, FolderStream(tmp_path)):
        found: list[Message] = []
        while len(found) < 4:
            found += reader.read(PARTITION, len(found), 10, 0)
        assert found == [Message(at, at + 1) for at in range(4)]
    assert fingerprint_of(Followed(stream)) == stream.fingerprint


def test_a_writer_of_the_list_that_died(tmp_path: Path) -> None:
    """What it left of a line is no line, and the next one writes it whole."""
    fill(tmp_path, "a.jsonl", 1)
    stream = FolderStream(tmp_path)
    told = (tmp_path / LIST).read_bytes()
    (tmp_path / LIST).write_bytes(told + b'00000000 {"name": "b.js')
    fill(tmp_path, "b.jsonl", 2)
    assert stream.extents() == {PARTITION: Extent(0, 2)}
    assert (tmp_path / LIST).read_bytes().startswith(told)
    assert [one.value for one in FolderStream(tmp_path).read(PARTITION, 1, 9, 0)] == [2]


def test_two_readers_find_files_at_once(tmp_path: Path) -> None:
    """Each file is written down once."""
    streams = [FolderStream(tmp_path) for _ in range(4)]
    for one in range(12):
        fill(tmp_path, f"{one}.jsonl", one)
    together = threading.Barrier(4)

    def look(stream: FolderStream) -> None:
        together.wait(30)
        stream.extents()

    threads = [threading.Thread(target=look, args=(one,)) for one in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {str(one.extents()) for one in streams} == {str({PARTITION: Extent(0, 12)})}
    assert len((tmp_path / LIST).read_text().splitlines()) == 13


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    """A file that others may have read already is what it was, or nothing."""
    path = fill(tmp_path, "a.jsonl", 1, 2)
    stream = FolderStream(tmp_path)
    fill(tmp_path, "a.jsonl", 1, 3)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SegmentChanged, match="write new files, and never change one"):
        stream.read(PARTITION, 0, 5, 0)


def test_a_hole_in_the_files(tmp_path: Path) -> None:
    """Of a removed file in the middle, the error says where the next one begins."""
    for number in range(3):
        fill(tmp_path, f"{number}.jsonl", number, number)
    stream = FolderStream(tmp_path)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(
        OffsetGone, match="offset 3 is no longer there, the first that is left is 4: 1 messages were removed"
    ):
        stream.read(PARTITION, 3, 5, 0)


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files are taken by a pattern; that there are others is said once."""
    fill(tmp_path, "a.jsonl", 1)
    (tmp_path / "README.md").write_text("# Clicks\n")
    (tmp_path / "click-0").write_text("7\n")
    stream = FolderStream(tmp_path)
    for _ in range(2):
        assert stream.extents() == {PARTITION: Extent(0, 1)}
    assert capsys.readouterr().err.count("'README.md' is not read, as it does not match *.jsonl, ") == 1
    assert FolderStream(tmp_path, pattern="click-*").extents() == {PARTITION: Extent(0, 2)}


def test_segments_of_flink_and_spark_are_found(tmp_path: Path) -> None:
    """Flink names no ending, and begins a folder each hour; Spark has folders of columns. What is not complete is left alone."""
    hour, day = tmp_path / "2026-11-27--01", tmp_path / "day=27"
    for folder in (hour, day, tmp_path / "_spark_metadata", tmp_path / ".staging"):
        folder.mkdir()
    fill(hour, "part-8d1e0f6a-5c1b-0", 1)
    fill(hour, ".part-8d1e0f6a-5c1b-1.inprogress.0f", 9)
    fill(day, "part-00000-9c2f.c000.json", 2)
    fill(day, ".part-00000-9c2f.c000.json.crc", 9)
    fill(day, "part-00001-9c2f.c000.json.gz", 9)
    fill(tmp_path / "_spark_metadata", "0.json", 9)
    fill(tmp_path / ".staging", "part-0", 9)
    stream = FolderStream(tmp_path)
    assert [one.value for at in (0, 1) for one in stream.read(PARTITION, at, 9, 0)] == [1, 2]
    (later := tmp_path / "2026-11-27--02").mkdir()
    fill(later, "part-8d1e0f6a-5c1b-2", 3)
    assert stream.extents() == {PARTITION: Extent(0, 3)}
    (hour / "part-8d1e0f6a-5c1b-0").unlink()
    assert FolderStream(tmp_path).extents() == {PARTITION: Extent(1, 3)}


def test_parquet_of_flink_and_spark_is_found(tmp_path: Path) -> None:
    """With an ending and without one."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, name in enumerate(("part-00000-9c2f.c000.snappy.parquet", "part-8d1e0f6a-5c1b-0")):
        parquet.write_table(pyarrow.table({"a": [number]}), tmp_path / name)
    assert FolderStream(tmp_path, "parquet").extents() == {PARTITION: Extent(0, 2)}


@pytest.mark.parametrize(
    ("kind", "name", "remedy"),
    [("jsonl", "bad.jsonl", "compressed.*unpack it first"), ("parquet", "bad.parquet", "no Parquet file")],
)
def test_a_file_that_is_none_of_its_kind(kind: str, name: str, remedy: str, tmp_path: Path) -> None:
    """Its name is told, and what to do."""
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"\x1f\x8b\x08" + bytes(50))
    with pytest.raises(StreamError, match=rf"{name}.*{remedy}.*or take it out of .*, or give a pattern="):
        FolderStream(tmp_path, kind)


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (PermissionError(13, "Permission denied"), AccessRefused, "a.jsonl may not be read by this user: .*chmod"),
        (OSError(5, "Input/output error"), StreamUnavailable, "a.jsonl cannot be read now: Input/output error"),
    ],
)
def test_a_file_that_may_not_be_read(
    error: OSError, kind: type[StreamError], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is told, and what to do."""

    def refused(_: Path) -> Any:
        raise error

    fill(tmp_path, "a.jsonl", 1)
    monkeypatch.setitem(folders.KINDS, "jsonl", refused)
    with pytest.raises(kind, match=remedy):
        FolderStream(tmp_path)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    """Each is told with its remedy."""
    path = fill(tmp_path, "a.jsonl", 1)
    with pytest.raises(StreamGone, match="is not there: give a folder that exists"):
        FolderStream(tmp_path / "none")
    with pytest.raises(StreamGone, match="is no folder"):
        FolderStream(path)
    with pytest.raises(SpecError, match="kind: 'csv': give jsonl, lines, parquet"):
        FolderStream(tmp_path, "csv")
    FolderStream(tmp_path)
    with pytest.raises(SpecError, match=r"kind: 'lines', and .* was begun as 'jsonl': give that"):
        FolderStream(tmp_path, "lines")


def test_a_folder_that_is_not_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may not write reads what others have written down, and is told where nobody has."""
    fill(tmp_path, "a.jsonl", 1)
    real = os.open

    def refused(path: Any, flags: int, *more: Any) -> int:
        if str(path).endswith(LIST):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(AccessRefused, match="may not be read and written to by this user"):
            FolderStream(tmp_path)
    FolderStream(tmp_path)
    monkeypatch.setattr(os, "open", refused)
    fill(tmp_path, "b.jsonl", 2)
    assert FolderStream(tmp_path).extents() == {PARTITION: Extent(0, 1)}


# A stream as a source.


def test_a_stream_is_read_as_a_file_is(tmp_path: Path) -> None:
    """By position; what has not come yet is waited for; a restart goes on, and another stream is refused."""
    fill(tmp_path, "a.jsonl", *range(5))
    source = Followed(FolderStream(tmp_path))
    reader = Reader(source, "clicks")
    assert list(reader.samples(0, 0, 4)) == [0, 1, 2, 3]
    place = reader.place(0, 4)
    again = Reader(pickle.loads(pickle.dumps(source)), "clicks")  # noqa: S301
    again.resume(place)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(again.samples(0, 4, 8)))
    thread.start()
    fill(tmp_path, "b.tmp", *range(5, 9)).rename(tmp_path / "b.jsonl")
    thread.join(60)
    assert found == [4, 5, 6, 7]
    assert len(source) == ENDLESS
    (tmp_path / LIST).unlink()
    with pytest.raises(SpecError, match=r"fingerprint: dataset 'clicks' is 'folder:.*give the data of then"):
        Reader(Followed(FolderStream(tmp_path)), "clicks").resume(place)


class Many(Toy):
    """Two partitions, and offsets with holes."""

    partitions = 2

    def extents(self) -> Mapping[str, Extent]:
        """Of all."""
        return dict.fromkeys("ab"[: self.partitions], Extent(0, 9))

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """Every other offset."""
        return [Message(offset + offset % 2, offset)]


def test_samples_may_be_arrays(tmp_path: Path) -> None:
    """Samples are looked at for None by identity: an array compares its elements."""
    FolderStand(tmp_path).write(4)
    data = ElasticStream(
        f"folder://{tmp_path}", parse=lambda value: np.full(3, value), collate=list, global_batch=4, micro_batch=4
    )
    assert [one.tolist() for one in next(iter(data))] == [[at] * 3 for at in range(4)]


def test_streams_that_have_no_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several partitions, or holes: a position would not say what was consumed."""
    with pytest.raises(SpecError, match="stream: toy has 2 partitions: give a stream with one"):
        Followed(Many(tmp_path))
    monkeypatch.setattr(Many, "partitions", 1)
    source = Followed(Many(tmp_path))
    assert source[2] == 2
    with pytest.raises(StreamError, match="offset 3 was left out, 4 comes next: streams with holes"):
        source[3]
