"""The campaign `ray_seeds`: each seed is one real job in a real Ray cluster of three raylets on this machine.

Workers, agents, actors, the desk, masters and raylets are killed with SIGKILL, raylets are frozen past their death and thawed,
hosts are drained and added, and the cluster's state service is away for some seconds, at moments that the seed draws. In a
quarter of the seeds the command that started the job is killed with all masters beside it, and the cluster's own lead. At any
time no rank may have two living processes, and the steps of each rank must be one chain. Afterwards the job trains with both of
its nodes and ends well, no node was launched that no blow explains, and the cluster has no actor, no placement group, no key and
no process of it.

One cluster serves many seeds, each a job in a namespace of its own; its state is on disk (RocksDB).

    python -m tools.campaign_ray SEED [SEED ...]    these trials, in words

The files of a trial that breaks a promise stay in a folder that it names.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tools.trials import Found, Patience, Trials

from dlrover_backends.ray.endings import NOT_STARTED

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "integration" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from chain import Link, flaws, links  # noqa: E402  # it lies with the tests
from running import BIN, NO_TORCH, Job  # noqa: E402  # as above
from tests.integration.ray_grounds import RayGround, desk_of, parent_of, processes_of, ray_ground  # noqa: E402  # as above

SEEDS, JOBS = 200, 1
PROCESSES = ("worker", "agent", "actor", "desk", "master")
KINDS = (*PROCESSES, "actor", "raylet", "raylet", "freeze", "drain", "drain", "add", "state", "state")
MEANWHILE = (*PROCESSES, "raylet", "")
SHAPES = ("2", "2", "1:2")
DRIVERS = 0.25
HOSTS, NODES, CPUS = 3, 2, 2
PAUSES_S, DRAINS_S, FROZEN_S, AWAY_S = (0.0, 4.0), (1.0, 8.0), (0.5, 8.0), (0.5, 8.0)
LIMIT_S, GONE_S, LOOK_S, SETTLED_STEPS = 240.0, 30.0, 0.05, 5
SEEDS_OF_A_CLUSTER = 20
LINE = (
    *("--bind", "127.0.0.1", "--resources", "CPU=1", "--preload", "none"),
    *("--max-restarts", "50", "--relaunch-max", "50"),
    *("--set", "stop_grace_s=5", "--set", "restart_pause_s=1", "--set", "last_call_s=3", "--set", "grow_window_s=3"),
)
STORED = {"RAY_gcs_storage": "rocksdb", "PYTHONPATH": NO_TORCH}
LAUNCHES = {"agent": 1, "actor": 1, "raylet": NODES, "freeze": NODES, "drain": NODES}
"""How many nodes a blow may cost. A worker is started again by its agent."""


class Blow(NamedTuple):
    """One thing that happens.

    pause_s:   seconds after the blow before
    kind:      what, of `KINDS`
    which:     to which of those that it may happen to
    for_s:     seconds of a drain's notice, a freeze or an outage; for a drain 0: no deadline
    meanwhile: what else is killed during an outage, of `MEANWHILE`
    """

    pause_s: float
    kind: str
    which: int
    for_s: float = 0.0
    meanwhile: str = ""


class Plan(NamedTuple):
    """One trial.

    nnodes: nodes of the job, as ``--nnodes`` takes them
    early:  do the blows begin before all ranks train?
    blows:  what happens
    driver: before which of these the command that started the job is killed; negative: it lives
    """

    nnodes: str
    early: bool
    blows: tuple[Blow, ...]
    driver: int = -1

    @property
    def launches_max(self) -> int:
        """How many nodes may have been launched at the end."""
        struck = [one for blow in self.blows for one in (blow.kind, blow.meanwhile)]
        return NODES + sum(LAUNCHES.get(one, 0) for one in struck)

    @property
    def is_calm(self) -> bool:
        """Does nothing happen to any node?"""
        return all({blow.kind, blow.meanwhile} <= {"desk", "master", "state", "add", ""} for blow in self.blows)


def drawn(seed: int) -> Plan:
    """The plan of a seed. The head's raylet is never struck: the state service that it has cannot move."""
    dice = random.Random(f"ray.{seed}")

    def blow() -> Blow:
        kind = dice.choice(KINDS)
        pause_s, which = round(dice.uniform(*PAUSES_S), 2), dice.randrange(60)
        lasts = {"drain": DRAINS_S, "freeze": FROZEN_S, "state": AWAY_S}.get(kind, (0.0, 0.0))
        for_s, meanwhile = round(dice.uniform(*lasts), 2), dice.choice(MEANWHILE)
        if kind == "drain" and not which % 5:
            for_s = 0.0
        return Blow(pause_s, kind, which, for_s, meanwhile if kind == "state" else "")

    plan = Plan(dice.choice(SHAPES), dice.random() < 0.2, tuple(blow() for _ in range(dice.randrange(2, 5))))
    return plan._replace(driver=dice.randrange(len(plan.blows)) if dice.random() < DRIVERS else -1)


