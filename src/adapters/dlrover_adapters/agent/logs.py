"""Workers' output: where it goes, and how it reaches the agent's console.

Every stream of a worker is a *file*, also where it only passes through to the console. A pipe would tie training to its reader: a
slow terminal, or an agent that is stopped or busy, blocks the worker in the middle of a step. A file takes everything, keeps
the order, and holds the last words of the dead without any draining. What is shown and not to be kept lies in the
launcher's run folder, and is punched out of the file once shown, so that it needs no room. What nobody reads, or keeps for
ever, is bounded by `log_bounds`.

`LogPump` is the one thread that shows: woken by inotify, it writes whole lines to the console, and half ones (a prompt, a
progress bar) when they have rested for `REST_S`.

The price: a worker's stdout is not a terminal, even when the agent's is.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import os
import select
import string
import threading
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from dlrover_core.runtime.launcher import WorkersLaunch

from .config import LaunchConfig, Streams
from .log_bounds import LogBounds, prune
from .process import libc

CHUNK_BYTES = 256 * 1024
REST_S = 0.2
PUNCH_BYTES = 1024 * 1024
"""Shown output is taken out of files in pieces of this size; as much stays for the tail."""

PASSING_ATTEMPTS_MAX = 3
"""Generations whose passing files are there at once: the one that runs, and those whose last words may still be read."""

_IN_MODIFY = 0x2
_IN_NONBLOCK = os.O_NONBLOCK
_IN_CLOEXEC = os.O_CLOEXEC
_PUNCH_HOLE_KEEP_SIZE = 0x2 | 0x1

_log = structlog.get_logger(__name__)


class StreamFile(NamedTuple):
    """One output stream of one worker. ``console`` is 1 or 2, or 0 if it is not shown.

    Lines that contain one of ``filters`` go into the file ``filtered`` too, which all ranks of the node share.
    """

    path: str
    console: int
    prefix: bytes
    keep: bool
    filters: tuple[bytes, ...] = ()
    filtered: str = ""


class RankFiles(NamedTuple):
    """All files of one worker in one generation."""

    stdout: StreamFile
    stderr: StreamFile
    error: str


def attempts_dir(config: LaunchConfig, log_dir: str, launch: WorkersLaunch) -> str:
    """Where the kept logs of this node lie: torchrun's ``<id>_<random>``, where run and node take the place of chance."""
    node = launch.node or config.node
    return os.path.join(log_dir, f"{config.run_id or config.job}_{launch.run}_{node}".replace(os.sep, "-"))


def rank_files(config: LaunchConfig, run_dir: str, log_dir: str, launch: WorkersLaunch, local_rank: int) -> RankFiles:
    """The files of one worker; those that stay are in torchrun's places, ``attempt_<restarts>/<local rank>/``."""
    attempt = os.path.join(attempts_dir(config, log_dir, launch), f"attempt_{launch.restart_count}")
    kept_dir = os.path.join(attempt, str(local_rank))
    passing_dir = os.path.join(run_dir, "output", f"attempt_{launch.generation}", str(local_rank))
    prefix = _prefix(config, launch, local_rank)

    def stream(which: Streams, name: str, console: int) -> StreamFile:
        keep, show = bool(which & config.redirected(local_rank)), bool(which & config.shown(local_rank))
        path = os.path.join(kept_dir if keep else passing_dir, name)
        filters = config.duplicated(local_rank, which)
        filtered = os.path.join(attempt, f"filtered_{name}") if filters else ""
        return StreamFile(path, console if show else 0, prefix if keep and show else b"", keep, filters, filtered)

    return RankFiles(
        stdout=stream(Streams.OUT, "stdout.log", 1),
        stderr=stream(Streams.ERR, "stderr.log", 2),
        error=os.path.join(kept_dir if config.log_dir else passing_dir, "error.json"),
    )


def made_all(config: LaunchConfig, run_dir: str, log_dir: str, launch: WorkersLaunch) -> list[RankFiles]:
    """The files of all ranks of a generation; those of older ones go."""
    output = os.path.join(run_dir, "output")
    passing = os.path.join(output, f"attempt_{launch.generation}")
    files = [
        made(rank_files(config, run_dir, log_dir, launch, rank), os.path.join(passing, str(rank)))
        for rank in range(launch.nproc)
    ]
    prune(output, PASSING_ATTEMPTS_MAX)
    prune(attempts_dir(config, log_dir, launch), config.log_attempts_max)
    return files


def unwritten(files: Sequence[RankFiles], run_dir: str) -> str:
    """What people are told where output has no place at all; empty: it has."""
    if not any(stream.path == os.devnull for one in files for stream in (one.stdout, one.stderr)):
        return ""
    return (
        f"{run_dir} takes no files: workers run on, and what they print is neither shown nor kept; free room there, or make "
        "the disk writable, and it is shown again from the next start of workers on"
    )


