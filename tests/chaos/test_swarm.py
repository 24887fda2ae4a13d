"""The smoke size of the campaign `chaos`: fixed seeds keep every promise and strike where they used to, mended stays mended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.chaos.swarm_seeds import COVERAGE, SMOKE, SMOKE_NODES, TWICE_EVERY, regressions, run, trial

from dlrover_core.testing.coverage import gone, load, merged, table
from dlrover_core.testing.regressions import Regression


@pytest.mark.parametrize("old", regressions(), ids=lambda old: old.why[:60] or old.token)
def test_regressions(old: Regression) -> None:
    """A plan that once broke a promise does not."""
    run(old.plan)


@pytest.mark.timeout(600)  # ten seconds of one core, which may be shared
def test_smoke() -> None:
    """No seed breaks a promise, and every kind of fault strikes in all the states in which it used to."""
    found = {seed: trial(seed, SMOKE_NODES) for seed in SMOKE}
    broken = {seed: told["failure"] for seed, told in found.items() if "failure" in told}
    assert not broken, "\n".join(
        line
        for seed, told in broken.items()
        for line in [
            f"seed {seed}:",
            *told["faults"],
            told["scenario"],
            *told["told"],
            f"python -m tests.chaos.swarm_seeds {told['token']}",
        ]
    )
    hits = merged({(kind, state): many for kind, state, many in told["hits"]} for told in found.values())
    sys.stdout.writelines(f"{line}\n" for line in table(hits))
    missed = gone(load(COVERAGE), hits)
    assert not missed, f"no longer hit: {missed}; if the engine changed on purpose, python -m tests.chaos.swarm_seeds"


def test_the_same_in_every_process() -> None:
    """A seed makes one log, whatever the salt of hashes."""
    seeds = list(SMOKE[:: TWICE_EVERY * 2])
    code = f"from tests.chaos.swarm_seeds import trial; print([trial(seed, 8).get('log') for seed in {seeds}])"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ).stdout.strip()
        for salt in ("0", "12345")
    }
    assert told == {str([trial(seed, SMOKE_NODES)["log"] for seed in seeds])}
