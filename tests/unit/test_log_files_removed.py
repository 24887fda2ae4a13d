"""Files of a SQLite log that are deleted or replaced while somebody leads or waits."""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import threading
from pathlib import Path

import pytest

from dlrover_adapters.cli import master
from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import LogUnavailable
from dlrover_core.kernel.log import Appended, Fenced, Snapshot
from dlrover_core.logs import put_back
from dlrover_core.logs.lock import JobLock, Mark, read_mark
from dlrover_core.logs.reader import lock_path
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.log_conformance import JOB, Pen, seqs

from .sqlite_logs import opened, run


def is_waited_for(path: Path) -> bool:
    """Whether somebody waits for the lock on this file, as the kernel says."""
    inode = path.stat().st_ino
    return any("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


async def stood_by(log: SqliteLog) -> None:
    """Return when somebody waits for the job's lock: who comes after its file is deleted makes another one."""
    while not is_waited_for(lock_path(log.path, JOB)):  # noqa: ASYNC110  # the kernel tells nobody
        await asyncio.sleep(0.01)


def test_lock_file_deleted_under_its_leader(tmp_path: Path) -> None:
    """The leader makes it anew, with its mark, and leads on; who stands by waits for the new one."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log, opened(tmp_path / "log.db") as other:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            assert await seqs(other.read(JOB)) == [1]
            await stood_by(log)
            lock_path(log.path, JOB).unlink()
            await pen.write()
            assert pen.lead.valid()
            assert read_mark(lock_path(log.path, JOB)) == Mark(2, 1)
            await stood_by(log)
            assert not waiting.done()
            await pen.lead.resign()
            await Pen(await waiting, head=2).write()
            assert await seqs(log.read(JOB)) == [1, 2, 3]

    run(story())


def test_lock_file_deleted_and_made_anew_by_another(tmp_path: Path) -> None:
    """Who makes it anew first leads: the next append of the one before is fenced."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log, opened(tmp_path / "log.db") as other:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            lock_path(log.path, JOB).unlink()
            heir = Pen(await other.lead(JOB, "b"), head=1)
            assert await pen.lead.append(pen.draft()) == Fenced(1, 2)
            await pen.lead.lost
            await heir.write()
            assert await seqs(log.read(JOB)) == [1, 2]

    run(story())


def test_database_deleted_under_its_leader(tmp_path: Path) -> None:
    """With all its files, or alone: the leader puts it back, whole, and leads on; who stands by waits for the new lock."""

    async def story() -> None:
        folder = tmp_path / "state"
        async with opened(folder / "log.db") as log, opened(folder / "log.db") as other:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            await pen.lead.snapshot(Snapshot(1, "", b"of then"))
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            assert await seqs(other.read(JOB)) == [1]
            await stood_by(log)
            shutil.rmtree(folder)
            await pen.write()
            assert pen.lead.valid()
            assert await seqs(other.read(JOB)) == [1, 2]
            log.path.unlink()
            await pen.write()
            assert await seqs(log.read(JOB)) == [1, 2, 3]
            assert await log.latest_snapshot(JOB) == Snapshot(1, "", b"of then")
            shutil.rmtree(folder)
            assert pen.lead.trouble() == ""  # between appends, too
            await pen.lead.announce("")
            assert await log.head(JOB) == 3
            assert not waiting.done()
            await pen.lead.resign()
            heir = Pen(await waiting, head=3)
            assert heir.lead.token == 2
            await heir.write()
            assert await seqs(log.read(JOB)) == [1, 2, 3, 4]
            assert {one.name for one in folder.iterdir() if one.suffix == ".part"} == set()

    run(story())


@pytest.mark.parametrize("gone", ["folder", "files", "lock", "another job's"])
def test_who_comes_to_stand_by_while_files_are_gone_makes_none(tmp_path: Path, gone: str) -> None:
    """Or it would lead an empty log, and depose the leader, which has all of it. It waits until the leader has put them back."""

    async def story() -> None:
        folder = tmp_path / "state"
        async with (
            opened(folder / "log.db") as log,
            opened(folder / "log.db") as other,
            opened(folder / "log.db") as near,
        ):
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            other.begins = False
            if gone == "lock":
                lock_path(log.path, JOB).unlink()
            elif gone == "files":
                for path in folder.iterdir():
                    path.unlink()
            else:
                shutil.rmtree(folder)
            if gone == "another job's":  # which has made the file, and knows nothing of ours
                await near.lead("near", "c")
                lock_path(log.path, JOB).touch()
            with pytest.raises(LogUnavailable):
                await other.lead(JOB, "b")
            if gone == "another job's":
                return
            await pen.write()
            assert pen.lead.valid()
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            await stood_by(log)
            await pen.lead.resign()
            heir = Pen(await waiting, head=2)
            assert heir.lead.token == 2
            await heir.write()
            shutil.rmtree(folder)
            await heir.write()
            assert await seqs(log.read(JOB)) == [1, 2, 3, 4]

    run(story())


def test_a_folder_that_is_removed_file_by_file(tmp_path: Path) -> None:
    """Whatever goes first, and with an append after each file, nothing is lost and nobody else leads."""

    async def story(last: str) -> None:
        folder = tmp_path / last
        async with opened(folder / "log.db") as log:
            pen, written = Pen(await log.lead(JOB, "a")), [1]
            await pen.write()
            for path in sorted(folder.iterdir(), key=lambda one: (one.name == last, one.suffix != ".lock", one.name)):
                path.unlink(missing_ok=True)
                await pen.write()
                written.append(len(written) + 1)
            async with opened(folder / "log.db") as fresh:
                assert await seqs(fresh.read(JOB)) == written

    for last in ("log.db", "log.db-wal"):
        run(story(last))


def test_a_stopped_process_that_puts_the_file_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it a bounded time and say which file names it; they lead on as soon as it is dead."""
    monkeypatch.setattr(put_back, "TURN_S", 0.2)

    async def story() -> None:
        folder = tmp_path / "state"
        async with opened(folder / "log.db") as log:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            log.path.unlink()
            batch = pen.draft()
            with (folder / "log.db.put-back").open("wb") as stopped:
                fcntl.flock(stopped, fcntl.LOCK_EX)
                with pytest.raises(LogUnavailable, match=r"`fuser .*log\.db\.put-back` names its process"):
                    await asyncio.wait_for(pen.lead.append(batch), 10)
                assert pen.lead.valid()
            assert await pen.lead.append(batch) == Appended(2)
            assert await seqs(log.read(JOB)) == [1, 2]

    run(story())


def test_database_deleted_and_its_leader_dies(tmp_path: Path) -> None:
    """Before it could put the file back: whoever stands by has it open too, and does."""

    async def story() -> None:
        folder = tmp_path / "state"
        async with opened(folder / "log.db") as log, opened(folder / "log.db") as other:
            pen = Pen(await log.lead(JOB, "a"))
            await pen.write()
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            assert await seqs(other.read(JOB)) == [1]
            await stood_by(log)
            shutil.rmtree(folder)
            await pen.lead.resign()
            heir = Pen(await waiting, head=1)
            await heir.write()
            assert await seqs(other.read(JOB)) == [1, 2]

    run(story())


def test_database_deleted_under_two_leaders(tmp_path: Path) -> None:
    """Of two jobs in one file, each with a leader of its own, one makes the file anew, and both lead on in it."""

    async def story() -> None:
        folder = tmp_path / "state"
        async with opened(folder / "log.db") as log, opened(folder / "log.db") as other:
            one, two = Pen(await log.lead("one", "a")), Pen(await other.lead("two", "b"))
            await one.write()
            await two.write()
            shutil.rmtree(folder)
            await one.write()
            await two.write()
            await one.write()
            assert await seqs(other.read("one")) == [1, 2, 3]
            assert await seqs(log.read("two")) == [1, 2]

    run(story())


def test_database_replaced_under_its_leader(tmp_path: Path) -> None:
    """A leader in whose database's place lies another one, or whose lock somebody else has, says so and leads no longer."""

    async def story() -> None:
        for number, job in enumerate(("new", JOB)):
            path = tmp_path / str(number) / "log.db"
            async with opened(path) as log:
                pen = Pen(await log.lead(JOB, "a"))
                await pen.write()
                path.unlink()
                if job == JOB:
                    lock_path(path, JOB).unlink()
                async with opened(path) as other:
                    await other.lead(job, "b")
                    with pytest.raises(LogUnavailable, match="replaced"):
                        await pen.lead.append(pen.draft())
                    await pen.lead.lost
                    assert not pen.lead.valid()
                    assert await other.head(JOB) == 1  # as the tail file says, and no more

    run(story())


def test_wait_for_a_lock_file_that_is_replaced(tmp_path: Path) -> None:
    """A waiter is not content with the lock of a file that was deleted meanwhile: it takes the one that counts."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            first = await log.lead(JOB, "a")
            waiting = asyncio.ensure_future(log.lead(JOB, "b"))
            await first.announce("")
            lock_path(log.path, JOB).unlink()
            await first.resign()
            second = await waiting
            assert isinstance(second._lock, JobLock)
            assert second._lock.intact()

    run(story())


def test_cancelled_wait_makes_no_file(tmp_path: Path) -> None:
    """A wait that was cancelled outlives its log in a thread; who then removes the directory finds nothing made anew in it."""

    async def story() -> None:
        folder = tmp_path / "state"
        async with opened(folder / "log.db") as log:
            await log.lead(JOB, "a")
            async with opened(folder / "log.db") as other:
                waiting = asyncio.ensure_future(other.lead(JOB, "b"))
                await stood_by(log)
                waits = [thread for thread in threading.enumerate() if thread.name.startswith("dlrover-lock ")]
                waiting.cancel()
                await asyncio.wait([waiting])
            shutil.rmtree(folder)  # the lock is held still: the thread finds its file gone when it is woken
        assert waits
        for thread in waits:
            thread.join(10)
        assert not folder.exists()

    run(story())


@pytest.mark.parametrize("quiet", [False, True], ids=["the first", "the reserve"])
def test_only_the_first_master_begins_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    """The launcher says to the reserve that another one is there."""
    found: list[bool] = []

    class Seen(Exception):
        pass

    def made(_spec: object, *, event_log: SqliteLog, **_: object) -> None:
        found.append(event_log.begins)
        raise Seen

    monkeypatch.setattr(master, "Master", made)
    monkeypatch.setenv("DLROVER_TOKEN", "a-secret-token-for-tests")
    spec = JobSpec("j", (GroupSpec("worker", 1, 1),)).to_json()
    settings = Settings(
        spec, "r1", f"sqlite://{tmp_path}/log.db", str(tmp_path), (), 1, "script", joining=True, masters=("m:1",)
    )
    monkeypatch.setattr(master.asking, "answer", lambda *_: None)
    monkeypatch.setattr(master, "_listener", lambda *_: None)
    ends = master.Ends(-1, -1, -1)
    with pytest.raises(Seen):
        run(master._run(settings, ends, "h/1/1", [], quiet=quiet))
    assert found == [not quiet]
