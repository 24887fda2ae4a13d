import os
import subprocess
import sys
from pathlib import Path

from running import SCRIPTS

from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal


def test_a_step_loads_with_plain_torch_in_another_world(tmp_path: Path) -> None:
    """What three ranks wrote is loaded by torch alone into DTensors and FSDP2 models of one rank and of two, bit for bit."""
    import torch
    from tests.unit.stored import sharded, state

    place = Place(str(tmp_path / "run"))
    for arena in sharded(state(), 3):
        write_part(arena.view(), place, run="r")
    seal(place, 120, range(3))
    step = str(tmp_path / "run" / "step-0000000120")
    line = [sys.executable, str(SCRIPTS / "forked.py"), str(SCRIPTS / "resharding.py")]
    line += ["1", step, str(tmp_path / "store-1"), "--", "2", step, str(tmp_path / "store-2")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    for world in (1, 2):
        found = torch.load(tmp_path / f"store-{world}.found", weights_only=True)
        assert torch.equal(found["weight"], state()["model.weight"])
        assert torch.equal(found["moment"], state()["optimizer.state.weight.exp_avg"])
