"""Trials of a campaign: each is done once, several at a time, and its result says what broke."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tools import trials
from tools.trials import Found, Patience, Stopped, Trials


@pytest.fixture(autouse=True)
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where results go here."""
    monkeypatch.setattr(trials, "RESULTS", tmp_path)
    return tmp_path / "c.json"


def made(count: int, **same: int) -> Trials:
    """A campaign of so many trials."""
    return Trials("c", range(count), same, {"cores": 2}, lambda found: {"sum": sum(one.get("n", 0) for one in found)})


def doubled(number: int, _patience: Patience) -> Found:
    """A trial that keeps its promise, but for the third."""
    if number == 2:
        raise AssertionError("the promise")
    return {"n": 2 * number}


def test_the_result_names_what_broke(results: Path) -> None:
    """Date, commit, machine, count, sums and every trial that broke a promise are in the result."""
    assert made(4, seed=7).run(doubled, 2) == 1
    result = json.loads(results.read_text())
    assert result["trials"] == 4
    assert result["misses"] == 1
    assert [*result["failures"]] == ["2"]
    assert result["failures"]["2"].startswith("AssertionError: the promise (doubled, line ")
    assert result["sums"] == {"sum": 8}
    assert result["seed"] == 7
    assert result["machine"] == {"cores": 2}
    assert {"date", "commit"} <= result.keys()
    assert [one["trial"] for one in result["found"]] == [0, 1, 2, 3]


def test_a_stopped_campaign_goes_on(results: Path) -> None:
    """Trials that are done are not done again; other parameters, and a campaign that was complete, begin anew."""
    done: list[int] = []

    def noted(number: int, patience: Patience) -> Found:
        done.append(number)
        return doubled(number, patience)

    made(3, seed=7).run(noted, 1)
    made(5, seed=7).run(noted, 1)
    assert done == [0, 1, 2, 3, 4]
    assert [*json.loads(results.read_text())["failures"]] == ["2"]
    made(5, seed=7).run(noted, 1)
    made(2, seed=8).run(noted, 1)
    assert done[5:] == [0, 1, 2, 3, 4, 0, 1]


def test_trials_run_side_by_side() -> None:
    """Two trials that wait for each other both end."""
    both = threading.Barrier(2, timeout=10.0)

    def meets(_number: int, _patience: Patience) -> Found:
        both.wait()
        return {}

    assert made(2).run(meets, 2) == 0


def test_patience_ends_with_the_campaign() -> None:
    """A wait is bounded, and ends when the campaign is stopped."""
    patience = Patience()
    patience.until(lambda: True, "nothing", 1.0)
    with pytest.raises(AssertionError, match=r"never: not within 0\.01 s"):
        patience.until(lambda: False, "never", 0.01, look_s=0.001)
    patience.stop.set()
    with pytest.raises(Stopped):
        patience.sleep(60.0)
