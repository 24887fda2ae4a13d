"""What agents and backends are told: orders, launches, and both together as `Desired`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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


class Order(NamedTuple):
    """What one agent should be doing. ``generation`` 0: no workers. ``leave``: stop them and go.

    ``over`` is the generation whose end on this node the leader wants to hear of; 0: none. ``restarts`` counts the generations
    of this run before this one: scripts are told, and torch's store keys contain it, so all ranks must be told the same.
    For ``linger_us`` workers that are to be stopped may end by themselves. ``outcome`` says what to ``leave`` means: the job is
    over (succeeded, failed with its ``root`` cause, stopped), or why this node alone is released. ``probe`` is the number of a
    hang: show what the ranks are at; 0: there is none.

    ``check``: the number of the node check that it takes part in now; 0: none. Its round and kind; its place among the
    ``check_size`` nodes that work together, ``check_with`` whom, over ``check_store``; for how long at most; and
    when that was decided, by the leader's clock.

    ``committed`` is the newest step that is whole on storage, by the log (-1: none), of generation ``committed_of``: a step of
    that number of another generation is another state. ``persist``: the step of generation ``persist_of`` that is to be written
    there now, because that generation has ended (-1: none), by this node the parts of ``persist_places``: its own place in that
    world, or those of others that it keeps copies of. ``plan``: get ready for this planned change (0: none); ``plan_go``: its
    boundary may be chosen. ``replica_to``: where copies of this node's states go; empty: nowhere. ``lenders``: nodes that have
    left this world at the boundary ``resume_step``, and from where what they held there can still be had: the address, the
    first rank of theirs in the world before, and how many. ``mtbf_s``: seconds between failures to be expected; 0: unknown.
    ``decided``: of generations up to this one the leader will order nothing to be written beside ``persist``.
    """

    leave: bool
    reason: str
    grace_us: int
    generation: int = 0
    first_rank: int = 0
    nproc: int = 0
    world_size: int = 0
    node_rank: int = 0
    nodes: int = 0
    store: str = ""
    resume_step: int = -1
    over: int = 0
    restarts: int = 0
    linger_us: int = 0
    outcome: str = ""
    root: str = ""
    probe: int = 0
    check: int = 0
    check_round: int = 0
    check_kind: str = ""
    check_rank: int = 0
    check_size: int = 0
    check_store: str = ""
    check_with: tuple[str, ...] = ()
    check_us: int = 0
    check_at: int = 0
    committed: int = -1
    persist: int = -1
    persist_of: int = 0
    plan: int = 0
    plan_go: bool = False
    replica_to: str = ""
    mtbf_s: int = 0
    persist_places: tuple[int, ...] = ()
    lenders: tuple[tuple[str, int, int], ...] = ()
    committed_of: int = 0
    decided: int = 0


class Desired(NamedTuple):
    """What should be true now. Whatever a backend lists that is not in ``names`` is deleted."""

    names: frozenset[str]
    launch: tuple[NodeLaunch, ...]
    orders: Mapping[str, Order]


# Its identity is over, the job may go on without it: what a node hears that comes back after it was given up.
STRANGER = Order(leave=True, reason="not a node of this run", grace_us=0, outcome="lost")
