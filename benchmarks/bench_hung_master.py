"""The leading master hangs: is it replaced in time, and is nobody replaced who only pauses?

A job of 2 workers trains. Its leading master is stopped for good, and a worker is killed in the same moment. Measured is the time
from the stop to the first step of all ranks after it: the launcher has to notice that its master hangs (``hung_s``, 5 s), kill
it, and another one has to lead and to start the workers anew.

Before that, jobs that checkpoint run side by side, and in each one process after another is paused (SIGSTOP, 3 s, SIGCONT).
``--seed`` draws whom: leader, reserve, agent, keeper, saver, zygote, worker. ``--pauses`` is how many in all with the log in
SQLite, and as many with the log in etcd and masters on two hosts. Counted are processes that were started anew: none may be.

Three places for the log:

- SQLite: the reserve stands by on the same host;
- etcd with masters on two hosts (``dlrover master``, on loopback): the other host's master leads when the lease (5 s) is over;
- etcd with one host: the launcher starts a new master when it has killed the old one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _bench import A_JOB, BROKEN, HERE, Result, Row, options, say
from _etcd import EtcdError, NotMeasurable, cluster
from _jobs import MARK, OURS, SCRIPT, Broken, Job, Line, running
from _masters import Side
from _pauses import PAUSE_S, Paused, Place, paused, total
from bench_killed_master import WARM_LIMIT_S, first_steps, masters, ms, status

from dlrover_adapters.http.client import fetch_status
from dlrover_core import CoreError

MEASURES = (
    *A_JOB,
    "src/adapters/dlrover_adapters/checkpoint",
    "src/adapters/dlrover_adapters/etcd",
    "src/adapters/dlrover_adapters/torch",
    "src/dlrover_core/checkpoint",
    "src/dlrover_core/diagnosis",
    "src/dlrover_core/host",
)

HUNG_S, TTL_S, SLACK_S = 5.0, 5.0, 1.0
LIMIT_S = 60.0
STEPS = ("--steps", "1000000")
SAVES, SAVING = HERE / "scripts" / "kept.py", (*STEPS, "--mib", "8")

Ask = Callable[[], Mapping[str, Any] | None]


class Trial(NamedTuple):
    """One job: how long it took after the stop."""

    step_s: float
    said: str


def pid_of(told: Mapping[str, Any]) -> int:
    """The pid of the leading master, by its status."""
    return int(str(told["leader"]).split("/")[1])


def leading(ask: Ask, job: Job) -> Mapping[str, Any]:
    """Wait for a leading master, and return its status."""
    deadline = time.monotonic() + WARM_LIMIT_S
    while (found := ask()) is None:
        if time.monotonic() > deadline:
            raise Broken(f"nobody leads; the launcher said: {job.said()}")
        time.sleep(0.05)
    return found


def hangs(job: Job, ask: Ask, warm: Callable[[], object]) -> Trial:
    """Stop the leader for good and kill a worker."""
    job.until(lambda lines: any(line.what == "step" and line.step >= 20 for line in lines))
    deadline = time.monotonic() + LIMIT_S
    while not warm():
        if time.monotonic() > deadline:
            raise Broken("no master in reserve")
        time.sleep(0.1)
    told = leading(ask, job)
    lines = list(job.lines())
    pids = {line.pid for line in lines}
    stopped = _stop(pid_of(told), [line for line in lines if line.rank == 1][-1])
    lines = job.until(lambda lines: len(first_steps(lines, pids)) == 2, 0.005, LIMIT_S)
    said = [line for line in (job.folder / "output").read_text(errors="replace").splitlines() if "not answered" in line]
    return Trial(max(first_steps(lines, pids).values()) - stopped, said[-1] if said else "")


def _stop(master: int, worker: Line) -> float:
    """Stop a master for good and kill a worker; when that was."""
    at = time.monotonic()
    os.kill(master, signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    return at


def on_sqlite() -> Trial:
    """One trial with the log in SQLite: the reserve runs on the same host."""
    with running(OURS, STEPS) as job:
        return hangs(job, lambda: status(job), lambda: len(masters(job)) >= 2)


def on_one_host() -> Trial:
    """One trial with the log in etcd on one host: there is no reserve."""
    with cluster(1) as etcd, running(OURS, STEPS, ("--nproc-per-node", "2", "--log", etcd.url("one"))) as job:
        return hangs(job, lambda: _leader([_address(job)], job.token), lambda: True)


def on_two_hosts() -> Trial:
    """One trial with the log in etcd and the reserve on another host."""
    with cluster(1) as etcd, _pair(etcd.url("two")) as (job, sides):
        addresses = [side.address for side in sides]

        def warm() -> bool:
            return _roles(addresses, job.token) == ["leader", "standby"]

        return hangs(job, lambda: _leader(addresses, job.token), warm)


@contextlib.contextmanager
def _saving_on_sqlite() -> Iterator[tuple[Job, Ask]]:
    """A job that checkpoints, to be paused."""
    with running(OURS, SAVING, script=SAVES) as job:
        yield job, lambda: status(job)


@contextlib.contextmanager
def _saving_on_etcd() -> Iterator[tuple[Job, Ask]]:
    """The same with the log in etcd and masters on two hosts."""
    with cluster(1) as etcd, _pair(etcd.url("two"), SAVING, SAVES) as (job, sides):
        addresses = [side.address for side in sides]
        yield job, lambda: _leader(addresses, job.token)


@contextlib.contextmanager
def _pair(log: str, arguments: Sequence[str] = STEPS, script: Path = SCRIPT) -> Iterator[tuple[Job, Sequence[Side]]]:
    """Start a training host and two hosts that run masters."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("DLROVER", "PET_"))}
    job = Job(OURS, folder, STEPS)
    env |= {"TMPDIR": str(folder), "DLROVER_TOKEN": job.token, MARK: job.mark}
    sides = [Side(name, folder, log, env) for name in ("a", "b")]
    launch = ("--nproc-per-node", "2", "--master", ",".join(side.address for side in sides), "--rdzv-id", "bench")
    trains = Job(OURS, folder, arguments, (*launch, "--nnodes", "1"), script)
    trains.token, trains.mark = job.token, job.mark
    try:
        for side in sides:
            side.start()
        trains.start()
        yield trains, sides
    finally:
        for side in sides:
            if side.process is not None and side.process.poll() is None:
                side.kill()
        trains.end()
        shutil.rmtree(folder, ignore_errors=True)


