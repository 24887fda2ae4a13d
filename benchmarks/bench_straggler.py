"""How soon is a rank found that computes 1.10 times as long, and how often is one named that does not?

Simulated, with the detector that runs: the worker's arithmetic (`Workload`, blocks of five steps), the agent's (`NodePace`) and
the leader's (`Paces`), one rank on each of 8 nodes, steps of 1 s, beats after every step. A step's cost is an overhead, a
part per token and attention's part; batches of 8 sequences make it vary by 15 %, on every rank for itself; each rank has 1 % of
noise of its own; the whole job goes up and down by 2 % with the day. The trainer reports tokens and squared lengths, as
`slow.explain` has it; the same without reports is told beside it.

- planted: jobs in which one rank becomes slower at some step; counted is from that step to the leader's command. Named too
  early, or another rank: not found. A change counts as found in time within 60 steps.
- fault-free: jobs of 1,000 hours; every command that names a rank is a false alarm.

The peers are rules on the same costs, by their sources: NVRx flags a rank below 0.75 of the fastest one or of its own best
(medians of 20 steps, its relative and individual scores); DLRover's network check one of more than twice the median of all. Both
are given what tokens explain, which they do not do themselves.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from _bench import Result, Row, median, options, quantile, say

from tools.figures import interval, rate_interval, share_interval  # isort: skip

from dlrover_core.diagnosis.changepoint import BLOCK_STEPS
from dlrover_core.diagnosis.workload import FITTED, SKIPPED, Workload
from dlrover_core.job.ranges import Member
from dlrover_core.job.stragglers import NoteSlow
from dlrover_core.job.world import World
from dlrover_core.runtime.paces import LossBeat, NodePace, Paces

MEASURES = ("src/dlrover_core/diagnosis", "src/dlrover_core/job/stragglers.py", "src/dlrover_core/runtime/paces.py")

NODES, SEQUENCES, DAY_S, STEP_S = 8, 8, 86_400, 1.0
CONSTANT_S, TOKEN_S, SQUARE_S, OWN_NOISE, DAY = 0.10, 4.1e-5, 3.4e-9, 0.01, 0.02
SOUGHT, WITHIN = 1.10, 60
RECALL_TARGET, ALARMS_TARGET, HOURS = 0.95, 0.3, 1_000
NVRX, TWICE = 0.75, 2.0
WINDOW = 20
NAMES = [f"worker-{rank}-0" for rank in range(NODES)]
WORLDS = {"worker": World(1, True, members=tuple(Member(name, 1, at) for at, name in enumerate(NAMES)), size=NODES)}
Array = Any


class Costs(NamedTuple):
    """Of one rank: what its blocks cost as the agent reads it, and every step as explained."""

    blocks: Array
    steps: Array


def costs(draw: Array, begin: int, steps: int, slow: Array, *, reports: bool, work: Workload) -> Costs:
    """The steps from ``begin`` on, so many times as long as ``slow`` says."""
    lengths = np.clip(draw.normal(2048, 640, (steps, SEQUENCES)), 64, None)
    tokens, squares = lengths.sum(axis=1), (lengths**2).sum(axis=1)
    day = 1 + DAY * np.sin(2 * math.pi * STEP_S * np.arange(begin, begin + steps) / DAY_S)
    own = np.exp(draw.normal(0, OWN_NOISE, steps))
    seconds = (CONSTANT_S + TOKEN_S * tokens + SQUARE_S * squares) * day * own * slow
    if not reports:
        # As much noise as the target names, which a batch's tokens alone do not make.
        seconds = 0.8 * day * own * slow * np.exp(draw.normal(0, 0.15, steps))
    else:
        at = 0
        while not work.fitted and at < steps:
            work.explained(float(seconds[at]), float(tokens[at]), float(squares[at]))
            at += 1
        constant, each, squared = work._weights
        seconds = (seconds / (constant + each * tokens + squared * squares))[at:]
    whole = len(seconds) // BLOCK_STEPS * BLOCK_STEPS
    return Costs(np.median(seconds[:whole].reshape(-1, BLOCK_STEPS), axis=1), seconds)


def named(ranks: list[Costs], first_step: int, paces: Paces, nodes: list[NodePace]) -> Iterator[tuple[int, int]]:
    """Step and rank of every command that the leader would be told."""
    for at in range(len(ranks[0].blocks)):
        step = first_step + (at + 1) * BLOCK_STEPS
        stands = False
        for node, rank in zip(nodes, ranks, strict=True):
            node.read(0, 1, (float(rank.blocks[at]),), step, step * STEP_S)
            stands = stands or node._ranks[0].changes.slow is not None
        if stands:
            for rank, node in enumerate(nodes):
                paces.take(NAMES[rank], 1, node.beat(rank), LossBeat())
            for found in paces.compared(WORLDS, set(), step * STEP_S):
                if isinstance(found, NoteSlow):
                    yield step, found.rank


def windows(steps: Array) -> Array:
    """Medians of 20 steps, side by side."""
    whole = len(steps) // WINDOW * WINDOW
    return np.median(steps[:whole].reshape(-1, WINDOW), axis=1)


class Case(NamedTuple):
    """One planted change: steps to each rule's finding, or None."""

    ours: int | None
    nvrx: int | None
    twice: int | None


