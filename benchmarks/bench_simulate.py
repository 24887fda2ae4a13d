"""How long does it take to live 54 days of 2,048 nodes?

The simulator (`dlrover_core.sim`) runs the real engine: 2,048 nodes of 8 workers, spares of one in a hundred, and 466 failures
in 54 days, as many as Llama 3 405B suffered (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 5), of which half
take a host away and the rest kill, fail or hang a worker. Each trial is a process of its own and one core, in turn: nobody
looks, then every promise of `dlrover_core.testing.invariants` is asked after every record, for which the log is decoded and
folded a second time. Seconds are the processor's, for the other core is somebody else's. Each trial draws other failures, and
both of its runs must come to one log.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

from _bench import BROKEN, Result, Row, options, say

from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.simulation import Simulation, uncollected
from dlrover_core.testing.invariants import DEFAULT

MEASURES = (
    "src/dlrover_core/diagnosis",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/rules",
    "src/dlrover_core/sim",
    "src/dlrover_core/testing/invariants.py",
)

FREE_TARGET_S, WATCHED_TARGET_S = 60.0, 180.0
DAY_S = 86_400.0
KINDS = ("kill_host", "kill_host", "kill_host", "kill_worker", "fail_worker", "hang_worker")


def plan(nodes: int, days: float, failures: int, seed: int) -> Plan:
    """The run: failures at times drawn evenly, before it begins."""
    dice = random.Random(seed)
    scenario = Scenario(
        nodes=nodes,
        workers_per_node=8,
        spares=max(1, nodes // 100),
        # What failures take away is made up for by the days beyond.
        steps=int(days * DAY_S / 10.0 * 0.96),
        step_s=10.0,
        checkpoint_steps=30,
        checkpoint_s=1.0,
        boot_s=60.0,
        start_s=5.0,
        load_s=60.0,
    )
    times = sorted(dice.uniform(0.0, days * DAY_S * 0.98) for _ in range(failures))
    faults = tuple(Fault(f"{at:.3f} s", dice.choice(KINDS), dice.randrange(100_000)) for at in times)
    return Plan(ENGINE, scenario, faults, seed)


def trial(args: argparse.Namespace, seed: int, *, watched: bool) -> tuple[float, int, int, str]:
    """Seconds, commands, records and the log's hash of one run, in a fresh process."""
    command = [sys.executable, __file__, "--one", "watched" if watched else "free"]
    command += [
        "--nodes",
        str(args.nodes),
        "--days",
        str(args.days),
        "--failures",
        str(args.failures),
        "--seed",
        str(seed),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        say(told.stderr)
        sys.exit(BROKEN)
    seconds, commands, records, log_hash, memory = told.stdout.split()
    say(f"seed {seed}, {'every record watched' if watched else 'nobody looks'}: {float(seconds):.1f} s, {memory} MiB")
    return float(seconds), int(commands), int(records), log_hash


def one(args: argparse.Namespace) -> None:
    """One run in this process."""
    watch = tuple(promise() for promise in DEFAULT) if args.one == "watched" else ()
    sim = Simulation(plan(args.nodes, args.days, args.failures, args.seed), watch, 1, keep=False, inputs=False)
    began = time.process_time()
    with uncollected():
        done = sim.run(1e9)
    seconds = time.process_time() - began
    assert done.outcome == "succeeded", done.outcome
    print(seconds, sim.commands, done.events, done.log_hash, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> int:
    """Measure and tell."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--nodes", type=int, default=2048, help="nodes (default 2048)")
        parser.add_argument("--days", type=float, default=54.0, help="virtual days (default 54)")
        parser.add_argument("--failures", type=int, default=466, help="failures (default 466)")
        parser.add_argument("--seed", type=int, default=7, help="the first trial's; each trial has its own (default 7)")
        parser.add_argument("--one", choices=["free", "watched"], help=argparse.SUPPRESS)

    args = options(__doc__, trials=3, more=more)
    if args.one:
        one(args)
        return 0
    result = Result("simulate", "none: no other control plane can be simulated", seed=args.seed)
    free: list[tuple[float, int, int, str]] = []
    watched: list[tuple[float, int, int, str]] = []
    for seed in range(args.seed, args.seed + args.trials):
        free.append(trial(args, seed, watched=False))
        watched.append(trial(args, seed, watched=True))
        if free[-1][1:] != watched[-1][1:]:
            say("two runs of one plan have different logs")
            return BROKEN
    full = (args.nodes, args.days, args.failures) == (2048, 54.0, 466)
    shape = f"{args.nodes} nodes, {args.days:g} days, {args.failures} failures"
    rows = ((shape, free, FREE_TARGET_S), ("the same, every promise after every record", watched, WATCHED_TARGET_S))
    for what, runs, target in rows:
        result.rows.append(Row(what, "s", [seconds for seconds, *_ in runs], target=target if full else None))
    rates = [commands / seconds for seconds, commands, *_ in free]
    result.rows.append(Row("commands to the engine, nobody looking", "per s", rates))
    _, commands, records, log_hash = free[0]
    result.details = {
        "commands": commands,
        "records": records,
        "log": log_hash,
        "promises": [one.__name__ for one in DEFAULT],
    }
    result.notes.append(f"seed {args.seed}: {commands:,} commands, {records:,} records, one core")
    return result.finish(Path(args.json) if args.json else None)


if __name__ == "__main__":
    sys.exit(main())
