"""What agents and backends are told: orders, launches, both together as `Desired`. Orders' parts stand with their concerns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover_core.kernel.wire import P, Part, find, number_of


class NodeLaunch(NamedTuple):
    """A node that should exist and does not yet. ``name`` is the backend's name for it, unique for ever.

    ``avoid`` names hosts that it should not run on while there are others. Which there are only the backend knows: one with a
    single host starts the node there all the same, or draining a one-host job would end it. ``memory_mib`` is what it needs, 0:
    what there is; a backend that cannot give memory leaves it out of account.
    """

    name: str
    node: str
    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a launch
    incarnation: int
    nproc: int
    avoid: tuple[str, ...]
    memory_mib: int = 0


class Work(NamedTuple):
    """The workers that a node should run.

    generation:  the world's number
    first_rank:  the node's first rank in it; ``nproc`` ranks, of ``world_size``
    node_rank:   the node's place among the ``nodes`` of the world
    store:       the address of the world's store
    resume_step: the newest step that is whole as far as the leader knows; -1: none is
    restarts:    generations of this run before this one. Scripts are told, and torch's store keys contain it, so all ranks must
                 be told the same
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
    grace_us:  how long workers that are to be stopped have to end
    over:      the generation whose end on this node the leader wants to hear of; 0: none
    linger_us: for so long workers that are to be stopped may end by themselves
    outcome:   what to ``leave`` means: the job is over (succeeded, failed, stopped), or why this node alone is released
    root:      the root cause of a job that has failed
    work:      the workers that it should run; `NO_WORK`: none
    parts:     what concerns tell beside, at most one part of a class
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
        """That of the workers that should run; 0: none should."""
        return self.work.generation

    def part(self, cls: type[P]) -> P:
        """What a concern tells; what says nothing, if it tells nothing."""
        return find(self.parts, cls)

    def telling(self, *parts: Part) -> Order:
        """The same order with these parts, in place of those of the same class."""
        told = {type(one): one for one in (*self.parts, *parts)}
        said = [one for one in told.values() if one != type(one)()]
        return self._replace(parts=tuple(sorted(said, key=lambda one: number_of(type(one)))))


class Desired(NamedTuple):
    """What should be true now. Whatever a backend lists that is not in ``names`` is deleted."""

    names: frozenset[str]
    launch: tuple[NodeLaunch, ...]
    orders: Mapping[str, Order]


# Its identity is over, the job may go on without it: what a node hears that comes back after it was given up.
STRANGER = Order(leave=True, reason="not a node of this run", grace_us=0, outcome="lost")
