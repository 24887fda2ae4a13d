"""The pod of the leading master is killed: when is something decided again, and do workers notice?

A job of `dlrover-run --detach --backend k8s` on a fake cluster whose kubelet runs pods as processes: two nodes with one worker
each train `scripts/ddp_step.py` (DDP over gloo). In turn:

- etcd: the log is in an etcd of one member, lease 2 s, and two masters run on different hosts. The container of the one that
  leads gets SIGKILL, with all that it has started;
- SQLite: the log is on a claim, and there is one master. The Job's controller makes another pod. Real ones wait 10 s before they
  do; the one of these tests does not.

Measured is the time from the signal to the decision of the new leader (`LeaderStarted`), and with SQLite that from the start of
the new pod's container, too, which is what a lost master costs beyond the pod. Workers that began anew within the next steps are
counted, and steps that were made twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from _bench import BROKEN, Result, Row, options, say
from _etcd import Cluster as EtcdCluster
from _hosts import parents, stepping
from _jobs import LIMIT_S, MARK, OURS, Broken, Job, clock_offset, kept
from _pods import NAMESPACE, Cluster, cluster

from dlrover_backends.k8s.masters import by_namespace
from dlrover_core.job.job import LeaderStarted
from dlrover_core.kernel.events import Record
from dlrover_core.logs import open_log

MEASURES = (
    "src/adapters/dlrover_adapters/cli",
    "src/adapters/dlrover_adapters/etcd",
    "src/adapters/dlrover_adapters/http",
    "src/backends/dlrover_backends/k8s",
    "src/dlrover_core/logs",
    "src/dlrover_core/runtime",
)

TTL_S, ABOVE_S = 2.0, 1.0
BEGUN, MORE, RANKS = 20, 100, 2
SCRIPT = ("--steps", "1000000", "--pause", "0.01")
CLAIM = "logs"


class Blow(NamedTuple):
    """The effects of one kill: seconds to the decision, the same from the new container's start, workers, steps made twice."""

    led_s: float
    started_s: float
    restarts: int
    lost: int


@contextlib.contextmanager
def detached(of: Cluster, log: str) -> Iterator[Job]:
    """A job that trains, and whose masters are pods. ``log``: of an etcd; empty: on the claim. Raises `Broken`."""

    def made(folder: Path) -> Job:
        template = folder / "pod.json"
        container = {"name": "node", "env": []}
        backend = f"k8s:kubeconfig={of.folder}/kubeconfig,template={template}" + ("" if log else f",claim={CLAIM}")
        launch = [
            "--detach",
            "--backend",
            backend,
            "--image",
            "bench:1",
            "--nnodes",
            str(RANKS),
            "--nproc-per-node",
            "1",
        ]
        job = Job(OURS, folder, SCRIPT, [*launch, *(("--log", log) if log else ())])
        at = job.command.index("--state-dir")  # masters in pods keep their state in the cluster
        del job.command[at : at + 2]
        container["env"] = [{"name": MARK, "value": job.mark}]
        template.write_text(json.dumps({"kind": "Pod", "spec": {"containers": [container]}}))
        return job

    with kept(made) as job:
        if job.wait():
            raise Broken(f"dlrover-run --detach: {job.said()}")
        try:
            yield job
        finally:
            of.end()  # nobody waits for a detached job


def until(job: Job, step: int) -> None:
    """Wait until all ranks have made this step. Raises `Broken`."""
    deadline = time.monotonic() + LIMIT_S
    while not stepping(job.lines(), RANKS, step):
        if time.monotonic() > deadline:
            raise Broken(f"no step {step} within {LIMIT_S:g} s after {job.lines()[-1:]}")
        time.sleep(0.01)


def read(url: str) -> tuple[list[Record], int]:
    """The log's records, and the process that leads; 0: nobody does."""

    async def whole() -> tuple[list[Record], int]:
        async with open_log(url) as log:
            for job in await log.jobs():
                leader = await log.leader(job)
                pid = int(leader.holder.split("/")[1]) if leader is not None and leader.holder else 0
                return [record async for record in log.read(job)], pid
            return [], 0

    return asyncio.run(whole())


def masters(of: Cluster, count: int) -> Mapping[str, int]:
    """The masters' pods, once so many run: their names, and their first processes. Raises `Broken`."""
    deadline = time.monotonic() + LIMIT_S
    while len(found := dict(one.split("=") for one in of.ask("masters").split())) < count:
        if time.monotonic() > deadline:
            raise Broken(f"{len(found)} of {count} masters' pods run")
        time.sleep(0.05)
    return {name: int(pid) for name, pid in found.items()}


