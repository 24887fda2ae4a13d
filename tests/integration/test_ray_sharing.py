"""Two jobs of ours in one Ray cluster, each of which holds what the other one needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Job, eventually
from tests.integration.ray_grounds import RayGround, processes_of, ray_ground

BOUND_S = 180.0


def job_of(ground: RayGround, folder: Path, *more: str) -> Job:
    """A job that takes two whole hosts, and gives back after 20 s what does not suffice."""
    folder.mkdir()
    line = ("--backend", "ray", "--ray-address", ground.address, "--resources", "CPU=1", "--bind", "127.0.0.1")
    times = ("--set", "stop_grace_s=5", "--set", "gang_s=20", "--nnodes", "2")
    return Job(folder, *line, *times, *more, str(SCRIPTS / "light_steps.py"), str(folder), job=folder.name)


@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(600)
@pytest.mark.nightly(reason="half a minute passes until a job gives back; tests/unit/test_given_back.py has the rule")
def test_two_jobs_that_wait_for_each_other(tmp_path: Path) -> None:
    """A host dies, and each job has one of the two that are left: one of them gives its own back, and they train in turn."""
    hosts: tuple[dict[str, Any], ...] = (
        {"num_cpus": 1, "node_name": "first", "labels": {"zone": "b"}},
        {"num_cpus": 1, "node_name": "third"},
    )
    # On a busy machine Ray may give a host up that lives; one that is dead its host itself tells of.
    with ray_ground(*hosts, env={"RAY_health_check_failure_threshold": "120"}) as ground:
        third = ground.hosts[1]
        with job_of(ground, tmp_path / "ja") as first:
            first.trains(1)
            ground.add(num_cpus=1, node_name="second", labels={"zone": "b"})
            with job_of(ground, tmp_path / "jb", "--label", "zone=b") as second:
                half = "DLROVER_HOST=second"
                eventually(
                    lambda: bool(processes_of(second.settings.get("run", "?"), with_env=half)), "a node of jb", BOUND_S
                )
                ground.order("signal", host=third, name="SIGKILL")
                before = {first.name: 1, second.name: 0}

                def trains(job: Job) -> bool:
                    status = job.status()
                    return status is not None and status["generation"] > before[job.name] and job._well(status)

                ahead = eventually(
                    lambda: next((one for one in (first, second) if trains(one)), None), "one job that trains", BOUND_S
                )
                assert first.events("GivenBack") or second.events("GivenBack")
                ahead.finish()
                assert ahead.ended() == 0, ahead.said()
                behind = second if ahead is first else first
                eventually(lambda: trains(behind), "the other job trains", BOUND_S)
                behind.finish()
                assert behind.ended() == 0, behind.said()
                left = ground.order("left", prefix="dlrover:")
                assert (left["actors"], left["groups"]) == ([], [])
