"""Every sample counts exactly once in real jobs, whose workers are killed, and whose worlds grow and shrink in mid-epoch.

Their script writes down each index that enters an optimizer step.
"""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from counting import BATCH, SEED, SIZE
from running import SCRIPTS, Job, eventually

from dlrover_core.data.permutation import Order

COUNTING = str(SCRIPTS / "counting.py")
LAUNCH = ("--nproc-per-node", "1", "--max-restarts", "3", "--set", "grow_window_s=0.1")
RANKS_MAX = 4
pytestmark = pytest.mark.timeout(240)


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What the ranks of this number wrote down, over all lives; a line that a kill cut off is none."""
    path = folder / f"trained-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def lives(folder: Path) -> list[dict[str, Any]]:
    """Where each life of rank 0 began."""
    return [one for one in told(folder, 0) if "began" in one]


def makes(folder: Path, world: int, after: int, steps: int = 5) -> int:
    """Wait until so many steps are made in a world of this size, in a life after that number; the life."""

    def look() -> int | None:
        for one in lives(folder):
            made = [step for step in told(folder, 0) if "step" in step and step["life"] == one["life"]]
            if one["life"] > after and one["world"] == world and len(made) >= steps:
                return int(one["life"])
        return None

    return eventually(look, f"{steps} steps of {world} ranks in a life after {after}")


def lineage(folder: Path) -> list[list[int]]:
    """Of each step in the history of the last state, the indices that all ranks trained on.

    A life that begins at a step forgets what was made after it.
    """
    steps: dict[int, list[int]] = {}
    every = [told(folder, rank) for rank in range(RANKS_MAX)]
    for began in lives(folder):
        steps = {step: found for step, found in steps.items() if step <= began["began"]}
        for rank in range(began["world"]):
            for one in every[rank]:
                if one["life"] == began["life"] and "step" in one:
                    steps.setdefault(one["step"], []).extend(one["indices"])
    last = max(one["ended"] for one in told(folder, 0) if "ended" in one)
    assert sorted(steps) == list(range(1, last + 1))
    return [sorted(steps[step]) for step in sorted(steps)]


def each_once(folder: Path) -> int:
    """The steps of the lineage are those of the order, one after the other, and so each index is in each epoch once; how many."""
    found = lineage(folder)
    wanted: list[list[int]] = []
    for epoch in itertools.count():
        order = list(Order(SIZE, SEED, epoch).indices(0, SIZE))
        wanted += [sorted(order[at : at + BATCH]) for at in range(0, SIZE, BATCH)]
        if len(wanted) >= len(found):
            break
    off = next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), None)
    assert off is None, f"step {off + 1} had {found[off]}, not {wanted[off]}; lives: {lives(folder)}"
    return len(found)


def kill(job: Job, worker: str) -> None:
    """Kill a rank, with its loader processes beside it, in the middle of whatever it does."""
    job.one(worker).kill(signal.SIGKILL)


def test_a_killed_worker_and_a_resize_in_mid_epoch_leave_each_index_once(tmp_path: Path) -> None:
    """Two ranks; one is killed, then the world shrinks to one; each step of the lineage is the next of the order."""
    with Job(tmp_path, "--local-nodes", "2", *LAUNCH, COUNTING, str(tmp_path), "1") as job:
        life = makes(tmp_path, 2, -1)
        kill(job, "worker-1")
        life = makes(tmp_path, 2, life)
        job.dlrover("scale", "worker=1", "--wait")
        makes(tmp_path, 1, life)
        job.finish()
        assert job.ended() == 0
        assert each_once(tmp_path) >= 10
        assert [one["world"] for one in lives(tmp_path)] == [2, 2, 1]
        assert job.left() == []


@pytest.mark.nightly(reason="a killed worker and one resize stand for it in make test")
@pytest.mark.parametrize("loaders", [0, 2])
def test_kills_growth_and_shrinking_leave_each_index_once(tmp_path: Path, loaders: int) -> None:
    """4 ranks, 2, 3 and 4, with a rank killed in each of these worlds."""
    with Job(
        tmp_path, "--local-nodes", "4", *LAUNCH, "--max-restarts", "9", COUNTING, str(tmp_path), str(loaders)
    ) as job:
        life = makes(tmp_path, 4, -1)
        for victim, size in (("worker-3", 2), ("worker-0", 3), ("worker-2", 4)):
            kill(job, victim)
            job.dlrover("scale", f"worker={size}", "--wait")
            life = makes(tmp_path, size, life)
        job.finish()
        assert job.ended() == 0
        assert each_once(tmp_path) >= 15
        assert job.left() == []


@pytest.mark.nightly(reason="test_restore.py, and the cut's own tests of storage, stand for it in make test")
def test_a_job_that_is_started_again_goes_on_from_storage(tmp_path: Path) -> None:
    """The whole job ends, and another one in another world goes on with the next step."""
    for number, nodes in enumerate(("2", "3")):
        (tmp_path / "finish").unlink(missing_ok=True)
        words = ("--local-nodes", nodes, *LAUNCH, COUNTING, str(tmp_path), "1")
        with Job(tmp_path, *words, job=f"job-{number}", env={"LIFE": str(number)}) as job:
            makes(tmp_path, int(nodes), number - 1, steps=30)
            job.finish()
            assert job.ended() == 0
    assert [one["tier"] for one in lives(tmp_path)] == ["nothing", "storage"]
    assert each_once(tmp_path) >= 50
