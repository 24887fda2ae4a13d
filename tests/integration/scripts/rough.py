"""Handling a running job roughly: gates in its script, its curve against an undisturbed one, forks caught in the act."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import os
import struct
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from running import BOUND_S, SCRIPTS, Job, Process, eventually

CURVE = str(SCRIPTS / "curve.py")
_EXT4_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
INODES_MAX = 1000  # more are not taken: then they are no bound
QUICK = ("--set", "silence_s=1", "--set", "heartbeat_s=0.2")


class Point(NamedTuple):
    """One step that rank 0 has made; ``at`` in seconds by CLOCK_MONOTONIC."""

    step: int
    loss: str
    generation: int
    pid: int
    at: float


class Curve:
    """The losses of a run that nobody disturbed, as many as are needed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self._arguments = folder, arguments
        folder.mkdir(parents=True, exist_ok=True)

    def losses(self, steps: int) -> dict[int, str]:
        """At least the first ``steps`` of them; a longer run begins anew, so that it too is undisturbed."""
        found = points(self.folder)
        if len(found) < steps:
            for name in ("curve", "state.pt"):
                (self.folder / name).unlink(missing_ok=True)
            line = ("--nproc-per-node", "2", CURVE, *self._arguments, "--steps", str(max(steps, 2 * len(found))))
            with Job(self.folder, *line) as job:
                assert job.ended(60.0 + steps / 50) == 0
            found = points(self.folder)
        assert [one.step for one in found] == list(range(1, len(found) + 1))
        return {one.step: one.loss for one in found}


def points(folder: Path) -> list[Point]:
    """What rank 0 has written so far."""
    try:
        text = (folder / "curve").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Point(int(row[0]), row[1], int(row[2]), int(row[3]), int(row[4]) / 1e9) for row in rows]


def flaws(found: list[Point], losses: dict[int, str]) -> list[str]:
    """What is wrong with a curve: another loss, a step left out or made anew without need, two generations at once."""
    wrong = [f"{one}: the undisturbed loss is {losses[one.step]}" for one in found if losses[one.step] != one.loss]
    for before, after in itertools.pairwise(found):
        if after.generation < before.generation or (after.generation == before.generation and after.pid != before.pid):
            wrong.append(f"{after} after {before}: two generations at once")
        # A checkpoint is made after each step: who dies in between makes that one step again, and no other.
        if after.step - before.step not in ((1,) if after.generation == before.generation else (0, 1)):
            wrong.append(f"{after} after {before}: steps were lost")
    return wrong


