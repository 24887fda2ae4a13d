"""Simulated ranks that draw leases and save their model, with the truth beside: what the model of each state was trained on.

A `Rank` keeps its own pace: its loader draws shards ahead, the rank takes them, trains, and publishes what it was trained on with
every step. A state is whole once all ranks have published the same step. `States` has what they published; what the models
really learnt, the ranks note in `Rank.model`, and `States.check` compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.data.trained import Trained, joined, pack, unpack
from dlrover_core.job.leases import Leases, ReportAcked, ReturnLease
from dlrover_core.runtime.leasing import LeaseBeat
from dlrover_core.runtime.node_leases import NodeLeases

NAME, SOURCE = "train", "f00d"
AHEAD = 2
"""Shards that a loader draws ahead."""
State = tuple[int, int]
"""Generation and step; (0, 0): nothing."""


@dataclass(slots=True)
class Part:
    """What one rank published of a state, and what it had learnt by then."""

    node: str
    packed: bytes
    model: tuple[int, ...]


@dataclass(slots=True)
class States:
    """The states that ranks have saved.

    worlds: ranks of each generation
    parts:  by state and rank
    bases:  the state that a generation resumed from, with the positions that its model had learnt
    """

    worlds: dict[int, int] = field(default_factory=dict)
    parts: dict[State, dict[int, Part]] = field(default_factory=dict)
    bases: dict[int, tuple[State, tuple[int, ...], Ranges]] = field(default_factory=dict)

    def whole(self) -> list[State]:
        """The states that all of their ranks have published, the newest last."""
        return sorted(state for state, parts in self.parts.items() if len(parts) == self.worlds[state[0]])

    def said(self, state: State) -> Ranges:
        """The positions that a state was trained on, by the words of its ranks. Raises as `joined`."""
        words = {rank: unpack(part.packed) for rank, part in self.parts[state].items()}
        (trained,) = joined(self.worlds[state[0]], words)
        return trained.spans

    def model(self, state: State) -> tuple[int, ...]:
        """The positions that it was really trained on."""
        _, before, _ = self.bases[state[0]]
        return (*before, *(at for part in self.parts[state].values() for at in part.model))

    def resume(self, generation: int, world: int, state: State) -> None:
        """A generation begins from a state."""
        self.worlds[generation] = world
        nothing: tuple[State, tuple[int, ...], Ranges] = (state, (), Ranges())
        self.bases[generation] = (state, self.model(state), self.said(state)) if state in self.parts else nothing

    def lose(self, node: str, random: Random) -> None:
        """A node is gone with its memory: of some states, those that no storage has, its parts are lost."""
        for state, parts in self.parts.items():
            if random.random() < 0.3:
                self.parts[state] = {rank: part for rank, part in parts.items() if part.node != node}

    def check(self, state: State) -> None:
        """Raises AssertionError where a model has a position twice, or another one than its ranks say."""
        model, said = self.model(state), self.said(state)
        twice = [at for at, times in Counter(model).items() if times > 1]
        assert not twice, f"the model of {state} was trained twice on {sorted(twice)[:8]}"
        wrong = sorted(set(model) ^ set(said.positions()))
        assert not wrong, f"of {state} its ranks say something else than it was trained on: {wrong[:8]}"


@dataclass(slots=True)
class Rank:
    """One rank.

    rank:     its number
    session:  of its loader
    per_s:    samples a second
    base:     what rank 0 says again
    drawn:    what its loader has
    span:     what it trains until ``until_s``
    step:     the last step that it has made
    boundary: it waits before it would make this step; 0: there is no boundary
    """

    rank: int
    session: int
    per_s: float
    base: Ranges
    drawn: list[Span] = field(default_factory=list)
    span: Span | None = None
    until_s: float = 0.0
    step: int = 0
    model: tuple[int, ...] = ()
    trained: Ranges = field(default_factory=Ranges)
    heard_end: bool = False
    boundary: int = 0

    @property
    def waits(self) -> bool:
        """Is it at the boundary of a planned change?"""
        return self.boundary > 0 and self.span is None and self.step + 1 >= self.boundary

    def learns(self, span: Span) -> None:
        """A step is made with these."""
        self.model = (*self.model, *range(*span))
        self.trained |= Ranges([span])
        self.step += 1

    @property
    def published(self) -> bytes:
        """What it puts into a state."""
        return pack([Trained(NAME, SOURCE, self.base | self.trained)])

    @property
    def busy(self) -> bool:
        """Has it something to do yet?"""
        return self.span is not None or bool(self.drawn) or not self.heard_end


class Node:
    """One node's agent with the ranks of its newest generation."""

    def __init__(self, node: str, states: States, *, shard: int) -> None:
        self.node, self.states, self.shard = node, states, shard
        self.leases = NodeLeases(NAME)
        self.leases.shard = shard
        self.generation, self._sessions = 0, 0
        self.ranks: list[Rank] = []

    def start(self, generation: int, rates: Iterable[tuple[int, float]]) -> None:
        """Workers of a generation begin, by rank, in place of those that there were. All states are as `States.resume` said."""
        self.stop()
        self.generation = generation
        for rank, per_s in rates:
            self._sessions += 1
            base = self.states.bases[generation][2] if rank == 0 else Ranges()
            self.ranks.append(Rank(rank, self._sessions, per_s, base))
            self.leases.sessions.add(self._sessions)

    def stop(self) -> None:
        """The workers are dead."""
        for rank in self.ranks:
            self.leases.gone(rank.session)
        self.ranks = []

    def ordered(self, part: Leases) -> None:
        """The node's newest order has this part."""
        for told in part.known:
            self.leases.told(told)

    def work(self, now_s: float) -> bool:
        """Let ranks finish what is due, take and draw; is there news that should not wait for the next heartbeat?"""
        starved = [self._work(rank, now_s) for rank in self.ranks]
        return any(starved)

    def _work(self, rank: Rank, now_s: float) -> bool:
        if rank.span is not None and rank.until_s <= now_s:
            rank.learns(rank.span)
            rank.span = None
            self.save(rank)
        if not self.leases.serves(self.generation):
            return False
        while len(rank.drawn) < AHEAD:
            drawn = self.leases.draw(rank.session, self.shard, now_s)
            if drawn is None:
                break
            rank.drawn.append(drawn)
        while rank.span is None and rank.drawn and not rank.waits:
            first = rank.drawn.pop(0)
            if self.take(rank, first, now_s):
                rank.span, rank.until_s = first, now_s + (first.end - first.start) / rank.per_s
        if (
            rank.boundary and rank.span is None and not rank.waits
        ):  # ranks that have nothing to draw make the others' steps
            rank.step += 1
            self.save(rank)
        rank.heard_end = self.leases.finished and not rank.drawn
        return rank.span is None and not rank.waits and not self.leases.finished

    def take(self, rank: Rank, span: Span, now_s: float) -> bool:
        """A rank takes what its loader has drawn."""
        return self.leases.claim(span, rank.session, now_s)

    def save(self, rank: Rank) -> None:
        """It publishes the state of its newest step."""
        state = self.generation, rank.step
        self.states.parts.setdefault(state, {})[rank.rank] = Part(self.node, rank.published, rank.model)

    def loader_dies(self, random: Random) -> None:
        """A loader process ends, and what it had drawn and nobody has taken goes to others; the rank goes on with a new one."""
        if self.ranks:
            rank = random.choice(self.ranks)
            self.leases.gone(rank.session)
            self._sessions += 1
            rank.session = self._sessions
            self.leases.sessions.add(rank.session)

    def beat(self, now_s: float) -> LeaseBeat:
        """The part of its next heartbeat."""
        waiting = any(rank.span is None and not rank.heard_end for rank in self.ranks)
        return LeaseBeat((self.leases.ask(now_s, waiting=waiting),))

    def last_words(self) -> tuple[ReportAcked | ReturnLease, ...]:
        """What its agent says as it leaves."""
        acked = self.leases.acked.pack()
        return ReportAcked(self.node, NAME, acked), ReturnLease(self.node, NAME)
