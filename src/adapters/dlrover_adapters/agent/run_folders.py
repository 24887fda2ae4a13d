"""Folders of a run and its nodes: their names, locks and places. The launcher imports this before its first agent: no asyncio."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

PREFIX, LOCK = "dlrover-run-", "lock"
MARK = "DLROVER_RUN_MARK"
"""In the environment of all that a run starts; its value is the run's."""


class Private(NamedTuple):
    """A node's own folder."""

    path: str
    lock: int
    """The file whose lock says that the folder is in use; -1 in the run's folder, which has a lock of its own."""
    why: str = ""
    """Why it lies elsewhere than was wanted, for people; empty: it does not."""


def private_folder(wanted: str | None) -> Private:
    """A new folder in ``wanted``, or elsewhere. None: the system's temporary folder.

    A node that is replaced must not fail because the run's folder has become read-only. Raises `OSError` where there is no
    room anywhere.
    """
    try:
        if wanted is None:
            return _locked_one(None)
        os.makedirs(wanted, mode=0o700, exist_ok=True)
        return Private(tempfile.mkdtemp(prefix=PREFIX, dir=wanted), -1)  # mode 0700
    except OSError as error:
        for other in elsewhere():
            with contextlib.suppress(OSError):
                made = _locked_one(other)
                what = f"{wanted} takes no files ({error.strerror or error})"
                return made._replace(why=f"{what}: this node's sockets and output lie in {made.path}")
        raise


def elsewhere() -> list[str]:
    """Where a node's folder may lie if not in its run's."""
    return list(filter(None, ("/tmp", os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm")))  # noqa: S108  # mkdtemp makes it ours


def _locked_one(roof: str | None) -> Private:
    """A new folder that names its run, so that the run's sweeper finds it, with a lock, so that later runs know it by that."""
    run = os.environ.get(MARK, "")
    path = tempfile.mkdtemp(prefix=f"{PREFIX}{run}-" if run.isalnum() else PREFIX, dir=roof)
    try:
        # It names no processes: a node may die alone, and the run's others live on.
        return Private(path, locked(Path(path), b""))
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def locked(path: Path, words: bytes) -> int:
    """Make and lock the file by which others see that a folder is in use; its descriptor. Raises `OSError`."""
    # Under its name only once it is locked: a sweep must not find it in between.
    fd = os.open(path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, words)
        os.rename(path / "new", path / LOCK)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path / "new")  # or it could never be made
        os.close(fd)
        raise
    return fd
