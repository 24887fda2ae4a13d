"""The API server is away for two minutes: what goes on without it, and what is missed?

The job of `bench_k8s_kills.py`. The server is killed: connections break, and new ones are refused. Meanwhile

* at a quarter of the time a worker gets SIGKILL: its agent restarts it in its pod, which needs no API server; the time to the
  next common step of both ranks;
* at half of it the container of a node gets SIGKILL, whose replacement nobody can ask for.

Then the server comes back, with what it knew. Measured is the time until the replacement's pod is there, which the back-off of
those who ask bounds, and how many pods were made beyond that one when both ranks have made a common step again.

``--frozen`` further trials: the server answers nothing more and leaves its connections open, as under SIGSTOP. A worker gets
SIGKILL meanwhile, as above. Measured is the time until the master's control log says that the API does not answer, which the read
time-out of 90 s bounds. Then the server goes on, the container of a node gets SIGKILL, and is to be replaced; pods made beyond
that one are counted too. Either kind takes two minutes a trial; ``--trials 0`` or ``--frozen 0`` leaves one out.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import NamedTuple

from _bench import BROKEN, Result, Row, options, say
from _hosts import stepping, wait_all_step
from _jobs import Broken, Job
from _pods import cluster, in_pods
from bench_killed_node import BACK_LIMIT_S, KILL_AT, SCRIPT, wait_warm

from dlrover_backends.k8s.listwatch import READ_S

MEASURES = ("src/backends/dlrover_backends/k8s", "src/dlrover_core/rules", "src/dlrover_core/runtime")

MISSED_S = 21.0
"""kopf's longest back-off."""
ASKED_AGAIN = "the Kubernetes API is asked again"


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


class Frozen(NamedTuple):
    """One trial.

    restarted: seconds from the kill of a worker to the next common step
    noticed:   seconds until the master noticed
    replaced:  seconds from a container's kill to the replacement's pod, once the server goes on
    many:      pods made beyond that one
    """

    restarted: float
    noticed: float
    replaced: float
    many: float


def frozen() -> Frozen:
    """The server is frozen, and goes on once that was noticed. Raises `Broken`."""
    with cluster() as of, in_pods(of, SCRIPT) as job:
        job.until(lambda lines: stepping(lines, 2, KILL_AT))
        wait_warm(job, 2)
        known = _complaints(job)
        began = of.tell("freeze")
        before = {line.pid for line in job.lines()}
        at = time.monotonic()
        os.kill(next(line.pid for line in reversed(job.lines()) if line.rank == 0), signal.SIGKILL)
        restarted = wait_all_step(job, before, 2, BACK_LIMIT_S) - at
        job.until(lambda _: _complaints(job) > known, 0.05, READ_S + BACK_LIMIT_S)
        noticed = time.monotonic() - began
        of.tell("thaw")
        before = {line.pid for line in job.lines()}
        killed = of.tell("kill", "worker-1-0")
        replaced = of.tell("made", "worker-1-1") - killed
        wait_all_step(job, before, 2, BACK_LIMIT_S)
        return Frozen(restarted, noticed, replaced, of.tell("incarnations") - 1)


def _complaints(job: Job) -> int:
    """How often the masters' log says that the API is asked again."""
    return (job.folder / "jobs" / "bench" / "control.log").read_text(errors="replace").count(ASKED_AGAIN)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def main() -> int:
    """Trials one after another."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="away for so long (default 120)")
        parser.add_argument(
            "--frozen", type=int, default=3, metavar="N", help="trials with a frozen server (default 3)"
        )

    chosen = options(__doc__, trials=5, more=more)
    result = Result("k8s_away", "no peer")
    found, still = list[tuple[float, float, float]](), list[Frozen]()
    try:
        for number in range(chosen.trials):
            found.append(away(chosen.seconds))
            say(f"{number + 1}/{chosen.trials} in place {found[-1][0]:.3f} s, replaced after {found[-1][1]:.3f} s")
        for number in range(chosen.frozen):
            still.append(frozen())
            say(f"{number + 1}/{chosen.frozen} frozen: noticed after {still[-1].noticed:.1f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    if found:
        restarted, replaced, many = (list(one) for one in zip(*found, strict=True))
        what, back = f"API server away {chosen.seconds:g} s", "back to its replacement's pod"
        result.rows += [
            Row(f"{what}: a worker killed meanwhile to next common step, in its pod", "s", restarted),
            Row(f"{what}, and a container killed meanwhile: {back}", "s", replaced, target=MISSED_S),
            Row(f"{what}: pods made beyond that one (worst)", "pods", [max(many)], target=0.0, exact=True, n=len(many)),
        ]
    if still:
        what = "API server frozen, connections open"
        many = [one.many for one in still]
        result.rows += [
            Row(
                f"{what}: a worker killed meanwhile to next common step, in its pod",
                "s",
                [one.restarted for one in still],
            ),
            Row(f"{what}: until the master notices", "s", [one.noticed for one in still], target=READ_S),
            Row(
                f"{what}; it goes on, and a container is killed: to its replacement's pod",
                "s",
                [one.replaced for one in still],
                target=MISSED_S,
            ),
            Row(f"{what}: pods made beyond that one (worst)", "pods", [max(many)], target=0.0, exact=True, n=len(many)),
        ]
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
