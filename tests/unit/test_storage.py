"""Archives behind a URL: found by its scheme, whole or not at all, never replaced, and every trouble said in our own errors."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dlrover_adapters.storage import FsspecStore
from dlrover_core.errors import LogCorrupt, LogUnavailable, SpecError
from dlrover_core.kernel.events import Batch
from dlrover_core.logs import open_log
from dlrover_core.logs.archive import Archive, LocalStore, Store, open_store
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.testing.log_conformance import CODEC, Pen, make_batch, seqs

JOB = "train"
A, B = b"a" * 100_000, b"b" * 99_999


@pytest.fixture
def place() -> str:
    """A path in memory that nobody else uses."""
    return uuid.uuid4().hex


@pytest.fixture(params=["path", "file", "memory", "plain", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> Store:
    """An empty store of every kind: of our own, with an atomic put, with an atomic put that knows no rival, with a rename."""
    if request.param in {"path", "file", "memory"}:
        urls = {"path": str(tmp_path / "a b"), "file": f"file://{tmp_path}/a%20b", "memory": f"memory://{place}"}
        return open_store(urls[request.param], JOB)
    if request.param == "plain":
        return FsspecStore(f"plain://{place}")
    return FsspecStore(f"local://{tmp_path}/c d")


class ParamValidationError(Exception):
    """What the library under s3fs raises for what it does not know."""


class Plain(MemoryFileSystem):
    """A store of objects that puts whatever it is given, and knows no exclusive put."""

    protocol = ("plain", "s3")
    store: dict[str, Any] = {}  # noqa: RUF012  # fsspec's own way: one for the class

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """Put, over anything."""
        if kwargs:
            raise ParamValidationError(f"unexpected {kwargs}")
        super().pipe_file(path, value)


class Faulty(MemoryFileSystem):
    """Files that are written bit by bit, lists that lag behind, rivals that are faster, and errors of its own kind."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012  # as above
    half = False
    rival: bytes | None = None
    late = False
    error: Exception | None = None
    listed: dict[str, list[Any]] = {}  # noqa: RUF012  # what is remembered of every folder
    calls: list[str] = []  # noqa: RUF012  # what was asked, in order

    def _told(self, what: str) -> None:
        type(self).calls.append(what)
        if self.error is not None:
            raise self.error

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What was there when it was looked at first."""
        self._told("ls")
        if path not in self.listed:
            self.listed[path] = super().ls(path, detail=True)
        return self.listed[path] if detail else [one["name"] for one in self.listed[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget what was listed."""
        self.listed.clear()

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        """A whole file."""
        self._told("read")
        content: bytes = super().cat_file(path, *args, **kwargs)
        return content

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        """Half of it, if that is what is to happen."""
        self._told("put")
        super().pipe_file(path, value[: len(value) // 2] if self.half else value)
        if self.half:
            raise ConnectionResetError("cut")

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Move over anything, after a rival did, or before."""
        self._told("mv")
        if self.rival is not None and not self.late:
            super().pipe_file(path2, self.rival)
        super().cp_file(path1, path2)
        super().rm_file(path1)
        if self.rival is not None and self.late:
            super().pipe_file(path2, self.rival)


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    """Both file systems are known to fsspec; their faults are switched off in the end."""
    fsspec.register_implementation("plain", Plain, clobber=True)
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    yield
    Faulty.half, Faulty.rival, Faulty.late, Faulty.error = False, None, False, None
    Faulty.store.clear()
    Faulty.calls.clear()


def history(first: int = 1, events: int = 3) -> Iterator[Batch]:
    """Batches of three events without end."""
    for counter in itertools.count(1):
        yield make_batch(1, counter, first, events)
        first += events


# ---- every kind of store


def test_a_store_keeps_what_it_was_given(store: Store) -> None:
    """Nothing at first; then the names of what was written, and its bytes; drafts are gone."""
    assert store.names() == []
    store.write("a.seg", A)
    store.write("b.seg", B)
    assert sorted(store.names()) == ["a.seg", "b.seg"]
    assert (store.read("a.seg"), store.read("b.seg")) == (A, B)


def test_a_store_never_writes_over(store: Store) -> None:
    """The same again is fine, a zombie's too; another content under a name is refused, and changes nothing."""
    store.write("a.seg", A)
    store.write("a.seg", A)
    with pytest.raises(FileExistsError):
        store.write("a.seg", B)
    assert store.read("a.seg") == A
    assert store.names() == ["a.seg"]


def test_two_writers_at_once(store: Store) -> None:
    """Of many writers of one name with the same bytes all succeed, and the file is whole."""
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: store.write("a.seg", A), range(8))) == [None] * 8
    assert (store.names(), store.read("a.seg")) == (["a.seg"], A)


