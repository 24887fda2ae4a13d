"""A job that belongs to nobody's terminal: whoever started it, its supervisor and its masters may be killed, and it trains on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import dlrover
from running import WITHOUT_TORCH, eventually

from dlrover_adapters.cli.detached import record
from dlrover_core.host.procfs import processes

pytestmark = pytest.mark.timeout(180)
SCRIPT = """
import os, sys, time
with open(sys.argv[1] + "/pids", "a") as file:
    print(os.getpid(), file=file)
while not os.path.exists(sys.argv[1] + "/end"):
    time.sleep(0.05)
"""


class Detached:
    """One detached job, and the commands that deal with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.directory = self.state / "jobs" / "d"
        (folder / "script.py").write_text(SCRIPT)

    def command(self, module: str, *words: str) -> subprocess.CompletedProcess[str]:
        """What a command says, and its status."""
        words = (*words, "--state-dir", str(self.state))
        if module == "main":
            return dlrover(words, {**os.environ, **WITHOUT_TORCH}, self.folder)
        return self.run([sys.executable, "-m", f"dlrover_adapters.cli.{module}", *words])

    def run(self, line: list[str]) -> subprocess.CompletedProcess[str]:
        """Run it to its end: its script needs no torch."""
        env = {**os.environ, **WITHOUT_TORCH}
        return subprocess.run(line, capture_output=True, text=True, timeout=90, cwd=self.folder, check=False, env=env)

    def start(self) -> None:
        """Start it, in the way of a shell; it must have returned by then."""
        line = (sys.executable, "-m", "dlrover_adapters.cli.run", "--detach", "--job-id", "d", "--preload", "none")
        words = ("--state-dir", str(self.state), str(self.folder / "script.py"), str(self.folder))
        made = self.run([*line, *words])
        assert made.returncode == 0, made.stderr
        assert "dlrover attach d" in made.stderr

    def pids(self, name: str) -> list[int]:
        """The job's processes of this name."""
        known = record.read(self.directory)
        mark = f"DLROVER_RUN_MARK={known.mark}".encode() if known is not None else b"?"
        found = []
        for one in processes():
            if one.lives and one.name == name:
                try:
                    words = Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                found += [one.pid] if mark in words else []
        return found

    def another(self, name: str, before: list[int]) -> Callable[[], bool]:
        """Is there one that was not there before?"""
        return lambda: bool(set(self.pids(name)) - set(before))

    def workers(self) -> list[str]:
        """Every worker that ever began."""
        path = self.folder / "pids"
        return path.read_text().split() if path.exists() else []

    def kill(self, *names: str) -> None:
        """SIGKILL them."""
        for pid in [pid for name in names for pid in self.pids(name)]:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Detached]:
    """A job that trains."""
    made = Detached(tmp_path)
    try:
        made.start()
        eventually(lambda: len(made.workers()) == 1, "a worker")
        yield made
    finally:
        made.kill("dlrover-super", "dlrover-host")
        made.kill("dlrover-super", "dlrover-host")
        eventually(lambda: not record.lives(made.directory), "the sweeper's end")


def test_a_detached_job_survives(job: Detached) -> None:
    """Supervisor and masters killed: no worker is restarted. The node host too: its nodes come anew. Its end is `attach`'s."""
    supervisor = job.pids("dlrover-super")
    assert supervisor
    job.kill("dlrover-super")
    eventually(job.another("dlrover-super", supervisor), "another supervisor")
    eventually(lambda: bool(job.pids("dlrover-master")), "a master")
    masters = job.pids("dlrover-master")
    job.kill("dlrover-master")
    eventually(job.another("dlrover-master", masters), "another master")
    assert len(job.workers()) == 1
    host = job.pids("dlrover-host")
    job.kill("dlrover-host")
    eventually(job.another("dlrover-host", host), "another node host")
    eventually(lambda: len(job.workers()) == 2, "the worker's successor", 60.0)
    (job.folder / "end").touch()
    done = job.command("main", "attach", "d")
    assert done.returncode == 0, done.stderr
    eventually(lambda: not record.lives(job.directory), "the end of all")
    assert [job.pids(f"dlrover-{name}") for name in ("host", "super", "master", "agent")] == [[]] * 4
    assert json.loads((job.directory / record.ENDED).read_text())["status"] == 0


def test_after_a_reboot_it_is_resumed(job: Detached) -> None:
    """Everything is killed: all commands say what to do, at once, and `--resume` goes on with the run; `dlrover stop` ends it."""
    job.kill("dlrover-super", "dlrover-host")
    eventually(lambda: not record.lives(job.directory), "the sweeper's end")
    lost = job.command("main", "attach", "d")
    words = (
        f"nothing of job d runs any more, and it has not ended; dlrover-run --resume d --state-dir {job.state} goes on"
    )
    assert (lost.returncode, words in lost.stderr) == (6, True)
    assert words in job.command("main", "status", "d").stdout
    unheard = job.command("main", "stop", "d")
    assert (unheard.returncode, words in unheard.stderr, "waiting" in unheard.stderr) == (6, True, False)
    resumed = job.command("run", "--resume", "d")
    assert resumed.returncode == 0, resumed.stderr
    assert "its run goes on" in resumed.stderr
    eventually(lambda: len(job.workers()) == 2, "a worker again", 60.0)
    assert job.command("run", "--resume", "d").returncode == 2
    assert "stopped" in job.command("main", "stop", "d").stdout
    eventually(
        lambda: record.ended(job.directory, json.loads((job.directory / record.RECORD).read_text())["mark"]) == 1,
        "its end",
    )
    again = job.command("run", "--resume", "d")
    assert (again.returncode, "job 'd' has ended with status 1" in again.stderr) == (2, True)
