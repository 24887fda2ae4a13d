"""Ray clusters on this machine, and one training loop in them under our launcher or Ray Train's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from _bench import HERE, say
from _jobs import OURS, Broken, Job, Line, kept

from dlrover_backends.shared import process

SCRIPT, GROUND = HERE / "scripts" / "ray_step.py", HERE / "scripts" / "ray_ground.py"
TRAIN, QUICK_TRAIN = "Ray Train", "Ray Train at its quickest"
QUICKEST = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1"}
RESIZE_S = "5"
"""`QUICK_TRAIN` looks so often at workers, at notices and, in seconds, for room; Ray Train does every 2, 5 and 60 s."""
ON_DISK = {"RAY_gcs_storage": "rocksdb"}
"""With it a cluster's state outlives the process that holds it."""
LOCAL = "the local backend"
RESTARTS = ("--max-restarts", "100")
"""More than are killed: Ray Train's failures are unlimited, too."""
NEEDS = {
    "pandas": "pandas",
    "tensorboardX": "tensorboardX",
    "pyarrow": "pyarrow",
    "fsspec": "fsspec",
    "requests": "requests",
    "pydantic": "pydantic",
    "dateutil": "python-dateutil",
    "six": "six",
}
"""The module names of what ``ray[train]`` installs beside Ray itself."""
ORDER_S, START_S = 60.0, 90.0


class Ground:
    """A running cluster."""

    def __init__(self, orders: TextIO, answers: TextIO) -> None:
        self._orders, self._answers = orders, answers
        told = self._heard(START_S)
        self.pid, self.address = int(told["pid"]), str(told["address"])

    def order(self, order: str, **told: Any) -> Any:
        """Have something done to the cluster; what came of it. Raises `Broken`."""
        self._orders.write(json.dumps({"order": order, **told}) + "\n")
        self._orders.flush()
        return self._heard(ORDER_S)

    def host_of(self, pid: int) -> str:
        """The host on which a process is: the one whose raylet is above it. Raises `Broken`."""
        raylets = {int(raylet): host for host, raylet in self.order("raylets").items()}
        for one in above(pid):
            if one in raylets:
                return raylets[one]
        raise Broken(f"no raylet is above process {pid}")

    def _heard(self, bound_s: float) -> Any:
        if not select.select([self._answers], [], [], bound_s)[0]:
            raise Broken(f"the cluster said nothing for {bound_s:g} s")
        line = self._answers.readline()
        if not line:
            raise Broken("the cluster's process has ended")
        return json.loads(line)


@contextlib.contextmanager
def ground(hosts: int, **more: str) -> Iterator[Ground]:
    """A cluster of so many raylets, each with one CPU; nothing of it is left at the end. ``more``: variables of its own."""
    mark = os.urandom(16).hex()
    folder = tempfile.mkdtemp(prefix="rb-", dir="/tmp")  # not below TMPDIR: a socket's address has 107 bytes
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DLROVER", "RAY_"))}
    env |= {process.MARK: mark, **_peers_path(), **more}
    with Path(folder, "ground.log").open("w", encoding="utf-8") as said:
        child = subprocess.Popen(
            [sys.executable, str(GROUND), folder, str(hosts)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield Ground(child.stdin, child.stdout)
    finally:
        child.kill()
        # Raylets, their workers and all that these have started bear the mark, or belong to the session.
        process.kill_all(mark, child.pid, 20.0)
        child.wait()
        child.stdin.close()
        child.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_job(launcher: str, cluster: Ground | None, nodes: str, *options: str) -> Iterator[Job]:
    """The loop under a launcher, with ``nodes`` (``MIN:MAX``) of one worker each. No cluster: our local backend, two nodes.

    ``options``: more for our launcher in a cluster
    """

    def make(folder: Path) -> Job:
        job = Job(OURS, folder, (), script=SCRIPT)
        script = job.command[job.command.index(str(SCRIPT)) :]
        if cluster is None:
            job.command = [*job.command[:5], "--local-nodes", "2", "--nproc-per-node", "1", *RESTARTS, *script]
            return job
        if launcher in {TRAIN, QUICK_TRAIN}:
            job.command = [sys.executable, *script, "--trainer", nodes]
            job.env = {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_V2_ENABLED": "1", **_peers_path()}
            if launcher == QUICK_TRAIN:
                job.command += ["--resize", RESIZE_S]
                job.env |= QUICKEST
            return job
        ours = ("--backend", "ray", "--ray-address", cluster.address, "--resources", "CPU=1", "--bind", "127.0.0.1")
        job.command = [
            *job.command[:5],
            *ours,
            "--nnodes",
            nodes,
            "--nproc-per-node",
            "1",
            *RESTARTS,
            *options,
            *script,
        ]
        return job

    with kept(make) as job:
        yield job


def _peers_path() -> dict[str, str]:
    """Where Ray Train finds what it needs; this environment's own where it has all of it."""
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return {}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "dlrover-bench" / "ray-train"
    if not (home / "pandas").exists():
        say(f"installing what Ray Train needs in {home}, once: {', '.join(missing)}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home), *missing]
        subprocess.run(command, check=True)
    return {"PYTHONPATH": str(home)}


def above(pid: int) -> Iterator[int]:
    """The process, its parent, and so on."""
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return


def stepping(lines: Sequence[Line], ranks: int, beside: set[int], since: float = 0.0) -> float:
    """When so many ranks of one world, none of them in ``beside``, had all made a step; 0: not yet."""
    worlds: dict[int, int] = {}
    for line in lines:
        if line.what == "begin":
            worlds[line.pid] = line.step
    firsts: dict[int, dict[int, float]] = {}
    for line in lines:
        size = worlds.get(line.pid, 0)
        if line.what == "step" and line.pid not in beside and size == ranks and line.at > since:
            firsts.setdefault(line.attempt, {}).setdefault(line.rank, line.at)
    return min((max(one.values()) for one in firsts.values() if len(one) == ranks), default=0.0)


def stopped_for(lines: Sequence[Line], since: float, until: float) -> float:
    """The longest time between two steps of anybody, between two moments."""
    at = sorted(line.at for line in lines if line.what == "step" and since - 5 <= line.at <= until)
    return max((after - before for before, after in pairwise(at) if after > since), default=0.0)


def twice(lines: Sequence[Line]) -> int:
    """How many steps were trained again: a world had gone further than the step at which the next one began."""
    top, again = 0, 0
    for line in lines:
        if line.what == "step" and line.rank == 0:
            again += line.step <= top
            top = max(top, line.step)
    return again


def now() -> float:
    """Seconds by CLOCK_MONOTONIC."""
    return time.monotonic()
