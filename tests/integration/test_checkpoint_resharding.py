import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.unit.stored import sharded, state

from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal

SCRIPT = Path(__file__).parent / "scripts" / "resharding.py"


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_loads_with_plain_torch_in_another_world(tmp_path: Path, world: int) -> None:
    """What three ranks wrote is loaded by torch alone into DTensors and FSDP2 models of one rank and of two, bit for bit."""
    place = Place(str(tmp_path / "run"))
    for arena in sharded(state(), 3):
        write_part(arena.view(), place, run="r")
    seal(place, 120, range(3))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run" / "step-0000000120"), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [one.communicate(timeout=90)[1] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0] * world, "\n".join(said)
    found = torch.load(tmp_path / "store.found", weights_only=True)
    assert torch.equal(found["weight"], state()["model.weight"])
    assert torch.equal(found["moment"], state()["optimizer.state.weight.exp_avg"])
