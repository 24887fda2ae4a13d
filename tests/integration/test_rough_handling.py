"""Rough handling: whatever of ours dies, stops or runs full, at whatever moment, the losses are those of an undisturbed run.

Each story is one job of two ranks that trains a model (`scripts/curve.py`) whose every loss depends on all steps before it; what
is not a loss of rank 0's undisturbed twin, a step made twice without need, or two generations at once, is found by `intact`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from rough import (
    CURVE,
    QUICK,
    Curve,
    Story,
    deadly_log,
    fill,
    go_on,
    kill_traced,
    let_go,
    next_fork,
    small_disk,
    trace_forks,
)
from running import Process, eventually
from tools.campaign_kills import Kill, hunt

TWO_NODES = ("--local-nodes", "2", "--max-restarts", "100", "--preload", "")
ONE_NODE = ("--nproc-per-node", "2", "--max-restarts", "100")
PACED = ("--pause", "0.02")

pytestmark = pytest.mark.alone(reason="kills aim at moments, and silence is told by the clock")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """What the losses should be."""
    made = Curve(tmp_path_factory.mktemp("undisturbed"))
    made.losses(400)
    return made


def ends_well(job: Story, undisturbed: Curve) -> None:
    """Let the job end: it succeeds, its curve is whole and nothing is left."""
    job.finish()
    assert job.ended() == 0
    job.intact(undisturbed)
    assert job.left() == []


def leader(job: Story) -> Process:
    """The master that leads."""
    status = job.until(lambda _: True, "a leader")
    return Process(int(status["leader"].split("/")[1]), "dlrover-master", "")


def keeper_of_store(job: Story) -> Process:
    """The keeper that serves the store of the world that is forming."""
    port = int(job.events("WorldFormed")[-1]["fields"]["store"].rpartition(":")[2])
    open_ports = psutil.net_connections("tcp")
    pid = next(one.pid for one in open_ports if one.status == psutil.CONN_LISTEN and one.laddr.port == port)
    return next(one for one in job.processes("dlrover-keeper") if one.pid == pid)


def test_kills_while_starting_and_forming(tmp_path: Path, undisturbed: Curve) -> None:
    """Zygote and agent killed while they import; workers and the store's keeper while the world forms, in every state of it."""
    with Story(tmp_path, *TWO_NODES, CURVE, *PACED) as job:
        job.hold("begin", 1)
        job.hold("formed", 0, 1)
        # Both while they import: neither is yet what it is to be.
        agents = eventually(
            lambda: (found := job.processes("", "cli.agent ")) and len(found) == 2 and found, "two agents"
        )
        job.one("", "agent.zygote", f"--agent {agents[0].pid} ").kill()
        agent = agents[1]
        agent.kill()
        agent.ends()

        # Rank 0 waits for its peers, rank 1 has not yet asked for them.
        job.at("begin", 0, 1)
        job.at("begin", 1, 1).kill()
        job.at("begin", 1, 2)
        job.at("begin", 0, 2).kill()
        both = [job.at("begin", rank, 3) for rank in (0, 1)]
        for one in both:
            one.kill()
        job.at("begin", 0, 4)
        job.at("begin", 1, 4)
        keeper_of_store(job).kill()
        job.at("begin", 0, 5)
        job.at("begin", 1, 5)
        job.release("begin")

        # The group is up, no step is made.
        job.at("formed", 0, 5)
        job.at("formed", 1, 5).kill()
        job.at("formed", 1, 6)
        job.at("formed", 0, 6).kill()
        job.at("formed", 0, 7)
        job.at("formed", 1, 7)
        job.release("formed")
        job.recovers(7)
        job.intact(undisturbed)

        # Forming again, after steps were made: the second blow falls while the first is mended, and on the node's agent.
        job.hold("begin", 0)
        job.one("worker-1").kill()
        second = job.at("begin", 1, 8)
        job.at("begin", 0, 8)  # else its agent, still stopping the life before, may pass over this one
        second.kill()
        job.at("begin", 0, 9)
        agent = job.agent(1)
        agent.kill()
        agent.ends()
        job.at("begin", 0, 10)
        job.release("begin")
        job.recovers(10)
        ends_well(job, undisturbed)
        assert job.lives()[0] == 10


