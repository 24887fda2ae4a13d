"""Nodes that a scheduler of one's own starts: the example's contract, a real training on it, and the agent in a container."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import BIN, SCRIPTS, TOKEN, Job, Process, eventually, processes

from dlrover_adapters.cli.scratch import MARK
from dlrover_backends.shared.orphans import PR_SET_CHILD_SUBREAPER
from dlrover_core import BackendContext
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime import objects
from dlrover_core.testing import BackendConformance, Stand
from dlrover_core.testing.backend_stand import make_launch, watching

EXAMPLE = Path(__file__).parents[2] / "examples" / "backends" / "ssh_like.py"
SshLike: Any = objects.find(f"{EXAMPLE}:SshLike")
# A stand-in for an agent: it lives until a signal ends it.
AGENT = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")
QUICK = ("--set", "stop_grace_s=5")


NONSENSE = "nonsense"


class Stood(SshLike):  # type: ignore[misc]
    """The example's, with a program that is not there for nodes of one group."""

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start a node."""
        if node.group == NONSENSE:
            self.here = replace(self.here, command=("/no/such/program",))
        await super().launch(node, token)


def make(folder: Path, args: str = "") -> Any:
    """The example's backend, over a folder."""
    return Stood(BackendContext("j", "r1", ("127.0.0.1:1",), "a-token", AGENT, directory=str(folder), args=args))


def nodes(root: Path) -> list[Path]:
    """The folders of all nodes."""
    return [one.parent for one in root.rglob("name")]


def end(backend: Any) -> None:
    """Kill all nodes that there are, and wait until whoever ran them has said so."""
    there = [one for one in nodes(backend.root) if (one / "pid").exists()]
    for one in there:
        backend.kill(one, signal.SIGKILL)
    eventually(lambda: all((one / "exit").exists() for one in there), "the end of all nodes")


class TestSshLike(BackendConformance):
    """The example keeps the contract of all backends."""

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """An empty one, whose nodes are stand-ins."""
        with tempfile.TemporaryDirectory() as folder:
            backend = make(Path(folder), "hosts=a+b")

            async def kill(name: str) -> None:
                backend.kill(backend.folder(name), signal.SIGKILL)

            cannot = {
                "waits": "hosts that share memory and processors never say no",
                "lost": "ssh does not tell a dead host from a slow one",
                "notices": "nobody announces anything",
            }
            yield Stand(backend, kill, cannot=cannot)
            end(backend)

    def nonsense(self) -> NodeLaunch:
        """One whose program is not there."""
        return make_launch()._replace(group=NONSENSE)


def test_the_example_is_short_and_imports_public_names_alone() -> None:
    """A backend has under 150 lines, and of ours it imports `from dlrover_core import ...` and nothing else."""
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 150
    assert set(re.findall(r"^\s*(?:from|import) (dlrover\S*)", text, re.MULTILINE)) == {"dlrover_core"}


def test_a_backend_that_is_started_again_finds_its_nodes(tmp_path: Path) -> None:
    """Another backend over the same files lists what runs, what has ended, and starts nothing again; it is nobody's parent."""
    # A launcher that another test had in this process would have orphans come here.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    async def story() -> None:
        first, alive, dead = make(tmp_path), make_launch(0), make_launch(1)
        async with watching(first) as watch:
            for node in (alive, dead):
                await first.launch(node, 5)
            await watch.running(alive.name, dead.name)
            first.kill(first.folder(dead.name), signal.SIGKILL)
            await watch.over(dead.name)
        second, pid = make(tmp_path), first.pid(first.folder(alive.name))
        async with watching(second) as watch:
            assert {name: node.phase for name, node in watch.nodes.items()} == {
                alive.name: "running",
                dead.name: "failed",
            }
            await second.launch(alive, 6)
            await second.launch(dead, 6)
            assert second.pid(second.folder(alive.name)) == pid
            assert pid not in [one.pid for one in psutil.Process().children(recursive=True)]
            await second.delete(alive.name, 6, 5.0)
            await watch.gone(alive.name)
        end(second)

    asyncio.run(asyncio.wait_for(story(), 60))


@contextlib.contextmanager
def ending(job: Job) -> Iterator[Job]:
    """Kill the nodes too, which no launcher takes along."""
    try:
        with job:
            yield job
    finally:
        for one in nodes(job.state):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((one / "pid").read_text().split()[0]), signal.SIGKILL)


def masters(job: Job) -> list[Process]:
    """The masters of a launcher."""
    mark = f"{MARK}={eventually(lambda: job.settings or None, 'settings')['mark']}"
    return [one for one in processes(mark) if one.name == "dlrover-master"]


def outputs(job: Job) -> str:
    """What all agents said."""
    return "".join((one / "output").read_text() for one in nodes(job.state) if (one / "output").exists())


