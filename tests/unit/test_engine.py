"""The engine, over a small domain of its own: counters that react, refuse, fail and loop on demand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from dlrover_core.errors import Refused
from dlrover_core.kernel import engine as engine_module
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import (
    Accepted,
    BaseState,
    CommandFailed,
    CommandRefused,
    Engine,
    Facts,
    Fold,
    Model,
    NotDone,
    Resend,
    Rules,
    Tick,
    kept,
)
from dlrover_core.kernel.events import BATCH_BYTES_MAX, Origin, Record, Registry, event


@event(10)
class Counted(NamedTuple):
    """A name was counted."""

    name: str
    text: str = ""


@event(11)
class Echoed(NamedTuple):
    """A count was echoed; ``depth`` further echoes follow."""

    name: str
    depth: int


@event(12)
class Gone(NamedTuple):
    """A sender is gone."""

    name: str


@event(13)
class Poisoned(NamedTuple):
    """Evolving it raises, after it has written."""

    error: str


class Count(NamedTuple):
    """Count these names; ``then``: what to do after the last."""

    names: tuple[str, ...]
    then: str = ""


class Leave(NamedTuple):
    """Forget a sender."""

    name: str


class Quiet(NamedTuple):
    """Changes nothing."""


@dataclass(slots=True)
class Counter:
    """How often each name was counted."""

    counts: dict[str, int] = field(default_factory=dict)


def _on_counted(slice_: Counter, fact: Counted, record: Record) -> None:
    slice_.counts[fact.name] = slice_.counts.get(fact.name, 0) + 1


def _on_poisoned(slice_: Counter, fact: Poisoned, record: Record) -> None:
    slice_.counts["half written"] = 1
    raise Refused("evolve refuses") if fact.error == "refusing evolve" else KeyError("a bug while evolving")


FACTS = Facts(
    kinds=(Counted, Echoed, Gone, Poisoned),
    evolve={Counted: _on_counted, Poisoned: _on_poisoned},
    forgets={Gone: lambda fact: fact.name},
)


@dataclass(slots=True)
class State(BaseState):
    """One slice."""

    counter: Counter = kept(Counter, FACTS)


def _count(state: State, command: Count, now: int) -> Iterator[Any]:
    for name in command.names:
        yield Counted(name, "x" * 4096 if command.then == "large" else "")
    if command.then == "refuse":
        raise Refused("enough")
    if command.then == "raise":
        raise RuntimeError("a bug")
    if command.then == "surrogate":
        raise RuntimeError("\ud800")
    if command.then == "unpackable":
        yield Counted(object())  # type: ignore[arg-type]
    if command.then == "endless":
        yield Echoed("e", 10**9)
    if command.then == "echo":
        yield Echoed("e", 3)
    if command.then in ("poison", "refusing evolve"):
        yield Poisoned(command.then)
    if command.then == "react":
        yield Echoed("bad", 1)


def _echo(state: State, fact: Echoed, record: Record) -> Iterator[Any]:
    if fact.name == "bad":
        yield Counted("half done")
        raise RuntimeError("a bug in a reaction")
    if fact.depth:
        yield Echoed(fact.name, fact.depth - 1)


def _ticked(state: State, now: int) -> Iterator[Any]:
    if now > state.at:
        yield Counted(f"tick {now}")


RULES = Rules(
    decide={
        Count: _count,
        Leave: lambda state, command, now: iter([Gone(command.name)]),
        Quiet: lambda state, command, now: iter([]),
    },
    react={Echoed: _echo},
    due=lambda state: state.at + 100,
    tick=_ticked,
)
FOLD: Fold[State] = Fold(State)
MODEL: Model[State] = Model(FOLD, [RULES])
CODEC = Codec(Registry(MODEL.events))


@pytest.fixture
def engine() -> Engine[State]:
    """A new engine under token 3."""
    return Engine(MODEL, CODEC, MODEL.new(), token=3)


def _facts(engine: Engine[State]) -> list[Any]:
    batch = engine.take()
    return [record.event for record in batch.records] if batch else []


# ---- one batch


def test_a_command_and_its_reactions_are_one_batch(engine: Engine[State]) -> None:
    """What a command leads to, reactions of reactions included, is taken whole; each reaction names what it follows from."""
    assert engine.handle(Count(("a",), "echo"), 50) == Accepted(1)
    batch = engine.take()
    assert batch is not None
    assert [record.event for record in batch.records] == [Counted("a"), *(Echoed("e", depth) for depth in (3, 2, 1, 0))]
    assert [record.cause for record in batch.records] == [0, 0, 2, 3, 4]
    assert [record.seq for record in batch.records] == [1, 2, 3, 4, 5]
    assert (batch.token, batch.counter, batch.at) == (3, 1, 50)
    assert CODEC.decode(batch.payload) == batch


def test_each_event_is_applied_at_once(engine: Engine[State]) -> None:
    """The working state has every event of the batch before the batch is taken."""
    engine.handle(Count(("a", "a")), 1)
    assert engine.state.counter.counts == {"a": 2}
    assert engine.state.seq == 2


def test_several_commands_are_one_group(engine: Engine[State]) -> None:
    """Commands handled before the take share a batch; the next take begins a new one with the next counter."""
    for at in (1, 2, 3):
        engine.handle(Count(("a",)), at)
    first = engine.take()
    assert first is not None
    assert [record.at for record in first.records] == [1, 2, 3]
    assert engine.take() is None
    engine.handle(Count(("a",)), 4)
    second = engine.take()
    assert second is not None
    assert (second.counter, second.first_seq) == (2, 4)


def test_pending_bytes_tell_when_a_group_is_full(engine: Engine[State]) -> None:
    """The size of the batch in the making is known, and 0 after the take."""
    engine.handle(Count(("a",), "large"), 1)
    assert 4096 < engine.pending_bytes < 4200
    engine.take()
    assert engine.pending_bytes == 0


def test_reactions_are_bounded(engine: Engine[State], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reactions that never end are an error of ours, not a hang."""
    monkeypatch.setattr(engine_module, "REACTIONS_MAX", 50)
    assert isinstance(engine.handle(Count((), "endless"), 1), NotDone)
    (failed,) = _facts(engine)
    assert failed.error == "RuntimeError: reactions did not end after 50 events"


