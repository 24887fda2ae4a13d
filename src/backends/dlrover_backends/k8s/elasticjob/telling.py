"""The port to a job's masters: what they say of the job, and what the operator asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Size(NamedTuple):
    """A group, as its masters have it: fewest and most nodes, and how many work now."""

    nodes_min: int
    nodes_max: int
    running: int


class Told(NamedTuple):
    """What the masters of a job say.

    state:     of the job: created, running, suspended, stopping, succeeded, failed, stopped
    reason:    why it ended
    pausing:   a suspension is planned, and has not begun
    step:      the newest step; -1: none
    goodput:   share of the time in which new steps were made, 0 to 1
    incidents: how many there were
    incident:  the newest incident, in a line; empty: there was none
    groups:    sizes by group
    waits:     why nodes wait, in the platform's words
    """

    state: str
    reason: str = ""
    pausing: bool = False
    step: int = -1
    goodput: float = 0.0
    incidents: int = 0
    incident: str = ""
    groups: Mapping[str, Size] = {}
    waits: tuple[str, ...] = ()


class At(NamedTuple):
    """Where a job's masters are reached.

    address: ``host:port``
    token:   the job's
    job:     its name
    run:     the run's name
    """

    address: str
    token: str
    job: str
    run: str


class Masters(Protocol):
    """Asks masters."""

    async def look(self, at: At) -> Told:
        """What they say now. Raises `CoreError` where none answers."""
        ...

    async def tell(self, at: At, asked: Mapping[str, Any]) -> None:
        """Have them do something. Raises `Refused` where the job's state forbids it, `CoreError` where none answers."""
        ...

    def forget(self, run: str) -> None:
        """The run is over, or gone."""
        ...
