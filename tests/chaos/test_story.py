"""Stories: told in order, played at the end, judged statement by statement."""

from __future__ import annotations

import contextlib
import typing

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.sim.faults import ENGINE, KINDS, LOOP, Fault, kinds
from dlrover_core.sim.run import Broken
from dlrover_core.sim.scenario import Scenario, plan_of
from dlrover_core.testing import invariants
from dlrover_core.testing.story import Moment, Story

FOUR = Scenario(nodes=4)
SMALL = Scenario(nodes=3, steps=40, step_s=0.25, boot_s=0.5, notice_s=1.0)


def test_the_story() -> None:
    """A worker dies, a node dies, and as its successor is planned the master dies too: all run again within two minutes."""
    with Story(FOUR) as story:
        story.at("step 100").kill_worker(2)
        story.at("all running").kill_node("worker-1")
        story.at("node worker-1 relaunched").crash_master()
        story.eventually("all running", within_s=120)
        story.eventually("job over", within_s=300)
        story.never("NodeLost")
        story.check(invariants.DEFAULT)
    assert story.run.outcome == "succeeded"
    assert [fault.kind for fault, _ in story.run.struck] == ["kill_worker", "kill_node", "crash_master"]
    assert story.plan == plan_of(story.plan.token())


def test_nothing_happens_before_the_end_of_the_block() -> None:
    """Statements are written down; a telling that breaks off plays nothing; one that was played is not played again."""
    story = Story(SMALL)
    with contextlib.suppress(KeyError), story:
        story.at("step 5").kill_worker()
        raise KeyError
    assert not hasattr(story, "run")
    with Story(SMALL) as played:
        run = played.at("step 5").kill_worker()._story.play()
        assert run.outcome == "succeeded"
    assert played.run is run


@pytest.mark.parametrize("level", [LOOP, ENGINE])
def test_chained_faults_strike_at_one_moment(level: str) -> None:
    """What is chained to a fault strikes right after it, at both simulated levels."""
    with Story(SMALL, level=level) as story:
        story.at("step 5").kill_worker(0).kill_worker(1).crash_master()
        story.eventually("incident opened", within_s=5)
        story.eventually("all running", within_s=60)
    assert len({seq for _, seq in story.run.struck}) == 1
    assert len(story.run.struck) == 3


def failure(story: Story) -> str:
    """What it says when it is played."""
    with pytest.raises(Broken) as found:
        story.play()
    assert story.plan.token() in str(found.value)
    assert isinstance(found.value, AssertionError)
    return str(found.value)


def test_a_failure_tells_the_story_so_far() -> None:
    """Which statement failed and why, what came before it and when, the last records, and the token that replays it."""
    story = Story(FOUR)
    story.at("step 100").kill_node(2)
    story.eventually("incident opened", within_s=1)
    story.eventually("all running", within_s=1)
    story.at("step 150").kill_worker(0)
    text = failure(story)
    assert "s  step 100: kill_node 2\n" in text
    assert "s  eventually incident opened, within 1 s\n" in text
    assert "fails here:   eventually all running, within 1 s\n" in text
    assert "kill_worker" not in text
    assert "IncidentOpened(incident=1" in text


def test_a_moment_that_never_comes_fails_the_story() -> None:
    """A story whose fault never struck has not been told."""
    story = Story(SMALL)
    story.at("step 41").kill_worker()
    assert "step 41: kill_worker 0: its moment never came" in failure(story)


def test_never() -> None:
    """What must never come is told with its moment and its record; states count as events do."""
    story = Story(SMALL)
    story.never("NodeFailed")
    story.at("step 5").kill_node(1)
    assert "never NodeFailed: it came at " in failure(story)
    story = Story(SMALL)
    story.never("all running")
    assert "never all running: it came at " in failure(story)


def test_eventually_counts_from_the_statement_before() -> None:
    """Steps and events have their time; what came too late is told with how late."""
    story = Story(SMALL)
    story.at("step 5").relist()
    story.eventually("step 10", within_s=1.3)
    story.eventually("step 14", within_s=1.1)
    story.play()
    story = Story(SMALL)
    story.at("step 5").relist()
    story.eventually("step 10", within_s=1.2)
    assert "step 10, within 1.2 s: it came after 1.250 s" in failure(story)


def test_a_state_that_held_before_is_no_news_after_a_death() -> None:
    """Right after a worker's death the log still says that all run: that is not what was meant."""
    story = Story(SMALL)
    story.at("step 5").kill_worker(0)
    story.eventually("all running", within_s=0.01)
    assert "it did not come" in failure(story)
    story = Story(SMALL)
    story.at("step 5").relist()
    story.eventually("all running", within_s=0.01)
    story.play()


def test_promises_of_ones_own_are_asked_at_every_event() -> None:
    """A broken promise fails the story at its record, and the story is told."""

    def calm(state: JobState, record: Record) -> None:
        assert not state.incidents.number, "something went wrong"

    story = Story(SMALL, watch=[calm])
    story.at("step 5").kill_worker(0)
    text = failure(story)
    assert "something went wrong" in text
    assert "step 5: kill_worker 0" in text
    checked = Story(SMALL).check(calm)
    checked.at("step 5").kill_worker(0)
    assert "something went wrong" in failure(checked)


def test_mistakes_are_told_where_they_are_made() -> None:
    """A wrong moment, a wrong kind, a kind of another level, a thing that comes by itself: refused as it is said."""
    story = Story(SMALL)
    with pytest.raises(PlanError, match="is no moment"):
        story.at("after lunch")
    with pytest.raises(AttributeError, match="did you mean kill_worker"):
        story.at("step 1").kil_worker()  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="exists at the levels local"):
        story.at("step 1").disk_full()
    with pytest.raises(PlanError, match="comes by itself"):
        story.eventually("12 s", within_s=1)
    with pytest.raises(PlanError, match="is a moment"):
        story.never("step 3")
    with pytest.raises(PlanError, match="not at 'local'"):
        Story(SMALL, level="local")
    with pytest.raises(PlanError, match="backend"):
        Story(SMALL, level=ENGINE, backend=object)


def test_every_kind_is_a_method_that_type_checkers_see() -> None:
    """The names written out for type checkers are the vocabulary, in its order; each tells what it does."""
    assert list(typing.get_type_hints(Moment)) == list(KINDS)
    story = Story(SMALL)
    for kind in kinds(LOOP):
        strike = getattr(story.at("step 1"), kind)
        assert strike.__doc__ == KINDS[kind].doc
        strike(1, 2.0, "why")
    assert story.plan.faults == tuple(Fault("step 1", kind, 1, 2.0, "why") for kind in kinds(LOOP))


def test_level_engine() -> None:
    """The same story at level "engine", which has no agents and no frames: only steps have no moments there."""
    with Story(FOUR, level=ENGINE) as story:
        story.at("step 100").kill_node("worker-2")
        story.at("node worker-2 relaunched").crash_master()
        story.eventually("all running", within_s=120)
        story.never("NodeLost")
    assert story.run.outcome == "succeeded"
    with pytest.raises(PlanError, match="nobody notes"):
        Story(SMALL, level=ENGINE).eventually("step 3", within_s=1).play()
