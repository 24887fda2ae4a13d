"""A state of which every node has only its share outlives any one of them: from the copies that all have made of one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Job, eventually

RANKS = str(SCRIPTS / "shared_ranks.py")

pytestmark = pytest.mark.timeout(240)


def told(folder: Path, rank: int, generation: int) -> list[dict[str, Any]]:
    """What a rank wrote down in a generation."""
    path = folder / f"told-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [one for one in found if one["generation"] == generation]


def life(folder: Path, rank: int, generation: int) -> list[dict[str, Any]]:
    """The same, as soon as there is anything."""
    return eventually(lambda: told(folder, rank, generation) or None, f"generation {generation} of rank {rank}")


def newer(folder: Path, nodes: int, generation: int, than: int) -> int:
    """The newest step of which every node has told that it has a copy of another one's share, as soon as it is a newer one."""

    def look() -> int | None:
        lives = [told(folder, rank, generation) for rank in range(nodes)]
        newest = max(
            set.intersection(*({step for one in life for step in one.get("copies", ())} for life in lives)), default=-1
        )
        return newest if newest > than else None

    return eventually(look, f"copies of a step newer than {than}")


OTHERS = (
    "test_own_objects.py, where a node that is gone has its state back from its peers, and tests/unit/test_copies.py"
)


@pytest.mark.nightly(reason=f"{OTHERS}, stand for it in make test")
@pytest.mark.parametrize(("nodes", "dies"), [(2, 1), (3, 0)])
def test_a_node_that_is_gone_has_its_share_back_from_its_partner(tmp_path: Path, nodes: int, dies: int) -> None:
    """SIGKILL of one node's agent, its memory and all; every rank goes on from a step that all had copied or newer, bit for bit.

    Twice, so that what was copied since counts, and not only what was there first; nothing is on storage.
    """
    line = ("--local-nodes", str(nodes), "--nproc-per-node", "1", "--max-restarts", "4")
    with Job(tmp_path, *line, RANKS) as job:
        for generation in (1, 2):
            first = newer(tmp_path, nodes, generation, -1)
            copied = newer(tmp_path, nodes, generation, first)
            job.one("dlrover-agent", f"--node worker-{dies}-{generation - 1}").kill()
            began = [life(tmp_path, rank, generation + 1)[0] for rank in range(nodes)]
            assert len({one["restored"] for one in began}) == 1
            step = began[0]["restored"]
            assert step >= first, copied
            assert began[dies]["tier"] == "peer", began
            before = [
                next(one["digest"] for one in told(tmp_path, rank, generation) if one.get("step") == step)
                for rank in range(nodes)
            ]
            assert [one["digest"] for one in began] == before
        (tmp_path / "finish").touch()
        assert job.ended() == 0
    last = [told(tmp_path, rank, 3)[-1] for rank in range(nodes)]
    assert all("ended" in one for one in last)
