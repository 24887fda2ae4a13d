"""The examples of Ray: a loop of Ray Train that was carried over, and a pipeline of Ray Data that outlives its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Job
from tests.integration.ray_grounds import RayGround, ray_ground

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(300),
    pytest.mark.nightly(
        reason="a job of Ray that torch trains, and whose actor is killed, is tried by day in test_ray_job"
    ),
]
EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
QUICK = ("--bind", "127.0.0.1", "--set", "stop_grace_s=5", "--resources", "CPU=1")


@pytest.fixture(name="ground", scope="module")
def made_ground() -> Iterator[RayGround]:
    """Two hosts."""
    with ray_ground({"num_cpus": 2, "node_name": "first"}, {"num_cpus": 2, "node_name": "second"}) as ground:
        yield ground


def run(ground: RayGround, folder: Path, example: str, *words: str, nodes: str = "2") -> str:
    """A job that ends well; what it prints."""
    line = ("--backend", "ray", "--ray-address", ground.address, "--nnodes", nodes, *QUICK, str(EXAMPLES / example))
    with Job(folder, *line, *words) as job:
        assert job.ended(150.0) == 0, job.said()
        return job.out.read_text() + job.said()


def test_a_loop_of_ray_train(ground: RayGround, tmp_path: Path) -> None:
    """A rank kills itself, and the loop goes on from a step shortly before."""
    said = run(ground, tmp_path, "torch_trainer.py", "--checkpoint", str(tmp_path / "ckpt"), "--die-at", "30")
    assert "2 ranks, 60 steps" in said, said
    assert "restored from step 30" in said or "restored from step 25" in said, said


def test_a_pipeline_of_ray_data(ground: RayGround, tmp_path: Path) -> None:
    """A rank kills itself, and the rest is trained by one rank: each sample counts once in each epoch all the same."""
    folder = ("--folder", str(tmp_path / "points"))
    said = run(ground, tmp_path, "data_pipeline.py", *folder, "--epochs", "1", "--die-at", "8")
    assert "each counts once in each epoch" in said, said
    (tmp_path / "again").mkdir()
    said = run(ground, tmp_path / "again", "data_pipeline.py", *folder, "--epochs", "2", nodes="1")
    assert "1 ranks" in said, said
    assert "each counts once in each epoch" in said, said
