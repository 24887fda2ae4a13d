"""A log that takes nothing more: people are told, and a job whose work is done ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from drive import Drive

from dlrover_adapters.cli import master
from dlrover_adapters.cli.settings import EX_UNRECORDED, EX_UNRESTARTED, EX_UNSTORED
from dlrover_core.job.checkpoints import GroupCheckpoints
from dlrover_core.job.incidents import ActionChosen, Incident, IncidentOpened, ReportExit
from dlrover_core.job.nodes import Observed, ObserveNodes
from dlrover_core.job.world import ReportFinished, World, WorldFormed
from dlrover_core.runtime.unrecorded import failure, has_ended_well, owed
from dlrover_core.spec import GroupSpec


def test_all_members_have_ended_well_recorded_or_not() -> None:
    """What is recorded and what waits for the log count alike; of another generation, or of a dissolved world, nothing does."""
    drive = Drive(nodes_min=2, nodes_max=2, nproc=1)
    state = drive.state
    assert not has_ended_well(state, ())
    drive.up()
    drive.do(ReportFinished("worker-0-0", 1))
    assert not has_ended_well(state, ())
    assert not has_ended_well(state, [ReportFinished("worker-1-0", 2)])
    last = ReportFinished("worker-1-0", 1)
    assert has_ended_well(state, [last])
    drive.world.active = False
    assert not has_ended_well(state, [last])
    drive.world.active = True
    drive.do(last)
    assert has_ended_well(state, ())


def test_the_sets_count_that_the_jobs_end_waits_for() -> None:
    """Chief and worker are one set; evaluators' end is nobody's."""
    chief, worker = GroupSpec("chief", set="train"), GroupSpec("worker", set="train")
    drive = Drive(groups=(chief, worker, GroupSpec("evaluator", ends=False)))
    for node in ("chief-0-0", "worker-0-0", "evaluator-0-0"):
        drive.join(node)
    told = [ReportFinished("chief-0-0", 1), ReportFinished("worker-0-0", 1, 20, "step 20 is not on storage", 20)]
    assert not has_ended_well(drive.state, told[:1])
    assert has_ended_well(drive.state, told)
    assert owed(drive.state, told) == "worker-0-0: step 20 is not on storage"
    assert owed(drive.state, [ReportFinished("evaluator-0-0", 1, 20, "lost", -1)]) == ""


def test_a_last_state_that_no_log_can_commit_is_owed() -> None:
    """As with a log that can be written: by what nodes said, recorded or not, unless the step is committed."""
    drive = Drive(nodes_min=2, nodes_max=2, nproc=1).up()
    state, unstored = drive.state, drive.world.unstored
    finished = [
        ReportFinished("worker-0-0", 1),
        ReportFinished("worker-1-0", 1, 20, "step 20 is not on storage", 20),
    ]
    assert owed(state, finished[:1]) == ""
    assert owed(state, finished) == "worker-1-0: step 20 is not on storage"
    unstored["worker-0-0"] = -1, "lost"
    assert owed(state, ()) == "worker-0-0: lost"
    unstored["worker-0-0"] = 20, "others"
    state.checkpoints.groups["worker"] = GroupCheckpoints(committed=[(1, 20)])
    assert owed(state, finished) == ""
    state.job.state = "succeeded"
    assert owed(state, [ReportFinished("worker-1-0", 1, 20, "lost", -1)]) == ""


@pytest.mark.parametrize(("owes", "ends"), [("", EX_UNRECORDED), ("b: step 20 is not on storage", EX_UNSTORED)])
def test_a_job_whose_work_is_done_does_not_wait_for_its_log_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owes: str, ends: int
) -> None:
    """Trouble is told as it begins and as it ends; it ends the job only if all has ended well, and lasts."""
    monkeypatch.setattr(master, "LOOK_S", 0.0)
    monkeypatch.setattr(master, "UNRECORDED_S", 0.0)
    waits = ("LogFull: no room", False, "", "")
    looks = iter([("", False, "", ""), waits, waits, ("", False, "", ""), ("", True, owes, "")])
    settings: Any = SimpleNamespace(job=SimpleNamespace(job="j"), shared=False)
    leading: Any = SimpleNamespace(stuck=lambda: next(looks, ("LogFull: no room", True, owes, "")))
    code = asyncio.run(asyncio.wait_for(master._watch_log(settings, leading), 10))
    assert code == ends
    said = capsys.readouterr().err.splitlines()
    assert [words.partition(":")[0] for words in said] == [
        "[j] decisions wait for the log",
        "[j] the log is back",
        "[j] decisions wait for the log",
        "[j] all workers ended well, which the log cannot take",
    ]
    assert "free room" in said[0]
    assert said[-1].endswith(owes)


def test_what_failed_and_cannot_be_restarted() -> None:
    """A death that waits, an action that was ordered of nobody, a world that cannot form; not what a new world has behind it."""
    state: Any = SimpleNamespace(
        world=SimpleNamespace(worlds={"worker": World(generation=3, active=True)}),
        nodes=SimpleNamespace(nodes={"a": SimpleNamespace(state="running"), "b": SimpleNamespace(state="failed")}),
        incidents=SimpleNamespace(by_number={}),
    )
    assert failure(state, (), ()) == ""
    assert failure(state, [ReportExit("a", 2, 0, -9), ReportFinished("a", 3)], ()) == ""
    assert failure(state, [ReportExit("a", 3, 0, -9)], ()) == "rank 0 on a failed"
    gone = ObserveNodes((Observed("b", "failed"), Observed("c", "failed")))
    assert failure(state, [gone], ()) == ""
    assert failure(state, [ObserveNodes((*gone.nodes, Observed("a", "failed")))], ()) == "node a failed"
    for event in (IncidentOpened(1, "a", 3, (0,)), ActionChosen(1, "restart", "a", "rule", 2)):
        unwritten: Any = SimpleNamespace(event=event)
        assert failure(state, (), [unwritten]) == "a failed"
    unwritten = SimpleNamespace(event=WorldFormed("worker", 3, (), "tcp", "failure"))
    assert failure(state, (), [unwritten]) == "generation 2 failed"
    cause: Any = SimpleNamespace()
    incident = state.incidents.by_number[1] = Incident(1, "a", 2, 0, cause, [])
    assert failure(state, (), ()) == "a failed"
    incident.over_at = 5
    assert failure(state, (), ()) == ""


def test_a_failure_that_the_log_cannot_take_ends_the_job_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """People hear how long it is waited; a log that is back in time ends the wait."""
    monkeypatch.setattr(master, "LOOK_S", 0.0)
    failed = ("LogFull: no room", False, "", "rank 0 on a failed")
    looks = iter([failed, ("", False, "", "")])
    settings: Any = SimpleNamespace(job=SimpleNamespace(job="j", unreachable_s=0.02), shared=False)
    leading: Any = SimpleNamespace(stuck=lambda: next(looks, failed))
    assert asyncio.run(asyncio.wait_for(master._watch_log(settings, leading), 10)) == EX_UNRESTARTED
    said = capsys.readouterr().err
    assert said.count("rank 0 on a failed, and cannot be restarted: the job ends in 0.02 s unless") == 2
    assert said.endswith("[j] rank 0 on a failed, which the log cannot take: LogFull: no room\n")
