from __future__ import annotations

from tests.unit.life import Life, three_deaths

from dlrover_core.history.explain import AFTER_MAX, BEFORE_MAX, Explanation, explanation_of
from dlrover_core.history.plain import name_of
from dlrover_core.job import incidents, job, nodes, world
from dlrover_core.kernel.events import Record
from dlrover_core.spec import GroupSpec, JobSpec

TWO_NODES = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
NO_RESTARTS = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),), max_restarts=0)


def before(told: Explanation | None) -> list[str]:
    """The names of what led to the target, and of the target."""
    assert told is not None
    return [name_of(fact.record.event) for fact in told.before]


def after(told: Explanation | None) -> list[str]:
    """The names of what followed."""
    assert told is not None
    return [name_of(fact.record.event) for fact in told.after]


def find(records: list[Record], event: type, which: int = 0) -> int:
    """The seq of an event of a class."""
    return [record.seq for record in records if isinstance(record.event, event)][which]


def test_action_down_to_first_evidence() -> None:
    """An action is explained by the diagnosis, the incident, and the death that it all began with."""
    records = three_deaths(TWO_NODES).records
    told = explanation_of(records, find(records, incidents.ActionChosen))
    assert before(told) == ["WorkerExited", "IncidentOpened", "Diagnosed", "ActionChosen"]
    assert after(told) == ["WorldFormed", "WorkersStarted", "WorkersStarted", "FirstStep", "IncidentClosed"]


def test_default_is_the_last_action() -> None:
    """Without a number, a job that did not fail is explained by the last action that was chosen, and says how it ended."""
    records = three_deaths(TWO_NODES).records
    told = explanation_of(records)
    assert told is not None
    assert told.target.seq == find(records, incidents.ActionChosen, -1)
    assert told.end is not None
    assert isinstance(told.end.event, job.JobSucceeded)


def test_default_is_the_end_of_a_failed_job() -> None:
    """Without a number, a failed job is explained from its end down to the exit that it failed over."""
    life = Life(NO_RESTARTS).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    life.die(10, "worker-0-0", 0, 1, error="ValueError: bad sample")
    life.do(10.5, *(world.ReportStopped(node, 1) for node in ("worker-0-0", "worker-1-0")))
    told = explanation_of(life.records)
    assert before(told)[:4] == ["WorkerExited", "IncidentOpened", "Diagnosed", "ActionChosen"]
    assert before(told)[-2:] == ["ActionChosen", "JobFailed"]


def test_final_action_released_by_time() -> None:
    """A final action that was held until its time was up is still explained by the evidence, though no record caused it."""
    life = Life(NO_RESTARTS).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    life.die(10, "worker-0-0", 0, 1, error="ValueError: bad sample").tick(500)
    final = find(life.records, incidents.ActionChosen, -1)
    assert life.records[final - 1].cause == 0
    names = ["WorkerExited", "IncidentOpened", "Diagnosed", "ActionChosen", "ActionChosen", "JobFailed"]
    assert before(explanation_of(life.records)) == names


def test_relaunched_node_and_its_world() -> None:
    """A world formed by a relaunched node leads back to the death of its predecessor, over what nobody caused in the log."""
    records = three_deaths(TWO_NODES).records
    told = explanation_of(records, find(records, world.WorldFormed, -1))
    names = before(told)
    assert {"NodeFailed", "IncidentOpened", "Diagnosed", "ActionChosen", "NodePlanned", "NodeJoined"} <= set(names)
    assert names[-1] == "WorldFormed"


def test_revised_diagnosis() -> None:
    """A diagnosis that revises another one is told with it, and with the evidence that changed it."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    life.die(10, "worker-0-0", 0, 1, error="RuntimeError: Connection closed by peer")
    life.do(10.1, incidents.ReportExit("worker-1-0", 1, 2, -9))
    told = explanation_of(life.records, find(life.records, incidents.Diagnosed, -1))
    assert before(told) == ["WorkerExited", "IncidentOpened", "Diagnosed", "WorkerExited", "Diagnosed"]
    assert told is not None
    revised = find(life.records, incidents.Diagnosed)
    assert revised in told.before[-1].follows


def test_another_death_is_another_story() -> None:
    """What followed ends where the next death begins."""
    records = three_deaths(TWO_NODES).records
    told = explanation_of(records, find(records, incidents.ActionChosen))
    assert "NodeFailed" not in after(told)


def test_unknown_event() -> None:
    """There is no explanation of what is not in the log."""
    assert explanation_of([]) is None
    assert explanation_of(three_deaths(TWO_NODES).records, 10_000) is None


def test_the_run_that_holds_the_event() -> None:
    """In a log of two runs, offsets and ending are those of the run in which the event happened."""
    records = three_deaths(TWO_NODES).do(200, job.CreateJob("run2", TWO_NODES.to_json())).records
    first = explanation_of(records, find(records, incidents.ActionChosen))
    last = explanation_of(records)
    assert first is not None
    assert last is not None
    assert (first.began, last.began) == (Life.EPOCH_US, Life.EPOCH_US + 200_000_000)
    assert first.end is not None
    assert last.end is None


def test_links_lead_backwards_and_are_bounded() -> None:
    """Whatever is explained: links lead to earlier records only, and an explanation has an end."""
    spec = JobSpec("big", (GroupSpec(nodes_min=500, nodes_max=500),))
    records = [*Life(spec).join(1, *(f"worker-{index}-0" for index in range(500))).records]
    told = explanation_of(records, find(records, job.JobCreated))
    assert told is not None
    assert len(told.after) == AFTER_MAX
    assert told.left_out > 500
    for record in three_deaths(TWO_NODES).records:
        one = explanation_of(three_deaths(TWO_NODES).records, record.seq)
        assert one is not None
        assert len(one.before) <= BEFORE_MAX
        assert all(seq < fact.record.seq for fact in (*one.before, *one.after) for seq in fact.follows)


def test_a_node_that_left() -> None:
    """An agent's leaving is explained by the order to leave."""
    life = three_deaths(TWO_NODES)
    life.do(141, nodes.ReportLeft("worker-0-0"))
    assert before(explanation_of(life.records, life.records[-1].seq))[-1] == "NodeLeft"
