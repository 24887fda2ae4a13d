"""A restore: from own memory, else a peer's, else this host's disk, else storage; verified, and the same state on all ranks.

Collective. All ranks say what their nodes have, rank 0 decides by the pure `dlrover_core.checkpoint.agreement`, all try, and all
say whether what they got is good; if it is not, everybody goes on to the next best, loudly. Only then is anything written into
the model: a restore that finds nothing leaves everything as it was. (From disk and storage bytes are verified on the way into the
tensors; if all of those fail, that is an error, not a start from nothing.)

``verify="full"`` compares every block with the digest that the saver made when the state was published. A worker can die before
the saver got to that: then the slot's header, its blob and its table are verified, the copying was whole, and nothing can be
compared with. ``"header"`` leaves the blocks of one's own memory unread; what comes from other nodes is always verified in full.
Of pieces that several ranks of a node read, each verifies one.

A world of another shape reshards: each node's agent fetches tables and objects of all pieces, and each rank takes the chunks it
needs, from its node's memory or from others'. Bytes go straight from the slot into the tensors (`filling`); there is no second
copy.

A step is chosen from storage. Where this generation has saved newer ones that is refused: states are compared by generation and
step, so the next failure would bring the newer ones back.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from dlrover_adapters.checkpoint.manifests import CheckpointDamaged, CheckpointIncomplete, CheckpointTooNew
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader
from dlrover_adapters.checkpoint.slotview import read_table
from dlrover_adapters.checkpoint.table import CUT, Table
from dlrover_core.checkpoint.agreement import DISK, MEMORY, OBJECTS, STORAGE, Piece, Plan, Source
from dlrover_core.checkpoint.arena import ArenaBroken, Control
from dlrover_core.errors import CoreError, SpecError

from . import filling
from .capture import Target
from .filling import Held, Need, Uncovered
from .ladder import APPLY, FAIL, NOTHING, NOWHERE, PEER, TRY, Judge, Order, RestoreFailed, Told, Verdict, states_of
from .meeting import Meeting
from .opening import newcomers, opened
from .optimizing import optimizer_states, put_back
from .positions import Gathered, consumed
from .trained import ReadWords, Words, go_on, is_joined, rank_in
from .vault import Inventory, VaultGone

log = logging.getLogger("dlrover.torch")

FULL, HEADER = "full", "header"
FROM_NOTHING = "nothing"
READ_S = 3600.0
"""How long the first rank that has read its part waits for the last: one reads from memory, another from slow storage."""
_UNUSABLE = (ArenaBroken, VaultGone, CheckpointDamaged, CheckpointIncomplete, CheckpointTooNew, Uncovered, OSError)


class Line(Protocol):
    """Of a `Vault`, or what stands for one without an agent, the calls that restoring needs."""

    def inventory(self) -> Inventory:
        """What is in memory here."""

    def borrow(self, holding: int) -> int:
        """A descriptor of it."""

    def fetch(self, address: str, rank: int, generation: int, step: int, layout: int) -> Any:
        """One rank's state from another node, verified."""

    def head(self, address: str, rank: int, generation: int, step: int, layout: int) -> Any:
        """Its table and its objects alone."""

    def restored(self, step: int, tier: str, took_us: int, fell: Any = (), of: int = 0, cut: bytes = b"") -> None:
        """What became of it."""

    def lost(self, words: str) -> None:
        """What is lost where training begins anew."""


