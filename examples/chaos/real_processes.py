"""Real processes: a script trains on while a worker, the master and a node are killed, and its loss curve does not show it.

    python -m pytest -p dlrover_core.testing.plugin examples/chaos/real_processes.py

The fixture `chaos` comes with dlrover-core; once that is installed, ``-p ...`` can be left out. `chaos.local` runs the script by
`dlrover-run` on this machine and strikes when its moment comes. Copy this file to try a script of yours: one that goes on from
its checkpoint, and tells which step it has made by `dlrover_adapters.torch.step`. Needs scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

from dlrover_core.testing import Chaos
from dlrover_core.testing.local import curve, same_curve

DIGITS = Path(__file__).resolve().parents[1] / "torch" / "ddp_digits.py"
STEPS = 80
WARM = ["--preload", "sklearn.datasets"]  # imported once for all workers that a node ever starts


def words(folder: Path) -> list[str]:
    """How the script is run: a checkpoint after every step, and every loss written down."""
    place = ["--checkpoint", str(folder / "digits.pt"), "--save-every", "1", "--curve", str(folder / "curve")]
    return ["--steps", str(STEPS), "--pause", "0.02", *place]


def test_nobody_can_tell_from_the_curve(chaos: Chaos, tmp_path: Path) -> None:
    """Two deaths of workers cost a step each at most, that of a master none, and every loss is the undisturbed run's."""
    peace, war = tmp_path / "peace", tmp_path / "war"
    chaos.local(script=DIGITS, nodes=1, workers_per_node=2, args=words(peace), folder=peace, options=WARM).finish()

    job = chaos.local(script=DIGITS, nodes=2, workers_per_node=1, args=words(war), folder=war, options=WARM)
    job.at_step(20).kill_worker(1)
    job.at("incident closed").crash_master()
    job.at_step(45).kill_node(1)
    run = job.finish()

    assert run.outcome == "succeeded"
    assert run.lost_steps <= 2
    same_curve(curve(war / "curve"), curve(peace / "curve"))
