"""A disk that breaks, at any of its calls: who writes there tells it as it is documented, and nothing hangs or dies of it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

import pytest

from dlrover_adapters.agent.import_list import ImportList, read, refuse, write
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.upkeep import Upkeep
from dlrover_core.errors import LogFull, LogUnavailable
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.testing.log_conformance import CODEC, JOB, Pen

from .breaking import NUMBERS, Breaking, breaking
from .sqlite_logs import run

IDS = errno.errorcode.__getitem__
CALLS_MAX = 400


async def led(disk: Breaking, path: Path, at: int, *, deleted: bool) -> int:
    """Lead a log and append, on a disk that breaks at its ``at``-th call; how many calls were made.

    Only errors of a log may leave it. ``deleted``: its files are deleted under the leader, who puts them back; the disk
    breaks then.
    """
    disk.calls = 0
    if not deleted:
        disk.at = at
    log = await SqliteLog.open(path, CODEC, reserve_bytes=4096)
    try:
        lead = await log.lead(JOB, "host/1", wait=False)
        pen = Pen(lead)
        await pen.write()
        if deleted:
            for one in path.parent.iterdir():
                one.unlink()
            disk.at = at
        await pen.write()
        await lead.announce("here:1")
        await log.leader(JOB)
    except (LogUnavailable, LogFull):
        assert disk.calls > at, "the disk was whole"
    finally:
        await log.close()
        disk.at = -1
    return disk.calls


@pytest.mark.parametrize("deleted", [False, True], ids=["led", "put back"])
@pytest.mark.parametrize("number", NUMBERS, ids=IDS)
def test_a_log_says_only_that_it_is_unavailable_or_full(tmp_path: Path, number: int, deleted: bool) -> None:
    """Whichever call fails first; so masters wait for it, and do not die. Later it can be led again."""

    async def story() -> None:
        for at in range(
            0, CALLS_MAX, 1 if number == errno.EIO else 9
        ):  # EIO's are all calls, and the same code meets all
            folder = tmp_path / str(at)
            folder.mkdir()
            with breaking(folder, number) as disk:
                made = await led(disk, folder / "log.db", at, deleted=deleted)
            again = await SqliteLog.open(folder / "log.db", CODEC)
            await again.lead(JOB, "host/2", wait=False)
            await again.close()
            if made <= at:
                return
        raise AssertionError("it makes more calls than were broken")

    run(story())


@pytest.mark.parametrize("number", NUMBERS, ids=IDS)
def test_a_list_of_imports_is_the_old_one_or_the_new_one(tmp_path: Path, number: int) -> None:
    """Reading says that there is none, noting a reason says nothing, and writing raises `OSError`."""
    script = tmp_path / "train.py"
    script.write_text("")
    old = ImportList(("json",), (), (), origins=("/json.py",))
    new = ImportList(("json", "decimal"), (), (), origins=("/json.py", "/decimal.py"))
    for at in range(CALLS_MAX):
        folder = tmp_path / f"imports-{at}"
        path = str(folder / "list.json")
        write(path, old, [], [str(script)])
        with breaking(folder, number) as disk:
            disk.at = at
            assert read(path, []) in (old, None)
            refuse(path, "a reason")
            with contextlib.suppress(OSError):
                write(path, new, [], [str(script)])
            disk.at = -1
        assert read(path, []) in (old, old._replace(modules=(), origins=(), refused="a reason"), new)
        if disk.calls <= at:
            return
    raise AssertionError("it makes more calls than were broken")


@pytest.mark.parametrize("number", NUMBERS, ids=IDS)
def test_a_launcher_s_files_are_there_again_when_the_disk_is(tmp_path: Path, number: int) -> None:
    """Settings, token, locks: no look at them raises, people hear once what is missing, and a later look has all of it."""
    for at in range(CALLS_MAX):
        folder, said = tmp_path / str(at), list[str]()
        settings = Settings(
            spec="{}",
            run="r",
            mark="r",
            log="",
            directory=str(folder / "state" / "jobs" / "a"),
            argv=(),
            nproc=1,
            mode="script",
            run_dir=str(folder / "run"),
        )
        upkeep = Upkeep(settings, "a-token", said.append)
        upkeep.look()
        shutil.rmtree(folder)
        with breaking(folder, number) as disk:
            disk.at = at
            upkeep.look()
            upkeep.look()
            disk.at = -1
        told = [one.partition(" is gone")[0] for one in said if "is gone" in one]
        assert len(set(told)) == len(told)
        upkeep.look()
        upkeep.look()
        assert (Path(settings.directory) / "token").read_text() == "a-token\n"
        assert (Path(settings.directory) / "settings.json").exists()
        upkeep.end()
        if disk.calls <= at:
            return
    raise AssertionError("it makes more calls than were broken")