def leading(pods: Mapping[str, int], pid: int) -> str:
    """The pod whose process leads. Raises `Broken`."""
    above = parents()
    tops = {top: name for name, top in pods.items()}
    while pid > 1:
        if pid in tops:
            return tops[pid]
        pid = above.get(pid, 0)
    raise Broken("the leader is in no pod")


def killed(etcd: str) -> Blow:
    """One kill of the leading master's pod. Raises `Broken`."""
    count = 2 if etcd else 1
    with cluster(claim=CLAIM) as of, detached(of, etcd) as job:
        until(job, BEGUN)
        before = masters(of, count)
        log = by_namespace(etcd, NAMESPACE) if etcd else _sqlite(of)
        victim = leading(before, read(log)[1])
        workers, highest = {line.pid for line in job.lines()}, max(line.step for line in job.lines())
        offset, at = clock_offset(), of.tell("kill", victim)
        led = _led(log, at + offset) - offset
        started = at if etcd else of.tell("when", "runs", _new(of, before))
        until(job, highest + MORE)
        lines = job.lines()
        steps = [(line.rank, line.step) for line in lines if line.what == "step"]
        anew = len({line.pid for line in lines} - workers)
        return Blow(led - at, led - started, anew, len(steps) - len(set(steps)))


def _sqlite(of: Cluster) -> str:
    """The address of the log on the claim. Raises `Broken`."""
    claim, deadline = of.claims, time.monotonic() + LIMIT_S  # of all claims: this cluster has one
    while not (found := list(claim.rglob("log.db"))):
        if time.monotonic() > deadline:
            raise Broken(f"no log among {sorted(map(str, claim.rglob('*')))}")
        time.sleep(0.1)
    return f"sqlite://{found[0]}"


def _new(of: Cluster, before: Mapping[str, int]) -> str:
    """The pod that came. Raises `Broken`."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := set(masters(of, 1)) - set(before)):
        if time.monotonic() > deadline:
            raise Broken("no other master's pod")
        time.sleep(0.05)
    return found.pop()


def _led(log: str, after: float) -> float:
    """When the next leader decided, by the wall clock. Raises `Broken`."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        led = [one.at / 1e6 for one in read(log)[0] if isinstance(one.event, LeaderStarted)]
        if found := [at for at in led if at > after]:
            return found[0]
        time.sleep(0.1)
    raise Broken("no new leader")


def main() -> int:
    """Trials in turn."""
    chosen = options(__doc__)
    result = Result("k8s_masters", "no peer")
    etcd, sqlite = list[Blow](), list[Blow]()
    try:
        with EtcdCluster(1) as log:
            for number in range(chosen.trials):
                etcd.append(killed(log.url(f"k8s-{number}", ttl=f"{TTL_S:g}")))
                sqlite.append(killed(""))
                say(
                    f"{number + 1}/{chosen.trials} decided after {etcd[-1].led_s:.3f} s on etcd; {sqlite[-1].led_s:.3f} s on "
                    f"SQLite, {sqlite[-1].started_s:.3f} s after the container's start"
                )
    except Broken as error:
        say(f"nothing measured: {error}")
        return BROKEN
    what, every = "leading master's pod killed", [*etcd, *sqlite]
    result.rows += [
        Row(
            f"{what}, etcd, lease {TTL_S:g} s: to the next decision",
            "s",
            [one.led_s for one in etcd],
            target=TTL_S + ABOVE_S,
        ),
        Row(
            f"{what}, SQLite on a claim: from the new container's start to the decision",
            "s",
            [one.started_s for one in sqlite],
            target=ABOVE_S,
        ),
        Row(f"{what}, SQLite on a claim: to the next decision", "s", [one.led_s for one in sqlite]),
        Row(
            f"{what}: workers restarted (worst)",
            "workers",
            [float(max(one.restarts for one in every))],
            target=0.0,
            n=len(every),
        ),
        Row(
            f"{what}: steps lost (worst)",
            "steps",
            [float(max(one.lost for one in every))],
            target=0.0,
            exact=True,
            n=len(every),
        ),
    ]
    result.details = {"etcd": [one._asdict() for one in etcd], "sqlite": [one._asdict() for one in sqlite]}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
