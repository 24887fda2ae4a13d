"""The master dies at every place of a history, and nothing may come of it.

A batch is on disk whole or not at all, so a master dies between two commands, whatever it was doing. `walk` goes through a
run's commands one by one, and at every one of them lets a successor take over:

- what the successor reads is what the dead master knew: the state survives being packed, and so does all that follows from it;
- it decides nothing by taking over: what is desired stays as it was, silence alone is counted anew;
- agents say everything again to which they may have seen no answer, and are answered as before; nothing is decided twice;
- what was decided and not yet on disk, because it comes again, is decided in the same way, event for event;
- should the dead one live after all, the log takes nothing more from it.

`crash_at_every_index` also crashes whole runs, before and after an append, and compares how they end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from dlrover_core.job import nodes
from dlrover_core.job.job import LeaderStarted, TakeOver
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import UNANSWERED_MAX, Command, Engine, Reply, Resend
from dlrover_core.kernel.events import Origin, Record
from dlrover_core.kernel.log import Appended, Fenced
from dlrover_core.kernel.state import _unplainer, digest, pack
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.run import Broken, Input, Run
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.spec import us
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.invariants import DEFAULT
from dlrover_core.testing.promises import Invariant, Together

# Whole runs that are crashed: as many as make so many events together, within these bounds.
RUN_EVENTS, RUNS_MIN, RUNS_MAX = 200_000, 10, 200
RIVALS_MAX = 16
# So many commands of one moment are decided anew by each successor: more than most groups hold.
AGAIN_MAX = 8
STANDBY_EVERY = 64
# A successor is there, but those who lost the last one only look for it every now and then.
HEARD_S = 2.0
CRASHES = ("crash_before_append", "crash_after_append")

_state_of = _unplainer(JobState)


@dataclass(slots=True)
class Crashes:
    """What was tried: successors at how many places of how many events, commands said again, rivals fenced, runs crashed."""

    events: int = 0
    successors: int = 0
    said_again: int = 0
    decided_again: int = 0
    rivals: int = 0
    runs: int = 0
    indices: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        """In a sentence."""
        return (
            f"{self.events} events: {self.successors} successors, {self.said_again} commands said again, "
            f"{self.decided_again} decided again, {self.rivals} rivals fenced, {self.runs} whole runs crashed"
        )


class DurableCommand(NamedTuple):
    """A command whose batch became durable, and the records it led to: those after ``first`` up to ``last``."""

    given: Input
    first: int
    last: int


def kept(inputs: Sequence[Input], total: int) -> list[DurableCommand]:
    """The commands that made the history. One without effect, or whose batch died with its master, is none of them.

    Raises AssertionError where they leave records unexplained.
    """
    found: list[DurableCommand] = []
    after = total
    for given in reversed(inputs):
        if after > given.seq:
            found.append(DurableCommand(given, given.seq, after))
        after = min(after, given.seq)
    assert after == 0, (
        f"records 1 to {after} follow from no input: was the run made with inputs=True, and from its beginning?"
    )
    return found[::-1]


def walk(inputs: Sequence[Input], records: Sequence[Record], *, rivals: int = RIVALS_MAX) -> Crashes:
    """Let a successor take over before each command of a history. Raises `Broken`."""
    steps = kept(inputs, len(records))
    done = Crashes(events=len(records))
    fence_at = set(_spread(len(steps), rivals))
    scene = _Scene(records, done)
    for place, step in enumerate(steps):
        try:
            scene.succeed(steps[place : place + AGAIN_MAX])
            if place in fence_at:
                scene.fence(step)
            scene.go_on(step)
        except AssertionError as error:
            raise _broken(step, error) from error
    folded = digest(MODEL.fold(records))
    if folded != digest(scene.engine.state):
        raise Broken("the state is not the fold of its records: something is kept outside of it", len(records))
    return done


def _broken(step: DurableCommand, error: AssertionError) -> Broken:
    what = f"master dies after record {step.first}, before {type(step.given.command).__name__}: {error}"
    return Broken(what, step.first, repr(step.given.command)[:200])


def _spread(among: int, most: int) -> list[int]:
    """At most so many of so many places, evenly: all, if they are few enough."""
    if among <= most:
        return list(range(among))
    return [place * among // most for place in range(most)]


class _Scene:
    """The master of the history, a standby that follows it from snapshots, and one successor after the other."""

    def __init__(self, records: Sequence[Record], done: Crashes) -> None:
        self.records, self.done = records, done
        self.engine: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), token=1)
        self._heir: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), token=1)
        self._standby = MODEL.new()
        self._sent: dict[str, tuple[int, deque[tuple[int, Command, Reply]]]] = {}
        self._spoke = ""

    def go_on(self, step: DurableCommand) -> None:
        """The command is decided by the master of the history: to the very records that it led to."""
        given, records = step.given, self.records[step.first : step.last]
        self.engine.token = records[0].token
        reply = self.engine.handle(given.command, given.at, given.origin)
        batch = self.engine.take()
        _same(batch.records if batch is not None else (), records, "decided a second time")
        MODEL.fold(records, self._standby)
        if given.origin is not None:
            sender, boot, number = given.origin
            known, replies = self._sent.get(sender, (boot, deque()))
            if known != boot or number == 1:
                replies = deque(maxlen=UNANSWERED_MAX)
            replies.append((number, given.command, reply))
            self._sent[sender] = boot, replies
            self._spoke = sender

    def succeed(self, ahead: Sequence[DurableCommand]) -> None:
        """A successor reads the state, takes over, is told again what it was told, and decides what comes next."""
        state, at = self.engine.state, ahead[0].given.at
        packed = pack(state)
        heir = self._heir
        heir.state = _state_of(msgpack.unpackb(packed, use_list=False, strict_map_key=False))
        heir._base = packed
        heir._sealed, heir._sealed_records = [], 0
        assert heir.state == state, "the state does not survive being packed"
        if self.done.successors % STANDBY_EVERY == 0:
            assert pack(self._standby) == packed, "a standby that follows from a snapshot has come to another state"
            self._standby = _state_of(msgpack.unpackb(packed, use_list=False, strict_map_key=False))
        if state.seq:
            self._take_over(heir, at)
        self._say_again(heir, at)
        self._decide_again(heir, ahead)
        self.done.successors += 1

    def _take_over(self, heir: Engine[JobState], at: int) -> None:
        state = self.engine.state
        wanted, due = desired(state), MODEL.due(state)
        assert desired(heir.state) == wanted, "a state that was read from its bytes wants something else"
        assert MODEL.due(heir.state) == due, "a state that was read from its bytes has other deadlines"
        heir.token = state.token + 1
        heir.handle(TakeOver("successor", ""), at)
        batch = heir.take()
        names = [type(record.event).__name__ for record in (batch.records if batch is not None else ())]
        assert names == ["LeaderStarted"], f"a new leader decides {names} by taking over"
        assert desired(heir.state) == wanted, "a new leader wants something else"
        later = MODEL.due(heir.state)
        assert later is None if due is None else later is not None and later >= due, "a new leader is less patient"
        # Of all that, its place in the log and the new patience are what may differ. Without them it must go on alike.
        new = heir.state
        assert (new.seq, new.token, new.job.calm_at) == (state.seq + 1, state.token + 1, new.at), (
            "a new leader is no leader"
        )
        new.seq, new.at, new.token, new.job.calm_at = state.seq, state.at, state.token, state.job.calm_at
        assert new == state, "a new leader changes what is known"
        heir._sealed, heir._sealed_records = [], 0

    def _say_again(self, heir: Engine[JobState], at: int) -> None:
        """Whoever may have seen no answer asks again. The newest speaker says all that it said, the others their last word."""
        seq, senders = heir.state.seq, heir.state.senders
        for sender, (boot, replies) in self._sent.items():
            known = senders.get(sender)
            if known is None or known.boot != boot:
                continue
            for number, command, reply in replies if sender == self._spoke else (replies[-1],):
                answer = heir.handle(command, at, Origin(sender, boot, number))
                assert answer == reply, f"{sender} says {number} again, is answered {answer}, and was answered {reply}"
                self.done.said_again += 1
            if sender == self._spoke:
                gap = heir.handle(replies[-1][1], at, Origin(sender, boot, known.last + 2))
                assert gap == Resend(known.last + 1), f"{sender} leaves out {known.last + 1} and is answered {gap}"
        assert heir.state.seq == seq, "what had been answered is decided again"

    def _decide_again(self, heir: Engine[JobState], ahead: Sequence[DurableCommand]) -> None:
        """What the dead master was deciding comes again: the same events follow."""
        at, token = ahead[0].given.at, self.records[ahead[0].first].token
        heir.token = token
        for given, first, last in ahead:
            records = self.records[first:last]
            if given.at != at or records[0].token != token:
                break
            heir.handle(given.command, given.at, given.origin)
            batch = heir.take()
            _same(batch.records if batch is not None else (), records, "decided by a successor")
            self.done.decided_again += 1

    def fence(self, step: DurableCommand) -> None:
        """The dead master lives: what it decides after its successor's first word never reaches the log."""
        if self.engine.state.seq == 0:
            return

        async def told() -> None:
            log, history = MemoryLog(CODEC), self.records[: step.first]
            old = await log.lead("j", "old")
            batch = CODEC.batch(old.token, 1, [record._replace(token=old.token) for record in history])
            assert isinstance(await old.append(batch), Appended)
            log.expire("j")
            new = await log.lead("j", "new")
            rival = self._of(old.token, 1)
            heir = self._of(new.token, 0)
            heir.handle(TakeOver("new", ""), step.given.at)
            first = heir.take()
            assert first is not None and isinstance(await new.append(first), Appended)
            rival.handle(step.given.command, step.given.at, step.given.origin)
            late = rival.take()
            assert late is not None and isinstance(await old.append(late), Fenced), "the log takes a dead master's word"
            head = await log.head("j")
            assert head == step.first + 1, f"the log ends with {head}, not with the successor's first word"

        virtual_loop.run(told())
        self.done.rivals += 1

    def _of(self, token: int, counter: int) -> Engine[JobState]:
        state = _state_of(msgpack.unpackb(pack(self.engine.state), use_list=False, strict_map_key=False))
        return Engine(MODEL, CODEC, state, token, counter)


