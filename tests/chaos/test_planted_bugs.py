"""The harness finds bugs that were planted on purpose, and tells each by its one to three causes. The smoke size of `planted`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.planted import FAULTS_IT_TAKES, FAULTS_LEFT_MAX, TRIALS, planted, run, search
from tests.chaos.planted_groups import BUGS

from dlrover_core.sim.faults import ENGINE
from dlrover_core.sim.scenario import plan_of
from dlrover_core.testing.shrink import promise_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "planted.json"
FOUND: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["bugs"] if RESULTS.is_file() else {}
AGAIN = "the harness has changed: python -m tools.campaign planted"
# Found by one of the first seeds, and shrunk: in a second or two each.
QUICK = ("lost_dedup", "world_formed_twice", "rank_held_twice", "incident_never_closed")


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_was_found_and_shrunk(name: str) -> None:
    """Each planted bug was found within 1,000 seeds, by a promise, and what it takes are three faults at most."""
    assert name in FOUND, AGAIN
    told = FOUND[name]
    assert 0 < told["seeds"] <= TRIALS
    assert len(told["faults"]) <= FAULTS_IT_TAKES.get(name, FAULTS_LEFT_MAX)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_the_bug(name: str) -> None:
    """The plan that was left breaks the same promise with the bug, and none without it."""
    told = FOUND[name]
    plan = plan_of(told["token"])
    with planted(name), pytest.raises(Exception) as broken:
        run(plan)
    assert promise_of(broken.value) == told["promise"], AGAIN
    run(plan)


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_is_found_and_shrunk(name: str) -> None:
    """Seeds drawn now find the bug, and delta debugging leaves three of its faults at most, within the usual replays."""
    found = search(name, range(20), ENGINE)
    assert found is not None, BUGS[name].says
    assert found.whole
    assert len(found.least.faults) <= FAULTS_LEFT_MAX
