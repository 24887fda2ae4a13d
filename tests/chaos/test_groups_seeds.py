"""The smoke size of the campaign `groups_seeds`: fixed seeds, every promise kept, the same log twice."""

from __future__ import annotations

import pytest
from tests.chaos.groups_seeds import trial

SMOKE = range(30)
TWICE = range(0, 30, 13)


@pytest.mark.parametrize("block", range(0, len(SMOKE), 10))
def test_jobs_of_several_groups_keep_every_promise(block: int) -> None:
    """Whatever a seed does to a job of several groups, what happens in a set stays there, and the job ends as it should."""
    for seed in SMOKE[block : block + 10]:
        try:
            assert trial(seed)["events"] > 0
        except Exception as error:
            raise AssertionError(f"python -m tests.chaos.groups_seeds {seed}") from error


@pytest.mark.parametrize("seed", TWICE)
def test_a_seed_of_several_groups_makes_one_history(seed: int) -> None:
    """The same seed gives the same log, byte for byte."""
    assert trial(seed)["log"] == trial(seed)["log"]
