"""kill -9 of any one process of ours: the job goes on, or ends cleanly, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import BIN, SCRIPTS, Job, Process, eventually

STEPS = str(SCRIPTS / "steps.py")
LEADS_S = 15.0  # whoever is to lead may have to start first

BOTH = pytest.mark.nightly(reason="the other two, which have either, stand for it in make test")
ALONE = pytest.mark.alone(reason="another master has to lead within a few seconds")


def leader(status: dict[str, Any]) -> int:
    """The pid of the master that leads."""
    return int(status["leader"].split("/")[1])


def born(job: Job, rank: int) -> list[str]:
    """The pids of a rank's lives."""
    return [pid for what, pid in job.told(rank) if what == "born"]


def masters(job: Job) -> set[int]:
    """The pids of those that lead or stand by."""
    return {one.pid for one in job.processes("dlrover-master")}


def replaced(job: Job, victim: Process, before: set[int]) -> None:
    """Wait until there is a master that was not there before this one was killed."""
    victim.ends()
    eventually(lambda: masters(job) - before, "a new master")


def through_master(job: Job, out: Path) -> subprocess.Popen[bytes]:
    """`dlrover events --follow` of the job through its master, into a file."""
    url = f"http://{job.settings['masters'][0]}/e2e"
    line = [str(BIN / "dlrover"), "events", url, "--follow", "--state-dir", str(job.state)]
    with out.open("wb") as file:
        return subprocess.Popen(line, stdout=file)


@ALONE
@pytest.mark.timeout(150)
def test_any_one_process_may_be_killed(tmp_path: Path) -> None:
    """One job on two nodes outlives SIGKILL of a standby master, a leading one (running or stopped), a sweeper, a zygote, a

    keeper, a spare, all without a restarted worker; of a worker, with new processes; of an agent, with a new node. Then it
    succeeds, the log counts exactly the two incidents, and nothing is left.
    """
    with Job(tmp_path, "--local-nodes", "2", STEPS, "--child") as job:
        status = job.trains(1, beyond=5)
        follower = through_master(job, tmp_path / "followed")
        lives = [born(job, rank) for rank in (0, 1)]

        # Of those that no worker needs.
        standby = eventually(
            lambda: next((one for one in job.processes("dlrover-master") if one.pid != leader(status)), None),
            "a standby master",
        )
        before = masters(job)
        standby.kill()
        replaced(job, standby, before)
        for freeze in (False, True):
            first = Process(leader(job.trains(1)), "dlrover-master", "")
            before = masters(job)
            if freeze:
                first.kill(signal.SIGSTOP)
            first.kill()
            status = job.until(lambda now, dead=first: leader(now) != dead.pid, "another master leads", LEADS_S)
            replaced(job, first, before)
        job.sweeper.kill()
        for name in ("dlrover-zygote", "dlrover-keeper", "dlrover-spare"):
            victim = job.one(name, "--node worker-0-0") if name != "dlrover-spare" else job.one(name)
            victim.kill()
            victim.ends()
        job.trains(1, beyond=job.trains(1)["step"] + 20)
        assert [born(job, rank) for rank in (0, 1)] == lives, "a worker was restarted"

        # A worker: new processes for all, from what is left of the warm ones.
        worker = job.one("worker-1")
        worker.kill()
        job.trains(2, beyond=1000)
        assert [len(born(job, rank)) for rank in (0, 1)] == [2, 2], "two lives of each rank"

        # A node: another one takes its place.
        agent = job.one("dlrover-agent", "--node worker-1-0")
        agent.kill(signal.SIGSTOP)
        agent.kill()
        status = job.trains(3, beyond=2000)
        assert set(status["nodes"]) == {"worker-0-0", "worker-1-1"}

        # And a worker while the zygote and the keeper of its node are dead. (Killed at the same instant, the worker may be heard
        # of first, and the new world be given a store that dies with the keeper: that costs one more generation.)
        for name in ("dlrover-zygote", "dlrover-keeper"):
            victim = job.one(name, "--node worker-0-0")
            victim.kill()
            victim.ends()
        job.one("worker-0").kill()
        job.trains(4, beyond=3000)

        job.finish()
        assert job.ended() == 0
        assert job.left() == []
        chosen = [one["fields"]["action"] for one in job.events("ActionChosen")]
        assert chosen == ["RESTART_PROCESSES", "RELAUNCH_NODE", "RESTART_PROCESSES"]
        follower.terminate()
        follower.wait()
        followed = [int(line.split()[0]) for line in (tmp_path / "followed").read_text().splitlines()]
        assert followed == list(range(1, len(followed) + 1)), "through two leaders' deaths, none missed and none twice"
        assert "JobSucceeded" in (tmp_path / "followed").read_text()


@pytest.mark.parametrize(
    ("preload", "freeze"),
    [
        ("none", False),
        ("", True),
        pytest.param("none", True, marks=BOTH),
        pytest.param("", False, marks=BOTH),
    ],
)
def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path, preload: str, freeze: bool) -> None:
    """SIGKILL of `dlrover-run` itself ends masters, agents, workers and what workers started, and removes its sockets.

    A new run of the same name begins at once, and the log says that the old one was abandoned.
    """
    with Job(tmp_path, "--preload", preload, STEPS, "--child") as job:
        job.trains(1)
        if freeze:
            job.process.send_signal(signal.SIGSTOP)
        job.process.kill()
        assert job.ended() == -signal.SIGKILL
        assert job.left() == []
        child = next(int(pid) for what, pid in job.told() if what == "child")
        assert not Process(child, "sleep", "").lives
    if preload and not freeze:
        with Job(tmp_path, "--preload", preload, STEPS) as job:
            job.trains(2)
            assert job.told()[-1][0] == "born"
            assert job.until(lambda now: now["step"] > 0, "steps")["step"] < 1000, (
                "a new run begins as torchrun's does: with no restarts"
            )
            job.finish()
            assert job.ended() == 0
            assert job.left() == []
            kinds = [one["event"] for one in job.events("JobCreated", "JobAbandoned", "JobSucceeded")]
            assert kinds == ["JobCreated", "JobAbandoned", "JobCreated", "JobSucceeded"]