def test_silence_is_not_death(tmp_path: Path, undisturbed: Curve) -> None:
    """An agent is stopped for three silence timeouts: its workers train on, and when it goes on nobody has been restarted."""
    with Story(tmp_path, *QUICK, *TWO_NODES, CURVE, *PACED) as job:
        job.recovers(1)
        agent = job.agent(1)
        agent.kill(signal.SIGSTOP)
        job.until(lambda now: now["nodes"]["worker-1-0"]["state"] == "suspect", "the silence is noticed")
        job.steps(60)
        agent.kill(signal.SIGCONT)
        job.until(lambda now: now["nodes"]["worker-1-0"]["state"] == "running", "it is heard again")
        job.steps()
        job.intact(undisturbed)
        assert job.lives() == [1, 1]
        assert job.events("IncidentOpened") == []

        # Stopped again, and its worker dies meanwhile: nobody can say so, until the peer does.
        agent.kill(signal.SIGSTOP)
        for rank in (0, 1):
            job.one(f"worker-{rank}").kill()
        agent.kill(signal.SIGCONT)
        job.recovers(2)
        job.intact(undisturbed)
        assert job.lives() == [2, 2]
        ends_well(job, undisturbed)


def spares(job: Story) -> None:
    """Wait until both spares of the one node are there."""
    eventually(lambda: len(job.processes("dlrover-spare")) == 2, "two spares")


def test_kills_of_what_stands_behind_the_workers(tmp_path: Path, undisturbed: Curve) -> None:
    """Two workers at once; zygote, keeper and spares without a worker noticing; the go-between in the act, twice."""
    with Story(tmp_path, *ONE_NODE, CURVE, *PACED) as job:
        job.recovers(1)
        for one in [job.one(f"worker-{rank}") for rank in (0, 1)]:
            one.kill()
        job.recovers(2)
        job.intact(undisturbed)
        assert job.lives() == [2, 2]

        spares(job)
        for name in ("dlrover-zygote", "dlrover-keeper", "dlrover-spare"):
            victim = job.one(name)
            victim.kill()
            victim.ends()
        job.steps(20)
        assert job.lives() == [2, 2], "a worker was restarted"
        # There is neither a whole set of spares nor a zygote that is warm, and the store is new.
        job.one("worker-0").kill()
        job.recovers(3)
        job.intact(undisturbed)

        # The go-between, at birth: nothing was forked. Then just after it forked: a child that nobody was told of.
        for grandchild in (False, True):
            spares(job)
            zygote = job.one("dlrover-zygote")
            lives = job.lives()[0]
            trace_forks(zygote)
            job.one("worker-1").kill()
            between = next_fork(zygote)
            if grandchild:
                go_on(between)
                let_go(next_fork(between, fatal=True))
            else:
                kill_traced(between)
            job.recovers(lives + 1)
            job.intact(undisturbed)
            spares(job)
        ends_well(job, undisturbed)


def test_masters_die_between_append_and_levelling(tmp_path: Path, undisturbed: Curve) -> None:
    """Whatever was decided last is durable and nobody was told: the next master does it, once.

    The job's first event, the first world, a node to be replaced, a world formed again, the end.
    """
    env = deadly_log(tmp_path / "plugin")
    log, plain = f"deadly:{tmp_path}/deadly.db", ("--log", f"sqlite:{tmp_path}/deadly.db")

    def deadly(*events: str) -> None:
        for event in events:
            (tmp_path / f"kill-after-{event}").touch()

    def struck(event: str) -> None:
        eventually(lambda: not (tmp_path / f"kill-after-{event}").exists(), f"a master dies of {event}")

    deadly("JobCreated", "WorldFormed", "NodeJoined")
    with Story(tmp_path, *TWO_NODES, "--log", log, CURVE, *PACED, env=env) as job:
        for event in ("JobCreated", "NodeJoined", "WorldFormed"):
            struck(event)
        job.recovers(1)
        deadly("WorldFormed")
        job.one("worker-1").kill()
        struck("WorldFormed")
        job.recovers(2)
        job.intact(undisturbed)
        deadly("NodePlanned")
        job.agent(1).kill()
        struck("NodePlanned")
        job.recovers(job.lives()[0] + 1)
        job.intact(undisturbed)
        deadly("JobSucceeded")
        ends_well(job, undisturbed)
        struck("JobSucceeded")
        events = [json.loads(line)["event"] for line in job.dlrover("events", "--json", *plain).splitlines()]
        # Each death cost one leader, of whom the last had nothing to lead any more; nothing was decided twice.
        assert events.count("LeaderStarted") == 5
        assert (events.count("JobCreated"), events.count("NodePlanned"), events.count("JobSucceeded")) == (1, 3, 1)


