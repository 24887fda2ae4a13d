"""`Chaos` and `hunt` without pytest, on the real simulation: what is drawn, what is asked, and what is found and shrunk."""

from __future__ import annotations

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.job.nodes import NodeJoined
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.sim.faults import Fault
from dlrover_core.testing import Broken, Chaos, Scenario, invariants
from dlrover_core.testing.chaos import hunt, replay
from dlrover_core.testing.promises import Promise
from dlrover_core.testing.regressions import read_token

SMALL = Scenario(nodes=3, steps=30)


class NoSecondLife(Promise):
    """A promise that any relaunch breaks."""

    name = "nobody comes twice"

    def _joined(self, _state: JobState, fact: NodeJoined, record: Record) -> None:
        assert not fact.node.endswith("-1"), f"{record.seq}: {fact.node}"

    looks = {NodeJoined: _joined}  # noqa: RUF012  # as the class does it


def test_one_run() -> None:
    """A seed draws faults, the run keeps its promises, and the same seed is the same run."""
    chaos = Chaos(seed=3)
    run = chaos.simulate(SMALL)
    run.check(invariants.DEFAULT)
    assert run.plan.faults
    assert chaos.plan == run.plan
    assert sum(chaos.hits.values()) == len(run.struck)
    assert Chaos(seed=3).simulate(SMALL).log_hash == run.log_hash
    assert Chaos(seed=4).simulate(SMALL).plan != run.plan


def test_given_faults() -> None:
    """Faults that are given are those that strike; none are none; such as the level does not have are refused."""
    fault = Fault("step 5", "kill_node", "worker-1")
    assert Chaos().simulate(SMALL, [fault]).struck[0][0] == fault
    assert Chaos().simulate(SMALL, []).struck == []
    with pytest.raises(PlanError, match="disk_full"):
        Chaos().simulate(SMALL, [Fault("step 5", "disk_full")])


def test_watch() -> None:
    """Promises are asked after every event, and each run gets its own of a class."""
    chaos = Chaos(twice=True)
    chaos.simulate(SMALL, [], watch=(invariants.DEFAULT, NoSecondLife))
    with pytest.raises(Broken, match="nobody comes twice"):
        chaos.simulate(SMALL, [Fault("step 5", "kill_node")], watch=(NoSecondLife,))


def test_hunt() -> None:
    """A broken promise is found among the seeds, shrunk to its cause, and what is printed replays it."""
    chaos = Chaos(kinds=["kill_worker", "kill_node", "drop", "clock_jump"])

    def body() -> None:
        chaos.simulate(SMALL, watch=(NoSecondLife,))

    tried, found = hunt(chaos, body, range(100))
    assert found is not None
    assert found.nth == tried
    assert found.plan is not None
    assert [fault.kind for fault in found.plan.faults] == ["kill_node"]
    assert found.replays <= 50
    lines = found.lines()
    assert any("nobody comes twice" in line for line in lines)
    assert any(line.startswith("  at record ") and "NodeJoined" in line for line in lines)
    again = replay(chaos, body, *read_token(found.token))
    assert again is not None
    assert again.lines()[1:] == lines[1:]


def test_hunt_finds_nothing() -> None:
    """Where every promise is kept, all seeds are tried, or as many as there is time for."""
    chaos = Chaos(kinds=["kill_worker"])
    assert hunt(chaos, lambda: chaos.simulate(SMALL), range(5)) == (5, None)
    assert hunt(chaos, lambda: chaos.simulate(SMALL), range(5), enough=lambda: True) == (1, None)


def test_plans_of_seeds() -> None:
    """`seeds` tells the plans that as many seeds draw."""
    plans = list(Chaos(seed=5, kinds=["drop"]).seeds(3, SMALL))
    assert [plan.seed for plan in plans] == [5, 6, 7]
    assert plans[1] == Chaos(seed=6, kinds=["drop"]).simulate(SMALL).plan


def test_recording() -> None:
    """`records` holds what the last run recorded, also when it broke a promise."""
    chaos = Chaos()
    chaos.records = []
    with pytest.raises(Broken) as raised:
        chaos.simulate(SMALL, [Fault("step 5", "kill_node")], watch=(NoSecondLife,))
    assert isinstance(raised.value, Broken)
    assert chaos.records[-1].seq == raised.value.seq


def test_other_levels() -> None:
    """The same vocabulary plays real masters and agents, tells stories, and kills a master at every place of a history."""
    chaos = Chaos(seed=2)
    run = chaos.simulate(SMALL, [Fault("step 5", "kill_worker")], level="loop", watch=(invariants.DEFAULT,))
    assert (run.plan.level, run.outcome, len(run.struck)) == ("loop", "succeeded", 1)
    with chaos.story(nodes=2, steps=30) as story:
        story.at("step 10").kill_worker(1)
        story.eventually("all running", within_s=60)
    assert story.plan.seed == 2
    done = chaos.crash_at_every_index(Scenario(nodes=1, steps=3, step_s=0.1, boot_s=0.5))
    assert done.runs
    with pytest.raises(PlanError, match="no script"):
        chaos.local(script="no_such_script.py")
