import errno
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dlrover_adapters.agent.checkpoints.saving import STALL_S
from dlrover_adapters.checkpoint import places
from dlrover_adapters.checkpoint.places import Place
from dlrover_core.errors import SpecError


class Upload:
    """What object stores' file systems give for writing: nothing is there before it is completed."""

    def __init__(self, store: Any, path: Any) -> None:
        self._store, self._path, self._content, self.closed = store, path, b"", False

    def write(self, content: Any) -> int:
        """Buffered."""
        self._content += bytes(content)
        return len(content)

    def close(self) -> None:
        """The last part."""
        self.closed = True

    def commit(self) -> None:
        """It is there."""
        self._store.pipe_file(self._path, self._content)

    def discard(self) -> None:
        """It never will be."""
        self._store.discarded.append(self._path)


class Bucket(MemoryFileSystem):
    """An object store in memory whose large uploads are multipart ones."""

    protocol = ("s3",)
    cachable = False
    store = {}  # noqa: RUF012  # as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012  # as above

    def __init__(self) -> None:
        super().__init__()
        self.discarded = []

    def _open(self, path: Any, mode: Any = "rb", **options: Any) -> Any:
        if mode == "wb" and "data" not in options:
            assert options["autocommit"] is False
            return Upload(self, path)
        return super()._open(path, mode, **options)


class Server(MemoryFileSystem):
    """Real files somewhere else, which can be seen half-written."""

    protocol = ("sftp",)
    cachable = False
    store = {}  # noqa: RUF012  # as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012  # as above


def over(files: Any) -> Place:
    """An empty folder in this file system."""
    place = Place("memory://x/run")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    place._remote = (files, "/x/run")
    return place


def broken_off(place: Place, name: str, size: int) -> None:
    """A write that ends in an error of its own."""
    with place.writer(name) as out:
        out.write(b"x" * size)
        raise ZeroDivisionError


PLACES = {
    "path": lambda folder: Place(str(folder)),
    "file": lambda folder: Place(f"file://{folder}/deep/er"),
    "memory": lambda folder: Place(f"memory://{folder.name}/run"),
    "bucket": lambda folder: over(Bucket()),
    "server": lambda folder: over(Server()),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An empty folder on each kind of storage."""
    monkeypatch.setattr(places, "_REMOTE_BLOCK_BYTES", 1000)
    return PLACES[request.param](tmp_path)


def test_a_file_is_there_whole_and_can_be_read_from_anywhere_in_it(place: Place) -> None:
    """What is put, in one piece or many, can be read back, listed with its size, replaced and removed."""
    content = os.urandom(5000)
    assert place.put("step-1/a", content[:10]) == 10
    assert place.put("step-1/a", (content[at : at + 700] for at in range(0, 5000, 700))) == 5000
    assert place.get("step-1/a") == content
    assert place.size("step-1/a") == 5000
    assert [(one.name, one.size, one.folder) for one in place.ls("step-1")] == [("a", 5000, False)]
    assert [(one.name, one.folder) for one in place.ls()] == [("step-1", True)]
    first, second = bytearray(100), bytearray(50)
    with place.reader("step-1/a") as source:
        assert source.read_at(4000, [memoryview(first), memoryview(second)]) == 150
        assert source.read_at(4990, [memoryview(first)]) == 10
    assert bytes(second) == content[4100:4150]
    place.rm("step-1/a")
    place.rm("step-1/a")
    assert place.ls("step-1") == []
    place.put("step-2/b", b"1")
    place.rmdir("step-2")
    assert place.get("step-2/b") == b"1"
    place.rm("step-2/b")
    place.rmdir("step-2")
    place.rmdir("step-2")
    assert not [one for one in place.ls() if one.name == "step-2" and place.ls("step-2")]


@pytest.mark.parametrize("size", [10, 5000])
def test_a_write_that_fails_leaves_nothing(place: Place, size: Any) -> None:
    """A file whose writing was broken off is not there, neither under its own name nor another; what was there before stays."""
    place.put("a", b"before")
    for name in ("a", "b"):
        with pytest.raises(ZeroDivisionError):
            broken_off(place, name, size)
    assert place.get("a") == b"before"
    assert [one.name for one in place.ls()] == ["a"]
    with pytest.raises(FileNotFoundError):
        place.get("b")


def test_a_multipart_upload_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store is told to discard an upload, and its finaliser cannot complete it."""
    monkeypatch.setattr(places, "_REMOTE_BLOCK_BYTES", 1000)
    bucket = Bucket()
    place = over(bucket)
    with pytest.raises(ZeroDivisionError):
        broken_off(place, "b", 5000)
    assert bucket.discarded == ["/x/run/b"]


@pytest.mark.parametrize(
    ("raised", "number", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC, OSError),
        (OSError(errno.EROFS, "Read-only file system"), errno.EROFS, OSError),
        (PermissionError("denied"), errno.EACCES, PermissionError),
        (FileNotFoundError("where"), errno.ENOENT, FileNotFoundError),
        (type("ReadTimeout", (Exception,), {})("slow"), errno.ETIMEDOUT, TimeoutError),
        (type("ClientError", (Exception,), {"__module__": "botocore"})("no key"), errno.EIO, OSError),
        (NotImplementedError(), errno.EROFS, OSError),
    ],
)
def test_every_failure_is_an_oserror_with_the_url_and_no_password(raised: Any, number: Any, kind: Any) -> None:
    """Whatever a file system raises names its place, keeps its kind, and tells no secret."""

    class Broken(Bucket):
        def pipe_file(self, *args: Any, **options: Any) -> Any:
            raise raised

    place = over(Broken())
    place.url = "s3://key:secret@bucket/run"
    with pytest.raises(kind) as found:
        place.put("a", b"1")
    assert found.value.errno == number
    assert "s3://bucket/run/a" in str(found.value)
    assert "secret" not in str(found.value)


