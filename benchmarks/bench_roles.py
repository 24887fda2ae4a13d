"""Trainers and rollout workers in one job: what does a death in one group cost the other?

Two trainers (`scripts/ddp_step.py`: DDP over gloo, one node each, one world) and six rollout workers
(`scripts/rollout_units.py`: no torch, units of 10 ms, each node a world of its own) run
under `dlrover-run --job`, all on this host.

- A rollout worker is killed (SIGKILL; ``--kills`` of them in a job, each once). Measured: the time to the next unit of work at
  its place; and the longest time between two steps of a trainer in the second after the kill, against the second before it.
- A trainer is killed (rank 0 and rank 1 in turn). Measured: the time to the next step of both ranks, from the checkpoint file;
  against the same job without rollout workers, in turn.

CLOCK_MONOTONIC throughout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from _bench import A_JOB, BROKEN, HERE, Result, Row, options, say
from _jobs import OURS, Broken, Job, Line, kept
from bench_killed_worker import recovered

MEASURES = (
    *A_JOB,
    "src/adapters/dlrover_adapters/peers.py",
    "src/adapters/dlrover_adapters/plain",
    "src/adapters/dlrover_adapters/torch",
)

UNIT_TARGET_S, GAP_TARGET, STEP_TARGET = 0.15, 1.05, 1.1
WINDOW_S, LOOK_S, BACK_S = 1.0, 0.02, 45.0
WARM, KILL_AT, ENDLESS = 30, 20, 1_000_000


class Kill(NamedTuple):
    """One rollout worker's. Seconds; ``before`` and ``after``: the longest time between two steps of one trainer."""

    unit_s: float
    before_s: float
    after_s: float


def job_file(folder: Path, rollouts: int, save_every: int) -> Path:
    """A job of two trainers, and of so many rollout workers; none: it has no such group."""
    scripts, diary = HERE / "scripts", folder / "diary"
    trainer = ["--diary", diary, "--checkpoint", folder / "state.pt", "--steps", ENDLESS, "--save-every", save_every]
    lines = [
        "[groups.trainer]",
        f'program = "{scripts / "ddp_step.py"}"',
        f"args = {json.dumps([str(one) for one in trainer])}",
        "nodes = 2",
    ]
    if rollouts:
        lines += [
            'uses = ["rollout"]',
            "[groups.rollout]",
            f'program = "{scripts / "rollout_units.py"}"',
            f"args = {json.dumps(['--diary', str(diary)])}",
            f"nodes = {rollouts}",
            'framework = "none"',
            'coupling = "each"',
            'uses = ["trainer"]',
            "ends = false",
        ]
    file = folder / "job.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@contextlib.contextmanager
def training(rollouts: int, save_every: int) -> Iterator[Job]:
    """Such a job, all of it at work. It is stopped at the end."""

    def make(folder: Path) -> Job:
        return Job(OURS, folder, (), ("--job", str(job_file(folder, rollouts, save_every))), script=None)

    def at_work(lines: list[Line]) -> bool:
        units = {line.rank for line in lines if line.what == "unit"}
        return len(units) == rollouts and max((line.step for line in lines if line.what == "step"), default=0) >= WARM

    with kept(make) as job:
        job.until(at_work, LOOK_S)
        yield job
        assert job.process is not None
        job.process.send_signal(signal.SIGTERM)
        job.wait()


def longest(lines: Sequence[Line], begin: float, end: float) -> float:
    """The longest time between two steps of one trainer, of those steps that end in this time."""
    found = 0.0
    for rank in (0, 1):
        at = [line.at for line in lines if line.what == "step" and line.rank == rank]
        found = max([found, *(after - earlier for earlier, after in pairwise(at) if begin <= after < end)])
    if not found:
        raise Broken(f"no trainer made two steps in {end - begin:g} s")
    return found


def pids(lines: Sequence[Line], what: str, rank: int) -> list[int]:
    """The workers of a rank or place, the newest last."""
    return list(dict.fromkeys(line.pid for line in lines if line.what == what and line.rank == rank))


def newest(job: Job, end: float) -> list[Line]:
    """The diary, when it tells of everything before ``end``."""
    return job.until(lambda lines: any(line.what == "step" and line.at >= end for line in lines[-50:]), LOOK_S)


