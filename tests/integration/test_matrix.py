"""A few cells of the matrix of kinds and disturbances; all of them by ``make campaign NAME=matrix``."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
from tests.matrix.cells import cells, controls, named, run

CHOSEN = ("same_name-1-restart",)
MORE = ("fp32_masters-1-restart", "fsdp2-1-evaluation", "fp32_masters-1-other_world", "per_rank-2-node")
AT_ONCE = 2

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    "names",
    [
        CHOSEN,
        pytest.param(
            MORE,
            marks=pytest.mark.nightly(
                reason="test_flash_ddp.py and tests/unit/test_masters.py (fp32 masters), test_restore_ranks.py (FSDP2, "
                "another world) and test_own_objects.py stand for them in make test"
            ),
        ),
    ],
    ids=["chosen", "more"],
)
def test_disturbed_jobs_equal_undisturbed_ones(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Plain shards of one name are refused.

    And more of them: a rank with fp32 masters is killed, FSDP2 after an evaluation; fp32 masters are restored from storage in a
    world of another size, a node whose ranks have objects of their own is lost.
    """
    chosen = [named(one) for one in names]
    controls([one.row.kind for one in chosen if not one.row.words], tmp_path / "controls")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {one.name: pool.submit(run, one, tmp_path / one.name, tmp_path / "controls") for one in chosen}
    wrong = {name: str(one.exception()) for name, one in waiting.items() if one.exception() is not None}
    assert wrong == {}
    restored = {name: one.result()["restored"] for name, one in waiting.items()}
    assert all(step for name, step in restored.items() if not named(name).row.words), restored


def test_cells_have_names_of_their_own() -> None:
    """A name finds its cell, and no other one; every kind that is trained has a row."""
    names = [one.name for one in cells()]
    assert len(set(names)) == len(names)
    assert [named(one).name for one in names] == names
    with pytest.raises(LookupError, match="they are called like ddp-1-restart"):
        named("nothing")
