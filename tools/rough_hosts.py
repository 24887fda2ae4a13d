"""The rough job of three hosts: an etcd of three members and three masters, training on two, joined by a network that can fail.

Each host is a network namespace with a TUN device (`rough_switch`). A master or a launcher that ends is started again, as a
service manager does. Whoever strikes and judges has a device of its own on the network, which nothing is done to.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tools.etcd_cluster import Cluster, EtcdError, Place
from tools.rough_kinds import HOSTS, Strike
from tools.rough_striking import FAILURES, Rough
from tools.storming import SCRIPTS, Host, Net, Process, children, namespace, processes
from tools.trials import Patience

if TYPE_CHECKING:
    from tools.rough_world import World
    from typing_extensions import Self

SWITCH = Path(__file__).with_name("rough_switch.py")
TRAINERS = HOSTS[:2]
US = "z"
PORT, TTL_S, QUOTA_BYTES, FULL_BYTES = 29400, 5, 64 << 20, 1 << 20
KILLS = 20
AGAIN_S, TIDY_S = 1.0, 3.0
"""A service manager starts what has ended after so long."""

END_S = 400.0
PREFIX, BALLAST = "rough", "ballast/"
ENDLESS = ("--max-restarts", "1000000", "--relaunch-max", "1000000")


class Network:
    """The switch, and what it is to do to packets."""

    def __init__(self, ports: Sequence[str]) -> None:
        line = [sys.executable, "-I", "-S", str(SWITCH), *ports]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n", "the switch did not start"
        self.told: dict[str, Any] = {"cuts": [], "spare": [US]}
        self.tell()

    def tell(self, **more: Any) -> None:
        """Do these things to packets from now on, too."""
        self.told |= more
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self.told).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Service:
    """A command on a host that is started again when it ends, until it may end."""

    def __init__(self, host: Host, program: str, command: Sequence[str]) -> None:
        self.host, self.program, self.command = host, program, command
        self.down_until = self.ended_at = 0.0
        self.statuses: list[int] = []
        self.start()

    def start(self) -> None:
        """Start it."""
        self.ended_at = 0.0
        self.host.start(*self.command, program=self.program)

    def look(self) -> None:
        """Start it again where it has ended, and its host is up."""
        now = time.monotonic()
        if self.host.process is None or self.host.process.poll() is None or now < self.down_until:
            return
        self.ended_at = self.ended_at or now
        if now >= self.ended_at + AGAIN_S:
            self.statuses.append(self.host.process.returncode)
            self.start()


class ThreeHosts:
    """All of it, running."""

    def __init__(self, world: World) -> None:
        self._world, self._stack = world, contextlib.ExitStack()
        self.folders = [world.folder / "hosts" / name for name in TRAINERS]
        self.clock_files = world.clocks(*HOSTS)
        self.said_in = ["hosts/*/err-*", "hosts/*/out-*", "state/*/jobs/*/control.log"]
        self.said_in += ["again/err", "again/state/jobs/*/control.log"]

    def __enter__(self) -> Self:
        with self._stack:
            self._begin()
            self._kept = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.close()

    def _begin(self) -> None:
        enter, world = self._stack.enter_context, self._world
        self.net = Net(PORT)
        ports = []
        for number, name in enumerate(HOSTS, start=1):
            pid, address = enter(namespace()), f"10.77.0.{number}"
            self.net.addresses[name], self.net.options[name] = address, []
            self.net.prefixes[name] = [*world.enters(), "/usr/bin/env", "nsenter", "-t", str(pid), "-n"]
            ports.append(f"{name}={pid}={address}")
        self.network = Network([*ports, f"{US}=self=10.77.0.100"])
        self._stack.callback(self.network.close)
        places = [Place(self.net.addresses[name], tuple(self.net.prefixes[name][-5:])) for name in HOSTS]
        self.etcd = enter(Cluster(3, world.folder, QUOTA_BYTES, places=places))
        self.harness = _everybody()
        self.log = ["--log", self.etcd.url(PREFIX, ttl=str(TTL_S))]
        self.masters = [self._service(name, master=True) for name in HOSTS]
        self.trainers = [self._service(name, master=False) for name in TRAINERS]

    def _service(self, name: str, *, master: bool) -> Service:
        world = self._world
        folder = world.folder / ("hosts-masters" if master else "hosts")
        folder.mkdir(exist_ok=True)
        host = self._stack.enter_context(_Host(self.net, name, folder))
        host.state = world.folder / "state" / f"{name}{'-master' * master}"
        # Gloo listens where the machine's own name leads, and all hosts have the same.
        host.environment = world.environment(name) | {"GLOO_SOCKET_IFNAME": "eth0"}
        at = [f"{self.net.addresses[one]}:{PORT}" for one in HOSTS]
        if master:
            size = ("--nnodes", "2", "--nproc-per-node", "2", "--job-id", "rough", *ENDLESS)
            bind = f"{self.net.addresses[name]}:{PORT}"
            return Service(host, "dlrover", ("master", *size, *world.options, "--bind", bind, *self.log))
        script = (str(SCRIPTS / "stormy.py"), str(world.stored), "--pause", str(world.pause))
        size = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "rough")
        return Service(host, "dlrover-run", ("--master", ",".join(at), *size, *script))

    # ---- as strikes see it

    def services(self) -> list[Service]:
        """Everything that is started again."""
        return [*self.masters, *self.trainers]

    def living(self, role: str) -> list[Process]:
        """Its processes of a role, the oldest first."""
        if role == "dlrover-sweeper":
            parents = [one.host.process.pid for one in self.trainers if one.host.process is not None]
            return [each for one in parents for each in children(one, role)]
        found = [each for one in self.services() for each in _of(one.host)]
        return sorted((one for one in found if one.name.startswith(role)), key=lambda one: one.pid)

    def prefix(self, pid: int) -> list[str]:
        """What a command begins with to run on the host of a process."""
        return ["/usr/bin/env", "nsenter", "-t", str(pid), "-n"]

    def check_alive(self) -> None:
        """Start again what has ended. Raises AssertionError where a launcher has ended by itself, not by our hand."""
        for one in self.trainers:
            status = one.host.process.poll() if one.host.process is not None else None
            assert status in (None, -9), (
                f"dlrover-run on host {one.host.name} ended with {status}: {one.host.said()[-600:]}"
            )
        for one in self.services():
            one.look()

    def kill_host(self, name: str, down_s: float) -> None:
        """Everything on a host at once; its services come back later."""
        for one in self.services():
            if one.host.name == name:
                one.down_until = time.monotonic() + down_s
        for _ in range(KILLS):  # who waits for a frozen disk dies later
            found = [each for one in self.services() if one.host.name == name for each in _of(one.host)]
            if not found:
                break
            for each in found:
                with contextlib.suppress(ProcessLookupError):
                    each.kill()
            time.sleep(0.05)
        with contextlib.suppress(EtcdError):
            self.etcd.kill(HOSTS.index(name))

    def start_member(self, member: int) -> None:
        """Start a member of etcd that was killed."""
        with contextlib.suppress(EtcdError):
            self.etcd.start(member)

    # ---- its end

    def marks(self) -> list[str]:
        """What its processes have in their environment."""
        return [f"FOLDER={one.host.folder}" for one in self.services()]

    def ends(self, patience: Patience) -> list[dict[str, Any]]:
        """Let it end; how its launchers and masters did."""

        def all_up() -> bool:
            self.check_alive()
            return all(one.host.process is not None and one.host.process.poll() is None for one in self.services())

        patience.until(all_up, "all hosts", END_S)
        for one in self.trainers:
            one.host.finish()

        def over() -> bool:
            ended = [one.host.process is not None and one.host.process.poll() is not None for one in self.services()]
            return all(ended)

        said = [f"{one.host.name}: {one.host.said()[-300:]}" for one in self.services()]
        patience.until(over, f"the job's end; {said}", END_S)
        found = []
        for one in self.services():
            assert one.host.process is not None
            # Killed ones were killed by strikes; one that began while its etcd did not answer said so, and was started again.
            statuses = [
                *(each for each in one.statuses if each not in (-9, os.EX_TEMPFAIL)),
                one.host.process.returncode,
            ]
            found += [{"what": f"{one.program} on host {one.host.name}", "status": each} for each in statuses]
        return found

    def ours(self) -> list[int]:
        """The processes that are the harness's."""
        return [*self.harness, *self.etcd.pids()]


