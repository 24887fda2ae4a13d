"""The last state of a script that ends well is on storage, or the job has failed; what is no worker's death ends no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Job, eventually

from dlrover_adapters.checkpoint import listing
from dlrover_adapters.checkpoint.places import Place

LIMIT_S = 110.0

pytestmark = pytest.mark.timeout(int(LIMIT_S) + 40)


def ending(folder: Path, case: str) -> Job:
    """Two ranks of ``ending_ranks.py``."""
    script = [str(SCRIPTS / "ending_ranks.py"), case, str(folder / "stored")]
    return Job(folder, "--standalone", "--nproc-per-node", "2", "--max-restarts", "0", *script)


def complete(folder: Path) -> list[int]:
    """The steps that are whole on storage."""
    return [one.step for one in listing.steps(Place(str(folder / "stored"))) if one.state == listing.COMPLETE]


def told(folder: Path, rank: int) -> dict[str, Any]:
    """By a rank, at its end."""
    found: dict[str, Any] = json.loads((folder / f"told-{rank}").read_text())
    return found


@pytest.mark.nightly(reason="the same in a run of the campaign, test_campaign_ends.py, stands for it in make test")
def test_a_rank_that_closes_while_anothers_part_is_written_loses_no_state(tmp_path: Path) -> None:
    """An undisturbed job: one rank closes at once, the other while 128 MiB of the first's are on their way to storage."""
    with ending(tmp_path, "late") as job:
        assert job.ended(LIMIT_S) == 0
        assert "is not a checkpoint on storage" not in job.said()
    assert complete(tmp_path) == [4]


def test_a_last_state_that_is_lost_is_a_failed_job(tmp_path: Path) -> None:
    """Damaged in memory before it was written: the status is 1, the sentence says what is missing and what there is instead."""
    with ending(tmp_path, "damaged") as job:
        assert job.ended(LIMIT_S) == 1
        said = " ".join(job.said().split())
        assert "root cause: worker-0-0: step 4 is not a checkpoint on storage" in said
        assert "it was lost in memory before it was written" in said
        assert "start the job again" in said
        assert [one["fields"]["incident"] for one in job.events("JobFailed")] == [0]
    assert complete(tmp_path) == [2], "the newest state that was left takes its place"


def test_the_death_of_the_stores_keeper_ends_no_training(tmp_path: Path) -> None:
    """The ranks need their store no more to train: the same processes go on to their end, and save on the agents' word."""
    with ending(tmp_path, "alone") as job:
        eventually(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "the ranks wait")
        for victim in job.processes("dlrover-keeper"):
            victim.kill()
            victim.ends()
        (tmp_path / "go").touch()
        assert job.ended(LIMIT_S) == 0
        assert "the store of this generation does not answer (its keeper has ended)" in job.said()
        assert job.events("IncidentOpened") == []
        assert len(job.events("WorldFormed")) == 1
    for rank in range(2):
        found = told(tmp_path, rank)
        assert (found["step"], found["failed"]) == (20, 1)
    assert len(complete(tmp_path)) == 1
    assert complete(tmp_path)[0] > 6, "what was saved without the store"
