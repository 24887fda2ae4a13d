"""Does the strikes of a rough world to a running job, and writes each into the diary."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tools.etcd_cluster import EtcdError
from tools.rough_kinds import Strike
from tools.storming import Process, Striking, Timed
from tools.trials import Patience

from dlrover_core.testing import disk

STRANGER = Path(__file__).with_name("rough_stranger.py")
CONNECTIONS, STREAMS = 1000, 20
FREEZE, THAW = 0xC0045877, 0xC0045878
EATS_BYTES = 192 << 20
HOUR_NS = 3600 * 10**9
BEAT_S, STOOD_S = 0.05, 1.0
TRIES, AGAIN_S = 30, 2.0
FAILURES = (OSError, EtcdError)
"""What may keep a strike from being done, or from being taken back at once."""
OPEN_TO_STRANGERS = ("dlrover-master", "dlrover-agent", "dlrover-saver", "dlrover-keeper")
"""Whose ports strangers come to. Workers' are torch's own."""

TORCHS = ("dlrover-keeper",)
"""Torch's store listens there, and obeys whoever writes to it: strangers hold connections, and send nothing."""


class Victim(Protocol):
    """A running job, as strikes see it."""

    def living(self, role: str) -> list[Process]:
        """Its processes of a role, the oldest first."""
        ...

    def check_alive(self) -> None:
        """Raises AssertionError when it has ended."""
        ...

    def prefix(self, pid: int) -> list[str]:
        """What a command begins with to run on the host of a process."""
        ...


