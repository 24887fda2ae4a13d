"""Jobs of several groups, with the real masters and agents: a death restarts nobody of another set, the job ends as it should."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.chaos.queued import hours_in_a_queue

from dlrover_core.job import clusters, incidents, job, nodes, world
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import Chaos, Fault, Scenario, virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.platform import Pool
from dlrover_core.testing.training import Training

TRAINER = GroupSpec("trainer", 2, 2, uses=("rollout",))
ROLLOUT = GroupSpec("rollout", 3, 3, coupling="each", ends=False, uses=("trainer",))
EVALUATOR = GroupSpec("evaluator", ends=False, critical=False, max_restarts=0)
STEPS, STEP_S = 120, 0.5
SETS = {"trainer", "rollout-0", "rollout-1", "rollout-2", "evaluator"}
ERROR = "Traceback (most recent call last):\nValueError: bad batch"


OF_FOUR_GROUPS = Scenario(
    nodes=2,
    steps=24,
    step_s=0.5,
    boot_s=0.5,
    groups=(
        ("trainer", (("uses", ("rollout", "ps")),)),
        (
            "rollout",
            (("nodes_min", 2), ("nodes_max", 2), ("coupling", "each"), ("ends", False), ("uses", ("trainer",))),
        ),
        ("evaluator", (("critical", False), ("ends", False), ("max_restarts", 0))),
        ("ps", (("coupling", "each"), ("ends", False), ("store", False), ("hang_s", 0.0))),
    ),
    quiet=("ps",),
)


class Story(Cluster):
    """A job of trainers, rollouts and an evaluator; ``at`` is when each step of the trainers was made."""

    def __init__(self, *groups: GroupSpec, **settings: Any) -> None:
        spec = JobSpec("j", groups or (TRAINER, ROLLOUT, EVALUATOR), evidence_s=30.0, **settings)
        super().__init__(spec, training=Training(STEPS, STEP_S))
        self.at: list[float] = []
        self.training.stepped = lambda _: self.at.append(asyncio.get_running_loop().time())

    async def all_train(self) -> None:
        """Every set makes steps."""
        sets = set(self.sets.all(self.spec))
        await self.until(lambda: self.trainings.keys() == sets and all(one.done > 4 for one in self.trainings.values()))

    @property
    def generations(self) -> dict[str, int]:
        """The newest generation of every set."""
        return {name: one.generation for name, one in self.state.world.worlds.items()}

    async def formed_again(self) -> set[str]:
        """The sets that formed more than one world."""
        facts = [record.event for record in await self.records()]
        return {fact.group for fact in facts if isinstance(fact, world.WorldFormed) and fact.generation > 1}

    async def ends_well(self) -> None:
        """The job succeeds, and every promise was kept."""
        assert (await self.outcome()).state == "succeeded"
        check_steps(self)
        await check(self)


def told(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in virtual time."""

    async def whole() -> None:
        await story()

    virtual_loop.run(whole(), limit_s=100_000)


@pytest.mark.parametrize("node", [False, True], ids=["its worker", "its node"])
def test_a_rollout_dies_alone(node: bool) -> None:
    """It alone comes back; the trainers do not lose a step, nor does one take them longer."""

    async def story() -> None:
        async with Story() as cluster:
            await cluster.all_train()
            cluster.kill_node("rollout-1-0") if node else cluster.kill_worker(0, of="rollout-1")
            await cluster.ends_well()
            assert await cluster.formed_again() == {"rollout-1"}
            gaps = [after - before for before, after in zip(cluster.at, cluster.at[1:], strict=False)]
            assert max(gaps) == pytest.approx(STEP_S)
            assert len(cluster.at) == STEPS

    told(story)


