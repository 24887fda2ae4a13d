"""A job on a Ray cluster: what goes wrong, and how long until the next step? Ours, and Ray Train in turn.

Real raylets on this machine, one CPU each, with Ray's own settings; one loop (`scripts/ray_step.py`) under `dlrover-run
--backend ray` and under Ray Train 2.60's `TorchTrainer`, with unlimited failures, its preemption watcher on, and elastic
(1 to 2 workers) where the job may shrink. Each trial has a cluster of its own. Times are by CLOCK_MONOTONIC, from a diary that
workers write.

- failing: from the command, with the cluster there, to the first step of both ranks; then SIGKILL to an actor's process;
- worker: SIGKILL to a worker's process, whose actor lives on, and the same with our local backend (Ray Train's is its actor);
- raylet: SIGKILL to the raylet of a rank's host, with a third host idle; until two ranks step again. And the same, ours with
  ``--standby 1``, whose agent answers from the third host; Ray Train has no warm node, so its figure is the same one;
- drain: a rank's host is drained with a notice, and a third host is idle. The raylet is killed at the deadline, or as soon as two
  ranks step elsewhere. Counted are steps that were made twice, and the longest time without a step;
- room: a job of 1 to 2 nodes has one; a second host comes half a minute after the first step, since Ray Train looks for room
  every minute from its workers' start on; until both ranks step;
- away: the process with the cluster's state is killed and started again; a worker is killed meanwhile, ours three times, and with
  our local backend, too. Counted are workers that were restarted otherwise; known again is all when a desk tells of all nodes
  anew;
- idle: nodes that Ray holds, of which nothing is heard: the share of a core that desk and observer take together.

``--only PART`` measures one of them. The result is written after each trial, and ``--add`` goes on with it until there are
``--trials`` of each, so that it can be measured in pieces and after a break. ``--under`` knows a third launcher: Ray Train whose
intervals are made short. Its rows have no target.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import BROKEN, RESULTS, Result, Row, median, options, say
from _jobs import OURS, Broken, Job, marked
from _ray import (
    LOCAL,
    ON_DISK,
    QUICK_TRAIN,
    SCRIPT,
    TRAIN,
    Ground,
    above,
    ground,
    now,
    ray_job,
    stepping,
    stopped_for,
    twice,
)
from tools.benchmark_table import since

from dlrover_adapters.http.client import fetch_status
from dlrover_backends.ray.client import SOCKET
from dlrover_backends.shared import asking, wire
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
OWN = tuple(
    f"benchmarks/{one}"
    for one in ("bench_ray.py", "_ray.py", "scripts/diary.py", f"scripts/{SCRIPT.name}", "scripts/ray_ground.py")
)

WORKER_S, HALF, WARM, START, DRAIN, ROOM, CORE, KNOWN_S = 0.1, 0.5, 0.25, 1.0, 0.3, 0.3, 5.0, 5.0
MEMORY = 1.05
"""The same memory, to a twentieth."""
CALM_STEPS = 20
LOOK_S = 0.05
"""So often the diary is read. Its lines have their own times; reading it oftener takes a core from what is measured."""
BACK_LIMIT_S, ROOM_LIMIT_S = 150.0, 150.0
AWAY_KILLS = 3
LOOKS_S = 60.0
"""So often Ray Train looks for room. A host that may come at any moment comes at half of it, in the mean."""
SETTLE_S, CALM_AFTER_S = 2.0, 10.0
MASTER = "dlrover-master"
SMALL, TOLD = "CPU=0.001", "told.json"
IDLE_LIMIT_S, WAVE = 1200.0, 8
KNOWN_LIMIT_S = 60.0


# ---- in one job


def calm(job: Job, ranks: int, beside: set[int]) -> set[int]:
    """Wait until so many ranks have trained undisturbed for a while; the processes seen so far."""
    at = stepping(job.until(lambda lines: stepping(lines, ranks, beside) > 0, LOOK_S), ranks, beside)
    job.until(
        lambda lines: sum(one.what == "step" and one.rank == 0 and one.at > at for one in lines) >= CALM_STEPS, LOOK_S
    )
    return {one.pid for one in job.lines()}


def worker_of(job: Job, rank: int) -> int:
    """The newest process of a rank. Raises `Broken`."""
    found = next((one.pid for one in reversed(job.lines()) if one.rank == rank), 0)
    if not found:
        raise Broken(f"there was no rank {rank}")
    return found


def back(job: Job, ranks: int, beside: set[int], since: float, limit_s: float = BACK_LIMIT_S) -> float:
    """Seconds from ``since`` until so many new ranks have stepped."""
    lines = job.until(lambda lines: stepping(lines, ranks, beside) > 0, LOOK_S, limit_s)
    return stepping(lines, ranks, beside) - since


def in_place(job: Job, kills: int) -> float:
    """Seconds from SIGKILL to a worker of two until both ranks step again: the median of so many kills."""
    found, before = [], calm(job, 2, set())
    for _ in range(kills):
        found.append(back(job, 2, before, killed(worker_of(job, 1))))
        before = calm(job, 2, before)
    return median(found)


def wait_until(job: Job, at: float) -> None:
    """Wait for a moment. Raises `Broken` where the job ends before it."""
    while now() < at:
        job.until(lambda _: True)
        time.sleep(LOOK_S)


def master_mib(job: Job) -> float:
    """Resident memory of the master that leads, in MiB. Raises `Broken`."""
    for pid in marked(job.mark):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == MASTER:
                return memory_mib(pid)
    raise Broken("no master runs")


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
    """Start; a killed actor."""
    found = {}
    with ground(2) as cluster, ray_job(launcher, cluster, "2:2") as job:
        lines = job.until(lambda lines: stepping(lines, 2, set()) > 0, LOOK_S)
        found["start"] = stepping(lines, 2, set()) - job.started
        before = calm(job, 2, set())
        found["actor"] = back(job, 2, before, killed(actor_of(worker_of(job, 1))))
    return found


def worker(kills: int) -> dict[str, float]:
    """A killed worker of ours, on Ray and with the local backend; and what both masters need."""
    with ray_job(LOCAL, None, "2:2") as job:
        found = {"local": in_place(job, kills), "local-mib": master_mib(job)}
    with ground(2) as cluster, ray_job(OURS, cluster, "2:2") as job:
        return found | {"worker": in_place(job, kills), "master-mib": master_mib(job)}


def raylet(launcher: str) -> dict[str, float]:
    """A raylet is killed; there is room elsewhere, and the second time a warm node of ours."""
    found = _raylet(launcher)
    return {"raylet": found, "warm": _raylet(launcher, "--standby", "1") if launcher == OURS else found}


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
        calm(job, 2, set())
        host = victim(job, cluster)
        at = float(cluster.order("drain", host=host, notice_s=notice_s))
        left = 0.0
        while now() < at + notice_s and not left:
            time.sleep(LOOK_S)
            left = elsewhere(job, cluster, host)
        back_at, killed_at = left, float(cluster.order("kill", host=host))
        while not back_at:
            time.sleep(LOOK_S)
            back_at = elsewhere(job, cluster, host)
            if now() > killed_at + BACK_LIMIT_S:
                raise Broken(f"no two ranks step {BACK_LIMIT_S:g} s after the drained host has gone")
        until = max(back_at, killed_at) + SETTLE_S
        lines = job.until(lambda lines: lines[-1].at > until, LOOK_S, BACK_LIMIT_S)
        name = f"drain-{notice_s:g}"
        found = {f"{name}-lost": float(twice(lines)), f"{name}-stood": stopped_for(lines, at, until)}
        return found | {f"{name}-left": left - at if left else notice_s}


def elsewhere(job: Job, cluster: Ground, host: str) -> float:
    """When two ranks had stepped whose processes are on other hosts; 0: they do not."""
    lines = job.until(lambda _: True)
    newest = {worker_of(job, rank) for rank in (0, 1)}
    at = stepping(lines, 2, {one.pid for one in lines} - newest)
    try:
        return at if at and all(cluster.host_of(pid) != host for pid in newest) else 0.0
    except Broken:  # one of them has just ended
        return 0.0


def room(launcher: str, after_s: float) -> dict[str, float]:
    """A host more, so long after the first step."""
    with ground(1) as cluster, ray_job(launcher, cluster, "1:2") as job:
        before = calm(job, 1, set())
        wait_until(job, stepping(job.lines(), 1, set()) + after_s)
        at = now()
        cluster.order("add")
        return {"room": back(job, 2, before, at, ROOM_LIMIT_S)}


def away(launcher: str, seconds: float) -> dict[str, float]:
    """The cluster's state service is away for so long, a worker is killed from a quarter of that time on, and all goes on."""
    found = {}
    if launcher == OURS:
        with ray_job(LOCAL, None, "2:2") as job:
            found["away-local"] = in_place(job, AWAY_KILLS)
    with ground(2, **ON_DISK) as cluster, ray_job(launcher, cluster, "2:2") as job:
        before = calm(job, 2, set())
        began = float(cluster.order("state", **{"is": "gone"}))
        wait_until(job, began + seconds / 4)
        if launcher != OURS:
            at = killed(worker_of(job, 1))
            wait_until(job, began + seconds)
            cluster.order("state", **{"is": "back"})
            return {"away": back(job, 2, before, at)}
        found["away"] = in_place(job, AWAY_KILLS)
        if now() > began + seconds:
            raise Broken(f"{AWAY_KILLS} kills took longer than the {seconds:g} s that the state service is away")
        wait_until(job, began + seconds)
        returned = float(cluster.order("state", **{"is": "back"}))
        found["known"] = asyncio.run(known(job, 2)) - returned
        wait_until(job, returned + CALM_AFTER_S)
        found["restarted"] = float(len({one.pid for one in job.lines()} - before) - 2 * AWAY_KILLS)
    return found