class Diary:
    """The file of all strikes, one line when a strike begins and one when it is taken back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self._number = 0

    def begins(self, kind: str, target: str, lasts: bool, **about: object) -> int:
        """Note that a strike begins now, if ``about`` says no other ``start``; its number."""
        with self._lock:
            self._number += 1
            row = {
                "id": self._number,
                "start": time.monotonic(),
                "kind": kind,
                "target": target,
                "lasts": lasts,
                **about,
            }
            self._file.write(json.dumps(row) + "\n")
            return self._number

    def ends(self, number: int) -> None:
        """Note that it is taken back now."""
        with self._lock:
            self._file.write(json.dumps({"id": number, "end": time.monotonic()}) + "\n")


class Metronome:
    """Notes when the machine itself stood still: a thread that sleeps for a moment, and wakes much later."""

    def __init__(self, diary: Diary) -> None:
        self._diary, self._over = diary, threading.Event()
        self._thread = threading.Thread(target=self._run, name="metronome", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if now - before > STOOD_S:
                number = self._diary.begins("machine", "", lasts=True, start=before)
                self._diary.ends(number)
            before = now


class Rough(Striking):
    """Does every kind of strike. ``disks``: where they are mounted. ``groups``: control groups. ``clocks``: files, by host."""

    def __init__(
        self,
        victim: Victim,
        patience: Patience,
        diary: Diary,
        *,
        folders: Sequence[Path],
        disks: Mapping[str, Path],
        groups: Mapping[str, Path],
        clocks: Mapping[str, Path],
        seed: int,
    ) -> None:
        super().__init__(victim.check_alive, patience)
        self._victim, self._diary, self._folders = victim, diary, folders
        self._disks, self._groups, self._clocks, self._seed = disks, groups, clocks, seed
        self._busy: set[str] = set()
        self._strangers: list[subprocess.Popen[bytes]] = []
        self._does: dict[str, Callable[[Strike], bool]] = {
            "kill": self._kill,
            "stop": self._kill,
            "clock": self._clock,
            "disk-full": self._disk_full,
            "disk-stall": self._disk_stall,
            "pids": self._pids,
            "files": self._files,
            "oom": self._oom,
            "strangers": self._stranger,
            "hostile": self._stranger,
        }

    def strike(self, strike: Timed, now_s: float) -> None:
        """Do it, or count why not."""
        assert isinstance(strike, Strike)
        busy, undone = set(self._busy), len(self._later)
        name = f"{strike.kind} {strike.target.removeprefix('dlrover-')}".rstrip()
        try:
            name = name if self._does[strike.kind](strike) else "nobody there"
        except ProcessLookupError:
            name = "nobody there"
        except FAILURES as error:
            name = f"not done: {name}: {error}"[:160]
        if name.startswith("n") and len(self._later) == undone:
            self._busy = busy
        self.done[name] += 1

    def close(self) -> None:
        """Have no stranger left."""
        for one in self._strangers:
            one.kill()
            one.wait()

    # ---- how a strike is written down

    def _noted(self, strike: Strike, undo: Callable[[], object] | None = None, **about: Any) -> int:
        """Write it down. ``undo`` takes it back when its time is over."""
        number = self._diary.begins(strike.kind, strike.target, undo is not None, **about)

        def over(tries: int = TRIES) -> None:
            assert undo is not None
            try:
                undo()
            except FAILURES:
                if not tries:
                    raise
                self.later(AGAIN_S, lambda: over(tries - 1))
            else:
                self._diary.ends(number)

        if undo is not None:
            self.later(strike.lasts_s, over)
        return number

    def _taken(self, what: str) -> bool:
        """Is this still under an earlier strike? If not, it is from now on."""
        if what in self._busy:
            return True
        self._busy.add(what)
        return False

    def _chosen(self, role: str, which: float) -> Process | None:
        living = self._victim.living(role)
        return living[min(int(which * len(living)), len(living) - 1)] if living else None

    # ---- processes

    def _kill(self, strike: Strike) -> bool:
        victim = self._chosen(strike.target, strike.which)
        if victim is None:
            return False
        about = {"pid": victim.pid, "line": victim.line[-160:]}
        if not strike.lasts_s:
            number = self._noted(strike, **about)
            self.stop(victim.pid, 0.0)
            return bool(number)
        number = self._diary.begins(strike.kind, strike.target, lasts=True, **about)
        self.stop(victim.pid, strike.lasts_s)
        self.later(strike.lasts_s, lambda: self._diary.ends(number))
        return True

    def _oom(self, strike: Strike) -> bool:
        victim = self._chosen("worker", strike.which)
        if victim is None:
            return False
        group = self._groups["memory"]
        (group / "memory.limit_in_bytes").write_text(str(EATS_BYTES))
        (group / "cgroup.procs").write_text(str(victim.pid))
        self._noted(strike, pid=victim.pid)
        for folder in self._folders:
            (folder / f"eat-{victim.pid}").touch()
        return True

    def _pids(self, strike: Strike) -> bool:
        group = self._groups["pids"]
        if self._taken("pids"):
            return False

        def undo() -> None:
            (group / "pids.max").write_text("max")
            self._busy.discard("pids")

        now = int((group / "pids.current").read_text())
        (group / "pids.max").write_text(str(now))
        self._noted(strike, undo, processes=now)
        return True

    def _files(self, strike: Strike) -> bool:
        victim = self._chosen(strike.target, strike.which)
        if victim is None or self._taken(f"files-{victim.pid}"):
            return False
        used = max((int(one) for one in os.listdir(f"/proc/{victim.pid}/fd")), default=0) + 1  # noqa: PTH208
        soft, hard = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
        fd = os.pidfd_open(victim.pid)

        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (min(used, hard), hard))

        def restore() -> None:
            if _lives(fd):
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (soft, hard))
            os.close(fd)
            self._busy.discard(f"files-{victim.pid}")

        self._noted(strike, restore, pid=victim.pid, files=used)
        return True

    # ---- clocks and disks

    def _clock(self, strike: Strike) -> bool:
        host = strike.target if strike.target in self._clocks else next(iter(self._clocks))
        if self._taken(f"clock-{host}"):
            return False

        def undo() -> None:
            _write(self._clocks[host], 0)
            self._busy.discard(f"clock-{host}")

        _write(self._clocks[host], int(strike.amount * HOUR_NS))
        self._noted(strike, undo, hours=strike.amount)
        return True

    def _disk_full(self, strike: Strike) -> bool:
        place = self._disks[strike.target]
        if self._taken(f"disk-{strike.target}"):
            return False

        def undo() -> None:
            disk.empty(place)
            self._busy.discard(f"disk-{strike.target}")

        disk.fill(place)
        self._noted(strike, undo)
        return True

    def _disk_stall(self, strike: Strike) -> bool:
        if self._taken(f"disk-{strike.target}"):
            return False
        fd = os.open(self._disks[strike.target], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        def undo() -> None:
            with contextlib.suppress(OSError):  # it is thawed already
                fcntl.ioctl(fd, THAW, 0)
            os.close(fd)
            self._busy.discard(f"disk-{strike.target}")

        self._noted(strike, undo)
        fcntl.ioctl(fd, FREEZE, 0)
        return True

    # ---- strangers

    def _stranger(self, strike: Strike) -> bool:
        if self._taken("strangers"):
            return False
        roles = [role for role in OPEN_TO_STRANGERS if strike.kind == "strangers" or role not in TORCHS]
        found = [
            (role, one, place) for role in roles for one in self._victim.living(role) for place in listening(one.pid)
        ]
        if not found:
            self._busy.discard("strangers")
            return False
        chosen = found[int(strike.which * len(found)) % len(found)][1].pid
        here = _network(chosen)
        ports = [(role, place) for role, one, place in found if _network(one.pid) == here]
        first, second = (strike.lasts_s, CONNECTIONS) if strike.kind == "strangers" else (self._seed, STREAMS)
        mode = "hold" if strike.kind == "strangers" else "bytes"
        line = [sys.executable, "-I", "-S", str(STRANGER), mode, str(first), str(second), *(one for _, one in ports)]
        if os.geteuid() == 0 and shutil.which("setpriv"):
            line = ["/usr/bin/env", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *line]
        line = [*self._victim.prefix(chosen), *line]
        running = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._strangers.append(running)

        def undo() -> None:
            running.kill()
            running.wait()
            self._strangers.remove(running)
            self._busy.discard("strangers")

        self._noted(strike._replace(lasts_s=strike.lasts_s or 4.0), undo, ports=[f"{role} {at}" for role, at in ports])
        return True


def _lives(fd: int) -> bool:
    """Does the process of a pidfd still live?"""
    try:
        signal.pidfd_send_signal(fd, 0)
    except ProcessLookupError:
        return False
    return True


def _network(pid: int) -> str:
    """Which network a process is in; empty when it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115  # it is no path
    except OSError:
        return ""


def _write(clock: Path, nanoseconds: int) -> None:
    fd = os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.pwrite(fd, struct.pack("=q", nanoseconds), 0)
    finally:
        os.close(fd)


def listening(pid: int) -> list[str]:
    """``host:port`` of every TCP port that a process listens on."""
    found, sockets = [], set()
    try:
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(one.readlink()))
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        lines += Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ESRCH}:
            return []
        raise
    for line in lines:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
            address, _, port = words[1].partition(":")
            raw = bytes.fromhex(address)[-4:][::-1]
            host = "127.0.0.1" if len(address) == 32 or raw == b"\0\0\0\0" else ".".join(map(str, raw))
            found.append(f"{host}:{int(port, 16)}")
    return sorted(set(found))
