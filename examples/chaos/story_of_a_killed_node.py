"""A story in virtual time: what becomes of a job whose node is killed, then its master, then the new master too.

    python -m pytest examples/chaos/story_of_a_killed_node.py

The real master and the real agents run in one event loop whose clock jumps from event to event: two minutes of a job's life
pass in a fraction of a second, and twice in the same way. Copy this file to write stories about your own settings or log.
"""

from __future__ import annotations

from dlrover_core import GroupSpec, JobSpec
from dlrover_core.job.ranges import from_ranges
from dlrover_core.job.world import WorldFormed
from dlrover_core.testing import Cluster, Training, virtual_loop

BOOT_S = 20.0  # from the order to launch a node until its agent calls
STEP_S = 0.5


def spec(fewest: int) -> JobSpec:
    """Two nodes of two workers each; the world may shrink to ``fewest`` of them."""
    return JobSpec("story", (GroupSpec(nodes_min=fewest, nodes_max=2, nproc=2),), last_call_s=5.0, grow_window_s=1.0)


async def tell(fewest: int) -> dict[str, object]:
    """The story; what a reader of the log would like to know."""
    training = Training(steps=200, step_s=STEP_S)
    async with Cluster(spec(fewest), training=training, boot_s=BOOT_S) as cluster:
        await cluster.until(lambda: training.done >= 50)
        cluster.kill_node("worker-1-0")
        died_at = training.done
        cluster.kill_master()  # in the same moment: nobody is there to see it
        cluster.start_master()
        # The log says that there were two nodes; the backend says that there is one. The new master puts that right.
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched)
        cluster.kill_master()  # and again, while the successor boots
        cluster.start_master()
        outcome = await cluster.outcome()
        worlds = [record.event for record in await cluster.records() if isinstance(record.event, WorldFormed)]
        return {
            "state": outcome.state,
            "died_at": died_at,
            "launched": list(cluster.backend.launched),
            "sizes": [len(from_ranges(world.group, world.members)) for world in worlds],
            "steps": training.log,
            "kinds": await cluster.names(),
            "same": await cluster.refold() == cluster.state,
        }


def test_a_killed_node_is_replaced_once() -> None:
    """Two masters die while a node is being replaced; it is replaced exactly once, and every step is made exactly once."""
    told = virtual_loop.run(tell(fewest=2))
    assert told["state"] == "succeeded"
    assert told["launched"] == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert told["sizes"] == [2, 2]
    assert [step for _, step in told["steps"]] == list(range(1, 201))
    assert told["same"], "the state is what folding the log gives"


def test_a_world_that_may_shrink_goes_on_and_grows_again() -> None:
    """With nodes 1:2 the survivor trains on alone while the successor boots, and is joined by it."""
    told = virtual_loop.run(tell(fewest=1))
    assert told["state"] == "succeeded"
    assert told["sizes"] == [2, 1, 2]
    alone = [step for generation, step in told["steps"] if generation == 2]
    assert len(alone) > (BOOT_S - 10) / STEP_S, "it did not wait for the boot"


def test_it_happens_the_same_way_twice() -> None:
    """No clock, no dice: the same story leaves the same log, event for event."""
    assert virtual_loop.run(tell(fewest=1)) == virtual_loop.run(tell(fewest=1))
