"""The smoke size of the campaign `joining_seeds`: fixed seeds, every promise kept, the same log twice."""

from __future__ import annotations

import pytest
from tests.chaos.joining_seeds import trial

SMOKE = range(20)
TWICE = range(0, 20, 10)


@pytest.mark.parametrize("block", range(0, len(SMOKE), 10))
def test_joining_histories_keep_every_promise(block: int) -> None:
    """Whatever a seed does to hosts that come by themselves, the job goes on, every step is made once, and all hear the end."""
    for seed in SMOKE[block : block + 10]:
        try:
            assert trial(seed)["events"] > 0
        except Exception as error:
            raise AssertionError(f"python -m tests.chaos.joining_seeds {seed}") from error


@pytest.mark.parametrize("seed", TWICE)
def test_a_joining_seed_makes_one_history(seed: int) -> None:
    """The same seed gives the same log, byte for byte."""
    assert trial(seed)["log"] == trial(seed)["log"]
