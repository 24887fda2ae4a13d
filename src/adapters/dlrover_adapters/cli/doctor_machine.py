"""Checks of the machine itself: interpreter, processors, memory, limits, shared memory, clock.

Everything is read below ``root`` (``/``; another folder in tests), so that any machine can be told.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.cli.doctor_check import Finding, fail, ok, size, warn
from dlrover_adapters.cli.kernel import lacking
from dlrover_adapters.cli.whose import OTHER

ROOT = Path("/")
PYTHON_MIN = (3, 10)
SHM = Path("/dev/shm")  # noqa: S108  # looked at, not relied on
SHM_FAIL_BYTES, SHM_BYTES_PER_WORKER = 64 * 2**20, 512 * 2**20
MEMLOCK_BYTES_MIN = 64 * 2**20
FILES_PER_WORKER, FILES_BASE = 16, 512
TASKS_PER_WORKER = 64
INOTIFY_FREE_MIN = 8
SWAPPED_SHARE_MAX = 0.5
MEMORY_PER_WORKER_BYTES = 2**30
STEPPED_S = 0.05
STA_UNSYNC, TIME_ERROR = 0x40, 5


def _text(root: Path, name: str) -> str:
    """What a file of the kernel's says; empty where there is none."""
    try:
        return (root / name).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---- interpreter


def python(version: tuple[int, int, int] = sys.version_info[:3], which: str | None = None) -> Finding:
    """The interpreter, our version, and whether another distribution named dlrover shadows our commands."""
    said = f"Python {'.'.join(map(str, version))} ({sys.executable}), dlrover-core {metadata.version('dlrover-core')}"
    if version[:2] < PYTHON_MIN:
        return fail(said, f"Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer is needed: make a new environment with one")
    if sys.platform != "linux":
        return fail(
            f"{said} on {sys.platform}", "workers are owned by means of Linux; run it in a Linux machine or container"
        )
    lacks = lacking()
    if lacks:
        return fail(f"{said}, Linux {platform.release()}", f"nothing can be started: {lacks}")
    found = which or shutil.which("dlrover-run")
    ours = os.path.join(os.path.dirname(sys.executable), "dlrover-run")
    try:
        other = metadata.version(OTHER)
    except metadata.PackageNotFoundError:
        other = ""
    if other:
        return warn(
            f"{said}; the distribution {OTHER!r} {other} is installed too",
            f"its commands have our names, and which one runs depends on the order of installation: pip uninstall {OTHER}, "
            "or give each its own environment",
            other=other,
        )
    if found is not None and os.path.exists(ours) and os.path.realpath(found) != os.path.realpath(ours):
        return warn(
            f"{said}; but dlrover-run on the PATH is {found}",
            f"activate this environment (source {os.path.dirname(ours)}/activate), or call {ours}",
        )
    return ok(f"{said}, Linux {platform.release()}")


# ---- processors and memory


class Cgroup(NamedTuple):
    """What the container may use: processors (a share may be fractional), memory and tasks; None: as much as there is."""

    cpus: float | None
    memory_bytes: int | None
    memory_used_bytes: int
    tasks_max: int | None
    tasks: int


def cgroup(root: Path = ROOT) -> Cgroup:
    """The tightest limits from our control group up to the root, version 1 or 2."""
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []
    tasks: list[tuple[int, int]] = []
    for line in _text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for folder in _folders(root, controllers, path):
            cpus += _quota(folder)
            memory += _limit(folder, ("memory.max", "memory.current"))
            memory += _limit(folder, ("memory.limit_in_bytes", "memory.usage_in_bytes"))
            tasks += _limit(folder, ("pids.max", "pids.current"))
    # The limit that leaves least room is the one that kills.
    tight = min(memory, key=lambda one: one[0] - one[1], default=None)
    crowded = min(tasks, key=lambda one: one[0] - one[1], default=None)
    return Cgroup(
        min(cpus, default=None),
        tight[0] if tight else None,
        tight[1] if tight else 0,
        crowded[0] if crowded else None,
        crowded[1] if crowded else 0,
    )


