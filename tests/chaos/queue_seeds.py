"""Seeded histories of two jobs on hosts that are too few for both: what the smoke test and the campaign do with a seed.

Each job alone has room, and both want more than there is. Some have rollout workers beside their trainers. Whatever befalls
them, both end well, and nothing is left. As in `seeds`, a run is decided before it begins:
``python -m tests.chaos.queue_seeds SEED`` runs one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import sys
from typing import Any, NamedTuple

from dlrover_core.errors import NotLeading, Refused
from dlrover_core.job import queueing
from dlrover_core.job.state import CODEC
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.checkpointing import check_saved
from dlrover_core.testing.cluster import NEVER, Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.platform import Pool
from dlrover_core.testing.saving import Knobs, Saving
from dlrover_core.testing.training import Training

STEPS, FAULTS_MAX = 150, 10
LIMIT_S = 4 * 3600.0
"""Virtual seconds for a job of 150 steps: some forty times as long as most take."""
WHATS = ("worker", "node", "node", "master", "hold", "host", "preempt", "suspend", "quota", "relist", "withdrawn")
NO_LIMIT = 1_000_000
TRAINERS = "trainer"
KEPT = Knobs(every=10, store_every=0, planned=True)


class Fault(NamedTuple):
    """``what`` happens to the ``which``-th candidate of a job, so many seconds after the beginning; for ``seconds``."""

    at_s: float
    what: str
    job: int
    which: int
    seconds: int


class Plan(NamedTuple):
    """A whole run, decided before it begins.

    sizes:  of both jobs: trainers, at least and at most, and rollout workers
    spread: the jobs get every second host each at first
    saves:  of both jobs: the trainers save, and the rollout workers do
    """

    hosts: int
    sizes: tuple[tuple[int, int, int], ...]
    gang_s: float
    spread: bool
    faults: tuple[Fault, ...]
    saves: tuple[tuple[bool, bool], ...]


def plan(seed: int) -> Plan:
    """The run of a seed."""
    dice = random.Random(f"queue {seed}")
    hosts = dice.randrange(3, 9)
    sizes = []
    for _ in range(2):
        rollouts = dice.choice([0, 0, 1, 2])
        most = dice.randrange(1, hosts - rollouts + 1)
        sizes.append((dice.choice([most, dice.randrange(1, most + 1)]), most, rollouts))
    faults = [
        Fault(dice.random() * 400, dice.choice(WHATS), dice.randrange(2), dice.randrange(100), dice.randrange(5, 400))
        for _ in range(dice.randrange(FAULTS_MAX))
    ]
    gang_s, spread = dice.choice([30.0, 120.0]), dice.random() < 0.5
    saves = tuple((dice.random() < 0.5, dice.random() < 0.5) for _ in range(2))
    return Plan(hosts, tuple(sizes), gang_s, spread, tuple(sorted(faults)), saves)


def _job(run: Plan, number: int, pool: Pool) -> Cluster:
    least, most, rollouts = run.sizes[number]
    groups = [GroupSpec(TRAINERS, least, most, relaunch_max=NO_LIMIT)]
    if rollouts:
        groups.append(GroupSpec("rollout", rollouts, rollouts, coupling="each", ends=False, relaunch_max=NO_LIMIT))
    spec = JobSpec(f"job{number}", tuple(groups), max_restarts=NO_LIMIT, gang_s=run.gang_s, heartbeat_s=5.0)
    trainers, beside = run.saves[number]
    return Cluster(
        spec,
        training=Training(STEPS, 1.0, saving=Saving(KEPT) if trainers else None),
        event_log=MemoryLog(CODEC),
        pool=pool,
        others=lambda _: Training(NEVER, 5.0, saving=Saving(KEPT) if beside else None),
    )


async def _strike(jobs: list[Cluster], pool: Pool, fault: Fault) -> None:
    """It passes by itself."""
    job = jobs[fault.job]
    platform, living = job.platform, sorted(job.platform.booted)
    node = living[fault.which % len(living)] if living else ""
    if fault.what == "master":
        job.kill_master()
        job.start_master()
    elif fault.what == "hold":
        pool.hold("somebody else is first")
        await asyncio.sleep(fault.seconds)
        pool.hold("")
    elif fault.what == "host":
        host = pool.up[fault.which % len(pool.up)] if len(pool.up) > 1 else ""
        if host:
            holder = next((one for one in jobs if pool.hosts[host] in one.platform._slots), job)
            holder.platform.take_down(host)
            await asyncio.sleep(fault.seconds)
            holder.platform.bring_up(host)
    elif fault.what == "quota":
        platform.no_quota = True
        await asyncio.sleep(fault.seconds)
        platform.no_quota = False
    elif fault.what == "relist":
        platform.break_streams()
    elif fault.what == "suspend":
        await _suspend(job, fault.seconds)
    elif node:
        await _strike_node(job, node, fault)


async def _strike_node(job: Cluster, node: str, fault: Fault) -> None:
    platform, launcher = job.platform, job.launchers[node]
    if fault.what == "worker" and launcher.ranks:
        launcher.kill(launcher.ranks[0])
    elif fault.what == "node":
        job.kill_node(node)
    elif fault.what in ("preempt", "withdrawn"):
        name = platform.of(node)
        platform.give_notice(name, fault.seconds)
        await asyncio.sleep(fault.seconds / 2)
        if fault.what == "withdrawn":
            platform.withdraw_notice(name)


async def _suspend(job: Cluster, for_s: float) -> None:
    for master in [one for one in job.masters if one.leading]:
        with contextlib.suppress(Refused, NotLeading):
            await master.obey({"command": "suspend"})
    await asyncio.sleep(for_s)
    while job.state.job.state == "suspended":
        for master in [one for one in job.masters if one.leading]:
            with contextlib.suppress(Refused, NotLeading):
                await master.obey({"command": "resume"})
        await asyncio.sleep(1.0)


async def _run(run: Plan) -> dict[str, Any]:
    pool = Pool([f"host-{number}" for number in range(run.hosts)])
    jobs = [_job(run, number, pool) for number in range(2)]
    if run.spread:
        pool.hold("not yet")
    async with jobs[0], jobs[1]:
        if run.spread:
            await asyncio.sleep(1)
            pool._waiting.sort(key=lambda waits: (int(waits[1].split("-")[-2]), waits[1]))
            pool.hold("")
        errands = [asyncio.ensure_future(_later(jobs, pool, fault)) for fault in run.faults]
        try:
            for job in jobs:
                outcome = await job.outcome(LIMIT_S)
                assert outcome.state == "succeeded", outcome
        finally:
            for errand in errands:
                errand.cancel()
            await asyncio.gather(*errands, return_exceptions=True)
        told = [await _history(job) for job in jobs]
        took_s = round(asyncio.get_running_loop().time())
        return {
            "events": sum(one.events for one in told),
            "given_back": sum(one.given_back for one in told),
            "virtual_s": took_s,
            "log": "".join(one.log for one in told),
        }


class History(NamedTuple):
    """What a job's log tells when the job is over."""

    events: int
    given_back: int
    log: str


