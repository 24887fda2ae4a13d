"""A job of `dlrover-run --backend ray`: it trains in actors' keeping, an actor is killed, and nothing stays in the cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import dlrover
from running import SCRIPTS, Job, eventually
from tests.integration.ray_grounds import RayGround, desk_of, keeper_of, parent_of, processes_of, ray_ground

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]
QUICK = ("--bind", "127.0.0.1", "--set", "stop_grace_s=5", "--nnodes", "2")


@pytest.fixture(name="ground", scope="module")
def made_ground() -> Iterator[RayGround]:
    """Two hosts."""
    with ray_ground({"num_cpus": 1, "node_name": "first"}, {"num_cpus": 1, "node_name": "second"}) as ground:
        yield ground


def job_of(
    ground: RayGround, folder: Path, *more: str, resources: str = "CPU=1", script: str = "allreducing.py"
) -> Job:
    """A job of two nodes."""
    line = ("--backend", "ray", "--ray-address", ground.address, "--resources", resources, *QUICK, *more)
    return Job(folder, *line, str(SCRIPTS / script), str(folder))


def dlrover_ray(ground: RayGround, *words: str) -> str:
    """What ``dlrover ray`` says."""
    done = dlrover(["ray", *words, "--ray-address", ground.address])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("cluster", "script"),
    [
        ("ray_light", "light_steps.py"),
        pytest.param(
            *("ground", "allreducing.py"),
            marks=pytest.mark.nightly(
                reason="ranks without torch stand for it in make test, and on hosts test_hosts.py"
            ),
        ),
    ],
)
def test_an_actor_is_killed(request: pytest.FixtureRequest, tmp_path: Path, cluster: str, script: str) -> None:
    """The node is another actor, training goes on, the incident has Ray's word, and at the end nothing is left."""
    ground: RayGround = request.getfixturevalue(cluster)
    with job_of(ground, tmp_path, script=script) as job:
        job.trains(1, beyond=3)
        run = job.settings["run"]
        os.kill(keeper_of(run, "worker-1-0"), signal.SIGKILL)
        job.trains_after(1)
        job.finish()
        assert job.ended() == 0, job.said
        told = job.dlrover("explain")
        assert "WORKER_DIED" in told, told
        assert "worker-1-1" in told, told
    assert len(dlrover_ray(ground, "ls").splitlines()) == 1
    assert processes_of(run) == []


@pytest.mark.nightly(reason="a standby becomes a node by day in test_ray_backend")
def test_a_warm_node_takes_a_dead_ones_place(ground: RayGround, tmp_path: Path) -> None:
    """The agent that waited without a name trains as the next incarnation; another one is made, and at the end all are gone."""
    with job_of(ground, tmp_path, "--standby", "1", resources="CPU=0.5") as job:
        job.trains(1, beyond=3)
        run = job.settings["run"]
        job.until(lambda status: status["standbys"] == 1, "a standby that waits")
        [warm] = {parent_of(pid) for pid in processes_of(run, with_env="DLROVER_STANDBY=worker")} - set(
            processes_of(run)
        )
        os.kill(keeper_of(run, "worker-1-0"), signal.SIGKILL)
        job.trains_after(1)
        assert Path(f"/proc/{warm}").exists()
        job.until(lambda status: status["standbys"] == 1, "another standby")
        job.finish()
        assert job.ended() == 0, job.said
        assert "standby" in job.dlrover("explain")
    assert len(dlrover_ray(ground, "ls").splitlines()) == 1
    assert processes_of(run) == []


@pytest.mark.nightly(
    reason="Ray gives up a raylet after seconds, and three of its deaths are told apart by day in test_ray_lookout"
)
def test_a_raylet_is_frozen_past_its_death_and_thawed(tmp_path: Path) -> None:
    """Nodes that are heard are kept while Ray calls their host dead. Thawed, the raylet ends with its agents; others begin."""
    with ray_ground({"num_cpus": 2, "node_name": "first"}, {"num_cpus": 2, "node_name": "second"}) as ground:
        hosts = dict(zip(("first", "second"), ground.hosts, strict=True))
        with job_of(ground, tmp_path) as job:
            job.trains(1, beyond=3)
            run = job.settings["run"]
            [host] = [one for one in hosts if processes_of(run, "worker-1-0", with_env=f"DLROVER_HOST={one}")]
            old = processes_of(run, with_env=f"DLROVER_HOST={host}")
            ground.order("signal", host=hosts[host], name="SIGSTOP")
            eventually(lambda: "HostUnreached" in job.dlrover("events"), "Ray gives the host up")
            step = job.until(bool, "a status")["step"]
            status = job.until(lambda status: status["step"] > step + 3, "steps on a host that Ray calls dead")
            assert status["generation"] == 1
            ground.order("signal", host=hosts[host], name="SIGCONT")
            eventually(lambda: not set(old) & set(processes_of(run)), "the end of the old agents")
            job.trains_after(1)
            job.finish()
            assert job.ended() == 0, job.said
        assert processes_of(run) == []


@pytest.mark.nightly(reason="clearing is tried by day in test_ray_backend, and after a good end in the test above")
def test_ctrl_c_leaves_nothing(ground: RayGround, tmp_path: Path) -> None:
    """A job that is interrupted leaves no actor, no placement group, and no process."""
    with job_of(ground, tmp_path) as job:
        job.trains(1, beyond=1)
        run = job.settings["run"]
        job.process.send_signal(signal.SIGINT)
        assert job.ended() != 0
    assert len(dlrover_ray(ground, "ls").splitlines()) == 1
    assert processes_of(run) == []


@pytest.mark.nightly(reason="what is removed is tried by day in test_ray_backend")
def test_what_a_killed_launcher_leaves_is_removed(ground: RayGround, tmp_path: Path) -> None:
    """Nodes go on when all of ours on this side was killed; `dlrover ray ls` shows them, and `rm` ends them."""
    with job_of(ground, tmp_path) as job:
        job.trains(1, beyond=1)
        run = job.settings["run"]
        for one in job.processes("dlrover-master"):
            one.kill()
        job.process.kill()
        job.process.wait()
        desk = desk_of(tmp_path)
    assert "e2e" in dlrover_ray(ground, "ls")
    assert processes_of(run)
    # Elsewhere nobody knows of that run: the name is refused, before anything is started.
    (tmp_path / "elsewhere").mkdir()
    with job_of(ground, tmp_path / "elsewhere") as second:
        assert second.ended() == 2
        assert f"'e2e' is in use in this cluster, where 2 nodes of its run {run} live" in second.said(), second.said()
    assert f"removed job e2e, run {run}" in dlrover_ray(ground, "rm", "e2e")
    assert len(dlrover_ray(ground, "ls").splitlines()) == 1
    assert processes_of(run) == []
    eventually(lambda: not Path(f"/proc/{desk}").exists(), "the end of a desk that nobody needs")