def _folders(root: Path, controllers: str, path: str) -> list[Path]:
    base = root / "sys/fs/cgroup"
    bases = [base / one for one in controllers.split(",")] if controllers else [base, base / "unified"]
    inside = Path(path.lstrip("/"))
    # In a container the path is the host's, and only the mount's own root is there: then its parents lead there.
    return [one / part for one in bases for part in (inside, *inside.parents)]


def _quota(folder: Path) -> list[float]:
    quota, _, period = _text(folder, "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder, "cpu.cfs_quota_us"), _text(folder, "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or not int(period):  # "max", or version 1's -1
        return []
    return [int(quota) / int(period)]


def _limit(folder: Path, names: tuple[str, str]) -> list[tuple[int, int]]:
    limit, used = _text(folder, names[0]), _text(folder, names[1])
    # Version 1 says "no limit" by a number close to 2**63.
    return [(int(limit), int(used or 0))] if limit.isdigit() and int(limit) < 2**60 else []


def processors(workers: int, root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Finding:
    """Processors we may run on against the container's share and the threads that workers start."""
    may, quota = len(os.sched_getaffinity(0)), cgroup(root).cpus
    usable = min(may, quota) if quota is not None else may
    said = f"{os.cpu_count()} processors, {may} for us" + (f", cgroup quota {quota:g}" if quota is not None else "")
    asked = environ.get("OMP_NUM_THREADS", "")
    values = {"processors": may, "quota": quota, "omp_num_threads": asked}
    if quota is not None and quota < may:
        return warn(
            f"{said}: libraries count {may} and start as many threads, which the quota then throttles",
            f"say --nproc-per-node and OMP_NUM_THREADS so that their product is at most {max(1, int(quota))}",
            **values,
        )
    if asked and not (asked.isdigit() and int(asked) > 0):
        return warn(
            f"{said}, OMP_NUM_THREADS={asked!r} is no number", "unset it, or set it to threads per worker", **values
        )
    if asked and int(asked) * workers > 2 * usable:
        return warn(
            f"{said}, OMP_NUM_THREADS={asked} for {workers} workers: {int(asked) * workers} threads",
            f"set it to {max(1, int(usable) // workers)}, or unset it: a node with several workers then has 1, as under torchrun",
            **values,
        )
    threads = f"OMP_NUM_THREADS={asked}" if asked else "OMP_NUM_THREADS unset (1 per worker where a node has several)"
    return ok(f"{said}; {threads}", **values)


def memory(root: Path = ROOT) -> Finding:
    """Memory left, here and in the container, and whether the machine swaps."""
    table = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in _text(root, "proc/meminfo").splitlines())
        if rest.split()
    }
    if "MemAvailable" not in table:
        return warn("/proc/meminfo does not say how much is left", "is /proc mounted?")
    limits = cgroup(root)
    free = table["MemAvailable"]
    said = f"{size(table['MemTotal'])}, {size(free)} available"
    if limits.memory_bytes is not None and limits.memory_bytes < table["MemTotal"]:
        # What the group uses includes its page cache, which gives way; so this is the pessimist's number.
        free = min(free, limits.memory_bytes - limits.memory_used_bytes)
        said += (
            f"; cgroup limit {size(limits.memory_bytes)}, {size(limits.memory_used_bytes)} used (page cache included)"
        )
    swap, unswapped = table.get("SwapTotal", 0), table.get("SwapFree", 0)
    said += f"; swap {size(swap)}, {size(swap - unswapped)} used" if swap else "; no swap"
    values = {
        "total_bytes": table["MemTotal"],
        "available_bytes": free,
        "swap_bytes": swap,
        "limit_bytes": limits.memory_bytes,
    }
    if free < MEMORY_PER_WORKER_BYTES:
        return warn(
            said,
            f"less than {size(MEMORY_PER_WORKER_BYTES)} left: workers that import torch alone need about 0.3 GiB each",
            **values,
        )
    if swap and swap - unswapped > SWAPPED_SHARE_MAX * swap:
        return warn(
            said,
            "this machine swaps: a swapped worker is a straggler for all others; find what fills the memory",
            **values,
        )
    return ok(said, **values)


