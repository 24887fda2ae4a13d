"""The engine: command -> events -> reactions -> one batch -> state.

A rule's ``decide`` yields events for a command; each is applied at once to the working state; the ``react`` functions of
all rules yield follow-ups, whose cause is the record they react to, until none is left. All of it goes into one batch:
no half-decided state exists on disk. ``decide``, ``react`` and ``tick`` are pure: state, input and ``now`` in, events out.

The engine does no I/O. Its owner takes the batch, appends it, and releases replies only after the commit. It may handle
several commands before it takes: that is group commit. While an append is in flight it must handle nothing.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, Union

from dlrover_core.errors import Refused
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import BATCH_BYTES_MAX, Batch, Event, Origin, Record, event
from dlrover_core.kernel.state import LATER, digest, pack, reset, schema, unpack
from dlrover_core.kernel.wire import Part, Unknown

Command = tuple[object, ...]

REACTIONS_MAX = 100_000
UNANSWERED_MAX = 16
STRANGERS_MAX = 1024
REBASE_EVERY = 10_000
ERROR_CHARS_MAX = 500
REASON_CHARS_MAX = 2000


@event(1)
class CommandRefused(NamedTuple):
    """A command was well formed but the state forbade it. Recorded, so that its repetition meets the same answer."""

    command: str
    reason: str


@event(2)
class CommandFailed(NamedTuple):
    """Deciding raised: our bug. Nothing of the command was applied; the job goes on; somebody should be told."""

    command: str
    error: str
    where: str


@dataclass(slots=True)
class Sender:
    """What is remembered of one sender: its boot, its last number, the answers it may not have seen, and the boot before."""

    boot: int
    last: int
    replies: list[tuple[int, str]]
    retired: int = -1


@dataclass(slots=True)
class BaseState:
    """What every state has: its place in the log, and the senders.

    With an event of the type ``NEW_RUN`` a new run begins: all slices forget what is not `lasting`, before the event is folded.
    """

    NEW_RUN: ClassVar[type | None] = None

    seq: int = 0
    at: int = 0
    token: int = 0
    senders: dict[str, Sender] = dataclasses.field(default_factory=dict)


class Accepted(NamedTuple):
    """Done; ``seq`` is the first record it led to."""

    seq: int


class NotDone(NamedTuple):
    """Refused, for ``reason``; recorded at ``seq`` (0: malformed, not recorded)."""

    seq: int
    reason: str


class Resend(NamedTuple):
    """A number is missing: send again from ``expected``."""

    expected: int


Reply = Union[Accepted, NotDone, Resend]
St = TypeVar("St", bound=BaseState)
S = TypeVar("S")

Evolve = Callable[[Any, Any, Record], None]
Decide = Callable[[Any, Any, int], Iterable[Event]]
React = Callable[[Any, Any, Record], Iterable[Event]]
Levels = Callable[[Any, Any], bool]
Alarm = Callable[[Any], str]


def always(_state: Any, _fact: Any) -> bool:
    """Every event of this type may change what should be true."""
    return True


@dataclass(frozen=True, slots=True)
class Facts:
    """What a part of the domain knows: all that reading a log needs.

    ``kinds`` are its events, ``evolve`` how each event changes its slice of the state, which it alone writes. ``forgets`` names
    the sender that an event ends; None: all of them.
    """

    kinds: Sequence[type] = ()
    evolve: Mapping[type, Evolve] = dataclasses.field(default_factory=dict)
    forgets: Mapping[type, Callable[[Any], str | None]] = dataclasses.field(default_factory=dict)


def kept(cls: type[S], *facts: Facts, later: bool = False) -> S:
    """A field of the state: a slice, and the facts that are folded into it, in this order.

    ``later``: histories were recorded before the state had this slice (`kernel.state.LATER`). Its class says whether it is empty.
    """
    return dataclasses.field(default_factory=cls, metadata={"facts": facts, **(LATER if later else {})})


class Telling(NamedTuple):
    """What one concern tells a group's nodes: each ``named`` one its part, else each ``working`` one, else what is ``to_all``."""

    to_all: Part | None = None
    working: Mapping[str, Part] = MappingProxyType({})
    named: Mapping[str, Part] = MappingProxyType({})


