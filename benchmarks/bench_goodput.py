"""How much of its time does a job of 16,384 GPUs train, when it fails as Llama 3's did?

2,048 nodes of 8 workers for 54 days, failures by `dlrover_core.sim.datasets` (llama3: 419 unexpected and 47 planned
interruptions), each trial another seed. Ours is the real engine in a simulated cluster; the peer is restart-all, a model of
torchrun with a watchdog, on the same failures. With 1 % of spare hosts; and without any, where the job may shrink to 90 %.

No GPU is involved: what the data plane takes is a constant, measured by other benchmarks of ours or assumed. All constants are
printed, with their marks. The range, of the first seed, is the same with every assumed constant doubled, and halved; a figure
that meets its target only at one end of it says so.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

from _bench import BROKEN, Result, Row, options, say, table

from dlrover_core.errors import CoreError
from dlrover_core.sim import completion
from dlrover_core.sim.constants import Constants
from dlrover_core.sim.datasets import ACME, dataset
from dlrover_core.sim.policies import Policy, Question, answer, policy

MEASURES = (
    "src/dlrover_core/diagnosis",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/rules",
    "src/dlrover_core/sim",
)

TARGETS = {"1 % spares": 99.0, "no spares": 98.5}
MIN_SHARE = 0.9


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=2048, metavar="N", help="nodes (default 2048); no target below")
    parser.add_argument(
        "--days", type=float, default=54.0, metavar="D", help="days of work (default 54); no target below"
    )
    parser.add_argument("--failures", default="llama3", metavar="NAME", help="data set (default llama3)")
    parser.add_argument("--jobs", type=int, default=400, metavar="N", help="jobs of the completion rate (default 400)")
    parser.add_argument("--no-range", action="store_true", help="leave out the range: four runs less")


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
    ours, peer = ([goodput(one, policy(name), constants) for one in questions] for name in ("default", "restart-all"))
    whole = args.nodes >= 2048 and args.days >= 54 and args.failures == "llama3"
    result.rows.append(
        Row(
            f"{what}: goodput",
            "%",
            [share for share, _ in ours],
            [share for share, _ in peer],
            TARGETS[what] if whole else None,
            most=False,
        )
    )
    lost = ([100 - share for share, _ in one] for one in (ours, peer))
    result.rows.append(Row(f"{what}: time without new steps", "%", *lost))
    result.details[what] = {"ours": ours[0][1], "restart-all": peer[0][1]}
    if args.no_range:
        return
    for end, scaled in (("doubled", constants.doubled()), ("halved", constants.halved())):
        row = f"{what}: assumed constants {end}"
        first = questions[0]
        own, theirs = (goodput(first, policy(name), scaled)[0] for name in ("default", "restart-all"))
        result.rows.append(Row(row, "%", [own], [theirs]))


def complete(result: Result, jobs: int, constants: Constants) -> None:
    """Jobs of a service that get to their end; the peer ends with its first failure."""
    say(f"{jobs} jobs of the acme mix")
    told = completion.completion(ACME, jobs, 1, constants)
    result.rows.append(Row("acme's jobs that get to their end", "%", [100 * told.ladder], [100 * told.without]))
    wrong = told.cured.get("user", (0, 0))
    struck = sum(one for one, _ in told.cured.values()) - wrong[0]
    cured = sum(one for _, one in told.cured.values()) - wrong[1]
    if struck:
        result.rows.append(
            Row("  of those that something else than their program struck", "%", [100 * cured / struck], [0.0])
        )
    result.details["acme"] = told._asdict()


def main() -> int:
    args = options(__doc__, trials=3, more=more)
    constants = Constants.default()
    result = Result("goodput", "restart-all, a model of torchrun with a watchdog, on the same failures")
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
