"""The API server is away for two minutes: what goes on without it, and what is missed?

The job of `bench_k8s_kills.py`. The server is killed: connections break, and new ones are refused. Meanwhile

* at a quarter of the time a worker gets SIGKILL: its agent restarts it in its pod, which needs no API server; the time to the
  next common step of both ranks;
* at half of it the container of a node gets SIGKILL, whose replacement nobody can ask for.

Then the server comes back, with what it knew. Measured is the time until the replacement's pod is there, which the back-off of
those who ask bounds, and how many pods were made beyond that one when both ranks have made a common step again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from _bench import BROKEN, Result, Row, options, say
from _hosts import stepping, wait_all_step
from _jobs import Broken
from _pods import cluster, in_pods
from bench_killed_node import BACK_LIMIT_S, KILL_AT, SCRIPT, wait_warm

MEASURES = ("src/backends/dlrover_backends/k8s", "src/dlrover_core/rules", "src/dlrover_core/runtime")

MISSED_S = 21.0
"""kopf's longest back-off."""


def away(seconds: float) -> tuple[float, float, float]:
    """Seconds of a restart in place, and from the server's return to the replacement's pod; pods too many. Raises `Broken`."""
    with cluster() as of, in_pods(of, SCRIPT) as job:
        job.until(lambda lines: stepping(lines, 2, KILL_AT))
        wait_warm(job, 2)
        began = of.tell("away")
        _sleep_until(began + seconds / 4)
        before = {line.pid for line in job.lines()}
        at = time.monotonic()
        os.kill(next(line.pid for line in reversed(job.lines()) if line.rank == 0), signal.SIGKILL)
        restarted = wait_all_step(job, before, 2, BACK_LIMIT_S) - at
        _sleep_until(began + seconds / 2)
        before = {line.pid for line in job.lines()}
        of.tell("kill", "worker-1-0")
        _sleep_until(began + seconds)
        back = of.tell("back")
        replaced = of.tell("made", "worker-1-1") - back
        wait_all_step(job, before, 2, BACK_LIMIT_S)
        return restarted, replaced, of.tell("incarnations") - 1


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def main() -> int:
    """Trials one after another."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="away for so long (default 120)")

    chosen = options(__doc__, trials=3, more=more)
    result = Result("k8s_away", "no peer")
    found = list[tuple[float, float, float]]()
    try:
        for number in range(chosen.trials):
            found.append(away(chosen.seconds))
            say(f"{number + 1}/{chosen.trials} in place {found[-1][0]:.3f} s, replaced after {found[-1][1]:.3f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    restarted, replaced, many = (list(one) for one in zip(*found, strict=True))
    what = f"API server away {chosen.seconds:g} s"
    result.rows += [
        Row(f"{what}: a worker killed meanwhile to next common step, in its pod", "s", restarted),
        Row(f"{what}, and a container killed meanwhile: back to its replacement's pod", "s", replaced, target=MISSED_S),
        Row(f"{what}: pods made beyond that one", "pods", many, target=0.0),
    ]
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