class Tells(NamedTuple):
    """How a concern tells agents: ``telling(state, group, key)``, once for as long as ``key(state, group)`` stays the same."""

    key: Callable[[Any, str], Any]
    telling: Callable[[Any, str, Any], Telling]


def to_named(parts: Callable[[Any, str], Mapping[str, Part]]) -> Tells:
    """A concern that tells a few nodes something; ``parts`` is asked each time."""
    return Tells(parts, lambda _state, _group, found: Telling(named=found))


@dataclass(frozen=True, slots=True)
class Rules:
    """What a part of the domain decides, by the type that it is about. Rules read everything and write nothing.

    ``due`` names the next moment at which ``tick`` may have something to say. ``levels`` names the events after which agents and
    backends may have to be told something else, each with the question whether this one is such a case; the question is asked
    with the state at the end of the batch; ``tells`` is what the concern itself has to say. ``alarms`` gives what people are to
    hear of an event at once; empty: nothing.
    """

    decide: Mapping[type, Decide] = dataclasses.field(default_factory=dict)
    react: Mapping[type, React] = dataclasses.field(default_factory=dict)
    due: Callable[[Any], int | None] | None = None
    tick: Callable[[Any, int], Iterable[Event]] | None = None
    levels: Mapping[type, Levels] = dataclasses.field(default_factory=dict)
    tells: Tells | None = None
    alarms: Mapping[type, Alarm] = dataclasses.field(default_factory=dict)


class Tick(NamedTuple):
    """The command of time itself: some deadline has passed."""


class Fold(Generic[St]):
    """How records become a state: the facts of all its slices, compiled to lookups."""

    def __init__(self, state: type[St]) -> None:
        self.state_type, self.schema = state, schema(state)
        self._evolve: dict[type, tuple[tuple[Callable[[Any], Any], Evolve], ...]] = {}
        self._forgets: dict[type, Callable[[Any], str | None]] = {}
        kinds: list[type] = [CommandRefused, CommandFailed]
        slices = [field for field in dataclasses.fields(state) if "facts" in field.metadata]
        if state.NEW_RUN is not None:
            self._evolve[state.NEW_RUN] = tuple((attrgetter(field.name), _forget) for field in slices)
        for field in slices:
            slice_of = attrgetter(field.name)
            for facts in field.metadata["facts"]:
                kinds += facts.kinds
                self._forgets.update(facts.forgets)
                for cls, evolve in facts.evolve.items():
                    self._evolve[cls] = (*self._evolve.get(cls, ()), (slice_of, evolve))
        self.events = tuple(kinds)

    def new(self) -> St:
        """The state before the first event."""
        return self.state_type()

    def apply(self, state: St, record: Record) -> None:
        """Fold one record into ``state``."""
        state.seq, state.at, state.token, _, fact, origin = record
        if origin is not None:
            _remember(state, record, origin)
        cls = type(fact)
        for slice_of, evolve in self._evolve.get(cls, ()):
            evolve(slice_of(state), fact, record)
        forget = self._forgets.get(cls)
        if forget is not None:
            sender = forget(fact)
            if sender is None:
                state.senders.clear()
            else:
                state.senders.pop(sender, None)

    def fold(self, records: Iterable[Record], state: St | None = None) -> St:
        """Fold many records."""
        folded = self.new() if state is None else state
        apply = self.apply
        for record in records:
            apply(folded, record)
        return folded


