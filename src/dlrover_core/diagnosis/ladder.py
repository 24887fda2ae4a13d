"""The action ladder: the cheapest rung that suffices and that the budgets still allow.

Act at once, judge at leisure: a needless restart costs less than waiting for certainty. What cannot be undone (failing the
job) is held until every rank's evidence is in.
"""

from __future__ import annotations

from typing import NamedTuple

RESTART_PROCESSES = "RESTART_PROCESSES"
RELAUNCH_NODE = "RELAUNCH_NODE"
GO_ON_SMALLER = "GO_ON_SMALLER"
AWAIT_EVIDENCE = "AWAIT_EVIDENCE"
FAIL_JOB = "FAIL_JOB"


class Choice(NamedTuple):
    """An action, the rule that chose it, and what is left of the budget it draws on after it."""

    action: str
    rule: str
    budget_left: int


def for_workers(restarts_left: int) -> Choice:
    """Workers died, their node lives."""
    if restarts_left > 0:
        return Choice(RESTART_PROCESSES, "workers.restart: the node lives and restarts are left", restarts_left - 1)
    return Choice(AWAIT_EVIDENCE, "workers.exhausted: no restarts left (--max-restarts)", 0)


def for_node(relaunches_left: int, others: int, floor: int, *, refused: bool = False) -> Choice:
    """A node is gone. ``others``: places still wanted without it; ``floor``: the fewest that make a world.

    ``refused``: its backend will never start it, so that asking again is pointless.
    """
    if refused and others < floor:
        return Choice(
            AWAIT_EVIDENCE, "node.refused: its backend will not start it, and too few nodes are left without it", 0
        )
    if refused:
        return Choice(GO_ON_SMALLER, "node.refused: its backend will not start it, enough nodes without it", 0)
    if relaunches_left > 0:
        return Choice(RELAUNCH_NODE, "node.relaunch: its place is wanted and relaunches are left", relaunches_left - 1)
    if others >= floor:
        return Choice(GO_ON_SMALLER, "node.shrink: no relaunches left, enough nodes without it", 0)
    return Choice(AWAIT_EVIDENCE, "node.exhausted: no relaunches left and too few nodes without it", 0)
