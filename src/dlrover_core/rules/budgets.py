"""The restart budget of another launcher is used up."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.errors import Refused
from dlrover_core.job.budgets import RestartsSpent, SpendRestarts
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event
from dlrover_core.rules import slots


def _spend(state: JobState, command: SpendRestarts, now: int) -> Iterator[Event]:
    slots.present(state, command.node)
    if command.node in state.budgets.spent or not state.job.live:
        raise Refused(f"the job is {state.job.state}, and node {command.node!r} has said so already")
    yield RestartsSpent(command.node, command.generation)


RULES = Rules(
    decide={SpendRestarts: _spend},
    levels={RestartsSpent: always},
)
