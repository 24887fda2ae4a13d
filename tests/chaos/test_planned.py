"""Planned changes of the world, with the real master and the real agents: growth, drain and shrinking lose no step.

Whatever dies in the middle of one: nobody waits for ever, and what was made at the boundary is not made again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest
from tests.chaos.planned_changes import Told, happened, knobs, recorded, step, tell

from dlrover_core.errors import CoreError
from dlrover_core.history import report_of
from dlrover_core.job import checkpoints, incidents, nodes, plans, progress, world
from dlrover_core.runtime.agent import LAST_WORD_S
from dlrover_core.testing.cluster import Cluster


def first(told: Told, kind: type) -> int:
    """Where in the log the first event of a kind is."""
    return next(record.seq for record in told.records if isinstance(record.event, kind))


def trained(told: Told, generation: int = 2) -> int:
    """Where in the log a generation made its first step."""
    steps = (one for one in told.records if isinstance(one.event, progress.FirstStep))
    return next(one.seq for one in steps if one.event.generation == generation)


async def drains(cluster: Cluster, node: str = "worker-1", after: int = 15) -> None:
    """After some steps somebody wants a node's host free."""
    await step(cluster, after)
    await cluster.leader.obey({"command": "drain", "node": node})


async def grows(cluster: Cluster, size: int = 4, after: int = 15) -> None:
    """After some steps somebody wants more nodes."""
    await step(cluster, after)
    await cluster.leader.obey({"command": "scale", "nodes_max": size})


# ---- no step is lost


@pytest.mark.parametrize("spread", [0, 1])
def test_growing_loses_no_step(spread: int) -> None:
    """2 -> 4 in the midst of steps that nobody had saved: the four go on with the next one."""
    told = tell(grows, knobs(spread=spread))
    assert (told.lost, told.sizes, told.dropped) == (0, [2, 4], [])
    formed = told.facts(world.WorldFormed)[-1]
    assert (formed.resume_tier, formed.resume_step > 15) == (checkpoints.MEMORY, True)


@pytest.mark.parametrize("spread", [0, 1])
def test_draining_loses_no_step(spread: int) -> None:
    """The successor is there before anybody is stopped, elsewhere; the one that leaves goes when the others train."""
    told = tell(drains, knobs(spread=spread))
    assert (told.lost, told.sizes, told.dropped) == (0, [2, 2], [])
    joined = next(r.seq for r in told.records if isinstance(r.event, nodes.NodeJoined) and r.event.node == "worker-1-1")
    stopped = next(r.seq for r in told.records if isinstance(r.event, world.WorldDissolved))
    released = next(r.seq for r in told.records if isinstance(r.event, nodes.NodeReleased))
    trained = next(r.seq for r in told.records if r.seq > stopped and type(r.event).__name__ == "FirstStep")
    assert joined < stopped < trained < released
    assert told.facts(incidents.IncidentOpened) == []
    assert all(one.expected for one in told.facts(nodes.NodeGone))


def test_what_a_planned_change_costs_is_the_start_of_workers() -> None:
    """From the boundary to the next step nobody boots, and no timer runs out: it is the time that new workers take to start."""
    told = tell(drains)
    stopped = next(r.at for r in told.records if isinstance(r.event, world.WorldDissolved))
    trained = next(r.at for r in told.records if r.at >= stopped and type(r.event).__name__ == "FirstStep")
    assert trained - stopped < 1_500_000


def test_shrinking_loses_no_step() -> None:
    """4 -> 2, sharded over all: those who stay have what the others held from them."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        await cluster.leader.obey({"command": "scale", "nodes_max": 2, "nodes_min": 2})

    told = tell(story, knobs(spread=0), fewest=2, most=4)
    assert (told.lost, told.sizes) == (0, [4, 2])


def test_a_notice_of_the_platform_loses_no_step() -> None:
    """A node is to be taken away in a minute: it has left by then, without any incident."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        cluster.platform.give_notice(cluster.platform.of("worker-1-0"), 60.0)

    told = tell(story, steps=900)
    assert (told.lost, told.sizes) == (0, [2, 2])
    assert [one.node for one in told.facts(plans.NodeDrained)] == ["worker-1-0"]
    assert told.facts(incidents.IncidentOpened) == []


