"""Elastic data in real jobs under `dlrover-run`: what it costs a recovery, and what a slow rank costs.

Recovery: two ranks of DDP over gloo with states in memory. Jobs with an ElasticDataset and without one run in turn; in each, a
rank gets SIGKILL some times, rank 0 and rank 1 in turn, and the time is from the signal to the moment when both ranks of
the new attempt have completed a step. Once the batches are made in the process that trains, and once by 2 loader processes of
each rank.

A slow rank: four ranks of DDP, whose forward takes 2 ms a sample, and the last one's three times as long. The time of an epoch
over T n / (n - 1 + s), T being what it takes n ranks of full pace; with ``quota="measured"``, and with equal quotas beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from _bench import BROKEN, HERE, Result, Row, options, say
from _jobs import OURS, Broken, Job, Line, kept, running
from bench_killed_worker import recovered

MEASURES = (
    "src/dlrover_core/data",
    "src/adapters/dlrover_adapters/data",
    "src/adapters/dlrover_adapters/torch/data",
    "src/adapters/dlrover_adapters/torch/checkpoint",
)

KILLED, SLOWED = HERE / "scripts" / "data_step.py", HERE / "scripts" / "slow_rank.py"
LAUNCH = ("--nproc-per-node", "2", "--max-restarts", "100")
BETWEEN = 15
"""Steps that both ranks make between two kills."""
BACK_LIMIT_S = 30.0
MORE_MS, IDEAL = 20.0, 1.15
RANKS, BATCH, PACE_S, SLOW = 4, 256, 0.002, 3.0
EQUAL_STEPS = 20
"""Equal quotas take each step as long as the one before: a part of the epoch tells as much."""


def kills_ms(kind: str, loaders: int, kills: int) -> list[float]:
    """One job; milliseconds from each kill to the next step of both ranks. Raises `Broken`."""
    found: list[float] = []
    with running(OURS, [kind, str(loaders)], LAUNCH, KILLED) as job:
        gone: set[int] = set()
        for number in range(kills):
            job.until(lambda lines, gone=frozenset(gone): _went_on(lines, gone))  # type: ignore[misc]
            before = {one.pid for one in job.lines()}
            victim = next(one.pid for one in reversed(job.lines()) if one.rank == number % 2)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            lines = job.until(lambda lines, before=before: recovered(lines, before) > 0, 0.001, BACK_LIMIT_S)  # type: ignore[misc]
            attempt = recovered(lines, before)
            steps = [one for one in lines if one.what == "step" and one.attempt == attempt]
            found.append(1000 * (max(min(one.at for one in steps if one.rank == rank) for rank in (0, 1)) - killed))
            gone |= before
    return found


def _went_on(lines: Sequence[Line], gone: Collection[int]) -> bool:
    """Have both ranks of the present attempt made some steps?"""
    made = [one.rank for one in lines if one.what == "step" and one.pid not in gone]
    return min(made.count(rank) for rank in (0, 1)) >= BETWEEN


def epoch_ratio(quota: str, steps: int) -> tuple[float, list[int]]:
    """The time of an epoch of so many steps over the ideal, and the quotas of its last step. Raises `Broken`."""
    with tempfile.TemporaryDirectory(prefix="dlb-slow-") as folder:
        told = Path(folder) / "told"
        line = [str(SLOWED), quota, str(steps), str(BATCH), str(PACE_S), str(SLOW), str(told)]
        launch = ("--nproc-per-node", str(RANKS), *line)
        with kept(lambda home: Job(OURS, home, (), launch, None)) as job:
            code = job.wait()
            if code:
                raise Broken(f"the job ended with {code}: {job.said()}")
        found = json.loads(told.read_text())
    return found["s"] / (steps * BATCH * PACE_S / (RANKS - 1 + 1 / SLOW)), found["quota"]


def recoveries(result: Result, trials: int, kills: int) -> None:
    """With data and without, in turn."""
    for loaders, how, settings in (
        (0, "batches made in the process", "the same script with random batches"),
        (2, "2 loader processes a rank", "the same script with a DataLoader over a DistributedSampler"),
    ):
        ours, theirs = list[float](), list[float]()
        for number in range(trials):
            say(f"killed workers, {how}, {number + 1}/{trials}")
            ours += kills_ms("elastic", loaders, kills)
            theirs += kills_ms("plain", loaders, kills)
        more = [mine - one for mine, one in zip(ours, theirs, strict=True)]
        result.rows += [
            Row(f"killed worker to next step with an ElasticDataset, {how}", "ms", ours, theirs, settings=settings),
            Row(f"the same: more than without, {how}", "ms", more, target=MORE_MS),
        ]


def slow_rank(result: Result, trials: int, epoch_s: float) -> None:
    """Measured quotas and equal ones."""
    steps = max(2, round(epoch_s / (BATCH * PACE_S / (RANKS - 1 + 1 / SLOW))))
    measured = list[float]()
    for number in range(trials):
        say(f"a slow rank, {number + 1}/{trials}")
        ratio, quota = epoch_ratio("measured", steps)
        measured.append(ratio)
        result.details[f"quotas {number + 1}"] = quota
    equal = [epoch_ratio("equal", min(steps, EQUAL_STEPS))[0] for _ in range(trials)]
    what = "one of 4 ranks 3x slower, quotas by measured cost: the epoch over the ideal"
    result.rows.append(Row(what, "x", measured, equal, target=IDEAL, settings="equal quotas"))


def main() -> int:
    """Recoveries, and a slow rank."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kills", type=int, default=4, help="kills in each job (4)")
        parser.add_argument("--epoch-s", type=float, default=30.0, help="ideal time of the slow rank's epoch (30)")

    chosen = options(__doc__, trials=5, more=more)
    result = Result("data_jobs", "the same jobs without what is measured")
    try:
        recoveries(result, chosen.trials, chosen.kills)
        slow_rank(result, chosen.trials, chosen.epoch_s)
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
