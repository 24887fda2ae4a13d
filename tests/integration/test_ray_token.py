"""A Ray cluster with token authentication: a wrong token is told as such, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import said
from running import SCRIPTS, WITHOUT_TORCH, Job
from tests.integration.ray_grounds import RayGround, processes_of, ray_ground

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(300),
    pytest.mark.nightly(
        reason="a cluster with a token of its own; by day test_ray_settings has the words that Ray said here"
    ),
]
RIGHT, WRONG = ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": digit * 64} for digit in "ab")
TOLD = "does not take this token (RPC error: InvalidAuthToken: Authentication token is missing or incorrect"


@pytest.fixture(name="ground", scope="module")
def made_ground() -> Iterator[RayGround]:
    """One host."""
    with ray_ground({"num_cpus": 1, "node_name": "first"}, env={**WITHOUT_TORCH, **RIGHT}) as ground:
        yield ground


@pytest.mark.parametrize("how", [(), ("--detach",)], ids=["attached", "detached"])
@pytest.mark.parametrize("token", [WRONG, {}], ids=["wrong", "none"])
def test_a_wrong_token_is_told(ground: RayGround, tmp_path: Path, token: dict[str, str], how: tuple[str, ...]) -> None:
    """The command ends at once, and says what to set. No job was begun."""
    line = (
        "--backend",
        "ray",
        "--ray-address",
        ground.address,
        "--nnodes",
        "1",
        "--state-dir",
        str(tmp_path / "state"),
    )
    env = {**os.environ, **token, "HOME": str(tmp_path)}
    words = said("dlrover-run", (*how, *line, "--job-id", "j", str(SCRIPTS / "until_told.py"), "."), env, tmp_path, 2)
    assert TOLD in words, words
    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in words, words
    assert not (tmp_path / "state" / "jobs" / "j" / "settings.json").exists()


def test_the_right_token_reaches_nodes(ground: RayGround, tmp_path: Path) -> None:
    """A job with the cluster's token trains, and nothing of it is left."""
    line = ("--backend", "ray", "--ray-address", ground.address, "--nnodes", "1", "--resources", "CPU=1")
    (tmp_path / "end").touch()
    script = (str(SCRIPTS / "until_told.py"), str(tmp_path))
    with Job(tmp_path, *line, "--bind", "127.0.0.1", "--preload", "none", *script, env=RIGHT) as job:
        assert job.ended() == 0, job.said()
    assert list(tmp_path.glob("rank-*"))
    assert processes_of(job.settings["run"]) == []
