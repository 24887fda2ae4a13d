"""A straggler and a broken loss, with real processes: noticed in the workers, named by the leader, acted on."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import SCRIPTS, Job, eventually

SLOWING = str(SCRIPTS / "slowing.py")


def test_a_slow_rank_and_a_nan_are_named(tmp_path: Path) -> None:
    """The rank that computes more than it did is named, though both make the same steps, and nothing is restarted for it; the
    rank whose loss became NaN first is named, the processes begin anew, no node goes, and the job ends well.
    """
    with Job(tmp_path, "--nproc-per-node", "2", SLOWING) as job:
        eventually(lambda: "rank 1 on worker-0-0 computes" in job.said(), "a slow rank")
        slow = job.events("SlowRank")[0]["fields"]
        assert (slow["node"], slow["rank"]) == ("worker-0-0", 1)
        assert slow["now_us"] > 1.5 * slow["before_us"]
        seen = [one["fields"] for one in job.events("EvidenceSeen") if one["fields"]["source"] == "slow"]
        assert seen[0]["text"].startswith("rank 1 on worker-0-0 computes ")
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