class Story(Job):
    """A run of `curve.py`."""

    # ---- its script

    def hold(self, where: str, *ranks: int) -> None:
        """Let these ranks wait when they come there."""
        for rank in ranks:
            (self.folder / f"hold-{where}-{rank}").touch()

    def release(self, where: str) -> None:
        """Let all go on from there."""
        for one in self.folder.glob(f"hold-{where}-*"):
            one.unlink()

    def at(self, where: str, rank: int, life: int = 0) -> Process:
        """The rank's process when it has come there; of its ``life``-th life, counted from 1, if that is said."""

        def look() -> Process | None:
            told = self.told(rank)
            pids = [int(words[1]) for words in told if words[0] == "begin"]
            wanted = pids[life - 1 : life] if life else pids[-1:]
            here = any(words[0] == where and int(words[1]) in wanted for words in told)
            return Process(wanted[0], f"worker-{rank}", "") if here else None

        return eventually(look, f"rank {rank} at {where!r}, life {life or 'any'}; it told {self.told(rank)[-3:]}")

    def lives(self) -> list[int]:
        """How many processes each rank of a world of two has had."""
        return [sum(words[0] == "begin" for words in self.told(rank)) for rank in (0, 1)]

    def agent(self, rank: int) -> Process:
        """The agent that a rank's worker belongs to."""
        worker = self.one(f"worker-{rank}")
        parent = int(Path(f"/proc/{worker.pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        return next(one for one in self.processes("dlrover-agent") if one.pid == parent)

    # ---- its curve

    @property
    def points(self) -> list[Point]:
        """Its steps so far."""
        return points(self.folder)

    def steps(self, more: int = 5) -> None:
        """Wait until so many more steps have been made."""
        before = len(self.points)
        self.alive(lambda: len(self.points) >= before + more, f"{more} more steps after {self.points[-1:]}")

    def recovers(self, lives: int, more: int = 5, *, in_vain: bool = False) -> None:
        """Wait until the newest process of rank 0, which is its ``lives``-th, has made so many steps.

        ``in_vain``: a process that was ended before its world had formed is none.
        """

        def look() -> bool:
            told = self.told(0)
            pids = [int(words[1]) for words in told if words[0] == "begin"]
            if in_vain:
                formed = {int(words[1]) for words in told if words[0] == "formed"}
                pids = [pid for pid in pids if pid in formed or pid == pids[-1]]
            assert len(pids) <= lives, f"{len(pids)} lives of rank 0, not {lives}: {told}"
            return len(pids) == lives and sum(one.pid == pids[-1] for one in self.points) >= more

        self.alive(look, f"{more} steps of life {lives}; rank 0 told {self.told(0)[-3:]}, last {self.points[-1:]}")

    def alive(self, look: Callable[[], object], what: str, bound_s: float = BOUND_S) -> None:
        """Wait for something that happens while the job runs."""

        def looked() -> bool:
            assert self.process.poll() is None, f"dlrover-run has ended with {self.process.returncode} before {what}"
            return bool(look())

        eventually(looked, what, bound_s)

    def intact(self, undisturbed: Curve) -> None:
        """Every loss so far is the undisturbed run's."""
        found = self.points
        wrong = flaws(found, undisturbed.losses(found[-1].step))
        assert not wrong, f"{len(wrong)} flaws, the first: {wrong[:5]}"


# ---- a log that kills its master


def deadly_log(folder: Path) -> dict[str, str]:
    """Install a log of the user's own, ``deadly:PATH``, for whoever is born with the environment that this returns.

    It is SQLite's, but the process that has just appended an event dies at once if a file ``kill-after-EVENT`` lies in
    FOLDER: what was decided is durable, and nobody was told. The file is removed, so each kills one master.
    """
    about = folder / "deadly_log-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly-log\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[dlrover.logs]\ndeadly = deadly_log:DeadlyLog\n")
    (folder / "deadly_log.py").write_text(textwrap.dedent(_DEADLY))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


_DEADLY = '''
    """A log that kills its master between the append and everything that follows from it."""
    import os, signal
    from pathlib import Path
    from dlrover_core.logs.sqlite import SqliteLog

    class Through:
        def __init__(self, inner):
            self._inner = inner
        def __getattr__(self, name):
            return getattr(self._inner, name)

    class DeadlyLog(Through):
        @classmethod
        async def open_url(cls, url, codec):
            return cls(await SqliteLog.open_url("sqlite:" + url.partition(":")[2], codec))
        async def lead(self, *args, **named):
            return DeadlyLead(await self._inner.lead(*args, **named))

    class DeadlyLead(Through):
        async def append(self, batch):
            outcome = await self._inner.append(batch)
            for record in batch.records:
                order = Path(os.environ["FOLDER"], f"kill-after-{type(record.event).__name__}")
                if order.exists():
                    order.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
            return outcome
'''


# ---- a small disk


@contextlib.contextmanager
def small_disk(path: Path, mib: int, inodes: int = 0) -> Iterator[Path]:
    """A file system of its own of that size at ``path``. Raises `PermissionError` where mounting is not permitted."""
    path.mkdir(parents=True)
    options = f"size={mib}m" + (f",nr_inodes={inodes}" if inodes else "")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"small", os.fsencode(path), b"tmpfs", 0, options.encode()):
        raise PermissionError(ctypes.get_errno(), "cannot mount a small file system")
    try:
        yield path
    finally:
        libc.umount2(os.fsencode(path), 2)  # MNT_DETACH