async def known(job: Job, nodes: int) -> float:
    """When the job's desk told that so many nodes run, asked from now on. Raises `Broken`."""

    def path() -> Path:
        return next(job.folder.glob("jobs/*/backend/ray-desk.sock"), job.folder / "none")

    async def listed() -> float:
        while True:
            stream = asking.observe(path, who="the desk", pauses_s=(0.1,))
            async with contextlib.aclosing(stream) as seen:
                first = await anext(seen)
            running = sum(one.phase == "running" for one in first.nodes) if isinstance(first, Listed) else 0
            if running == nodes:
                return now()
            await asyncio.sleep(0.1)

    try:
        return await asyncio.wait_for(listed(), KNOWN_LIMIT_S)
    except asyncio.TimeoutError:
        raise Broken(f"the desk has not told of {nodes} nodes for {KNOWN_LIMIT_S:g} s") from None


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
        for index in range(living, nodes):
            await large.launch(make_launch(index, job="bench"), 1)
        seen = small.observe()
        launched, running = 0, set[str]()
        while len(running) < living:
            # Ray starts few processes at once, and gives one up that has not begun after a minute.
            while launched < min(living, len(running) + WAVE):
                await small.launch(make_launch(launched, job="bench"), 1)
                launched += 1
            one = await anext(seen)
            found = one.nodes if isinstance(one, Listed) else (one.node,)
            running |= {node.name for node in found if node.phase == "running"}
        waiting = asyncio.ensure_future(anext(seen))
        await asyncio.sleep(SETTLE_S)
        desk = serving(folder)
        before, spent, began = time.process_time(), ticks(desk), time.perf_counter()
        await asyncio.wait({waiting}, timeout=seconds)
        took = time.perf_counter() - began
        own, theirs = time.process_time() - before, (ticks(desk) - spent) / os.sysconf("SC_CLK_TCK")
        if serving(folder) != desk:
            raise Broken(f"the desk, process {desk}, has ended meanwhile")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return {"core": 100 * (own + theirs) / took, "desk": 100 * theirs / took, "mib": memory_mib(), "seconds": took}

    return asyncio.run(asyncio.wait_for(run(), IDLE_LIMIT_S))


