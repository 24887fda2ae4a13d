"""A log that takes nothing more: people are told, and a job whose work is done ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import master
from dlrover_adapters.cli.settings import EX_UNRECORDED, EX_UNSTORED
from dlrover_core.job.ranges import Member
from dlrover_core.job.state import JobState
from dlrover_core.job.world import ReportFinished, World
from dlrover_core.runtime.unrecorded import has_ended_well, owed


def test_all_members_have_ended_well_recorded_or_not() -> None:
    """What is recorded and what waits for the log count alike; of another generation, or of a dissolved world, nothing does."""
    state: Any = SimpleNamespace(
        job=SimpleNamespace(state="running", spec=SimpleNamespace(groups=(SimpleNamespace(name="worker"),))),
        world=SimpleNamespace(worlds={}),
    )
    told: JobState = state
    assert not has_ended_well(told, ())
    world = World(generation=3, active=True, members=(Member("a", 1, 0), Member("b", 1, 1)), finished=["a"])
    state.world.worlds["worker"] = world
    assert not has_ended_well(told, ())
    assert not has_ended_well(told, [ReportFinished("b", 2)])
    assert has_ended_well(told, [ReportFinished("b", 3)])
    world.active = False
    assert not has_ended_well(told, [ReportFinished("b", 3)])
    state.job.state = "succeeded"
    assert has_ended_well(told, ())


def test_a_last_state_that_no_log_can_commit_is_owed() -> None:
    """As with a log that can be written: by what nodes said, recorded or not, unless the step is committed."""
    kept = SimpleNamespace(newest=(3, 10))
    state: Any = SimpleNamespace(
        job=SimpleNamespace(state="running", spec=SimpleNamespace(groups=(SimpleNamespace(name="worker"),))),
        world=SimpleNamespace(worlds={"worker": World(generation=3, active=True)}),
        checkpoints=SimpleNamespace(of=lambda _: kept),
    )
    finished = [ReportFinished("a", 3), ReportFinished("b", 3, 20, "step 20 is not on storage", 20)]
    assert owed(state, finished[:1]) == ""
    assert owed(state, finished) == "b: step 20 is not on storage"
    state.world.worlds["worker"].unstored["a"] = -1, "lost"
    assert owed(state, ()) == "a: lost"
    state.world.worlds["worker"].unstored["a"] = 20, "others"
    kept.newest = 3, 20
    assert owed(state, finished) == ""
    state.job.state = "succeeded"
    assert owed(state, [ReportFinished("b", 3, 20, "lost", -1)]) == ""


@pytest.mark.parametrize(("owes", "ends"), [("", EX_UNRECORDED), ("b: step 20 is not on storage", EX_UNSTORED)])
def test_a_job_whose_work_is_done_does_not_wait_for_its_log_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], owes: str, ends: int
) -> None:
    """Trouble is told as it begins and as it ends; it ends the job only if all has ended well, and lasts."""
    monkeypatch.setattr(master, "LOOK_S", 0.0)
    monkeypatch.setattr(master, "UNRECORDED_S", 0.0)
    looks = iter([("", False, ""), *[("LogFull: no room", False, "")] * 2, ("", False, ""), ("", True, owes)])
    settings: Any = SimpleNamespace(job=SimpleNamespace(job="j"), shared=False)
    leading: Any = SimpleNamespace(stuck=lambda: next(looks, ("LogFull: no room", True, owes)))
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
