"""A node joins a running world of 2: how long until the first common step of 3?

Both sides get the same command on each of three hosts, here on loopback: ``--nnodes 2:3 --rdzv-backend c10d --rdzv-endpoint
127.0.0.1:PORT``, a worker each, which train `scripts/ddp_step.py` (DDP over gloo, from a checkpoint file). Two launchers train;
the third is executed. Measured is the time from then to the moment when all three ranks of a new world have completed a step,
by CLOCK_MONOTONIC. Ours runs with ``--on-join restart``, which is the default and what torchrun does; a first world of fewer than
MAX waits ``last_call_timeout`` for more, 1 s for both. torchrun runs as it comes, and at its best (keep-alive 1 s). A job that is
not there within 60 s is lost: counted, and run again.
"""

from __future__ import annotations

import sys

from _bench import A_JOB, BROKEN, Result, Row, options, say
from _hosts import AS_IT_COMES, AT_ITS_BEST, hosts, stepping, wait_all_step
from _jobs import BEST, OURS, TORCHRUN, Broken, Lost, peer_python

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/host")

TARGET = 0.5
JOIN_AT = 20
LIMIT_S = 60.0
LOST_MAX = 12
SCRIPT = ("--steps", "1000000", "--pause", "0.01")


def join(launcher: str) -> float:
    """Let one node join, and return the seconds. Raises `Lost`."""
    with hosts(launcher, SCRIPT, "2:3", 2, "last_call_timeout=1,join_timeout=60") as job:
        job.until(lambda lines: stepping(lines, 2, JOIN_AT))
        before = {line.pid for line in job.lines()}
        job.start()
        try:
            return wait_all_step(job, before, 3, LIMIT_S) - job.started
        except Broken as error:
            raise Lost(str(error)) from error


def survived(launcher: str, lost: dict[str, list[str]]) -> float:
    """A trial that ended well; others are counted."""
    while True:
        try:
            return join(launcher)
        except Lost as error:
            lost[launcher].append(str(error))
            say(f"{launcher}: no world of 3")
            if len(lost[launcher]) > LOST_MAX:
                raise


def main() -> int:
    """Trials in turn."""
    chosen = options(__doc__)
    result = Result("join", "torchrun --rdzv-backend c10d, the same command (torch 2.13.0, its own environment)")
    found: dict[str, list[float]] = {OURS: [], TORCHRUN: [], BEST: []}
    lost: dict[str, list[str]] = {name: [] for name in found}
    try:
        peer_python()
        for number in range(chosen.trials):
            for launcher, those in found.items():
                those.append(survived(launcher, lost))
                say(f"{number + 1}/{chosen.trials} {launcher}: first common step of 3 after {those[-1]:.3f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    what = "a node joins to the first common step of 3"
    count = f"jobs lost or without a world of 3 for {LIMIT_S:g} s, beside {chosen.trials} of each that came there"
    for name, settings in ((TORCHRUN, AS_IT_COMES), (BEST, AT_ITS_BEST)):
        lost_jobs = [float(len(lost[name]))]
        none = 0.0 if name == TORCHRUN else None  # ours is counted once
        result.rows += [
            Row(what, "s", found[OURS], found[name], TARGET, "ratio", settings=settings),
            Row(count, "jobs", [float(len(lost[OURS]))], lost_jobs, none, settings=settings, n=chosen.trials),
        ]
    result.details = {"jobs_lost_said": lost}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
