"""The master is crashed before and after every append of a whole history, and the log misbehaves at every append.

The same end state means: how the job ended and the root shown; how many generations and who started workers in each, so
that nobody was restarted for the master's sake; the budgets used; every incident with its verdict, its last action and that
it closed; which nodes were ever launched; and the steps made, each once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from dlrover_core.job.job import StopJob
from dlrover_core.job.state import CODEC
from dlrover_core.logs.memory import Fault, Faults, LostAck, MemoryLog, SlowAck, Stuck, Unavailable
from dlrover_core.runtime.master import Outcome
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

GROUP = GroupSpec(nodes_min=2, nodes_max=2, nproc=2)


class End(NamedTuple):
    """What must be the same, whatever happened to masters and log."""

    outcome: Outcome
    generation: int
    starts: tuple[tuple[str, int], ...]
    restarts: int
    relaunches: dict[str, int]
    incidents: list[tuple[int, str, int, str, str, bool]]
    launched: list[str]
    steps: int


class Tale(NamedTuple):
    """A job and what befalls it; ``steps``: how many it makes is decided by the tale alone."""

    spec: JobSpec
    befalls: Callable[[Cluster], Awaitable[None]]
    steps: bool = True


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number, every_s=0.01)


async def three_deaths(cluster: Cluster) -> None:
    """A worker, a node and the master die in turn."""
    await step(cluster, 3)
    cluster.kill_worker(3)
    await step(cluster, 6)
    cluster.kill_node("worker-1-0")
    await step(cluster, 9)
    cluster.kill_master()
    cluster.start_master()


async def fails(cluster: Cluster) -> None:
    """A script error comes back after its restart."""
    for at in (3, 6):
        await step(cluster, at)
        cluster.kill_worker(1, 1, "Traceback (most recent call last):\nValueError: no such batch")


async def stopped(cluster: Cluster) -> None:
    """Somebody asks for a stop, again and again until it is durable."""
    await step(cluster, 3)
    while True:
        try:
            asked = cluster.leader.submit(StopJob("somebody asked"))
        except LookupError:
            await asyncio.sleep(0.01)
            continue
        await asyncio.wait({asked})
        if not asked.cancelled():
            return


TALES = {
    "deaths": Tale(JobSpec("j", (GROUP,)), three_deaths),
    "fails": Tale(JobSpec("j", (GROUP,), max_restarts=1), fails),
    "stopped": Tale(JobSpec("j", (GROUP,)), stopped, steps=False),
}


async def crash(cluster: Cluster, faults: Faults, *, warm: bool) -> None:
    """Kill the master that waits for ever in its append; another takes over."""
    await cluster.until(lambda: any(isinstance(fault, Stuck) for _, fault in faults.tripped), every_s=0.01)
    if warm:
        cluster.kill_leader()
    else:
        cluster.kill_master()
    # Beside a warm standby it queues behind it; the tale itself may have killed that one.
    cluster.start_master()


def play(tale: Tale, script: dict[int, Fault], *, warm: bool = False) -> tuple[End, int]:
    """The end of a tale under a fault script, and how many appends it took."""
    faults = Faults(script)

    async def told() -> tuple[End, int]:
        async with Cluster(
            tale.spec, training=Training(steps=12), event_log=MemoryLog(CODEC, faults), boot_s=0.5
        ) as cluster:
            if warm:
                cluster.start_master()
            acts = [asyncio.ensure_future(tale.befalls(cluster))]
            if any(isinstance(fault, Stuck) for fault in script.values()):
                acts.append(asyncio.ensure_future(crash(cluster, faults, warm=warm)))
            outcome = await cluster.outcome()
            await asyncio.wait_for(asyncio.gather(*acts), 1)
            assert cluster.backend.living == []
            check_steps(cluster)
            state = await check(cluster)
            assert len(faults.tripped) == len(script)
            incidents = [
                (one.number, one.cause.node, one.generation, one.signature, one.action, one.closed)
                for one in state.incidents.by_number.values()
            ]
            end = End(
                outcome,
                state.world.worlds["worker"].generation,
                tuple(sorted(cluster.training.starts)),
                state.incidents.restarts,
                state.incidents.relaunches,
                incidents,
                cluster.backend.launched,
                cluster.training.done if tale.steps else 0,
            )
            return end, faults.appends

    return virtual_loop.run(told(), limit_s=3600)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("lands", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", TALES)
def test_master_crashes_at_every_append(name: str, *, lands: bool, warm: bool) -> None:
    """Killed before or after any append, the next master brings the job to the same end; nobody restarts for its sake."""
    tale = TALES[name]
    expected, appends = play(tale, {})
    assert appends > 10
    for index in range(1, appends + 1):
        end, _ = play(tale, {index: Stuck(lands)}, warm=warm)
        assert end == expected, f"crashed {'after' if lands else 'before'} append {index}"


@pytest.mark.parametrize("fault", [LostAck(), SlowAck(0.3), Unavailable()], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("name", TALES)
def test_log_misbehaves_at_every_append(name: str, fault: Fault) -> None:
    """An acknowledgement lost or slow, or an append that did not land, changes nothing about the end."""
    tale = TALES[name]
    expected, appends = play(tale, {})
    for index in range(1, appends + 1):
        end, _ = play(tale, {index: fault})
        assert end == expected, f"{fault} at append {index}"


@pytest.mark.parametrize("name", TALES)
def test_every_append_is_answered_late(name: str) -> None:
    """A log that is slow all the time makes groups larger and nothing else different."""
    tale = TALES[name]
    expected, appends = play(tale, {})

    class Slow(Faults):
        def take(self) -> Fault | None:
            self.appends += 1
            return SlowAck(0.05)

    faults = Slow()

    async def told() -> Outcome:
        async with Cluster(
            tale.spec, training=Training(steps=12), event_log=MemoryLog(CODEC, faults), boot_s=0.5
        ) as cluster:
            acts = asyncio.ensure_future(tale.befalls(cluster))
            outcome = await cluster.outcome()
            await acts
            await check(cluster)
            return outcome

    assert virtual_loop.run(told()) == expected.outcome
    # One more at most: where every answer comes late, what had been one group may be two.
    assert faults.appends <= appends + 1
