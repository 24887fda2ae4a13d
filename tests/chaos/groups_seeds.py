"""Seeded histories of jobs with several groups: what the smoke test and the campaign `groups_seeds` do with a seed.

A job of two to four groups is drawn, coupled and not, on hosts that may be too few for a while, and faults of all kinds. Most
seeds are simulated with the real engine; each tenth is played by the real masters and agents.
``python -m tests.chaos.groups_seeds SEED`` runs one again, ``... TOKEN`` a plan.
"""

from __future__ import annotations

import sys
from typing import Any

from dlrover_core.sim.faults import ENGINE, LOOP
from dlrover_core.sim.run import Run
from dlrover_core.sim.scenario import Plan, plan_of
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.chaos import scenario_line
from dlrover_core.testing.invariants import DEFAULT
from dlrover_core.testing.promises import Together
from dlrover_core.testing.shrink import shrink
from dlrover_core.testing.stage import play
from dlrover_core.testing.swarm_groups import draw_groups

PLAYED_EVERY = 10


def drawn(seed: int) -> Plan:
    """The plan of a seed."""
    return draw_groups(seed, level=LOOP if seed % PLAYED_EVERY == PLAYED_EVERY - 1 else ENGINE)


def run(plan: Plan) -> Run:
    """Run a plan at its level, every promise asked after every event. Raises what a broken one raises."""
    promises = Together(*DEFAULT)
    told = simulate(plan, watch=[promises]) if plan.level == ENGINE else play(plan, watch=[promises])
    promises.end(told)
    return told


def trial(seed: int) -> dict[str, Any]:
    """Run a seed; what came of it. Raises AssertionError with the least plan that breaks what it broke."""
    plan = drawn(seed)
    try:
        told = run(plan)
    except Exception as error:
        least = shrink(plan, run, error=error)
        faults = "; ".join(map(str, least.plan.faults))
        raise AssertionError(f"{least.error} [{faults}] {least.plan.token()}") from error
    return {
        "events": told.events,
        "incidents": told.state.incidents.number,
        "worlds": sum(one.generation for one in told.state.world.worlds.values()),
        "struck": len(told.struck),
        told.outcome: 1,
        "log": told.log_hash,
    }


def main() -> None:
    """See above."""
    plan = drawn(int(sys.argv[1])) if sys.argv[1].isdigit() else plan_of(sys.argv[1])
    sys.stdout.writelines(f"{line}\n" for line in [scenario_line(plan.scenario), *map(str, plan.faults)])
    told = run(plan)
    sys.stdout.write(f"{told.outcome} {told.root}\n{told.events} events, {told.virtual_s:.1f} s, log {told.log_hash}\n")


if __name__ == "__main__":
    main()