class Trial:
    """One job, and what is done to it."""

    def __init__(self, ground: RayGround, folder: Path, plan: Plan, patience: Patience) -> None:
        self._ground, self._folder, self._plan, self._patience = ground, folder, plan, patience
        self._due: list[tuple[float, str, str]] = []
        """When (CLOCK_MONOTONIC) which signal goes to the raylet of which host."""
        self._struck: list[str] = []
        self._driver_is_dead = False
        line = ("--backend", "ray", "--ray-address", ground.address, "--nnodes", plan.nnodes, *LINE)
        self._job = Job(
            folder, *line, str(SCRIPTS / "chain.py"), str(folder), "--child", job=f"seed-{os.urandom(6).hex()}"
        )

    def run(self) -> Found:
        """Play it to its end. Raises AssertionError."""
        with self._job as job:
            if self._plan.early:
                self._until(lambda: bool(job.settings), "the launcher's settings")
            else:
                self._until(self._well, "both ranks at the start")
            run, before = str(job.settings["run"]), self.ranks()
            for number, blow in enumerate(self._plan.blows):
                if number == self._plan.driver:
                    self._kill_driver()
                self._rest(blow.pause_s)
                self._strike(run, blow)
            self._rest(max([0.0, *(at - time.monotonic() for at, _, _ in self._due)]))
            struck = self._made()
            self._until(lambda: self._well() and self._went_on(struck), "both ranks after all blows")
            if self._plan.is_calm and not self._plan.early:
                assert self.ranks() == before, f"ranks were restarted for nothing: {before}, and now {self.ranks()}"
            job.finish()
            self._until_over()
            planned = self._ended_well()
        self._nothing_left(run)
        self._tidy()
        driver = ["driver"] if self._driver_is_dead else []
        return {"blows": [*(blow.kind for blow in self._plan.blows), *driver], "nodes": planned}

    # ---- what must hold

    def ranks(self) -> dict[int, int]:
        """The living process of each rank. Raises AssertionError where one has two."""
        found: dict[int, set[int]] = {}
        for rank in range(NODES):
            for pid in {one.pid for one in links(self._folder, rank)}:
                if _lives(pid):
                    found.setdefault(rank, set()).add(pid)
        assert all(len(pids) == 1 for pids in found.values()), f"a rank has two living processes: {found}"
        return {rank: pids.pop() for rank, pids in found.items()}

    def _well(self) -> bool:
        status = self._job.status()
        return (
            status is not None
            and not status["open_incidents"]
            and status["world_size"] == NODES
            and status["state"] == "running"
            and len(self.ranks()) == NODES
        )

    def _made(self) -> dict[int, int]:
        """The newest step of each rank."""
        return {rank: _newest(self._folder, rank).step for rank in range(NODES)}

    def _went_on(self, since: dict[int, int]) -> bool:
        return all(step > since[rank] + SETTLED_STEPS for rank, step in self._made().items())

    def _ended_well(self) -> int:
        """The log says that all went well, and each rank's steps are one chain. How many nodes were launched."""
        events = self._job.events()
        assert any(one["event"] == "JobSucceeded" for one in events), events[-1]
        planned = sum(one["event"] == "NodePlanned" for one in events)
        # Ray loses an actor that is being made while its state service dies.
        lost = sum(one["fields"].get("reason", "").startswith(NOT_STARTED) for one in events)
        most = self._plan.launches_max + lost
        assert planned <= most, f"{planned} nodes were launched, of at most {most}"
        for rank in range(NODES):
            wrong = flaws(links(self._folder, rank), rank)
            assert not wrong, f"rank {rank}: {wrong[:3]}"
        return planned

    def _nothing_left(self, run: str) -> None:
        left: dict[str, Any] = {}

        def nothing() -> bool:
            nonlocal left
            processes, files = processes_of(run), self._job.left()
            left = {"processes": processes, "files": files, **self._ground.order("left", prefix="dlrover")}
            return not any(left.values())

        deadline = time.monotonic() + GONE_S
        while not nothing():
            assert time.monotonic() < deadline, f"left behind: {left}"
            self._patience.sleep(LOOK_S)

    # ---- waiting

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            ended = self._job.process.poll() is not None and not self._driver_is_dead
            assert not ended, f"the job has ended before {what}: {self._job.said()[-3000:]}"
            late = time.monotonic() > deadline
            assert not late, f"{what}: not within {LIMIT_S:g} s; in Ray: {self._ground.order('left', prefix='dlrover')}"
            self._rest(2 * LOOK_S)

    def _until_over(self) -> None:
        """Wait for the good end; of a job that the cluster leads, have removed what it keeps of it."""
        if not self._driver_is_dead:
            code = self._job.ended(LIMIT_S)
            assert code == 0, f"it ended with {code}: {self._job.said()[-3000:]}"
            return
        self._until(lambda: bool(self._job.events("JobSucceeded")), "the job's end")
        words = [str(BIN / "dlrover"), "stop", f"ray:{self._job.name}"]
        env = {**os.environ, "RAY_ADDRESS": self._ground.address}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, f"dlrover stop: {done.returncode} {done.stdout} {done.stderr}"

    def _rest(self, seconds: float) -> None:
        """Let time pass; do what falls due in it."""
        until = time.monotonic() + seconds
        while True:
            self.ranks()
            for one in sorted(self._due):
                if one[0] <= time.monotonic():
                    self._due.remove(one)
                    self._ground.order("signal", host=one[1], name=one[2])
            if time.monotonic() >= until:
                return
            self._patience.sleep(LOOK_S)

    # ---- striking

    def _kill_driver(self) -> None:
        """Once the cluster has who leads in its place: it comes seconds after the start."""
        mine = f"{self._job.name}#"
        named = {"namespace": "dlrover-masters"}
        self._until(
            lambda: any(one.startswith(mine) for one in self._ground.order("named", **named)), "a masters' keeper"
        )
        self._job.process.kill()
        self._driver_is_dead = True

    def _strike(self, run: str, blow: Blow) -> None:
        """Do it; to somebody who is gone already it does nothing."""
        if blow.kind == "state":
            self._ground.order("state", **{"is": "gone"})
            self._rest(blow.for_s / 2)
            if blow.meanwhile == "raylet":
                self._lose(self._host(blow))
            elif blow.meanwhile:
                self._kill(run, blow.meanwhile, blow.which)
            self._rest(blow.for_s / 2)
            self._ground.order("state", **{"is": "back"})
        elif blow.kind in PROCESSES:
            self._kill(run, blow.kind, blow.which)
            return
        elif blow.kind != "add":
            self._strike_host(blow)
        if len(self._ground.hosts) < HOSTS or blow.kind == "add":  # another one comes, so that there is room
            self._ground.add(num_cpus=CPUS, node_name=f"host-{time.monotonic_ns()}")

    def _kill(self, run: str, kind: str, which: int) -> None:
        found = {
            "worker": lambda: list(self.ranks().values()),
            "agent": lambda: _agents(run),
            "actor": lambda: [parent_of(pid) for pid in _agents(run)],
            "desk": lambda: _desks(self._folder),
            "master": lambda: [one.pid for one in self._job.processes("dlrover-master")],
        }[kind]
        with contextlib.suppress(OSError):
            struck = sorted(found())
            if struck:
                os.kill(struck[which % len(struck)], signal.SIGKILL)

    def _strike_host(self, blow: Blow) -> None:
        host = self._host(blow)
        now = time.monotonic()
        if blow.kind == "raylet":
            self._lose(host)
        elif blow.kind == "freeze":
            self._ground.order("signal", host=host, name="SIGSTOP")
            self._leave(host)
            self._due.append((now + blow.for_s, host, "SIGCONT"))
        else:
            at_ms = int((time.time() + blow.for_s) * 1000) if blow.for_s else 0
            self._ground.order("drain", host=host, reason="PREEMPTION", deadline_ms=at_ms)
            self._leave(host)
            if blow.for_s:
                self._due.append((now + blow.for_s, host, "SIGKILL"))

    def _host(self, blow: Blow) -> str:
        """One of those that are not the head's."""
        return self._ground.hosts[1 + blow.which % (len(self._ground.hosts) - 1)]

    def _lose(self, host: str) -> None:
        self._ground.order("signal", host=host, name="SIGKILL")
        self._leave(host)

    def _leave(self, host: str) -> None:
        self._ground.hosts.remove(host)
        self._struck.append(host)

    def _tidy(self) -> None:
        """Leave the cluster as it was: with so many raylets, none of them on its way out."""
        ground = self._ground
        while len(ground.hosts) > HOSTS:
            self._struck.append(ground.hosts.pop(1))
        for host in self._struck:
            ground.order("remove", host=host)