# ---- limits


def open_files(workers: int, soft: int | None = None) -> Finding:
    """The limit of open files against what agent and workers hold."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft is None else soft
    need = FILES_BASE + FILES_PER_WORKER * workers
    said = f"{'no limit' if limit == resource.RLIM_INFINITY else limit} open files, about {need} needed with {workers} workers"
    if limit != resource.RLIM_INFINITY and limit < need:
        return warn(
            said,
            "ulimit -n 65536, or LimitNOFILE= in the unit, or nofile in /etc/security/limits.conf",
            limit=limit,
            need=need,
        )
    return ok(said, limit=limit, need=need)


def tasks(workers: int, root: Path = ROOT) -> Finding:
    """Processes and threads that may still be made: a container's pids limit is hit long before the machine's."""
    need, limits = TASKS_PER_WORKER * workers, cgroup(root)
    room: list[tuple[int, str]] = []
    if limits.tasks_max is not None:
        room.append((limits.tasks_max - limits.tasks, f"cgroup pids.max {limits.tasks_max}, {limits.tasks} used"))
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        room.append((soft, f"ulimit -u {soft}"))
    if not room:
        return ok("no limit of processes and threads")
    least, said = min(room)
    if least < need:
        return warn(
            f"{said}: room for {least}, about {need} needed with {workers} workers",
            "raise pids.max of the container (docker --pids-limit, the kubelet's podPidsLimit) or ulimit -u",
            room=least,
            need=need,
        )
    return ok(f"{said}; about {need} needed with {workers} workers", room=least, need=need)


def locked_memory(root: Path = ROOT, soft: int | None = None) -> Finding:
    """The limit of locked memory, which RDMA needs for every buffer."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if soft is None else soft
    said = "no limit" if limit == resource.RLIM_INFINITY else f"limit {size(limit)}"
    cards = sorted(one.name for one in (root / "sys/class/infiniband").glob("*"))
    if cards and limit != resource.RLIM_INFINITY and limit < MEMLOCK_BYTES_MIN:
        return fail(
            f"{said}, but this machine has RDMA devices ({', '.join(cards)})",
            "NCCL over RDMA cannot register its buffers: ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1",
            limit_bytes=limit,
        )
    return ok(f"{said}; {', '.join(cards) if cards else 'no RDMA devices, nothing needs more'}", limit_bytes=limit)


def watches(root: Path = ROOT, libc: ctypes.CDLL | None = None) -> Finding:
    """inotify, by which workers' output reaches the console at once."""
    library = ctypes.CDLL(None, use_errno=True) if libc is None else libc
    most = _text(root, "proc/sys/fs/inotify/max_user_instances") or "?"
    had: list[int] = []
    try:
        while len(had) < INOTIFY_FREE_MIN and (fd := int(library.inotify_init1(os.O_CLOEXEC))) >= 0:
            had.append(fd)
    finally:
        for fd in had:
            os.close(fd)
    said = f"fs.inotify.max_user_instances {most}"
    if len(had) < INOTIFY_FREE_MIN:
        return warn(
            f"{said}, only {len(had)} left for this user",
            "sysctl fs.inotify.max_user_instances=1024; without one, workers' output reaches the console late",
            left=len(had),
        )
    return ok(f"{said}, enough are left")


