"""The action ladder: the cheapest rung that suffices and that the budgets still allow."""

from __future__ import annotations

import pytest

from dlrover_core.diagnosis import ladder


@pytest.mark.parametrize(
    ("left", "action", "after"), [(3, "RESTART_PROCESSES", 2), (1, "RESTART_PROCESSES", 0), (0, "AWAIT_EVIDENCE", 0)]
)
def test_workers(left: int, action: str, after: int) -> None:
    """Dead workers on a living node are restarted while restarts are left; then the final decision waits for evidence."""
    choice = ladder.for_workers(left)
    assert (choice.action, choice.budget_left) == (action, after)


@pytest.mark.parametrize(
    ("left", "others", "floor", "action", "after"),
    [
        (3, 1, 2, "RELAUNCH_NODE", 2),
        (1, 9, 2, "RELAUNCH_NODE", 0),
        (0, 2, 2, "GO_ON_SMALLER", 0),
        (0, 1, 2, "AWAIT_EVIDENCE", 0),
        (0, 0, 1, "AWAIT_EVIDENCE", 0),
    ],
)
def test_nodes(left: int, others: int, floor: int, action: str, after: int) -> None:
    """A dead node is relaunched while relaunches are left, then done without if enough remain, else the job ends."""
    choice = ladder.for_node(left, others, floor)
    assert (choice.action, choice.budget_left) == (action, after)


def test_budgets_never_go_below_zero() -> None:
    """An overdrawn budget is an empty one."""
    assert ladder.for_workers(-1).budget_left == ladder.for_node(-1, 0, 1).budget_left == 0


def test_every_rule_has_a_name_of_its_own() -> None:
    """Each choice says by which rule, and rules differ, so that explanations do."""
    rules = [
        ladder.for_workers(1),
        ladder.for_workers(0),
        ladder.for_node(1, 1, 1),
        ladder.for_node(0, 1, 1),
        ladder.for_node(0, 0, 1),
    ]
    assert len({choice.rule.split(":")[0] for choice in rules}) == len(rules)
