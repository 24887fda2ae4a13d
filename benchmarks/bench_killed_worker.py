"""A worker is killed: how long until the next step?

The same DDP/gloo script (`scripts/ddp_step.py`) runs with 2 workers under `dlrover-run` and under `torchrun --standalone`
of an environment of its own, as it comes and at its best, in turn. At a step one of the workers gets SIGKILL (rank 0 and rank 1
in turn). Measured is the time from the signal to the moment when every rank of the new attempt has completed a step, from the
checkpoint file.
Twice: a plain script, and one with a SIGTERM handler written in Python. CLOCK_MONOTONIC throughout; our log's wall clock is
mapped to it. A job whose new attempt stands still for 10 s, that ends, or that is not back within 45 s, is lost: that is
counted, and run again, and does not enter the medians.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from _bench import A_JOB, BROKEN, Result, Row, median, options, quantile, say
from _jobs import (
    AS_IT_COMES,
    AT_ITS_BEST,
    BEST,
    OURS,
    TORCHRUN,
    Broken,
    Job,
    Line,
    Lost,
    clock_offset,
    peer_python,
    running,
)

from dlrover_core.job.incidents import IncidentClosed, IncidentOpened, WorkerExited
from dlrover_core.job.progress import FirstStep
from dlrover_core.job.world import WorkersStarted, WorldFormed

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/diagnosis", "src/dlrover_core/host")

KILL_AT, STEPS = 20, 45
TARGET = 0.10
LOST_MAX = 12
STUCK_S = 10.0
BACK_LIMIT_S = 45.0  # torchrun alone may take 30 s: that is its grace between SIGTERM and SIGKILL
LOG_MARKS: Mapping[type, str] = {
    IncidentOpened: "incident",
    WorldFormed: "world",
    WorkersStarted: "started",
    FirstStep: "first step",
    IncidentClosed: "closed",
}
SCRIPT_PHASES = ("begin", "imported", "grouped", "ready", "step")


class Trial(NamedTuple):
    """One kill. Seconds from it; ``marks``: to each point on the way, the last rank's; ``attempts`` it took to step again."""

    total_s: float
    marks: Mapping[str, float]
    attempts: int
    steps_lost: int
    step_s: float


def trial(launcher: str, rank: int, sigterm: bool) -> Trial:
    """Start, kill, wait for the end, read what happened."""
    arguments = ["--steps", str(STEPS), *(["--sigterm"] if sigterm else [])]
    with running(launcher, arguments) as job:
        lines = job.until(lambda lines: sum(line.what == "step" and line.step == KILL_AT for line in lines) == 2)
        before = {line.pid for line in lines}
        victim = next(line.pid for line in lines if line.rank == rank)
        offset = clock_offset()
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        lines = outcome(job, before)
        attempt = recovered(lines, before)
        marks = script_marks([line for line in lines if line.attempt == attempt], killed)
        if launcher == OURS:
            marks |= log_marks(job, killed, offset)
        steps = [line for line in lines if line.what == "step"]
        last = max(line.step for line in steps if line.pid in before)
        first = min(line.step for line in steps if line.attempt == attempt)
        if first <= 1:
            raise Broken(f"{launcher} began at step {first}: the checkpoint was not restored")
        took = attempt - next(line.attempt for line in lines if line.pid in before)
        return Trial(marks["step"], marks, took, last + 1 - first, step_time(lines, before))


def outcome(job: Job, before: set[int]) -> list[Line]:
    """The diary of a job that came back and ended well. Raises `Lost`."""
    try:
        job.until(lambda lines: recovered(lines, before) > 0 or stuck(lines, before), 0.02, BACK_LIMIT_S)
        code = job.wait() if recovered(job.lines(), before) else None
    except Broken as error:
        raise Lost(str(error)) from error
    if code is None:
        raise Lost(f"{job.launcher}: {job.lines()[-1]}, then nothing for {STUCK_S:g} s; it said: {job.said()}")
    ends = sum(line.what == "end" for line in job.lines())
    if code != 0 or ends != 2:
        raise Lost(f"{job.launcher} ended with {code}, {ends} ranks finished; it said: {job.said()}")
    return job.lines()


def stuck(lines: Sequence[Line], before: set[int]) -> bool:
    """Do both ranks of a new attempt run, and have said nothing for long?"""
    newest = lines[-1]
    ranks = {line.rank for line in lines if line.attempt == newest.attempt and line.pid not in before}
    return len(ranks) == 2 and time.monotonic() > newest.at + STUCK_S


def recovered(lines: Sequence[Line], before: set[int]) -> int:
    """The first new attempt in which both ranks have made a step; 0: none yet."""
    ranks: dict[int, set[int]] = {}
    for line in lines:
        if line.what == "step" and line.pid not in before:
            ranks.setdefault(line.attempt, set()).add(line.rank)
    return min((attempt for attempt, seen in ranks.items() if len(seen) == 2), default=0)


def script_marks(lines: Sequence[Line], killed: float) -> dict[str, float]:
    """From the kill to each point of an attempt, when the last rank had passed it."""
    marks = {}
    for what in SCRIPT_PHASES:
        firsts: dict[int, float] = {}
        for line in lines:
            if line.what == what:
                firsts.setdefault(line.rank, line.at)
        if len(firsts) != 2:
            raise Broken(f"{len(firsts)} ranks came to {what}")
        marks[what] = max(firsts.values()) - killed
    return marks


