"""Seeded histories of joining jobs: hosts that come, die, fall silent and come back, and what must hold all the same.

As in `seeds`, a run is decided before it begins: ``python -m tests.chaos.joining_seeds SEED`` runs one again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
from typing import Any, NamedTuple

from tests.chaos.hosts_cluster import Host, HostsCluster

from dlrover_core.job import nodes
from dlrover_core.job.state import CODEC
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime.departures import RETURN_S
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

STEPS = 60
FAULTS_MAX = 8
OVER = ("succeeded", "failed", "stopped")


class Fault(NamedTuple):
    """``what`` happens to the ``which``-th host as soon as step ``step`` is made; for ``seconds``, where it lasts."""

    step: int
    what: str
    which: int
    seconds: int


class Plan(NamedTuple):
    """A whole run, decided before it begins."""

    nodes: int
    fewest: int
    hosts: int
    placed: bool
    nproc: int
    on_join: str
    relaunches: int
    warm_s: float
    cascade_s: float | None
    reserve: bool
    answers: bool
    faults: tuple[Fault, ...]


WHATS = (
    "agent", "agent", "two agents", "host", "power", "reset", "reset all", "silence", "stop", "worker", "master", "leader",
    "master and host", "suspend", "late host",
)  # fmt: skip
# Drawn after everything else: masters of several hosts, of which the leader is asked to go.
MASTERS = ("hand over", "hand over", "leader")


def plan(seed: int) -> Plan:
    """The run of a seed."""
    dice = random.Random(seed)
    nodes_max = dice.randrange(1, 5)
    surplus = dice.choice([0, 0, 1, 2])
    steps = sorted(dice.randrange(STEPS - 5) for _ in range(dice.randrange(1, FAULTS_MAX)))
    drawn = Plan(
        nodes=nodes_max,
        fewest=dice.randrange(1, nodes_max + 1) if dice.random() < 0.5 else nodes_max,
        hosts=nodes_max + surplus,
        placed=dice.random() < 0.3,
        nproc=dice.randrange(1, 3),
        on_join=dice.choice(["restart", "restart", "never"]),
        relaunches=100 if dice.random() < 0.8 else dice.randrange(3),
        warm_s=dice.choice([0.0, 0.5, 5.0]),
        cascade_s=dice.choice([None, 0.0, 0.005, 0.2]),
        reserve=dice.random() < 0.5,
        answers=False,
        faults=tuple(Fault(step, dice.choice(WHATS), dice.randrange(100), dice.randrange(1, 60)) for step in steps),
    )
    if dice.random() >= 0.3:
        return drawn
    turns = [Fault(dice.randrange(STEPS - 5), dice.choice(MASTERS), 0, 1) for _ in range(dice.randrange(1, 5))]
    return drawn._replace(answers=True, faults=tuple(sorted((*drawn.faults, *turns), key=lambda one: one.step)))


def _host(cluster: HostsCluster, which: int) -> Host | None:
    living = [host for host in cluster.hosts.values() if not host.dead and not host.done]
    return living[which % len(living)] if living else None


async def _strike(cluster: HostsCluster, fault: Fault) -> None:
    if fault.what in ("master", "leader", "master and host"):
        leads = any(master.leading for master in cluster.masters)
        cluster.kill_leader() if fault.what == "leader" and leads else cluster.kill_master()
    elif fault.what == "hand over":
        await cluster.hand_over()
    host = _host(cluster, fault.which)
    if host is not None:
        await _strike_host(cluster, host, fault)
    if fault.what in ("master", "leader", "master and host", "hand over"):
        cluster.start_master()
    elif fault.what == "suspend":
        cluster.jump(fault.seconds)
    elif fault.what == "late host":
        cluster.host(f"late{len(cluster.hosts)}")


async def _strike_host(cluster: HostsCluster, host: Host, fault: Fault) -> None:
    # Workers that need nobody else train on where no master reaches them: a world of one is not cut off until it is replaced.
    alone = cluster.spec.groups[0].nodes_min == 1
    match fault.what:
        case "agent":
            host.kill_agent()
        case "two agents":
            host.kill_agent()
            other = _host(cluster, fault.which + 1)
            if other is not None:
                other.kill_agent()
        case "worker" if host.launcher is not None and host.launcher.ranks:
            host.launcher.kill(host.launcher.ranks[0])
        case "host" | "power" | "master and host":
            host.kill(told=fault.what != "power")
            await asyncio.sleep(fault.seconds)
            cluster.start_host(host.name)
        case "reset" | "silence":
            cluster.network.cut(host.name, silent=fault.what == "silence")
            cut_s = 2.0 if fault.what == "reset" else 30.0 if alone else fault.seconds * 2
            await asyncio.sleep(cut_s)
            cluster.network.heal(host.name)
            if alone and fault.what == "reset":
                # Stopped before it can come back it is taken for dead: so long nothing else happens to it.
                await asyncio.sleep(RETURN_S)
        case "reset all":
            cluster.network.cut(*cluster.hosts)
            await asyncio.sleep(fault.seconds / 30)
            cluster.network.heal()
        case "stop":
            cluster.freeze(host.name)
            await asyncio.sleep(fault.seconds if not alone else fault.seconds / 2)
            cluster.thaw(host.name)


def _spec(run: Plan) -> JobSpec:
    return JobSpec(
        "joining",
        (GroupSpec("worker", run.fewest, run.nodes, run.nproc, relaunch_max=run.relaunches),),
        joining=True,
        max_restarts=100,
        on_join=run.on_join,
        silence_s=5.0,
        unreachable_s=40.0,
        mass_silence_s=40.0,
        launch_s=300.0,
    )


def _check_agents(cluster: HostsCluster, records: list[Any]) -> None:
    """A name is one process's: no node is joined by two, and no host's agent is two nodes."""
    names = [record.event.node for record in records if isinstance(record.event, nodes.NodeJoined)]
    assert len(names) == len(set(names)), f"a node was joined twice: {names}"
    senders = {(record.origin.sender, record.origin.boot) for record in records if record.origin is not None}
    assert len({boot for _, boot in senders}) == len(senders), f"one process was two nodes: {sorted(senders)}"
    assert len({sender for sender, _ in senders}) == len(senders), f"two processes were one node: {sorted(senders)}"


async def _run(run: Plan) -> dict[str, Any]:
    log = MemoryLog(CODEC)
    training = Training(STEPS, cascade_s=run.cascade_s)
    ports: dict[str, Any] = {"training": training, "event_log": log, "warm_s": run.warm_s, "answers": run.answers}
    async with HostsCluster(_spec(run), **ports) as cluster:
        for number in range(run.hosts):
            cluster.host(f"host{number}", place=number if run.placed and number < run.nodes else -1)
        if run.reserve:
            cluster.start_master()
        for fault in run.faults:
            await cluster.until(
                lambda step=fault.step: training.done >= step or cluster.state.job.over, limit_s=36_000, every_s=0.01
            )
            if not cluster.state.job.over:
                await _strike(cluster, fault)
        outcome = await cluster.outcome()
        if outcome.state == "succeeded":
            check_steps(cluster)
        else:
            assert run.relaunches < 100, f"failed though budgets were left: {outcome}"
            assert outcome.root
        await cluster.settled()
        heard = {host.name: host.endings[-1] for host in cluster.hosts.values() if not host.dead and host.endings}
        wrong = {name: one for name, one in heard.items() if one.outcome in OVER and one.outcome != outcome.state}
        assert not wrong, f"the job has {outcome.state}, and some heard otherwise: {wrong}"
        assert all(
            one.outcome in OVER or one.reason == "no master answers" or _gone_for_good(one) for one in heard.values()
        ), heard
        _check_agents(cluster, await cluster.records())
        state = await check(cluster)
        payloads = [batch.payload async for batch in log.batches("joining")]
        return {
            "events": state.seq,
            "incidents": state.incidents.number,
            "generations": state.world.worlds["worker"].generation,
            "log": hashlib.blake2b(b"".join(payloads), digest_size=8).hexdigest(),
        }


def _gone_for_good(ending: Any) -> bool:
    """Its place was given up when its relaunches had run out."""
    return ending.outcome == "given up"


def trial(seed: int) -> dict[str, Any]:
    """Run a seed; what came of it. Raises AssertionError (or a deadlock) where a promise is broken."""
    return virtual_loop.run(_run(plan(seed)))


if __name__ == "__main__":
    sys.stdout.write(f"{plan(int(sys.argv[1]))}\n{trial(int(sys.argv[1]))}\n")
