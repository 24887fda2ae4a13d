"""What `dlrover scale`, `drain`, `stop`, `suspend` and `resume` wait for, and how they are typed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from drive import Drive

from dlrover_adapters.cli import main, operate
from dlrover_adapters.http import client
from dlrover_adapters.http.token import kept
from dlrover_core.errors import ConnectionLost
from dlrover_core.job import job, nodes, operations, world


@pytest.mark.parametrize(
    ("text", "size"),
    [("worker=4", ("worker", 0, 4)), ("ps=2:4", ("ps", 2, 4)), ("4", ("", 0, 4)), ("1:16", ("", 1, 16))],
)
def test_sizes(text: str, size: tuple[str, int, int]) -> None:
    """A group, the fewest and the most; the fewest may be left as they are."""
    assert operate.size(text) == size


@pytest.mark.parametrize(
    "text", ["", "worker", "worker=", "=4", "4:", ":4", "0", "0:4", "-1", "4.0", "worker=four", "a b=4"]
)
def test_what_is_no_size(text: str) -> None:
    """It is told how a size is written."""
    with pytest.raises(argparse.ArgumentTypeError, match="say worker=4, or worker=2:4"):
        operate.size(text)


def test_the_job_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody stops the newest job by accident."""
    with pytest.raises(SystemExit) as left:
        main.main(["stop"])
    assert left.value.code == 2
    assert "JOB" in capsys.readouterr().err


def asked(drive: Drive, command: Any) -> Any:
    """Ask; the record that it led to."""
    drive.do(command)
    return drive.new[0].event


def test_waiting_for_a_size() -> None:
    """It lacks nodes, then a world, then workers that run; then nothing."""
    drive = Drive(nodes_max=1, nproc=1).up()
    assert operate.outcome(drive.state).endswith(", 1 node, 1 rank")
    fact = asked(drive, operations.ScaleGroup("worker", 0, 2, "x"))
    assert operate.lacks_size(drive.state, fact) == "1 of 2 nodes train, 1 of 2 nodes joined"
    drive.join("worker-1-0")
    assert operate.lacks_size(drive.state, fact) == "worker: 0 of 2 nodes run generation 2"
    drive.run(5)
    assert operate.lacks_size(drive.state, fact) == ""
    assert operate.outcome(drive.state) == "running; worker: generation 2, 2 nodes, 2 ranks"
    asked(drive, operations.ScaleGroup("worker", 0, 3, "y"))
    assert operate.lacks_size(drive.state, fact) == ""  # another size was asked for


@pytest.mark.parametrize("why", ["never", "finishing", "suspended"])
def test_nodes_that_no_world_takes_in_are_waited_for_all_the_same(why: str) -> None:
    """Where the running world takes nobody, it is so when the nodes are there for the next one."""
    drive = Drive(nodes_max=2, nproc=1, on_join="never" if why == "never" else "restart").up()
    if why == "finishing":
        drive.do(world.ReportFinished("worker-0-0", 1))
    elif why == "suspended":
        drive.do(job.SuspendJob("x"))
    fact = asked(drive, operations.ScaleGroup("worker", 0, 3, "x"))
    assert operate.lacks_size(drive.state, fact) == "2 of 3 nodes joined"
    drive.join("worker-2-0")
    assert operate.lacks_size(drive.state, fact) == ""


def test_waiting_for_a_leave() -> None:
    """The node must be gone, and the others train again."""
    drive = Drive(nodes_max=2, nproc=1).up()
    fact = asked(drive, operations.DrainNode("worker-1", "x"))
    assert operate.lacks_leave(drive.state, fact) == "worker-1-0 has not gone yet"
    drive.do(nodes.ReportLeft("worker-1-0"))
    drive.observe("worker-1-0", "gone")
    assert operate.lacks_leave(drive.state, fact) == "worker: no world yet, 1 of 2 nodes joined"
    drive.join("worker-1-1")
    drive.run(5)
    assert operate.lacks_leave(drive.state, fact) == ""


def test_waiting_for_a_rest() -> None:
    """Every worker must have stopped; a node that died meanwhile has stopped too, and who resumes ends the waiting."""
    drive = Drive(nodes_max=3, nproc=1).up()
    fact = asked(drive, job.SuspendJob("x"))
    assert operate.lacks_rest(drive.state, fact) == "workers of 3 nodes have not stopped yet"
    drive.do(world.ReportStopped("worker-0-0", 1, 5))
    drive.observe("worker-1-0", "gone")
    assert operate.lacks_rest(drive.state, fact) == "workers of 1 node have not stopped yet"
    drive.do(world.ReportStopped("worker-2-0", 1, 5))
    assert operate.lacks_rest(drive.state, fact) == ""
    assert operate.outcome(drive.state) == "suspended (x)"
    drive.do(job.ResumeJob("y"))
    assert operate.lacks_rest(drive.state, fact) == ""
    assert "no world yet" in operate.lacks_workers(drive.state)


def test_waiting_for_the_end() -> None:
    """Who has not left yet is counted."""
    drive = Drive(nodes_max=2, nproc=1).up()
    fact = asked(drive, job.StopJob("x"))
    drive.do(nodes.ReportLeft("worker-1-0"))
    assert operate.lacks_end(drive.state, fact) == "workers of 1 node have not stopped yet"


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file that is named, else from the environment, else from where the launcher keeps it; else there is none."""
    directory, folder = tmp_path / "jobs" / "j", tmp_path / "run"
    directory.mkdir(parents=True)
    folder.mkdir()
    args = argparse.Namespace(state_dir=tmp_path, job="j", token_file=None)
    monkeypatch.delenv("DLROVER_TOKEN", raising=False)
    assert operate.token(args) == ""
    with kept("kept-token", folder, directory / "token"):
        assert operate.token(args) == "kept-token"
        monkeypatch.setenv("DLROVER_TOKEN", "token-of-the-environment")
        assert operate.token(args) == "token-of-the-environment"
        (tmp_path / "given").write_text("given-token\n")
        assert (
            operate.token(argparse.Namespace(state_dir=tmp_path, job="j", token_file=tmp_path / "given"))
            == "given-token"
        )
    assert list(folder.iterdir()) == []
    assert not (directory / "token").is_symlink()
    # A launcher that was killed leaves a link to nothing; the next one is not in its way.
    (directory / "token").symlink_to(folder / "token")
    monkeypatch.delenv("DLROVER_TOKEN")
    assert operate.token(args) == ""
    with kept("next-token", folder, directory / "token"):
        assert operate.token(args) == "next-token"


def test_whoever_leads_of_several_masters_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cannot have done it are passed over; where one may have done it, no other is asked. --timeout bounds it."""
    asked: list[tuple[str, float]] = []

    async def send(address: str, token: str, what: object, *, timeout_s: float, tls: object) -> int:
        asked.append((address, timeout_s))
        if address == "a:1":
            raise ConnectionLost("it stands by")
        if address == "b:1":
            raise client.Unanswered("it may have done it")
        return 7

    monkeypatch.setattr(client, "send_command", send)
    monkeypatch.setenv("DLROVER_TOKEN", "of-the-job")
    words = ("stop", "many", "--no-wait", "--timeout", "5", "--master")
    assert main.main([*words, "a:1, c:1,d:1"]) == 0
    assert asked == [("a:1", 5.0), ("c:1", 5.0)]
    asked.clear()
    assert main.main([*words, "a:1,b:1,c:1"]) == 6
    assert [one for one, _ in asked] == ["a:1", "b:1"]