def log_marks(job: Job, killed: float, offset: float) -> dict[str, float]:
    """From the kill to each event of our log."""
    marks: dict[str, float] = {}
    for record in job.records():
        at = record.at / 1e6 - offset - killed
        if isinstance(record.event, WorkerExited) and at > 0:
            marks.setdefault("death", at - record.event.age_us / 1e6)
            marks.setdefault("reported", at)
        elif type(record.event) in LOG_MARKS and at > 0:
            marks.setdefault(LOG_MARKS[type(record.event)], at)
    return marks


def step_time(lines: Sequence[Line], before: set[int]) -> float:
    """The median time of an undisturbed step of rank 0."""
    at = [line.at for line in lines if line.what == "step" and line.rank == 0 and line.pid in before]
    return median([after - earlier for earlier, after in pairwise(at)])


OUR_PHASES = (
    ("kill -> the agent sees the death", "", "death"),
    ("death -> the master has it, decides, forms the world (one batch)", "death", "world"),
    ("world -> commit, order, old workers dead, both scripts begin", "world", "begin"),
    ("scripts import torch (warm)", "begin", "imported"),
    ("process group", "imported", "grouped"),
    ("model, DDP, checkpoint", "grouped", "ready"),
    ("first step of all ranks", "ready", "step"),
)
PEER_PHASES = (("kill -> both scripts begin", "", "begin"), *OUR_PHASES[3:])


def phases(trials: Sequence[Trial], names: Sequence[tuple[str, str, str]]) -> dict[str, float]:
    """Medians of the phases, in milliseconds."""
    return {
        name: 1000 * median([one.marks[end] - one.marks.get(start, 0.0) for one in trials])
        for name, start, end in names
    }


def show(title: str, found: Mapping[str, float]) -> None:
    """Print phases under a title."""
    print(f"\n  {title} (medians, ms)")
    for name, value in found.items():
        print(f"    {value:9.1f}  {name}")


def survived(launcher: str, rank: int, sigterm: bool, lost: dict[str, list[str]]) -> Trial:
    """A trial that came back. Jobs that did not are counted in ``lost``, and do not enter the medians."""
    while True:
        try:
            return trial(launcher, rank, sigterm)
        except Lost as error:
            lost[launcher].append(str(error))
            say(f"{launcher}: rank {rank} killed, and the job did not come back")
            if len(lost[launcher]) > LOST_MAX:
                raise


def measure(result: Result, variant: str, trials: int, sigterm: bool) -> None:
    """One variant: all launchers in turn."""
    found: dict[str, list[Trial]] = {OURS: [], TORCHRUN: [], BEST: []}
    lost = {name: list[str]() for name in found}
    for number in range(trials):
        for launcher, those in found.items():
            those.append(survived(launcher, number % 2, sigterm, lost))
            took = f"{those[-1].total_s * 1000:.0f} ms to the next step"
            say(f"{variant} {number + 1}/{trials} {launcher}: rank {number % 2} killed, {took}")
    ours, peer = found[OURS], found[TORCHRUN]
    what, count = (
        f"killed worker to next step, {variant}",
        f"jobs lost or stuck for 10 s, beside {trials} that came back, {variant}",
    )
    for name, settings in ((TORCHRUN, AS_IT_COMES), (BEST, AT_ITS_BEST)):
        theirs_s, lost_jobs = [one.total_s for one in found[name]], [float(len(lost[name]))]
        none = 0.0 if name == TORCHRUN else None  # ours is counted once
        result.rows += [
            Row(what, "s", [one.total_s for one in ours], theirs_s, TARGET, "ratio", settings=settings),
            Row(count, "jobs", [float(len(lost[OURS]))], lost_jobs, none, settings=settings, n=trials),
        ]
    mine, theirs = phases(ours, OUR_PHASES), phases(peer, PEER_PHASES)
    show(f"{variant}: where our time goes", mine)
    show(f"{variant}: where torchrun's time goes", theirs)
    in_log = {
        name: 1000 * median([one.marks[name] for one in ours]) for name in ("death", "reported", *LOG_MARKS.values())
    }
    show(f"{variant}: from the kill to our log's events", in_log)
    result.details[variant] = {
        "ours_phases_ms": mine,
        "torchrun_phases_ms": theirs,
        "ours_log_ms": in_log,
        "ours_p90_s": quantile([one.total_s for one in ours], 0.9),
        "jobs_lost": {name: len(those) for name, those in lost.items()},
        "jobs_lost_said": lost,
        "attempts": {"ours": [one.attempts for one in ours], "torchrun": [one.attempts for one in peer]},
        "steps_lost": {"ours": [one.steps_lost for one in ours], "torchrun": [one.steps_lost for one in peer]},
        "undisturbed_step_ms": {
            name: 1000 * median([one.step_s for one in those]) for name, those in (("ours", ours), ("torchrun", peer))
        },
        "ours_marks_s": [dict(one.marks) for one in ours],
        "torchrun_marks_s": [dict(one.marks) for one in peer],
    }


def main() -> int:
    """A plain script, and one with a handler."""
    chosen = options(__doc__)
    result = Result("killed_worker", "torchrun --standalone (torch 2.13.0, its own environment)")
    try:
        peer_python()
        measure(result, "plain script", chosen.trials, sigterm=False)
        measure(result, "script with a SIGTERM handler", chosen.trials, sigterm=True)
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