class Captured(Protocol):
    """Of a `Capture` what restoring needs."""

    def targets(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[Target]:
        """Where saved tensors go."""

    def wants(self, name: str) -> bool:
        """Is this object of use to this rank?"""

    def load(self, objects: Mapping[str, Any]) -> None:
        """Take back what is no tensor."""


class Restored(NamedTuple):
    """From where this rank begins: the state after ``step`` of ``generation`` (0, 0: from nothing), read from ``tier``.

    The slowest tier that it read anything from; ``fell``: what was tried before or could not be used, and why. ``notes``: what
    was asked for and not saved, or saved and not asked for, in words.
    """

    generation: int
    step: int
    tier: str
    took_us: int
    fell: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def restore(
    capture: Captured,
    line: Line | None,
    meeting: Meeting,
    *,
    url: str = "",
    step: int | None = None,
    verify: str = FULL,
    local: str | None = None,
    trusted: bool = False,
) -> Restored:
    """Restore the newest state into ``capture``; ``step``: that one, from the storage at ``url``. All ranks call it alike.

    ``line``: to the agent, None without one. ``local``: a folder of this host where parts may lie that storage did not take.
    ``trusted``: objects on disk and storage may be of any kind, and run code.
    Raises `RestoreFailed`, `Mismatch` where another model was saved, `MeetingFailed`.
    """
    if verify not in {FULL, HEADER}:
        raise SpecError("verify", f'"{FULL}" or "{HEADER}", got {verify!r}')
    if step is not None and not url:
        raise SpecError("step", "a chosen step is restored from storage, and there is no URL of one")
    began = time.monotonic()
    place, disk = (Place(one) if one else None for one in (url, local))
    told = getattr(line, "told", None)
    node, run = getattr(told, "node", "") or f"rank {meeting.rank}", getattr(told, "run", "")
    inventory, fell = _inventory(line)
    judge = Judge(place, run, step, int(getattr(told, "generation", 0)))
    mine = _told(meeting, node, inventory, line, fell, disk, run)
    order = Order.unpacked(meeting.decide("restore", mine.packed(), judge.first))
    before = optimizer_states(getattr(capture, "optimizers", {}).values())
    torn = False
    while order.what == TRY:
        with contextlib.ExitStack() as held:
            attempt = _Attempt(capture, line, inventory, meeting, order, held, verify, trusted=trusted)
            verdict = attempt.verdict(place, disk)
            torn = torn or verdict.torn
            told = verdict._replace(torn=torn).packed()
            order = Order.unpacked(meeting.decide("restore", told, judge.then, limit_s=READ_S))
            if attempt.error is not None:
                raise attempt.error  # this rank's own: that its tensors are others than were saved, for one
            if order.what == APPLY:
                attempt.apply()
                go_on(capture, (max(0, attempt.plan.generation), attempt.plan.step), order.trained)
                return _done(line, meeting, attempt, began, order.fell)
    if order.what == FAIL:
        raise RestoreFailed(order.why)
    assert order.what == NOTHING, order
    put_back(before)
    go_on(capture, (0, 0), b"")
    return _nothing(line, meeting, began, order, consumed(capture))


def _done(
    line: Line | None, meeting: Meeting, attempt: _Attempt, began: float, fell: tuple[tuple[str, str], ...]
) -> Restored:
    plan = attempt.plan
    generation = max(0, plan.generation)  # other runs' are told as negative ones
    found = Restored(generation, plan.step, attempt.tier, int((time.monotonic() - began) * 1e6), fell, attempt.notes)
    if line is not None:
        line.restored(found.step, found.tier, found.took_us, found.fell, found.generation, consumed(attempt.capture))
    if meeting.rank == 0:
        for note in found.notes:
            log.warning("checkpoint: %s", note)
        how = ", resharded" if plan.reshard else ""
        log.info("checkpoint: step %d restored from %s in %.3f s%s", found.step, found.tier, found.took_us / 1e6, how)
    return found


def _nothing(line: Line | None, meeting: Meeting, began: float, order: Order, cut: bytes) -> Restored:
    fell = order.fell
    found = Restored(0, 0, FROM_NOTHING, int((time.monotonic() - began) * 1e6), fell)
    if line is not None:
        line.restored(0, FROM_NOTHING, found.took_us, fell, cut=cut)
    if meeting.rank == 0 and order.why:
        log.error("checkpoint: %s", order.why)
        if line is not None:
            line.lost(order.why)
    elif meeting.rank == 0:
        log.log(logging.WARNING if fell else logging.INFO, "checkpoint: nothing to restore, training begins anew")
    return found


# ---- inventories


def _inventory(line: Line | None) -> tuple[Inventory, tuple[tuple[str, str], ...]]:
    if line is None:
        return Inventory((), "", -1), ()
    try:
        return line.inventory(), ()
    except VaultGone as error:
        return Inventory((), "", -1), ((MEMORY, f"the agent does not say what it has: {error}"),)


def _told(
    meeting: Meeting,
    node: str,
    inventory: Inventory,
    line: Line | None,
    fell: tuple[tuple[str, str], ...],
    disk: Place | None,
    run: str,
) -> Told:
    """What this rank says first; of what its node has one rank tells."""
    told = Told(meeting.rank, node, inventory.replica, inventory.committed, fell=fell)
    if line is None or meeting.local_rank:
        return told
    pieces, holders, own, trouble = [], {}, {}, list(fell)
    joined = set()
    for number in sorted({one.id for one in inventory.holdings}):
        theirs = [one for one in inventory.holdings if one.id == number]
        try:
            local_rank, table = _arena(line, number)
        except _UNUSABLE as error:
            trouble.append((MEMORY, f"the memory of old rank {theirs[0].rank} cannot be read: {error}"))
            continue
        of = theirs[0].layout, theirs[0].world
        holders[of], own[of] = table.holders, table.own
        if is_joined(table.objects):
            joined.add(of)
        pieces += [
            Piece(
                OBJECTS if table.elsewhere else one.kind,
                one.rank, one.world, local_rank, one.generation, one.step, one.layout,
            ) for one in theirs
        ]  # fmt: skip
    lent, lenders = _lent(line)
    if lenders and meeting.rank == 0 and not any((one.generation, one.step) == lent for one in pieces):
        try:
            piece, table = _described(line, lent, lenders[0])
            pieces.append(piece)
            of = piece.layout, piece.world
            holders[of], own[of] = table.holders, table.own
            if is_joined(table.objects):
                joined.add(of)
        except _UNUSABLE as error:
            trouble.append((PEER, f"the nodes that left do not lend their states: {error}"))
    states: list[tuple[int, int]] = []
    if disk is not None:
        try:
            states = list(states_of(disk, run, lambda tier, why: trouble.append((tier, why)), tier=DISK))
        except (OSError, CoreError) as error:
            trouble.append((DISK, f"cannot be listed: {error}"))
    return told._replace(
        pieces=tuple(pieces),
        holders=tuple(holders.items()),
        disk=tuple(states),
        fell=tuple(trouble),
        lent=lent,
        lenders=lenders,
        own=tuple(own.items()),
        joined=tuple(sorted(joined)),
    )


def _lent(line: Line) -> tuple[tuple[int, int], tuple[tuple[str, int, int], ...]]:
    """The state that nodes which left by plan still have, and who they are."""
    told = getattr(line, "told", None)
    lenders = tuple(getattr(told, "lenders", ()))
    if told is None or not lenders or told.resume_step < 0:
        return (0, -1), ()
    return (told.generation - 1, told.resume_step), lenders


def _described(line: Line, lent: tuple[int, int], lender: tuple[str, int, int]) -> tuple[Piece, Table]:
    """The first piece of a lender, where no node of the new world has one: of which form the state is. It is here afterwards."""
    address, first, _count = lender
    held = Held(line.fetch(address, first, *lent, 0).fd, 0)
    try:
        words, table = held.view.control, held.view.table
        return Piece(NOWHERE, first, words.world, words.local_rank, *lent, words.layout), table
    finally:
        held.close()


def _arena(line: Line, number: int) -> tuple[int, Table]:
    """The local rank and the table of an arena."""
    fd = line.borrow(number)
    try:
        memory = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    try:
        control = Control(memory)
        try:
            return control.local_rank, read_table(memory, control)
        finally:
            control.release()
    finally:
        with contextlib.suppress(BufferError):
            memory.close()


# ---- one plan


class _Head(NamedTuple):
    """Table, objects and cut of a piece on another node: all that is needed of it to plan."""

    table: Table
    objects: dict[str, bytes]
    cut: bytes


class _Attempt:
    """What this rank does to follow a plan. Everything that it opens is closed with ``held``."""

    def __init__(
        self,
        capture: Captured,
        line: Line | None,
        inventory: Inventory,
        meeting: Meeting,
        order: Order,
        held: contextlib.ExitStack,
        verify: str,
        *,
        trusted: bool,
    ) -> None:
        assert order.plan is not None
        self.plan: Plan = order.plan
        self.tier = MEMORY if order.plan.sources else order.plan.tier
        self.capture, self._line, self._inventory, self._meeting = capture, line, inventory, meeting
        self._order, self._held, self._verify, self._trusted = order, held, verify, trusted
        self._place = order.places[meeting.rank]
        self._ranks = [rank for rank, place in enumerate(order.places) if place == self._place]
        self._threads = filling.threads_for(len(self._ranks))
        self.error: Exception | None = None
        self._pieces: dict[int, Held] = {}
        self._objects: dict[str, bytes] = {}
        self._cuts = Gathered()
        self._trained = ReadWords(capture)
        self._loaded: dict[str, Any] = {}
        self.notes: tuple[str, ...] = ()
        self._fills: list[tuple[Need, filling.Piece]] = []

    def verdict(self, storage: Place | None, disk: Place | None) -> Verdict:
        """Get everything ready; say whether it is good. Errors of this rank are everybody's, so they are told and not raised."""
        if not self.plan.sources:
            return self._stored(storage if self.plan.tier == STORAGE else disk)
        bad: list[tuple[int, str]] = []
        try:
            self._ready(bad)
        except Uncovered as error:
            bad.append((-1, str(error)))
        except Exception as error:  # noqa: BLE001  # the others wait for us: it is raised when they know
            return self._fatal(error)
        return Verdict(tuple(bad), cuts=self._told_cuts(), trained=self._told_words())

    def _fatal(self, error: Exception, *, torn: bool = False) -> Verdict:
        self.error = error
        return Verdict(fatal=f"{type(error).__name__}: {error}", torn=torn)

    @property
    def _conflicts(self) -> bool:
        """Have two pieces different positions, of data that this rank has? Then rank 0 says so to all."""
        return self._cuts.differ and bool(consumed(self.capture))

    def _told_cuts(self) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
        """For rank 0 to compare, where anybody here goes on from a position."""
        return self._cuts.told() if consumed(self.capture) else ()

    def _told_words(self) -> Words:
        """For rank 0 to join: of what several ranks have read, one tells."""
        return (
            self._trained.words
            if not (self._meeting.local_rank if self.plan.sources else self._meeting.rank)
            else Words()
        )

    def apply(self) -> None:
        """Everybody's is good: into the tensors, then what is no tensor."""
        filling.fill(self._fills, self._threads)
        self.capture.load(self._loaded)

    def _examine(self, names: frozenset[str], *, alike: bool, trusted: bool) -> None:
        """Is what is no tensor what is asked for?

        What comes from memory is trusted: this node saved it, or somebody who knows the job's token sent it, and nobody changed
        it on the way (`peer_line.Line.seal`). It never lay in the store that the ranks meet in.

        ``names``: of all objects that were saved, by any rank. ``alike``: the world that saved had the shape of this one, so each
        rank must have its own. Raises `Uncovered` where it has not.
        """
        lacks = getattr(self.capture, "lacks", None)
        lacking = lacks(self._objects) if lacks is not None and any(one.startswith("rank.") for one in names) else ""
        if alike and lacking:
            raise Uncovered(f"{lacking} of rank {self._meeting.rank} is not in it: it would go on with another rank's")
        self._trained.take(self._objects, lambda raw: opened(raw, trusted=trusted))
        self._loaded = opened(self._objects, trusted=trusted)
        if self._conflicts:
            return
        if self._cuts.any:
            self._loaded[CUT] = self._cuts.cut
        examine = getattr(self.capture, "examine", None)
        notes = examine(self._loaded) if examine is not None else ()
        notes = (*notes, *self._trained.accepted())
        self.notes = notes if alike else (*notes, *newcomers(names, self._meeting.world))

    # ---- from memory

    def _ready(self, bad: list[tuple[int, str]]) -> None:
        """Open what is here, find out what else is needed, fetch that, verify. Pieces that are no good go to ``bad``."""
        sources = {one.rank: one for one in self.plan.sources[self._place]}
        here = {rank: one for rank, one in sources.items() if one.node == self._place}
        away = {rank: one for rank, one in sources.items() if one.node != self._place}
        opened: dict[int, Held] = {}
        for rank, source in here.items():
            with _told_of(bad, rank):
                opened[rank] = self._piece(source)
        own = self._meeting.rank
        if own in away and not self.plan.reshard:  # all of it is needed
            with _told_of(bad, own):
                opened[own] = self._piece(away[own])
            self.tier = PEER
        heads = self._heads({rank: one for rank, one in away.items() if rank not in opened}, bad) if not bad else {}
        tables = {rank: one.view.table for rank, one in opened.items()}
        tables.update({rank: one.table for rank, one in heads.items()})
        for rank, source in away.items():
            if rank in tables and source.kind != OBJECTS and tables[rank].elsewhere:
                bad.append((rank, "another copy of it came than the one to be read"))
        if bad:
            return
        # What is of one's own number first, then of one's own node, then what is here: what is live differs between nodes.
        mine = () if self.plan.reshard else self._ranks
        order = sorted(tables, key=lambda rank: (rank != self._meeting.rank, rank not in mine, rank in away, rank))
        needed = self._needed(order, tables)
        for rank in dict.fromkeys(rank for _need, rank, _item in needed):
            if rank in away and rank not in opened:
                with _told_of(bad, rank):
                    opened[rank] = self._piece(away[rank])
                self.tier = PEER
        for rank in self._to_verify(sorted(here)):
            with _told_of(bad, rank):
                self._verified(opened[rank])
        for rank in order:
            with _told_of(bad, rank):
                view = opened[rank].view if rank in opened else None
                self._keep(view.objects() if view is not None else heads[rank].objects)
                self._cuts.add(rank, view.cut() if view is not None else heads[rank].cut)
        if not bad:
            names = frozenset(name for table in tables.values() for name in table.objects)
            self._examine(names, alike=not self.plan.reshard, trusted=True)
            self._trained.world = self.plan.world
            self._fills = [(need, filling.Piece(opened[rank], item)) for need, rank, item in needed]

    def _needed(self, order: list[int], tables: Mapping[int, Table]) -> list[tuple[Need, int, Any]]:
        """Which chunk of which old rank's piece goes where. Raises `Uncovered`, `Mismatch`."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        chunks: dict[str, list[tuple[int, Any]]] = {}
        for rank in order:
            for item in tables[rank].items:
                shapes.setdefault(item.name, (item.dtype, item.full_shape))
                chunks.setdefault(item.name, []).append((rank, item))
        found: list[tuple[Need, int, Any]] = []
        for target in self.capture.targets(shapes):
            theirs = chunks.get(target.name, [])
            each = filling.needs(target, [item for _rank, item in theirs])
            found += [(need, *theirs[need.number]) for need in each]
        return found

    def _to_verify(self, ranks: list[int]) -> list[int]:
        """Of the pieces in this node's memory: each is verified by one of its ranks, its own if that is here."""
        here = self._ranks
        whose = [rank if rank in here else here[number % len(here)] for number, rank in enumerate(ranks)]
        return [rank for rank, verifier in zip(ranks, whose, strict=True) if verifier == self._meeting.rank]

    def _piece(self, source: Source) -> Held:
        """A piece, from here or from its node; opened once."""
        if source.rank not in self._pieces:
            here = source.node == self._place
            self._pieces[source.rank] = self._borrowed(source) if here else self._fetched(source)
        return self._pieces[source.rank]

    def _borrowed(self, source: Source) -> Held:
        """Raises `ArenaBroken` where it is not there.

        Of one rank a node may have two copies, the one that its partner keeps for it without tensors and the whole one that
        was fetched for a restore: their tables tell which is which.
        """
        line, plan = self._line, self.plan
        assert line is not None
        wanted = (source.kind == MEMORY, source.rank, plan.world, plan.generation, plan.step, plan.layout)
        for one in self._inventory.holdings:
            if (one.kind == MEMORY, one.rank, one.world, one.generation, one.step, one.layout) == wanted:
                held = self._opened(line.borrow(one.id), one.slot)
                if (source.kind == OBJECTS) == bool(held.view.table.elsewhere):
                    return held
        raise ArenaBroken("this rank's agent does not have it")

    def _fetched(self, source: Source) -> Held:
        line, plan = self._line, self.plan
        if line is None:
            raise VaultGone("without an agent nothing comes from other nodes")
        address = self._order.addresses[source.node]
        return self._opened(line.fetch(address, source.rank, plan.generation, plan.step, plan.layout).fd, 0)

    def _opened(self, fd: int, slot: int) -> Held:
        held = Held(fd, slot)
        self._held.callback(held.close)
        self._checked(held)
        return held

    def _checked(self, held: Held) -> None:
        if held.view.stamp[:2] != (self.plan.generation, self.plan.step):
            raise ArenaBroken(f"it holds step {held.view.stamp.step} of generation {held.view.stamp.generation} now")

    def _verified(self, held: Held) -> None:
        if self._verify == FULL and not filling.verify(held, self._threads):
            log.info("checkpoint: step %d was not hashed yet when its worker ended", self.plan.step)

    def _keep(self, objects: Mapping[str, bytes]) -> None:
        for name, raw in objects.items():
            if self._wants(name):
                self._objects.setdefault(name, raw)

    def _wants(self, name: str) -> bool:
        return self.capture.wants(name) or rank_in(name) >= 0

    # ---- tables of pieces that are elsewhere

    def _heads(self, away: Mapping[int, Source], bad: list[tuple[int, str]]) -> dict[int, _Head]:
        """Tables and objects of pieces that other nodes have, by their old ranks; what does not come goes to ``bad``.

        By the agents, never through the store that the ranks meet in: that one takes what anybody writes.
        """
        found = {}
        world = max(1, self.plan.world)
        # Each rank begins elsewhere, so that not all ask one node first.
        for rank in sorted(away, key=lambda rank: (rank - self._meeting.rank) % world):
            with _told_of(bad, rank):
                found[rank] = self._head(away[rank])
        return found

    def _head(self, source: Source) -> _Head:
        line, plan = self._line, self.plan
        if line is None:
            raise VaultGone("without an agent nothing comes from other nodes")
        address = self._order.addresses[source.node]
        held = Held(line.head(address, source.rank, plan.generation, plan.step, plan.layout).fd, 0)
        try:
            self._checked(held)
            return _Head(held.view.table, held.view.objects(), held.view.cut())
        finally:
            held.close()

    # ---- from disk and storage

    def _stored(self, place: Place | None) -> Verdict:
        torn = False
        try:
            assert place is not None, "listed there"
            # Other runs' are told as negative ones; what they have is sealed.
            reader = StepReader(place, self.plan.step, generation=max(0, self.plan.generation) or None)
            first = {name: chunks[0].item for name, chunks in reader.items.items()}
            targets = self.capture.targets({name: (one.dtype, one.full_shape) for name, one in first.items()})
            self._keep({name: reader.object(name) for name in reader.objects if self._wants(name)})
            self._trained.world = reader.world
            for rank, part in reader.parts.items():
                self._cuts.add(rank, part.packed_cut)
            alike = reader.world == self._meeting.world
            self._examine(frozenset(reader.objects), alike=alike, trusted=self._trusted)
            if self._conflicts:
                return Verdict(cuts=self._told_cuts())
            torn = True
            filling.read(reader, targets, self._threads)
        except _UNUSABLE as error:
            return Verdict(((-1, f"step {self.plan.step}: {error}"),), torn=torn)
        except Exception as error:  # noqa: BLE001  # as above
            return self._fatal(error, torn=torn)
        return Verdict(torn=torn, cuts=self._told_cuts(), trained=self._told_words())


@contextlib.contextmanager
def _told_of(bad: list[tuple[int, str]], rank: int) -> Iterator[None]:
    """What goes wrong with an old rank's piece is a verdict."""
    try:
        yield
    except _UNUSABLE as error:
        bad.append((rank, f"the piece of old rank {rank}: {error}"))