def planted(seed: int, times: float, *, reports: bool, patience: int = 1500) -> Case:
    """One job in which a rank becomes slower."""
    draw, choose = np.random.default_rng(seed), random.Random(seed)
    victim, normal = choose.randrange(NODES), 1500 + choose.randrange(1000)
    learnt = SKIPPED + FITTED if reports else 0
    ranks = []
    for rank in range(NODES):
        slow = np.ones(normal + patience)
        if rank == victim:
            slow[normal:] = times
        begin = choose.randrange(DAY_S) if rank == 0 else 0
        ranks.append(costs(draw, begin, normal + patience, slow, reports=reports, work=Workload()))
    found = next(named(ranks, learnt, Paces(), [NodePace() for _ in range(NODES)]), None)
    ours = found[0] - normal if found is not None and found[1] == victim and found[0] > normal else None
    return Case(ours, *by_peers(ranks, victim, normal - learnt))


def by_peers(ranks: list[Costs], victim: int, change: int) -> tuple[int | None, int | None]:
    """The first window that each of the peers' rules would name the victim in."""
    values = np.array([windows(rank.steps) for rank in ranks])
    best = np.minimum.accumulate(values, axis=1)
    relative, individual = values.min(axis=0) / values, best / values
    nvrx = (relative < NVRX) | (individual < NVRX)
    twice = values > TWICE * np.median(values, axis=0)
    found: list[int | None] = []
    for flags in (nvrx, twice):
        after = [int(at) for at in np.flatnonzero(flags[victim]) if (at + 1) * WINDOW > change]
        found.append((after[0] + 1) * WINDOW - change if after else None)
    return found[0], found[1]


def fault_free(seed: int, hours: int, *, reports: bool) -> tuple[int, int, int]:
    """False alarms of one job: ours, NVRx's, twice the median's (ranks named in windows, each rank once)."""
    draw = np.random.default_rng(seed)
    paces, nodes, works = Paces(), [NodePace() for _ in range(NODES)], [Workload() for _ in range(NODES)]
    step, total, ours = 0, round(hours * 3600 / STEP_S), 0
    peers: tuple[set[int], set[int]] = (set(), set())
    while step < total:
        count = min(100_000, total - step)
        ranks = [costs(draw, step, count, np.ones(count), reports=reports, work=work) for work in works]
        ours += sum(1 for _ in named(ranks, step, paces, nodes))
        for rank in range(NODES):
            for found, seen in zip(by_peers(ranks, rank, 0), peers, strict=True):
                if found is not None:
                    seen.add(rank)
        step += count
    return ours, len(peers[0]), len(peers[1])


