"""The cells of the matrix, what is expected of each, and how one is run.

A cell is one kind of training (`kinds.py`) on one or two nodes under one disturbance.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (HERE, ROOT / "tests" / "integration" / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from check import Wrong, check  # noqa: E402  # it lies beside this module, whoever imports that
from running import Job  # noqa: E402  # as above

STEPS, LEAST = 12, 4
LIMIT_S = 90.0
SCRIPT = HERE / "ranks.py"
PRELOAD = "torch.distributed.fsdp,torch.distributed.tensor.parallel,torch.optim.swa_utils"

EQUAL, REFUSED = "equal", "refused"


class Row(NamedTuple):
    """One kind, as the table shows it."""

    kind: str
    """Its name in kinds.py."""
    world: int
    """How many ranks it has, as its class says."""
    other: int
    """How many ranks go on from storage where the world size changes, as its class says; of two nodes one goes on."""
    says: str
    """What it is, for people."""
    words: tuple[str, ...] = ()
    """Regular expressions that the error must match, where the kind is refused; empty: it must equal the control."""


ROWS = (
    Row("ddp", 2, 3, "DDP"),
    Row("fsdp2", 2, 3, "FSDP2 (`fully_shard`)"),
    Row("hsdp", 4, 2, "HSDP (replicas of shards, 2-d mesh)"),
    Row("fsdp2_tp", 4, 2, "FSDP2 and tensor parallel (2-d mesh)"),
    Row("pipeline", 4, 2, "pipeline by hand, each stage under its own key"),
    Row("plain_shards", 4, 2, "plain tensors as shards, each under its own key"),
    Row("two_optimizers", 2, 3, "two optimizers"),
    Row("ema", 2, 3, "EMA of the weights"),
    Row("fp32_masters", 2, 3, "fp32 masters of bf16 weights"),
    Row("frozen", 2, 3, "frozen base"),
    Row("tied", 2, 3, "tied weights"),
    Row("buffers", 2, 3, "buffers (BatchNorm, DDP)"),
    Row("odd_shapes", 2, 3, "0-d and empty tensors"),
    Row("bf16_fp16", 2, 3, "bf16 and fp16 weights"),
    Row("per_rank", 4, 2, "`extra` and random numbers of each rank"),
    Row(
        "same_name",
        2,
        2,
        "plain tensors as shards, all under one name",
        (r"SpecError", r"model\.(up|down)\.\w+", r"rank 0\b", r"rank 1\b", r"model=\{"),
    ),
)
"""World sizes are written down here too, because kinds.py imports torch; tests/unit/test_matrix_check.py compares them."""

DISTURBANCES = {
    "restart": "a rank is killed",
    "node": "a node is lost",
    "other_world": "other world size",
    "storage": "launcher killed, from storage",
    "evaluation": "killed after evaluation",
}
TIERS = {
    ("restart", 1): {"memory"},
    ("restart", 2): {"memory"},
    ("evaluation", 1): {"memory"},
    ("evaluation", 2): {"memory"},
    ("node", 1): {"storage"},
    ("node", 2): {"memory", "peer"},
    ("other_world", 2): {"memory", "peer"},
}


class Cell(NamedTuple):
    """One run, on 1 or 2 nodes."""

    row: Row
    nodes: int
    disturbance: str

    @property
    def name(self) -> str:
        """Its name in files, results and on the command line."""
        return f"{self.row.kind}-{self.nodes}-{self.disturbance}"

    @property
    def expected(self) -> str:
        """`EQUAL` or `REFUSED`."""
        return REFUSED if self.row.words else EQUAL


def cells() -> list[Cell]:
    """All cells. A kind that is refused is refused before anything disturbs it, so it has one cell for each number of nodes."""
    return [
        Cell(row, nodes, disturbance)
        for row in ROWS
        for nodes in (1, 2)
        for disturbance in (("restart",) if row.words else DISTURBANCES)
    ]


def named(name: str) -> Cell:
    """Find the cell of that name. Raises `LookupError`."""
    for one in cells():
        if one.name == name:
            return one
    raise LookupError(f"no cell is called {name!r}; they are called like {cells()[0].name}")


def line(cell: Cell, *, again: bool = False) -> list[str]:
    """The arguments of dlrover-run; ``again``: of the second run of one that goes on from storage."""
    reshaped = cell.disturbance == "other_world"
    world, nodes = (cell.row.other if reshaped and again else cell.row.world), cell.nodes
    size = ["--local-nodes", str(nodes)] if nodes > 1 else ["--standalone"]
    if reshaped and nodes > 1:
        size += ["--nnodes", f"1:{nodes}", "--relaunch-max", "0"]
    restarts = ["--max-restarts", "0" if cell.expected == REFUSED else "2"]
    script = [str(SCRIPT), "cell", cell.row.kind, cell.disturbance, str(cell.nodes), str(STEPS)]
    return [*size, "--nproc-per-node", str(world // nodes), *restarts, "--preload", PRELOAD, *script]


def controls(kinds: Sequence[str], folder: Path) -> None:
    """Run the undisturbed training of each kind into ``folder/KIND``, unless that exists. They run without dlrover-run."""
    missing = [one for one in kinds if not (folder / one).exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(SCRIPT), "control", str(STEPS), *missing],
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 10 * len(missing),
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]


def run(cell: Cell, folder: Path, controls_at: Path) -> dict[str, Any]:
    """Run a cell in a new ``folder`` and return what was found. Raises `Wrong` where the expectation does not hold."""
    folder.mkdir(parents=True)
    (folder / "command").write_text(f"{command(cell)}\n")
    began = time.monotonic()
    twice = cell.disturbance == "storage" or (cell.disturbance == "other_world" and cell.nodes == 1)
    code = _job(cell, folder, 0)
    if cell.expected == REFUSED:
        said = (folder / "err").read_text(errors="replace")
        missing = [words for words in cell.row.words if not re.search(words, said)]
        if code == 0 or missing:
            raise Wrong(f"ended with {code}, and the error does not say {missing}")
        return {"restored": 0, "tier": "", "compared": 0, "took_s": round(time.monotonic() - began, 1)}
    if twice:
        (folder / "err").rename(folder / "err-0")
        code = _job(cell, folder, 1)
    tiers = TIERS.get((cell.disturbance, cell.nodes), {"storage"})
    reshaped = cell.disturbance == "other_world"
    problem = f"; dlrover-run ended with {code}" if code else ""
    try:
        found = check(folder, controls_at / cell.row.kind, steps=STEPS, least=LEAST, tiers=tiers, reshaped=reshaped)
    except Wrong as error:
        raise Wrong(f"{error}{problem}{_last_words(folder)}") from None
    if problem:
        raise Wrong(f"the curve is right{problem}{_last_words(folder)}")
    return {**found._asdict(), "took_s": round(time.monotonic() - began, 1)}


def _job(cell: Cell, folder: Path, number: int) -> int:
    with Job(folder, *line(cell, again=bool(number)), job="matrix", env={"MATRIX_RUN": str(number)}) as job:
        (folder / "launcher").write_text(str(job.process.pid))
        try:
            return job.ended(LIMIT_S)
        except AssertionError as error:
            (folder / "stands").write_text(str(error))
            raise Wrong(f"not ended within {LIMIT_S:g} s{_last_words(folder)}") from None


def _last_words(folder: Path) -> str:
    """The last error of a rank, in a line; what gloo says of a killed rank is left out."""
    said = "\n".join(one.read_text(errors="replace") for one in sorted(folder.glob("err*")))
    found = [one.strip() for one in said.splitlines() if re.search(r"\b\w*(Error|Mismatch|Failed|NoMemory)\b: ", one)]
    mine = [one for one in found if not re.search(r"Connection|gloo|RuntimeError: \[", one)]
    return f"; said: {mine[-1][:300]}" if mine else ""


def command(cell: Cell) -> str:
    """The command that runs this cell alone."""
    return f"{shlex.quote(Path(sys.executable).name)} -m tools.campaign_matrix --only {cell.name}"
