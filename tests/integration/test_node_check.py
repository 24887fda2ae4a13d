"""`dlrover-run --precheck`: real agents check their nodes with torch over gloo before anybody trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import SCRIPTS, Job

WHERE = str(SCRIPTS / "where.py")
FULL = ("--local-nodes", "2", "--precheck", "full")


@pytest.mark.nightly(reason="a faulty node stands for it in make test")
def test_good_nodes_one_of_them_slow(tmp_path: Path) -> None:
    """Both pass, site checks included; the slow one is named, trains all the same, and nothing of the check is left."""
    site = tmp_path / "site.sh"
    site.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/site\n")
    site.chmod(0o755)
    slow = {"DLROVER_TESTING": "1", "MOCK_SLOW_RANK": "1:0.6"}
    with Job(tmp_path, *FULL, "--check-script", str(site), WHERE, env=slow) as job:
        assert job.ended() == 0
        judged = job.events("CheckJudged")
        assert [[kind for _, kind, _ in one["fields"]["found"]] for one in judged] == [["slow"]]
        assert "node check: worker-1-0 is slow: alone it needs " in job.said()
        assert "node check: 2 nodes passed in" in job.said()
        assert len((tmp_path / "site").read_text().split()) == 2
        assert {one.name for one in tmp_path.glob("where-*")} == {"where-0", "where-1"}
        assert job.left() == []


def test_a_faulty_node_is_replaced_before_anybody_trains(tmp_path: Path) -> None:
    """It is named, its successor passes with the other one as partner, and the first world is of those two."""
    with Job(tmp_path, *FULL, WHERE, env={"DLROVER_TESTING": "1", "MOCK_ERR_RANK": "worker-1-0"}) as job:
        assert job.ended() == 0
        said = job.said()
        assert "node check: worker-1-0 is faulty: mocked error (MOCK_ERR_RANK)" in said
        assert "node check (full): 1 node, with 1 partner" in said
        facts = [(one["event"], one["fields"]) for one in job.events("NodeFailed", "WorldFormed")]
        assert [(event, fields.get("node"), fields.get("generation")) for event, fields in facts] == [
            ("NodeFailed", "worker-1-0", None),
            ("WorldFormed", None, 1),
        ]
        assert job.left() == []
