"""The leading master is killed: do the workers notice, and when can anything be decided again?

A job of 2 workers runs under `dlrover-run`, which keeps a warm standby. Each trial has two blows, both SIGKILL, the second
when the next standby is warm: first the leader alone, then the leader and a worker in the same moment. Measured after the
first: the longest gap between two steps around it (against before it), workers started anew (none), and seconds until
`LeaderStarted` is decided and until a new leader answers `status`. After the second: seconds until the new world is
decided, and until all ranks have made a step in it.

The peer, in turn: `torchrun --standalone`, whose agent is its master. Its agent and then a worker are killed; printed is for
how long nobody replaced the worker (a bound: nobody ever does).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from _bench import A_JOB, BROKEN, Result, Row, median, options, say
from _jobs import OURS, TORCHRUN, Broken, Job, Line, clock_offset, peer_python, running

from dlrover_adapters.http.client import fetch_status
from dlrover_core import CoreError
from dlrover_core.job.job import LeaderStarted
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.events import Record

MEASURES = (*A_JOB, "src/dlrover_core/host")

TARGET_S = 1.0
QUIET_S = 1.5
WARM_LIMIT_S = 20.0
PEER_WAIT_S = 5.0


class Blow(NamedTuple):
    """What followed one kill, in seconds from it."""

    led_s: float
    answered_s: float
    gap_s: float
    gap_before_s: float
    world_s: float
    step_s: float


def status(job: Job) -> Mapping[str, Any] | None:
    """What the leader says, or None."""
    try:
        settings = json.loads((job.folder / "jobs" / "bench" / "settings.json").read_text())
        return dict(asyncio.run(fetch_status(settings["masters"][0], job.token, timeout_s=0.5)))
    except (OSError, ValueError, IndexError, CoreError):
        return None


def leading(job: Job) -> Mapping[str, Any]:
    """The status, once there is one."""
    deadline = time.monotonic() + WARM_LIMIT_S
    while (found := status(job)) is None:
        if time.monotonic() > deadline:
            raise Broken(f"nobody answers; the launcher said: {job.said()}")
        time.sleep(0.02)
    return found


def masters(job: Job) -> list[int]:
    """The masters of a job that are warm: those that have opened the lock of its log."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == "dlrover-master":
                opened = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
                if any(one.startswith(str(job.folder)) and one.endswith(".lock") for one in opened):
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


def settle(job: Job) -> Mapping[str, Any]:
    """Wait until two masters are warm and steps have been made undisturbed for a while."""
    deadline = time.monotonic() + WARM_LIMIT_S
    while len(masters(job)) < 2:
        if time.monotonic() > deadline:
            raise Broken(f"no warm standby within {WARM_LIMIT_S:g} s")
        time.sleep(0.05)
    since = time.monotonic()
    job.until(lambda lines: lines[-1].what == "step" and lines[-1].at > since + QUIET_S, 0.05)
    return leading(job)


def strike(job: Job, victims: Sequence[int]) -> tuple[float, float]:
    """Kill the leader and others; when that was, and when a new leader answered."""
    old = leading(job)
    leader = int(old["leader"].split("/")[1])
    killed = time.monotonic()
    for pid in (leader, *victims):
        os.kill(pid, signal.SIGKILL)
    while True:
        new = status(job)
        if new is not None and new["token"] > old["token"]:
            return killed, time.monotonic()
        if time.monotonic() > killed + WARM_LIMIT_S:
            raise Broken("no new leader")
        time.sleep(0.005)


def gaps(lines: Sequence[Line], begin: float, end: float) -> list[float]:
    """The times between steps of rank 0 that touch this span."""
    at = [line.at for line in lines if line.what == "step" and line.rank == 0]
    return [after - earlier for earlier, after in pairwise(at) if after > begin and earlier < end]


def first_steps(lines: Sequence[Line], before: set[int]) -> dict[int, float]:
    """When each rank of workers that were not there before had made its first step."""
    firsts: dict[int, float] = {}
    for line in lines:
        if line.what == "step" and line.pid not in before:
            firsts.setdefault(line.rank, line.at)
    return firsts


def first_after(records: Sequence[Record], kind: type, wall_us: float) -> float:
    """When the first event of a kind was decided after a moment, microseconds."""
    return next(record.at for record in records if isinstance(record.event, kind) and record.at > wall_us)


