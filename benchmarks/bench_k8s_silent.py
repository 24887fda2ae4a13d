"""A host is lost: its kubelet is silent, and so is the agent in its pod. How long until the replacement's pod is asked for?

The job of `bench_k8s_kills.py` on three hosts of the fake cluster, whose controller of nodes takes Ready from the pods of a
host that says nothing for four seconds (50 in real clusters). A trial plays each order of the two words once:

- unready first: the kubelet falls silent, and the agent's processes are stopped with SIGSTOP, connections open, as a host
  without power leaves them: the agent is silent after `silence_s`, which is 15 s;
- silent first: the same, and the controller is patient for five seconds longer than that;
- dead: Ready is taken while the agent is heard; then its processes get SIGKILL, which its connection tells.

Measured is the time from the later of the two words to the create of the next incarnation's pod at the API server. The agent's
word is the moment when its silence has lasted `silence_s`, as the log's `NodeSuspected` tells it, or the SIGKILL. For that one
the job waits `gone_s`, 0.25 s, whether the agent comes back. Then both ranks of a new world make a step, on other hosts.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple

from _bench import BROKEN, Result, Row, options, say
from _hosts import kill_tree, stepping, wait_all_step
from _jobs import Broken, Job, clock_offset
from _pods import Cluster, cluster, in_pods
from bench_killed_node import BACK_LIMIT_S, KILL_AT, SCRIPT, wait_warm

from dlrover_core.job.silence import NodeSuspected

MEASURES = ("src/backends/dlrover_backends/k8s", "src/dlrover_core/rules", "src/dlrover_core/runtime")

REPLACED_S = 1.0
SILENCE_S, GRACE_S, LATER_S = 15.0, 4.0, 5.0
VICTIM, NEXT = "worker-1-0", "worker-1-1"


class Lost(NamedTuple):
    """Seconds to the replacement's pod from the later word, and to the next common step from the first fault."""

    replaced: float
    stepped: float


def lost(silence_s: float, grace_s: float, *, dead: bool) -> Lost:
    """One host is lost. Raises `Broken`."""
    with cluster(nodes=3, grace_s=grace_s) as of, in_pods(of, SCRIPT, "--set", f"silence_s={silence_s:g}") as job:
        job.until(lambda lines: stepping(lines, 2, KILL_AT))
        wait_warm(job, 2)
        before = {line.pid for line in job.lines()}
        top, host = int(of.tell("pid", VICTIM)), of.tell("host", VICTIM)
        began = of.tell("lose", str(host))
        if not dead:
            kill_tree(top, signal.SIGSTOP)
        unready = of.tell("when", "unready", VICTIM)
        word = kill_tree(top, signal.SIGKILL) if dead else 0.0
        made = of.tell("made", NEXT)
        if not dead:
            word = silent(job, silence_s)
        stepped = wait_all_step(job, before, 2, BACK_LIMIT_S)
        if of.tell("host", NEXT) == host:
            raise Broken("the replacement is on the lost host")
        _end(of, host, top)
        return Lost(made - max(word, unready), stepped - began)


def silent(job: Job, silence_s: float) -> float:
    """When the victim's agent had been silent for so long, by CLOCK_MONOTONIC. Raises `Broken`."""
    for one in job.records():
        if isinstance(one.event, NodeSuspected) and one.event.node == VICTIM:
            return (one.at - one.event.silent_us) / 1e6 + silence_s - clock_offset()
    raise Broken("the agent never fell silent")


def _end(of: Cluster, host: float, top: int) -> None:
    """The host is back, and what was stopped on it is gone: the job's end waits for it."""
    kill_tree(top, signal.SIGKILL)
    of.tell("find", str(host))


def main() -> int:
    """Trials of each order, in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--silence", type=float, default=SILENCE_S, metavar="S", help=f"silence_s (default {SILENCE_S:g})"
        )
        parser.add_argument("--only", nargs="+", choices=sorted(ORDERS), default=list(ORDERS), help="these orders")

    chosen = options(__doc__, more=more)
    result = Result("k8s_silent", "no peer")
    found: dict[str, list[Lost]] = {name: [] for name in chosen.only}
    try:
        for number in range(chosen.trials):
            for name, those in found.items():
                late = name == "silent first"
                grace_s = chosen.silence + LATER_S if late else GRACE_S
                those.append(lost(chosen.silence, grace_s, dead=name == "dead"))
                say(f"{number + 1}/{chosen.trials} {name}: replaced after {those[-1].replaced:.3f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.rows += rows(found)
    result.details = {name: [one._asdict() for one in those] for name, those in found.items()}
    return result.finish(chosen.json)


ORDERS: Mapping[str, str] = {
    "unready first": "then its agent is silent",
    "silent first": "then its host is not ready",
    "dead": "then its agent is dead",
}


def rows(found: Mapping[str, list[Lost]]) -> list[Row]:
    """The table."""
    made = []
    for name, those in found.items():
        first = "agent silent" if name == "silent first" else "host NotReady"
        what = f"{first}, {ORDERS[name]}, to replacement requested"
        made.append(Row(what, "s", [one.replaced for one in those], target=REPLACED_S))
    every = [one.replaced for those in found.values() for one in those]
    if len(found) > 1:
        made.append(
            Row(
                "host NotReady and agent silent to replacement requested, worst",
                "s",
                [max(every)],
                target=REPLACED_S,
                exact=True,
                n=len(every),
            )
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