def _same(made: Iterable[Record], records: Sequence[Record], what: str) -> None:
    """Are these the records of the history?"""
    if tuple(made) == tuple(records):
        return
    told = [record.event for record in made]
    raise AssertionError(f"{what}, the command leads to {told}, and led to {[record.event for record in records]}")


# ---- whole runs


class End(NamedTuple):
    """What must be the same, whatever happened to masters."""

    outcome: str
    root: str
    generations: dict[str, int]
    restarts: int
    relaunches: dict[str, int]
    incidents: list[tuple[int, str, int, str, str, bool]]
    planned: list[str]
    steps: int


def end_of(run: Run) -> End:
    """How a run ended, as far as it must not depend on its masters."""
    state = run.state
    facts: list[Any] = [record.event for record in run.records]
    return End(
        run.outcome,
        run.root,
        {group: one.generation for group, one in state.world.worlds.items()},
        state.incidents.restarts,
        dict(state.incidents.relaunches),
        [
            (one.number, one.cause.node, one.generation, one.signature, one.action, one.closed)
            for one in state.incidents.by_number.values()
        ],
        [fact.node for fact in facts if isinstance(fact, nodes.NodePlanned)],
        run.steps,
    )


def crash_at_every_index(
    scenario: Scenario,
    faults: Iterable[Fault] = (),
    *,
    watch: Sequence[Invariant] = (DEFAULT,),
    seed: int = 0,
    runs: int | None = None,
    play: Callable[..., Run] | None = None,
) -> Crashes:
    """Crash the master at every place of one run. Raises `Broken`, with the place and what came of it.

    Every place has its successor (see `walk`). Every place of a short history also has whole runs that are crashed there, before
    an append and after one; a long one has ``runs`` of them, evenly spread. It must end as the first one did. Where another fault
    strikes while nobody leads, two failures may become one: then nothing may be more than it was.
    """
    from dlrover_core.sim.simulation import simulate

    play = play if play is not None else simulate
    plan = Plan(ENGINE, scenario, tuple(faults), seed).check()
    run = _played(plan, watch, play, inputs=True)
    done = walk(run.inputs, run.records)
    if runs is None:
        runs = min(max(RUN_EVENTS // run.events, RUNS_MIN), RUNS_MAX)
    for index, kind in _choices(len(run.records), runs):
        with_crash = plan._replace(faults=_with_crash(run, Fault(f"event {index}", kind), index))
        try:
            crashed = _played(with_crash, watch, play)
        except Broken as broken:
            told = f"{broken.promise}, with {kind} at event {index}, which is {with_crash.token()}"
            raise type(broken)(told, broken.seq, broken.event) from broken
        done.runs += 1
        done.indices.append(index)
        _compare(run, crashed, f"{kind} at event {index}")
    return done


def _choices(events: int, runs: int) -> Iterator[tuple[int, str]]:
    """Both kinds of crash at every event while that is no more than so many runs; else they take turns."""
    if events * len(CRASHES) <= runs:
        yield from ((index, kind) for index in range(1, events + 1) for kind in CRASHES)
        return
    for turn, place in enumerate(_spread(events, runs)):
        yield place + 1, CRASHES[turn % len(CRASHES)]


def _with_crash(run: Run, crash: Fault, index: int) -> tuple[Fault, ...]:
    """The faults of a run and one more, before those that struck later: they are awaited one after the other."""
    faults, place = run.plan.faults, 0
    for fault, seq in run.struck:
        if seq < index and not _TIMED.match(fault.at):
            # The same fault may be there several times.
            place = faults.index(fault, place) + 1
    return (*faults[:place], crash, *faults[place:])


_TIMED = re.compile(r"[\d.]+ ?s$")


def _played(plan: Plan, watch: Sequence[Invariant], play: Callable[..., Run], **more: Any) -> Run:
    promises = Together(*watch)
    run = play(plan, watch=[promises], **more)
    promises.end(run)
    return run


def _apart(run: Run) -> bool:
    """Does every other fault strike while somebody leads, and is heard?"""
    crashes = [seq for fault, seq in run.struck if fault.kind in CRASHES]
    others = [seq for fault, seq in run.struck if fault.kind not in CRASHES]
    for crash in crashes:
        led = next((one for one in run.records[crash:] if isinstance(one.event, LeaderStarted)), None)
        heard_at = led.at + us(HEARD_S) if led is not None else 0
        if any(seq >= crash and (not heard_at or run.records[seq - 1].at <= heard_at) for seq in others):
            return False
    return all(not _TIMED.match(fault.at) for fault, _ in run.struck)


def _compare(first: Run, crashed: Run, when: str) -> None:
    expected, found = end_of(first), end_of(crashed)
    apart = _apart(crashed) and _others(first) == _others(crashed)
    differ = [
        name
        for name, was, now in zip(End._fields, expected, found, strict=True)
        if not (was == now if apart or name in ("outcome", "root", "steps") else _no_more(was, now))
    ]
    if differ:
        told = "; ".join(f"{name}: {getattr(found, name)}, not {getattr(expected, name)}" for name in differ)
        raise Broken(f"{when} changes how the run ends: {told}")


def _others(run: Run) -> list[Fault]:
    """What else struck. A job that goes on without a master may be past a moment before it has one again."""
    return [fault for fault, _ in run.struck if fault.kind not in CRASHES]


def _no_more(was: Any, now: Any) -> bool:
    if isinstance(was, int):
        return bool(now <= was)
    if isinstance(was, dict):
        return all(value <= was.get(key, 0) for key, value in now.items())
    return len(now) <= len(was)
