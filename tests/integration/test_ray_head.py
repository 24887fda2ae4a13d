"""The cluster's state service is killed and comes back: training goes on, and what ran is known again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from running import SCRIPTS, Job, eventually
from tests.integration.ray_grounds import RayGround, desk_of, keeper_of, processes_of, ray_ground

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(400),
    pytest.mark.nightly(
        reason="an outage takes its time; by day test_ray_backend kills the desk, which holds what Ray says"
    ),
]
ON_DISK = (2, 60)
"""The first Ray whose state service may keep its state in files."""
AWAY_S = 20.0
DESK_SHARE = 0.2
"""The desk may use so much of a core. It needs some hundredths; Ray's threads without a pause took all that was free."""
QUICK = ("--bind", "127.0.0.1", "--set", "stop_grace_s=5", "--nnodes", "2")


@pytest.fixture(name="ground", scope="module")
def made_ground() -> Iterator[RayGround]:
    """Two hosts, of a cluster whose state is on disk."""
    if tuple(map(int, version("ray").split(".")[:2])) < ON_DISK:
        pytest.skip("this Ray keeps no state on disk")
    first, second = {"num_cpus": 2, "node_name": "first"}, {"num_cpus": 2, "node_name": "second"}
    with ray_ground(first, second, env={"RAY_gcs_storage": "rocksdb"}) as ground:
        yield ground


def test_the_state_service_is_away(ground: RayGround, tmp_path: Path) -> None:
    """Training goes on, and a worker killed meanwhile is back at once; nothing is launched anew, then or later.

    When the state service is back all is known again: an actor that is killed then is replaced.
    """
    line = ("--backend", "ray", "--ray-address", ground.address, "--resources", "CPU=1", *QUICK)
    with Job(tmp_path, *line, str(SCRIPTS / "allreducing.py"), str(tmp_path)) as job:
        job.trains(1, beyond=3)
        run = job.settings["run"]
        ground.order("state", **{"is": "gone"})
        away = time.monotonic()
        os.kill(int(job.told(1)[-1][1]), signal.SIGKILL)
        job.trains(2, beyond=3)
        desk = psutil.Process(desk_of(tmp_path))
        began, used = time.monotonic(), sum(desk.cpu_times()[:2])
        eventually(lambda: time.monotonic() - away > AWAY_S, "the outage's end")
        share = (sum(desk.cpu_times()[:2]) - used) / (time.monotonic() - began)
        assert share < DESK_SHARE, "Ray's threads ask without a pause"
        step = job.trains(2)["step"]
        ground.order("state", **{"is": "back"})
        job.trains(2, beyond=step)
        os.kill(keeper_of(run, "worker-0-0"), signal.SIGKILL)
        job.until(lambda status: "worker-0-1" in status["nodes"] and not status["open_incidents"], "another node")
        job.finish()
        assert job.ended() == 0, job.said()
        assert [one["fields"]["node"] for one in job.events("NodePlanned")] == [
            "worker-0-0",
            "worker-1-0",
            "worker-0-1",
        ]
        assert "keeps its state in memory" not in job.said()
    assert processes_of(run) == []
