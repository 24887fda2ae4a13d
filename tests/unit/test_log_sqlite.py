"""The SQLite log: the conformance suite, and what a file on a real disk adds: full disks, deaths, forks, places."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.metadata
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover_core.errors import LogCorrupt, LogFull, LogUnavailable, NotLeading, SchemaTooNew, SpecError
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Registry
from dlrover_core.kernel.log import Appended, EventLog, Snapshot
from dlrover_core.logs import open_log, place, tables
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.logs.reader import lock_path
from dlrover_core.logs.sqlite import RESERVE_BYTES, SqliteLog
from dlrover_core.logs.tail import TailFile, tail_files
from dlrover_core.testing.log_conformance import CODEC, JOB, LogConformance, Pen, make_batch, seqs

from .sqlite_logs import opened, run

SRC = Path(__file__).parents[2] / "src"


class TestSqliteConformance(LogConformance):
    """The SQLite log keeps the contract, also between two clients of one file."""

    @contextlib.asynccontextmanager
    async def make_log(self) -> AsyncIterator[EventLog]:
        """A log in a directory of its own."""
        with tempfile.TemporaryDirectory() as here:
            async with open_log(f"sqlite://{here}/log.db", self.codec) as log:
                yield log

    def second(self, log: EventLog) -> AbstractAsyncContextManager[EventLog]:
        """Another client of the same file."""
        assert isinstance(log, SqliteLog)
        return open_log(f"sqlite://{log.path}", self.codec)

    async def depose(self, log: EventLog, job: str) -> None:
        """Delete the lock file under the leader."""
        assert isinstance(log, SqliteLog)
        lock_path(log.path, job).unlink()

    async def halve_snapshot(self, log: EventLog, job: str, snapshot: Snapshot) -> None:
        """Half the bytes, without their checksum."""
        assert isinstance(log, SqliteLog)
        db = tables.connect(log.path, create=False)
        row = tables.find_job(db, job)
        assert row is not None
        half = (row.id, snapshot.seq, snapshot.schema, 0, snapshot.state[: len(snapshot.state) // 2])
        db.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", half)
        db.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    """The connection that writes syncs each commit: what was acknowledged survives a power cut. Nothing else syncs it."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            await log.lead(JOB, "a")
            for pragma, expected in (("synchronous", 2), ("journal_mode", "wal"), ("wal_autocheckpoint", 0)):
                assert log.connection.execute(f"PRAGMA {pragma}").fetchone() == (expected,), pragma

    run(story())


# ---- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=40m", "none", disk], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"no small disk here: {made.stderr.decode()}")
    yield disk
    subprocess.run(["umount", disk], check=True)  # noqa: S607  # wherever mount is, umount is


def fill(disk: Path) -> Path:
    """Leave no free byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1024 * 1024, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return filler


def test_full_disk(small_disk: Path) -> None:
    """On a full disk one more decision fits into the reserve; then nothing is appended, reading goes on, and space heals it."""

    async def story() -> None:
        async with opened(small_disk / "log.db", RESERVE_BYTES) as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            assert log.reserve.path.stat().st_size == RESERVE_BYTES
            filler = await asyncio.to_thread(fill, small_disk)
            while log.reserve.path.exists():
                await pen.write(size=20_000)
            filler.unlink()
            await asyncio.to_thread(fill, small_disk)
            refused = pen.draft(size=900_000)
            with pytest.raises(LogFull, match="free space"):
                await pen.lead.append(refused)
            assert await seqs(log.read(JOB)) == list(range(1, pen.head + 1))
            assert pen.lead.valid()
            filler.unlink()
            assert await pen.lead.append(refused) == Appended(refused.last_seq)
            pen.head = refused.last_seq
            async with opened(log.path) as other:
                assert await seqs(other.read(JOB)) == list(range(1, pen.head + 1))
            log._unmoved_bytes = 10**9
            await pen.write()
            await pen.lead.announce("")  # behind the checkpoint, which sees to the reserve
            assert log.reserve.path.stat().st_size == RESERVE_BYTES

    run(story())


def test_reserve_is_given_up_for_one_more_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 'no space left' costs the reserve, not the append; the second is `LogFull`, and leaves no trace."""

    async def story() -> None:
        async with opened(tmp_path / "log.db", reserve_bytes=4096) as log:
            pen = Pen(await log.lead(JOB, "a"))
            assert log.reserve.path.exists()
            room = [False]
            append = TailFile.append

            def append_if_room(self: TailFile, payload: bytes) -> None:
                if not room[0] and log.reserve.path.exists():
                    raise OSError(errno.ENOSPC, "No space left on device")
                append(self, payload)

            monkeypatch.setattr(TailFile, "append", append_if_room)
            await pen.write()
            assert not log.reserve.path.exists()
            log.reserve.path.touch()  # and now in a way that giving it up does not help

            def never(self: TailFile, payload: bytes) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(TailFile, "append", never)
            batch = pen.draft()
            with pytest.raises(LogFull):
                await pen.lead.append(batch)
            assert await log.head(JOB) == 1
            monkeypatch.setattr(TailFile, "append", append)
            assert await pen.lead.append(batch) == Appended(2)

    run(story())


