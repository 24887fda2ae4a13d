"""The campaign of kills within saves, a few of them with fixed seeds; all thousand by ``python -m tools.campaign saves``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 110
FEW, CARELESS = 12, 40

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def test_ranks_killed_within_saves_leave_a_state_that_is_whole_on_all() -> None:
    """Two and four ranks, one and two victims, every step, second and tenth: what all hold is whole, unmixed, and the newest.

    And the campaign sees that a rank overwrites what others still need: with two slots and saves in every step, always
    overwriting the oldest loses everything. Both in one process of its own, which forks its ranks.
    """
    line = [sys.executable, "-m", "tools.campaign_saves", "--trials", str(FEW), "--then-careless", str(CARELESS)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    told = [json.loads(one) for one in done.stdout.splitlines()]
    sound, careless = told[:FEW], told[FEW:]
    assert [one for one in sound if "broken" in one] == []
    assert len(sound) == FEW, done.stderr[-2000:]
    assert sum(one["hit"] for one in sound) >= 6, "hardly any kill was within a save"
    assert careless, done.stderr[-2000:]
    assert "broken" in careless[-1], "a planted fault was not found"
    assert "no whole generation" in careless[-1]["broken"]
    assert done.returncode == 1, done.stderr[-2000:]
