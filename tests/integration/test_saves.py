"""The campaign of kills within saves, a few of them with fixed seeds; all thousand by ``python -m tools.campaign saves``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 110

pytestmark = pytest.mark.timeout(LIMIT_S + 10)


def trials(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """What the campaign told, in a process of its own: it forks its ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.campaign_saves", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in {0, 1}, done.stderr[-2000:]
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_ranks_killed_within_saves_leave_a_state_that_is_whole_on_all() -> None:
    """Two and four ranks, one and two victims, every step, second and tenth: what all hold is whole, unmixed, and the newest."""
    code, told = trials("--trials", "12")
    assert code == 0, [one for one in told if "broken" in one]
    assert len(told) == 12
    assert sum(one["hit"] for one in told) >= 6, "hardly any kill was within a save"


def test_a_rank_that_overwrites_what_others_still_need_is_found() -> None:
    """With two slots and saves in every step, always overwriting the oldest loses everything; the campaign must see that."""
    code, told = trials("--careless", "--until-broken", "--first", "12", "--trials", "40")
    assert code == 1, "a planted fault was not found"
    assert "no whole generation" in told[-1]["broken"]
