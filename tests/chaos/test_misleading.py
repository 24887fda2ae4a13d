"""The smoke size of the campaign `misleading`: nobody innocent is accused, and the campaign would notice."""

from __future__ import annotations

import re

import pytest
from tests.chaos.misleading_seeds import SMOKE, trial

from dlrover_core.diagnosis import places


@pytest.mark.timeout(300)
def test_smoke() -> None:
    """No innocent host is kept off, whatever is told of it, and broken hosts still are."""
    found = [trial(seed) for seed in SMOKE]
    broken = sum(told["hardware"] for told in found)
    assert broken == len(SMOKE) // 3
    assert sum(told["kept_off"] for told in found) == broken


def test_a_wrong_eviction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a route that is missing taken for a host's fault, its host would be kept off: a seed that found it says so."""
    monkeypatch.setattr(places, "_CONNECTS", re.compile("never said"))
    with pytest.raises(AssertionError, match=r"kept off, by ib\.fatal"):
        trial(6)