def test_full_database_appends_nothing(tmp_path: Path) -> None:
    """When SQLite itself is full the batch is in neither copy, and the same batch fits later."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            assert log._db is not None
            (pages,) = log._db.execute("PRAGMA page_count").fetchone()
            log._db.execute(f"PRAGMA max_page_count = {pages}")
            before = tail_files(log.path, "job%2F1%2Ea")[0].read_bytes()
            batch = pen.draft(size=100_000)
            with pytest.raises(LogFull):
                await pen.lead.append(batch)
            assert tail_files(log.path, "job%2F1%2Ea")[0].read_bytes() == before
            assert await seqs(log.read(JOB)) == [1]
            log._db.execute("PRAGMA max_page_count = 1000000")
            assert await pen.lead.append(batch) == Appended(2)

    run(story())


# ---- deaths


LEADER = """
import asyncio, os, sys
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.testing.log_conformance import CODEC, Pen

async def main():
    log = await SqliteLog.open(sys.argv[1], CODEC, reserve_bytes=0)
    await Pen(await log.lead("train", "doomed")).write(events=3)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
    os.read(0, 1)
    os._exit(0)
os.read(0, 1)
"""


def start_leader(path: Path) -> subprocess.Popen[bytes]:
    """A process that leads, appends three events, forks a child, and waits."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", LEADER, str(path)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_killed_leader_hands_over_though_its_child_lives(tmp_path: Path) -> None:
    """A killed leader's lock is free at once, also while a child that it forked lives on; its events are there."""

    async def story() -> None:
        path = tmp_path / "log.db"
        with start_leader(path) as leader:
            assert leader.stdout is not None
            child = int(leader.stdout.readline().split()[1])
            async with opened(path) as log:
                with pytest.raises(NotLeading, match="doomed"):
                    await log.lead("train", "heir", wait=False)
                waiting = asyncio.ensure_future(log.lead("train", "heir"))
                await log.jobs()
                assert not waiting.done()
                leader.send_signal(signal.SIGKILL)
                heir = Pen(await waiting, head=3)
                os.kill(child, 0)  # it still lives
                assert await seqs(log.read("train")) == [1, 2, 3]
                await heir.write()

    run(story())


# ---- closing


def test_close(tmp_path: Path) -> None:
    """Closing twice is fine; it resigns; whatever is asked afterwards says that the log is closed."""

    async def story() -> None:
        log = await SqliteLog.open(tmp_path / "log.db", CODEC, reserve_bytes=0)
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        following = asyncio.ensure_future(seqs(log.follow(JOB, after=1)))
        await asyncio.sleep(0)
        await log.close()
        await log.close()
        await pen.lead.lost
        with pytest.raises(LogUnavailable, match="closed"):
            await following
        with pytest.raises(LogUnavailable, match="closed"):
            await log.head(JOB)
        with pytest.raises(LogUnavailable, match="closed"):
            await log.lead(JOB, "b")
        with pytest.raises(LogUnavailable, match="closed"):
            await pen.lead.append(pen.draft())
        await pen.lead.snapshot(Snapshot(1, "", b""))
        await pen.lead.resign()
        async with opened(log.path) as again:
            assert (await again.lead(JOB, "b")).token == 2

    run(story())


def test_close_while_standing_by(tmp_path: Path) -> None:
    """Who waits for leadership on a log that is closed is told so, and does not take it later."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            first = await log.lead(JOB, "a")
            async with opened(tmp_path / "log.db") as other:
                waiting = asyncio.ensure_future(other.lead(JOB, "b"))
                await first.announce("")
                await other.jobs()
            with pytest.raises(LogUnavailable, match="closed"):
                await waiting
            await first.resign()
            assert (await log.lead(JOB, "c")).token == 2

    run(story())


def test_leader_of_a_replaced_database_is_not_mistaken(tmp_path: Path) -> None:
    """After the database was replaced and opened anew, whoever led in the old one writes nothing into the new one."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            old = Pen(await log.lead("old", "a"))
            for name in ("log.db", "log.db-wal", "log.db-shm"):
                (tmp_path / name).unlink()
            new = Pen(await log.lead("new", "a"))
            assert new.lead.token == old.lead.token
            with pytest.raises(LogUnavailable, match="replaced"):
                await old.lead.append(old.draft())
            await new.write()
            assert await seqs(log.read("new")) == [1]
            assert await log.jobs() == ["new"]

    run(story())