def test_one_commands_batch_is_bounded(engine: Engine[State]) -> None:
    """More than 1 MiB from one command is an error of ours; what other commands put into the group does not count."""
    for _ in range(3):
        assert isinstance(engine.handle(Count(("a",) * 100, "large"), 1), Accepted)
    assert engine.pending_bytes > BATCH_BYTES_MAX
    assert isinstance(engine.handle(Count(("b",) * 300, "large"), 1), NotDone)
    *_, failed = _facts(engine)
    assert "would exceed 1048576 bytes" in failed.error
    assert "b" not in engine.state.counter.counts


# ---- time


def test_time_is_passed_in_and_never_falls(engine: Engine[State]) -> None:
    """A record's time is the caller's, but never before the record in front of it."""
    for at in (100, 50, 120):
        engine.handle(Count(("a",)), at)
    batch = engine.take()
    assert batch is not None
    assert [record.at for record in batch.records] == [100, 100, 120]
    engine.handle(Count(("a",)), 7)
    assert engine.state.at == 120


def test_the_same_input_gives_the_same_bytes() -> None:
    """Two engines fed alike produce equal batches and states: nothing but state, input and now goes in."""
    batches = []
    for _ in range(2):
        engine = Engine(MODEL, CODEC, MODEL.new(), token=3)
        for at, command in enumerate((Count(("a", "b"), "echo"), Count((), "refuse"), Count((), "raise"), Tick())):
            engine.handle(command, at * 10, Origin("s", 1, at + 1))
        batch = engine.take()
        assert batch is not None
        batches.append((batch.payload, engine.digest()))
    assert batches[0] == batches[1]


def test_a_tick_asks_every_concern(engine: Engine[State]) -> None:
    """Tick is the command of time; without effect and without sender it leaves no trace."""
    assert engine.handle(Tick(), 9) == Accepted(1)
    assert engine.handle(Tick(), 9) == Accepted(0)
    assert _facts(engine) == [Counted("tick 9")]
    assert MODEL.due(engine.state) == 109