def _of(host: Host) -> list[Process]:
    return processes(f"FOLDER={host.folder}")


class _Host(Host):
    """A host, without a word on our terminal when it is left by an exception: its folder is kept."""

    def __exit__(self, *_: object) -> None:
        super().__exit__(None, None, None)


def _everybody() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]


class RoughHosts(Rough):
    """Strikes of the network and of etcd, too."""

    def __init__(self, job: ThreeHosts, *arguments: Any, **named: Any) -> None:
        super().__init__(job, *arguments, **named)
        self._job = job
        self._does |= {
            "cut": self._cut,
            "loss": self._impair,
            "delay": self._impair,
            "host": self._host,
            "etcd-kill": self._etcd_kill,
            "etcd-stop": self._etcd_stop,
            "etcd-full": self._etcd_full,
            "etcd-wipe": self._etcd_wipe,
        }
        self._over = threading.Event()
        self._janitor = threading.Thread(target=self._tidy, name="janitor", daemon=True)
        self._janitor.start()

    def close(self) -> None:
        """Have no stranger left, and nobody who tidies up."""
        self._over.set()
        self._janitor.join()
        super().close()

    def _tidy(self) -> None:
        """End etcd's alarms of space that no strike means.

        A member that was cut off when the strike was taken back writes its ballast later, and raises the alarm again. Until
        somebody ends it nothing can be written: for the witness the strike goes on.
        """
        while not self._over.wait(TIDY_S):
            if "etcd" in self._busy:
                continue
            with contextlib.suppress(*FAILURES):
                if not self._job.etcd.alarms():
                    continue
                self._busy.add("etcd")
                number = self._diary.begins("etcd-full", "again", lasts=True, start=time.monotonic() - TIDY_S)
                try:
                    self._job.etcd.make_room(QUOTA_BYTES // 2)
                finally:
                    self._diary.ends(number)
                    self._busy.discard("etcd")

    def _cut(self, strike: Strike) -> bool:
        if self._taken("cut"):
            return False
        host, others = strike.target, [one for one in HOSTS if one != strike.target]
        out = [[host, one] for one in others] if strike.which < 0.75 else []
        back = [[one, host] for one in others] if strike.which < 0.5 or strike.which >= 0.75 else []

        def undo() -> None:
            self._job.network.tell(cuts=[])
            self._busy.discard("cut")

        self._job.network.tell(cuts=[*out, *back])
        self._noted(strike, undo, ways=len(out) // 2 + len(back) // 2)
        return True

    def _impair(self, strike: Strike) -> bool:
        if self._taken(strike.kind):
            return False
        name = "loss" if strike.kind == "loss" else "delay_s"

        def undo() -> None:
            self._job.network.tell(**{name: 0.0})
            self._busy.discard(strike.kind)

        self._job.network.tell(**{name: strike.amount})
        self._noted(strike, undo, amount=strike.amount)
        return True

    def _host(self, strike: Strike) -> bool:
        if self._taken("etcd"):
            return False

        def undo() -> None:
            self._job.start_member(HOSTS.index(strike.target))
            self._busy.discard("etcd")

        self._noted(strike, undo)
        self._job.kill_host(strike.target, strike.lasts_s)
        return True

    def _member(self, which: float) -> int:
        """One of etcd's members: the leader half of the time."""
        with contextlib.suppress(EtcdError):
            if which < 0.5:
                return self._job.etcd.leader()
        return int(which * 1000) % 3

    def _etcd_kill(self, strike: Strike) -> bool:
        if self._taken("etcd"):
            return False
        member = self._member(strike.which)

        def undo() -> None:
            self._job.start_member(member)
            self._busy.discard("etcd")

        self._noted(strike, undo, member=member)
        self._job.etcd.kill(member)
        return True

    def _etcd_stop(self, strike: Strike) -> bool:
        if self._taken("etcd"):
            return False
        member = self._member(strike.which)

        def undo() -> None:
            self._job.etcd.resume(member)
            self._busy.discard("etcd")

        self._noted(strike, undo, member=member)
        self._job.etcd.pause(member)
        return True

    def _etcd_full(self, strike: Strike) -> bool:
        if self._taken("etcd"):
            return False
        etcd, over = self._job.etcd, threading.Event()

        def fill() -> None:
            with contextlib.suppress(OSError):
                for number in range(2 * QUOTA_BYTES // FULL_BYTES):
                    if over.is_set():
                        return
                    etcd.put(f"{BALLAST}{number}", "x" * FULL_BYTES)

        filling = threading.Thread(target=fill, name="ballast", daemon=True)

        def undo() -> None:
            over.set()
            filling.join()
            etcd.delete(BALLAST)
            etcd.make_room(QUOTA_BYTES // 2)
            self._busy.discard("etcd")

        self._noted(strike, undo)
        filling.start()
        return True

    def _etcd_wipe(self, strike: Strike) -> bool:
        if self._taken("etcd"):
            return False
        member = self._member(strike.which)

        def undo() -> None:
            self._job.etcd.replace(member)
            # It replays the ballast of an earlier strike, and complains of space though the others' files are small again.
            self._job.etcd.make_room(QUOTA_BYTES // 2)
            self._busy.discard("etcd")

        self._noted(strike, undo, member=member)
        self._job.etcd.lose(member)
        return True
