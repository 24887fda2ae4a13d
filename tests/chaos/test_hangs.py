"""Hangs in real masters and agents on virtual time: found by heartbeats, named, ended; and everything that is no hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlrover_core.job.hangs import HangDismissed, HangNamed, HangSuspected
from dlrover_core.kernel.events import Event
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.training import Times, Training

GROUP = GroupSpec(nodes_min=2, nodes_max=2, nproc=2)


def tell(
    story: Callable[[Cluster], Awaitable[None]], training: Training | None = None, worlds: int = 2, **settings: object
) -> list[Event]:
    """Tell a story to a training cluster of two nodes with two workers each; its facts. It succeeds after so many worlds."""
    found: list[Event] = []

    async def told() -> None:
        spec = JobSpec("j", (GROUP,), **settings)  # type: ignore[arg-type]
        async with Cluster(spec, training=training or Training(steps=60)) as cluster:
            await cluster.until(lambda: cluster.training.done >= 5, every_s=0.1)
            await story(cluster)
            assert (await cluster.outcome()).state == "succeeded"
            assert cluster.training.newest == worlds
            await check(cluster)
            found.extend(record.event for record in await cluster.records())

    virtual_loop.run(told())
    return found


def of(facts: list[Event], kind: type) -> list[Event]:
    """Those of a kind."""
    return [fact for fact in facts if type(fact) is kind]


def test_a_rank_that_hangs_is_named_and_the_job_goes_on() -> None:
    """Within the threshold and a second, whatever the heartbeats' phase; nobody helps."""
    at: list[float] = []

    async def story(cluster: Cluster) -> None:
        cluster.training.hang(1, 3)
        began = asyncio.get_running_loop().time()
        await cluster.until(lambda: cluster.training.newest == 2, every_s=0.05)
        at.append(asyncio.get_running_loop().time() - began)

    facts = tell(story)
    named = of(facts, HangNamed)
    assert [(one.ranks, one.node) for one in named] == [((3,), "worker-1-0")]  # type: ignore[attr-defined]
    assert 60.0 <= at[0] <= 62.0


def test_a_hang_is_found_by_the_next_master_too() -> None:
    """The one that would have found it dies a moment before: what heartbeats tell is as true for its successor."""

    async def story(cluster: Cluster) -> None:
        cluster.training.hang(1, 2)
        await asyncio.sleep(59.0)
        cluster.kill_master()
        cluster.start_master()

    facts = tell(story)
    assert [one.ranks for one in of(facts, HangNamed)] == [(2,)]  # type: ignore[attr-defined]


def test_one_that_goes_on_in_time_was_never_suspected() -> None:
    """59 s without a step are legal, and from then on 88 s."""

    async def story(cluster: Cluster) -> None:
        for pause_s in (59.0, 80.0):
            done = cluster.training.done
            cluster.training.hang(1, 0)
            await asyncio.sleep(pause_s)
            cluster.training.go_on(1, 0)
            await cluster.until(lambda done=done: cluster.training.done > done + 2)  # type: ignore[misc]

    assert not of(tell(story, worlds=1), HangSuspected)


def test_one_that_goes_on_while_it_is_looked_at_is_left_alone() -> None:
    """The step comes after the suspicion and before the verdict."""

    async def story(cluster: Cluster) -> None:
        cluster.training.hang(1, 0)
        await asyncio.sleep(60.3)
        cluster.training.go_on(1, 0)

    facts = tell(story, worlds=1)
    assert len(of(facts, HangSuspected)) == len(of(facts, HangDismissed)) <= 1
    assert not of(facts, HangNamed)


@pytest.mark.parametrize("settings", [{"hang_s": 0.0}, {"hang_s": 300.0}])
def test_whoever_wants_no_rule_or_another_has_it(settings: dict[str, float]) -> None:
    """``hang_s`` is the user's."""

    async def story(cluster: Cluster) -> None:
        cluster.training.hang(1, 0)
        await asyncio.sleep(200.0)
        cluster.training.go_on(1, 0)

    assert not of(tell(story, worlds=1, **settings), HangSuspected)


def test_slow_steps_are_no_hang() -> None:
    """A step of 50 s, every time; the first two have a budget of their own."""

    async def story(cluster: Cluster) -> None:
        await cluster.until(lambda: cluster.training.done >= 8, every_s=1.0)

    assert not of(tell(story, Training(steps=10, step_s=50.0), worlds=1), HangSuspected)


def test_a_silent_agent_is_another_matter() -> None:
    """Where somebody is not heard of nobody is suspected of hanging: silence has its own rules."""

    async def story(cluster: Cluster) -> None:
        cluster.training.hang(1, 0)
        await asyncio.sleep(30.0)
        cluster.freeze("worker-1-0")
        await asyncio.sleep(100.0)
        assert not cluster.master.state.hangs.hangs
        cluster.thaw("worker-1-0")

    facts = tell(story)
    assert [one.ranks for one in of(facts, HangNamed)] == [(0,)]  # type: ignore[attr-defined]


def test_a_long_start_is_no_hang() -> None:
    """Loading for five minutes, and again after a restart."""

    async def story(cluster: Cluster) -> None:
        cluster.kill_worker(3)

    assert not of(tell(story, Training(steps=20, times=Times(load_s=300.0))), HangSuspected)