def ours() -> tuple[Blow, Blow, int]:
    """Strike one job twice; return both blows, and how many workers were started anew after the first."""
    with running(OURS, ["--steps", "1000000"]) as job:
        job.until(lambda lines: any(line.what == "step" and line.step >= 20 for line in lines))
        settle(job)
        offset = clock_offset()
        workers = {line.pid for line in job.lines()}
        killed, answered = strike(job, ())
        settle(job)
        lines = list(job.lines())
        restarts = len({line.pid for line in lines} - workers)
        records = job.records()
        led = first_after(records, LeaderStarted, (killed + offset) * 1e6) / 1e6 - offset - killed
        around, before = gaps(lines, killed, answered + 0.5), gaps(lines, killed - QUIET_S, killed - 0.01)
        first = Blow(led, answered - killed, max(around), max(before), 0.0, 0.0)
        pids = {line.pid for line in lines}
        victim = next(line.pid for line in reversed(lines) if line.rank == 1)
        offset = clock_offset()
        killed, answered = strike(job, (victim,))
        lines = job.until(lambda lines: len(first_steps(lines, pids)) == 2, 0.005)
        step = max(first_steps(lines, pids).values())
        records = job.records()
        wall = (killed + offset) * 1e6
        led, world = (first_after(records, kind, wall) / 1e6 - offset - killed for kind in (LeaderStarted, WorldFormed))
        second = Blow(led, answered - killed, 0.0, 0.0, world, step - killed)
        return first, second, restarts


def theirs() -> float:
    """Seconds without a decision after torchrun's agent and a worker were killed."""
    with running(TORCHRUN, ["--steps", "1000000"]) as job:
        lines = job.until(lambda lines: any(line.what == "step" and line.step >= 20 for line in lines))
        assert job.process is not None
        pids = {line.pid for line in lines}
        victim = next(line.pid for line in lines if line.rank == 1)
        killed = time.monotonic()
        for pid in (job.process.pid, victim):
            os.kill(pid, signal.SIGKILL)
        while time.monotonic() < killed + PEER_WAIT_S:
            if {line.pid for line in job.lines()} - pids:
                break
            time.sleep(0.05)
        return time.monotonic() - killed


def ms(seconds: float) -> str:
    """Milliseconds, for people."""
    return f"{seconds * 1000:.0f} ms"


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--peer-trials", type=int, default=2, metavar="N", help="trials of torchrun (default 2)")

    chosen = options(__doc__, more=more)
    result = Result("killed_master", "torchrun, whose agent is its master (a lower bound: nobody takes over)")
    firsts, seconds, restarts, peer = list[Blow](), list[Blow](), list[int](), list[float]()
    try:
        peer_python()
        for trial in range(chosen.trials):
            first, second, cost = ours()
            firsts.append(first)
            seconds.append(second)
            restarts.append(cost)
            say(
                f"{trial + 1}/{chosen.trials} dlrover-run: leads after {ms(first.led_s)}, answers after "
                f"{ms(first.answered_s)}, longest gap {ms(first.gap_s)} (before {ms(first.gap_before_s)}), {cost} workers anew; "
                f"with a worker: world after {ms(second.world_s)}, step after {ms(second.step_s)}"
            )
            if trial < chosen.peer_trials:
                peer.append(theirs())
                say(f"{trial + 1}/{chosen.peer_trials} torchrun: nobody had replaced the worker after {peer[-1]:.1f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    calm = [one.gap_before_s for one in firsts]
    waited = {"constant": True, "settings": "how long we waited; nobody takes over"}
    result.rows += [
        Row("master killed: LeaderStarted decided", "s", [one.led_s for one in firsts], target=TARGET_S),
        Row("master killed: the new leader answers status", "s", [one.answered_s for one in firsts], target=TARGET_S),
        Row(
            "workers started anew because of it (worst)", "workers", [float(max(restarts))], target=0.0, n=len(restarts)
        ),
        Row("longest gap between steps (peer: ours before the kill)", "s", [one.gap_s for one in firsts], calm),
        Row(
            "master and worker killed: the new world decided",
            "s",
            [one.world_s for one in seconds],
            peer,
            TARGET_S,
            **waited,
        ),
        Row("master and worker killed: all ranks step again", "s", [one.step_s for one in seconds], peer, **waited),
    ]
    result.details = {
        "leader": [one._asdict() for one in firsts],
        "leader_and_worker": [one._asdict() for one in seconds],
        "median_gap_growth_s": median([one.gap_s - one.gap_before_s for one in firsts]),
        "restarts": restarts,
    }
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