def test_an_agent_that_is_told_to_go_loses_no_step() -> None:
    """SIGTERM to an agent: it asks to leave, its successor comes in time, and it goes after the boundary."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        cluster.agents["worker-1-0"].part("SIGTERM")

    told = tell(story, stop_grace_s=20.0)
    assert (told.lost, told.sizes) == (0, [2, 2])
    assert told.facts(incidents.IncidentOpened) == []


def test_an_agent_that_is_told_to_go_stays_until_its_platform_takes_it() -> None:
    """The platform has said when, long after a grace, and has no other host: ranks train on meanwhile."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        cluster.platform.give_notice(cluster.platform.of("worker-1-0"), 200.0)
        await happened(cluster, plans.NodeDrained)
        cluster.agents["worker-1-0"].part("SIGTERM")

    told = tell(story, hosts=("host-0", "host-1"))
    assert (told.lost, told.sizes) == (0, [2])
    assert [one.reason for one in told.facts(nodes.NodeReleased)] == []


def test_an_agent_that_is_told_to_go_stays_until_the_next_world_trains() -> None:
    """Workers need longer to start than an agent waits for its master's word: it has had that, and what it holds is needed."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        cluster.training.times = dataclasses.replace(cluster.training.times, start_s=LAST_WORD_S + 5.0)
        cluster.agents["worker-1-0"].part("SIGTERM")

    told = tell(story, stop_grace_s=60.0)
    assert (told.lost, told.sizes) == (0, [2, 2])
    assert told.facts(incidents.IncidentOpened) == []
    assert trained(told) < first(told, nodes.NodeReleased)


@pytest.mark.parametrize("command", ["drain", "scale"])
def test_a_node_that_others_have_their_state_from_is_not_let_go_sooner_by_a_signal(command: str) -> None:
    """It has left its world at a boundary, and its platform's SIGTERM comes before the next one trains."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        cluster.training.times = dataclasses.replace(cluster.training.times, start_s=LAST_WORD_S + 5.0)
        smaller = {"command": "scale", "nodes_max": 1, "nodes_min": 1}
        await cluster.leader.obey({"command": "drain", "node": "worker-1"} if command == "drain" else smaller)
        await recorded(cluster, lambda records: sum(isinstance(one.event, world.WorldFormed) for one in records) > 1)
        cluster.agents["worker-1-0"].part("SIGTERM")

    told = tell(story, stop_grace_s=60.0)
    assert told.lost == 0
    assert told.facts(incidents.IncidentOpened) == []
    assert trained(told) < first(told, nodes.NodeReleased)


