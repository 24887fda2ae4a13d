"""A straggler and a broken loss, with real processes: noticed in the workers, named by the leader, acted on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import SCRIPTS, Job, eventually

SLOWING = str(SCRIPTS / "slowing.py")
TIMES = 3.0
"""Rank 1 computes ten times as much. What others' work on the same cores makes of a rank is less, and may be told as well."""


def named(job: Job) -> bool:
    """Has the job said that rank 1 computes far more than it did?"""
    assert job.process.poll() is None, "the job has ended before a slow rank was named"
    return any(
        float(times) > TIMES for times in re.findall(r"rank 1 on worker-0-0 computes ([\d.]+)x slower", job.said())
    )


@pytest.mark.timeout(240)
def test_a_slow_rank_and_a_nan_are_named(tmp_path: Path) -> None:
    """The rank that computes more than it did is named, though both make the same steps, and nothing is restarted for it; the
    rank whose loss became NaN first is named, the processes begin anew, no node goes, and the job ends well.
    """
    with Job(tmp_path, "--nproc-per-node", "2", SLOWING) as job:
        eventually(lambda: named(job), "a slow rank")
        slow = [one["fields"] for one in job.events("SlowRank")]
        assert ("worker-0-0", 1) in [
            (one["node"], one["rank"]) for one in slow if one["now_us"] > TIMES * one["before_us"]
        ]
        seen = [one["fields"] for one in job.events("EvidenceSeen") if one["fields"]["source"] == "slow"]
        assert any(one["text"].startswith("rank 1 on worker-0-0 computes ") for one in seen)
        assert job.events("IncidentOpened") == []
        (tmp_path / "ill").touch()
        job.trains(2)
        assert [one["fields"]["ranks"] for one in job.events("LossBroken")] == [1]
        assert [one["fields"]["action"] for one in job.events("ActionChosen")] == ["RESTART_PROCESSES"]
        lost = [one["fields"] for one in job.events("EvidenceSeen") if one["fields"]["source"] == "loss"]
        assert [(one["signature"], one["rank"]) for one in lost] == [("loss.nan", 1)]
        job.finish()
        assert job.ended() == 0
        assert job.events("NodeReleased", "NodeFailed") == []
        assert job.left() == []


@pytest.mark.nightly(reason="detectors that are on stand for it in make test")
def test_detectors_can_be_off(tmp_path: Path) -> None:
    """With ``--detect off`` workers measure nothing, and a NaN is the script's own business."""
    with Job(tmp_path, "--detect", "off", "--nproc-per-node", "2", SLOWING) as job:
        (tmp_path / "ill").touch()
        job.trains(1, 100)
        job.finish()
        assert job.ended() == 0
        assert job.events("SlowRank", "LossBroken", "EvidenceSeen") == []