class Model(Fold[St]):
    """A fold and the rules of its domain, in the order in which they react. It folds by the very tables of ``fold``."""

    def __init__(self, fold: Fold[St], rules: Sequence[Rules]) -> None:
        self.state_type, self.schema, self.events = fold.state_type, fold.schema, fold.events
        self._evolve, self._forgets = fold._evolve, fold._forgets
        self.rules = tuple(rules)
        self._decide: dict[type, Decide] = {}
        self._react: dict[type, tuple[React, ...]] = {}
        self._levels: dict[type, tuple[Levels, ...]] = {}
        self._alarms: dict[type, Alarm] = {CommandFailed: lambda _: "a command failed: our bug"}
        for one in rules:
            self._add(one)
        self.reacts = frozenset(self._react)
        self.tells = tuple(one.tells for one in rules if one.tells is not None)

    def _add(self, rules: Rules) -> None:
        for cls, decide in rules.decide.items():
            if cls in self._decide:
                raise ValueError(f"two rules decide {cls.__name__}")
            self._decide[cls] = decide
        for cls, react in rules.react.items():
            self._react[cls] = (*self._react.get(cls, ()), react)
        for cls, levels in rules.levels.items():
            self._levels[cls] = (*self._levels.get(cls, ()), levels)
        self._alarms.update(rules.alarms)

    def decide(self, state: St, command: Command, now: int) -> Iterable[Event]:
        """The events a command leads to by itself. Raises `Refused`."""
        if type(command) is Tick:
            return self._tick(state, now)
        decide = self._decide.get(type(command))
        if decide is None:
            if isinstance(command, Unknown):
                raise Refused(f"{command.name} is not known here: install the agent's release on the masters, too")
            raise Refused(f"nobody here decides {type(command).__name__}")
        return decide(state, command, now)

    def _tick(self, state: St, now: int) -> Iterable[Event]:
        for rules in self.rules:
            if rules.tick is not None:
                yield from rules.tick(state, now)

    def reactions(self, state: St, record: Record) -> Iterable[Event]:
        """What follows from a record that was just applied."""
        for react in self._react.get(type(record.event), ()):
            yield from react(state, record.event, record)

    def levels(self, state: St, records: Iterable[Record]) -> bool:
        """May agents and backends have to be told something else after these records, which led to ``state``?"""
        return any(
            levels(state, record.event) for record in records for levels in self._levels.get(type(record.event), ())
        )

    def alarm(self, fact: Event) -> str:
        """What people are to hear of an event at once; empty: nothing."""
        alarm = self._alarms.get(type(fact))
        return alarm(fact) if alarm is not None else ""

    def due(self, state: St) -> int | None:
        """The earliest deadline of all rules, or None."""
        dues = [rules.due(state) for rules in self.rules if rules.due is not None]
        return min((due for due in dues if due is not None), default=None)


def _forget(slice_: Any, _fact: Any, _record: Record) -> None:
    """A new run begins."""
    reset(slice_)


def _remember(state: BaseState, record: Record, origin: Origin) -> None:
    sender, boot, number = origin
    fact = record.event
    reason = fact.reason if isinstance(fact, CommandRefused) else fact.error if isinstance(fact, CommandFailed) else ""
    known = state.senders.get(sender)
    if known is None or known.boot != boot:
        while len(state.senders) >= STRANGERS_MAX and "/" in sender:
            _forget_oldest_stranger(state)
        state.senders[sender] = Sender(boot, number, [(record.seq, reason)], known.boot if known else -1)
        return
    known.last = number
    known.replies.append((record.seq, reason))
    if len(known.replies) > UNANSWERED_MAX:
        del known.replies[0]


def _forget_oldest_stranger(state: BaseState) -> None:
    oldest = next((name for name in state.senders if "/" in name), None) or next(iter(state.senders))
    del state.senders[oldest]


