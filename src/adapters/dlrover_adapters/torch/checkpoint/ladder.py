"""What rank 0 decides in a restore, and how it is told: from the inventories of all ranks to a plan, from verdicts to the next.

Nothing here touches a state; `restore` does what is decided.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_adapters.checkpoint import listing
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader
from dlrover_core.checkpoint import agreement
from dlrover_core.checkpoint.agreement import DISK, MEMORY, STORAGE, Holders, Node, Piece, Plan, Refusal, Source
from dlrover_core.data.trained import RanksMissing
from dlrover_core.errors import CoreError, SpecError
from dlrover_core.words import first_few

from .positions import conflict
from .trained import Words, together

log = logging.getLogger("dlrover.torch")

TRY, APPLY, NOTHING, FAIL = "try", "apply", "nothing", "fail"
PEER = "peer"
NOWHERE = "nowhere"
"""The kind of a piece that only says of which form its state is."""
_FELL_MAX = 32
_WHY_CHARS = 400


class RestoreFailed(CoreError):
    """No state could be restored, and it would be wrong to go on without: the message says why, and what to do."""


class Told(NamedTuple):
    """What one rank has to say first. ``node``: its name; ``committed``: the newest step on storage by the log, -1: none known.

    ``holders``: by (layout, world). ``fell``: what of its memory could not be read, in words. ``lenders``: nodes that have left
    the world and wait with their memory (address, first rank, how many), with the state (generation, step) that is ``lent``.
    ``own``: the ranks that have objects of their own, by (layout, world). ``joined``: of these forms, those whose states are
    only known where the objects of all ranks are read.
    """

    rank: int
    node: str
    address: str
    committed: int
    pieces: tuple[Piece, ...] = ()
    holders: tuple[tuple[tuple[int, int], Holders], ...] = ()
    disk: tuple[tuple[int, int], ...] = ()
    fell: tuple[tuple[str, str], ...] = ()
    lent: tuple[int, int] = (0, -1)
    lenders: tuple[tuple[str, int, int], ...] = ()
    own: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = ()
    joined: tuple[tuple[int, int], ...] = ()

    def packed(self) -> bytes:
        """For rank 0."""
        return cast(bytes, msgpack.packb(tuple(self)))

    @classmethod
    def unpacked(cls, raw: bytes) -> Told:
        """From a rank."""
        told = cls(*msgpack.unpackb(raw, use_list=False))
        return told._replace(pieces=tuple(Piece(*one) for one in told.pieces))


class Verdict(NamedTuple):
    """What one rank makes of a plan: ``bad`` pieces by old rank (-1: all that it reads), each with a reason.

    ``fatal``: it cannot go on with any plan. ``torn``: its tensors have been written to. ``cuts``: the positions in the data that
    the pieces have, packed, each with old ranks that have it. ``trained``: what old ranks were trained on, as `Words`.
    """

    bad: tuple[tuple[int, str], ...] = ()
    fatal: str = ""
    torn: bool = False
    cuts: tuple[tuple[bytes, tuple[int, ...]], ...] = ()
    trained: tuple[Any, ...] = Words()

    def packed(self) -> bytes:
        """For rank 0."""
        return cast(bytes, msgpack.packb(tuple(self)))


class Order(NamedTuple):
    """What all ranks do next. ``places``: of each rank its node's index; ``addresses`` by node.

    ``trained``: what the state was trained on by leases, packed by `dlrover_core.data.trained`; empty: nothing.
    """

    what: str
    plan: Plan | None = None
    places: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    fell: tuple[tuple[str, str], ...] = ()
    why: str = ""
    trained: bytes = b""

    def packed(self) -> bytes:
        """For all."""
        return cast(bytes, msgpack.packb(tuple(self)))

    @classmethod
    def unpacked(cls, raw: bytes) -> Order:
        """From rank 0."""
        order = cls(*msgpack.unpackb(raw, use_list=False))
        if order.plan is None:
            return order
        plan = Plan(*order.plan)
        sources = tuple(tuple(Source(*one) for one in read) for read in plan.sources)
        return order._replace(plan=plan._replace(sources=sources))


class Judge:
    """Rank 0's part. ``run``: ours, whose generations are comparable. ``step``: only this one, and from storage.

    ``generation``: the one that restores.
    """

    def __init__(self, place: Place | None, run: str, step: int | None, generation: int = 0) -> None:
        self._place, self._run, self._step, self._generation = place, run, step, generation
        self._nodes: list[Node] = []
        self._names: list[str] = []
        self._own: dict[tuple[int, int], tuple[int, ...]] = {}
        self._joined: set[tuple[int, int]] = set()
        self._places: tuple[int, ...] = ()
        self._holders: dict[tuple[int, int], Holders] = {}
        self._committed = -1
        self._stored: frozenset[tuple[int, int]] | None = None
        self._refused: set[Refusal] = set()
        self._fell: list[tuple[str, str]] = []
        self._plan: Plan | None = None
        self._torn = False

    def first(self, told: list[bytes]) -> bytes:
        """The first plan, from what all ranks have."""
        ranks = [Told.unpacked(one) for one in told]
        names = self._names = list(dict.fromkeys(one.node for one in ranks))
        self._places = tuple(names.index(one.node) for one in ranks)
        for name in names:
            mine = [one for one in ranks if one.node == name]
            pieces = tuple(sorted({piece for one in mine for piece in one.pieces if piece.kind != NOWHERE}))
            address = next((one.address for one in mine if one.address), "")
            disk = tuple(sorted({state for one in mine for state in one.disk}))
            self._nodes.append(Node(tuple(one.rank for one in mine), pieces, address, disk))
        for one in ranks:
            self._holders.update(one.holders)
            self._own.update(one.own)
            self._joined.update(one.joined)
            for tier, why in one.fell:
                self._fall(tier, why)
        self._committed = max(one.committed for one in ranks)
        self._nodes += _lent(ranks)
        newer = max(
            (one.step for each in ranks for one in each.pieces if one.generation >= self._generation), default=-1
        )
        if self._step is not None and newer > self._step:
            return Order(FAIL, why=_no_way_back(self._step, newer)).packed()
        return self._next()

    def then(self, told: list[bytes]) -> bytes:
        """All can use the plan: apply it. Else the next one."""
        verdicts = [Verdict(*msgpack.unpackb(one, use_list=False)) for one in told]
        plan = self._plan
        assert plan is not None
        self._torn = self._torn or any(one.torn for one in verdicts)
        fatal = next((f"rank {rank}: {one.fatal}" for rank, one in enumerate(verdicts) if one.fatal), "")
        if fatal:
            return Order(FAIL, why=fatal).packed()
        if not any(one.bad for one in verdicts):
            why = conflict(plan.step, (one.cuts for one in verdicts))
            if why:
                return Order(FAIL, why=why).packed()
            try:
                trained = together(Words(*one.trained) for one in verdicts)
            except RanksMissing as missing:
                for place in range(len(plan.sources) or 1):
                    self._refused.update(agreement.refusals(plan, place, -1))
                self._fall(plan.tier, f"step {plan.step} of generation {plan.generation}: {missing}")
                return self._next()
            except SpecError as error:
                return Order(FAIL, why=f"step {plan.step}: {error}").packed()
            return self._order(APPLY, trained)
        for rank, verdict in enumerate(verdicts):
            place = self._places[rank]
            for old, why in verdict.bad:
                self._refused.update(agreement.refusals(plan, place, old))
                self._fall(self._tier(plan, place, old), f"rank {rank}: {why}")
        return self._next()

    def _next(self) -> bytes:
        before = self._plan
        self._plan = self._planned()
        if self._plan is not None and self._plan != before:
            return self._order(TRY)
        fell = tuple(self._fell)
        tried = "; ".join(f"{tier}: {why}" for tier, why in fell) or "nothing was found"
        if self._step is not None:
            return Order(FAIL, why=f"step {self._step} cannot be restored: {tried}{self._others()}").packed()
        if self._torn or any(tier in {DISK, STORAGE} for tier, _why in fell):
            # To begin anew beside checkpoints that cannot be read would in the end have them removed as the older ones.
            torn = "; this worker's state is overwritten in part" if self._torn else ""
            why = f"there are checkpoints, and none can be used: {tried}{torn}"
            return Order(FAIL, why=f"{why}; mend what is named, or move it away, and start again").packed()
        lost = self._lost()
        return Order(NOTHING, fell=tuple(self._fell), why=lost).packed()

    def _lost(self) -> str:
        """What is lost where training begins anew although there are states in memory, for people; empty: there are none."""
        pieces = {piece for node in self._nodes for piece in node.pieces}
        if not pieces:
            return ""
        newest = max(pieces, key=lambda one: (one.generation, one.step))
        if not self._fell:
            state = (newest.world, newest.generation, newest.step, newest.layout)
            here = {one.rank for one in pieces if (one.world, one.generation, one.step, one.layout) == state}
            lacking = _numbers([rank for rank in range(newest.world) if rank not in here])
            step = f"step {newest.step} of generation {newest.generation}"
            self._fall(MEMORY, f"{step}: nobody has the parts of rank {lacking}; {_looked(self._names)}")
        storage = "storage has no checkpoint" if self._place else "no storage is given"
        remedy = "choose a smaller store_every=" if self._place else "give FlashCheckpoint a URL of storage"
        why = "; ".join(why for _tier, why in self._fell[:2])
        return (
            f"training begins anew, and all steps to step {newest.step} are lost: {why}; {storage}. To lose less the next time "
            f"a node is lost, {remedy}, or call ckpt.save() early"
        )

    def _others(self) -> str:
        """Which steps there are to choose from, in words."""
        try:
            found = (
                [one.step for one in listing.steps(self._place) if one.state == listing.COMPLETE] if self._place else []
            )
        except (OSError, CoreError):
            return ""
        return f"; complete are: {', '.join(map(str, found)) or 'none'}"

    def _planned(self) -> Plan | None:
        """The best plan; storage is only listed where it may have something newer, or is all that is left."""
        if self._step is not None:
            return agreement.plan([], {}, self._listed(), self._refused)
        own = self._own, self._joined
        plan = agreement.plan(self._nodes, self._holders, self._stored or (), self._refused, *own)
        if self._stored is None and (plan is None or plan.step < self._committed):
            plan = agreement.plan(self._nodes, self._holders, self._listed(), self._refused, *own)
        for lack in agreement.passed_over(self._nodes, self._holders, self._refused, self._own, plan):
            self._fall(MEMORY, _lacks(lack, self._names))
        return plan

    def _listed(self) -> frozenset[tuple[int, int]]:
        """What is complete on storage; what other runs left there is older than anything of ours."""
        if self._stored is None:
            self._stored = frozenset()
            try:
                self._stored = frozenset(
                    states_of(self._place, self._run, self._fall, self._step, committed=self._committed)
                )
            except (OSError, CoreError) as error:
                self._fall(STORAGE, f"cannot be listed: {error}")
        return self._stored

    def _fall(self, tier: str, why: str) -> None:
        if (tier, why) not in self._fell and len(self._fell) < _FELL_MAX:
            log.warning("checkpoint: %s cannot be used: %s", tier, why)
            self._fell.append((tier, why[:_WHY_CHARS]))

    @staticmethod
    def _tier(plan: Plan, place: int, old: int) -> str:
        """As it is told to people."""
        if not plan.sources:
            return plan.tier
        return PEER if any(one.rank == old and one.node != place for one in plan.sources[place]) else plan.tier

    def _order(self, what: str, trained: bytes = b"") -> bytes:
        plan = self._plan
        assert plan is not None
        addresses = tuple(node.address for node in self._nodes)
        return Order(what, plan, self._places, addresses, tuple(self._fell), trained=trained).packed()


def _lacks(lack: agreement.Lack, names: list[str]) -> str:
    """Why a state was passed over that has all tensors, in words."""
    return (
        f"step {lack.step} of generation {lack.generation}: nobody has the objects that only rank {_numbers(lack.ranks)} had "
        f"(random numbers, extra); {_looked(names)}"
    )


def _numbers(ranks: Sequence[int]) -> str:
    return first_few(ranks)


def _looked(names: list[str]) -> str:
    where = ", ".join(names[:4]) + (f" and {len(names) - 4} more nodes" if len(names) > 4 else "")
    return f"looked for in the memory of {where}"


def _no_way_back(step: int, newer: int) -> str:
    return (
        f"step {step} cannot be restored while this generation holds step {newer}, which it has saved itself: the next failure "
        f"would bring that one back. To go back, stop the job, remove the newer steps (dlrover ckpt rm URL --step N), and start "
        "it anew"
    )


def _lent(ranks: list[Told]) -> list[Node]:
    """Nodes that lend what their ranks had; of which form that is, others know who have pieces of the same state."""
    found = {}
    for told in ranks:
        like = next((one for each in ranks for one in each.pieces if (one.generation, one.step) == told.lent), None)
        if like is None:
            continue
        for address, first, count in told.lenders:
            pieces = [
                like._replace(kind=agreement.REPLICA, rank=first + local, local_rank=local) for local in range(count)
            ]
            found[address] = Node((), tuple(pieces), address)
    return list(found.values())


def states_of(
    place: Place | None,
    run: str,
    fall: Callable[[str, str], None],
    step: int | None = None,
    *,
    tier: str = STORAGE,
    committed: int = -1,
) -> Iterable[tuple[int, int]]:
    """(generation, step) of what is complete there; generations of other runs are negative, the newest run's last.

    ``committed``: this step is complete by the log, even if whoever was to seal it died. Raises OSError, `CoreError`.
    """
    if place is None:
        return []
    steps = listing.steps(place) if step is None else [listing.look(place, step)]
    complete = [one for one in steps if one.state == listing.COMPLETE]
    for one in steps:
        unsealed = one.state == listing.INCOMPLETE and one.step == committed and one.run == run
        if unsealed and _readable(place, one, functools.partial(fall, tier)):
            complete.append(one)
        elif one.state in {listing.DAMAGED, listing.NEWER} or (step is not None and one.state != listing.COMPLETE):
            fall(tier, f"step {one.step}: {one.why or 'it is not there'}")
    others = sorted(
        (one for one in complete if one.run != run), key=lambda one: (one.changed, one.generation, one.step)
    )
    return [(one.generation, one.step) for one in complete if one.run == run] + [
        (number - len(others), one.step) for number, one in enumerate(others)
    ]


def _readable(place: Place, one: listing.Step, fall: Callable[[str], None]) -> bool:
    """Are all parts of a step there?"""
    try:
        StepReader(place, one.step, run=one.run, generation=one.generation)
    except (OSError, CoreError) as error:
        fall(f"step {one.step}: {error}")
        return False
    return True


__all__ = [
    "APPLY",
    "DISK",
    "FAIL",
    "NOTHING",
    "PEER",
    "TRY",
    "Judge",
    "Order",
    "RestoreFailed",
    "Told",
    "Verdict",
    "states_of",
]
