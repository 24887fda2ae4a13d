"""Checks of the places a job writes to: the state directory with its log, and the folder for sockets and streams."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from dlrover_adapters.cli import scratch
from dlrover_adapters.cli.doctor_check import Finding, fail, ok, size, warn
from dlrover_core.errors import CoreError, SpecError
from dlrover_core.logs import open_log, place

FREE_BYTES_MIN, FREE_BYTES_FEW = 64 * 2**20, 1 * 2**30
SYNCS = 20
SYNC_SLOW_S = 0.05
PREFIX = "dlrover-doctor-"
AGENTS = "dlrover-run-12345678"  # as long a name as an agent's own folder has
ANOTHER = "name a directory of yours on a local disk with --state-dir"


def where(stated: Path | None) -> Path:
    """The state directory asked for, else the one that commands use without being told."""
    return stated.absolute() if stated is not None else place.default_state_dir()


def state_directory(directory: Path, mountinfo: str | None = None) -> Finding:
    """Local file system, space, locks, how long a sync takes, and a real log in it. Leaves nothing."""
    kind = place.file_system(directory, mountinfo)
    if place.is_remote(kind):
        return fail(
            f"{directory} is on a {kind} file system",
            f"locks there keep no second master on another host from leading: {ANOTHER}, like /var/tmp/dlrover-{os.getuid()}",
            file_system=kind,
        )
    try:
        if directory.exists():
            place.private_dir(directory)
    except SpecError as error:
        return fail(str(error), ANOTHER, file_system=kind)
    existing = next(one for one in (directory, *directory.parents) if one.exists())
    said = f"{directory} ({kind or 'file system unknown'}{'' if existing == directory else ', will be made'})"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=existing) as folder:
            room = os.statvfs(folder)
            free, syncs = room.f_bavail * room.f_frsize, _syncs(Path(folder))
            locked = _locks(Path(folder))
            asyncio.run(_log(Path(folder)))
    except OSError as error:
        return fail(f"{said} cannot be written to: {error.strerror or error}", ANOTHER, file_system=kind)
    except CoreError as error:
        return fail(f"{said}: a log cannot be kept there: {error}", ANOTHER, file_system=kind)
    if not locked:
        return fail(
            f"{said}: a lock taken twice was given twice",
            f"two masters would lead at once: {ANOTHER}",
            file_system=kind,
        )
    middle, worst = statistics.median(syncs), max(syncs)
    said = f"{said}: {size(free)} free, fsync {middle * 1e3:.1f} ms (worst of {SYNCS}: {worst * 1e3:.1f} ms), locks and log work"
    values = {"file_system": kind, "free_bytes": free, "fsync_median_s": middle, "fsync_worst_s": worst}
    if free < FREE_BYTES_MIN:
        return fail(said, f"make room, or {ANOTHER}", **values)
    if free < FREE_BYTES_FEW:
        return warn(
            said,
            f"little room: a log grows by some MiB a day, workers' output by what they print; or {ANOTHER}",
            **values,
        )
    if middle > SYNC_SLOW_S:
        return warn(said, f"every decision waits for a sync, so recovery takes that much longer: {ANOTHER}", **values)
    return ok(said, **values)


def _syncs(folder: Path) -> list[float]:
    """Seconds that each of some small appended writes takes to be durable."""
    took = []
    fd = os.open(folder / "sync", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(SYNCS):
            began = time.monotonic()
            os.write(fd, b"x" * 512)
            os.fsync(fd)
            took.append(time.monotonic() - began)
    finally:
        os.close(fd)
    return took


def _locks(folder: Path) -> bool:
    """Is a lock that somebody holds refused to others?"""
    first, second = (os.open(folder / "held", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
    finally:
        os.close(first)
        os.close(second)


async def _log(folder: Path) -> None:
    """Lead a job in a log of its own, for a moment."""
    async with open_log("sqlite://" + quote(os.fsencode(folder / "log.db"))) as log:
        lead = await log.lead("doctor", "dlrover doctor")
        await lead.resign()


def sockets(roof: str | None = None) -> Finding:
    """The folder for sockets and workers' streams: short enough a path, and room in it."""
    top = roof or next(iter(scratch.roofs()), "/tmp")  # noqa: S108  # nothing is made there but by mkdtemp
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=top) as folder:
            room = os.statvfs(folder)
            free = room.f_bavail * room.f_frsize
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bell:
                os.mkdir(os.path.join(folder, AGENTS))
                bell.bind(os.path.join(folder, AGENTS, "agent.sock"))
    except OSError as error:
        return fail(
            f"{top}: no Unix socket can be made there: {error.strerror or error}",
            "set TMPDIR to a short path on a local disk",
        )
    said = f"{top}: {size(free)} free, Unix sockets work"
    if top != tempfile.gettempdir():
        said += f" ({tempfile.gettempdir()} has too long a path for them)"
    if free < FREE_BYTES_FEW:
        return warn(said, "workers' output is kept there while a job runs: make room, or set TMPDIR", free_bytes=free)
    return ok(said, free_bytes=free)
