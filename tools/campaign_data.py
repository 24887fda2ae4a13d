"""The campaign `data_kills`: each seed is one real job that trains on an `ElasticDataset`, is killed, and changes its size.

Workers, agents and the master are killed with SIGKILL at steps that the seed draws, and people scale the job. Every rank writes
down the samples of each step that it makes. Afterwards each step of the model's lineage must have the samples that it has in a
job that nothing happens to, each once, and `dlrover data verify` must prove as many from the log alone.

    python -m tools.campaign_data SEED    one trial, in words
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "integration" / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from running import BIN, TOKEN, Job, eventually  # noqa: E402  # it lies with the tests

from dlrover_core.data.permutation import Order  # noqa: E402  # as above

SIZE, BATCH, SEED = 61, 8, 3
"""As in the script."""
STEPS, PACE_S, LIMIT_S = 60, 0.05, 240.0
KINDS = ("worker", "worker", "worker", "agent", "master", "scale", "scale")


class Blow(NamedTuple):
    """``kind`` happens to the ``which``-th of its kind once rank 0 has made ``step``."""

    step: int
    kind: str
    which: int


class Plan(NamedTuple):
    """One trial: a job of so many nodes and ranks on each, and what happens to it."""

    nodes: int
    nproc: int
    blows: tuple[Blow, ...]


def drawn(seed: int) -> Plan:
    """The plan of a seed."""
    dice = random.Random(f"data.{seed}")
    steps = sorted(dice.randrange(4, STEPS - 6) for _ in range(dice.randrange(1, 4)))
    blows = tuple(Blow(step, dice.choice(KINDS), dice.randrange(60)) for step in steps)
    return Plan(dice.choice((1, 2, 2)), dice.choice((1, 1, 2)), blows)


# ---- what the ranks have written down


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Of one rank, over all its lives; a line that was cut off by a kill is none."""
    path = folder / f"told-{rank}"
    raw = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in raw]


def lineage(folder: Path) -> dict[int, list[int]]:
    """The samples of each step of the last model's lineage, of all ranks. A restore ends what came after its step."""
    lives: dict[str, dict[int, list[int]]] = {}
    began: dict[str, int] = {}
    for rank in range(len(list(folder.glob("told-*")))):
        for told in lines_of(folder, rank):
            if "restored" in told:
                assert began.setdefault(told["life"], told["restored"]) == told["restored"], f"ranks differ: {told}"
            else:
                lives.setdefault(told["life"], {}).setdefault(told["step"], []).extend(told["samples"])
    made: dict[int, list[int]] = {}
    for told in lines_of(folder, 0):
        if "restored" in told:
            made = {step: its for step, its in made.items() if step <= told["restored"]}
            made |= lives.get(told["life"], {})
    return dict(sorted(made.items()))


def undisturbed(steps: int) -> list[list[int]]:
    """The samples of each step of a job that nothing happens to, in order."""
    found: list[list[int]] = []
    epoch = 0
    while len(found) < steps:
        order = list(Order(SIZE, SEED, epoch).indices(0, SIZE))
        found += [order[at : at + BATCH] for at in range(0, SIZE, BATCH)]
        epoch += 1
    return found[:steps]


def proof(job: Job) -> dict[str, Any]:
    """What `dlrover data verify` says of the only dataset. Raises AssertionError where it does not prove it."""
    line = [str(BIN / "dlrover"), "data", "verify", job.name, "--state-dir", str(job.state), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["proved"] is True
    (one,) = told["datasets"]
    return dict(one)


def proved(job: Job, steps: int) -> dict[str, Any]:
    """What entered the steps of the lineage is what it always is, each sample once, and the log proves as many."""
    made = lineage(job.folder)
    assert list(made) == list(range(1, steps + 1)), f"steps {list(made)}"
    for step, wanted in enumerate(undisturbed(steps), start=1):
        assert sorted(made[step]) == sorted(wanted), f"step {step} has {sorted(made[step])}, not {sorted(wanted)}"
    found = proof(job)
    assert found["samples"] == sum(map(len, made.values())), found
    assert (found["findings"], found["uneven"]) == ([], 0), found
    return found


# ---- one trial


def strike(job: Job, blow: Blow) -> None:
    """Let it happen; a job that is just then between two worlds may have nobody to hit."""
    if blow.kind == "scale":
        words = [f"worker={1 + blow.which % 3}", "--token-file", str(job.folder / "token")]
        line = [str(BIN / "dlrover"), "scale", job.name, *words, "--state-dir", str(job.state)]
        subprocess.run(line, capture_output=True, check=False, timeout=60)
        return
    prefix = {"worker": "worker-", "agent": "agent", "master": "master"}[blow.kind]
    found = [one for one in job.processes() if one.name.startswith(prefix)]
    if found:
        found[blow.which % len(found)].kill()


def trial(seed: int) -> dict[str, Any]:
    """One job. Raises AssertionError for a sample that is lost or twice."""
    plan = drawn(seed)
    with tempfile.TemporaryDirectory(prefix="data-kills-") as name:
        folder = Path(name)
        (folder / "token").write_text(TOKEN)
        line = ["--local-nodes", str(plan.nodes), "--nproc-per-node", str(plan.nproc), "--max-restarts", "20"]
        line += ["--set", "grow_window_s=0.1"]
        script = [str(SCRIPTS / "data_ranks.py"), str(STEPS), str(folder / "stored"), "-"]
        with Job(folder, *line, *script, env={"PACE_S": str(PACE_S)}) as job:
            for blow in plan.blows:
                eventually(lambda step=blow.step: _made(folder) >= step or job.process.poll() is not None, "a step", 90)
                if job.process.poll() is None:
                    strike(job, blow)
            code = job.ended(LIMIT_S)
            assert code == 0, f"it ended with {code}: {job.said()[-1500:]}"
            found = proved(job, STEPS)
        kinds = {blow.kind: 1 for blow in plan.blows}
        return {
            "generations": found["generations"],
            "resumed": found["resumed"],
            "witnessed": found["witnessed"],
            **kinds,
        }


def _made(folder: Path) -> int:
    return max((told.get("step", 0) for told in lines_of(folder, 0)[-3:]), default=0)


if __name__ == "__main__":
    sys.stdout.write(f"{drawn(int(sys.argv[1]))}\n{trial(int(sys.argv[1]))}\n")