def test_full_disks_stop_no_training(tmp_path: Path, undisturbed: Curve) -> None:
    """No room for workers' output: they train on, and restart. No room for the log: decisions wait until there is."""
    folder = tmp_path / "job"
    with contextlib.ExitStack() as stack:
        try:
            logs = stack.enter_context(small_disk(tmp_path / "logs", 4, inodes=200))
            state = stack.enter_context(small_disk(folder / "state", 8))
        except PermissionError as error:
            pytest.skip(f"a small file system cannot be mounted here: {error}")
        job = stack.enter_context(Story(folder, *QUICK, *ONE_NODE, "--log-dir", str(logs), "-t", "3", CURVE, *PACED))
        job.recovers(1)
        ballast = fill(logs)
        job.steps(20)
        assert job.lives() == [1, 1]
        job.one("worker-0").kill()
        job.recovers(2)
        job.intact(undisturbed)
        shutil.rmtree(ballast)

        ballast = fill(state, state / "jobs" / "e2e" / "control.log")
        job.steps(20)
        assert job.lives() == [2, 2]
        job.one("worker-1").kill()
        job.until(lambda now: "LogFull" in now["degraded"], "the leader says why decisions wait")
        # Nor is there room to log that these were replaced.
        fill(state, state / "jobs" / "e2e" / "control.log")
        for name in ("dlrover-keeper", "dlrover-zygote"):
            victim = job.one(name)
            victim.kill()
            victim.ends()
        assert job.lives() == [2, 2]
        shutil.rmtree(ballast)
        # The world that could not be logged was to meet in the store of the keeper that died meanwhile: it ends at once,
        # sometimes when its script has just begun.
        job.recovers(3, in_vain=True)
        job.until(lambda now: not now["degraded"], "decisions are made again")
        ends_well(job, undisturbed)
        assert job.events("LeaderStarted") == [], "the first leader has led all the time"


def test_kills_while_the_job_ends(tmp_path: Path, undisturbed: Curve) -> None:
    """A rank killed when the other has finished; then, while SIGTERM stops the next job, the leader, an agent and a zygote."""
    with Story(tmp_path, *TWO_NODES, CURVE, *PACED) as job:
        job.hold("done", 1)
        job.recovers(1)
        job.finish()
        last = job.at("done", 1)
        job.at("left", 0).ends()
        last.kill()
        job.at("done", 1, 2)
        job.release("done")
        assert job.ended() == 0
        job.intact(undisturbed)
        assert job.lives() == [2, 2]
        assert job.left() == []
        assert len(job.events("JobSucceeded")) == 1
    folder = tmp_path / "stopped"
    folder.mkdir()
    with Story(folder, *TWO_NODES, CURVE, *PACED) as job:
        job.recovers(1)
        job.hold("terminated", 0, 1)
        job.process.terminate()
        for rank in (0, 1):
            job.at("terminated", rank)
        for victim in (leader(job), job.one("dlrover-zygote"), job.agent(1)):
            victim.kill()
        job.release("terminated")
        assert job.ended() == 143
        assert job.left() == []
        assert len(job.events("JobStopped")) == 1
        job.intact(undisturbed)


def test_random_kills(tmp_path: Path, undisturbed: Curve) -> None:
    """The smoke size of the campaign `kills`: processes of every kind die at seeded moments, and the curve is whole."""
    kills = list[Kill]()
    hunt(tmp_path, 25, range(1, 9), kills.extend, undisturbed=undisturbed, pause=0.02)
    assert [one.number for one in kills] == list(range(1, 9))
    assert {one.kind for one in kills} >= {"worker", "loader", "agent", "master"}
