"""Agents that are started ahead: before anybody knows which node they will be, and before anything else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from running import SCRIPTS, Job, Process, eventually, processes

from dlrover_adapters.agent import looks
from dlrover_adapters.cli import agent_restarter
from dlrover_backends.local import LocalCommand
from dlrover_backends.local.blanks import Ahead

STEPS = str(SCRIPTS / "steps.py")
TEST_MARK = "DLROVER_TEST_MARK"


def test_a_standby_takes_the_place_of_a_dead_node(tmp_path: Path) -> None:
    """With --standby 1 the process that becomes the new node was there before, warm; another one follows it."""
    with Job(tmp_path, "--local-nodes", "2", "--standby", "1", STEPS) as job:
        job.trains(1, beyond=5)
        standby = eventually(lambda: unnamed(job), "a standby")
        zygotes = [one.pid for one in job.processes("dlrover-agent")]
        assert len(zygotes) == 3
        for one in job.processes("", "--node worker-1-0"):
            one.kill()
        status = job.trains(2, beyond=1000)
        assert set(status["nodes"]) == {"worker-0-0", "worker-1-1"}
        assert job.one("dlrover-agent", "--node worker-1-1").pid == standby.pid
        assert eventually(lambda: unnamed(job), "another standby").pid != standby.pid
        job.finish()
        assert job.ended() == 0
        assert job.left() == []


def unnamed(job: Job) -> Process | None:
    """The agent that is no node yet."""
    return next((one for one in job.processes("dlrover-agent") if "--node" not in one.line), None)


def test_a_launcher_killed_in_its_first_moments_leaves_nothing(tmp_path: Path) -> None:
    """The first agent is there before masters, sweeper and folders are: SIGKILL of the launcher then ends it all the same."""
    mark = f"{TEST_MARK}={os.environ[TEST_MARK]}"
    with Job(tmp_path, STEPS) as job:
        first = eventually(
            lambda: next((one for one in processes(mark) if "cli.agent" in one.line), None), "the first agent"
        )
        job.process.send_signal(signal.SIGSTOP)
        job.process.kill()
        job.process.wait()
        first.ends()
        eventually(lambda: not processes(mark), "the end of everything")


def test_the_first_agent_comes_before_what_is_slow(tmp_path: Path) -> None:
    """Until it is started the launcher imports neither asyncio nor anything of ours that needs it."""
    code = f"""
        import sys
        from dlrover_adapters.cli import ahead, run
        def stop(*_):
            print(sorted({{"asyncio", "aiohttp", "structlog", "sqlite3", "torch"}} & set(sys.modules)))
            sys.exit(0)
        ahead.blank = stop
        run.main(["--state-dir", {str(tmp_path / "state")!r}, {STEPS!r}])
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert told.stdout == "[]\n"


AGENT = """
    import json, os, signal, socket, sys
    control = socket.socket(fileno=int(sys.argv[1]))
    def say(**words): control.send(json.dumps(words).encode())
    control.recv(4096)
    say(here=True)
    if sys.argv[2] == "hangs":
        signal.pause()
    say(node="worker-0-0")
    signal.sigtimedwait([signal.SIGUSR1], 1.5)  # as long as three times hung_s
    say(ending=["succeeded", "", ""])
"""


def test_a_joined_hosts_agent_that_hangs_is_replaced_until_it_is_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it has a node its launcher kills it; afterwards that would end its workers, and it is left alone."""
    monkeypatch.setattr(agent_restarter, "AGAIN_S", 0.0)
    lives = iter(["hangs"])
    started: list[str] = []

    def command(control: int) -> LocalCommand:
        started.append(next(lives, "trains"))
        return LocalCommand((sys.executable, "-I", "-S", "-c", textwrap.dedent(AGENT), str(control), started[-1]))

    async def story() -> None:
        made = agent_restarter.AgentRestarter(
            Ahead(command, hung_s=0.5, see=looks.seen, ready_s=5.0), lambda _words: None
        )
        async with made:
            ended = await asyncio.wait_for(made.ended(), 20)
        assert ended.outcome == "succeeded"
        assert started == ["hangs", "trains"]

    asyncio.run(story())
