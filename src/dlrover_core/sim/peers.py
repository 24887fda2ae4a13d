"""Whom an agent of a simulation meets, as far as it needs them; ``A_contra`` is the agent."""

from __future__ import annotations

from typing import Protocol, TypeVar

from dlrover_core.job.orders import Order
from dlrover_core.kernel.engine import Command
from dlrover_core.sim.links import Link

A_contra = TypeVar("A_contra", contravariant=True)


class Leader(Protocol[A_contra]):
    """A master, as agents and the network meet it."""

    serving: bool

    def serves(self, agent: A_contra) -> bool:
        """Is this agent's connection its own?"""
        ...

    def hello(self, agent: A_contra) -> None:
        """An agent greets."""
        ...

    def opened(self, agent: A_contra, told: Order | None) -> None:
        """A conversation begins."""
        ...

    def closed(self, agent: A_contra) -> None:
        """A conversation is over."""
        ...

    def receive(self, agent: A_contra, connection: int, number: int, command: Command) -> None:
        """A command has come."""
        ...

    def heard(self, node: str) -> None:
        """A node speaks again."""
        ...

    def unheard(self, node: str) -> None:
        """A node has fallen silent."""
        ...


class World(Protocol):
    """A generation's workers."""

    generation: int


class Training(Protocol[A_contra]):
    """What agents tell of their workers, and ask of them."""

    made: int

    @property
    def stepping(self) -> bool:
        """Are steps made?"""
        ...

    @property
    def world(self) -> World | None:
        """The newest."""
        ...

    def step_now(self) -> int:
        """The last step that was made."""
        ...

    def joined(self, agent: A_contra, generation: int, nodes: int) -> None:
        """A node's workers run."""
        ...

    def left(self, agent: A_contra, generation: int) -> None:
        """A node's workers are stopped."""
        ...

    def died(self, agent: A_contra, generation: int, *, cascades: bool) -> None:
        """A worker is dead."""
        ...

    def shown(self, agent: A_contra) -> tuple[str, ...]:
        """What its ranks are at."""
        ...


class Network(Protocol[A_contra]):
    """What agents ask of their links."""

    def link(self, node: str) -> Link:
        """A node's link."""
        ...

    def dial(self, agent: A_contra) -> None:
        """Find who leads."""
        ...

    def hang_up(self, agent: A_contra) -> None:
        """End the conversation."""
        ...

    def report(self, agent: A_contra, number: int, command: Command) -> None:
        """Send a command."""
        ...


class Meter(Protocol):
    """Who measures the job's time."""

    def stopping(self, node: str, *, busy: bool) -> None:
        """A node stops its workers, or has."""
        ...


class Scheduler(Protocol):
    """Who started the agents."""

    def left(self, name: str) -> None:
        """An agent has ended by itself."""
        ...