@pytest.mark.parametrize("damage", ["state = x'74656f'", "schema = 'other'", "seq = 4"])
def test_a_damaged_snapshot_is_not_used(tmp_path: Path, damage: str) -> None:
    """A snapshot of which a byte, its schema or its place has changed on the disk gives way to the one before it."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write(events=9)
            for seq, state in ((2, b"one"), (3, b"two")):
                await pen.lead.snapshot(Snapshot(seq, "schema", state))
            log.connection.execute(f"UPDATE snapshots SET {damage} WHERE seq = 3")  # noqa: S608  # no stranger's
            assert await log.latest_snapshot(JOB) == Snapshot(2, "schema", b"one")

    run(story())


def test_snapshots_beyond_two_are_deleted(tmp_path: Path) -> None:
    """The file keeps two snapshots, however many were taken."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write(events=9)
            for seq in range(1, 8):
                await pen.lead.snapshot(Snapshot(seq, "", b""))
        db = sqlite3.connect(tmp_path / "log.db")
        assert db.execute("SELECT seq FROM snapshots ORDER BY seq").fetchall() == [(6,), (7,)]
        db.close()

    run(story())


def test_newer_events_are_refused(tmp_path: Path) -> None:
    """A log with event kinds that this version does not know raises `SchemaTooNew`."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            await Pen(await log.lead(JOB, "a")).write()
            older = await SqliteLog.open(log.path, Codec(Registry([])))
            with pytest.raises(SchemaTooNew):
                await seqs(older.read(JOB))
            await older.close()

    run(story())


def test_newer_file_is_refused(tmp_path: Path) -> None:
    """A database of a newer format raises `SchemaTooNew`."""

    async def story() -> None:
        db = sqlite3.connect(tmp_path / "log.db")
        db.execute("PRAGMA user_version = 2")
        db.close()
        async with opened(tmp_path / "log.db") as log:
            with pytest.raises(SchemaTooNew):
                await log.lead(JOB, "a")

    run(story())


def test_a_log_that_is_just_being_created_is_empty(tmp_path: Path) -> None:
    """Between the file and its tables readers find nothing yet, not damage; but what was acknowledged is not forgotten."""
    path = tmp_path / "log.db"

    async def story() -> None:
        async with opened(path) as log:
            for begun in ("", "PRAGMA journal_mode = WAL"):
                with contextlib.closing(sqlite3.connect(path)) as db:
                    db.execute(begun)
                path.touch()
                assert await log.jobs() == []
                assert await seqs(log.read(JOB)) == []
                assert await log.leader(JOB) is None
            lead = await log.lead(JOB, "a")
            assert await lead.append(make_batch(1, 1, lead.token)) == Appended(1)
            assert await seqs(log.read(JOB)) == [1]
            await lead.resign()

    async def bereft() -> None:
        async with opened(path) as log:
            with pytest.raises(LogCorrupt):
                await seqs(log.read(JOB))

    run(story())
    for file in tmp_path.iterdir():
        if file.suffix != ".lock":
            file.unlink()
    path.touch()
    run(bereft())


def test_people_can_look_at_it(tmp_path: Path) -> None:
    """The view `log` shows jobs and sequence numbers as people think of them."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            await Pen(await log.lead(JOB, "a")).write(events=3)
        db = sqlite3.connect(tmp_path / "log.db")
        assert db.execute("SELECT job, first_seq, last_seq, token, counter FROM log").fetchall() == [(JOB, 1, 3, 1, 1)]
        db.close()

    run(story())


# ---- places


