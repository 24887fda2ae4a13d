"""Pods are taken away with a notice: which steps are made twice, and what does that cost of the job's budgets?

Two nodes with one worker each train `scripts/kept.py` with FlashCheckpoint, which saves every tenth step into memory. Nodes are
pods of a fake cluster of four hosts, whose kubelet runs them as processes. Each story is a job of its own:

- evicted: one pod is evicted through the API, with a grace of 30 s;
- shutdown: a host says SIGTERM to its pods, and has 30 s, as a spot host that is reclaimed;
- drained: the host of one node is cordoned and drained, as `kubectl drain` does, which asks again each 5 s for what the
  disruption budget keeps;
- both: the hosts of both nodes are drained at once;
- kueue: the job runs in a queue of the scripted Kueue, which takes the quota of all its nodes back. When no pod is left there is
  quota again. States are written to a folder, too.

Counted are (rank, step) pairs that were made twice, from the log what the job's budgets were charged, and incidents; measured is
how long nobody made a step: from the last one of the old world to the first that all ranks of the new one made.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from _bench import BROKEN, HERE, Result, Row, options, say
from _hosts import all_step, stepping
from _jobs import Broken, Job, Line
from _pods import Cluster, cluster, in_pods
from bench_killed_node import wait_warm

from dlrover_core.job.incidents import ActionChosen, IncidentOpened

MEASURES = (
    "src/adapters/dlrover_adapters/agent",
    "src/adapters/dlrover_adapters/torch/checkpoint",
    "src/backends/dlrover_backends/k8s",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)

SCRIPT = HERE / "scripts" / "kept.py"
HOSTS, RANKS = 4, 2
BEGUN, MORE = 25, 20
"""Steps before the notice, and after the change."""
EVERY = 10
BACK_LIMIT_S = 120.0
GRACE_S = 30
WHAT = {
    "evicted": "a pod is evicted, {:g} s of grace",
    "shutdown": "a host shuts down, {:g} s of grace",
    "drained": "one host is drained",
    "both": "two hosts are drained at once",
    "kueue": "Kueue takes the quota back, and gives it again",
}


class Left(NamedTuple):
    """The effects of one notice.

    lost:      steps that a rank made twice
    spent:     units of budgets
    incidents: how many were opened
    stood:     longest time between two steps, in seconds
    away:      seconds from the order until the pods that were to go were gone
    """

    lost: int
    spent: int
    incidents: int
    stood: float
    away: float


@contextlib.contextmanager
def training(mib: int, grace_s: float, queue: bool = False) -> Iterator[tuple[Cluster, Job]]:
    """A job that trains undisturbed, in a cluster. Raises `Broken`."""
    shape = {"nodes": HOSTS, **({"quota": RANKS} if queue else {})}
    with cluster(**shape) as of:
        script = [
            "--mib",
            str(mib),
            "--every",
            str(EVERY),
            *(["--store", f"file://{of.folder}/stored"] if queue else []),
        ]
        options = ["--queue", "research"] if queue else []
        with in_pods(of, script, *options, program=SCRIPT, more=f",grace_s={grace_s:g}") as job:
            job.until(lambda lines: stepping(lines, RANKS, BEGUN), 0.01)
            wait_warm(job, RANKS)
            yield of, job


def evicted(of: Cluster, _: float) -> Callable[[], float]:
    """One pod goes."""
    return _gone(of, of.tell("evict", "worker-1-0"), "worker-1-0")


def shutdown(of: Cluster, grace_s: float) -> Callable[[], float]:
    """One host goes."""
    return _gone(of, of.tell("shut", str(of.tell("host", "worker-1-0")), f"{grace_s:g}"), "worker-1-0")


def drained(of: Cluster, _: float) -> Callable[[], float]:
    """One host is drained."""
    return _gone(of, of.tell("drain", str(of.tell("host", "worker-1-0"))), "worker-1-0")


def both(of: Cluster, _: float) -> Callable[[], float]:
    """The hosts of both nodes are drained."""
    hosts = {str(of.tell("host", f"worker-{index}-0")) for index in range(RANKS)}
    began = of.tell("drain", *sorted(hosts))
    return _gone(of, began, "worker-0-0", "worker-1-0")


def kueue(of: Cluster, _: float) -> Callable[[], float]:
    """All nodes go, and come back later."""
    of.tell("quota", "0")
    began = of.tell("take", str(RANKS))

    def back() -> float:
        took = of.tell("empty") - began
        of.tell("quota", str(RANKS))
        return took

    return back


def _gone(of: Cluster, began: float, *nodes: str) -> Callable[[], float]:
    """Waits until these nodes' pods are gone; how long that took."""
    return lambda: max((of.tell("when", "gone", one) for one in nodes), default=began) - began


STORIES: Mapping[str, Callable[[Cluster, float], Callable[[], float]]] = {
    "evicted": evicted,
    "shutdown": shutdown,
    "drained": drained,
    "both": both,
    "kueue": kueue,
}


def told(story: str, mib: int, grace_s: float) -> Left:
    """One job, one story. Raises `Broken`."""
    with training(mib, grace_s, story == "kueue") as (of, job):
        before = {line.pid for line in job.lines()}
        away = STORIES[story](of, grace_s)()
        lines = job.until(lambda lines: all_step(lines, before, RANKS) > 0, 0.01, BACK_LIMIT_S)
        highest = max(line.step for line in lines)
        lines = job.until(lambda lines: stepping(lines, RANKS, highest + MORE), 0.01, BACK_LIMIT_S)
        steps = [(line.rank, line.step) for line in lines if line.what == "step"]
        events = [one.event for one in job.records()]
        charged = [
            one
            for one in events
            if isinstance(one, ActionChosen) and one.budget and one.budget_before > one.budget_left
        ]
        incidents = sum(isinstance(one, IncidentOpened) for one in events)
        return Left(len(steps) - len(set(steps)), len(charged), incidents, _stood(lines), away)


def _stood(lines: Sequence[Line]) -> float:
    """The longest time between two steps of rank 0, whichever process made them."""
    at = [line.at for line in lines if line.what == "step" and line.rank == 0]
    return max(late - early for early, late in itertools.pairwise(at))


def main() -> int:
    """Stories in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=list(STORIES), default=list(STORIES), help="these stories")
        parser.add_argument("--mib", type=int, default=16, metavar="N", help="state of each rank (default 16)")
        parser.add_argument(
            "--grace", type=float, default=GRACE_S, metavar="S", help=f"of the notices (default {GRACE_S})"
        )

    chosen = options(__doc__, trials=3, more=more)
    result = Result("k8s_notices", "no peer")
    found: dict[str, list[Left]] = {name: [] for name in chosen.only}
    try:
        for number in range(chosen.trials):
            for name, those in found.items():
                those.append(told(name, chosen.mib, chosen.grace))
                say(f"{number + 1}/{chosen.trials} {name}: {those[-1]}")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    for name, those in found.items():
        what, n = WHAT[name].format(chosen.grace), len(those)
        spent = [float(max(one.spent + one.incidents for one in those))]
        result.rows += [
            Row(
                f"{what}: steps lost (worst)",
                "steps",
                [float(max(one.lost for one in those))],
                target=0.0,
                exact=True,
                n=n,
            ),
            Row(f"{what}: budget spent and incidents (worst)", "", spent, target=0.0, exact=True, n=n),
            Row(f"{what}: longest time without a step", "s", [one.stood for one in those]),
        ]
    result.details = {name: [one._asdict() for one in those] for name, those in found.items()}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
