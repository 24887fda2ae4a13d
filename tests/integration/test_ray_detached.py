"""`dlrover-run --backend ray --detach`, and a driver that dies: masters are kept in the cluster, and are found from any host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from commands import dlrover, said
from running import BIN, SCRIPTS, eventually
from tests.integration.ray_grounds import RayGround, keeper_of, parent_of, processes_of
from tools.etcd_cluster import Cluster

from dlrover_backends.ray import names

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]
BOUND_S = 90.0
LEAN = ("--preload", "none", "--set", "stop_grace_s=5", "--nnodes", "2", "--resources", "CPU=1")


@pytest.fixture(name="ground")
def shared_ground(ray_light: RayGround) -> RayGround:
    """Two hosts."""
    return ray_light


class Detached:
    """Commands of a person who is in ``folder``, on a host of the cluster.

    What the runtime environment is made of may be deleted once the first node has begun (`forget`).
    """

    def __init__(self, ground: RayGround, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "RAY_ADDRESS": ground.address, "DLROVER_TOKEN": ""}

    def says(self, command: str, *words: str, status: int | None = 0) -> str:
        """What a command prints; it must end with this status, if one is given."""
        return said(command, words, self.env, self.folder, status)

    def start(self, job: str, *more: str, status: int = 0) -> str:
        """Start a detached job; what `dlrover-run` says."""
        return self.says("dlrover-run", "--detach", *more, *self.line(job), status=status)

    def attached(self, job: str, *more: str, **files: str) -> subprocess.Popen[bytes]:
        """Start a job that is led beside its command."""
        words = [str(BIN / "dlrover-run"), "--bind", "127.0.0.1", *self.line(job, *more, **files)]
        return subprocess.Popen(words, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL)

    def line(self, job: str, *more: str, sent: str = "working_dir: sent", script: str = "train.py") -> list[str]:
        """A job whose script lies in a folder that Ray sends to the hosts, with a requirements file that asks for nothing."""
        folder = self.folder / "sent"
        folder.mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / "until_told.py", folder / "train.py")
        (self.folder / "needs.txt").write_text("# nothing\n", encoding="utf-8")
        env = f"{sent}\npip: needs.txt\nenv_vars: {{PROOF: 'a,b'}}"
        (self.folder / "env.yaml").write_text(env, encoding="utf-8")
        state = ("--state-dir", str(self.folder / "state"), "--runtime-env", "env.yaml")
        return ["--backend", "ray", "--job-id", job, *state, *LEAN, *more, script, str(self.folder)]

    def forget(self) -> None:
        """Delete all that the runtime environment is made of."""
        shutil.rmtree(self.folder / "sent")
        for name in ("env.yaml", "needs.txt"):
            (self.folder / name).unlink()

    def ranks(self) -> set[str]:
        """Ranks that have begun, with the ids of their processes."""
        return {one.name for one in self.folder.glob("rank-*")}

    def replaced(self, run: str, node: str, standby: int) -> None:
        """A node's actor is killed: this standby's agent has a rank then, with the environment that was typed."""
        os.kill(keeper_of(run, node), signal.SIGKILL)

        def rank() -> int | None:
            return next((pid for one in self.ranks() if is_below(pid := pid_of(one), standby)), None)

        assert variable(eventually(rank, "a standby's rank"), "PROOF") == "a,b"


def masters_of(job: str) -> list[int]:
    """The launchers that keep a job's masters in the cluster.

    What one of them is about to start looks like it for a moment, between its fork and its execution.
    """
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                env = (entry / "environ").read_bytes().split(b"\0")
                if b"dlrover_adapters.cli.run" in words and f"DLROVER_MASTER_JOB={job}".encode() in env:
                    found[int(entry.name)] = parent_of(int(entry.name))
    return [one for one, parent in found.items() if parent not in found]


def test_masters_may_die_and_nothing_is_left(ground: RayGround, tmp_path: Path) -> None:
    """Masters and their keeper are killed: others lead, no rank is restarted; the job is stopped, and all is removed.

    The script is what lay in the folder when the job was started, and the runtime environment is what its files said then.
    """
    job = Detached(ground, tmp_path)
    said = job.start("kept")
    assert "on first, the host of the head" in said, said
    assert "Ray ends all of it within 60 s" in said, said
    assert "job 'kept' is in this cluster already" in job.start("kept", status=2)
    eventually(lambda: len(job.ranks()) == 2, "two ranks")
    job.forget()
    eventually(lambda: "2 of 2 nodes started" in job.says("dlrover", "status", "ray:kept"), "both nodes started")
    ranks, run = job.ranks(), run_of("kept")
    assert {variable(pid_of(one), "PROOF") for one in ranks} == {"a,b"}
    [first] = masters_of("kept")
    keeper = parent_of(first)
    os.kill(keeper, signal.SIGKILL)
    eventually(lambda: any(parent_of(one) != keeper for one in masters_of("kept")), "another keeper, and its masters")
    eventually(lambda: "LeaderStarted" in job.says("dlrover", "events", "ray:kept", status=None), "another leader")
    assert "running" in job.says("dlrover", "status", "ray:kept")
    assert job.ranks() == ranks
    assert "all that was made for it is removed" in job.says("dlrover", "stop", "ray:kept")
    assert len(job.says("dlrover", "ray", "ls").splitlines()) == 1
    assert "no job 'kept' in this cluster" in job.says("dlrover", "status", "ray:kept", status=3)
    eventually(lambda: not processes_of(run) and not masters_of("kept"), "the end of all processes")


@pytest.mark.nightly(
    reason="masters that the cluster keeps, when the command is gone, are tried by day in the test above"
)
def test_a_driver_may_die(ground: RayGround, tmp_path: Path) -> None:
    """The command that was typed is killed with all masters beside it: others lead in the cluster, and no rank is restarted.

    That the job's end is known afterwards, and that a name is free again, is told by what the cluster keeps.
    """
    job = Detached(ground, tmp_path)
    driver = job.attached("left")
    try:
        eventually(lambda: len(job.ranks()) == 2, "two ranks")
        ranks = job.ranks()
        assert "running" in job.says("dlrover", "status", "ray:left")
        eventually(lambda: "#0" in keepers(ground), "a keeper that waits for the driver's death")
    finally:
        driver.kill()
        driver.wait()
    eventually(lambda: bool(masters_of("left")), "masters in the cluster")
    run = run_of("left")
    eventually(lambda: "LeaderStarted" in job.says("dlrover", "events", "ray:left", status=None), "another leader")
    assert job.ranks() == ranks
    (tmp_path / "end").touch()
    eventually(lambda: "ended well" in job.says("dlrover", "status", "ray:left", status=None), "the end")
    assert "removed" in job.says("dlrover", "stop", "ray:left")
    assert not processes_of(run)


@pytest.mark.nightly(reason="that masters read no file again is tried by day in test_ray_runtime_env")
def test_nodes_that_are_launched_later(ground: RayGround, tmp_path: Path) -> None:
    """Nodes, and the standbys that they were, have the environment of the start though all its files are gone.

    First masters beside the command launch them, then masters that never saw those files: these keep the standby that is there.
    """
    job = Detached(ground, tmp_path)
    driver = job.attached("later", "--standby", "1", sent="py_modules: [sent]", script=str(SCRIPTS / "until_told.py"))
    try:
        eventually(lambda: len(job.ranks()) == 2, "two ranks")
        job.forget()
        run = json.loads((tmp_path / "state" / "jobs" / "later" / "settings.json").read_text(encoding="utf-8"))["run"]
        job.replaced(run, "worker-1-0", waiting(job, run, number=0))
        second = waiting(job, run, number=1)
        eventually(lambda: "#0" in keepers(ground), "a keeper that waits for the driver's death")
    finally:
        driver.kill()
        driver.wait()
    eventually(lambda: "LeaderStarted" in job.says("dlrover", "events", "ray:later", status=None), "another leader")
    job.replaced(run, "worker-0-0", second)
    waiting(job, run, number=2)
    assert "removed" in job.says("dlrover", "stop", "ray:later")
    assert not processes_of(run)


@pytest.mark.nightly(reason="a keeper that is killed is tried by day, with a log on the host of the head")
def test_masters_on_two_hosts(ground: RayGround, tmp_path: Path) -> None:
    """With a log in etcd two keepers on two hosts have masters; each may die, and no rank is restarted."""
    job = Detached(ground, tmp_path)
    with Cluster(1) as etcd:
        log = etcd.url("ray")
        said = job.start("shared", "--log", log)
        assert "kept by 2 actors" in said, said
        eventually(lambda: len(job.ranks()) == 2, "two ranks")
        two = eventually(lambda: found if len(found := masters_of("shared")) == 2 else None, "two launchers")
        assert len({variable(parent_of(one), "RAY_RAYLET_PID") for one in two}) == 2, "both keepers are on one host"
        ranks, terms = job.ranks(), terms_of("shared", log)
        # Whichever leads: one after the other, each with its keeper. Between the two both masters are there again. A keeper may
        # have started others meanwhile.
        for one, keeper in [(one, parent_of(one)) for one in two]:
            os.kill(keeper, signal.SIGKILL)
            eventually(lambda one=one: one not in masters_of("shared"), "the end of masters whose keeper is dead")
            eventually(lambda: len(masters_of("shared")) == 2, "two launchers again")
        eventually(lambda: terms_of("shared", log) > terms, "another leader")
        # The command may ask while nobody leads.
        eventually(
            lambda: "2 of 2 nodes started" in job.says("dlrover", "status", "ray:shared", status=None),
            "a master that leads",
        )
        assert job.ranks() == ranks
        assert "all that was made for it is removed" in job.says("dlrover", "stop", "ray:shared")
    eventually(lambda: not masters_of("shared"), "the end of all masters")


def terms_of(job: str, log: str) -> int:
    """How often a master has begun to lead, as the log says; no cluster is asked."""
    return dlrover(["events", job, "--log", log, "--json"]).stdout.count('"LeaderStarted"')


def variable(pid: int, name: str) -> str:
    """A variable of the environment that a process began with; empty: it has none."""
    env = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next((one.partition("=")[2] for one in env if one.startswith(f"{name}=")), "")


def pid_of(rank: str) -> int:
    """The process of a rank that has begun."""
    return int(rank.rpartition("-")[2])


def is_below(pid: int, ancestor: int) -> bool:
    """Has a living process this ancestor?"""
    with contextlib.suppress(OSError):
        while pid > 1 and pid != ancestor:
            pid = parent_of(pid)
    return pid == ancestor


def waiting(job: Detached, run: str, number: int) -> int:
    """The agent of the standby with this number, once masters hear it."""

    def agent() -> int | None:
        found = processes_of(run, with_env=f"DLROVER_SEAT={names.standby('later', 'worker', number)}")
        return next((one for one in found if parent_of(one) not in found), None)

    found = eventually(agent, f"standby {number}")
    says = "standbys: 1 of 1 wait"
    eventually(lambda: says in job.says("dlrover", "status", "ray:later", status=None), f"standby {number} waits")
    return found


def keepers(ground: RayGround) -> str:
    """The names of the masters' keepers that run."""
    return " ".join(ground.order("named", namespace="dlrover-masters"))


def run_of(job: str) -> str:
    """The run that a job's masters keep."""
    [pid] = masters_of(job)
    return variable(pid, "DLROVER_RUN")