# ---- dedup


def _say(engine: Engine[State], number: int, command: Any = None, boot: int = 1, sender: str = "s") -> Any:
    return engine.handle(command if command is not None else Count((f"n{number}",)), 1, Origin(sender, boot, number))


def test_the_next_number_is_accepted(engine: Engine[State]) -> None:
    """A sender's numbers count from 1, each one more than the last."""
    assert [_say(engine, number) for number in (1, 2, 3)] == [Accepted(1), Accepted(2), Accepted(3)]


def test_a_repeated_number_is_answered_from_memory(engine: Engine[State]) -> None:
    """A number that was handled is not handled again and gets the same answer, whatever it says now."""
    told = [
        _say(engine, 1),
        _say(engine, 2, Count(("x",), "refuse")),
        _say(engine, 3, Count((), "raise")),
        _say(engine, 4, Quiet()),
    ]
    before = engine.digest()
    assert [_say(engine, number) for number in (1, 2, 3, 4)] == told
    assert engine.digest() == before
    assert told == [Accepted(1), NotDone(2, "enough"), NotDone(3, "RuntimeError: a bug"), NotDone(4, "no effect")]


def test_a_repeated_number_is_answered_by_the_next_master_too(engine: Engine[State]) -> None:
    """The memory of answers is part of the fold."""
    told = [_say(engine, 1), _say(engine, 2, Count((), "refuse")), _say(engine, 3, Count((), "raise"))]
    batch = engine.take()
    assert batch is not None
    successor = Engine(MODEL, CODEC, MODEL.fold(CODEC.decode(batch.payload).records), token=4)
    assert [_say(successor, number) for number in (1, 2, 3)] == told
    assert successor.take() is None


def test_a_gap_is_asked_for(engine: Engine[State]) -> None:
    """A missing number is asked for again; nothing is decided until it comes."""
    assert _say(engine, 2) == Resend(1)
    _say(engine, 1)
    assert _say(engine, 4) == Resend(2)
    assert engine.state.counter.counts == {"n1": 1}


def test_only_the_last_answers_are_kept(engine: Engine[State]) -> None:
    """A sender has at most 16 unanswered, so older answers are forgotten; asking for them changes nothing."""
    for number in range(1, 21):
        _say(engine, number)
    assert len(engine.state.senders["s"].replies) == 16
    assert _say(engine, 5) == Accepted(5)
    assert _say(engine, 4) == NotDone(0, "answered long ago")


def test_a_new_boot_begins_anew(engine: Engine[State]) -> None:
    """Another process of the same sender counts from 1 again, and the old one's numbers are refused without a record."""
    _say(engine, 1)
    _say(engine, 2)
    assert _say(engine, 1, boot=2) == Accepted(3)
    assert _say(engine, 3, boot=1) == NotDone(0, "an earlier boot of this sender; its successor has spoken")
    assert _say(engine, 2, boot=2) == Accepted(4)
    assert len(_facts(engine)) == 4


def test_a_refusal_is_recorded(engine: Engine[State]) -> None:
    """A refusal that depended on state is an event, what the command had yielded before is not, and no state but it changes."""
    assert engine.handle(Count(("a", "b"), "refuse"), 1) == NotDone(1, "enough")
    assert engine.state.counter.counts == {}
    assert _facts(engine) == [CommandRefused("Count", "enough")]


def test_a_command_nobody_decides_is_refused(engine: Engine[State]) -> None:
    """An unknown command is refused by name."""
    reply = engine.handle(("what",), 1)
    assert reply == NotDone(1, "nobody here decides tuple")


def test_a_sender_is_forgotten_with_its_node(engine: Engine[State]) -> None:
    """After the event of its end a sender is a stranger who begins at 1."""
    _say(engine, 1)
    _say(engine, 2)
    engine.handle(Leave("s"), 2)
    assert "s" not in engine.state.senders
    assert _say(engine, 3) == Resend(1)