def fill(path: Path, *logs: Path) -> Path:
    """Take all room there is below ``path``, to the last byte and the last inode; the folder that holds it.

    The last page of each of ``logs`` is filled, so that they too can take nothing more.
    """
    for log in logs:
        with log.open("a") as file:
            file.write("#" * (-log.stat().st_size % 4096))
    with contextlib.suppress(FileExistsError):
        (path / "ballast").mkdir()
    with (path / "ballast" / "bytes").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    if os.statvfs(path).f_ffree < INODES_MAX:
        with contextlib.suppress(OSError):
            for number in range(INODES_MAX):
                (path / "ballast" / str(number)).touch()
    return path / "ballast"


@contextlib.contextmanager
def real_disk(path: Path, image: Path) -> Iterator[Path]:
    """An ext4 at ``path`` that can be broken (`break_disk`). Raises `PermissionError` where none can be mounted."""
    path.mkdir(parents=True)
    lines = (
        ("truncate", "-s", "64M", str(image)),
        ("mkfs.ext4", "-q", str(image)),
        ("mount", "-o", "loop,errors=remount-ro", str(image), str(path)),
    )
    for line in lines:
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False)
        except OSError as error:
            raise PermissionError(error.errno, f"{line[0]}: {error.strerror}") from error
        if done.returncode:
            raise PermissionError(f"{' '.join(line)}: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["/usr/bin/env", "umount", "-l", str(path)], check=True)
        image.unlink()


def break_disk(path: Path, number: int) -> None:
    """From now on every write below ``path`` fails with this error, EROFS or EIO; with EIO every read does, too."""
    if number == errno.EIO:
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)
    else:
        # An error of the file system: the kernel makes it read-only, whoever has files open. A remount would be refused.
        device = path.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("a test")
    with contextlib.suppress(OSError):
        (path / "probe").touch()
        raise AssertionError(f"{path} can still be written to")


# ---- a fork caught in the act

_SEIZE, _CONT, _DETACH, _GETEVENTMSG = 0x4206, 7, 17, 0x4201
_TRACE_FORKS = 0x2 | 0x4 | 0x8
_FORKED = (1, 2, 3)
_WALL = 0x40000000


def trace_forks(victim: Process) -> None:
    """Have the next fork of a process stop at birth: see `next_fork`. Raises `OSError`."""
    _ptrace(_SEIZE, victim.pid, _TRACE_FORKS)


def next_fork(parent: Process, *, fatal: bool = False) -> Process:
    """The next child of a process whose forks are traced, stopped before its first instruction.

    The parent is let go, or, if it is ``fatal``, killed before it knows that it has a child.
    """
    while True:
        pid, status = eventually(lambda: _waited(parent.pid), f"a fork of {parent}")
        assert os.WIFSTOPPED(status), f"{parent} ended while it was traced"
        if status >> 16 in _FORKED:
            message = ctypes.c_ulong()
            _ptrace(_GETEVENTMSG, pid, ctypes.addressof(message))
            child = Process(message.value, "go-between", "")
            eventually(functools.partial(_waited, child.pid), "the child's first stop")
            if fatal:
                kill_traced(parent)
            else:
                _ptrace(_DETACH, pid)
            return child
        _ptrace(_CONT, pid, 0 if status >> 16 else os.WSTOPSIG(status))


def go_on(child: Process) -> None:
    """Let a stopped child run on until it forks itself."""
    _ptrace(_CONT, child.pid)


def let_go(child: Process) -> None:
    """Let a stopped child run on as if nothing had been."""
    _ptrace(_DETACH, child.pid)


def kill_traced(child: Process) -> None:
    """SIGKILL a traced process, and tell its parent, who could not know before we do."""
    child.kill()
    eventually(lambda: os.WIFSIGNALED((_waited(child.pid) or (0, 0))[1]), f"the end of {child}")


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")


def _waited(pid: int) -> tuple[int, int] | None:
    found = os.waitpid(pid, os.WNOHANG | _WALL)
    return found if found[0] else None