def _address(job: Job) -> str:
    found = status(job)
    return str(found["leader_address"]) if found else ""


def _leader(addresses: Sequence[str], token: str) -> Mapping[str, Any] | None:
    told = [_status(address, token) for address in addresses]
    return next((one for one in told if one is not None and one.get("role") == "leader"), None)


def _roles(addresses: Sequence[str], token: str) -> list[str]:
    return sorted(str((_status(address, token) or {}).get("role", "")) for address in addresses)


def _status(address: str, token: str) -> Mapping[str, Any] | None:
    try:
        return dict(asyncio.run(fetch_status(address, token, timeout_s=2.0)))
    except (CoreError, OSError, ValueError):
        return None


PLACES: Mapping[str, tuple[Callable[[], Trial], float]] = {
    "SQLite": (on_sqlite, HUNG_S + SLACK_S),
    "etcd, two hosts": (on_two_hosts, TTL_S + SLACK_S),
    "etcd, one host": (on_one_host, HUNG_S + SLACK_S),
}
PAUSED: Mapping[str, Place] = {"SQLite": _saving_on_sqlite, "etcd, two hosts": _saving_on_etcd}


def main() -> int:
    """Pause processes, then run the trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--pauses", type=int, default=100, metavar="N", help="pauses of 3 s at each of two places (default 100)"
        )
        parser.add_argument("--jobs", type=int, default=3, metavar="N", help="jobs side by side (default 3)")
        parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws who is paused (default 1)")
        parser.add_argument("--only", choices=sorted(PLACES), help="one place of the log (default all)")

    chosen = options(__doc__, more=more)
    result = Result("hung_master", "none: torchrun's agent is its master, and nobody asks it anything")
    names = [name for name in PLACES if chosen.only in (None, name)]
    found: dict[str, list[Trial]] = {name: [] for name in names}
    pauses: dict[str, Paused] = {}
    try:
        for name in names if chosen.pauses else ():
            if name in PAUSED:
                pauses[name] = paused(name, PAUSED[name], chosen.pauses, chosen.jobs, chosen.seed)
                say(f"{name}: paused {dict(pauses[name].pauses)}, started anew {dict(pauses[name].anew)}")
        for trial in range(chosen.trials):
            for name, trials in found.items():
                one = PLACES[name][0]()
                trials.append(one)
                say(
                    f"{trial + 1}/{chosen.trials} {name}: all ranks step again after {ms(one.step_s)}; {one.said.strip()}"
                )
    except (Broken, NotMeasurable, EtcdError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    for name, trials in found.items():
        if trials:
            what = f"{name}: leader stopped and worker killed, to the next step of all ranks"
            result.rows.append(Row(what, "s", [one.step_s for one in trials], target=PLACES[name][1]))
        if name in pauses:
            what = f"{name}: started anew by {total(pauses[name].pauses)} pauses of {PAUSE_S:g} s"
            result.rows.append(
                Row(what, "processes", [float(total(pauses[name].anew))], target=0.0, n=total(pauses[name].pauses))
            )
    result.details = {name: [one._asdict() for one in trials] for name, trials in found.items()}
    result.details |= {f"{name}, pauses": one._asdict() for name, one in pauses.items()}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
