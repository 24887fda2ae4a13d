"""Saving as the control plane sees it: states kept in nodes' memory and on storage, in virtual time.

A `Saving` given to a `Training` is the memory of all nodes and the storage; `SaveDuty` is the duty of each agent that speaks
of it to the leader, as the real one does: what is held and written with the beats, what the leader must know as commands, and
what it orders is done. A new generation begins with what its nodes hold, or find with each other, or on storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dlrover_core.job.checkpoints import (
    MEMORY,
    NOTHING,
    PEER,
    STORAGE,
    Keep,
    OfferReplica,
    Persist,
    ReportArmed,
    ReportHeld,
    ReportKeeping,
    ReportRestored,
    ReportStorage,
    storage_calm_s,
    worth_telling,
)
from dlrover_core.job.holdings import NO_STEP
from dlrover_core.job.orders import Order
from dlrover_core.job.plans import Boundary
from dlrover_core.job.shards import Datasets, RegisterDataset
from dlrover_core.rules.save_on_failure import HELD_WAIT_S
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import WRITTEN_MAX, KeptBeat, Written
from dlrover_core.runtime.launcher import Notice, WorkersGone
from dlrover_core.runtime.within import within
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.consuming import Consuming

State = tuple[int, int]
"""Generation and step: later ones are newer, whatever their steps."""
REPLICA = "replica:"


@dataclass(frozen=True, slots=True)
class Knobs:
    """How a script saves: into memory every ``every`` steps, on storage every ``store_every`` (0: only when ordered).

    ``slots`` states fit into a node's memory. ``spread``: over how many nodes the tensors of one state are, 0: over all; 1: each
    node holds all of them. What else its ranks have each node holds alone.
    A node writes its part in ``write_s``, and tries again ``retry_s`` after a failure. A restore takes ``restore_s``, from
    anywhere else than the node's own memory ``fetch_s``. ``replicas``: nodes keep a copy of their partner's newest state.
    ``planned``: ranks can agree on a boundary. A job that has ended well waits while a node writes, and ``patience_s`` after the
    first failure, or for others when its own part is written.
    """

    every: int = 1
    store_every: int = 10
    slots: int = 2
    spread: int = 1
    write_s: float = 0.25
    retry_s: float = 1.0
    patience_s: float = 30.0
    restore_s: float = 0.01
    fetch_s: float = 0.5
    replicas: bool = False
    planned: bool = False
    size: int = 1 << 20
    url: str = "memory:checkpoints"


class Restore(NamedTuple):
    """Where one generation began: with which state, from the slowest tier of its nodes, and what was tried before."""

    generation: int
    state: State
    tier: str
    fell: tuple[tuple[str, str], ...] = ()


class Keeper(Protocol):
    """A node that runs workers: all that is asked of a launcher here."""

    node: str


@dataclass(slots=True)
class _Run:
    """One generation: its nodes in rank order, from where each began; ``boundary``: that of ``plan``, -1: none is chosen."""

    nodes: tuple[str, ...]
    tiers: dict[str, str] = field(default_factory=dict)
    began: Restore | None = None
    finished: bool = False
    boundary: int = -1
    plan: int = 0
    waits: int = 0


class Saving:
    """All that is kept of one job's states, and the hands of a test on it.

    ``broken``: nodes that cannot write to storage now, ``"*"``: all. ``damaged``: nodes whose memory fails verification.
    ``written`` is what lies on storage, by state and part; ``sealed`` what of it can be restored from there. ``restores``: what
    came. ``data``: what the ranks train on; None: nothing that they tell of.
    """

    def __init__(self, knobs: Knobs | None = None, data: Consuming | None = None) -> None:
        self.knobs, self.data = knobs if knobs is not None else Knobs(), data
        self.held: dict[str, list[State]] = {}
        self.copies: dict[str, dict[str, State]] = {}
        self.written: dict[State, set[int]] = {}
        self.parts: dict[int, int] = {}
        self.sealed: set[State] = set()
        self.broken: set[str] = set()
        self.damaged: set[str] = set()
        self.restores: list[Restore] = []
        self.saved: list[State] = []
        # Planned changes: what each node was told to get ready for, and has; and of which the boundary may be chosen.
        self.armed: dict[str, int] = {}
        self.acked: dict[str, int] = {}
        self.go: dict[str, int] = {}
        self.lenders: dict[str, tuple[str, ...]] = {}
        self._places: dict[int, dict[str, int]] = {}
        self._runs: dict[int, _Run] = {}
        self._duties: dict[str, Callable[[], None]] = {}
        self._moved = asyncio.Event()

    # ---- what training asks

    async def restore(self, generation: int, ranks: Mapping[int, Keeper]) -> int:
        """A generation whose ranks all run begins: the step it goes on from."""
        nodes = tuple(dict.fromkeys(ranks[rank].node for rank in sorted(ranks)))
        run = self._runs[generation] = _Run(nodes)
        self._places[generation] = {node: place for place, node in enumerate(nodes)}
        self.parts[generation] = len(nodes)
        found, run.tiers = self._found(generation, nodes)
        slow = found.tier not in (MEMORY, NOTHING)
        await asyncio.sleep(self.knobs.fetch_s if slow else self.knobs.restore_s)
        run.began = found
        self.restores.append(found)
        if self.data is not None:
            self.data.begin(generation, {rank: one.node for rank, one in ranks.items()}, found.state, run.tiers)
        for node in nodes:
            # What the node held of another generation is of no use any more, but for what is still to be written.
            self._news(node)
        return found.state[1]

    def _found(self, generation: int, nodes: Iterable[str]) -> tuple[Restore, dict[str, str]]:
        nodes = tuple(nodes)
        fell = tuple((MEMORY, f"a block of {node} is not what was saved") for node in nodes if node in self.damaged)
        # Nodes that left the world before at a boundary, and wait until this one trains, lend what they hold.
        lenders = {one for node in nodes for one in self.lenders.get(node, ()) if one in self._duties}
        sound = [node for node in (*nodes, *sorted(lenders)) if node not in self.damaged]
        for node in self.damaged.intersection(nodes):
            self.held.pop(node, None)
            self.copies.pop(node, None)
        self.damaged.difference_update(nodes)
        memory = max(self._whole(sound, len(nodes)), default=(0, 0))
        stored = max(self.sealed, default=(0, 0))
        if memory == stored == (0, 0):
            return Restore(generation, (0, 0), NOTHING, fell), dict.fromkeys(nodes, NOTHING)
        if stored > memory:
            return Restore(generation, stored, STORAGE, fell), dict.fromkeys(nodes, STORAGE)
        alike = self._places[memory[0]].keys() == set(nodes) or self.knobs.spread == 1
        tiers = {node: MEMORY if alike and memory in self.held.get(node, ()) else PEER for node in nodes}
        tier = MEMORY if all(one == MEMORY for one in tiers.values()) else PEER
        return Restore(generation, memory, tier, fell), tiers

    def _whole(self, nodes: Collection[str], size: int) -> set[State]:
        """States of which these nodes hold every part, their own or copies; for a world of another size all tensors will do."""
        have: dict[State, set[int]] = {}
        for node in nodes:
            for state in self.held.get(node, ()):
                have.setdefault(state, set()).add(self._places[state[0]][node])
            for owner, state in self.copies.get(node, {}).items():
                have.setdefault(state, set()).add(self._places[state[0]][owner])
        return {state for state, places in have.items() if len(places) == self.parts[state[0]] or (
            size != self.parts[state[0]] and self._all_tensors(state, places)
        )}  # fmt: skip

    def _all_tensors(self, state: State, places: set[int]) -> bool:
        count = self.parts[state[0]]
        spread = self.knobs.spread if 0 < self.knobs.spread <= count else count
        return len({place % spread for place in places}) == spread

    def made(self, generation: int, step: int) -> None:
        """All ranks have made a step."""
        if self.data is not None:
            self.data.made(generation, step)
        if step % self.knobs.every == 0:
            self._save(generation, step)

    def _save(self, generation: int, step: int) -> None:
        state = generation, step
        self.saved.append(state)
        if self.data is not None:
            self.data.save(generation, step)
        for node in self._runs[generation].nodes:
            held = self.held.setdefault(node, [])
            if state not in held:
                held.append(state)
                del held[: -self.knobs.slots]
            self._news(node)

    async def between(self, generation: int, step: int) -> None:
        """Between two steps, where ranks look for what was planned, and wait at its boundary."""
        run = self._runs[generation]
        for node in run.nodes:
            plan = self.armed.get(node, 0)
            if plan and self.knobs.planned and self.acked.get(node) != plan:
                self.acked[node] = plan
                self._news(node)
        plan = self.go.get(run.nodes[0], 0)
        if plan and run.boundary < 0 and all(self.acked.get(node) == plan for node in run.nodes):
            run.boundary, run.plan = step + 1, plan
            return
        if step == run.boundary:
            self._save(generation, step)
            # If it is still that plan's: nobody waits for one that was dropped meanwhile.
            run.waits = run.plan
            for node in run.nodes:
                self._news(node)
            while run.waits and all(self.armed.get(node, 0) == run.waits for node in run.nodes):
                self._moved.clear()
                await self._moved.wait()
            run.waits, run.boundary = 0, -1

    def finished(self, generation: int) -> None:
        """All ranks have made all steps."""
        self._runs[generation].finished = True

    # ---- what happens to nodes

    def lose(self, node: str) -> None:
        """A node is gone with its memory."""
        self.held.pop(node, None)
        self.copies.pop(node, None)
        self.armed.pop(node, None)
        self._duties.pop(node, None)
        self._moved.set()

    # ---- what the duties ask

    def follow(self, node: str, news: Callable[[], None]) -> None:
        """Tell whenever something is new about a node."""
        self._duties[node] = news

    def _news(self, node: str) -> None:
        told = self._duties.get(node)
        if told is not None:
            told()

    def run_of(self, generation: int) -> _Run | None:
        """A generation that has begun, with its restore done."""
        run = self._runs.get(generation)
        return run if run is not None and run.began is not None else None

    def place(self, generation: int, node: str) -> int:
        """The node's place in a generation; -1: it is not in it."""
        return self._places.get(generation, {}).get(node, -1)

    def writes(self, generation: int, node: str) -> bool:
        """Is a part of each checkpoint this node's to write?"""
        return self.place(generation, node) >= 0

    def steps(self, generation: int, node: str) -> tuple[int, ...]:
        """The steps of a generation that a node holds."""
        return tuple(step for of, step in self.held.get(node, ()) if of == generation)

    def copied(self, generation: int, node: str) -> tuple[tuple[int, int], ...]:
        """Of which other places of a generation a node keeps the parts, each with the step."""
        copies = self.copies.get(node, {}).items()
        return tuple((self.place(generation, owner), step) for owner, (of, step) in copies if of == generation)

    def copy(self, node: str, address: str) -> int:
        """The newest state of a node goes to its partner; the step, or -1."""
        partner = address.removeprefix(REPLICA)
        if not self.held.get(node) or partner not in self._duties:
            return -1
        self.copies.setdefault(partner, {})[node] = self.held[node][-1]
        return self.held[node][-1][1]

    def cut(self, node: str, state: State) -> bytes:
        """What a node has put into a state of the position in the data, packed; empty: nothing."""
        return self.data.cut(node, state) if self.data is not None else b""

    def works(self, node: str) -> bool:
        """Can this node write to storage?"""
        return not self.broken.intersection((node, "*"))

    def store(self, state: State, places: Iterable[int]) -> None:
        """Parts of a state are on storage."""
        self.written.setdefault(state, set()).update(places)

    def seal(self, state: State) -> None:
        """The leader says that this state is committed: it may be restored, if it is all there."""
        if len(self.written.get(state, ())) == self.parts.get(state[0]):
            self.sealed.add(state)

    def arm(self, node: str, plan: int, go: bool) -> None:
        """What is planned, as a node is told: 0 where nothing is any more."""
        self.armed[node] = plan
        self.go[node] = plan if go else 0
        self._moved.set()