def test_a_file_that_is_not_there(store: Store) -> None:
    """Reading what is not there is an `OSError`."""
    with pytest.raises(FileNotFoundError):
        store.read("a.seg")


def test_an_archive_on_every_store(store: Store) -> None:
    """An archive lives on any store: written, continued, verified, read."""
    batches = list(itertools.islice(history(), 12))
    assert [one.last for one in Archive(store, JOB, CODEC, 10).write(batches[:6])] == [12]
    assert [one.last for one in Archive(store, JOB, CODEC, 10).write(batches[4:])] == [24, 36]
    assert len(Archive(store, JOB, CODEC, 10).verify()) == 3
    assert list(Archive(store, JOB, CODEC, 10).batches()) == batches


def test_jobs_have_folders_of_their_own(place: str) -> None:
    """Two jobs below one URL do not meet, whatever their names."""
    one, other = open_store(f"memory://{place}/", "a/b.c"), open_store(f"memory://{place}", "a")
    one.write("x", b"1")
    assert other.names() == []
    assert open_store(f"memory://{place}", "a/b.c").read("x") == b"1"


# ---- file systems that fail


def test_a_write_that_ends_half_way_leaves_no_file(place: str) -> None:
    """What was cut off is never under the final name; the next attempt succeeds."""
    store = FsspecStore(f"faulty://{place}")
    Faulty.half = True
    with pytest.raises(ConnectionResetError):
        store.write("a.seg", A)
    assert store.names() == []
    Faulty.half = False
    store.write("a.seg", A)
    assert (store.names(), store.read("a.seg")) == (["a.seg"], A)


@pytest.mark.parametrize("late", [False, True])
def test_a_lost_race_is_noticed(place: str, *, late: bool) -> None:
    """Where nothing keeps a rival away, whoever finds something else in the end is told; whoever finds the same has won."""
    store = FsspecStore(f"faulty://{place}")
    Faulty.rival, Faulty.late = A, late
    store.write("a.seg", A)
    Faulty.rival = B
    if late:
        with pytest.raises(FileExistsError):
            store.write("b.seg", A)
    else:
        store.write("b.seg", A)
        assert store.read("b.seg") == A


def test_a_put_whose_acknowledgement_was_lost(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error after the file had landed is no error."""

    def landed(self: MemoryFileSystem, path: str, value: bytes, mode: str = "") -> None:
        Plain.store[self._strip_protocol(path)] = value
        self.open(path, "wb", data=value)
        raise ConnectionResetError

    monkeypatch.setattr(Plain, "pipe_file", landed)
    FsspecStore(f"plain://{place}").write("a.seg", A)
    assert FsspecStore(f"plain://{place}").read("a.seg") == A


def test_a_listing_is_never_an_old_one(place: str) -> None:
    """What another host wrote since is seen, though the file system remembers its lists."""
    here = FsspecStore(f"faulty://{place}")
    here.write("a.seg", A)
    assert here.names() == ["a.seg"]
    Faulty.listed[f"/{place}"] = []
    FsspecStore(f"faulty://{place}").write("b.seg", B)
    assert sorted(here.names()) == ["a.seg", "b.seg"]


class FSTimeoutError(Exception):
    """As the file systems of fsspec raise."""


class NoCredentialsError(Exception):
    """As the library under s3fs raises: no `OSError`."""


@pytest.mark.parametrize("error", [FSTimeoutError("60 s"), NoCredentialsError("none found"), PermissionError("no")])
def test_trouble_is_unavailability(place: str, error: Exception) -> None:
    """Time-outs, keys that are missing or wrong: the archive is unavailable, the message says what, nothing is damaged."""
    archive = Archive(FsspecStore(f"faulty://user:secret@{place}"), JOB, CODEC, 10)
    Faulty.error = error
    for call in (archive.spans, lambda: archive.write(itertools.islice(history(), 9)), archive.verify):
        with pytest.raises(LogUnavailable, match=str(error)) as found:
            call()
        assert "secret" not in str(found.value)


def test_a_new_job_is_refused_where_its_archive_refuses(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that are wrong end a new job at its start; a time-out may be over when the archive is needed."""
    archive = Archive(FsspecStore(f"faulty://{place}"), JOB, CODEC, 10)
    archive.check()
    assert archive.spans() == []
    Faulty.error = NoCredentialsError("none found")
    with pytest.raises(SpecError, match="none found"):
        archive.check()
    Faulty.error = FSTimeoutError("60 s")
    archive.check()
    assert ["60 s" in line for line in caplog.messages] == [True]


def test_a_new_job_does_not_continue_an_old_ones_archive(place: str) -> None:
    """Whoever deleted a log and kept its archive is told, before the events of two jobs are in one chain."""
    archive = Archive(FsspecStore(f"memory://{place}"), JOB, CODEC, 10)
    archive.check()
    archive.write(itertools.islice(history(), 9))
    with pytest.raises(SpecError, match="events of an earlier job 'train'"):
        archive.check()


def test_readers_only_list_and_read(place: str) -> None:
    """Who only reads needs no right to write."""
    Archive(FsspecStore(f"faulty://{place}"), JOB, CODEC, 10).write(itertools.islice(history(), 9))
    Faulty.calls.clear()
    reader = Archive(FsspecStore(f"faulty://{place}"), JOB, CODEC, 10)
    assert (len(reader.verify()), len(list(reader.batches())), reader.last()) == (2, 8, 24)
    assert set(Faulty.calls) == {"ls", "read"}


# ---- URLs


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nowhere://x", "knows no 'nowhere'"),
        ("simplecache::memory://x", "leave simplecache:: away"),
        ("file://otherhost/x", "is not file:PATH"),
    ],
)
def test_urls_that_no_store_understands(url: str, says: str) -> None:
    """A URL that no store understands is refused when the log is opened, with what is wrong with it."""

    async def story() -> None:
        with pytest.raises(SpecError, match=f"archive: .*{says}"):
            await open_log(f"sqlite:x.db?archive={url}", CODEC)

    asyncio.run(story())


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme's own package, fsspec itself, and a distribution without stores: each is named, with what to do."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(SpecError, match="s3fs"):
        open_store("s3://bucket/x", JOB)

    def missing() -> Callable[[str], Store]:
        raise ModuleNotFoundError("No module named 'fsspec'", name="fsspec")

    found = [SimpleNamespace(name="fsspec", load=missing)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "dlrover.stores" else [])
    with pytest.raises(SpecError, match=r"fsspec: pip install 'dlrover-core\[archive\]'"):
        open_store("s3://bucket/x", JOB)
    found.clear()
    with pytest.raises(SpecError, match="no store is installed for 's3'"):
        open_store("s3://bucket/x", JOB)