def test_a_disk_that_is_full_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    """A write that the system refuses half-way leaves no file and no draft."""
    place = Place(str(tmp_path / "run"))
    place.put("a", b"before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        with pytest.raises(OSError, match="run/a") as found:
            place.put("a", b"x" * 1024 * 1024)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.value.errno in {errno.EFBIG, errno.ENOSPC}
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["a"]
    assert place.get("a") == b"before"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system is an error that names the URL."""

    def refuse(path: Any, *args: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(OSError, match="Read-only") as found:
        Place(f"file://{tmp_path}/run").put("a", b"1")
    assert (found.value.errno, found.value.filename) == (errno.EROFS, f"file://{tmp_path}/run/a")


def test_drafts_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    """Whoever writes a file removes old drafts of the same file; young ones and other files' stay, and no listing shows them."""
    place = Place(str(tmp_path))
    old, young, other = (
        tmp_path / f".{name}.{digit * 32}.draft" for name, digit in (("a", "0"), ("a", "1"), ("b", "2"))
    )
    for draft in (old, young, other):
        draft.write_bytes(b"half")
    for draft in (old, other):
        then = time.time() - places.DRAFT_OLD_S - 60
        os.utime(draft, (then, then))
    place.put("a", b"1")
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)
    assert [one.name for one in place.ls()] == ["a"]
    assert sorted(one.name for one in place.ls(drafts=True)) == sorted(["a", young.name, other.name])


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced, then renamed, then its folder is synced, and so are folders that were made."""
    done = []
    for name in ("fsync", "rename", "mkdir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, _name=name, _real=real: (done.append(_name), _real(*args))[1])
    Place(str(tmp_path / "run")).put("step/a", b"1")
    assert done == ["mkdir", "fsync", "mkdir", "fsync", "fsync", "rename", "fsync"]


@pytest.mark.parametrize("url", ["", "nosuch://x", "simplecache::memory://x"])
def test_a_url_that_cannot_be_used_is_refused_at_once(url: Any) -> None:
    """Unknown schemes, caches and empty URLs are wrong settings, said before anything is written."""
    with pytest.raises(SpecError):
        Place(url)


class Disk:
    """A disk that takes ``bytes_per_s``, and a page cache that takes all at once; the longest sync of it, and the largest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
        self.bytes_per_s, self.now, self.dirty, self.longest_s, self.largest = bytes_per_s, 0.0, 0, 0.0, 0
        monkeypatch.setattr(places.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "write", lambda _, view: self.took(len(view)))
        monkeypatch.setattr(os, "fdatasync", lambda _: self.sync())
        monkeypatch.setattr(os, "fsync", lambda _: self.sync())

    def took(self, size: int) -> int:
        """Into the page cache."""
        self.dirty += size
        return size

    def sync(self) -> None:
        """Out of it."""
        took_s, self.largest = self.dirty / self.bytes_per_s, max(self.largest, self.dirty)
        self.now += took_s
        self.dirty, self.longest_s = 0, max(self.longest_s, took_s)


@pytest.mark.parametrize("piece", [1 << 20, 48 << 20])
def test_a_slow_disk_does_not_look_like_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """At 100 KB/s something is seen to move far more often than a saver is given up; a fast one is not held up by it."""
    content = bytes(piece)
    disk = Disk(monkeypatch, 100e3)
    with Place(str(tmp_path)).writer("slow") as out:
        for _ in range((96 << 20) // piece):
            out.write(content)
    assert disk.longest_s < 0.75 * STALL_S
    disk = Disk(monkeypatch, 1e9)
    with Place(str(tmp_path)).writer("fast") as out:
        for _ in range((384 << 20) // piece):
            out.write(content)
    assert disk.largest == places.SYNC_EACH_BYTES


def test_a_disk_that_becomes_slow_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's cache is full, or its credits are used up: the next syncs are smaller."""
    disk, content = Disk(monkeypatch, 1e9), bytes(1 << 20)
    with Place(str(tmp_path)).writer("a") as out:
        for number in range(768):
            if number == 300:
                assert disk.largest == places.SYNC_EACH_BYTES
                disk.bytes_per_s = 4e6
            if number == 600:
                disk.largest = 0
            out.write(content)
    assert disk.longest_s < 0.75 * STALL_S
    assert disk.largest < places.SYNC_EACH_BYTES


def test_a_disk_whose_syncs_all_take_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds each, however small: they do not become smaller, and so many."""
    disk, content, syncs = Disk(monkeypatch, 1e9), bytes(1 << 20), []
    monkeypatch.setattr(os, "fdatasync", lambda _: syncs.append(setattr(disk, "now", disk.now + 10)))
    with Place(str(tmp_path)).writer("a") as out:
        for _ in range(64):
            out.write(content)
    assert len(syncs) == (64 << 20) // places.SYNC_FIRST_BYTES


def test_whoever_wants_to_know_is_told_how_much_is_written(place: Place, tmp_path: Path) -> None:
    """Piece by piece, of every file."""
    told: list[int] = []
    one = Place(place.url if not place.local else str(tmp_path / "told"), told.append)
    one._remote = place._remote
    with one.writer("a") as out:
        out.write(b"12345")
        assert sum(told) == 5
        out.write(b"678")
    one.put("b", b"9")
    assert sum(told) == 9
    assert one.get("a") == b"12345678"
