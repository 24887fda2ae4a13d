"""A whole node is killed: how long until the next common step?

Two nodes with one worker each train `scripts/ddp_step.py` (DDP over gloo, from a checkpoint file). At a step the whole process
tree of one node gets SIGKILL: agent, worker and all that they have started. Measured is the time from the signal to the
moment when both ranks of a new world have completed a step, by CLOCK_MONOTONIC. In turn:

* ours, relaunched: `dlrover-run --local-nodes 2`; the backend starts another agent, which must import torch.
* ours, standby: the same with ``--standby 1``; a blank agent is warm. A kill waits until it is.
* the peer: two `torchrun --rdzv-backend c10d` on loopback, of an environment of its own. Killed is the one that does not hold
  the rendezvous, and this benchmark starts another in the same moment, which no scheduler does. Once as it comes, with a
  keep-alive of 3 x 5 s, after which a silent agent counts as dead, and once with 3 x 1 s.

A job that is not back within 60 s, or that ends, is lost: that is counted, and run again, and does not enter the medians.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _bench import A_JOB, BROKEN, Result, Row, options, say
from _hosts import AS_IT_COMES, AT_ITS_BEST, Hosts, ancestor, hosts, kill_tree, stepping, wait_all_step
from _jobs import BEST, OURS, TORCHRUN, Broken, Job, Lost, marked, peer_python, running

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/torch", "src/dlrover_core/diagnosis", "src/dlrover_core/host")

KILL_AT = 20
RELAUNCHED, STANDBY_S = 0.5, 0.5
BACK_LIMIT_S = 60.0
LOST_MAX = 12
WARM_LIMIT_S = 60.0
SCRIPT = ("--steps", "1000000", "--pause", "0.01")
CALM_S = 0.5
"""Steps go on for so long before a kill, so that what was started for the next time is there."""

Trial = Callable[[], float]


def ours(standbys: int) -> float:
    """One kill of the node of rank 1."""
    launch = ["--local-nodes", "2", "--nproc-per-node", "1", *(["--standby", str(standbys)] if standbys else [])]
    with running(OURS, SCRIPT, launch) as job:
        job.until(lambda lines: stepping(lines, 2, KILL_AT))
        wait_warm(job, 2 + standbys)
        victim = next(line.pid for line in reversed(job.lines()) if line.rank == 1)
        return recovery(job, ancestor(victim, "dlrover-agent"), lambda: None)


def wait_warm(job: Job, agents: int) -> None:
    """Wait until each agent has a zygote that is warm, by its rest: it sleeps, and costs no time any more."""
    deadline = time.monotonic() + WARM_LIMIT_S
    while True:
        zygotes = [pid for pid in marked(job.mark) if named(pid) == "dlrover-zygote"]
        before = {pid: spent(pid) for pid in zygotes}
        since = time.monotonic()
        job.until(lambda lines, since=since: lines[-1].at > since + CALM_S, 0.02)
        if len(zygotes) >= agents and all(spent(pid) == cost for pid, cost in before.items()):
            return
        if time.monotonic() > deadline:
            raise Broken(f"{len(zygotes)} zygotes, not {agents} that are warm, within {WARM_LIMIT_S:g} s")


def named(pid: int) -> str:
    """A process's short name; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def spent(pid: int) -> int:
    """Ticks of CPU time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


def theirs(launcher: str) -> float:
    """One kill of the second torchrun."""
    with hosts(launcher, SCRIPT, "2", 2, "join_timeout=60") as job:
        job.until(lambda lines: stepping(lines, 2, KILL_AT))
        return recovery(job, job.launchers[1].pid, lambda: restart(job))


def restart(job: Hosts) -> None:
    """Start another launcher in the place of the killed one."""
    job.start()


def recovery(job: Job, top: int, then: Callable[[], None]) -> float:
    """Kill a tree; seconds to the next common step. Raises `Lost`."""
    before = {line.pid for line in job.lines()}
    killed = kill_tree(top)
    then()
    try:
        return wait_all_step(job, before, 2, BACK_LIMIT_S) - killed
    except Broken as error:
        raise Lost(str(error)) from error


def survived(name: str, trial: Trial, lost: dict[str, list[str]]) -> float:
    """A trial that came back; others are counted."""
    while True:
        try:
            return trial()
        except Lost as error:
            lost[name].append(str(error))
            say(f"{name}: the job did not come back")
            if len(lost[name]) > LOST_MAX:
                raise


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--without-standby", action="store_true", help="leave out ours with --standby 1")

    chosen = options(__doc__, more=more)
    result = Result(
        "killed_node", "torchrun --rdzv-backend c10d, 2 agents, the killed one restarted at once (torch 2.13.0)"
    )
    kinds: dict[str, Trial] = {"relaunched": lambda: ours(0), "standby": lambda: ours(1)}
    kinds |= {name: functools.partial(theirs, name) for name in (TORCHRUN, BEST)}
    if chosen.without_standby:
        del kinds["standby"]
    found: dict[str, list[float]] = {name: [] for name in kinds}
    lost: dict[str, list[str]] = {name: [] for name in kinds}
    try:
        peer_python()
        for number in range(chosen.trials):
            for name, trial in kinds.items():
                found[name].append(survived(name, trial, lost))
                say(f"{number + 1}/{chosen.trials} {name}: next common step after {found[name][-1]:.3f} s")
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    what = "killed node to next common step"
    ours_lost = [float(sum(len(those) for name, those in lost.items() if name not in {TORCHRUN, BEST}))]
    about = f"jobs lost or not back within {BACK_LIMIT_S:g} s, beside {chosen.trials} of each that came back"
    for name, settings in ((TORCHRUN, AS_IT_COMES), (BEST, AT_ITS_BEST)):
        peer, once = found[name], name == TORCHRUN  # what ours alone has to meet is asked once
        relaunched = f"{what}, relaunched by the backend"
        result.rows.append(Row(relaunched, "s", found["relaunched"], peer, RELAUNCHED, "ratio", settings=settings))
        if "standby" in found:
            result.rows.append(
                Row(f"{what}, one standby", "s", found["standby"], peer, STANDBY_S if once else None, settings=settings)
            )
        lost_jobs = [float(len(lost[name]))]
        result.rows.append(
            Row(about, "jobs", ours_lost, lost_jobs, 0.0 if once else None, settings=settings, n=chosen.trials)
        )
    result.details = {"jobs_lost_said": lost}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
