"""Events of planned changes in words."""

from __future__ import annotations

from typing import Any

from dlrover_core.history.phrases import stamp
from dlrover_core.history.words import Ends, Follows, Keys, Known, Words
from dlrover_core.job import plans
from dlrover_core.words import first_few

SHOWN_NODES_MAX = 8
_LOOK = "ranks are to look for a step boundary"
_GO = "all ranks look for its step boundary: it may be chosen"


def _change(fact: plans.WorldPlanned) -> str:
    said = [("to join", fact.joining), ("to leave", fact.leaving)]
    who = "; ".join(f"{first_few(names, SHOWN_NODES_MAX)} {verb}" for verb, names in said if names)
    who = who or "the job is to be suspended"
    return f"planned change {fact.plan} of {fact.group}, until {stamp(fact.deadline)}: {who}"


def _change_of(fact: Any, known: Known) -> tuple[int, ...]:
    return (known.newest(plans.WorldPlanned, fact.group),)


WORDS: Words = {
    plans.NodeDrained: lambda fact: (
        f"{fact.host} is wanted free of {fact.node}: {fact.reason}"
        if fact.host
        else f"{fact.node} leaves: {fact.reason}"
    ),
    plans.WorldPlanned: _change,
    plans.WorldPlanDropped: lambda fact: f"planned change {fact.plan} of {fact.group} is off: {fact.reason}",
    plans.BoundaryAsked: lambda fact: f"planned change {fact.plan} of {fact.group}: {_GO if fact.go else _LOOK}",
}

KEYS: Keys = {plans.WorldPlanned: lambda fact: fact.group}
ENDS: Ends = {plans.WorldPlanDropped: (plans.WorldPlanned, lambda fact: fact.group)}
FOLLOWS: Follows = dict.fromkeys((plans.BoundaryAsked, plans.WorldPlanDropped), _change_of)