def _lives(pid: int) -> bool:
    """Zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in {b"Z", b"X"}
    except OSError:
        return False


def _newest(folder: Path, rank: int) -> Link:
    return next(reversed(links(folder, rank)), Link(0, "", 0, 0, 0.0))


def _agents(run: str) -> list[int]:
    """The agents of a run: the first process of each node, whose parent is the actor."""
    found = set(processes_of(run))
    return [pid for pid in sorted(found) if b"DLROVER_NODE=" in _environ(pid) and parent_of(pid) not in found]


def _environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def _desks(folder: Path) -> list[int]:
    with contextlib.suppress(AssertionError):
        return [desk_of(folder)]
    return []


class _Ground(NamedTuple):
    """A cluster. ``served``: how many trials it has had; ``stack``: what ends it."""

    ground: RayGround
    stack: contextlib.ExitStack
    served: int = 0


class Grounds:
    """Clusters that serve one trial after another, one for each trial that runs."""

    def __init__(self) -> None:
        self._free: list[_Ground] = []

    def close(self) -> None:
        """End those that serve nobody."""
        while self._free:
            self._free.pop().stack.close()

    def trial(self, seed: int, patience: Patience) -> Found:
        """One trial. A cluster in which one broke a promise serves no other. Raises AssertionError."""
        try:
            one = self._free.pop()
        except IndexError:
            one = _new_ground()
        with contextlib.ExitStack() as stack:
            stack.push(one.stack)
            with tempfile.TemporaryDirectory(prefix="ray-seeds-") as folder:
                try:
                    found = Trial(one.ground, Path(folder), drawn(seed), patience).run()
                except AssertionError as error:
                    raise AssertionError(
                        f"{_kept(seed, Path(folder), one.ground.folder)} has its files: {error}"
                    ) from error
            if one.served + 1 < SEEDS_OF_A_CLUSTER:
                stack.pop_all()
                self._free.append(one._replace(served=one.served + 1))
        return found


def _kept(seed: int, job: Path, cluster: Path) -> Path:
    """Where the files of a broken trial are from now on: the job's, and the logs of Ray."""
    kept = Path(tempfile.mkdtemp(prefix=f"ray-seeds-broken-{seed}-"))
    for folder, name in ((job, "job"), (cluster / "ray" / "session_latest" / "logs", "ray")):
        with contextlib.suppress(OSError):  # of sockets
            shutil.copytree(folder, kept / name, symlinks=True)
    return kept


