"""`dlrover simulate`: how much of its time would a job train, if it failed as others' do? Months of it in seconds."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import FAILED, OK, QUIET_S, USAGE

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState
    from dlrover_core.kernel.events import Record
    from dlrover_core.sim.constants import Constants
    from dlrover_core.sim.policies import Policy, Question
    from dlrover_core.sim.report import Comparison, Range, Report

EXAMPLES = """\
  dlrover simulate --nodes 64 --days 7                  a week, with failures as Llama 3 had them
  dlrover simulate --nodes 2048 --days 54 --failures llama3 --policy default --seed 7
  dlrover simulate --nodes 2048 --days 54 --no-range --json | jq '.policies[].goodput'
  dlrover simulate --nodes 512 --days 30 --failures rsc --set rate=2.34 --spares 0
  dlrover simulate --nodes 64 --days 7 --set load_s=120 --set last_call_s=5 --trace run.jsonl
  dlrover simulate --nodes 64 --days 7 --policy default --policy mine.toml
                                                        two policies on the same failures; mine.toml
                                                        has lines as checkpoint_every_s = 300.0

  --set and policy files take the names of the constants that are printed, of the fields of
  dlrover_core.sim.scenario.Scenario, of settings of the job (dlrover-run --show-config), and rate

  here 1 means that the job did not get through; the table is printed all the same"""
NODES_MAX, WORKERS_MAX, DAYS_MAX = 16_384, 64, 3_650
SPARES = "1%"
# Without a spare a job that needs all of its nodes stands still until one is repaired: so it may shrink.
MIN_SHARE = 0.9
EVERY = 10
START_US = 1_700_000_000_000_000


class _Wrong(Exception):
    """A file that cannot be read or written."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `simulate` takes."""
    from dlrover_core.sim.datasets import DATASETS

    parser.add_argument("--nodes", metavar="N", type=_whole("nodes", NODES_MAX), default=64, help="nodes (default 64)")
    parser.add_argument(
        "--workers-per-node", metavar="N", type=_whole("workers", WORKERS_MAX), default=8, help="of each (default 8)"
    )
    parser.add_argument("--days", metavar="D", type=_days, default=7.0, help="days of work (default 7)")
    parser.add_argument("--spares", metavar="N|P%", type=_spares, default=SPARES, help="idle hosts (default 1%%)")
    parser.add_argument(
        "--failures",
        metavar="NAME",
        choices=sorted(DATASETS),
        default="llama3",
        help=f"{', '.join(DATASETS)} (default llama3)",
    )
    parser.add_argument("--seed", metavar="N", type=_whole("seed", 2**63, least=0), default=0, help="default 0")
    parser.add_argument(
        "--policy",
        metavar="NAME|FILE",
        action="append",
        default=[],
        help="default, restart-all and restart-async (which are always there to compare with), or a TOML or JSON file of "
        "settings; again for more",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="for all policies; again for more",
    )
    parser.add_argument(
        "--range",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also with other seeds, and with all assumed constants halved, and doubled; takes five times as long (default: yes)",
    )
    parser.add_argument(
        "--seeds", metavar="N", type=_whole("seeds", 1000), default=3, help="of the range, from --seed on (default 3)"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write the first simulated job's events there, a line of JSON each"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one object")


def _whole(what: str, most: int, least: int = 1) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.replace("_", "").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{what}: a whole number from {least} to {most}, not {text!r}")
        return int(text)

    return number


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not 0 < days <= DAYS_MAX:
        raise argparse.ArgumentTypeError(f"days: a number above 0, to {DAYS_MAX}, not {text!r}")
    return days


def _spares(text: str) -> str:
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value <= (100 if text.endswith("%") else NODES_MAX) or (text == number and not number.isdecimal()):
        raise argparse.ArgumentTypeError(f"spares: a number of hosts, or a share of the nodes as 1%, not {text!r}")
    return text


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    return key.strip(), value.strip()


def run(args: argparse.Namespace) -> int:
    """`dlrover simulate`."""
    from dlrover_core.errors import CoreError, PlanError

    try:
        compared = _compare(args)
    except (PlanError, _Wrong) as error:
        print(f"dlrover simulate: {error}", file=sys.stderr)
        return USAGE
    except CoreError as error:
        print(f"dlrover simulate: the simulated job came to no end, a bug of ours: {error}", file=sys.stderr)
        return FAILED
    print(json.dumps(compared.values(), indent=2, ensure_ascii=False) if args.json else compared.text())
    return OK if all(one.outcome in ("succeeded", "ended") for one in compared.reports) else FAILED


def _compare(args: argparse.Namespace) -> Comparison:
    from dlrover_core.errors import PlanError
    from dlrover_core.sim.constants import Constants
    from dlrover_core.sim.policies import RESTART_ALL, RESTART_ASYNC, answer
    from dlrover_core.sim.report import Comparison

    named = list(dict.fromkeys([*(args.policy or ["default"]), RESTART_ALL, RESTART_ASYNC]))
    policies = _told_apart(named, [_policy(one) for one in named])
    changes = dict(args.set)
    question = _question(args, changes)
    constants = Constants.default().set(changes)
    for name, one in zip(named, policies, strict=True):
        try:
            constants.set(one.changes)
        except PlanError as error:
            raise _Wrong(f"{name}: {error}") from error
    reports: list[Report] = []
    ranges: list[Range | None] = []
    seeds: list[Range | None] = []
    with _progress() as progress, _trace(args.trace) as trace:
        for policy in policies:
            watch = [*progress(policy.name, question.days), *(trace if policy.engine else ())]
            reports.append(answer(question, policy, constants, watch, every=1 if args.trace else EVERY)[0])
            trace = trace if not policy.engine else []
            ranges.append(_range(question, policy, constants, progress) if args.range else None)
            many = args.range and args.seeds > 1
            seeds.append(_seeds(question, policy, constants, progress, args.seeds, reports[-1]) if many else None)
    asked = {
        "nodes": question.nodes,
        "workers_per_node": question.workers_per_node,
        "spares": question.spares,
        "nodes_min": dict(constants.scenario_fields).get("nodes_min", question.nodes_min) or question.nodes,
        "days": question.days,
        "failures": question.dataset.name,
        "seed": question.seed,
        "seeds": args.seeds,
        "set": dict(args.set),
        "policies_set": {one.name: dict(one.changes) for one in policies if one.changes},
    }
    return Comparison(asked, question.dataset, reports, ranges, seeds, constants.all)


def _question(args: argparse.Namespace, changes: dict[str, Any]) -> Question:
    """What is asked; of the settings it takes those that are not constants."""
    from dlrover_core.errors import PlanError
    from dlrover_core.sim.datasets import dataset
    from dlrover_core.sim.policies import Question

    spares = math.ceil(args.nodes * float(args.spares[:-1]) / 100) if args.spares.endswith("%") else int(args.spares)
    smallest = 0 if spares else math.ceil(args.nodes * MIN_SHARE)
    rate = None
    if "rate" in changes:
        try:
            rate = float(changes.pop("rate"))
        except ValueError:
            rate = math.nan
        if not 0 <= rate <= 1_000_000:
            raise PlanError("rate: failures per 1000 node-days, from 0 to 1,000,000")
    return Question(
        dataset(args.failures), args.nodes, args.days, args.seed, args.workers_per_node, spares, smallest, rate
    )


def _range(question: Question, policy: Policy, constants: Constants, progress: _Progress) -> Range:
    from dlrover_core.sim.policies import answer
    from dlrover_core.sim.report import Range

    ends = []
    for what, scaled in (("doubled", constants.doubled()), ("halved", constants.halved())):
        watch = progress(f"{policy.name}, assumed constants {what}", question.days)
        ends.append(answer(question, policy, scaled, watch, every=EVERY)[0].goodput)
    return Range(min(ends), max(ends))


def _seeds(
    question: Question, policy: Policy, constants: Constants, progress: _Progress, count: int, first: Report
) -> Range:
    from dlrover_core.sim.policies import answer
    from dlrover_core.sim.report import Range

    found = [first.goodput]
    for seed in range(question.seed + 1, question.seed + count):
        watch = progress(f"{policy.name}, seed {seed}", question.days)
        found.append(answer(question._replace(seed=seed), policy, constants, watch, every=EVERY)[0].goodput)
    return Range(min(found), max(found))


def _policy(text: str) -> Policy:
    """A policy by name, or from a file."""
    from dlrover_core.sim.policies import POLICIES, Policy, policy

    if text in POLICIES or not (Path(text).suffix in {".toml", ".json"} or Path(text).exists()):
        return policy(text)
    changes = _read(Path(text))
    flat = {key: value for key, value in changes.items() if isinstance(value, (bool, int, float, str))}
    if not isinstance(changes, dict) or flat.keys() != changes.keys():
        raise _Wrong(f"{text}: a policy file holds lines as checkpoint_every_s = 300.0, and nothing nested")
    return Policy(Path(text).stem, True, flat)


def _told_apart(named: Sequence[str], policies: Sequence[Policy]) -> list[Policy]:
    """A file's policy is called after it, and by its whole path where something else is called so."""
    from dlrover_core.sim.policies import POLICIES

    many = Counter([*POLICIES, *(one.name for text, one in zip(named, policies, strict=True) if text not in POLICIES)])
    return [one._replace(name=text) if many[one.name] > 1 else one for text, one in zip(named, policies, strict=True)]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return dict(json.loads(raw))
        return dict(import_module("tomllib").loads(raw))
    except ModuleNotFoundError as error:
        raise _Wrong(f"{path}: this Python is too old to read TOML; write it as JSON, FILE.json") from error
    except (OSError, ValueError, TypeError) as error:
        raise _Wrong(f"{path}: {error}") from error


if TYPE_CHECKING:
    Watch = Callable[[JobState, Record], None]
    _Progress = Callable[[str, float], Sequence[Watch]]


@contextmanager
def _progress() -> Iterator[_Progress]:
    """Says on stderr how far it is, once that takes longer than people wait in silence."""
    said, quiet, shown = time.monotonic(), QUIET_S, False
    tty = sys.stderr.isatty()

    def of(name: str, days: float) -> Sequence[Watch]:
        def watch(_state: JobState, record: Record) -> None:
            nonlocal said, quiet, shown
            now = time.monotonic()
            if now - said >= quiet:
                # On a terminal one line moves on; in a file there is to be one now and then.
                said, quiet, shown = now, 0.2 if tty else min(2 * quiet, 60.0), True
                words = f"dlrover simulate: {name}: day {(record.at - START_US) / 86_400e6:.1f} of {days:g}"
                print(f"\r{words}\x1b[K" if tty else words, end="" if tty else "\n", file=sys.stderr, flush=True)

        return [watch]

    try:
        yield of
    finally:
        if shown and tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _trace(name: str | None) -> Iterator[list[Watch]]:
    """Writes records to a file."""
    if name is None:
        yield []
        return
    from dlrover_adapters.cli.read import as_line
    from dlrover_core.history.plain import record_of

    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("w", encoding="utf-8"))
        except OSError as error:
            raise _Wrong(f"--trace {name}: {error}") from error
        yield [lambda _state, record: print(as_line(record_of(record)), file=file)]
