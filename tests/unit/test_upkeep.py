"""A launcher's folders that were removed while the disk is full: they are whole again once there is room."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_adapters.cli import scratch, upkeep
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.upkeep import Upkeep
from dlrover_core.logs import lock

TOKEN = "a-token-of-a-test"


class Folders:
    """Those of one launcher, kept by ``upkeep``; ``said``: what people were told."""

    def __init__(self, above: Path) -> None:
        self.run, self.job, self.said = above / "run", above / "state" / "jobs" / "a", list[str]()
        settings = Settings(
            spec="{}",
            run="r",
            mark="r",
            log="",
            directory=str(self.job),
            argv=(),
            nproc=1,
            mode="script",
            run_dir=str(self.run),
        )
        self.upkeep = Upkeep(settings, TOKEN, self.said.append)

    def whole(self) -> bool:
        """Is each locked, and the token there?"""
        assert (self.job / "token").read_text().strip() == TOKEN
        assert not (self.run / "new").exists()
        return not free(self.run / scratch.LOCK) and not free(self.job / scratch.LOCK)


def free(path: Path) -> bool:
    """Could anybody else take the lock?"""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    """They are there."""
    made = Folders(tmp_path)
    made.upkeep.look()
    yield made
    made.upkeep.end()


def full(*_: object) -> int:
    """Write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("where", "what"), [(os, "write"), (os, "pwrite"), (upkeep, "keep")])
def test_a_disk_that_is_full_while_folders_are_made_anew(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, where: object, what: str
) -> None:
    """Whatever was written first: people are told once that it is gone and once that it is back; nothing leaks meanwhile."""
    shutil.rmtree(folders.run)
    shutil.rmtree(folders.job)
    with monkeypatch.context() as broken:
        broken.setattr(where, what, full)
        folders.upkeep.look()
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(3):
            folders.upkeep.look()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    gone = [one for one in folders.said if "cannot be made anew" in one]
    assert len({one.partition(" ")[0] for one in gone}) == len(gone) > 0
    assert all("(No space left on device)" in one for one in gone)
    folders.upkeep.look()
    folders.upkeep.look()
    assert folders.whole()
    assert sum("was made anew" in one for one in folders.said) == 2


def test_a_folder_that_is_removed_twice_is_locked_twice(folders: Folders) -> None:
    """The lock of one that is gone excludes nobody."""
    for _ in range(2):
        shutil.rmtree(folders.run)
        shutil.rmtree(folders.job)
        folders.upkeep.look()
        assert folders.whole()


def test_a_lock_that_could_not_be_had_is_had_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log's lock file was deleted, and its new one could be made but not locked: it is no stranger's at the next try."""
    held = lock.try_take(tmp_path / "log.lock")
    assert held is not None
    held.path.unlink()
    with monkeypatch.context() as broken:
        broken.setattr(fcntl, "flock", full)
        with pytest.raises(OSError, match="No space left"):
            held.renew()
    assert held.renew()
    assert not free(held.path)
    held.release()
