"""What the ladder, and a user's hook, are asked and answer: a case, its context, a choice."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """What is to be answered: the verdict, as the log has it. ``hint``: what usually suffices (`signatures.ACTIONS`)."""

    verdict: str
    signature: str
    confidence: float
    hint: str = ""
    place: str = ""
    blamed: str = ""
    host: str = ""


class Context(NamedTuple):
    """What the ladder knows of the job. Everything left of budgets is counted before the action.

    ``others``: places still wanted without this node; ``floor``: the fewest that make a world. ``stepped``: a step was made in
    this run, or may have been without a sign. ``repeats``: how often in a row the same failed at the same place with no step
    between, or at the same step; ``tried``: restarts in place in a row after which no step was made; ``stale``: cycles in a row
    that reached no new step. ``retries``: retries in a row. ``leave``: why its host is to be left, by what is remembered of it
    (`job.hosts`); empty: it is not. ``serves``: its group works for others, each node by itself, as parameter servers do.
    ``samples``: what is done about the samples that it had in work, so that another attempt ends otherwise; empty: nothing.
    ``poison``: why a sample that strikes again and again ends the job; empty: it does not.
    """

    restarts: int
    software: int
    relaunches: int
    others: int = 0
    floor: int = 1
    alive: bool = True
    joining: bool = False
    granted: bool = True
    stepped: bool = True
    repeats: int = 0
    tried: int = 0
    relaunched: bool = False
    stale: int = 0
    stale_max: int = 0
    retries: int = 0
    memory_mib: int = 0
    group: str = ""
    leave: str = ""
    serves: bool = False
    samples: str = ""
    poison: str = ""


class Choice(NamedTuple):
    """An action, the rule that chose it, and the budget it draws on: its name, and how much is left before and after."""

    action: str
    rule: str
    budget_left: int
    budget: str = ""
    budget_before: int = -1
    memory_mib: int = 0
    pause_us: int = 0
