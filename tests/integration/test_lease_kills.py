"""The smoke size of the campaign `lease_kills`: real jobs that lease samples, are killed and change their size."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tools.campaign_leases import LIMIT_S, drawn, trial  # it needs torch

SEEDS = (0, 1, 2)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(int(3 * LIMIT_S))]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_sample_counts_once(seed: int) -> None:
    """In the model, or in what was used, whatever was killed; the log says what was used twice."""
    assert drawn(seed) == drawn(seed)
    assert trial(seed)["models"] == drawn(seed).model
