"""A job that nobody can lead, because its log's folder takes no writes, ends all the same."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import unled
from dlrover_adapters.cli.supervisor import NoNodes, Supervisor
from dlrover_adapters.cli.unled import FAILED, WELL, WORKS, End, Standing, Unled, folder_of, refusal, said, standing
from dlrover_core.job.incidents import ReportExit
from dlrover_core.job.world import ReportFinished


def node(work: str, why: str = "", phase: str = "running", *, alone: bool = True) -> dict[str, Any]:
    """What is known of one node."""
    return {"work": work, "why": why, "phase": phase, "alone": alone}


def test_what_an_agent_says() -> None:
    """Whether there are workers, and how they ended."""

    def words(result: object = None, *, working: bool = True) -> dict[str, object]:
        agent: Any = SimpleNamespace(working=working, result=result)
        return said(agent)

    assert words(working=False) == {"work": "", "why": ""}
    assert words() == {"work": WORKS, "why": ""}
    assert words(ReportFinished("a", 1, 9, "step 9 is not on storage", 9)) == {
        "work": WELL,
        "why": "step 9 is not on storage",
    }
    assert words(ReportExit("a", 1, 3, -9)) == {"work": FAILED, "why": "rank 3 on a failed"}


def test_how_all_nodes_fare() -> None:
    """One that failed decides, then one that works; a node without work, as a standby, does not count."""
    well, works, idle = node(WELL), node(WORKS), node("")
    assert standing({"a": well, "b": idle}) == Standing(alone=True, work=WELL)
    assert standing({"a": well, "b": node(WELL, "lost")}) == Standing(alone=True, work=WELL, why="lost")
    assert standing({"a": well, "b": works}) == Standing(alone=True, work=WORKS)
    assert standing({"a": works, "b": node(FAILED, "rank 0 on b failed")}).why == "rank 0 on b failed"
    assert standing({"a": works, "b": {"phase": "failed"}}) == Standing(alone=True, work=FAILED, why="node b failed")
    assert standing({"a": well, "b": node(WELL, alone=False)}).alone is False
    assert standing({"a": idle}) == Standing(alone=True, work="")


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT], ids=errno.errorcode.__getitem__
)
def test_a_folder_that_takes_no_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """In the kernel's words; one that was removed is made anew."""
    folder = tmp_path / "state"
    assert refusal(folder) == ""
    assert list(folder.iterdir()) == []

    def refuses(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    assert refusal(folder) == os.strerror(number)


def test_where_the_log_lies(tmp_path: Path) -> None:
    """That of SQLite beside its file, another one in the job's directory as far as is known."""
    settings: Any = SimpleNamespace(log=f"sqlite://{tmp_path}/a%20b/log.db", directory="/job")
    assert folder_of(settings) == tmp_path / "a b"
    settings.log = "other:somewhere"
    assert folder_of(settings) == Path("/job")


def watched(
    monkeypatch: pytest.MonkeyPatch, nodes: Mapping[str, Mapping[str, Any]], refused: list[str], **bounds: float
) -> tuple[End | None, list[str]]:
    """How `Unled` ends within a moment, None: it does not; and what people hear. ``refused``: the folder's answers."""
    heard: list[str] = []
    left = list(refused)
    monkeypatch.setattr(unled, "refusal", lambda _: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(unled, "LOOK_S", 0.001)
    monkeypatch.setattr(unled, "UNLED_S", bounds.get("unled_s", 0.0))
    job = SimpleNamespace(job="j", unreachable_s=bounds.get("unreachable_s", 0.0))
    settings: Any = SimpleNamespace(job=job, log="sqlite:///state/log.db", directory="/job")

    async def run() -> End | None:
        try:
            return await asyncio.wait_for(Unled(settings, lambda: nodes, heard.append).end(), 0.3)
        except asyncio.TimeoutError:
            return None

    return asyncio.run(run()), heard


REFUSED = "/state takes no writes (Read-only file system)"


def test_all_workers_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends, and people hear which folder it is, and what lacks."""
    end, heard = watched(monkeypatch, {"a": node(WELL), "b": node("")}, ["Read-only file system"])
    assert end == End()
    assert [words.partition(";")[0] for words in heard] == [
        f"no master can lead job j: {REFUSED}",
        f"all workers ended well, which the log cannot take: {REFUSED}",
    ]
    end, heard = watched(monkeypatch, {"a": node(WELL, "step 9 is not on storage")}, ["Read-only file system"])
    assert end == End(owed="step 9 is not on storage")
    assert heard[-1].endswith("; step 9 is not on storage")


def test_a_worker_failed_that_nobody_can_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is told, and kept; a job whose workers were never started has it, too."""
    nodes = {"a": node(FAILED, "rank 0 on a failed")}
    end, heard = watched(monkeypatch, nodes, ["Read-only file system"], unreachable_s=0.05)
    assert end == End(failed=f"rank 0 on a failed, and nobody could lead it: {REFUSED}")
    assert heard[1].startswith("rank 0 on a failed, and cannot be restarted: the job ends in 0.05 s unless")
    end, _ = watched(monkeypatch, {"a": node("")}, ["Read-only file system"])
    assert end == End(failed=f"no worker could be started, and nobody could lead it: {REFUSED}")


def test_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends it: a worker that works, a master that is heard, a folder that takes files, no node at all."""
    full = ["Read-only file system"]
    assert watched(monkeypatch, {"a": node(WELL), "b": node(WORKS)}, full)[0] is None
    assert watched(monkeypatch, {"a": node(WELL, alone=False)}, full) == (None, [])
    assert watched(monkeypatch, {"a": node(WELL)}, [""]) == (None, [])
    assert watched(monkeypatch, {}, full) == (None, [])
    end, heard = watched(monkeypatch, {"a": node(WELL)}, [*full, ""], unled_s=0.05)
    assert (end, heard[-1]) == (None, "job j can be led again")


def test_a_signal_ends_the_nodes_that_no_master_can_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their grace, and at once, instead of after the time that a master would have."""
    ended: list[float] = []

    class Nodes(NoNodes):
        async def close(self, grace_s: float = 0.0) -> None:
            ended.append(grace_s)

    async def run() -> None:
        job = SimpleNamespace(job="j", stop_grace_s=30.0, kill_wait_s=30.0)
        settings: Any = SimpleNamespace(job=job, run_dir=None, directory="")
        with socket.socket() as port:
            made = Supervisor(settings, "t", port, Nodes())
            made._unled.wrong = REFUSED
            made.stop(signal.SIGTERM)
            await asyncio.wait_for(made._over.wait(), 5)
        assert made.stopped_by == signal.SIGTERM

    asyncio.run(run())
    assert ended == [40.0]
