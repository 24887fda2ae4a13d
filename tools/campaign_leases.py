"""The campaign `lease_kills`: each seed is one real job that leases samples, is killed, and changes its size.

Two of three jobs train a model at paces of their own (``lineage="model"``). The model counts how often it was trained on each
sample: that must be once an epoch, and `dlrover data verify` must prove as many. The third evaluates (``lineage="server"``):
each sample must be used, and used twice only where `dlrover data` says so. Workers, agents and the master are killed with
SIGKILL at moments that the seed draws, and people scale the job.

    python -m tools.campaign_leases SEED    one trial, in words
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tools.campaign_data import BIN, SCRIPTS, TOKEN, Blow, Job, eventually, strike

from dlrover_core.data.permutation import Order
from dlrover_core.data.ranges import Ranges

SIZE, EPOCHS, SEED = 150, 2, 7
"""Of the model's data, with the script's epochs and seed."""
USED = 400
"""Samples of an evaluation."""
LIMIT_S = 240.0
KINDS = ("worker", "worker", "worker", "agent", "master", "scale")


class Plan(NamedTuple):
    """One trial: what kind of job, of so many nodes and ranks on each, with so many loader processes, and what happens to it."""

    model: bool
    nodes: int
    nproc: int
    loaders: int
    blows: tuple[Blow, ...]


def drawn(seed: int) -> Plan:
    """The plan of a seed. A blow's step is a round of the model's ranks, or a number of batches that were used."""
    dice = random.Random(f"leases.{seed}")
    model = seed % 3 != 2
    steps = sorted(dice.randrange(2, 14) * (1 if model else 4) for _ in range(dice.randrange(1, 4)))
    blows = tuple(Blow(step, dice.choice(KINDS), dice.randrange(60)) for step in steps)
    return Plan(model, dice.choice((1, 2, 2)), dice.choice((1, 2)), dice.choice((0, 0, 2)), blows)


def lines_of(folder: Path) -> list[str]:
    """What the ranks of an evaluation have written down; a line that a kill cut off is none."""
    found = (line for path in folder.glob("used-*") for line in path.read_text().splitlines(keepends=True))
    return [line for line in found if line.endswith("\n") and line != "end\n"]


def _made(folder: Path, *, model: bool) -> int:
    """How far the job is, as a blow's step."""
    if not model:
        return len(lines_of(folder))
    told = (folder / "round").read_text() if (folder / "round").exists() else ""
    return int(told or 0)


def check_model(job: Job) -> dict[str, Any]:
    """Each sample is in the model once an epoch, and the log proves it. Raises AssertionError."""
    times = [int(one) for one in (job.folder / "trained").read_text().split()]
    wrong = [(index, many) for index, many in enumerate(times) if many != EPOCHS]
    assert not wrong, f"(sample, times in the model): {wrong[:8]}"
    line = [str(BIN / "dlrover"), "data", "verify", job.name, "--state-dir", str(job.state), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (leased,) = json.loads(done.stdout)["leased"]
    assert (leased["samples"], leased["findings"]) == (SIZE * EPOCHS, []), leased
    return {name: leased[name] for name in ("generations", "resumed", "compared")}


def check_used(job: Job) -> dict[str, Any]:
    """Each sample was used, and twice only where the log says so. Raises AssertionError."""
    times = Counter(int(one) for line in lines_of(job.folder) for one in line.split())
    lost = sorted(set(range(USED)) - set(times))
    assert not lost, f"never used: {lost[:8]}"
    (row,) = json.loads(job.dlrover("data", "--json"))
    told, order = Ranges(row["repeated"]), Order(USED, SEED, 0)
    untold = [index for at, index in enumerate(order.indices(0, USED)) if times[index] > 1 and at not in told]
    assert not untold, f"used more than once, and not told: {untold[:8]}"
    assert row["finished"], row
    return {"used_again": sum(times.values()) - USED, "told_again": row["again"]}


def trial(seed: int) -> dict[str, Any]:
    """One job. Raises AssertionError for a sample that is lost, or twice and not told."""
    plan = drawn(seed)
    with tempfile.TemporaryDirectory(prefix="lease-kills-") as name:
        folder = Path(name)
        (folder / "token").write_text(TOKEN)
        line = ["--local-nodes", str(plan.nodes), "--nproc-per-node", str(plan.nproc), "--max-restarts", "20"]
        line += ["--set", "grow_window_s=0.1"]
        script = [str(SCRIPTS / "leasing.py"), str(USED), str(plan.loaders), "4", "0.05,0.1"]
        if plan.model:
            model = [str(SIZE), f"file://{folder}/ckpt", str(plan.loaders), "0.02,0.05", "-"]
            script = [str(SCRIPTS / "leasing_model.py"), *model]
        with Job(folder, *line, *script) as job:
            for blow in plan.blows:
                eventually(lambda step=blow.step: _far(job, step, model=plan.model), "progress", LIMIT_S)
                if job.process.poll() is None:
                    strike(job, blow)
            code = job.ended(LIMIT_S)
            assert code == 0, f"it ended with {code}: {job.said()[-1500:]}"
            found = check_model(job) if plan.model else check_used(job)
        return {"models": int(plan.model), **found, **dict(Counter(blow.kind for blow in plan.blows))}


def _far(job: Job, step: int, *, model: bool) -> bool:
    return _made(job.folder, model=model) >= step or job.process.poll() is not None


if __name__ == "__main__":
    sys.stdout.write(f"{drawn(int(sys.argv[1]))}\n{trial(int(sys.argv[1]))}\n")