def _new_ground() -> _Ground:
    stack = contextlib.ExitStack()
    hosts = [{"num_cpus": CPUS, "node_name": f"host-{number}"} for number in range(HOSTS)]
    return _Ground(stack.enter_context(ray_ground(*hosts, env=STORED)), stack)


def sums(found: list[Found]) -> Found:
    """How many blows of each kind there were, and how many nodes were launched."""
    kinds = Counter(kind for one in found for kind in one.get("blows", ()))
    return {"blows": dict(sorted(kinds.items())), "nodes": sum(one.get("nodes", 0) for one in found)}


def campaign(seed: int, trials: int, machine: dict[str, Any], jobs: int) -> int:
    """Go on where an earlier one stopped, ``jobs`` trials side by side; 1 where a trial broke a promise."""
    with contextlib.closing(Grounds()) as grounds:
        return int(Trials("ray_seeds", range(seed, seed + trials), {}, machine, sums).run(grounds.trial, jobs) > 0)


if __name__ == "__main__":
    with contextlib.closing(Grounds()) as made:
        for number in map(int, sys.argv[1:]):
            began = time.monotonic()
            sys.stdout.write(f"{drawn(number)}\n")
            told = made.trial(number, Patience())
            sys.stdout.write(f"{json.dumps(told)} in {time.monotonic() - began:.1f} s\n")
            sys.stdout.flush()
