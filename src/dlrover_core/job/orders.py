"""What agents and backends are told: orders, launches, and both as `Desired`. Each concern defines its own order parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_core.kernel.wire import P, Part, find, number_of


class NodeLaunch(NamedTuple):
    """A node that should exist and does not yet.

    name:                    the backend's name for it, never used twice
    nproc:                   workers that it runs
    avoid:                   hosts that it must not run on
    memory_mib, cpu_m, gpus: what it needs (cpu_m: thousandths of a CPU); 0: what there is; a backend that cannot grant one
                             of these ignores it

    A backend that can choose hosts lets the node wait rather than start it on an avoided host, and says so (`AVOIDED`); the
    leader may then drop ``avoid``. A backend with a single host starts the node there all the same, or draining a job of
    one host would end the job.
    """

    name: str
    node: str
    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a launch
    incarnation: int
    nproc: int
    avoid: tuple[str, ...]
    memory_mib: int = 0
    cpu_m: int = 0
    gpus: int = 0


class Work(NamedTuple):
    """The workers that a node should run.

    generation:  the world's number
    first_rank:  the node's first rank
    nproc:       ranks of this node
    world_size:  ranks of the world
    node_rank:   the node's place in the world
    nodes:       nodes of the world
    store:       the address of the world's store
    resume_step: the newest complete step that the leader knows of; -1: none
    restarts:    generations of this run before this one; scripts are told, and torch's store keys contain it, so all ranks
                 of a world must be told the same number
    """

    generation: int = 0
    first_rank: int = 0
    nproc: int = 0
    world_size: int = 0
    node_rank: int = 0
    nodes: int = 0
    store: str = ""
    resume_step: int = -1
    restarts: int = 0


NO_WORK = Work()


class Order(NamedTuple):
    """What one agent should be doing.

    leave:     stop the workers and go
    reason:    why, for people
    grace_us:  how long workers that are stopped have to end
    over:      the generation whose end on this node the leader waits to hear of; 0: none
    linger_us: how long workers that are stopped may first end by themselves
    outcome:   what ``leave`` means: the job is over (succeeded, failed, stopped), or why this node alone is released
    root:      the root cause of a job that has failed
    work:      the workers that it should run; `NO_WORK`: none
    parts:     parts of other concerns, at most one of a class
    """

    leave: bool
    reason: str
    grace_us: int
    over: int = 0
    linger_us: int = 0
    outcome: str = ""
    root: str = ""
    work: Work = NO_WORK
    parts: tuple[Part, ...] = ()

    @property
    def generation(self) -> int:
        """The generation of the workers that should run; 0: none should."""
        return self.work.generation

    def part(self, cls: type[P]) -> P:
        """The part of this class; its empty value, if the order has none."""
        return find(self.parts, cls)

    def telling(self, *parts: Part) -> Order:
        """The same order with these parts, which replace parts of the same class."""
        told = {type(one): one for one in (*self.parts, *parts)}
        said = [one for one in told.values() if one != type(one)()]
        return self._replace(parts=tuple(sorted(said, key=lambda one: number_of(type(one)))))


class Desired(NamedTuple):
    """What should exist now. A node that a backend lists and that is not in ``names`` is deleted."""

    names: frozenset[str]
    launch: tuple[NodeLaunch, ...]
    orders: Mapping[str, Order]


# Its identity is over, the job may go on without it: what a node hears that comes back after it was given up.
STRANGER = Order(leave=True, reason="not a node of this run", grace_us=0, outcome="lost")
