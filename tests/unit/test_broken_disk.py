"""A disk that breaks, at any of its calls: who writes there tells it as it is documented, and nothing hangs or dies of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

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
