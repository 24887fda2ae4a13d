"""A job on a Ray cluster: what goes wrong, and how long until the next step? Ours, and Ray Train in turn.

Real raylets on this machine, one CPU each, with Ray's own settings; one loop (`scripts/ray_step.py`) under `dlrover-run
--backend ray` and under Ray Train 2.60's `TorchTrainer`, with unlimited failures, its preemption watcher on, and elastic
(1 to 2 workers) where the job may shrink. Each trial has a cluster of its own. Times are by CLOCK_MONOTONIC, from a diary that
workers write.

- failing: from the command, with the cluster there, to the first step of both ranks; then SIGKILL to a worker's process, whose
  actor lives on (beside it the same with our local backend; Ray Train's worker is its actor); then SIGKILL to an actor's process;
- raylet: SIGKILL to the raylet of a rank's host, with a third host idle; until two ranks step again. Ours once more with
  ``--standby 1``, whose agent answers from the third host;
- drain: a rank's host is drained with a notice, a third host is idle, and the raylet is killed at the deadline. Counted are steps
  that were made twice, and the longest time without a step;
- room: a job of 1 to 2 nodes has one; a second host comes; until both ranks step;
- idle: nodes that Ray holds, of which nothing is heard: the share of a core that desk and observer take together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import BROKEN, RESULTS, Result, Row, options, say
from _jobs import OURS, Broken, Job
from _ray import LOCAL, TRAIN, Ground, above, ground, lost, now, ray_job, stepping, stopped_for

from dlrover_adapters.http.client import fetch_status
from dlrover_core import BackendContext, Listed
from dlrover_core.errors import CoreError
from dlrover_core.testing.backend_stand import make_launch

MEASURES = (
    "src/adapters/dlrover_adapters/agent",
    "src/adapters/dlrover_adapters/cli",
    "src/backends/dlrover_backends/ray",
    "src/backends/dlrover_backends/shared",
    "src/dlrover_core/job",
    "src/dlrover_core/runtime",
)

WORKER_S, HALF, WARM, START, DRAIN, ROOM, CORE = 0.1, 0.5, 0.25, 1.0, 0.3, 0.3, 5.0
CALM_STEPS = 20
BACK_LIMIT_S, ROOM_LIMIT_S = 90.0, 150.0
SETTLE_S = 2.0
SMALL, TOLD = "CPU=0.001", "told.json"
IDLE_LIMIT_S = 300.0


# ---- in one job


def calm(job: Job, ranks: int, beside: set[int]) -> set[int]:
    """Wait until so many ranks have trained undisturbed for a while; the processes seen so far."""
    at = stepping(job.until(lambda lines: stepping(lines, ranks, beside) > 0, 0.01), ranks, beside)
    job.until(
        lambda lines: sum(one.what == "step" and one.rank == 0 and one.at > at for one in lines) >= CALM_STEPS, 0.01
    )
    return {one.pid for one in job.lines()}


def worker_of(job: Job, rank: int) -> int:
    """The newest process of a rank."""
    return next(one.pid for one in reversed(job.lines()) if one.rank == rank)


def back(job: Job, ranks: int, beside: set[int], since: float, limit_s: float = BACK_LIMIT_S) -> float:
    """Seconds from ``since`` until so many new ranks have stepped."""
    lines = job.until(lambda lines: stepping(lines, ranks, beside) > 0, 0.005, limit_s)
    return stepping(lines, ranks, beside) - since


def killed(pid: int) -> float:
    """When it was killed."""
    at = now()
    os.kill(pid, signal.SIGKILL)
    return at


def actor_of(pid: int) -> int:
    """The process of Ray's worker above a process of ours, or itself. Raises `Broken`."""
    for one in above(pid):
        words = Path(f"/proc/{one}/cmdline").read_bytes()
        if words.startswith(b"ray::"):
            return one
    raise Broken(f"no actor is above process {pid}")


# ---- stories: each one trial of one launcher


def failing(launcher: str) -> dict[str, float]:
    """Start; a killed worker, where it is not the actor; a killed actor."""
    found = {}
    with ground(2) as cluster, ray_job(launcher, cluster, "2:2") as job:
        lines = job.until(lambda lines: stepping(lines, 2, set()) > 0, 0.005)
        found["start"] = stepping(lines, 2, set()) - job.started
        before = calm(job, 2, set())
        if launcher == OURS:
            found["worker"] = back(job, 2, before, killed(worker_of(job, 1)))
            before = calm(job, 2, before)
        found["actor"] = back(job, 2, before, killed(actor_of(worker_of(job, 1))))
    return found


def local(_: str) -> dict[str, float]:
    """A killed worker of the local backend."""
    with ray_job(LOCAL, None, "2:2") as job:
        before = calm(job, 2, set())
        return {"local": back(job, 2, before, killed(worker_of(job, 1)))}


def raylet(launcher: str) -> dict[str, float]:
    """A raylet is killed; there is room elsewhere, and then a warm node of ours."""
    found = {"raylet": _raylet(launcher)}
    if launcher == OURS:
        found["warm"] = _raylet(launcher, "--standby", "1")
    return found