@pytest.mark.timeout(240)
def test_nothing_that_runs_is_started_again(tmp_path: Path) -> None:
    """Two nodes train on the example's backend while all masters, with their backend, and then the launcher too are killed.

    Training goes on without a step less; each successor finds the nodes, and launches none.
    """
    command = ("--bind", "127.0.0.1", "--backend", f"{EXAMPLE}:SshLike:hosts=a+b", "--nnodes", "2", *QUICK)
    command += (str(SCRIPTS / "light_steps.py"), str(tmp_path))
    with ending(Job(tmp_path, *command)) as job:
        step = job.trains(1, beyond=3)["step"]
        for one in masters(job):
            one.kill()
        step = job.trains(1, beyond=step)["step"]
        first = job.settings
        job.process.kill()
        job.process.wait()
        for one in [one for one in processes(f"{MARK}={first['mark']}") if one.name == "dlrover-master"]:
            one.ends()
        with ending(Job(tmp_path, *command)) as again:
            again.trains(1, beyond=step)
            assert (again.settings["run"], again.settings["masters"]) == (first["run"], first["masters"])
            again.finish()
            assert again.ended() == 0, outputs(again)
            assert again.events("IncidentOpened") == []
            assert len(again.events("NodePlanned")) == len(again.events("WorkersStarted")) == 2
            assert {one["fields"]["host"] for one in again.events("NodeJoined")} == {"a", "b"}
            assert [len(again.told(rank)) for rank in (0, 1)] == [1, 1]
            assert "its run goes on" in again.said()


def _mounts() -> bool:
    """May this user make a process namespace, and mount in a namespace of its own?"""
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        "mount -o remount,ro,bind / && setpriv --version",
    ]
    return os.getuid() == 0 and subprocess.run(words, capture_output=True, check=False).returncode == 0


# As a container is: process 1, a user whom no passwd entry names, a root that takes no files. The capability lets that user
# reach an interpreter that lies in root's home; it lets nobody write.
CONTAINER = (
    "unshare --mount --pid --fork --kill-child --mount-proc sh -c 'mount -o remount,ro,bind / && exec setpriv --reuid 54321 "
    '--regid 54321 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search "$@"\' sh'
)


@pytest.mark.skipif(not _mounts(), reason="needs a user who may make namespaces")
@pytest.mark.timeout(240)
def test_the_agent_as_a_containers_first_process(tmp_path: Path) -> None:
    """As process 1 of an unknown user on a read-only root an agent works, reaps orphans, and leaves as planned at SIGTERM."""
    folder = Path(tempfile.mkdtemp(prefix="apart-", dir="/dev/shm"))
    try:
        folder.chmod(0o755)
        (said := folder / "said").mkdir()
        said.chmod(0o777)
        shutil.copy(SCRIPTS / "inside.py", folder)
        backend = f"{SCRIPTS}/contained.py:contained:{CONTAINER}"
        command = ("--bind", "127.0.0.1", "--backend", backend, *QUICK, str(folder / "inside.py"), str(said))
        with ending(Job(folder, *command)) as job:
            _contained(job, said)
    finally:
        shutil.rmtree(folder)


def _contained(job: Job, said: Path) -> None:
    def reports() -> list[dict[str, Any]]:
        return [json.loads(one.read_text()) for one in sorted(said.glob("inside-*.json"))]

    eventually(lambda: reports() or job.process.poll() is not None, "a worker's report")
    assert reports(), outputs(job)
    (inside,) = reports()
    assert (inside["agent"], inside["uid"], inside["user"], inside["root"]) == (1, 54321, "54321", False), inside
    assert inside["temporary"] == inside["home"] == "/dev/shm", inside
    assert inside["told"] == [], "a dlrover-run in a script is a launcher again, and workers know no token"
    assert 0 <= inside["orphan_s"] < 15, inside
    job.trains(1)
    (agent,) = [one for one in nodes(job.state) if not (one / "exit").exists()]
    assert 'event="agent begins"' in (agent / "output").read_text()
    wrapper = int((agent / "pid").read_text().split()[0])
    os.kill(int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text()), signal.SIGTERM)
    eventually(lambda: len(reports()) == 2, "a successor's worker")
    assert eventually((agent / "exit").read_text, "the agent's end").strip() == "0"
    assert "the agent got SIGTERM" in (agent / "output").read_text()
    (said / "finish").touch()
    assert job.ended() == 0
    assert job.events("IncidentOpened") == []
    assert [one for one in Path("/dev/shm").glob("dlrover-*") if one.stat().st_uid == 54321] == []


def entry(tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """An agent's entry, to its end."""
    (tmp_path / "train.py").touch()
    born = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "DLROVER_TOKEN": TOKEN, "DLROVER_WARM": "core", **env}
    line = [str(BIN / "dlrover-run"), "--set", "launch_s=1", *words, "train.py"]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False, env=born, cwd=tmp_path)


def test_an_agent_that_nobody_leads_goes(tmp_path: Path) -> None:
    """Without a master, and without workers to go on for, an agent ends with 75 once launch_s has passed; its folder is gone."""
    (tmp_path / "tmp").mkdir()
    told = {
        "DLROVER_NODE": "worker-0-0",
        "DLROVER_JOB": "j",
        "DLROVER_MASTERS": "127.0.0.1:9",
        "TMPDIR": str(tmp_path / "tmp"),
    }
    ended = entry(tmp_path, **told)
    assert ended.returncode == 75, ended.stderr
    assert "no master was heard for 1 s" in ended.stderr
    assert list((tmp_path / "tmp").glob("dlrover-*")) == []
