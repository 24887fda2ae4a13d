"""The smoke size of the campaign `seeds`: fixed seeds, every promise kept, the same log twice."""

from __future__ import annotations

import pytest
from tests.chaos.seeds import trial

SMOKE = range(40)
TWICE = range(0, 40, 10)


@pytest.mark.parametrize("block", range(0, len(SMOKE), 10))
def test_seeded_histories_keep_every_promise(block: int) -> None:
    """Whatever a seed does to a job, it succeeds, makes every step, restarts nobody needlessly, and leaves a legal log."""
    for seed in SMOKE[block : block + 10]:
        try:
            assert trial(seed)["events"] > 0
        except Exception as error:
            raise AssertionError(f"python -m tests.chaos.seeds {seed}") from error


@pytest.mark.parametrize("seed", TWICE)
def test_a_seed_makes_one_history(seed: int) -> None:
    """The same seed gives the same log, byte for byte."""
    assert trial(seed)["log"] == trial(seed)["log"]