async def _history(job: Cluster) -> History:
    """Ask every promise of a job that is over, of which nothing may be left."""
    if job.training.saving is None:
        check_steps(job)
    else:
        assert job.training.done == STEPS
    await job.until(lambda: not job.platform.living, 600, every_s=0.1)
    state, told = await check(job), hashlib.blake2b(digest_size=8)
    async for batch in job.log.batches(job.spec.job):
        told.update(batch.payload)
    records = await job.records()
    if job.training.saving is not None:
        check_saved([one for one in records if _is_of_trainers(one.event)], job.training.saving)
    given_back = sum(isinstance(one.event, queueing.GivenBack) for one in records)
    return History(state.seq, given_back, told.hexdigest())


def _is_of_trainers(fact: Any) -> bool:
    return getattr(fact, "group", "") == TRAINERS or getattr(fact, "node", "").startswith(f"{TRAINERS}-")


async def _later(jobs: list[Cluster], pool: Pool, fault: Fault) -> None:
    await asyncio.sleep(fault.at_s)
    if not jobs[fault.job].state.job.over:
        await _strike(jobs, pool, fault)


def trial(seed: int) -> dict[str, Any]:
    """Run a seed; what came of it. Raises AssertionError (or a time-out) where a promise is broken."""
    return virtual_loop.run(_run(plan(seed)), limit_s=3 * LIMIT_S)


if __name__ == "__main__":
    sys.stdout.write(f"{plan(int(sys.argv[1]))}\n{trial(int(sys.argv[1]))}\n")