def memory_mib(pid: int | str = "self") -> float:
    """Resident memory of a process, in MiB; of this one, if none is named."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def serving(folder: str) -> int:
    """The process id of the desk that listens in ``folder`` now: one that died was replaced. Raises `OSError` if none does."""
    with socket.socket(socket.AF_UNIX) as asking_it, wire.short(Path(folder, SOCKET)) as name:
        asking_it.connect(name)
        told = asking_it.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[0])


def ticks(pid: int) -> int:
    """Ticks of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


# ---- all together


STORIES: dict[str, Callable[[str], dict[str, float]]] = {
    "failing": failing,
    "raylet": raylet,
}
PARTS = {"failing": "actor", "worker": "worker", "raylet": "warm", "drain": "drain-{notice:g}-stood"}
PARTS |= {"room": "room", "away": "away", "idle": "core"}
"""By each part a figure that all of its trials have."""
OURS_ALONE = ("worker", "idle")
COMMON = {"kills": 5, "notice": 60.0, "away": 20.0, "nodes": 200, "living": 20, "seconds": 20.0}
"""Defaults of the options that say how much is done."""


def trial(part: str, chosen: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One round of a part: every launcher in turn."""
    found: dict[str, dict[str, float]] = {}
    for launcher in chosen.under:
        began = now()
        if part in OURS_ALONE and launcher != OURS:
            continue
        if part == "worker":
            found[launcher] = worker(chosen.kills)
        elif part == "idle":
            found[launcher] = idle(chosen.nodes, chosen.living, chosen.seconds)
        elif part == "drain":
            found[launcher] = drained(launcher, chosen.notice)
        elif part == "away":
            found[launcher] = away(launcher, chosen.away)
        elif part == "room":
            found[launcher] = room(launcher, LOOKS_S / 2)
        else:
            found[launcher] = STORIES[part](launcher)
        told = ", ".join(f"{name} {value:.2f}" for name, value in found[launcher].items())
        say(f"{part} {launcher}, in {now() - began:.0f} s: {told}")
    return found


Found = dict[str, dict[str, list[float]]]


def rows(found: Found, chosen: argparse.Namespace) -> list[Row]:
    """The table."""
    ours = found.get(OURS, {})
    made = []

    def add(what: str, name: str, target: float | None, unit: str = "s", **more: Any) -> None:
        if ours.get(name):
            made.append(Row(what, unit, ours[name], found.get(TRAIN, {}).get(name, ()), target, **more))
        quick = found.get(QUICK_TRAIN, {}).get(name)
        if ours.get(name) and quick:
            made.append(Row(f"{what}; peer at its quickest", unit, ours[name], quick, None, "ratio"))

    def beyond(what: str, name: str, local: str) -> None:
        if ours.get(local):
            more = [mine - theirs for mine, theirs in zip(ours[name], ours[local], strict=True)]
            made.append(Row(f"{what}, beyond the local backend's", "s", more, (), WORKER_S))
            made.append(Row(f"{what}; peer the local backend", "s", ours[name], ours[local]))

    add("start of 2 nodes to their first step, on a cluster that runs", "start", START, of="ratio")
    beyond("killed worker to next step", "worker", "local")
    if ours.get("master-mib"):
        what = "memory of the master of 2 nodes; peer the local backend"
        made.append(Row(what, "MiB", ours["master-mib"], ours["local-mib"], MEMORY, of="ratio"))
    add("killed actor to next step", "actor", HALF, of="ratio")
    add("SIGKILLed raylet to next step of 2 nodes, a third host idle", "raylet", HALF, of="ratio")
    add("SIGKILLed raylet to next step of 2 nodes, with a warm node of ours", "warm", WARM, of="ratio")
    for name in sorted(one for one in ours if one.startswith("drain-") and one.endswith("-lost")):
        notice = name.removeprefix("drain-").removesuffix("-lost")
        note = f"host drained with {notice} s notice"
        add(f"{note}: steps lost", name, 0.0, "steps")
        add(f"{note}: longest time without a step", f"drain-{notice}-stood", DRAIN, of="ratio")
    add("room for one more node to first step of the larger world", "room", ROOM, of="ratio")
    note = f"state service killed, back after {chosen.away:g} s"
    beyond(f"{note}: a worker killed meanwhile to next step", "away", "away-local")
    add(f"{note}: a worker killed meanwhile to next step", "away", None)
    add(f"{note}: workers restarted otherwise", "restarted", 0.0, "workers")
    add(f"{note}: from its start until all nodes are known again", "known", KNOWN_S)
    if ours.get("core"):
        what = f"{chosen.nodes} nodes observed ({chosen.living} live, the others wait), nothing happens"
        made.append(Row(f"{what}: share of a core, desk and observer", "%", ours["core"], (), CORE))
        made.append(Row(f"{what}: memory of the observer", "MiB", ours["mib"]))
    return made


def main() -> int:
    """Parts in turn, round by round; with ``--add`` to what the result has already."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
        launchers = (OURS, TRAIN, QUICK_TRAIN)
        parser.add_argument("--under", nargs="+", choices=launchers, default=[OURS, TRAIN], help="these launchers")
        for name, unit, what in (
            ("kills", "N", "of a worker, in one job: the median is one trial"),
            ("notice", "S", "of a drain"),
            ("away", "S", "so long the state service is away"),
            ("nodes", "N", "observed idle"),
            ("living", "N", "of these, with a process"),
            ("seconds", "S", "of observing"),
        ):
            default = COMMON[name]
            kind = type(default)
            parser.add_argument(
                f"--{name}", type=kind, default=default, metavar=unit, help=f"{what} (default {default:g})"
            )
        parser.add_argument(
            "--add",
            action="store_true",
            help="go on with the result file, if what it measures has not changed since: up to --trials of each part",
        )
        parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)

    chosen = options(__doc__, trials=5, more=more)
    if chosen.child:
        folder, address, *numbers = chosen.child
        told = observing(folder, address, int(numbers[0]), int(numbers[1]), float(numbers[2]))
        Path(folder, TOLD).write_text(json.dumps(told), encoding="utf-8")  # the desk prints, too
        return 0
    result = Result("ray", "Ray Train 2.60, TorchTrainer: elastic, max_failures=-1, its preemption watcher on")
    result.notes.append(
        "health checks, polls and the peer's resize interval are as they come: Ray declares a raylet dead after up to 15 s, Ray "
        "Train's controller looks every 2 s, at notices every 5 s, and for room every 60 s"
    )
    found = before(result, chosen.json) if chosen.add else {}
    broken = not measured(result, found, chosen)
    result.rows = rows(found, chosen)
    code = result.finish(chosen.json)
    return BROKEN if broken else code


