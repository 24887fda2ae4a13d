"""The `Launcher` port: how an agent starts, stops and watches the workers of its node.

The agent's logic knows no process, signal or file; an implementation of this port does. The Linux one is in
`dlrover_adapters.agent`, the in-memory one in `dlrover_core.testing`. Both keep these promises:

* At most one generation of workers lives on a node. `start` is called only after `stop` returned True, or before any start.
* `notices` yields every exit exactly once, at once and without polling, including exits that `stop` asked for (`asked`).
* Nothing outlives `close`: no process, socket, shared memory or file descriptor of the launcher's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol, Union, runtime_checkable

from dlrover_core.diagnosis.stall import Pulse

TAIL_BYTES_MAX = 4096


class WorkersLaunch(NamedTuple):
    """The workers of one generation on this node.

    first_rank:    global rank of local rank 0; local rank ``i`` is rank ``first_rank + i``
    nproc:         workers of this node
    world_size:    ranks of the world
    node_rank:     this node's place in the world
    nodes:         nodes of the world
    store:         ``host:port`` of the TCPStore of this generation, on rank 0's node
    restart_count: earlier generations of this run
    max_restarts:  restarts that the job may use
    resume_step:   newest complete step that the leader knows of; -1: none
    node:          this node's name
    left_out:      samples that ranks leave out or suspect, as `dlrover_core.data.poison.told` has them; empty: none
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
    left_out: str = ""


class WorkerExit(NamedTuple):
    """One worker is dead and reaped.

    exit_code:          negative: killed by that signal
    asked:              `stop` had asked for it
    died_us:            time of death, by the launcher's monotonic clock
    step:               last step it had made; -1: unknown
    tail:               its last lines
    error, error_at_us: message and time of its error file
    last:               the launcher will not start workers again after this death, whatever is ordered
    signature, place:   how the launcher recognised the death, as in `Evidence`; empty: not
    work:               the samples that it had in work, as `InWork.text`; empty: none, or unknown
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
    work: str = ""


class WorkerStep(NamedTuple):
    """A worker has finished a step.

    first:      the first one of its generation
    at_us:      when, by the launcher's monotonic clock
    told:       ``step`` is the script's own number; else it counts optimizer calls of this process
    imports_us: time spent on imports until the first step; 0: not measured, or not the first step
    """

    generation: int
    rank: int
    step: int
    first: bool
    at_us: int
    told: bool = False
    imports_us: int = 0


class StoreReady(NamedTuple):
    """An unused TCPStore listens at ``address`` (``host:port``), for one generation."""

    address: str


class StoreGone(NamedTuple):
    """A ready store has ended, because its process died: no world may use it."""

    address: str


class WorkersGone(NamedTuple):
    """Every worker of ``generation`` is dead, and all exits came among the notices before this one."""

    generation: int


class WorkersStuck(NamedTuple):
    """Workers of ``generation`` survived the kill (D state, broken driver): the node is unusable."""

    generation: int
    pids: tuple[int, ...]


Notice = Union[WorkerExit, WorkerStep, StoreReady, StoreGone, WorkersGone, WorkersStuck]


class Launcher(Protocol):
    """Starts, stops and watches workers. Methods are called from the agent's loop and must not block it."""

    @property
    def nproc(self) -> int:
        """Workers per node that this launcher starts."""
        ...

    async def open(self) -> None:
        """Prepare everything (zygote, stores). Raises `LaunchFailed` when workers could never be started here."""
        ...

    async def start(self, launch: WorkersLaunch) -> None:
        """Start every worker of ``launch``; return when all exist. Raises `LaunchFailed`; then none of them lives."""
        ...

    def spend_store(self, address: str) -> None:
        """A world uses this store. If it is this node's, it serves that generation alone, and a new store is offered. Idempotent.

        Also called for a world that is superseded before it starts here; else this node would never offer a store again.
        """
        ...

    async def stop(self, grace_s: float, kill_wait_s: float) -> bool:
        """Stop all workers: SIGTERM if ``grace_s`` > 0, SIGKILL after it; True when every one is dead and reaped.

        False after ``kill_wait_s`` beyond the kill: something cannot be killed. Idempotent; True at once if none lives.
        """
        ...

    def notices(self) -> AsyncIterator[Notice]:
        """Everything that happens, in order, for one reader."""
        ...

    async def close(self) -> None:
        """Kill what is left (SIGKILL) and release everything."""
        ...


@runtime_checkable
class Pulsing(Protocol):
    """An optional method of a launcher that knows at any moment how long its workers have made no step."""

    def pulse(self) -> Pulse | None:
        """The pulse of all living workers together; None: unknown."""
        ...