def made(files: RankFiles, passing_dir: str) -> RankFiles:
    """The same, with everything there that a worker opens; where there is no room, in a place that has some, or nowhere.

    A full disk must not keep training from its start.
    """
    stdout, stderr = _made(files.stdout, passing_dir), _made(files.stderr, passing_dir)
    try:
        os.makedirs(os.path.dirname(files.error), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(files.error)  # of another life of this generation: not this one's evidence
    except OSError:
        return RankFiles(stdout, stderr, os.path.join(passing_dir, os.path.basename(files.error)))
    return RankFiles(stdout, stderr, files.error)


def _made(file: StreamFile, passing_dir: str) -> StreamFile:
    passing = file._replace(path=os.path.join(passing_dir, os.path.basename(file.path)), keep=False, prefix=b"")
    for one in (file, passing):
        try:
            os.makedirs(os.path.dirname(one.path), exist_ok=True)
            os.close(os.open(one.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            if one.filtered:
                os.close(os.open(one.filtered, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            _log.warning("no room for output", path=one.path, error=str(error))
        else:
            return one
    return StreamFile(os.devnull, 0, b"", keep=True)


def _prefix(config: LaunchConfig, launch: WorkersLaunch, local_rank: int) -> bytes:
    """Torchrun's, with its variable for another. In a job of several groups the place counts, as most nodes have one worker."""
    place = (launch.node or config.node).rpartition("-")[0]
    template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    if not template and config.by_place:
        within = f".{local_rank}" if launch.nproc > 1 else ""
        return os.fsencode(f"[{config.role}{place.rpartition('-')[2]}{within}]:")
    if not template:
        return os.fsencode(f"[{config.role}{local_rank}]:")
    filled = string.Template(template).safe_substitute(
        role_name=config.role, rank=launch.first_rank + local_rank, local_rank=local_rank, place=place
    )
    return os.fsencode(filled)


class _Filter:
    """Lines of one shown stream that contain one of its filters, on their way into the file that they share."""

    def __init__(self, file: StreamFile, bytes_max: int) -> None:
        self._file, self._bytes_max = file, bytes_max
        self._fd = os.open(file.filtered, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._begun = b""

    def feed(self, text: bytes) -> None:
        """Take what is shown; a full disk, or a full file, loses the rest."""
        *lines, self._begun = (self._begun + text).split(b"\n")
        self._keep([line + b"\n" for line in lines])
        if len(self._begun) > CHUNK_BYTES:
            self._begun = self._begun[-CHUNK_BYTES:]

    def _keep(self, lines: list[bytes]) -> None:
        found = [self._file.prefix + line for line in lines if any(one in line for one in self._file.filters)]
        with contextlib.suppress(OSError):
            if found and not (self._bytes_max and os.fstat(self._fd).st_size > self._bytes_max):
                os.write(self._fd, b"".join(found))

    def close(self) -> None:
        """Take the line that never ended."""
        if self._begun:
            self._keep([self._begun])
        with contextlib.suppress(OSError):  # as in `_Shown.close`
            os.close(self._fd)


class _Shown:
    """One stream on its way to the console."""

    def __init__(self, file: StreamFile, bounds: LogBounds) -> None:
        self.file, self._bounds = file, bounds
        self.fd = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._told = False
        try:
            self._filter = _Filter(file, bounds.bytes_max) if file.filters else None
        except BaseException:
            os.close(self.fd)
            raise
        self.shown = 0  # bytes of the file that are on the console
        self.half = b""  # the line begun
        self.continued = False  # the console holds the begin of our line
        self.punched = 0

    def pump(self, *, flush: bool) -> None:
        """Show what is there: whole lines, and what follows the last one if ``flush``."""
        while chunk := self._read():
            text = self.half + chunk
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            if end == 0 and len(text) >= CHUNK_BYTES:
                end = len(text)
            self._show(text[:end])
            self.half = text[end:]
        if flush and self.half:
            text, self.half = self.half, b""
            self._show(text)
        self._punch()

    def _read(self) -> bytes:
        """What comes next, but nothing of what was left out because the console took too long."""
        while True:
            hole, at = self._bounds.hole(self.file.path), self.shown + len(self.half)
            if hole is not None and hole.start <= at < hole.stop:
                text, self.half = self.half, b""
                self._show(text)
                self.shown = hole.stop
                continue
            size = min(CHUNK_BYTES, hole.start - at) if hole is not None and at < hole.start else CHUNK_BYTES
            try:
                chunk = os.pread(self.fd, size, at)
            except OSError as error:  # a disk that fails, a file server that has forgotten the file
                self._unread(error)
                return b""
            if self._bounds.hole(self.file.path) == hole:
                return chunk

    def _unread(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            _log.warning("output cannot be read back and is not shown", path=self.file.path, error=str(error))

    def _show(self, text: bytes) -> None:
        if not text:
            return
        self.shown += len(text)
        if self._filter is not None:
            self._filter.feed(text)
        _write(self.file.console, self._prefixed(text))

    def _prefixed(self, text: bytes) -> bytes:
        prefix = self.file.prefix
        if not prefix:
            return text
        lines = text.splitlines(keepends=True)
        first = b"" if self.continued else prefix
        self.continued = not text.endswith((b"\n", b"\r"))
        return first + prefix.join(lines)

    def _punch(self) -> None:
        """Give back the room of what was shown, all but the tail."""
        end = (self.shown - PUNCH_BYTES) // PUNCH_BYTES * PUNCH_BYTES
        if self.file.keep or end <= self.punched:
            return
        offset, length = ctypes.c_longlong(self.punched), ctypes.c_longlong(end - self.punched)
        libc().fallocate(
            self.fd, _PUNCH_HOLE_KEEP_SIZE, offset, length
        )  # where it is not supported, room is what it costs
        self.punched = end

    def close(self) -> None:
        if self._filter is not None:
            self._filter.close()
        with contextlib.suppress(OSError):  # a file server or a quota may say only now what it did not take
            os.close(self.fd)
        self._bounds.finish(self.file)
        if not self.file.keep:
            with contextlib.suppress(OSError):
                os.unlink(self.file.path)


def _write(fd: int, text: bytes) -> None:
    """All of ``text``; a console that is gone swallows it."""
    view = memoryview(text)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError as error:
            if error.errno != errno.EINTR:
                return


class LogPump:
    """Shows streams on the console, in a thread of its own. Methods may be called from any thread; none of them blocks."""

    def __init__(self, bounds: LogBounds | None = None) -> None:
        self._bounds = bounds or LogBounds(0)
        self._orders: collections.deque[tuple[str, StreamFile | None]] = collections.deque()
        self._streams: dict[str, _Shown] = {}
        self._watches: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._inotify = self._doorbell = -1

    def open(self) -> None:
        """Start the thread."""
        self._inotify = libc().inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        thread = threading.Thread(target=self._run, name="log-pump", daemon=True)
        thread.start()
        self._thread = thread

    def follow(self, file: StreamFile) -> None:
        """Show ``file`` as it grows, until `finish`."""
        self._order("follow", file)

    def finish(self, file: StreamFile) -> None:
        """Its worker is dead: show the rest, forget it, and remove it unless it is to be kept."""
        self._order("finish", file)

    def close(self, timeout_s: float) -> None:
        """Show all that is left and end the thread; a console that takes nothing for ``timeout_s`` loses it. Blocks."""
        if self._thread is None:
            return
        self._order("end", None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._inotify)
            os.close(self._doorbell)
        self._thread = None

    def _order(self, what: str, file: StreamFile | None) -> None:
        self._orders.append((what, file))
        os.eventfd_write(self._doorbell, 1)

    # ---- in the thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._doorbell, select.POLLIN)
        if self._inotify >= 0:
            poll.register(self._inotify, select.POLLIN)
        resting = False
        while True:
            # Without inotify (its instances are limited per user) the streams are looked at as often as half lines rest.
            ready = poll.poll(round(REST_S * 1000) if resting or self._inotify < 0 else None)
            touched = self._touched() if ready and self._inotify >= 0 else list(self._streams.values())
            for one in touched:
                one.pump(flush=not ready)
            if not self._obey():
                return
            resting = any(one.half for one in self._streams.values())

    def _touched(self) -> list[_Shown]:
        """Streams that inotify says have grown."""
        try:
            events = os.read(self._inotify, 65536)
        except BlockingIOError:
            return []
        found: dict[str, _Shown] = {}
        while len(events) >= 16:
            watch = int.from_bytes(events[:4], "little", signed=True)
            path = self._watches.get(watch, "")
            if path in self._streams:
                found[path] = self._streams[path]
            events = events[16 + int.from_bytes(events[12:16], "little") :]
        return list(found.values())

    def _obey(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)
        while self._orders:
            what, file = self._orders.popleft()
            if file is None:
                for one in list(self._streams.values()):
                    self._finish(one)
                return False
            if what == "follow":
                self._follow(file)
            elif file.path in self._streams:
                self._finish(self._streams[file.path])
        return True

    def _follow(self, file: StreamFile) -> None:
        try:
            one = self._streams[file.path] = _Shown(file, self._bounds)
        except OSError as error:
            _log.warning("output cannot be shown", path=file.path, error=str(error))
            return
        if self._inotify >= 0:
            watch = libc().inotify_add_watch(self._inotify, os.fsencode(file.path), _IN_MODIFY)
            self._watches[watch] = file.path
        one.pump(flush=False)  # what was written before the watch

    def _finish(self, one: _Shown) -> None:
        one.pump(flush=True)
        one.close()
        del self._streams[one.file.path]
        for watch in [key for key, path in self._watches.items() if path == one.file.path]:
            libc().inotify_rm_watch(self._inotify, watch)
            del self._watches[watch]