def test_strangers_are_bounded(engine: Engine[State], monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders that are no nodes (their names have a slash) push one another out, oldest first."""
    monkeypatch.setattr(engine_module, "STRANGERS_MAX", 3)
    for name in ("cli/1", "cli/2", "cli/3", "cli/4"):
        _say(engine, 1, sender=name)
    assert list(engine.state.senders) == ["cli/2", "cli/3", "cli/4"]


# ---- poison


POISON = ["raise", "surrogate", "unpackable", "react", "poison", "refusing evolve"]


@pytest.mark.parametrize("then", POISON)
def test_a_poison_command_leaves_the_state_as_it_was(engine: Engine[State], then: str) -> None:
    """Whatever raises in decide, react or evolve: the state is exactly as before but for the record that says so."""
    engine.handle(Count(("before",)), 1)
    before = MODEL.fold([], engine.state).counter.counts.copy()
    reply = engine.handle(Count(("half", "half"), then), 2, Origin("s", 1, 1))
    assert isinstance(reply, NotDone)
    assert engine.state.counter.counts == before
    assert engine.handle(Count(("after",)), 3) == Accepted(3)
    batch = engine.take()
    assert batch is not None
    assert [type(record.event) for record in batch.records][::2] == [Counted, Counted]
    assert type(batch.records[1].event) is (CommandRefused if then == "refusing evolve" else CommandFailed)
    again = MODEL.fold(CODEC.decode(batch.payload).records)
    assert Engine(MODEL, CODEC, again, token=3).digest() == engine.digest()


def test_a_failure_says_where(engine: Engine[State]) -> None:
    """CommandFailed names the command, the error and the function that raised."""
    engine.handle(Count((), "raise"), 1)
    (failed,) = _facts(engine)
    assert failed[:2] == ("Count", "RuntimeError: a bug")
    assert failed.where.startswith("_count:")


@pytest.mark.parametrize("then", POISON)
def test_poison_in_the_middle_of_a_group(engine: Engine[State], then: str) -> None:
    """A poison command between good ones of the same batch costs nobody else anything."""
    replies = [
        engine.handle(Count(("a",), "echo"), 1),
        engine.handle(Count(("b", "b"), then), 2),
        engine.handle(Count(("c",)), 3),
    ]
    assert [type(reply) for reply in replies] == [Accepted, NotDone, Accepted]
    assert engine.state.counter.counts == {"a": 1, "c": 1}
    batch = engine.take()
    assert batch is not None
    assert [record.seq for record in batch.records] == list(range(1, 8))
    assert CODEC.decode(batch.payload) == batch
    assert Engine(MODEL, CODEC, MODEL.fold(batch.records), token=3).digest() == engine.digest()


def test_poison_after_many_batches(engine: Engine[State], monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back works from any base: after takes, and after the base was laid anew."""
    monkeypatch.setattr(engine_module, "REBASE_EVERY", 5)
    for at in range(23):
        engine.handle(Count((f"n{at % 3}",)), at)
        engine.take()
        before = engine.state.counter.counts.copy()
        engine.handle(Count(("half",), "raise"), at)
        assert engine.state.counter.counts == before
        engine.take()


def test_a_snapshot_is_the_base(engine: Engine[State]) -> None:
    """`rebase` returns the packed state, and the engine goes on from it."""
    engine.handle(Count(("a",)), 1)
    engine.take()
    snapshot = engine.rebase()
    engine.handle(Count(("b",), "raise"), 2)
    assert engine.state.counter.counts == {"a": 1}
    assert snapshot == Engine(MODEL, CODEC, engine_module.unpack(State, snapshot), token=3).rebase()


def test_a_base_in_mid_batch_has_what_was_decided_before_it(engine: Engine[State]) -> None:
    """Falling back folds neither the records that it holds a second time, nor those of a batch that was sealed later."""
    engine.handle(Count(("a",)), 1)
    engine.rebase()
    engine.handle(Count(("a",)), 2)
    for _ in range(2):
        engine.handle(Count(("b",), "raise"), 3)
        assert engine.state.counter.counts == {"a": 2}
        engine.take()


def test_two_rules_cannot_decide_one_command() -> None:
    """A command has one decider."""
    with pytest.raises(ValueError, match="two rules decide Count"):
        Model(FOLD, [RULES, RULES])
