"""Profiles of nodes: who may be asked for one, and what an agent's answer settles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toy_concern.job.profiles import ProfileAsked, ProfileNode, ProfileTaken, ReportProfile

from dlrover_core.errors import Refused
from dlrover_core.kernel.engine import Rules, always, to_named
from dlrover_core.kernel.events import Event
from dlrover_core.rules import slots


def _ask(state: Any, command: ProfileNode, now: int) -> Iterator[Event]:
    if slots.present(state, command.node).node in state.profiles.open:
        raise Refused(f"{command.node} is profiled already")
    yield ProfileAsked(command.node, state.profiles.number + 1, command.steps)


def _report(state: Any, command: ReportProfile, now: int) -> Iterator[Event]:
    asked = state.profiles.open.get(command.node)
    if asked is None or asked.number != command.number:
        raise Refused(f"profile {command.number} is over")
    yield ProfileTaken(*command)


RULES = Rules(
    decide={ProfileNode: _ask, ReportProfile: _report},
    levels=dict.fromkeys((ProfileAsked, ProfileTaken), always),
    tells=to_named(lambda state, group: state.profiles.of(group)),
)