def main() -> int:
    """Measure planted slowdowns first, then fault-free hours."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--cases", type=int, default=200, metavar="N", help="planted changes (default 200)")
        parser.add_argument("--hours", type=int, default=HOURS, metavar="N", help=f"of a fault-free job ({HOURS})")
        parser.add_argument("--seed", type=int, default=1, metavar="N")

    chosen = options(__doc__, trials=3, more=more)
    result = Result("straggler", "NVRx's scores below 0.75, and DLRover's twice the median", seed=chosen.seed)
    cases = [planted(chosen.seed * 10_000 + at, SOUGHT, reports=True) for at in range(chosen.cases)]
    delays = [one.ours for one in cases if one.ours is not None]
    say(f"planted {SOUGHT}x: {len(delays)} of {len(cases)} found, the median after {median(delays or [0])} steps")
    shares = [
        sum(1 for one in found if one is not None and one <= WITHIN) / len(cases) for found in zip(*cases, strict=True)
    ]
    curve: dict[str, Any] = {}
    for times in (1.05, 1.2, 1.5, 2.2):
        some = [planted(chosen.seed * 20_000 + at, times, reports=True) for at in range(max(1, chosen.cases // 10))]
        rules = zip(Case._fields, zip(*some, strict=True), strict=True)
        curve[f"{times}x"] = {
            name: sum(1 for one in found if one is not None and one <= WITHIN) / len(some) for name, found in rules
        }
        say(f"planted {times}x, found within {WITHIN} steps: {curve[f'{times}x']}")
    dark = [planted(chosen.seed * 30_000 + at, SOUGHT, reports=False) for at in range(max(1, chosen.cases // 4))]
    late = [one.ours for one in dark if one.ours is not None]
    alarms = []
    for trial in range(chosen.trials):
        alarms.append(fault_free(chosen.seed * 40_000 + trial, chosen.hours, reports=True))
        say(f"fault-free {chosen.hours} h, {trial + 1}/{chosen.trials}: false alarms {alarms[-1]}")
    unexplained = fault_free(chosen.seed * 50_000, chosen.hours, reports=False)
    say(f"fault-free {chosen.hours} h, nothing reported: false alarms {unexplained}")
    mean = [sum(one) / len(alarms) for one in zip(*alarms, strict=True)]
    result.rows += [
        Row(
            f"slowdowns of {SOUGHT:.2f}x found within {WITHIN} steps, simulated",
            "%",
            [100 * shares[0]],
            [100 * shares[1]],
            100 * RECALL_TARGET,
            most=False,
            settings="NVRx's rule, whose threshold of 0.75 cannot see a slowdown of less than 1.33x",
            constant=True,
            n=len(cases),
            within=tuple(100 * one for one in share_interval(round(shares[0] * len(cases)), len(cases))),
        ),
        Row(
            "steps until it is found, 95 in 100",
            "steps",
            [quantile(delays, 0.95)] if delays else [math.inf],
            (),
            WITHIN,
            n=len(delays),
            within=interval(delays, 0.95),
        ),
        Row(
            f"false alarms per job in {chosen.hours} h",
            "alarms",
            [mean[0]],
            [mean[1]],
            ALARMS_TARGET,
            n=len(alarms),
            within=rate_interval(sum(one[0] for one in alarms), len(alarms)),
        ),
        Row(
            "the same, where nothing is reported",
            "alarms",
            [unexplained[0]],
            [unexplained[1]],
            ALARMS_TARGET,
            n=1,
            within=rate_interval(unexplained[0], 1),
        ),
    ]
    result.notes += [
        f"simulated: {NODES} ranks, sequence noise 15 %, by the day 2 %, own {OWN_NOISE:.0%}; {len(alarms)} + 1 fault-free jobs",
        "the peer's column is NVRx's rule; DLRover's twice the median is in the details",
        f"no tokens reported: {SOUGHT}x found in {len(late)} of {len(dark)}, the median after {median(late or [0]):g} steps",
    ]
    result.details = {
        "cases": len(cases),
        "found_at_all": len(delays) / len(cases),
        "delay_steps": {"median": median(delays or [0]), "most": max(delays, default=0)},
        "within_60_steps": {"ours": shares[0], "nvrx": shares[1], "twice_the_median": shares[2]},
        "other_slowdowns_within_60_steps": curve,
        "unreported": {
            "found": len(late) / len(dark),
            "delay_steps": {"median": median(late or [0]), "most": max(late, default=0)},
        },
        "false_alarms": {"ours": mean[0], "nvrx": mean[1], "twice_the_median": mean[2]},
    }
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
