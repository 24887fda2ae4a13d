"""The `Launcher` port: how an agent starts, stops and watches the workers of its node.

The agent's logic is core and knows no process, signal or file; whoever implements this port does. The Linux one lives in
`dlrover_adapters.agent`, the in-memory one in `dlrover_core.testing`. Both obey the same promises:

* At most one generation of workers lives on a node. `start` is called only after `stop` returned True (or before any start).
* `notices` yields every exit exactly once, as soon as it happened, never polled; exits that `stop` asked for too (`asked`).
* Nothing outlives `close`: no process, socket, shared memory or file descriptor of the launcher's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol, Union, runtime_checkable

from dlrover_core.diagnosis.stall import Pulse

TAIL_BYTES_MAX = 4096


class WorkersLaunch(NamedTuple):
    """The workers of one generation on this node, as its world orders them.

    Ranks are global: local rank ``i`` is rank ``first_rank + i`` of ``world_size``. ``store`` is the ``host:port`` of the
    TCPStore opened for this generation alone, on the node that holds rank 0. ``restart_count``: this run's earlier generations.
    ``node`` is this node's name.
    """

    run: str
    generation: int
    first_rank: int
    nproc: int
    world_size: int
    node_rank: int
    nodes: int
    store: str
    restart_count: int
    max_restarts: int
    resume_step: int = -1
    node: str = ""


class WorkerExit(NamedTuple):
    """One worker is dead and reaped. ``exit_code`` is negative for a signal. ``died_us`` is the launcher's monotonic clock.

    ``last``: whoever starts workers here will not do so again after this death, whatever is ordered. ``signature`` and
    ``place``: what the launcher knows the death by, as `Evidence` has them; empty: nothing.
    """

    generation: int
    local_rank: int
    rank: int
    exit_code: int
    asked: bool
    died_us: int
    step: int = -1
    tail: str = ""
    error: str = ""
    error_at_us: int = 0
    last: bool = False
    signature: str = ""
    place: str = ""


class WorkerStep(NamedTuple):
    """A worker finished step ``step``.

    ``told``: that is the script's own number; else optimizer calls of this process, counted.
    ``imports_us``: what imports took until its first step; 0: not measured, or no first step.
    """

    generation: int
    rank: int
    step: int
    first: bool
    at_us: int
    told: bool = False
    imports_us: int = 0


class StoreReady(NamedTuple):
    """An unused TCPStore listens at ``address`` (``host:port``), ready to serve one generation."""

    address: str


class StoreGone(NamedTuple):
    """A store that was ready is not any more (its keeper died): it must not be named."""

    address: str


class WorkersGone(NamedTuple):
    """Every worker of ``generation`` is dead, and its exit was among the notices before this one."""

    generation: int


class WorkersStuck(NamedTuple):
    """Workers of ``generation`` did not die within the kill wait (D state, broken driver): the node is no good."""

    generation: int
    pids: tuple[int, ...]


Notice = Union[WorkerExit, WorkerStep, StoreReady, StoreGone, WorkersGone, WorkersStuck]


class Launcher(Protocol):
    """Start, stop, watch. Methods are called from the agent's loop and must not block it."""

    @property
    def nproc(self) -> int:
        """Workers per node that this launcher starts."""
        ...

    async def open(self) -> None:
        """Make everything warm (zygote, stores). Raises `LaunchFailed` when workers could never be started here."""
        ...

    async def start(self, launch: WorkersLaunch) -> None:
        """Start every worker of ``launch``; return when all of them exist. Raises `LaunchFailed`; then none of them lives."""
        ...

    def spend_store(self, address: str) -> None:
        """A world has named this store. If it is ours it serves that generation alone, and a new one is offered. Idempotent.

        Also called for a world that is superseded before it starts here, or nothing would ever be offered again.
        """
        ...

    async def stop(self, grace_s: float, kill_wait_s: float) -> bool:
        """Stop all workers: SIGTERM if ``grace_s`` > 0, SIGKILL after it; True when every one is dead and reaped.

        False after ``kill_wait_s`` beyond the kill: something cannot be killed. Idempotent; True at once if none lives.
        """
        ...

    def notices(self) -> AsyncIterator[Notice]:
        """Everything that happens, in order. One consumer."""
        ...

    async def close(self) -> None:
        """Kill what is left (SIGKILL) and release everything."""
        ...


@runtime_checkable
class Pulsing(Protocol):
    """What a launcher may have beside the port: it knows at any moment how long its workers have made no step."""

    def pulse(self) -> Pulse | None:
        """Of all living workers together; None where nobody can say."""
        ...
