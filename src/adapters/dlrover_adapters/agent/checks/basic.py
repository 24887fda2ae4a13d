"""What a node must have before anything is started on it. Each look says what is wrong, or nothing; none changes anything.

Everything of the kernel's is read below ``root``, so that any machine can be told.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dlrover_core.words import first_few

ROOT = Path("/")
MIB = 2**20
DISK_BYTES_MIN, MEMORY_BYTES_MIN, MEMORY_PER_WORKER_BYTES = 64 * MIB, 128 * MIB, 64 * MIB
LEFT_OVER_BYTES = 1024 * MIB
SKEW_S, LATE_S = 300.0, 3600.0
CONNECT_S = 5.0
FINDINGS_MAX = 5
UNLIMITED = 2**60  # version 1 of control groups says "no limit" by a number close to 2**63


class Place(NamedTuple):
    """This node: its own ``folders``, its ``nproc`` workers, ``masters`` as ``host:port``, whether there are ``others``.

    ``mark`` is what processes of this run bear in their environment (``NAME=VALUE``; empty: unknown). ``asked_us`` is when the
    master asked, by its clock; 0: unknown.
    """

    folders: tuple[str, ...] = ()
    nproc: int = 1
    masters: tuple[str, ...] = ()
    others: bool = False
    mark: str = ""
    asked_us: int = 0
    root: Path = ROOT


def problems(place: Place) -> list[str]:
    """Everything that is wrong here; blocks."""
    found: list[str] = []
    for look in LOOKS:
        try:
            found += look(place)
        except (OSError, ValueError) as error:
            found.append(f"{look.__name__}: cannot be looked at: {error}")
    return found


# ---- disk and memory


def disk(place: Place) -> Iterator[str]:
    """Can files be written, and is there room?"""
    for folder in dict.fromkeys(place.folders):
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".dlrover-check-") as file:
                file.write(b"\0" * 4096)
                file.flush()
        except OSError as error:
            why = "its file system is read-only" if error.errno == errno.EROFS else os.strerror(error.errno or 0)
            yield f"disk: {folder} cannot be written to: {why}"
            continue
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        if free < DISK_BYTES_MIN:
            yield f"disk: {free // MIB} MiB free in {folder}, at least {DISK_BYTES_MIN // MIB} are needed"
        if room.f_files and not room.f_favail:
            yield f"disk: no inodes are left in {folder}"


def memory(place: Place) -> Iterator[str]:
    """Is there memory for the workers, here and within the container's limit?"""
    need = MEMORY_BYTES_MIN + MEMORY_PER_WORKER_BYTES * place.nproc
    table = _table(place.root / "proc/meminfo", ":")
    if "MemAvailable" in table and table["MemAvailable"] * 1024 < need:
        yield f"memory: {table['MemAvailable'] // 1024} MiB available, at least {need // MIB} are needed"
    for folder, room in rooms(place.root):
        if room < need:
            yield f"memory: {room // MIB} MiB left within the limit of control group {folder}, at least {need // MIB} are needed"
            return


def rooms(root: Path) -> Iterator[tuple[str, int]]:
    """What may still be used in our control group and those above it; page cache gives way, so it counts as free."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        inside = Path(name.lstrip("/"))
        for part in (inside, *inside.parents):
            limit, used = (_text(base / part / one).strip() for one in names)
            if limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED:
                cache = _table(base / part / "memory.stat", " ").get("inactive_file", 0)
                yield f"/{part}".replace("/.", "/"), int(limit) - int(used) + cache


# ---- clock, names, ports


def clock(place: Place) -> Iterator[str]:
    """Is the time what the master says? Its word may be late, never early."""
    if not place.asked_us:
        return
    late_s = time.time() - place.asked_us / 1e6
    if late_s < -SKEW_S:
        yield f"clock: it is {-late_s:.0f} s behind the master's"
    elif late_s > LATE_S:
        yield f"clock: it is {late_s:.0f} s ahead of the master's"


def host_name(place: Place) -> Iterator[str]:
    """Does this host's own name lead to an address? Gloo listens there."""
    if place.others and not os.environ.get("GLOO_SOCKET_IFNAME"):
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            yield f"host name: {name!r} has no address: {error.strerror or error}"


def ports(place: Place) -> Iterator[str]:
    """Can a master be reached from here?"""
    refused = []
    for master in place.masters:
        host, _, port = master.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
                return
        except OSError as error:
            refused.append(f"{master}: {error.strerror or error}")
    if refused:
        yield f"ports: no master can be reached: {first_few(refused, FINDINGS_MAX, between='; ')}"


# ---- devices and left-overs


def devices(place: Place) -> Iterator[str]:
    """Are there device files for all the GPUs that the driver knows?"""
    driver = _names(place.root / "proc/driver/nvidia/gpus")
    files = [one for one in _names(place.root / "dev") if one.startswith("nvidia") and one[6:].isdecimal()]
    # A container may be given fewer than the host has; none at all where it should have some is another thing.
    if driver and not files and os.environ.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "none", "void"):
        yield f"devices: the driver knows {len(driver)} GPUs, and not one of them has a device file here"


def left_over(place: Place) -> Iterator[str]:
    """Orphans of earlier runs that hold a GPU, or much memory."""
    name = place.mark.partition("=")[0]
    if not name:
        return
    found = []
    for pid in [one for one in _names(place.root / "proc") if one.isdecimal()]:
        folder = place.root / "proc" / pid
        stat = _text(folder / "stat").rpartition(")")[2].split()
        if len(stat) < 22 or stat[0] in ("Z", "X") or stat[1] != "1":
            continue
        marks = [one for one in _text(folder / "environ").split("\0") if one.startswith(f"{name}=")]
        if marks and place.mark not in marks and (what := _held(folder, int(stat[21]))):
            found.append(f"process {pid} ({_text(folder / 'comm').strip()}) {what}")
    if found:
        yield f"left over: {first_few(found, FINDINGS_MAX, between='; ')}, of an earlier run whose agent is gone"


def _held(folder: Path, pages: int) -> str:
    for one in _names(folder / "fd"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "fd" / one).startswith("/dev/nvidia"):
                return "holds a GPU"
    held = pages * os.sysconf("SC_PAGE_SIZE")
    return f"holds {held // MIB} MiB of memory" if held >= LEFT_OVER_BYTES else ""


LOOKS: tuple[Callable[[Place], Iterator[str]], ...] = (disk, memory, clock, host_name, ports, devices, left_over)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _table(path: Path, between: str) -> dict[str, int]:
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(between)
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0])
    return found
