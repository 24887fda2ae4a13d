"""The campaign `storms`: one short storm of fixed strikes, and what its checker notices."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.campaign_storms import Life, Strike, drawn, flaws, storm
from tools.trials import Patience

SECONDS, PAUSE_S = 7.0, 0.04
STRIKES = (
    Strike(1.0, "worker", 0.0, 0.0),
    Strike(2.5, "dlrover-saver", 0.9, 0.5),
    Strike(4.0, "worker", 0.9, 0.0),
    Strike(6.5, "dlrover-agent", 0.9, 0.0),
)


@pytest.mark.nightly(reason="test_random_kills and test_own_objects.py stand for it in make test")
@pytest.mark.timeout(300)
def test_a_short_storm_does_not_show_in_the_curve(tmp_path: Path) -> None:
    """Two workers and a node are killed, a saver is stopped: every loss, sampler position and draw is the undisturbed run's."""
    found = storm(tmp_path / "storm", STRIKES, SECONDS, Patience(), pause=PAUSE_S)
    assert "broken" not in found, found["broken"]
    assert found["strikes"] == len(STRIKES)
    assert sum(found["restores"].values()) >= 2


def test_strikes_are_the_seeds() -> None:
    """A seed always draws the same strikes, in the order of their times; another seed draws others."""
    strikes = drawn(1, 300.0)
    assert strikes == drawn(1, 300.0)
    assert strikes != drawn(2, 300.0)
    assert [one.at_s for one in strikes] == sorted(one.at_s for one in strikes)
    assert {one.stop_s > 0 for one in strikes} == {True, False}


def life(restored: int, steps: dict[int, str], stored: int = 0) -> Life:
    """A life of rank 1."""
    return Life(1, 77, restored, "memory", stored, 1.0, steps, dict.fromkeys(steps, 2.0))


def test_the_checker_sees_what_is_wrong() -> None:
    """Another value in a step that is made again, a step left out, and a beginning anew in spite of storage are flaws."""
    control = {1: {step: f"{step}" for step in range(1, 20)}}
    first = life(0, {1: "1", 2: "2", 3: "3"})
    assert flaws([first, life(2, {3: "3", 4: "4"})], control) == []
    assert "step 3: loss, position, draws x; the control has 3" in flaws([life(2, {3: "x"})], control)[0]
    assert "missing" in flaws([life(2, {3: "3", 5: "5"})], control)[0]
    assert "missing" in flaws([life(2, {4: "4"})], control)[0]
    assert "began anew, though storage had step 10" in flaws([life(0, {1: "1"}, stored=10)], control)[0]
