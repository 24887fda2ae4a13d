"""The duty of leased data: it hands the node's positions out to workers in shards, and talks with the leader about more.

Each heartbeat says the whole of it: what workers have used, how much the node wants to hold, what it gives back. So a heartbeat
may be lost. What dead workers had in hand is a report instead, because an event of the log tells it to people.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.job.leases import (
    SPANS_MAX,
    Leases,
    LeaseTold,
    ReportAcked,
    ReportRepeated,
    RestoreLeases,
    ReturnLease,
)
from dlrover_core.job.orders import Order
from dlrover_core.job.shards import DATASETS_MAX, LEASES, MODEL_LEASE, RegisterDataset, Terms
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.launcher import Notice, WorkerExit, WorkersGone
from dlrover_core.runtime.leasing import LeaseBeat
from dlrover_core.runtime.node_leases import NodeLeases
from dlrover_core.runtime.within import within

from .data_socket import DataSocket, Drawn, Refused, Session

LOOK_S = 0.25
"""Between two looks at what the next heartbeat should say."""
ACKS_S = 1.0
"""How often the leader is told what was used, where heartbeats are rarer."""
SILENT_S = 5.0
"""Waiting workers are told that no leader answers after this long."""
REGISTER_EVERY_S = 5.0
"""A dataset of which no order tells is registered again after so long."""
SHARDS_MAX = 256
"""Shards that one session may have in hand."""
LAST_S = 5.0
SECOND_US = 1_000_000

log = structlog.get_logger("dlrover.agent")


class Serves(Protocol):
    """Where workers draw: a launcher."""

    data: DataSocket | None


@dataclass(slots=True)
class Registering:
    """A dataset that no order has told of.

    terms:      of it
    generation: of the worker that wants it
    due_s:      when it is sent to the leader again; infinite: its answer is waited for
    sent:       False: the master is too old to know it
    refused:    the leader's reason; empty: it has not refused it
    """

    terms: Terms
    generation: int
    due_s: float = math.inf
    sent: bool = True
    refused: str = ""


@dataclass(slots=True)
class Restoring:
    """A dataset of which rank 0, here, has said where it goes on, and waits for an ``answer``. Others: as of `Registering`."""

    command: RestoreLeases
    answer: Callable[[str], None]
    due_s: float = math.inf
    refused: str = ""

    @property
    def words(self) -> str:
        """What is refused, for people."""
        name = self.command.dataset
        return f"dataset {name!r}: the job's master refuses where this generation goes on: {self.refused}"


class DataDuty:
    """Of one agent. ``say`` tells people at once what workers wait for."""

    def __init__(self, launcher: Serves, say: Callable[[str], None] = lambda _: None) -> None:
        self._launcher, self._say = launcher, say
        self._desk: Desk | None = None
        self._wake, self._quiet = asyncio.Event(), asyncio.Event()
        self._leases: dict[str, NodeLeases] = {}
        self._terms: dict[str, Terms] = {}
        self._told: dict[str, LeaseTold] = {}
        self._registering: dict[str, Registering] = {}
        self._restoring: dict[str, Restoring] = {}
        self._said: LeaseBeat = LeaseBeat()
        self._said_at = self._heard_at = 0.0
        self._beats = 0
        self._leaving = False

    # ---- what happens; at once

    def ordered(self, order: Order) -> None:
        """A new order: its leases are all that the node holds."""
        for told in order.part(Leases).known:
            self._told[told.name] = told
            self._registering.pop(told.name, None)
            one = self._restoring.get(told.name)
            if one is not None and told.generation >= one.command.generation:
                self._restoring.pop(told.name).answer("")
            self._lease(told.name).told(told)
        if self._launcher.data is not None:
            self._launcher.data.serve()
        self._wake.set()

    def noticed(self, notice: Notice) -> None:
        """A worker that has ended holds nothing any more, nor do the processes that it has made."""
        data = self._launcher.data
        if data is None:
            return
        if isinstance(notice, WorkerExit):
            how = f"rank {notice.rank} ended with exit code {notice.exit_code}"
            data.over(notice.generation, notice.local_rank, how)
        elif isinstance(notice, WorkersGone):
            data.over(notice.generation, None, f"generation {notice.generation} is over")
            for name, one in [*self._restoring.items()]:
                if one.command.generation <= notice.generation:
                    del self._restoring[name]  # the leader would refuse it, and ranks that live now have other words

    def opened(self, session: Session, terms: Terms, shard: int) -> None:
        """As `data_socket.Counter` has it; the others below, too."""
        self._know(session, terms)
        lease = self._lease(terms.name)
        lease.sessions.add(session.number)
        lease.shard = max(lease.shard, shard)
        self._quiet.clear()
        self._wake.set()

    def _know(self, session: Session, terms: Terms) -> Desk:
        """Register a dataset that no order has told of. Raises `Refused` for another one of its name."""
        desk, told, asked = self._desk, self._told.get(terms.name), self._registering.get(terms.name)
        if desk is None:
            raise Refused("this agent has not joined its job yet: try again")
        if terms.assignment not in LEASES:
            words = " or ".join(map(repr, LEASES))
            raise Refused(f"assignment: {terms.assignment!r} of dataset {terms.name!r}: only {words} is drawn here")
        if asked is not None and asked.refused:
            if (asked.terms, asked.generation) == (terms, session.generation):
                raise Refused(asked.refused)
            asked = None
        known = told.terms if told is not None else asked.terms if asked is not None else None
        if known is not None:
            self._check_same(known, terms)
        elif len({*self._told, *self._registering}) >= DATASETS_MAX:
            raise Refused(f"this job has {DATASETS_MAX} leased datasets already: mix several into one")
        if known is None:
            asked = self._registering[terms.name] = Registering(terms, session.generation)
            self._register(desk, asked)
        self._terms[terms.name] = terms
        return desk

    def restored(
        self, session: Session, terms: Terms, state: tuple[int, int], spans: bytes, answer: Callable[[str], None]
    ) -> None:
        """Tell the leader, after the dataset itself; again after a while if no order shows it, unless it is refused."""
        desk = self._know(session, terms)
        if terms.assignment != MODEL_LEASE:
            raise Refused(f'lineage: "server" of dataset {terms.name!r}: it is not restored with a model')
        command = RestoreLeases(desk.node, session.generation, terms.name, *state, spans)
        one = self._restoring[terms.name] = Restoring(command, answer)
        self._restore(desk, one)
        self._wake.set()

    def _restore(self, desk: Desk, one: Restoring) -> None:
        loop = asyncio.get_running_loop()

        def answered(refused: str) -> None:
            one.due_s, one.refused = loop.time() + REGISTER_EVERY_S, refused
            one.answer(one.words if refused else "")
            if refused and self._restoring.get(one.command.dataset) is one:
                log.error("what a model was trained on is refused", dataset=one.command.dataset, reason=refused)
                # Ranks of other nodes are handed nothing either, and do not hear why.
                self._say(f"{one.words}. No rank of this generation is handed samples")
                if self._launcher.data is not None:
                    self._launcher.data.serve()

        one.due_s = math.inf if desk.send(one.command, answered) else loop.time() + REGISTER_EVERY_S

    def _register(self, desk: Desk, one: Registering) -> None:
        """Tell the leader; again after a while if no order shows it, unless it is refused."""
        loop = asyncio.get_running_loop()

        def answered(refused: str) -> None:
            one.due_s = loop.time() + REGISTER_EVERY_S
            if refused and self._registering.get(one.terms.name) is one:
                one.refused = f"dataset {one.terms.name!r}: the job's master refuses it: {refused}"
                self._lease(one.terms.name).sessions.clear()
                if self._launcher.data is not None:
                    self._launcher.data.serve()

        one.sent = desk.send(RegisterDataset(desk.node, one.generation, *one.terms), answered)
        one.due_s = math.inf if one.sent else loop.time() + REGISTER_EVERY_S

    @staticmethod
    def _check_same(known: Terms, terms: Terms) -> None:
        if known != terms:
            had, has = (f"{one}, {one.assignment}, epochs {one.epochs}" for one in (known, terms))
            raise Refused(
                f"dataset {terms.name!r}: the job has it with {had}; this one has {has}: give it another name"
            )

    def draw(self, session: Session, dataset: str, most: int) -> Drawn:
        """Hand a shard out."""
        lease = self._leases.get(dataset)
        if lease is None or session.number not in lease.sessions:
            asked = self._registering.get(dataset)
            raise Refused((asked and asked.refused) or f"dataset {dataset!r}: open it before you draw from it")
        if self._leaving:
            raise Refused(f"dataset {dataset!r}: this node leaves the job")
        if told := self._told.get(dataset):
            self._check_same(told.terms, self._terms[dataset])
        if not lease.serves(session.generation):
            self._check_restored(session, dataset)
            return Drawn()
        if lease.finished:
            return Drawn(ended=True)
        if lease.full(session.number, SHARDS_MAX):
            raise Refused(
                f"dataset {dataset!r}: {SHARDS_MAX} shards were drawn and not acknowledged: say data.done() once a batch was used"
            )
        span = lease.draw(session.number, most, asyncio.get_running_loop().time())
        if span is None or not lease.left:
            self._wake.set()
        return Drawn(span)

    def _check_restored(self, session: Session, dataset: str) -> None:
        """Raises `Refused` where the leader refuses the state that this generation goes on from: nothing is ever handed out."""
        one = self._restoring.get(dataset)
        if one is not None and one.refused and one.command.generation == session.generation:
            raise Refused(one.words)

    def acked(self, session: Session, dataset: str, spans: Sequence[Span]) -> None:
        """These were used."""
        lease = self._leases.get(dataset)
        if lease is None or not lease.serves(session.generation):
            return
        now = asyncio.get_running_loop().time()
        for span in spans:
            lease.ack(span, now)
        if not lease.left:
            self._wake.set()  # these may be the last ones of all

    def returned(self, session: Session, dataset: str, spans: Sequence[Span]) -> None:
        """As `NodeLeases.returned`."""
        lease = self._leases.get(dataset)
        if lease is None or not lease.serves(session.generation):
            return
        lease.returned(session.number, spans)
        if self._launcher.data is not None:
            self._launcher.data.serve()

    def claim(self, session: Session, dataset: str, span: Span, holder: int) -> bool:
        """As `NodeLeases.claim`."""
        lease = self._leases.get(dataset)
        if lease is None or not lease.serves(session.generation):
            return False
        taken = lease.claim(span, holder, asyncio.get_running_loop().time())
        if not lease.left:
            self._wake.set()
        return taken

    def why(self, dataset: str) -> str:
        """Why there is nothing now."""
        desk, now = self._desk, asyncio.get_running_loop().time()
        if desk is not None and desk.beats_seen != self._beats:
            self._beats, self._heard_at = desk.beats_seen, now
        if now - self._heard_at > SILENT_S:
            return f"no master has answered for {now - self._heard_at:.0f} s"
        if dataset not in self._told:
            asked = self._registering.get(dataset)
            if asked is not None and not asked.sent:
                return (
                    "the job's master is of an older release, which knows no leases: update dlrover-core where it runs"
                )
            return "the job's master has not registered the dataset yet"
        if self._told[dataset].assignment == MODEL_LEASE and not self._told[dataset].generation:
            one = self._restoring.get(dataset)
            if one is not None and one.refused:
                return one.words
            return (
                "rank 0 has not said yet from which state this generation goes on: call FlashCheckpoint.restore(); "
                "if every rank did, look for what is refused in the output of rank 0 and of its agent"
            )
        return "other workers have the rest, and have not used it yet"

    def gone(self, session: Session, why: str) -> None:
        """What it had in hand is handed out again, and told: it may have been used."""
        for name, lease in self._leases.items():
            had = lease.gone(session.number)
            if had and not lease.of_model:
                log.warning("samples may be used again", dataset=name, samples=had.count, rank=session.rank, reason=why)
                self._report(name, had, f"rank {session.rank}: {why}")
        if self._launcher.data is not None:
            if not self._launcher.data.sessions:
                self._quiet.set()
            self._launcher.data.serve()
        self._wake.set()

    def _report(self, dataset: str, had: Ranges, why: str) -> None:
        for packed in _messages(had):
            if self._desk is not None:
                self._desk.send(ReportRepeated(self._desk.node, dataset, packed, why))

    def _lease(self, name: str) -> NodeLeases:
        return self._leases.setdefault(name, NodeLeases(name))

    # ---- its life

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        data = self._launcher.data
        if data is None:
            return
        self._desk, self._heard_at = desk, asyncio.get_running_loop().time()
        self._quiet.set()
        data.counter = self
        self.ordered(desk.order)
        try:
            while True:
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(LOOK_S, self._wake.wait()) if self._leases else await self._wake.wait()
                self._wake.clear()
                self._tell(desk, data)
        finally:
            data.counter = None

    def _tell(self, desk: Desk, data: DataSocket) -> None:
        """Let heartbeats say how it stands; the next one at once where somebody waits for what follows from it."""
        if self._leaving:
            return
        now, waiting = asyncio.get_running_loop().time(), data.waiting
        for one in self._registering.values():
            if now >= one.due_s and not one.refused:
                self._register(desk, one)
        for restoring in self._restoring.values():
            if now >= restoring.due_s and not restoring.refused:
                self._restore(desk, restoring)
        asks = tuple(
            lease.ask(now, waiting=name in waiting)
            for name, lease in self._leases.items()
            if lease.sessions or lease.holds or lease.answered
        )
        said, before = LeaseBeat(asks), {one.dataset: one for one in self._said.asks}
        if said == self._said:
            return
        desk.tell(said)
        urgent = False
        for ask in asks:
            last = before.get(ask.dataset)
            news = last is None or (ask.idle and not last.idle) or ask.recall != last.recall
            ended = not self._leases[ask.dataset].holds and (last is None or ask.acked != last.acked)
            urgent = urgent or news or ended
        if urgent or now - self._said_at >= ACKS_S:
            self._said_at = now
            desk.hurry()
        self._said = said

    async def settle(self, order: Order) -> None:
        """The agent goes: once its workers have ended, it reports what they have used, and gives the rest back."""
        if self._desk is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await within(order.grace_us / SECOND_US + LAST_S, self._quiet.wait())
        self._leaving = True
        # First of all: the leader grants by the newest heartbeat, and what it granted after the return would count as lost.
        self._desk.tell(LeaseBeat())
        self._desk.hurry()
        for name, lease in self._leases.items():
            for acked in _messages(lease.acked):
                self._desk.send(ReportAcked(self._desk.node, name, acked))
            if lease.in_hands and not lease.of_model:  # its worker survives SIGKILL
                self._report(name, lease.in_hands, "the node's agent leaves, and a worker still runs")
            if not lease.finished:  # a grant may be on its way to a node that holds nothing
                self._desk.send(ReturnLease(self._desk.node, name))


def _messages(ranges: Ranges) -> Iterator[bytes]:
    """The ranges, packed for as many messages as they need."""
    spans = tuple(ranges)
    for first in range(0, len(spans), SPANS_MAX):
        yield Ranges(spans[first : first + SPANS_MAX]).pack()