def cores(root: Path = ROOT, soft: int | None = None) -> Finding:
    """Where a crash leaves its core: a full disk is how one crash becomes many."""
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0] if soft is None else soft
    pattern = _text(root, "proc/sys/kernel/core_pattern") or "?"
    if pattern.startswith("|"):
        return ok(f"cores are piped to {pattern[1:].split()[0]}")
    if limit == 0:
        return ok(f"no core files (ulimit -c 0); pattern {pattern!r}")
    if not pattern.startswith("/"):
        return warn(
            f"core files of {'any size' if limit == resource.RLIM_INFINITY else 'up to ' + size(limit)} "
            f"go into each worker's directory (pattern {pattern!r})",
            "a crash of a large model fills that disk: ulimit -c 0, or sysctl kernel.core_pattern=/var/crash/core.%e.%p",
        )
    return ok(f"core files go to {pattern}")


# ---- shared memory


def shared_memory(workers: int, where: Path = SHM, room: tuple[int, int] | None = None) -> Finding:
    """Shared memory against what data loaders, NCCL and gloo put there. ``room``: bytes in all and free, for tests."""
    try:
        found = os.statvfs(where)
        total, free = room or (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
        with tempfile.NamedTemporaryFile(prefix="dlrover-doctor-", dir=where) as segment:
            os.posix_fallocate(segment.fileno(), 0, 4096)
    except OSError as error:
        return fail(
            f"{where} cannot be used: {error.strerror}",
            f"mount a tmpfs at {where}; docker and Kubernetes do unless told not to",
        )
    wanted = SHM_BYTES_PER_WORKER * workers
    said = f"{where}: {size(total)}, {size(free)} free; {size(SHM_BYTES_PER_WORKER)} per worker are a comfortable {size(wanted)}"
    more = (
        "docker run --shm-size=16g (its default is 64 MiB), in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    )
    values = {"total_bytes": total, "free_bytes": free, "wanted_bytes": wanted}
    if free < SHM_FAIL_BYTES:
        return fail(said, f"NCCL and data loaders die with 'bus error' or 'No space left on device': {more}", **values)
    if free < min(wanted, total) and free < total // 2:
        return warn(said, f"something fills it: ls -l {where}, and remove what dead jobs left; or {more}", **values)
    if total < wanted:
        return warn(said, f"data loaders may die with 'bus error': {more}", **values)
    return ok(said, **values)


# ---- clock


class Clocks(NamedTuple):
    """Both clocks at one moment, in seconds."""

    wall: float
    monotonic: float


def clocks() -> Clocks:
    """Now."""
    return Clocks(time.time(), time.monotonic())


class _Timex(ctypes.Structure):
    """The kernel's ``struct timex`` (64-bit), as far as it is read; the rest is room."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_char * 256),
    ]


class Discipline(NamedTuple):
    """What the kernel knows of its clock: is somebody keeping it, and how wrong may it be (seconds)?"""

    kept: bool
    error_s: float


def discipline() -> Discipline | None:
    """From adjtimex; None where a container forbids the call."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    return Discipline(state != TIME_ERROR and not timex.status & STA_UNSYNC, timex.maxerror / 1e6)


def clock(began: Clocks, now: Clocks | None = None, read: Callable[[], Discipline | None] = discipline) -> Finding:
    """Is the wall clock kept by somebody, and did it jump against the monotonic one since ``began``?"""
    now = now or clocks()
    kept = read()
    passed = now.monotonic - began.monotonic
    stepped = (now.wall - began.wall) - passed
    said = f"wall against monotonic {stepped * 1e3:+.1f} ms over {passed:.1f} s"
    values = {"stepped_s": stepped, "kept": kept.kept if kept else None}
    if abs(stepped) > STEPPED_S:
        return warn(
            said,
            "the wall clock is being set while we look (a suspended machine, quarrelling time daemons): durations of ours "
            "use the monotonic clock, times in logs will not be comparable",
            **values,
        )
    if kept is None:
        return ok(f"{said}; the kernel may not be asked here whether NTP keeps it", **values)
    if not kept.kept:
        return warn(
            f"{said}; nobody keeps it (adjtimex: unsynchronised)",
            "on several hosts, logs and causes could not be compared by time: start chronyd or systemd-timesyncd",
            **values,
        )
    return ok(f"{said}; synchronised, at most {kept.error_s * 1e3:.0f} ms off", **values)