def test_a_scheme_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A distribution may bring a store for a scheme of its own; it is asked before fsspec is."""

    class Tape(LocalStore):
        def __init__(self, url: str) -> None:
            super().__init__(tmp_path / url.removeprefix("tape://"))

    found = [SimpleNamespace(name="tape", load=lambda: Tape), SimpleNamespace(name="fsspec", load=lambda: FsspecStore)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)
    open_store("tape://7", JOB).write("x", b"1")
    assert (tmp_path / "7" / JOB / "x").read_bytes() == b"1"


def test_paths_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has no scheme is a path of this host."""
    monkeypatch.chdir(tmp_path)
    for url in ("cold", "./c:old", str(tmp_path / "cold"), "file:cold", "file:///cold", "file://localhost/cold"):
        assert isinstance(open_store(url, JOB), LocalStore)
    assert isinstance(FsspecStore("local://x"), FsspecStore)
    assert LocalFileSystem.protocol == ("file", "local")


def test_sqlite_archives_to_a_url(tmp_path: Path, place: str) -> None:
    """A log on this host with its archive elsewhere: truncated, and read as one stream."""

    async def story() -> None:
        log = await SqliteLog.open(tmp_path / "log.db", CODEC, archive=f"memory://{place}", segment_events=10)
        pen = Pen(await log.lead(JOB, "a"))
        for _ in range(20):
            await pen.write(events=3)
        await log.archive(JOB)
        assert await log.truncate(JOB, 48) == 16
        await log.close()
        async with open_log(f"sqlite:{tmp_path}/log.db?archive=memory://{place}", CODEC) as again:
            assert await seqs(again.read(JOB)) == list(range(1, 61))
        async with open_log(f"sqlite:{tmp_path}/log.db", CODEC) as elsewhere:
            with pytest.raises(LogCorrupt) as found:
                await seqs(elsewhere.read(JOB))
            assert found.value.seq == 1

    asyncio.run(story())


def test_a_leader_is_refused_at_once(tmp_path: Path, place: str) -> None:
    """A new job whose archive cannot be written has no leader; one with a history has."""

    async def story() -> None:
        log = await SqliteLog.open(tmp_path / "log.db", CODEC, archive=f"faulty://{place}")
        Faulty.error = PermissionError("Access Denied")
        with pytest.raises(SpecError, match="Access Denied"):
            await log.lead(JOB, "a")
        Faulty.error = None
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        await pen.lead.resign()
        Faulty.error = PermissionError("Access Denied")
        await Pen(await log.lead(JOB, "b"), head=1).write()
        await log.close()

    asyncio.run(story())
