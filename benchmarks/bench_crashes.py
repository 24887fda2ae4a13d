"""How long does it take to let a master die at every place of a history, and what do promises cost?

One history of about 10,000 events: 64 nodes of 8 workers, of which workers, nodes, hosts and masters die in turn every 20 steps,
simulated on the real engine. Then, each trial in turn:

- walk: a successor takes over at every command of it, as `dlrover_core.testing.crashes.walk` says;
- crash at every index: the run itself with every promise, the walk, and whole runs that are crashed, evenly spread over it;
- promises: a history of 2,048 nodes is folded with every default invariant after every event, and without any.

Times are this process's, on one core: what others do on the machine counts for less. There is no peer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from _bench import BROKEN, Result, Row, options, say

from dlrover_core.sim.faults import Fault
from dlrover_core.sim.run import Run
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.crashes import crash_at_every_index, walk
from dlrover_core.testing.invariants import DEFAULT, watched

MEASURES = (
    "src/dlrover_core/diagnosis",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/rules",
    "src/dlrover_core/sim",
    "src/dlrover_core/testing",
)

EVENTS = 10_000
TARGET_S, TARGET_PER_S = 60.0, 150_000
KINDS = ("kill_worker", "kill_node", "fail_worker", "kill_worker", "crash_master", "kill_host")
EVERY_STEPS = 20
FEW = 10
"""Whole runs at a smaller size."""
SCENARIO = Scenario(nodes=64, workers_per_node=8, spares=8)
LARGE = Scenario(nodes=2048, workers_per_node=8, spares=20)


def faults(count: int) -> tuple[Fault, ...]:
    """So many faults, one every so many steps."""
    return tuple(Fault(f"step {EVERY_STEPS * nth}", KINDS[nth % len(KINDS)], 7 * nth) for nth in range(1, count + 1))


def plan(scenario: Scenario, count: int) -> Plan:
    """A job that is struck by so many faults."""
    return Plan("engine", replace(scenario, steps=EVERY_STEPS * (count + 2)), faults(count))


def history(events: int, nodes: int) -> Plan:
    """A job whose history has at least so many events."""
    scenario, few = replace(SCENARIO, nodes=min(SCENARIO.nodes, nodes)), min(16, max(1, events // 500))
    count = few * events // simulate(plan(scenario, few)).events
    while simulate(plan(scenario, count)).events < events:
        count += 1
    return plan(scenario, count)


def timed(work: Callable[[], object]) -> float:
    """Seconds of processor time that ``work`` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def rate(run: Run) -> float:
    """Events per second that all promises together take, the fold not counted."""
    bare = timed(lambda: watched(run.records))
    return run.events / max(timed(lambda: watched(run.records, DEFAULT)) - bare, 1e-9)


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--events", type=int, default=EVENTS, metavar="N", help=f"of the history (default {EVENTS})"
        )
        parser.add_argument(
            "--nodes",
            type=int,
            default=LARGE.nodes,
            metavar="N",
            help="of the folded job, the most of the other (default 2048)",
        )

    args = options(__doc__, trials=3, more=more)
    result = Result("crashes", "none")
    whole = (args.events, args.nodes) == (EVENTS, LARGE.nodes)
    told = history(args.events, args.nodes)
    run = simulate(told, inputs=True)
    if run.outcome != "succeeded" or run.missed:
        say(f"the job ended as {run.outcome}, {len(run.missed)} faults struck nobody: there is nothing to measure")
        return BROKEN
    say(f"{run.events} events, {len(run.inputs)} commands")
    walks, wholes, rates = [], [], []
    large = simulate(plan(replace(LARGE, nodes=args.nodes), 12))
    for trial in range(args.trials):
        walks.append(timed(lambda: walk(run.inputs, run.records)))
        began = time.process_time()
        done = crash_at_every_index(told.scenario, told.faults, runs=None if whole else FEW)
        wholes.append(time.process_time() - began)
        say(str(done))
        rates.append(rate(large))
        say(f"trial {trial + 1}: walk {walks[-1]:.1f} s, whole {wholes[-1]:.1f} s, {rates[-1]:,.0f} events/s promised")
    result.rows = [
        Row("a successor at every command of the history", "s", walks),
        Row("crash at every index of it, whole runs included", "s", wholes, target=TARGET_S if whole else None),
        Row(
            f"every invariant after every event, {args.nodes:,} nodes",
            "1/s",
            rates,
            target=TARGET_PER_S if whole else None,
            most=False,
        ),
    ]
    result.notes.append(f"the history: {done}")
    result.details = {
        "events": run.events,
        "commands": len(run.inputs),
        "large_events": large.events,
        "whole_runs": done.runs,
    }
    return result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