def test_a_node_that_others_have_their_state_from_goes_when_its_platform_wants_it() -> None:
    """The next world makes no step in the grace of a SIGTERM: it goes."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        cluster.training.times = dataclasses.replace(cluster.training.times, start_s=60.0)
        await cluster.leader.obey({"command": "drain", "node": "worker-1"})
        await recorded(cluster, lambda records: sum(isinstance(one.event, world.WorldFormed) for one in records) > 1)
        cluster.agents["worker-1-0"].part("SIGTERM")

    told = tell(story, stop_grace_s=20.0)
    assert told.facts(incidents.IncidentOpened) == []
    asked = next(r.at for r in told.records if isinstance(r.event, plans.NodeDrained) and not r.event.host)
    released = next(r.at for r in told.records if isinstance(r.event, nodes.NodeReleased))
    assert released - asked == pytest.approx(20_000_000, abs=1000)


def test_a_single_node_moves() -> None:
    """Migration of a whole job: the only node is drained, and its successor goes on with the next step."""
    told = tell(lambda cluster: drains(cluster, "worker-0"), fewest=1, most=1)
    assert (told.lost, told.sizes) == (0, [1, 1])


def test_the_story_says_why() -> None:
    """The report of the run names the change, and counts no step as lost."""
    told = tell(drains)
    report = report_of(told.records)
    assert report.incidents == ()
    formed = told.facts(world.WorldFormed)[-1]
    assert formed.reason == "planned change 1: worker-1-1 joins, worker-1-0 leaves"


# ---- it is late


def test_a_script_that_never_arms_trains_on() -> None:
    """Growth of ranks that look for no boundary: the plan is dropped a few times, and no step is lost."""

    async def deaf(cluster: Cluster) -> None:
        await step(cluster, 5)
        assert cluster.training.saving is not None
        cluster.training.saving.knobs = knobs(planned=False)
        await grows(cluster)

    told = tell(deaf, steps=900, plan_s=10.0, boundary_s=5.0)
    assert (told.lost, told.sizes) == (0, [2])
    assert told.dropped == ["the ranks reached no boundary within 10 s"] * 3


def test_a_drain_of_a_deaf_script_is_forced() -> None:
    """Its deadline comes: everybody is stopped with grace, and what had not been saved is made again."""

    async def deaf(cluster: Cluster) -> None:
        await step(cluster, 5)
        assert cluster.training.saving is not None
        cluster.training.saving.knobs = knobs(planned=False)
        await drains(cluster)

    told = tell(deaf, steps=900, plan_s=10.0)
    assert told.sizes == [2, 2]
    assert told.dropped == ["worker-1-0: time to leave is over"]
    assert told.lost <= 10


def test_a_drain_with_no_other_host_leaves_at_a_boundary() -> None:
    """Nowhere to go: shortly before its deadline it leaves at a boundary all the same, and the smaller world loses nothing."""
    told = tell(drains, fewest=1, most=2, hosts=("a", "b"), steps=900, plan_s=20.0)
    assert told.lost == 0
    assert told.sizes[:2] == [2, 1]


def test_a_boundary_is_not_waited_at_for_ever() -> None:
    """What one node says of the boundary never comes: the others go on after `boundary_s`, and the next plan succeeds."""

    async def story(cluster: Cluster) -> None:
        await grows(cluster)
        await happened(cluster, plans.BoundaryAsked)
        cluster.freeze("worker-1-0")
        await happened(cluster, plans.WorldPlanDropped)
        cluster.thaw("worker-1-0")

    told = tell(story, steps=1000, plan_s=10.0, boundary_s=3.0, silence_s=1000.0, hang_s=0.0)
    assert told.lost == 0
    assert told.sizes == [2, 4]
    assert len(told.dropped) >= 1


# ---- something dies


@pytest.mark.parametrize(
    "moment", [plans.WorldPlanned, plans.BoundaryAsked, checkpoints.RanksArmed, checkpoints.StepsHeld]
)
@pytest.mark.parametrize("who", ["worker", "node", "joiner", "leaving"])
def test_somebody_dies_in_the_middle(who: str, moment: type) -> None:
    """A worker, a member's node, the successor, the one that leaves, at each moment of a drain: the world goes on without it."""

    async def story(cluster: Cluster) -> None:
        await drains(cluster)
        await happened(cluster, moment)
        if who == "worker":
            cluster.kill_worker(0)
        else:
            node = {"node": "worker-0-0", "joiner": "worker-1-1", "leaving": "worker-1-0"}[who]
            await cluster.until(lambda: node in cluster.backend.living)
            cluster.kill_node(node)

    told = tell(story, steps=900)
    assert told.lost <= 10
    assert told.sizes[-1] == 2
    # Who was to leave has left.
    last = told.facts(world.WorldFormed)[-1]
    assert ("worker", 1, 1, 0, 1) not in last.members
    assert not any(index == 0 and count == 2 and old == 0 for _, index, count, old, _ in last.members)


@pytest.mark.parametrize("moment", [plans.WorldPlanned, checkpoints.RanksArmed, checkpoints.StepsHeld])
def test_a_newcomer_dies_while_growing(moment: type) -> None:
    """One of two newcomers is killed: the world grows by the other, and by its successor later."""

    async def story(cluster: Cluster) -> None:
        await grows(cluster)
        await happened(cluster, moment)
        cluster.kill_node("worker-3-0")

    told = tell(story, steps=2000)
    assert told.sizes[-1] == 4
    assert told.lost <= 10


def test_suspended_in_the_middle() -> None:
    """A person pauses the job while ranks look for the boundary: it pauses, and grows when it goes on."""

    async def story(cluster: Cluster) -> None:
        await grows(cluster)
        await happened(cluster, plans.BoundaryAsked)
        await cluster.leader.obey({"command": "suspend", "reason": "lunch"})
        await asyncio.sleep(100)
        await cluster.leader.obey({"command": "resume"})

    told = tell(story)
    assert told.sizes[-1] == 4


