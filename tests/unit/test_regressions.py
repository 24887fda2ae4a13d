"""A file of tokens: whose they are, what they were, and which line is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.testing.regressions import line, of, read, read_token

PLAN = Plan("engine", Scenario(nodes=2), (Fault("step 3", "kill_node", 1),), 5)


def test_read(tmp_path: Path) -> None:
    """Comments and empty lines are none; a token belongs to the test that is named, or to all."""
    path = tmp_path / "CHAOS_REGRESSIONS"
    one, all_of = line(PLAN.token() + "@2", "tests/t.py::test[a#b]", "a lost node"), line(PLAN.token())
    path.write_text(f"# what once failed\n\n{one}\n{all_of}\n")
    first, second = read(path)
    assert (first.plan, first.call, first.test, first.why) == (PLAN, 2, "tests/t.py::test[a#b]", "a lost node")
    assert (second.plan, second.call, second.test, second.why) == (PLAN, 1, "", "")
    assert of([first, second], "tests/t.py::test[a#b]") == [first, second]
    assert of([first, second], "tests/t.py::other") == [second]


def test_wrong_lines(tmp_path: Path) -> None:
    """A damaged token is told with its file and line."""
    path = tmp_path / "tokens.txt"
    path.write_text(f"{PLAN.token()}\n{PLAN.token()[:-3]}\n")
    with pytest.raises(PlanError, match=r"tokens\.txt:2: .*damaged"):
        read(path)


@pytest.mark.parametrize(
    "text", ["", "chaos1-", "seed 7", PLAN.token() + "@", PLAN.token() + "@0", PLAN.token() + "@x"]
)
def test_wrong_tokens(text: str) -> None:
    """What is no token is a PlanError, whatever it is."""
    with pytest.raises(PlanError):
        read_token(text)
