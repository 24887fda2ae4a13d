"""Node checks on the real master and the real agents: worlds form under them, whatever else happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_core.job import checks, nodes, ranges, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.simulation import simulate
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.crashes import walk
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.story import Story
from dlrover_core.testing.training import Training

CHECKED = Scenario(
    nodes=4,
    spares=2,
    steps=40,
    step_s=0.25,
    boot_s=0.5,
    notice_s=1.0,
    settings=(("precheck", "full"), ("check_s", 20.0)),
)


class OnlyChecked:
    """No world holds a node that has not passed a check before."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    def __call__(self, state: JobState, record: Record) -> None:
        """Look at one record."""
        fact = record.event
        if isinstance(fact, checks.CheckJudged):
            self._passed |= {one.node for one in ranges.from_ranges(fact.group, fact.passed)}
        if isinstance(fact, world.WorldFormed):
            members = {one.node for one in ranges.from_ranges(fact.group, fact.members)}
            assert members <= self._passed, f"{record.seq}: {sorted(members - self._passed)} train unchecked"


@pytest.mark.parametrize("moment", ["CheckStarted", "CheckReported", "CheckJudged"])
def test_the_master_dies_in_the_middle_of_a_check(moment: str) -> None:
    """Its successor goes on with the same check; nobody is called faulty, and training begins."""
    with Story(CHECKED, watch=[OnlyChecked]) as story:
        story.at(moment).crash_master()
        story.eventually("all running", within_s=30)
        story.never("NodeFailed")
    assert story.run.outcome == "succeeded"
    assert len([one for one in story.run.records if isinstance(one.event, checks.CheckStarted)]) == 1


def test_a_node_dies_in_the_middle_of_a_check() -> None:
    """It is replaced, its successor checked with the others' help, and all train."""
    with Story(CHECKED, watch=[OnlyChecked]) as story:
        story.at("CheckStarted").kill_node(1)
        story.eventually("all running", within_s=60)
        story.at("step 10").kill_worker(2)
        story.eventually("all running", within_s=10)
    assert story.run.outcome == "succeeded"
    started = [one.event for one in story.run.records if isinstance(one.event, checks.CheckStarted)]
    assert [(one.round, one.nodes, one.aside) for one in started] == [
        (1, (("worker", 0, 4, 0, 1),), False),
        (1, (("worker", 1, 1, 1, 1),), False),
    ]


def test_a_node_that_dies_while_training_is_checked_before_it_is_back() -> None:
    """Its successor, and nobody else, is checked anew."""
    with Story(CHECKED, watch=[OnlyChecked]) as story:
        story.at("step 10").kill_node(2)
        story.eventually("all running", within_s=60)
    begun = [one.event for one in story.run.records if isinstance(one.event, checks.CheckStarted)]
    assert [one.nodes for one in begun] == [(("worker", 0, 4, 0, 1),), (("worker", 2, 1, 1, 1),)]


def test_a_sick_host_never_trains() -> None:
    """Its node fails its check and is started on another host; the partner it dragged down is not blamed."""

    async def told() -> tuple[list[Record], JobState]:
        group = GroupSpec(nodes_min=4, nodes_max=4, nproc=1)
        spec = JobSpec("j", (group,), precheck="full", check_s=20.0)
        hosts = [f"host-{number}" for number in range(6)]
        async with Cluster(spec, training=Training(steps=20), hosts=hosts) as cluster:
            cluster.sick.add("host-1")
            outcome = await cluster.outcome()
            assert outcome.state == "succeeded"
            check_steps(cluster)
            return await cluster.records(), await check(cluster)

    records, state = virtual_loop.run(told())
    failed = [one.event for one in records if isinstance(one.event, nodes.NodeFailed)]
    assert [(one.node, one.reason) for one in failed] == [("worker-1-0", "check_failed: host-1 is sick")]
    joined = {one.event.node: one.event.host for one in records if isinstance(one.event, nodes.NodeJoined)}
    assert joined["worker-1-1"] != "host-1"
    assert [one.event.generation for one in records if isinstance(one.event, world.WorldFormed)] == [1]
    assert state.job.state == "succeeded"


def test_an_agent_that_cannot_answer_holds_nobody_up() -> None:
    """One whose process is stopped fails its check after check_s; the others train with its successor."""

    async def told() -> list[Record]:
        group = GroupSpec(nodes_min=2, nodes_max=3, nproc=1)
        spec = JobSpec("j", (group,), precheck="full", check_s=5.0, unreachable_s=60.0, last_call_s=1.0)
        async with Cluster(spec, training=Training(steps=20)) as cluster:
            await cluster.until(lambda: bool(cluster.state.checks.running))
            cluster.freeze("worker-2-0")
            await cluster.until(lambda: cluster.training.done >= 1)
            cluster.thaw("worker-2-0")
            await asyncio.wait_for(cluster.outcome(), 600)
            return await cluster.records()

    records = virtual_loop.run(told())
    failed = [one.event for one in records if isinstance(one.event, nodes.NodeFailed)]
    assert [(one.node, one.reason) for one in failed] == [("worker-2-0", "check_failed: no answer within 5 s")]


# ---- the simulated engine


def test_a_sick_host_never_trains_whatever_dies_meanwhile() -> None:
    """A host is sick before the job begins: its node is named, is never in a world, and the successor of no master doubts it."""
    plan = Plan(
        ENGINE, CHECKED, (Fault("CheckStarted", "sick_host", "host-1", 600.0), Fault("CheckReported", "crash_master"))
    )
    run = simulate(plan, watch=[OnlyChecked()])
    assert run.outcome == "succeeded"
    failed = [one.event for one in run.records if isinstance(one.event, nodes.NodeFailed)]
    assert [one.node for one in failed] == ["worker-1-0"]
    assert failed[0].reason.startswith("check_failed: ")


def test_a_master_may_die_at_any_place_of_a_check() -> None:
    """Every index of the history of a job with a faulty node and a second round: same verdicts, same end."""
    scenario = Scenario(
        nodes=3, spares=1, steps=4, step_s=0.1, boot_s=0.5, settings=(("precheck", "full"), ("check_s", 20.0))
    )
    run = simulate(Plan(ENGINE, scenario, (Fault("CheckStarted", "sick_host", "host-2", 600.0),)), inputs=True)
    assert any(isinstance(one.event, checks.CheckJudged) and one.event.found for one in run.records)
    done = walk(run.inputs, run.records, rivals=2)
    assert done.successors > 40
