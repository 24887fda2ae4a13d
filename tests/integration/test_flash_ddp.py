"""FlashCheckpoint in real ranks under real agents: a killed rank costs the steps since the newest save, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Job

LIMIT_S = 110.0

pytestmark = pytest.mark.timeout(int(2 * LIMIT_S) + 30)


def trained(folder: Path, kind: str, every: int, killed: str, *, steps: int = 11) -> dict[int, list[dict[str, Any]]]:
    """What the two ranks told of a job that ran to its end."""
    folder.mkdir()
    url = str(folder / "stored")
    script = [str(SCRIPTS / "flashing_ranks.py"), kind, str(steps), str(every), url, killed]
    with Job(folder, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *script) as job:
        assert job.ended(LIMIT_S) == 0
    told = {rank: (folder / f"told-{rank}").read_text().splitlines() for rank in range(2)}
    return {rank: [json.loads(line) for line in lines] for rank, lines in told.items()}


MORE = pytest.mark.nightly(
    reason="DDP with a save in every step stands for it in make test; test_planned_changes.py for FSDP2"
)


@pytest.mark.parametrize(
    ("kind", "every"), [("ddp", 1), pytest.param("ddp", 2, marks=MORE), pytest.param("fsdp", 2, marks=MORE)]
)
def test_a_killed_rank_resumes_from_memory_bit_for_bit(tmp_path: Path, kind: str, every: int) -> None:
    """Both ranks go on from a step that both had, and end with the bits of a job that nothing happened to."""
    undisturbed = trained(tmp_path / "undisturbed", kind, every, "-")
    killed = trained(tmp_path / "killed", kind, every, "1:7")
    restored = {rank: next(one for one in told if one.get("again")) for rank, told in killed.items()}
    assert restored[0]["restored"] == restored[1]["restored"]
    # Of the save that the kill struck, the one before, or, where that is not yet everywhere, the one before that.
    assert 7 - 2 * max(2, every) <= restored[0]["restored"] <= 7
    assert {one["tier"] for one in restored.values()} == {"memory"}
    for rank in range(2):
        assert killed[rank][-1]["digest"] == undisturbed[rank][-1]["digest"]
