"""Seeded histories: a random job, a random list of faults, and what must hold all the same.

A run is a workload and an explicit list of faults, both made from the seed before the run begins; during the run nothing is
drawn. So a failing seed can be run again, and its list shortened by hand: ``python -m tests.chaos.seeds SEED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import sys
from typing import Any, NamedTuple

from dlrover_core.errors import NotLeading, Refused
from dlrover_core.job.state import CODEC
from dlrover_core.logs.memory import Faults, LostAck, MemoryLog, SlowAck, Unavailable
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

STEPS = 60
FAULTS_MAX = 8


class Fault(NamedTuple):
    """``what`` happens to the ``which``-th candidate as soon as step ``step`` is made."""

    step: int
    what: str
    which: int


class Plan(NamedTuple):
    """A whole run, decided before it begins."""

    nodes: int
    fewest: int
    unit: int
    on_join: str
    restarts: int
    relaunches: int
    nproc: int
    cascade_s: float | None
    standby: bool
    skew_s: int
    log_faults: tuple[tuple[int, str], ...]
    faults: tuple[Fault, ...]
    patience_s: float
    answers: bool


WHATS = ("worker", "worker", "node", "master", "leader", "cut", "suspend", "relist", "two workers")
# What people ask of the job, in the midst of it all. Drawn after everything else: plans of old seeds are as they were.
ASKS = ("scale", "scale", "drain", "pause", "pause")
# Drawn after those: masters of several hosts, of which the leader is asked to go.
MASTERS = ("hand over", "hand over", "leader")


def plan(seed: int) -> Plan:
    """The run of a seed."""
    dice = random.Random(seed)
    unit = dice.choice([1, 1, 1, 2])
    nodes = dice.randrange(1, 5 // unit) * unit
    generous = dice.random() < 0.6
    steps = sorted(dice.randrange(1, STEPS - 5) for _ in range(dice.randrange(1, FAULTS_MAX)))
    drawn = Plan(
        nodes=nodes,
        fewest=dice.randrange(1, nodes + 1) if dice.random() < 0.5 else nodes,
        unit=unit,
        on_join=dice.choice(["restart", "restart", "never"]),
        restarts=100 if generous else dice.randrange(4),
        relaunches=100 if generous else dice.randrange(3),
        nproc=dice.randrange(1, 4),
        cascade_s=dice.choice([None, 0.0, 0.005, 0.2]),
        standby=dice.random() < 0.5,
        skew_s=dice.choice([0, 3600, -3600]),
        log_faults=tuple(
            (dice.randrange(1, 80), dice.choice(["lost", "slow", "down"])) for _ in range(dice.randrange(3))
        ),
        faults=tuple(Fault(step, dice.choice(WHATS), dice.randrange(100)) for step in steps),
        patience_s=0.0,
        answers=False,
    )
    asked = [
        Fault(dice.randrange(1, STEPS - 5), dice.choice(ASKS), dice.randrange(100)) for _ in range(dice.randrange(4))
    ]
    patience_s, answers = dice.choice([0.0, 0.5, 10.0]), dice.random() < 0.3
    turns = [
        Fault(dice.randrange(1, STEPS - 5), dice.choice(MASTERS), dice.randrange(100))
        for _ in range(dice.randrange(1, 5) if answers else 0)
    ]
    faults = tuple(sorted((*drawn.faults, *asked, *turns), key=lambda one: one.step))
    return drawn._replace(faults=faults, patience_s=patience_s, answers=answers)


async def _strike(cluster: Cluster, fault: Fault, skew_us: int) -> None:
    ranks = sorted(rank for launcher in cluster.launchers.values() for rank in launcher.ranks)
    living = sorted(cluster.backend.living)
    if fault.what in ("worker", "two workers") and ranks:
        cluster.kill_worker(ranks[fault.which % len(ranks)])
        if fault.what == "two workers" and len(ranks) > 1:
            cluster.kill_worker(ranks[(fault.which + 1) % len(ranks)])
    elif fault.what == "node" and living:
        cluster.kill_node(living[fault.which % len(living)])
    elif fault.what in ("master", "leader"):
        cluster.skew_us = skew_us
        # Where nobody leads at this moment there is no leader to kill: then all masters die.
        leads = any(master.leading for master in cluster.masters)
        cluster.kill_leader() if fault.what == "leader" and leads else cluster.kill_master()
        cluster.start_master()
    elif fault.what == "hand over":
        await cluster.hand_over()
        cluster.skew_us = skew_us
        cluster.start_master()
    elif fault.what == "cut" and living:
        host = living[fault.which % len(living)]
        cluster.network.cut(host)
        await asyncio.sleep(3 + fault.which % 40)
        cluster.network.heal()
    elif fault.what == "suspend":
        cluster.jump(3 + fault.which % 60)
    elif fault.what == "relist":
        cluster.backend.relist()
    elif fault.what in ASKS:
        await _ask(cluster, fault)


async def _ask(cluster: Cluster, fault: Fault) -> None:
    """A person asks whoever leads, and may be refused. Whoever suspends a job lets it go on some time later, or tries to."""
    leads = [master for master in cluster.masters if master.leading]
    present = sorted(leads[0].state.nodes.nodes) if leads else []
    if not leads or not present:
        return
    unit = leads[0].state.job.spec.groups[0].unit
    asked = {
        "scale": {
            "command": "scale",
            "nodes_max": (1 + fault.which % (4 // unit)) * unit,
            "nodes_min": fault.which // 50,
        },
        "drain": {"command": "drain", "node": present[fault.which % len(present)]},
        "pause": {"command": "suspend", "keep_nodes": fault.which % 2 == 0, "lose": True},
    }[fault.what]
    with contextlib.suppress(Refused, NotLeading):
        await leads[0].obey(asked)
    if fault.what == "pause":
        await asyncio.sleep(fault.which)
        while cluster.state.job.state == "suspended" or cluster.state.job.pausing:
            for master in [one for one in cluster.masters if one.leading]:
                with contextlib.suppress(Refused, NotLeading):
                    await master.obey({"command": "resume"})
            await asyncio.sleep(1.0)


async def _run(run: Plan) -> dict[str, Any]:
    spec = JobSpec(
        "seeded",
        (GroupSpec("worker", run.fewest, run.nodes, run.nproc, run.unit, run.relaunches),),
        max_restarts=run.restarts,
        on_join=run.on_join,
    )
    script = {
        number: {"lost": LostAck(), "slow": SlowAck(0.5), "down": Unavailable()}[kind]
        for number, kind in run.log_faults
    }
    log = MemoryLog(CODEC, Faults(script))
    async with Cluster(
        spec, training=Training(STEPS, cascade_s=run.cascade_s), event_log=log, answers=run.answers
    ) as cluster:
        if run.standby:
            cluster.start_master()
        cluster.patience_s = run.patience_s
        for fault in run.faults:
            await cluster.until(
                lambda step=fault.step: cluster.training.done >= step or cluster.state.job.over, limit_s=36_000
            )
            if not cluster.state.job.over:
                await _strike(cluster, fault, run.skew_s * 1_000_000)
        outcome = await cluster.outcome()
        if outcome.state == "succeeded":
            check_steps(cluster)
        else:
            assert min(run.restarts, run.relaunches) < len(run.faults) * 2, (
                f"failed though budgets were left: {outcome}"
            )
            assert outcome.root
        assert cluster.backend.living == []
        state = await check(cluster)
        payloads = [batch.payload async for batch in log.batches(spec.job)]
        return {
            "events": state.seq,
            "incidents": state.incidents.number,
            "generations": state.world.worlds["worker"].generation,
            "log": hashlib.blake2b(b"".join(payloads), digest_size=8).hexdigest(),
        }


def trial(seed: int) -> dict[str, Any]:
    """Run a seed; what came of it. Raises AssertionError (or a deadlock) where a promise is broken."""
    return virtual_loop.run(_run(plan(seed)))


if __name__ == "__main__":
    sys.stdout.write(f"{plan(int(sys.argv[1]))}\n{trial(int(sys.argv[1]))}\n")
