"""A database that was deleted under its leader is put back: the leader's connection still has all of it.

Only what was deleted is put back. Where another file lies at the path by now, it counts if it is a copy that the leader of
another job in the same file has put back; batches committed since then are added. Anything else was put there on purpose.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from pathlib import Path

from dlrover_core.errors import LogUnavailable
from dlrover_core.logs import tables
from dlrover_core.logs.place import NO_INODE, Inode, inode_of, private_file

TURN_S, LOOK_S = 5.0, 0.05
"""Copies of a log take well under a second."""


class NotOurTurn(LogUnavailable):
    """Another leader in this file is putting it back, and takes too long. Nothing is known of the file."""


def put_back(old: sqlite3.Connection, path: Path, job: str, token: int, opened: Inode) -> sqlite3.Connection:
    """A connection to the file at ``path``, made anew from ``old`` if there is none, with all batches of ``job``.

    ``opened``: the inode of the file that ``old`` has open. Where it lies at the path still, what SQLite keeps beside it was
    deleted, the newest pages: it is made anew, too.

    Raises `LogUnavailable` where the file there is of somebody who knows nothing of this leadership; `NotOurTurn`.
    """
    # The leaders of several jobs in one file do this at the same time; one of them copies.
    turn = private_file(path.with_name(f"{path.name}.put-back"), os.O_RDWR)
    try:
        _take_turn(turn, path)
        if inode_of(path) in (opened, NO_INODE):
            _copy(old, path)
    finally:
        os.close(turn)
    new = tables.connect(path, create=True)
    try:
        number = _number(old, new, job, token)
        if number is None:
            raise LogUnavailable(f"job {job!r}: {path} was replaced under its leader; put the old one back")  # noqa: TRY301
        while found := tables.page(old, number, tables.head(new, number))[0]:
            tables.put_rows(new, found)
    except BaseException:
        new.close()
        raise
    return new


def _take_turn(turn: int, path: Path) -> None:
    """A wait in the kernel has no end where the other process is stopped, and this thread is the only one that writes."""
    deadline = time.monotonic() + TURN_S
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotOurTurn(
                    f"{path} was deleted, and another master has been making it anew for {TURN_S:g} s; "
                    f"`fuser {path}.put-back` names its process: let it go on, or kill it"
                ) from None
        else:
            return
        time.sleep(LOOK_S)


def _number(old: sqlite3.Connection, new: sqlite3.Connection, job: str, token: int) -> int | None:
    """The job's number, if both files know the job alike, and led under ``token``."""
    before, now = tables.find_job(old, job), tables.find_job(new, job)
    same = before is not None and now is not None and (before.id, before.token) == (now.id, now.token)
    return before.id if before is not None and same and before.token == token else None


def _copy(old: sqlite3.Connection, path: Path) -> None:
    """Write all of ``old`` to ``path``, whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        os.close(private_file(part, os.O_RDWR | os.O_EXCL))
        copy = sqlite3.connect(part, isolation_level=None)
        try:
            old.backup(copy)
        finally:
            copy.close()
        # SQLite would take what they hold for the newest pages of the file.
        for stale in ("-wal", "-shm"):
            path.with_name(path.name + stale).unlink(missing_ok=True)
        part.rename(path)
    finally:
        for one in (part, part.with_name(part.name + "-wal"), part.with_name(part.name + "-shm")):
            one.unlink(missing_ok=True)
