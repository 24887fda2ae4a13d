"""What a run has outside its state directory, and how it goes away however the run ends.

Sockets need short paths and workers' streams need files, so each run has a private folder under the system's temporary one.
It is removed in three ways, each for what the one before cannot do: by the launcher at its end; by its sweeper, when the
launcher was killed; and by the next launcher of the same user, when both were (or the machine went down).
A locked file in the folder says that it is in use: the kernel unlocks it with the last of the two.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.agent import run_folders
from dlrover_backends.shared import process
from dlrover_core.errors import SpecError
from dlrover_core.host import cgroups

MARK, LOCK = run_folders.MARK, run_folders.LOCK
PREFIX = "dlrover-"
LOCK_BYTES_MAX = 8192
PATH_BYTES_MAX = 60  # a socket's path has 108 bytes, and the agents' folders in it need some
PREDECESSOR_S = 15.0
GROUPS_S = 5.0
_SWEEPER = Path(__file__).with_name("_sweeper.py")


@contextlib.contextmanager
def claim(directory: Path, job: str) -> Iterator[int]:
    """Be the only launcher of a job; yields the lock. Raises `SpecError` where another one lives.

    A launcher that was killed is waited for until its sweeper is done.
    """
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _claimed(fd, job)
        os.truncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield fd
    finally:
        os.close(fd)


def relocked(directory: Path) -> int:
    """Lock a job anew whose directory was removed under its launcher; the lock. Raises `OSError` where another one has it."""
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _claimed(fd: int, job: str) -> None:
    deadline = time.monotonic() + PREDECESSOR_S
    while not _lock(fd):
        words = os.pread(fd, 64, 0).split()
        pid = int(words[0]) if words and words[0].isdigit() else 0
        if (pid and _lives(pid)) or time.monotonic() > deadline:
            raise SpecError(
                "job-id",
                f"a job {job!r} runs already, under the dlrover-run with pid {pid}; "
                f"end that one with: dlrover stop {job}; or give this one another --job-id or --state-dir",
            )
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"])


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def folder(run: str, *also: int) -> Iterator[Path]:
    """The private folder of a run, with a sweeper that holds the locks ``also`` until it is done. Removed at the end."""
    sweep()
    path = _made()
    lock = locked(path, run)
    reading, writing = os.pipe()
    sweeper = _sweeper(path, f"{MARK}={run}", cgroups.own(), reading, lock, *also)
    os.close(reading)
    try:
        yield path
    finally:
        for one in (path, *elsewhere(run)):
            shutil.rmtree(one, ignore_errors=True)
        cgroups.end_all(cgroups.own(), GROUPS_S, run=run)
        sweeper.kill()
        sweeper.wait()
        os.close(writing)
        os.close(lock)


class Left(NamedTuple):
    """The folder of a run that outlives who made it. It goes when nobody holds ``pipe`` any more."""

    path: Path
    lock: int
    pipe: int


def leave(run: str, *also: int) -> Left:
    """A private folder as `folder` makes it, for other processes to inherit: the sweeper alone removes it."""
    sweep()
    path = _made()
    lock = locked(path, run)
    reading, writing = os.pipe()
    _sweeper(path, f"{MARK}={run}", cgroups.own(), reading, lock, *also).returncode = 0  # not ours to wait for
    os.close(reading)
    return Left(path, lock, writing)


def elsewhere(run: str) -> list[Path]:
    """What a run's nodes have outside its folder, which took no files."""
    return [
        one
        for roof in run_folders.elsewhere()
        for one in Path(roof).glob(f"{run_folders.PREFIX}{run}-*")
        if run.isalnum()
    ]


def roofs() -> list[str]:
    """Where folders may be made, the best first; each is short enough for sockets to be named in it.

    The system's temporary folder; else /tmp, which has a short name; else the user's own for sockets, which goes at logout;
    else shared memory, which takes files where the root is read-only.
    """
    found = ["/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]  # noqa: S108  # mkdtemp makes it ours
    with contextlib.suppress(OSError):  # there is none that can be written to
        found.insert(0, tempfile.gettempdir())
    long = PATH_BYTES_MAX - len(PREFIX) - 8
    return [one for one in dict.fromkeys(found) if os.path.isabs(one) and len(os.fsencode(one)) <= long]


def _made() -> Path:
    """A new private folder. Raises `SpecError`."""
    why = []
    for roof in roofs():
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=roof))
        except OSError as error:
            why.append(f"{roof}: {error.strerror}")
    raise SpecError(
        "TMPDIR",
        f"no folder for this run's sockets can be made ({'; '.join(why)}); set TMPDIR to a folder of yours on a local disk "
        f"whose path has at most {PATH_BYTES_MAX - len(PREFIX) - 8} bytes",
    )


def _sweeper(path: Path, mark: str, group: str, pipe: int, *locks: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            str(_SWEEPER),
            str(pipe),
            str(path),
            mark,
            cgroups.__file__,
            group,
            *run_folders.elsewhere(),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(pipe, *locks),
        # Without the mark of a node: whoever buries this process would bury its sweeper, too. With that of a run: a launcher
        # takes children without any for orphans.
        env={name: value for name, value in os.environ.items() if name != process.MARK},
        start_new_session=True,
        cwd="/",
    )


def locked(path: Path, run: str) -> int:
    """Make and lock the file by which others see that the folder is in use; its descriptor. Raises `OSError`.

    It says what else is to be cleaned up: processes with the mark, and control groups below ours.
    """
    return run_folders.locked(path, os.fsencode(f"{MARK}={run}\n{cgroups.own()}"))


def locks(fd: int, directory: Path) -> bool:
    """Is the open file ``fd`` the one by which the directory is seen to be in use?"""
    try:
        found, own = os.lstat(directory / LOCK), os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def sweep() -> None:
    """End what is left of this user's runs whose launcher and sweeper are gone both."""
    places = dict.fromkeys((*roofs(), *run_folders.elsewhere()))
    for lock in [one for roof in places for one in Path(roof).glob(f"{PREFIX}*/{LOCK}")]:
        try:
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or just being removed
            continue
        try:
            if _lock(fd):
                mark, _, group = os.fsdecode(os.pread(fd, LOCK_BYTES_MAX, 0)).partition("\n")
                with open(os.devnull, "rb") as nobody:  # no launcher to wait for
                    _sweeper(lock.parent, mark or f"{MARK}=", group, nobody.fileno(), fd).wait()
        finally:
            os.close(fd)
