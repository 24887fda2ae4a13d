"""What only one rank has, its place in the data and its random numbers, comes back to that very rank, whatever was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Job, eventually

from dlrover_adapters.checkpoint.listing import COMPLETE, steps
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.verify import verify

RANKS = 4
PAUSE_S, EVERY = "0.03", 5
STEPS_AFTER, SLOWER_S = 40, "0.1"
"""How far training goes on after the restart on which due checkpoints are counted, and how slowly: 4 s at the least.

A due state waits for storage in a slot of the eight that a rank has: at this pace storage may be busy elsewhere for 4 s.
"""

pytestmark = pytest.mark.timeout(300)


def told(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank wrote down in all its lives."""
    path = folder / f"told-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def lives(job: Job) -> None:
    """What a job that has ended did not do it will not do."""
    code = job.process.poll()
    assert code is None, f"the job has ended with {code}: {job.said()}"


def restores(job: Job, folder: Path, life: int) -> list[dict[str, Any]]:
    """From where each rank began in its ``life``-th life, as soon as all have told."""

    def look() -> list[dict[str, Any]] | None:
        lives(job)
        found = [[one for one in told(folder, rank) if "restored" in one] for rank in range(RANKS)]
        return [one[life] for one in found] if all(len(one) > life for one in found) else None

    return eventually(look, f"life {life} of all ranks")


def at_least(job: Job, folder: Path, step: int) -> None:
    """Wait until every rank is there in its newest life."""

    def look() -> bool:
        lives(job)
        return all((told(folder, rank) or [{}])[-1].get("step", -1) >= step for rank in range(RANKS))

    eventually(look, f"step {step}")


def run(
    folder: Path, url: Path, every: int, store_every: int, stop: int, job: str, pause: str = PAUSE_S, nodes: int = 2
) -> Job:
    """Four ranks, on two nodes or on one."""
    line = ("--local-nodes", str(nodes), "--nproc-per-node", str(RANKS // nodes), "--max-restarts", "4")
    script = [str(SCRIPTS / "own_ranks.py"), str(url), str(every), str(store_every), pause, str(stop)]
    return Job(folder, *line, *script, job=job)


def own(found: list[dict[str, Any]]) -> None:
    """Each rank has its own place in the data."""
    assert len({one["restored"] for one in found}) == 1, found
    assert [one["sampler"] for one in found] == [[rank, 2 * found[rank]["restored"]] for rank in range(RANKS)]


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    """A worker is killed, then a node, then the launcher: the curve is that of a run that nothing happened to, bit for bit.

    Nothing is due on storage in the first job: what is there was written because a generation had ended. In the second one a
    worker is killed, too, and checkpoints that are due from then on are written.
    """
    url = tmp_path / "stored"
    with run(tmp_path, url, 2, 0, 0, "first") as job:
        restores(job, tmp_path, 0)
        at_least(job, tmp_path, 20)
        job.one("worker-3").kill()
        after_worker = restores(job, tmp_path, 1)
        own(after_worker)
        assert {one["tier"] for one in after_worker} == {"memory"}
        step = after_worker[0]["restored"]
        assert step >= 16
        at_least(job, tmp_path, step + 20)
        # The node that usually writes all tensors: the other one stands in for it.
        job.one("dlrover-agent", "--node worker-0-0").kill()
        after_node = restores(job, tmp_path, 2)
        own(after_node)
        assert {one["tier"] for one in after_node} == {"memory", "peer"}
        # Copies on the other node went on after the first restart. How far they are behind depends on the machine.
        assert after_node[0]["restored"] > step
        place = Place(str(url))
        newest = after_node[0]["restored"]
        eventually(
            lambda: any(one.step == newest and one.state == COMPLETE for one in steps(place)),
            f"step {newest} on storage",
        )
        job.process.kill()
        job.process.wait()
    # The killed launcher may leave a checkpoint half written; such a one is not COMPLETE.
    assert all(verify(place, one.step).fine for one in steps(place) if one.state == COMPLETE)
    with run(tmp_path, url, EVERY, EVERY, 0, "second", SLOWER_S) as job:
        from_storage = restores(job, tmp_path, 3)
        own(from_storage)
        assert {(one["restored"], one["tier"]) for one in from_storage} == {(newest, "storage")}
        at_least(job, tmp_path, newest + 20)
        job.one("worker-1").kill()
        again = restores(job, tmp_path, 4)
        own(again)
        began = again[0]["restored"]
        at_least(job, tmp_path, began + STEPS_AFTER)
        (tmp_path / "finish").touch()
        assert job.ended() == 0
    ended = told(tmp_path, 0)[-1]["ended"]
    # While storage writes, a newer state that is due takes the place of one that waits. The newest of all is written at the end.
    due = [step for step in range(began, ended + 1) if step % EVERY == 0]
    stored = [one.step for one in steps(place) if one.state == COMPLETE and one.step >= began]
    assert max(stored, default=-1) >= max(due), told(tmp_path, 0)[-1]
    assert all(verify(place, step).fine for step in stored)
    control = tmp_path / "control"
    control.mkdir()
    with run(control, control / "stored", 50, 0, ended, "control", pause="0", nodes=1) as job:
        assert job.ended() == 0
    for rank in range(RANKS):
        wanted = {one["step"]: one["loss"] for one in told(control, rank) if "loss" in one}
        assert all(wanted[one["step"]] == one["loss"] for one in told(tmp_path, rank) if "loss" in one)