@pytest.mark.slow_loop(reason="the test makes ten thousand events at once")
def test_only_the_owner_can_read(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600, whatever the umask."""

    async def story() -> None:
        async with opened(tmp_path / "state" / "log.db", reserve_bytes=4096) as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write(events=10_000, size=1)
            await log.archive(JOB)
            for found in [tmp_path / "state", *(tmp_path / "state").rglob("*")]:
                mode = stat.S_IMODE(found.stat().st_mode)
                wanted = 0o600 if found.is_file() else 0o700
                assert mode == wanted, found

    before = os.umask(0)
    try:
        run(story())
    finally:
        os.umask(before)


MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:50 / /home rw,relatime shared:1 - nfs4 server:/home rw
41 40 254:1 / /home/local\\040disk rw - xfs /dev/vdb rw
42 27 0:51 / /mnt/bucket rw - fuse.s3fs s3fs rw
43 27 254:2 / /data rw - ext4 /dev/vdc rw
44 27 0:52 / /data rw - lustre mds:/data rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/x.db", "ext4"),
        ("/home/ada/x.db", "nfs4"),
        ("/homes/x.db", "ext4"),
        ("/home/local disk/x.db", "xfs"),
        ("/mnt/bucket/x.db", "fuse.s3fs"),
        ("/data/x.db", "lustre"),
    ],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    """The mount that holds a path is the longest that covers it, the later of two; network and FUSE ones are refused."""
    assert place.file_system(Path(path), MOUNTS) == kind
    if kind in {"ext4", "xfs"}:
        place.refuse_remote(Path(path), MOUNTS)
    else:
        with pytest.raises(SpecError, match=kind) as refused:
            place.refuse_remote(Path(path), MOUNTS)
        assert "host-local" in str(refused.value)
        assert "etcd" in str(refused.value)


def test_open_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a log on a network file system is refused before anything is written."""
    monkeypatch.setattr(place, "file_system", lambda path, mountinfo: "nfs4")

    async def story() -> None:
        with pytest.raises(SpecError, match="nfs4"):
            await open_log(f"sqlite://{tmp_path}/log.db", CODEC)

    run(story())
    assert list(tmp_path.iterdir()) == []


def test_default_state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State lies under XDG_STATE_HOME, else under the home directory, else on this host where that is on the network."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert place.default_state_dir() == tmp_path / "xdg" / "dlrover"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert place.default_state_dir() == tmp_path / "home" / ".local" / "state" / "dlrover"
    mounts = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n40 27 0:50 / {tmp_path}/home rw - nfs server:/home rw\n"
    fallback = place.default_state_dir(mounts, shared=tmp_path / "var")
    assert fallback == tmp_path / "var" / f"dlrover-{os.getuid()}"
    assert stat.S_IMODE(fallback.stat().st_mode) == 0o700


def test_fallback_that_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that somebody else put where ours should be is not trusted."""
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    (tmp_path / f"dlrover-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="not a directory of user"):
        place.default_state_dir(shared=tmp_path)


@pytest.mark.parametrize("job", ["", "x" * 121])
def test_job_names_are_bounded(tmp_path: Path, job: str) -> None:
    """A job needs a name, and one that fits into a file's."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            with pytest.raises(SpecError):
                await log.lead(job, "a")

    run(story())


# ---- urls


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, relative and default paths, and a place for the archive, can be said in a URL; a log can also be awaited."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))

    async def path_of(url: str) -> Path:
        async with open_log(url, CODEC) as log:
            assert isinstance(log, SqliteLog)
            return log.path

    async def story() -> None:
        assert await path_of(f"sqlite://{tmp_path}/a%20b.db") == tmp_path / "a b.db"
        assert await path_of("sqlite:c/d.db") == tmp_path / "c" / "d.db"
        assert await path_of("sqlite:") == tmp_path / "xdg" / "dlrover" / "log.db"
        async with open_log(f"sqlite:e.db?archive={tmp_path}/cold", CODEC) as log:
            assert isinstance(log, SqliteLog)
            assert log.archive_of("j").store.names() == []
        log = await open_log("memory:", CODEC)
        assert isinstance(log, MemoryLog)
        await log.close()

    run(story())


@pytest.mark.parametrize("url", ["sqlite://host/x.db", "sqlite:x.db?mode=ro", "postgres://x", "no url"])
def test_urls_that_no_log_understands(url: str) -> None:
    """A URL that no log understands is refused with what is wrong with it."""

    async def story() -> None:
        with pytest.raises(SpecError, match="log: "):
            await open_log(url, CODEC)

    run(story())


def test_schemes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution adds a scheme by an entry point; it is looked for, and imported, beside the loop."""
    threads = set[threading.Thread]()

    def load() -> type[MemoryLog]:
        threads.add(threading.current_thread())
        return MemoryLog

    def entry_points(group: str) -> list[SimpleNamespace]:
        threads.add(threading.current_thread())
        return [SimpleNamespace(name="tape", load=load)] if group == "dlrover.logs" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    async def story() -> None:
        async with open_log("tape:7", CODEC) as log:
            assert isinstance(log, MemoryLog)
        with pytest.raises(SpecError, match="memory, sqlite, tape"):
            await open_log("disc:7", CODEC)

    run(story())
    assert threads
    assert threading.current_thread() not in threads, "the loop stood still for it"


def test_unused_log_makes_no_files(tmp_path: Path) -> None:
    """Looking at a log that is not there finds nothing, and makes nothing."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            assert await log.jobs() == []
            assert await seqs(log.read(JOB)) == []
            assert make_batch(1, 1, 1).last_seq == 1

    run(story())
    assert list(tmp_path.iterdir()) == []