def _raylet(launcher: str, *options: str) -> float:
    with ground(3) as cluster, ray_job(launcher, cluster, "1:2", *options) as job:
        before = calm(job, 2, set())
        if options:
            job.until(lambda _: standbys(job) == 1, 0.2)
        at = float(cluster.order("kill", host=victim(job, cluster)))
        return back(job, 2, before, at)


def standbys(job: Job) -> int:
    """How many agents wait for the place of a dead node."""
    settings = json.loads((job.folder / "jobs" / "bench" / "settings.json").read_text())
    try:
        told = asyncio.run(fetch_status(settings["masters"][0], job.token, timeout_s=2.0))
    except CoreError:
        return 0
    return int(told["standbys"])


def victim(job: Job, cluster: Ground) -> str:
    """The host of rank 1; of rank 0 where that one has the state service, which is no raylet's failure. Raises `Broken`."""
    for rank in (1, 0):
        host = cluster.host_of(worker_of(job, rank))
        if host != "host-0":
            return host
    raise Broken("both ranks are on the head")


def drained(launcher: str, notice_s: float) -> dict[str, float]:
    """A host is drained, and goes at its deadline."""
    with ground(3) as cluster, ray_job(launcher, cluster, "1:2") as job:
        before = calm(job, 2, set())
        host = victim(job, cluster)
        at = float(cluster.order("drain", host=host, notice_s=notice_s))
        limit = at + notice_s
        while now() < limit:
            job.until(lambda _: True)
            time.sleep(0.05)
        cluster.order("kill", host=host)
        lines = job.until(lambda lines: stepping(lines, 2, before) > 0, 0.01, BACK_LIMIT_S)
        until = stepping(lines, 2, before) + SETTLE_S
        lines = job.until(lambda lines: lines[-1].at > until, 0.01, BACK_LIMIT_S)
        return {"drain-lost": float(lost(lines, before)), "drain-stood": stopped_for(lines, at, until)}


def room(launcher: str) -> dict[str, float]:
    """A host more."""
    with ground(1) as cluster, ray_job(launcher, cluster, "1:2") as job:
        before = calm(job, 1, set())
        at = now()
        cluster.order("add")
        return {"room": back(job, 2, before, at, ROOM_LIMIT_S)}


# ---- idle


def idle(nodes: int, living: int, seconds: float) -> dict[str, float]:
    """The share of a core (%) of the desk and of a process that observes, and that process's memory (MiB)."""
    with ground(1) as cluster, tempfile.TemporaryDirectory(prefix="dlb-") as folder:
        words = [sys.executable, __file__, "--child", folder, cluster.address, str(nodes), str(living), str(seconds)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=IDLE_LIMIT_S, check=False)
        if done.returncode:
            raise Broken(f"the observing process failed: {done.stderr.strip()[-800:]}")
        told: dict[str, float] = json.loads(Path(folder, TOLD).read_text(encoding="utf-8"))
        return told


def observing(folder: str, address: str, nodes: int, living: int, seconds: float) -> dict[str, float]:
    """Launch ``nodes``, of which ``living`` find room; then observe them, and do nothing else."""
    from dlrover_backends.ray import backend

    agent = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")

    def made(resources: str) -> Any:
        args = f"address={address},resources={resources.replace('=', '%3D')}"
        here = BackendContext("bench", "idle", ("127.0.0.1:1",), "t", command=agent, directory=folder, args=args)
        return backend(here)

    async def run() -> dict[str, float]:
        small, large = made(SMALL), made("CPU=1000")
        for index in range(nodes):
            await (small if index < living else large).launch(make_launch(index, job="bench"), 1)
        seen = small.observe()
        running = 0
        async for one in seen:
            found = one.nodes if isinstance(one, Listed) else (one.node,)
            running += sum(node.phase == "running" for node in found)
            if running >= living:
                break
        waiting = asyncio.ensure_future(anext(seen))
        await asyncio.sleep(SETTLE_S)
        desk = small._desk.pid
        before, spent, began = time.process_time(), ticks(desk), time.perf_counter()
        await asyncio.wait({waiting}, timeout=seconds)
        took = time.perf_counter() - began
        own, theirs = time.process_time() - before, (ticks(desk) - spent) / os.sysconf("SC_CLK_TCK")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return {"core": 100 * (own + theirs) / took, "desk": 100 * theirs / took, "mib": memory_mib(), "seconds": took}

    return asyncio.run(asyncio.wait_for(run(), IDLE_LIMIT_S))


def memory_mib() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def ticks(pid: int) -> int:
    """Ticks of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


# ---- all together


STORIES: dict[str, Callable[[str], dict[str, float]]] = {"failing": failing, "raylet": raylet, "room": room}
PARTS = ("failing", "raylet", "drain", "room", "idle")


def trial(part: str, chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One round of a part: every launcher in turn."""
    found: dict[str, dict[str, float]] = {}
    for launcher in chosen.under:
        if part == "idle":
            if launcher == OURS:
                found[launcher] = idle(chosen.nodes, chosen.living, chosen.seconds)
            continue
        found[launcher] = drained(launcher, chosen.notice) if part == "drain" else STORIES[part](launcher)
        say(f"{part} {launcher}: " + ", ".join(f"{name} {value:.2f}" for name, value in found[launcher].items()))
    if part == "failing" and OURS in found:
        found[OURS] |= local(LOCAL)
    return found


