"""The demonstration at smoke size: real training, real data, three kinds of death."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_training_survives_three_kinds_of_death(tmp_path: Path) -> None:
    """A worker, a node and the leading master are killed; the digits are learnt from memory, the report names all three."""
    with (tmp_path / "out").open("w") as out:
        code = subprocess.run(
            [sys.executable, str(DEMO), "--steps", "120"], stdout=out, stderr=out, check=False
        ).returncode
    said = (tmp_path / "out").read_text()
    assert code == 0, said[-4000:]
    assert len(re.findall(r">>> step \d+: SIGKILL", said)) == 3
    assert "2 incidents, 1 restart of the processes, 1 relaunch of nodes" in said
    assert "master taken over 1 time" in said
    assert len(re.findall(r"^begins after step \d+, restored from memory$", said, re.MULTILINE)) == 2
    accuracy = re.search(r"accuracy on 360 held-out digits: ([0-9.]+) after 120 steps", said)
    assert accuracy is not None
    assert float(accuracy.group(1)) >= 0.9