def measured(result: Result, found: Found, chosen: argparse.Namespace) -> bool:
    """Measure what is missing, into ``found`` and the result file; could all of it be?"""
    good = True
    for number in range(1, chosen.trials + 1):
        for part in chosen.only:
            launcher = OURS if part in OURS_ALONE else chosen.under[-1]
            if len(found.get(launcher, {}).get(PARTS[part].format(notice=chosen.notice), ())) >= number:
                continue
            try:
                told = trial(part, chosen)
            except (Broken, CoreError, OSError, subprocess.SubprocessError) as error:
                say(f"{part} {number}/{chosen.trials} cannot be measured: {type(error).__name__}: {error}")
                good = False
                continue
            for launcher, figures in told.items():
                for name, value in figures.items():
                    found.setdefault(launcher, {}).setdefault(name, []).append(value)
            result.rows, result.details["trials"] = rows(found, chosen), found
            result.write(chosen.json)
    return good


def before(result: Result, path: Path | None) -> Found:
    """The trials of earlier calls, which measured the same code. Raises `SystemExit` where they did not."""
    file = path or RESULTS / "ray.json"
    if not file.exists():
        return {}
    told = json.loads(file.read_text(encoding="utf-8"))
    commit = told["commit"]
    if commit != result.commit:
        changed = since(commit) if not commit.endswith("+") else None
        if changed is None or changed.touching((*MEASURES, *OWN)):
            raise SystemExit(
                f"{file} is of commit {commit}, and what it measures is another now: measure all anew without --add"
            )
        result.commit = commit
    result.load_before = max(result.load_before, tuple(told["load_before"]))
    found: Found = told["details"]["trials"]
    result.details["trials"] = found
    return found


if __name__ == "__main__":
    sys.exit(main())
