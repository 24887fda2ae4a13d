"""What people are told of a job of this host of which nothing runs any more, and of masters that a node's agent cannot reach."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import agent_process
from dlrover_adapters.cli.detached import record

RESUME = "dlrover-run --resume j --state-dir /s goes on with it"
ANEW = "its dlrover-run line, said again, starts it anew"


def launched(state: Path, **settings: object) -> Path:
    """The directory of a job that was launched on this host."""
    directory = state / "jobs" / "j"
    directory.mkdir(parents=True)
    record.put(directory / "settings.json", {"mark": "m", "run": "r", "backend": "", "joining": False, **settings})
    (directory / "lock").touch()
    return directory


def detach(directory: Path, mark: str = "m") -> None:
    """It was started detached."""
    record.Record(mark, {"worker": 1}, where=" --state-dir /s").write(directory)


def test_a_detached_job_is_resumed_and_another_one_started_anew(tmp_path: Path) -> None:
    """Each is told by the command that goes on with it; a record of an earlier start does not count."""
    directory = launched(tmp_path)
    assert record.lost(tmp_path, "j", "r").endswith(ANEW)
    detach(directory, mark="of an earlier start")
    assert record.lost(tmp_path, "j", "r").endswith(ANEW)
    detach(directory)
    assert record.lost(tmp_path, "j", "r").endswith(RESUME)
    assert record.lost(tmp_path, "j").endswith(RESUME)


def test_what_lives_has_ended_or_is_elsewhere_is_not_lost(tmp_path: Path) -> None:
    """Nor is a job that this host does not know, or another run of it, which another host may have."""
    directory = launched(tmp_path)
    detach(directory)
    assert record.lost(tmp_path, "other", "r") == ""
    assert record.lost(tmp_path, "j", "another run") == ""
    with (directory / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert record.lost(tmp_path, "j", "r") == ""
    record.put(directory / record.ENDED, {"mark": "m", "status": 1})
    assert record.lost(tmp_path, "j", "r") == ""


@pytest.mark.parametrize("settings", [{"backend": "pkg:Slurm"}, {"joining": True}])
def test_nodes_of_other_hosts_may_live(tmp_path: Path, settings: dict[str, object]) -> None:
    """What this host knows nothing of is not called dead."""
    launched(tmp_path, **settings)
    assert record.lost(tmp_path, "j", "r") == ""


def test_the_agent_of_a_scheduler_says_that_no_master_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would: its standard error is all that a scheduler's users see of it."""
    said: list[str] = []
    agent = SimpleNamespace(unmastered_s=0.0)
    process: Any = object.__new__(agent_process._Process)
    process._agent, process._control, process._joining, process._patience_s = agent, None, False, 900.0
    process._config, process._masters = SimpleNamespace(job="j"), ("m1:1", "m2:2")
    process._tell = lambda **_: None
    silences = iter([0.0, 11.0, 12.0, 0.5, 0.0])

    async def look(_seconds: float) -> None:
        agent.unmastered_s = next(silences)

    monkeypatch.setattr(agent_process, "_say", said.append)
    monkeypatch.setattr(agent_process, "asyncio", SimpleNamespace(sleep=look))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(process._mind_master())
    assert said == [
        "no master of job j at m1:1, m2:2 answers; asked again",
        "a master of job j at m1:1, m2:2 answers again",
    ]
