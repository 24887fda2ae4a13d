"""What does being launched by us cost a running script?

The same script (`scripts/fixed_work.py`), 2 ranks of DDP over gloo with 20 ms of matrix products a step, under `dlrover-run`
and under `torchrun --standalone` of an environment of its own, in turn: ABAB. The work is counted, not timed: so many products,
found once before, so that both do the same. It keeps the cores busy, for a script that slept would leave them to us and hide
all we do; with as many ranks as cores, every microsecond of agent, master and step signal is taken from the script.

Measured is steps per second from the end of step 30 to the end of the last one, by rank 0. The optimizer is torch's, so our
step signal is at work. The figure is the ratio of medians; the median step time is told beside it, as hiccups weigh less there.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from typing import NamedTuple

from _bench import A_JOB, BROKEN, HERE, Result, Row, median, options, say
from _jobs import OURS, TORCHRUN, Broken, peer_python, running

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/diagnosis", "src/dlrover_core/host")

SCRIPT = HERE / "scripts" / "fixed_work.py"
TARGET = 0.995
STEP_S, WARM_UP = 0.020, 30


class Pace(NamedTuple):
    """Of one job: steps per second all in all, and by the median step."""

    per_s: float
    median_per_s: float


def calibrate() -> int:
    """Matrix products that take `STEP_S` here, when a core has nothing else to do."""
    import torch

    sys.path.insert(0, str(SCRIPT.parent))
    from fixed_work import SIDE, work

    torch.set_num_threads(1)
    matrix, count, best = torch.randn(SIDE, SIDE), 100, float("inf")
    for _ in range(30):
        began = time.perf_counter()
        work(count, matrix)
        best = min(best, (time.perf_counter() - began) / count)
    return max(1, round(STEP_S / best))


def pace(launcher: str, work: int, steps: int) -> Pace:
    """One job."""
    with running(launcher, ["--work", str(work), "--steps", str(steps + WARM_UP)], script=SCRIPT) as job:
        code = job.wait()
        if code != 0:
            raise Broken(f"{launcher} ended with {code}; it said: {job.said()}")
        ends = [int(line) / 1e9 for line in job.diary.read_text().split()][WARM_UP - 1 :]
    return Pace(
        (len(ends) - 1) / (ends[-1] - ends[0]), 1 / median([after - before for before, after in pairwise(ends)])
    )


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps of a trial (default 500: 10 s)")

    chosen = options(__doc__, trials=15, more=more)
    result = Result("overhead", "torchrun --standalone (torch 2.13.0, its own environment)")
    found: dict[str, list[Pace]] = {OURS: [], TORCHRUN: []}
    try:
        peer_python()
        work = calibrate()
        say(f"{work} matrix products a step")
        for number in range(chosen.trials):
            # Who goes first changes: whatever drifts, drifts for both.
            for launcher in sorted(found, reverse=bool(number % 2)):
                found[launcher].append(pace(launcher, work, chosen.steps))
                say(f"{number + 1}/{chosen.trials} {launcher}: {found[launcher][-1].per_s:.3f} steps/s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    ours, peer = ([one.per_s for one in those] for those in found.values())
    calm, peer_calm = ([one.median_per_s for one in those] for those in found.values())
    result.rows += [
        Row("steps per second, 20 ms script", "/s", ours, peer, TARGET, "ratio", most=False),
        Row("by the median step", "/s", calm, peer_calm),
    ]
    by_pairs = [mine / theirs for mine, theirs in zip(ours, peer, strict=True)]
    result.details = {"products_per_step": work, "steps": chosen.steps, "median_of_paired_ratios": median(by_pairs)}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
