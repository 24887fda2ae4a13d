"""The campaign `local_chaos`: each seed is one real job, and three to six faults of real processes, links and disks.

The job trains in lock step (`scripts/paced.py`) until everything has struck and healed. Every step must have the value that it
has in an undisturbed run, the log must keep every promise, and nothing may be left.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "integration" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from paced import undisturbed  # noqa: E402  # it lies with the tests

from dlrover_core.sim.faults import LOCAL, Fault, kinds  # noqa: E402  # as above
from dlrover_core.sim.scenario import Scenario  # noqa: E402  # as above
from dlrover_core.testing import local, processes  # noqa: E402  # as above
from dlrover_core.testing.invariants import check_history  # noqa: E402  # as above

LIMIT_S = 180.0
GAP_STEPS = (1, 40)
AMOUNTS = {"hang_worker": (0.1, 2.0), "slow_worker": (1.5, 4.0), "disk_full": (0.1, 2.0), "partition": (0.1, 4.0)}
"""Those whose default would last too long, or for ever; so do all that stop somebody."""
STOPS_S = (0.1, 3.0)


def draw(seed: int) -> tuple[Scenario, list[Fault]]:
    """What a seed stands for. A log's two copies are never hit at once: then refusing is right."""
    chance = random.Random(seed)
    scenario = Scenario(
        nodes=chance.choice((1, 2)), workers_per_node=chance.choice((1, 2)), spares=chance.choice((0, 1))
    )
    drawn = chance.sample(kinds(LOCAL), chance.randint(3, 6))
    # Batches older than a take-over have no second copy, so a flipped bit comes first of all or not at all.
    drawn.sort(key=lambda kind: kind != "bit_flip")
    faults, step = [], 0
    for kind in drawn:
        step += chance.randint(*GAP_STEPS)
        low, high = AMOUNTS.get(kind, STOPS_S if kind in ("silence_node", "pause_master") else (0.0, 0.0))
        amount = round(chance.uniform(low, high), 1)
        target = 0 if kind in ("bit_flip", "torn_write") else chance.randrange(4)
        faults.append(Fault(f"step {step}", kind, target, amount, "chaos" if kind == "fail_worker" else ""))
    return scenario, faults


def trial(seed: int) -> dict[str, Any]:
    """One job. Raises whatever was broken."""
    scenario, faults = draw(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-local-") as folder:
        job = local.LocalJob(
            script=SCRIPTS / "paced.py",
            scenario=scenario,
            faults=faults,
            folder=folder,
            settings={"silence_s": 1.0},
            timeout_s=LIMIT_S,
        )
        try:
            run = job.finish()
        except Exception as error:
            raise type(error)(f"{error}; {job.plan.token()}; done: {job.notes}") from error
        assert run.outcome == "succeeded", f"{run.outcome}: {run.root}; {job.plan.token()}; done: {job.notes}"
        world = scenario.nodes * scenario.workers_per_node
        local.same_curve(local.curve(Path(folder) / "curve"), undisturbed(run.steps, world))
        check_history(run.records)
        deaths = sum(fault.kind in ("kill_worker", "fail_worker", "kill_node") for fault in faults)
        assert run.lost_steps <= deaths, f"{run.lost_steps} steps were made again after {deaths} deaths: {job.notes}"
        left = processes.living(job.mark)
        assert not left, f"left: {left}"
    struck = {fault.kind: sum(one.kind == fault.kind for one, _ in run.struck) for fault in faults}
    return {"steps": run.steps, "made_again": run.lost_steps, "events": run.events, "faults": len(faults), **struck}