def kill_rollouts(rollouts: int, kills: int) -> list[Kill]:
    """One job in which rollout workers are killed, one after the other."""
    found = []
    with training(rollouts, ENDLESS) as job:
        for place in range(kills):
            begin = time.monotonic()
            lines = newest(job, begin + WINDOW_S)
            (victim,) = pids(lines, "unit", place)
            seen, killed = len(lines), time.monotonic()
            os.kill(victim, signal.SIGKILL)

            def back(lines: list[Line], place: int = place, victim: int = victim, seen: int = seen) -> bool:
                return any(line.what == "unit" and line.rank == place and line.pid != victim for line in lines[seen:])

            job.until(back, LOOK_S, BACK_S)
            lines = newest(job, killed + WINDOW_S)
            unit = next(line.at for line in lines if line.what == "unit" and line.rank == place and line.pid != victim)
            found.append(
                Kill(
                    unit - killed,
                    longest(lines, begin, begin + WINDOW_S),
                    longest(lines, killed, killed + WINDOW_S),
                )
            )
        trainers = [pids(lines, "step", rank) for rank in (0, 1)]
        if any(len(one) != 1 for one in trainers):
            raise Broken(f"trainers were restarted by the death of rollout workers: pids {trainers}")
    return found


def kill_trainer(rollouts: int, rank: int) -> tuple[float, int]:
    """From a trainer's death to the next step of both; and how many rollout workers were restarted by it."""
    with training(rollouts, KILL_AT) as job:
        lines = job.lines()
        before = {pid for one in (0, 1) for pid in pids(lines, "step", one)}
        served = {place: pids(lines, "unit", place) for place in range(rollouts)}
        seen, killed = len(lines), time.monotonic()
        os.kill(pids(lines, "step", rank)[-1], signal.SIGKILL)
        lines = job.until(lambda lines: recovered(lines[seen:], before) > 0, LOOK_S, BACK_S)
        attempt = recovered(lines, before)
        steps = [line for line in lines if line.what == "step" and line.attempt == attempt]
        if min(line.step for line in steps) <= 1:
            raise Broken("trainers began anew: the checkpoint was not restored")
        took = max(min(line.at for line in steps if line.rank == one) for one in (0, 1)) - killed
        restarted = sum(pids(lines, "unit", place) != those for place, those in served.items())
        return took, restarted


def measure(result: Result, trials: int, rollouts: int, kills: int) -> None:
    """Both deaths."""
    killed: list[Kill] = []
    with_them, without, restarted = list[float](), list[float](), 0
    for number in range(trials):
        killed += kill_rollouts(rollouts, kills)
        last = killed[-kills:]
        say(
            f"{number + 1}/{trials}: {kills} rollout workers killed, the next unit after "
            + ", ".join(f"{1000 * one.unit_s:.0f}" for one in last)
            + " ms"
        )
        took, more = kill_trainer(rollouts, number % 2)
        with_them.append(took)
        restarted += more
        without.append(kill_trainer(0, number % 2)[0])
        say(
            f"{number + 1}/{trials}: a trainer killed, the next step after {1000 * took:.0f} ms beside {rollouts} rollout "
            f"workers, after {1000 * without[-1]:.0f} ms without them"
        )
    beside, alone = f"with {rollouts} rollout workers beside", "the same job without rollout workers, in turn"
    result.rows += [
        Row("killed rollout worker to the next unit at its place", "s", [one.unit_s for one in killed], (), UNIT_TARGET_S),
        Row(
            "longest time between two steps of a trainer, in the second after a rollout worker's death",
            "s",
            [one.after_s for one in killed],
            [one.before_s for one in killed],
            GAP_TARGET,
            "ratio",
            settings="the second before that death",
        ),
        Row(f"killed trainer to the next step of both, {beside}", "s", with_them, without, STEP_TARGET, "ratio", settings=alone),
        Row("rollout workers restarted by a trainer's death, in all trials", "workers", [float(restarted)], (), 0.0, n=trials),
    ]  # fmt: skip
    result.details["kills"] = [one._asdict() for one in killed]


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rollouts", type=int, default=6, metavar="N", help="rollout workers (default 6)")
        parser.add_argument(
            "--kills", type=int, default=6, metavar="N", help="of them killed in a job, each once (default 6)"
        )

    chosen = options(__doc__, more=more)
    result = Result("roles", "the same job, undisturbed or without rollout workers")
    try:
        measure(result, chosen.trials, chosen.rollouts, min(chosen.kills, chosen.rollouts))
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
