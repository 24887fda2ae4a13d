"""The `Backend` port: a scheduler that can start and delete nodes, and says what it sees.

A backend translates and never decides. Everything else (ladders, budgets, worlds, bounded concurrency, back-off) is core.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol, Union

from dlrover_core.job.orders import NodeLaunch

PHASES = ("pending", "running", "succeeded", "failed", "gone")


class Observation(NamedTuple):
    """What a backend sees of one node. ``age_us``: how long ago; ``notice``: a drain or pre-emption that was announced."""

    name: str
    phase: str
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    domain: str = ""
    notice: str = ""
    notice_us: int = 0
    age_us: int = 0


class Listed(NamedTuple):
    """All nodes of the job. What it lacks is gone."""

    nodes: tuple[Observation, ...]


class Changed(NamedTuple):
    """One node changed."""

    node: Observation


class Backend(Protocol):
    """What a scheduler must offer. `dlrover_core.testing.BackendConformance` is the contract as tests."""

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start a node. Idempotent by ``node.name``.

        Raises `LaunchRefused`; any other error means unknown, and it is asked again.
        """
        ...

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Delete a node; an unknown name is fine. Returns when accepted, not when gone."""
        ...

    def observe(self) -> AsyncIterator[Union[Listed, Changed]]:
        """`Listed` first and after every error, then one `Changed` for every change."""
        ...

    async def room(self, group: str) -> int | None:
        """How many more nodes of the group would start now; None: unknown."""
        ...