def test_two_changes_at_once() -> None:
    """A drain in the middle of a growth: both come about, and neither loses a step."""

    async def story(cluster: Cluster) -> None:
        await grows(cluster)
        await happened(cluster, plans.BoundaryAsked)
        await cluster.leader.obey({"command": "drain", "node": "worker-1"})

    told = tell(story, steps=900)
    assert told.lost == 0
    assert told.sizes[-1] == 4
    assert told.facts(world.WorldFormed)[-1].members == (
        ("worker", 0, 1, 0, 1),
        ("worker", 1, 1, 1, 1),
        ("worker", 2, 2, 0, 1),
    )


def test_two_drains_at_once() -> None:
    """Two hosts are wanted free: one boundary serves both."""

    async def story(cluster: Cluster) -> None:
        await drains(cluster, "worker-1")
        await cluster.leader.obey({"command": "drain", "node": "worker-2"})

    told = tell(story, fewest=3, most=3)
    assert (told.lost, told.sizes) == (0, [3, 3])


# ---- the master dies


def places() -> range:
    """Where in the log the events of a drain are."""
    names = [type(record.event).__name__ for record in tell(drains, steps=150).records]
    return range(names.index("NodeDrained"), names.index("NodeReleased") + 2)


@pytest.mark.parametrize(
    "first",
    [1, pytest.param(0, marks=pytest.mark.nightly(reason="every other place stands for all of them in make test"))],
)
def test_the_master_dies_at_every_place_of_a_drain(first: int) -> None:
    """Whenever it dies, the next one goes on with the plan: one world, no step lost, nobody drained twice."""
    for place in places()[first::2]:

        async def story(cluster: Cluster, place: int = place) -> None:
            await drains(cluster)
            await recorded(cluster, lambda records: len(records) > place)
            cluster.kill_master()
            cluster.start_master()

        told = tell(story, steps=150)
        assert (told.lost, told.sizes[-1]) == (0, 2), place
        assert len(told.facts(plans.NodeDrained)) == 1
        assert ("worker", 1, 1, 1, 1) in told.facts(world.WorldFormed)[-1].members, place


@pytest.mark.parametrize("seed", range(30))
def test_anything_at_any_time(seed: int) -> None:
    """Wishes of all kinds, and deaths in the middle, at random: promises hold, and the job ends well."""
    chance = random.Random(seed)

    async def story(cluster: Cluster) -> None:
        await step(cluster, 15)
        for _ in range(chance.randint(2, 5)):
            await asyncio.sleep(chance.choice((0.0, 0.05, 0.5, 3.0, 10.0)))
            kind = chance.choice(("drain", "grow", "shrink", "worker", "node", "master", "notice", "part"))
            await strike(cluster, kind, chance)
        await asyncio.sleep(5.0)

    told = tell(story, knobs(every=chance.choice((1, 10)), spread=chance.choice((0, 1))), fewest=1, most=3, steps=1500,
                plan_s=60.0, boundary_s=10.0, grow_window_s=2.0)  # fmt: skip
    assert told.facts(world.WorldFormed)


async def strike(cluster: Cluster, kind: str, chance: random.Random) -> None:
    """One of them, if it is possible now."""
    living = sorted(one for one in cluster.backend.living if one in cluster.agents)
    if kind == "master":
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(lambda: any(one.leading for one in cluster.masters))
    elif kind in ("grow", "shrink"):
        size = chance.choice((3, 4)) if kind == "grow" else chance.choice((1, 2))
        await asked(cluster, {"command": "scale", "nodes_max": size, "nodes_min": 1})
    elif not living:
        return
    elif kind == "drain":
        await asked(cluster, {"command": "drain", "node": chance.choice(living)})
    elif kind == "node":
        cluster.kill_node(chance.choice(living))
    elif kind == "notice":
        cluster.platform.give_notice(cluster.platform.of(chance.choice(living)), chance.choice((5.0, 60.0)))
    elif kind == "part":
        cluster.agents[chance.choice(living)].part("SIGTERM")
    else:
        ranks = [rank for launcher in cluster.launchers.values() for rank in launcher.ranks]
        if ranks:
            cluster.kill_worker(chance.choice(ranks))


async def asked(cluster: Cluster, command: dict[str, Any]) -> None:
    """A wish, which may be refused."""
    try:
        await cluster.leader.obey(command)
    except (CoreError, LookupError):
        return
