"""The matrix of what has struck when: summed, printed, kept, and missed once it shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.testing.coverage import gone, load, merged, save, table

HITS = {("kill_node", "training"): 12, ("kill_node", "wait"): 1, ("drop", "training"): 3}


def test_table() -> None:
    """A row per kind, a column per state, dots for what never happened, also in rows of kinds that never struck."""
    assert table(HITS, ["clock_jump"]) == [
        "            training  wait",
        "clock_jump         .     .",
        "drop               3     .",
        "kill_node         12     1",
    ]


def test_merged() -> None:
    """Runs add up."""
    assert merged([HITS, {("drop", "training"): 4}]) == {**HITS, ("drop", "training"): 7}


def test_kept(tmp_path: Path) -> None:
    """What is saved is loaded, counts aside, and the file says how it is made."""
    path = tmp_path / "coverage.txt"
    save(path, HITS, "make coverage")
    assert load(path) == frozenset(HITS)
    assert path.read_text().startswith("# Fault kind")
    assert "make coverage" in path.read_text()
    assert "kill_node: training wait\n" in path.read_text()


def test_gone() -> None:
    """A cell that was hit and is not, is named; one that is new is not missed."""
    assert gone(HITS, {**HITS, ("drop", "wait"): 1}) == []
    assert gone(HITS, {("drop", "training"): 0, ("kill_node", "wait"): 1}) == [
        "drop while training",
        "kill_node while training",
    ]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """A line that says nothing is refused with its number."""
    path = tmp_path / "coverage.txt"
    path.write_text("# head\nkill_node: training\nwhat\n")
    with pytest.raises(PlanError, match=r"coverage\.txt:3"):
        load(path)