class Engine(Generic[St]):
    """Working state plus the batch in the making. One owner, one thread."""

    def __init__(self, model: Model[St], codec: Codec, state: St, token: int, counter: int = 0) -> None:
        self.model, self.codec, self.state, self.token = model, codec, state, token
        self.counter = counter
        self._records: list[Record] = []
        self._entries: list[bytes] = []
        self._bytes = self._began = 0
        self._at = 0
        self._base = pack(state)
        self._sealed: list[bytes] = []
        self._sealed_records = 0

    @property
    def pending_bytes(self) -> int:
        """Size of the batch in the making."""
        return self._bytes

    def handle(self, command: Command, now: int, origin: Origin | None = None) -> Reply:
        """Decide one command into the batch in the making.

        The reply must not leave before the batch is durable. A repeated command is answered as it was, a gap with `Resend`.
        """
        if origin is not None:
            known = self._known(origin)
            if known is not None:
                return known
        now = max(now, self.state.at)
        first, entries, size, seq = len(self._records), len(self._entries), self._bytes, self.state.seq
        self._began = size
        try:
            try:
                self._run(command, now, origin)
            except Refused as refused:
                if self.state.seq != seq:
                    self._undo(first, entries, size)
                # It may quote what was sent.
                reason = refused.reason[:REASON_CHARS_MAX]
                self._emit(CommandRefused(type(command).__name__, reason), now, 0, origin)
        except Exception as error:  # noqa: BLE001  # whatever deciding raises must not walk through the standbys
            self._undo(first, entries, size)
            failed = CommandFailed(type(command).__name__, _what(error), _where(error))
            self._emit(failed, now, 0, origin)
        if len(self._records) == first and origin is not None:
            self._emit(CommandRefused(type(command).__name__, "no effect"), now, 0, origin)
        if len(self._records) == first:
            return Accepted(0)
        return _reply(self._records[first])

    def _known(self, origin: Origin) -> Reply | None:
        known = self.state.senders.get(origin.sender)
        if known is None:
            return None if origin.number == 1 else Resend(1)
        if origin.boot == known.retired:
            return NotDone(0, "an earlier boot of this sender; its successor has spoken")
        if known.boot != origin.boot and origin.number == 1:
            return None
        if known.boot != origin.boot:
            # A new process whose first word is still on its way is asked for it.
            return Resend(1)
        if origin.number == known.last + 1:
            return None
        if origin.number > known.last:
            return Resend(known.last + 1)
        back = known.last - origin.number
        if back >= len(known.replies):
            return NotDone(0, "answered long ago")
        seq, reason = known.replies[-1 - back]
        return NotDone(seq, reason) if reason else Accepted(seq)

    def _run(self, command: Command, now: int, origin: Origin | None) -> None:
        reacts = self.model.reacts
        for fact in self.model.decide(self.state, command, now):
            record = self._emit(fact, now, 0, origin)
            origin = None
            if type(fact) in reacts:
                self._settle(deque((record,)), now)

    def _settle(self, waiting: deque[Record], now: int) -> None:
        for _ in range(REACTIONS_MAX):
            if not waiting:
                return
            record = waiting.popleft()
            for fact in self.model.reactions(self.state, record):
                waiting.append(self._emit(fact, now, record.seq, None))
        raise RuntimeError(f"reactions did not end after {REACTIONS_MAX} events")

    def _emit(self, fact: Event, now: int, cause: int, origin: Origin | None) -> Record:
        if not self._records:
            self._at = now
        record = Record(self.state.seq + 1, now, self.token, cause, fact, origin)
        entry = self.codec.entry(record, self._at)
        self._bytes += len(entry)
        if self._bytes - self._began > BATCH_BYTES_MAX:
            raise RuntimeError(f"one batch would exceed {BATCH_BYTES_MAX} bytes")
        self.model.apply(self.state, record)
        self._records.append(record)
        self._entries.append(entry)
        return record

    def _undo(self, records: int, entries: int, size: int) -> None:
        """Discard what the present command did: fold again from the last base."""
        del self._records[records:], self._entries[entries:]
        self._bytes = size
        base = unpack(self.model.state_type, self._base)
        self.state = self.model.fold(self._beyond(base.seq), base)

    def _beyond(self, seq: int) -> Iterator[Record]:
        """The records after the last base. Sealed ones were kept as bytes, which the garbage collector need not walk."""
        decoded = (record for payload in self._sealed for record in self.codec.decode(payload).records)
        # A base may be made while a batch is in the making.
        return (record for record in chain(decoded, self._records) if record.seq > seq)

    def take(self) -> Batch | None:
        """The batch of everything handled since the last take, or None."""
        if not self._records:
            return None
        self.counter += 1
        batch = self.codec.seal(self.token, self.counter, self._at, self._records, self._entries)
        self._sealed.append(batch.payload)
        self._sealed_records += len(self._records)
        self._records, self._entries, self._bytes = [], [], 0
        if self._sealed_records >= REBASE_EVERY:
            self.rebase()
        return batch

    def rebase(self) -> bytes:
        """Pack the state now: the base that failed commands fall back to, and what a snapshot stores."""
        self._base = pack(self.state)
        self._sealed, self._sealed_records = [], 0
        return self._base

    def digest(self) -> str:
        """The hash of the working state."""
        return digest(self.state)


def _reply(record: Record) -> Reply:
    fact = record.event
    if isinstance(fact, CommandRefused):
        return NotDone(record.seq, fact.reason)
    if isinstance(fact, CommandFailed):
        return NotDone(record.seq, fact.error)
    return Accepted(record.seq)


def _what(error: BaseException) -> str:
    # Lone surrogates cannot be packed, and this record must never fail to be.
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX].encode(errors="replace").decode()


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name}:{frames[-1].lineno}" if frames else ""
