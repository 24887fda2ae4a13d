"""Haste: a program that fails as soon as it is started is not started again at once, for ever.

A restart costs a fraction of a second, so a script with a typo could burn a thousand of them in a minute. The first
restarts come at once all the same, because most early failures are a port or a mount that was not ready. From the third
such failure in a row on there is a pause before the next world forms, twice as long each time, up to `restart_pause_s`.

*Early* is a failure that was not the platform's doing, of a generation that has made no step, within `EARLY_S` of its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import PLAT
from dlrover_core.job import cycles, failures, job, progress, world
from dlrover_core.job.world import group_of
from dlrover_core.kernel.engine import Concern
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

EARLY_S = cycles.EARLY_S
AT_ONCE = 2
"""Early failures in a row that are answered at once."""
FIRST_PAUSE_S = 0.5


@dataclass(slots=True)
class Haste:
    """One group: when its world formed, whether that has made a step, and how many in a row failed early.

    ``pause_us``: how long the newest action asks the next world to wait.
    """

    formed_at: int = 0
    stepped: bool = False
    early: int = 0
    failed_at: int = 0
    pause_us: int = 0


@dataclass(slots=True)
class HasteSlice:
    """The groups; ``verdict`` is that of the newest incident."""

    groups: dict[str, Haste] = field(default_factory=dict)
    verdict: str = ""

    def of(self, group: str) -> Haste:
        """That of a group."""
        return self.groups.get(group) or Haste()

    def not_before(self, group: str, pause_max_s: float) -> int:
        """When the next world of a group may form, in microseconds; 0 where nothing was hasty."""
        haste = self.of(group)
        doublings = haste.early - AT_ONCE - 1
        early = us(min(FIRST_PAUSE_S * 2.0 ** min(doublings, 30), pause_max_s)) if doublings >= 0 else 0
        pause = max(early, haste.pause_us)
        return haste.failed_at + pause if pause or doublings >= 0 else 0


def _pausing(state: JobState) -> Iterator[tuple[str, int]]:
    """The groups whose next world waits for the end of a pause."""
    for group in state.haste.groups if state.job.forms else ():
        until = state.haste.not_before(group, state.job.spec.restart_pause_s)
        last = state.world.worlds.get(group)
        if until and last is not None and not last.active and not world.held(state, group):
            yield group, until


def _form(state: JobState, group: str, at: int) -> Iterator[Event]:
    at_once = world.complete(state, group)
    yield from world.form(state, group, at, "after a pause: the program fails at once", at_once=at_once)


def _due(state: JobState) -> int | None:
    # Only where a world could form then: what else it lacks says so by itself when it comes.
    times = [until for group, until in _pausing(state) if any(_form(state, group, until))]
    return min(times, default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group, until in list(_pausing(state)):
        if now >= until:
            yield from _form(state, group, now)


def _on_created(slice_: HasteSlice, fact: job.JobCreated, record: Record) -> None:
    slice_.groups.clear()


def _on_formed(slice_: HasteSlice, fact: world.WorldFormed, record: Record) -> None:
    haste = slice_.groups.setdefault(fact.group, Haste())
    haste.formed_at, haste.stepped = record.at, False


def _on_step(slice_: HasteSlice, fact: progress.FirstStep, record: Record) -> None:
    haste = slice_.groups.setdefault(group_of(fact.node), Haste())
    haste.stepped, haste.early = True, 0


def _on_diagnosed(slice_: HasteSlice, fact: failures.Diagnosed, record: Record) -> None:
    slice_.verdict = fact.verdict


def _on_chosen(slice_: HasteSlice, fact: failures.ActionChosen, record: Record) -> None:
    if fact.action not in ladder.IN_PLACE:
        return
    haste = slice_.groups.setdefault(group_of(fact.node), Haste())
    early = not haste.stepped and slice_.verdict != PLAT and record.at - haste.formed_at < us(EARLY_S)
    haste.early, haste.failed_at = (haste.early + 1 if early else 0), record.at
    haste.pause_us = fact.pause_us


CONCERN = Concern(
    name="haste",
    events=(),
    evolve={
        job.JobCreated: _on_created,
        world.WorldFormed: _on_formed,
        progress.FirstStep: _on_step,
        failures.Diagnosed: _on_diagnosed,
        failures.ActionChosen: _on_chosen,
    },
    decide={},
    react={},
    due=_due,
    tick=_tick,
)