class SaveDuty:
    """The duty of one agent: tells what its node keeps, does what is ordered."""

    def __init__(self, saving: Saving) -> None:
        self._saving, self._knobs = saving, saving.knobs
        self._wake = asyncio.Event()
        self._ended: list[int] = []
        self._began = self._reported = self._registered = 0
        # The generation before, and whether this node wrote in it.
        self._before: tuple[int, bool] = (0, False)
        self._outages, self._calm_at = 0, 0.0
        self._looked = asyncio.Event()
        self._written: list[Written] = []
        self._writing: dict[tuple[State, tuple[int, ...]], asyncio.Task[None]] = {}
        self._failing = False
        self._until: dict[State, float] = {}  # how long what is due is waited for
        self._copied = -1
        self._armed = self._waits = 0
        self._desk: Desk | None = None

    def ordered(self, order: Order) -> None:  # noqa: ARG002  # the desk has it
        """A new order."""
        self._wake.set()

    def noticed(self, notice: Notice) -> None:
        """Workers that are gone leave their states here."""
        if isinstance(notice, WorkersGone):
            self._ended.append(notice.generation)
            self._wake.set()

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        self._desk = desk
        self._saving.follow(desk.node, self._wake.set)
        if self._knobs.replicas:
            desk.send(OfferReplica(desk.node, f"{REPLICA}{desk.node}"))
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._look(desk)
        finally:
            for task in self._writing.values():
                task.cancel()
            await asyncio.gather(*self._writing.values(), return_exceptions=True)

    def _look(self, desk: Desk) -> None:
        self._begin(desk)
        self._register(desk)
        self._plan(desk)
        self._save(desk)
        persist, keep = desk.order.part(Persist), desk.order.part(Keep)
        if persist.step >= 0:
            self._write(desk, (persist.of, persist.step), persist.places)
        if keep.committed >= 0:
            # Whoever writes its seal: what the leader calls committed may be read, by all whom it tells so.
            self._saving.seal((keep.committed_of, keep.committed))
        self._end(desk)
        self._tell(desk)
        self._looked.set()

    def _begin(self, desk: Desk) -> None:
        """A generation has begun: what is said once of it."""
        run, generation = self._saving.run_of(desk.generation), desk.generation
        if run is None or run.began is None or generation <= self._began or desk.node not in run.tiers:
            return
        if self._began:
            self._before = self._began, self._saving.writes(self._began, desk.node)
        self._began, knobs = generation, self._knobs
        first, tier = run.nodes[0] == desk.node, run.tiers[desk.node]
        if first:
            desk.send(
                ReportKeeping(
                    desk.node, generation, knobs.url, knobs.every, knobs.store_every, 3, knobs.planned, knobs.size,
                    knobs.spread,
                )
            )  # fmt: skip
        if worth_telling(tier, run.began.fell, rank_0=first):
            took_us = round((knobs.restore_s if tier in (MEMORY, NOTHING) else knobs.fetch_s) * 1_000_000)
            fell = run.began.fell if first else ()
            (of, step), data = run.began.state, self._saving.data
            cut = data.began(generation, desk.node) if data is not None else b""
            desk.send(ReportRestored(desk.node, generation, step, tier, took_us, fell, of, cut))

    def _register(self, desk: Desk) -> None:
        """The node of rank 0 registers the dataset, unless the leader knows it."""
        data, run = self._saving.data, self._saving.run_of(desk.generation)
        if data is None or run is None or run.nodes[0] != desk.node or self._registered >= desk.generation:
            return
        if data.dataset.terms not in desk.order.part(Datasets).known:
            desk.send(RegisterDataset(desk.node, desk.generation, *data.dataset.terms))
        self._registered = desk.generation

    def _plan(self, desk: Desk) -> None:
        saving, node, (number, go) = self._saving, desk.node, desk.order.part(Boundary)
        saving.arm(node, number, go)
        lenders = desk.order.part(Keep).lenders
        saving.lenders[node] = tuple(address.removeprefix(REPLICA) for address, _, _ in lenders)
        plan = saving.acked.get(node, 0)
        if number and plan == number and plan != self._armed:
            self._armed = plan
            desk.send(ReportArmed(node, plan))
        run = saving.run_of(desk.generation)
        if run is not None and run.waits and run.waits == number and run.waits != self._waits:
            self._waits = run.waits
            cut = saving.cut(node, (desk.generation, run.boundary))
            desk.send(ReportHeld(node, desk.generation, (run.boundary,), run.waits, (), cut))

    def _save(self, desk: Desk) -> None:
        """What is new in memory goes to the partner, and to storage when it is due."""
        saving, node, every = self._saving, desk.node, self._knobs.store_every
        if replica_to := desk.order.part(Keep).replica_to:
            self._copied = saving.copy(node, replica_to)
        for state in saving.held.get(node, ()):
            if every and state[1] % every == 0 and state[0] == self._began and saving.writes(state[0], node):
                self._write(desk, state, ())

    def _write(self, desk: Desk, state: State, places: tuple[int, ...]) -> None:
        if (state, places) not in self._writing:
            self._writing[state, places] = virtual_loop.spawn(desk.node, self._write_all(desk, state, places))

    async def _write_all(self, desk: Desk, state: State, places: tuple[int, ...]) -> None:
        """As often as it takes. Without ``places``: what is due, of its own."""
        while True:
            await asyncio.sleep(self._knobs.write_s)
            works = self._saving.works(desk.node)
            self._tell_storage(desk, works=works)
            if state not in self._until:
                loop, patience_s = asyncio.get_running_loop(), self._knobs.patience_s
                self._until[state] = loop.time() + patience_s
                loop.call_later(patience_s, self._wake.set)
            if works:
                break
            await asyncio.sleep(self._knobs.retry_s)
        self._saving.store(state, places or (self._saving.place(state[0], desk.node),))
        took_us = round(self._knobs.write_s * 1_000_000)
        cut = self._saving.cut(desk.node, state)
        one = Written(state[1], self._knobs.size * max(1, len(places)), took_us, state[0], len(places), cut)
        self._written = [*self._written, one][-WRITTEN_MAX:]
        self._tell(desk)
        desk.hurry()

    def _tell_storage(self, desk: Desk, *, works: bool) -> None:
        """Edges; that of a storage which comes and goes only after a while."""
        now = asyncio.get_running_loop().time()
        if works == self._failing and not (works and now < self._calm_at):
            self._failing = not works
            desk.send(ReportStorage(desk.node, self._knobs.url, "" if works else "OSError: storage is down"))
            if not works:
                self._outages += 1
                self._calm_at = now + storage_calm_s(self._outages)

    async def settle(self, order: Order) -> None:
        """The agent goes: what is left of its workers is told, and written if the leader orders it, which it is waited for."""
        if self._desk is not None and self._began and order.outcome != "succeeded":
            with contextlib.suppress(asyncio.TimeoutError):
                await within(order.grace_us / 1_000_000, self._settle(self._desk))

    async def _settle(self, desk: Desk) -> None:
        generation, ordered, until = self._began, False, math.inf
        run = self._saving.run_of(generation)
        while run is not None and not run.finished:
            self._looked.clear()
            now = asyncio.get_running_loop().time()
            if self._reported >= generation:
                until = min(until, now + HELD_WAIT_S)
                newest = max(self._saving.steps(generation, desk.node), default=NO_STEP)
                ordered, was = desk.order.part(Persist).step >= 0, ordered
                keep = desk.order.part(Keep)
                if (keep.committed_of, keep.committed) >= (generation, newest) or (was and not ordered):
                    return
            if now >= until and not ordered:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await within(HELD_WAIT_S, self._looked.wait())

    def _end(self, desk: Desk) -> None:
        """A generation's workers are gone: what is left of them."""
        for generation in self._ended:
            run = self._saving.run_of(generation)
            if run is not None and not run.finished and generation > self._reported and desk.node in run.tiers:
                self._reported = generation
                steps, copies = self._saving.steps(generation, desk.node), self._saving.copied(generation, desk.node)
                cut = self._saving.cut(desk.node, (generation, steps[-1])) if steps else b""
                desk.send(ReportHeld(desk.node, generation, steps, 0, copies, cut))
        self._ended.clear()

    def _rest(self, desk: Desk) -> None:
        """What is due is waited for until it is committed, or given up."""
        due = [state for state, places in self._writing if not places and state[0] == self._began]
        newest, now = max(due, default=(0, NO_STEP)), asyncio.get_running_loop().time()
        if newest[1] > desk.order.part(Keep).committed and now < self._until.get(newest, math.inf):
            desk.at_rest.clear()
        else:
            desk.at_rest.set()

    def _tell(self, desk: Desk) -> None:
        self._rest(desk)
        if self._began:
            writes = self._saving.writes(self._began, desk.node)
            held = self._saving.steps(self._began, desk.node)
            before, wrote = self._before
            desk.tell(
                KeptBeat(self._began, writes, self._copied, held, tuple(self._written), before=before, wrote=wrote)
            )
