"""How much of its time does a job of 16,384 GPUs train, when it fails as Llama 3's did?

2,048 nodes of 8 workers for 54 days, failures by `dlrover_core.sim.datasets` (llama3: 419 unexpected and 47 planned
interruptions), each trial another seed. Ours is the real engine in a simulated cluster; the peers are models of torchrun with a
watchdog on the same failures: restart-all, whose training stands still until storage has a checkpoint, and restart-async, which
writes it beside training. With 1 % of spare hosts; and without any, where the job may shrink to 90 %.

No GPU is involved: what the data plane takes is a constant, measured by other benchmarks of ours or assumed. All constants are
printed, with their marks. A figure's interval holds all seeds, and the first one with every assumed constant doubled, and halved:
a target inside it is not decided.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

from _bench import BROKEN, Result, Row, options, say, table

from dlrover_core.errors import CoreError
from dlrover_core.sim.constants import Constants
from dlrover_core.sim.datasets import ACME, dataset
from dlrover_core.sim.policies import OURS, RESTART_ALL, RESTART_ASYNC, Policy, Question, answer, policy

from tools.completion import completion  # isort: skip
from tools.figures import share_interval  # isort: skip

MEASURES = (
    "src/dlrover_core/diagnosis",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/rules",
    "src/dlrover_core/sim",
    "tools/completion.py",
)

PEERS = {
    RESTART_ALL: "restart-all: stands still to save",
    RESTART_ASYNC: "restart-async: saves beside training",
}
TARGETS = {"1 % spares": 99.0, "no spares": 98.5}
MIN_SHARE = 0.9


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=2048, metavar="N", help="nodes (default 2048); no target below")
    parser.add_argument(
        "--days", type=float, default=54.0, metavar="D", help="days of work (default 54); no target below"
    )
    parser.add_argument("--failures", default="llama3", metavar="NAME", help="data set (default llama3)")
    parser.add_argument("--jobs", type=int, default=400, metavar="N", help="jobs of the completion rate (default 400)")
    parser.add_argument("--no-range", action="store_true", help="leave out the assumed constants doubled and halved")


def goodput(question: Question, of: Policy, constants: Constants) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    report, _ = answer(question, of, constants)
    say(f"{of.name}, seed {question.seed}: {100 * report.goodput:.2f} % in {time.perf_counter() - began:.0f} s")
    return 100 * report.goodput, report.values()


def measure(result: Result, args: argparse.Namespace, constants: Constants, what: str, spares: int) -> None:
    nodes_min = 0 if spares else math.ceil(args.nodes * MIN_SHARE)
    questions = [
        Question(dataset(args.failures), args.nodes, args.days, seed, 8, spares, nodes_min)
        for seed in range(1, args.trials + 1)
    ]
    found = {name: [goodput(one, policy(name), constants) for one in questions] for name in (OURS, *PEERS)}
    shares = {name: [share for share, _ in those] for name, those in found.items()}
    ends = dict.fromkeys(found, ())
    if not args.no_range:
        both = (constants.doubled(), constants.halved())
        ends = {name: tuple(goodput(questions[0], policy(name), one)[0] for one in both) for name in found}
    within = {name: (min(*shares[name], *ends[name], 100.0), max(*shares[name], *ends[name], 0.0)) for name in found}
    whole = args.nodes >= 2048 and args.days >= 54 and args.failures == "llama3"
    target = TARGETS[what] if whole and len(questions) > 1 and not args.no_range else None
    low, high = within[OURS]
    for name, settings in PEERS.items():
        told = f"{settings}, {within[name][0]:.4g} to {within[name][1]:.4g}"
        result.rows.append(
            Row(
                f"{what}: goodput",
                "%",
                shares[OURS],
                shares[name],
                target,
                most=False,
                settings=told,
                within=within[OURS],
            )
        )
        lost = ([100 - share for share in shares[one]] for one in (OURS, name))
        rest = (100 - high, 100 - low)
        result.rows.append(Row(f"{what}: time without new steps", "%", *lost, settings=settings, within=rest))
    result.details[what] = {name: those[0][1] for name, those in found.items()}
    result.details[what]["doubled, halved"] = ends


def complete(result: Result, jobs: int, constants: Constants) -> None:
    """Jobs of a service that get to their end; the peer ends with its first failure."""
    say(f"{jobs} jobs of the acme mix")
    told = completion(ACME, jobs, 1, constants)
    within = tuple(100 * one for one in share_interval(round(told.ladder * jobs), jobs))
    without = "the first failure ends the job"
    result.rows.append(
        Row(
            "acme's jobs that get to their end",
            "%",
            [100 * told.ladder],
            [100 * told.without],
            settings=without,
            n=jobs,
            within=within,
        )
    )
    result.details["acme"] = told._asdict()


def main() -> int:
    args = options(__doc__, trials=3, more=more)
    constants = Constants.default()
    result = Result("goodput", "models of torchrun with a watchdog, on the same failures", seed=1)
    try:
        measure(result, args, constants, "1 % spares", math.ceil(args.nodes / 100))
        measure(result, args, constants, "no spares", 0)
        complete(result, args.jobs, constants)
    except CoreError as error:
        print(f"goodput: {error}", file=sys.stderr)
        return BROKEN
    print(table([(one.name, f"{one.value:.4g} {one.unit}", one.mark, one.doc, one.source) for one in constants.all]))
    result.details["constants"] = [one._asdict() for one in constants.all]
    result.notes += [
        f"{args.nodes} nodes of 8, {args.days:g} days, {dataset(args.failures).title}; {dataset(args.failures).source}",
        "simulated: what the data plane takes is assumed where no benchmark of ours measures it; see details.constants",
        "DLRover reports completion rates of 89 and 95 %, for a mix that is not published: acme's fails by its own programs",
    ]
    return result.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
