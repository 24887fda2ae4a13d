"""Seeded histories of jobs with data: what the smoke test and the campaign `data_seeds` do with a seed.

A job saves in one of many ways, and suffers deaths of workers, nodes and masters, fail-overs, growth, shrinking and drains, a
storage that fails and memory that is damaged. Afterwards no sample is lost, none is twice in the lineage of a model, the
log says of every state what its model was trained on, and the audit proves it.
``python -m tests.chaos.data_seeds SEED`` runs one again.
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
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.state import digest
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.checkpointing import check_saved
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.consuming import Consuming, Dataset, check_consumed
from dlrover_core.testing.invariants import check_history
from dlrover_core.testing.saving import Knobs, Saving
from dlrover_core.testing.training import Training

STEPS = 40
WHATS = (
    "worker", "worker", "node", "node", "two nodes", "master", "fail-over", "scale", "scale", "drain", "storage", "damage",
)  # fmt: skip


class Fault(NamedTuple):
    """``what`` happens to the ``which``-th candidate as soon as step ``step`` is made."""

    step: int
    what: str
    which: int


class Plan(NamedTuple):
    """A whole run, decided before it begins."""

    nodes: int
    fewest: int
    nproc: int
    knobs: Knobs
    dataset: Dataset
    faults: tuple[Fault, ...]
    standby: bool


def plan(seed: int) -> Plan:
    """The run of a seed."""
    dice = random.Random(seed)
    nodes = dice.randrange(1, 5)
    every = dice.choice([1, 1, 2, 3])
    knobs = Knobs(
        every=every,
        store_every=every * dice.choice([0, 2, 3, 5]),
        slots=dice.choice([2, 2, 3]),
        spread=dice.choice([0, 1, 1, 2]),
        write_s=dice.choice([0.05, 0.25, 1.0]),
        replicas=dice.random() < 0.5,
        planned=dice.random() < 0.7,
    )
    # Epochs end within the run, with a short last batch or without one.
    dataset = Dataset(dice.choice([12, 60, 64, 100, 1000]), dice.choice([12, 12, 13]), 0, dice.randrange(100))
    steps = sorted(dice.randrange(1, STEPS - 3) for _ in range(dice.randrange(1, 7)))
    return Plan(
        nodes=nodes,
        fewest=dice.randrange(1, nodes + 1),
        nproc=dice.randrange(1, 4),
        knobs=knobs,
        dataset=dataset,
        faults=tuple(Fault(step, dice.choice(WHATS), dice.randrange(100)) for step in steps),
        standby=dice.random() < 0.3,
    )


async def _strike(cluster: Cluster, saving: Saving, fault: Fault) -> None:
    ranks = sorted(rank for launcher in cluster.launchers.values() for rank in launcher.ranks)
    living = sorted(cluster.backend.living)
    match fault.what:
        case "worker" if ranks:
            cluster.kill_worker(ranks[fault.which % len(ranks)])
        case "node" | "two nodes" if living:
            for node in sorted(
                {living[fault.which % len(living)], *(living[-1:] if fault.what == "two nodes" else ())}
            ):
                cluster.kill_node(node)
        case "master":
            cluster.kill_master()
            cluster.start_master()
        case "fail-over":
            leads = any(master.leading for master in cluster.masters)
            cluster.start_master()
            cluster.kill_leader() if leads else cluster.kill_master()
            cluster.start_master()
        case "storage":
            saving.broken.add("*")
            asyncio.get_running_loop().call_later(0.5 + fault.which / 10, saving.broken.discard, "*")
        case "damage" if living:
            saving.damaged.add(living[fault.which % len(living)])
        case "scale" | "drain":
            await _ask(cluster, fault)


async def _ask(cluster: Cluster, fault: Fault) -> None:
    """A person asks whoever leads, and may be refused."""
    leads = [master for master in cluster.masters if master.leading]
    present = sorted(leads[0].state.nodes.nodes) if leads else []
    if not present:
        return
    asked: dict[str, Any] = {"command": "drain", "node": present[fault.which % len(present)]}
    if fault.what == "scale":
        asked = {"command": "scale", "nodes_max": 1 + fault.which % 4, "nodes_min": 1}
    with contextlib.suppress(Refused, NotLeading):
        await leads[0].obey(asked)


class Told(NamedTuple):
    """The log of a run, the hash of its bytes, and the digest of its last master's state."""

    records: list[Record]
    log: str
    digest: str


async def _run(run: Plan, saving: Saving) -> Told:
    spec = JobSpec(
        "seeded", (GroupSpec("worker", run.fewest, run.nodes, run.nproc, relaunch_max=100),), max_restarts=100
    )
    log = MemoryLog(CODEC)
    async with Cluster(spec, training=Training(STEPS, saving=saving), event_log=log, answers=True) as cluster:
        if run.standby:
            cluster.start_master()
        for fault in run.faults:
            await cluster.until(
                lambda step=fault.step: cluster.training.done >= step or cluster.state.job.over, 36_000, every_s=0.02
            )
            if not cluster.state.job.over:
                await _strike(cluster, saving, fault)
        await cluster.outcome()
        records = await cluster.records()
        payloads = [batch.payload async for batch in log.batches(spec.job)]
        return Told(records, hashlib.blake2b(b"".join(payloads), digest_size=8).hexdigest(), digest(cluster.state))


def trial(seed: int) -> dict[str, Any]:
    """Run a seed; what came of it. Raises AssertionError (or a deadlock) where a promise is broken."""
    run = plan(seed)
    data = Consuming(run.dataset)
    saving = Saving(run.knobs, data)
    told = virtual_loop.run(_run(run, saving))
    state = check_history(told.records)
    assert digest(state) == told.digest, "the master's state is not the fold of the log"
    check_saved(told.records, saving)
    return {
        **check_consumed(told.records, state, data),
        "events": state.seq,
        "generations": state.world.worlds["worker"].generation,
        "log": told.log,
    }


if __name__ == "__main__":
    sys.stdout.write(f"{plan(int(sys.argv[1]))}\n{trial(int(sys.argv[1]))}\n")