def rows(found: dict[str, dict[str, list[float]]], chosen: argparse.Namespace) -> list[Row]:
    """The table."""
    ours, peer = found.get(OURS, {}), found.get(TRAIN, {})
    made = []

    def add(what: str, name: str, target: float | None, unit: str = "s", **more: Any) -> None:
        if ours.get(name):
            made.append(Row(what, unit, ours[name], peer.get(name, ()), target, **more))

    add("start of 2 nodes to their first step, on a cluster that runs", "start", START, of="ratio")
    if ours.get("local"):
        more = [mine - theirs for mine, theirs in zip(ours["worker"], ours["local"], strict=True)]
        made.append(Row("killed worker to next step, beyond the local backend's", "s", more, (), WORKER_S))
        made.append(Row("killed worker to next step; peer the local backend", "s", ours["worker"], ours["local"]))
    add("killed actor to next step", "actor", HALF, of="ratio")
    add("SIGKILLed raylet to next step of 2 nodes, a third host idle", "raylet", HALF, of="ratio")
    if ours.get("warm"):
        what = "SIGKILLed raylet to next step of 2 nodes, with a warm node of ours"
        made.append(Row(what, "s", ours["warm"], peer.get("raylet", ()), WARM, of="ratio"))
    note = f"host drained with {chosen.notice:g} s notice"
    add(f"{note}: steps lost", "drain-lost", 0.0, "steps")
    add(f"{note}: longest time without a step", "drain-stood", DRAIN, of="ratio")
    add("room for one more node to first step of the larger world", "room", ROOM, of="ratio")
    if ours.get("core"):
        what = f"{chosen.nodes} nodes observed ({chosen.living} live, the others wait), nothing happens"
        made.append(Row(f"{what}: share of a core, desk and observer", "%", ours["core"], (), CORE))
        made.append(Row(f"{what}: memory of the observer", "MiB", ours["mib"]))
    return made


def main() -> int:
    """Parts in turn, round by round; with ``--add`` to what the result has already."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
        parser.add_argument("--under", nargs="+", choices=(OURS, TRAIN), default=[OURS, TRAIN], help="these launchers")
        parser.add_argument("--notice", type=float, default=20.0, metavar="S", help="of a drain (default 20)")
        parser.add_argument("--nodes", type=int, default=200, metavar="N", help="observed idle (default 200)")
        parser.add_argument("--living", type=int, default=20, metavar="N", help="of these, with a process (default 20)")
        parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of observing (default 20)")
        parser.add_argument(
            "--add",
            action="store_true",
            help="keep the trials that the result file has of this commit, and add new ones",
        )
        parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)

    chosen = options(__doc__, trials=5, more=more)
    if chosen.child:
        folder, address, *numbers = chosen.child
        told = observing(folder, address, int(numbers[0]), int(numbers[1]), float(numbers[2]))
        Path(folder, TOLD).write_text(json.dumps(told), encoding="utf-8")  # the desk prints, too
        return 0
    result = Result("ray", "Ray Train 2.60, TorchTrainer: elastic, max_failures=-1, its preemption watcher on")
    found = before(result, chosen.json) if chosen.add else {}
    broken = False
    for number in range(chosen.trials):
        for part in chosen.only:
            try:
                told = trial(part, chosen)
            except Broken as error:
                say(f"{part} {number + 1}/{chosen.trials} cannot be measured: {error}")
                broken = True
                continue
            for launcher, figures in told.items():
                for name, value in figures.items():
                    found.setdefault(launcher, {}).setdefault(name, []).append(value)
    result.rows = rows(found, chosen)
    result.details["trials"] = found
    result.notes.append(
        "health checks, polls and the peer's resize interval are as they come: Ray declares a raylet dead after up to 15 s, Ray "
        "Train's controller looks every 2 s, at notices every 5 s, and for room every 60 s"
    )
    code = result.finish(chosen.json)
    return BROKEN if broken else code


def before(result: Result, path: Path | None) -> dict[str, dict[str, list[float]]]:
    """The trials of an earlier call of the same commit. Raises `SystemExit` where there are others."""
    file = path or RESULTS / "ray.json"
    if not file.exists():
        return {}
    told = json.loads(file.read_text(encoding="utf-8"))
    if told["commit"] != result.commit:
        raise SystemExit(
            f"{file} is of commit {told['commit']}, and this is {result.commit}: measure all anew without --add"
        )
    result.load_before = max(result.load_before, tuple(told["load_before"]))
    found: dict[str, dict[str, list[float]]] = told["details"]["trials"]
    return found


if __name__ == "__main__":
    sys.exit(main())