def test_trainers_restart_alone() -> None:
    """A trainer's node dies: the trainers' world forms anew, rollouts work on, and hear where its successor is called."""

    async def story() -> None:
        async with Story() as cluster:
            await cluster.all_train()
            cluster.kill_node("trainer-1-0")
            await cluster.until(lambda: cluster.generations["trainer"] > 1, 60)

            def hears() -> bool:
                offer = cluster.state.clusters.offer("trainer-1-1")
                peers = [one.peers for one in cluster.heard if one.node == "rollout-2-0"]
                return offer is not None and clusters.listed(peers[-1])["trainer"].get("1") == offer.addresses

            await cluster.until(hears, 60)
            await cluster.ends_well()
            assert await cluster.formed_again() == {"trainer"}
            assert all(cluster.generations[name] == 1 for name in SETS - {"trainer"})

    told(story)


def test_an_evaluator_that_fails_is_given_up() -> None:
    """It fails for good: the job goes on without it, restarts nobody, and ends well."""

    async def story() -> None:
        async with Story() as cluster:
            await cluster.all_train()
            cluster.kill_worker(0, 1, ERROR, of="evaluator")
            await cluster.ends_well()
            facts = [record.event for record in await cluster.records()]
            (given_up,) = [fact for fact in facts if isinstance(fact, job.SetGivenUp)]
            assert (given_up.set, "ValueError: bad batch" in given_up.root) == ("evaluator", True)
            assert await cluster.formed_again() == set()
            assert len(cluster.at) == STEPS

    told(story)


def test_groups_of_one_set_restart_together() -> None:
    """A chief and its workers are one world: whoever of them dies, both begin anew, and the rollouts do not."""

    async def story() -> None:
        chief, workers = GroupSpec("chief", set="train"), GroupSpec("worker", 2, 2, set="train")
        async with Story(chief, workers, GroupSpec("rollout", 2, 2, coupling="each", ends=False)) as one:
            await one.all_train()
            one.kill_node("worker-0-0")
            await one.ends_well()
            assert await one.formed_again() == {"train"}
            assert one.state.world.worlds["train"].members[0].node == "chief-0-0"

    told(story)


def test_trainers_that_wait_do_not_keep_rollouts() -> None:
    """Hosts for the trainers come an hour late: rollouts work meanwhile, nobody is charged, and the trainers begin at once."""

    async def story() -> None:
        pool = Pool(["host-0", "host-1", "host-2"])
        spec = JobSpec("j", (ROLLOUT, TRAINER), heartbeat_s=5.0, gang_s=0.0)
        async with Cluster(
            spec, training=Training(10**6, 10.0), pool=pool, others=lambda _: Training(20, 1.0)
        ) as cluster:
            await cluster.until(lambda: len(cluster.trainings) == 3, 60)
            await asyncio.sleep(3600)
            facts = [record.event for record in await cluster.records()]
            assert not [fact for fact in facts if isinstance(fact, (incidents.IncidentOpened, nodes.NodeLost))]
            pool.hosts.update({"host-3": "", "host-4": ""})
            pool.place()
            assert (await cluster.outcome(120)).state == "succeeded"
            state = await check(cluster)
            assert state.incidents.number == 0

    told(story)


@pytest.mark.nightly
@pytest.mark.parametrize("node", [False, True], ids=["workers", "nodes"])
def test_the_master_dies_at_every_event(node: bool) -> None:
    """Somebody of every set dies, and the master before and after every event of that: the job ends the same."""
    kind = "kill_node" if node else "kill_worker"
    faults = [
        Fault("step 3", kind, "rollout-1"),
        Fault("step 4", "fail_worker", "evaluator-0"),
        Fault("step 6", kind, "trainer-1"),
        Fault("step 7", "kill_worker", "ps-0"),
    ]
    Chaos(seed=1).crash_at_every_index(OF_FOUR_GROUPS, faults)


def test_two_jobs_and_room_for_one() -> None:
    """Two jobs want twelve of eight hosts, after an hour without any: waiting costs nothing, and each starts soon after room."""
    found = hours_in_a_queue(1, 8, steps=60)
    assert (found["incidents"], found["charged"], found["lost"]) == (0, 0, 0)
    assert found["second_starts_s"] <= found["gang_s"]
    assert found["first_starts_s"] <= 1.3 * found["gang_s"]
    assert found["worlds"] == 2
