"""What the smoke test and the campaign `chaos` do with a seed: a drawn job, drawn faults, every promise asked after every event.

``python -m tests.chaos.swarm_seeds`` writes anew which fault kinds the smoke seeds bring upon jobs in which states;
``python -m tests.chaos.swarm_seeds TOKEN`` runs a plan.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dlrover_core.sim.run import Run
from dlrover_core.sim.scenario import Plan
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.chaos import broken_lines, scenario_line
from dlrover_core.testing.coverage import merged, save
from dlrover_core.testing.invariants import DEFAULT
from dlrover_core.testing.promises import Together
from dlrover_core.testing.regressions import Regression, read, read_token
from dlrover_core.testing.shrink import shrink
from dlrover_core.testing.swarm import draw

HERE = Path(__file__).parent
COVERAGE = HERE / "coverage.txt"
REGRESSIONS = HERE / "regressions.txt"
SMOKE, SMOKE_NODES = range(200), 8
FAULTS_MAX = 20
TWICE_EVERY = 10


def run(plan: Plan) -> Run:
    """Run a plan. Raises `Broken` where it breaks a promise."""
    promises = Together(*DEFAULT)
    told = simulate(plan, watch=[promises])
    promises.end(told)
    return told


def trial(seed: int, nodes: int) -> dict[str, Any]:
    """A seed: what was hit and what came of it; of a broken promise what it takes to break it. Each tenth is run twice."""
    plan = draw(seed, nodes=nodes, faults_max=FAULTS_MAX)
    try:
        told = run(plan)
        if not seed % TWICE_EVERY:
            again = run(plan)
            assert again.log_hash == told.log_hash, f"one plan, two logs: {told.log_hash} and {again.log_hash}"
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a find
        return {"failure": failure(plan, error)}
    return {
        "events": told.events,
        "virtual_s": round(told.virtual_s),
        "steps": told.steps,
        "struck": len(told.struck),
        "missed": len(told.missed),
        "outcome": told.outcome,
        "log": told.log_hash,
        "hits": sorted([kind, state, many] for (kind, state), many in told.hits.items()),
    }


def failure(plan: Plan, error: BaseException) -> dict[str, Any]:
    """What broke, and the least plan that breaks it."""
    least = shrink(plan, run, error=error)
    return {
        "told": broken_lines(least.error),
        "faults": [str(fault) for fault in least.plan.faults],
        "scenario": scenario_line(least.plan.scenario),
        "drawn": len(plan.faults),
        "replays": least.replays,
        "token": least.plan.token(),
    }


def regressions() -> list[Regression]:
    """Plans that once broke a promise."""
    return read(REGRESSIONS) if REGRESSIONS.is_file() else []


def main() -> None:
    """See above."""
    if len(sys.argv) > 1:
        plan, _ = read_token(sys.argv[1])
        sys.stdout.writelines(f"{line}\n" for line in [scenario_line(plan.scenario), *map(str, plan.faults)])
        told = run(plan)
        sys.stdout.write(
            f"{told.outcome} {told.root}\n{told.events} events, {told.virtual_s:.1f} s, log {told.log_hash}\n"
        )
        return
    found = [trial(seed, SMOKE_NODES) for seed in SMOKE]
    hits = merged({(kind, state): many for kind, state, many in one.get("hits", ())} for one in found)
    save(COVERAGE, hits, "python -m tests.chaos.swarm_seeds")


if __name__ == "__main__":
    main()