def test_a_launcher_killed_with_its_sweeper_is_swept_by_the_next(tmp_path: Path) -> None:
    """When nobody could end what a run left, the next launcher of this user does; what is in use stays."""
    with (
        Job(tmp_path, STEPS, "--child") as job,
        Job(_other(tmp_path), STEPS) as other,
    ):
        job.trains(1)
        other.trains(1)
        stale = Path(job.settings["run_dir"])
        job.sweeper.kill()
        job.process.kill()
        job.ended()
        eventually(lambda: not job.processes("dlrover-agent"), "the end of the agent with its launcher")
        assert stale.exists()
        with Job(tmp_path, STEPS, job="next") as following:
            eventually(lambda: not stale.exists(), "the sweep")
            assert job.left() == []
            assert Path(other.settings["run_dir"]).exists()
            other.trains(1, beyond=other.trains(1)["step"])
            following.finish()
            assert following.ended() == 0
        other.finish()
        assert other.ended() == 0


def _other(folder: Path) -> Path:
    made = folder / "other"
    made.mkdir()
    return made


@ALONE
def test_a_stopped_master_costs_nobody_a_node(tmp_path: Path) -> None:
    """The leading master is stopped for three silence timeouts and goes on: no node is relaunched, no worker restarted."""
    quick = ("--set", "silence_s=1", "--set", "heartbeat_s=0.2")
    with Job(tmp_path, *quick, STEPS) as job:
        status = job.trains(1)
        master = Process(leader(status), "dlrover-master", "")
        before = job.events()[-1]["at_us"]
        master.kill(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(3.5)  # what is waited for is that nothing happens for three silence timeouts
        master.kill(signal.SIGCONT)
        job.until(lambda now: now["agents"] == 1 and now["seq"] > status["seq"], "the master goes on")
        job.finish()
        assert job.ended() == 0
        kinds = {one["event"] for one in job.events() if one["at_us"] > before}
        assert "MasterPaused" in kinds
        assert not kinds & {"NodeLost", "NodeFailed", "NodePlanned", "IncidentOpened", "WorldFormed"}
        assert len(born(job, 0)) == 1
        assert job.left() == []


@ALONE
def test_a_leading_master_that_hangs_is_replaced(tmp_path: Path) -> None:
    """The leading master is stopped and a worker killed at once: the launcher says so, kills that master, and the job goes on.

    Nobody lets the stopped master go on: without the launcher the dead worker would wait for ever.
    """
    with Job(tmp_path, "--set", "hung_s=1", STEPS) as job:
        first = leader(job.trains(1))
        worker = job.one("worker-0")
        Process(first, "dlrover-master", "").kill(signal.SIGSTOP)
        worker.kill()
        job.until(lambda now: leader(now) != first, "another master leads", LEADS_S)
        job.trains(2)
        line = f"the master that leads (process {first}) has not answered for 1 s: it is stopped, as by SIGSTOP; it is killed"
        assert job.said().count("has not answered") == 1, job.said()
        assert line in job.said()
        job.finish()
        assert job.ended() == 0
        assert job.left() == []


@ALONE
@pytest.mark.nightly(reason="test_a_stopped_master_costs_nobody_a_node, with one pause, stands for it in make test")
@pytest.mark.timeout(180)
def test_pauses_of_masters_cost_nothing(tmp_path: Path) -> None:
    """Leader, reserve, zygote and keeper pause for 3 s, ten times: they are all still there, and no worker is restarted."""
    with Job(tmp_path, STEPS) as job:
        job.trains(1)
        eventually(lambda: len(masters(job)) == 2, "a reserve")
        names = ("dlrover-master", "dlrover-zygote", "dlrover-keeper")
        victims = [one for name in names for one in job.processes(name)]
        assert len(victims) == 4
        for _ in range(10):
            for one in victims:
                one.kill(signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                job.process.wait(3.0)  # what is waited for is that nothing happens
            for one in victims:
                one.kill(signal.SIGCONT)
            job.trains(1, beyond=job.trains(1)["step"])
        assert all(one.lives for one in victims)
        assert "has not answered" not in job.said()
        job.finish()
        assert job.ended() == 0
        assert len(born(job, 0)) == 1


def test_the_working_directory_cannot_break_the_launcher(tmp_path: Path) -> None:
    """A ``secrets.py`` or an ``http`` package of the user's in the working directory is not imported by masters and agents."""
    for name in ("secrets.py", "logging.py", "aiohttp.py", "msgpack.py", "structlog.py"):
        (tmp_path / name).write_text("raise RuntimeError('the user has such a module too')\n")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "main.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    with Job(tmp_path, "script/main.py") as job:
        assert job.ended() == 0
        assert job.out.read_text() == "rank 0\n"
        assert os.fspath(tmp_path) not in job.said()
