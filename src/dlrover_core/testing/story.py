"""A story: what is done to a job, when, and what must come of it; told in order, played at the end.

```python
with chaos.story(nodes=4) as story:
    story.at("step 100").kill_worker(2)
    story.at("node worker-1 relaunched").crash_master()
    story.eventually("all running", within_s=120)
    story.never("NodeLost")
```

Statements are only written down. When the ``with`` block ends the whole is played, at level "loop" (real masters and agents) or
"engine", every default promise is asked after every event, and then each statement is judged by what the run left behind.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union

from dlrover_core.errors import PlanError
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.events import Record
from dlrover_core.sim import triggers
from dlrover_core.sim.faults import ENGINE, KINDS, LOOP, Fault, checked
from dlrover_core.sim.run import Broken, Run
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.triggers import Trigger
from dlrover_core.testing.invariants import DEFAULT
from dlrover_core.testing.stage import DISRUPTIVE, play

SHOWN_RECORDS = 12
"""Records that a failure shows, before the moment at which it was certain."""
EPOCH_S = 1_700_000_000.0


class Strike(Protocol):
    """A kind of fault, as a method: whom it hits, how much, and a label or an error's text."""

    def __call__(self, target: str | int = 0, amount: float = 0.0, cause: str = "") -> Moment:
        """Write it down. What is chained to it strikes at the same moment."""
        ...


class Moment:
    """A moment of a story; every kind of fault is a method of it (`dlrover_core.testing.KINDS` says what each does)."""

    kill_worker: Strike
    fail_worker: Strike
    kill_node: Strike
    kill_host: Strike
    kill_rack: Strike
    lose_host: Strike
    sick_host: Strike
    silence_node: Strike
    hang_worker: Strike
    slow_worker: Strike
    unreach_node: Strike
    dark_host: Strike
    flap_node: Strike
    partition: Strike
    drop: Strike
    drop_to_master: Strike
    drop_to_node: Strike
    delay: Strike
    lose_messages: Strike
    double_messages: Strike
    reorder_messages: Strike
    ack_lost: Strike
    log_slow: Strike
    log_down: Strike
    log_full: Strike
    log_fenced: Strike
    disk_full: Strike
    torn_write: Strike
    bit_flip: Strike
    clock_jump: Strike
    clock_skew: Strike
    node_clock: Strike
    crash_master: Strike
    crash_before_append: Strike
    crash_after_append: Strike
    pause_master: Strike
    second_master: Strike
    hand_over: Strike
    old_agent: Strike
    create_error: Strike
    create_stuck: Strike
    stale_list: Strike
    relist: Strike
    quota: Strike
    preempt: Strike
    preempt_sooner: Strike
    preempt_later: Strike
    preempt_withdrawn: Strike
    hold_queue: Strike
    preempt_now: Strike
    scale: Strike
    drain: Strike
    suspend: Strike
    interrupt: Strike

    def __init__(self, story: Story, at: str) -> None:
        self._story, self._at = story, at

    if not TYPE_CHECKING:

        def __getattr__(self, kind: str) -> Strike:
            """A kind of fault. Raises `AttributeError`, which names what may be meant."""
            if kind not in KINDS:
                near = difflib.get_close_matches(kind, KINDS, 3, 0.5) or list(KINDS)
                raise AttributeError(
                    f"no fault is called {kind!r}; did you mean {' or '.join(near)}?", name=kind, obj=self
                )

            def strike(target: str | int = 0, amount: float = 0.0, cause: str = "") -> Moment:
                self._story.tell(Fault(self._at, kind, target, amount, cause))
                # A number that is long gone: as soon as this one has struck.
                return Moment(self._story, "event 0")

            strike.__name__, strike.__doc__ = kind, KINDS[kind].doc
            return strike


class Eventually(NamedTuple):
    """Something comes within a time of what was said before."""

    text: str
    within_s: float

    def __str__(self) -> str:
        """As it was written."""
        return f"eventually {self.text}, within {self.within_s:g} s"


class Never(NamedTuple):
    """Something never comes."""

    text: str

    def __str__(self) -> str:
        """As it was written."""
        return f"never {self.text}"


Statement = Union[Fault, Eventually, Never]


class Story:
    """Statements about one job. ``run`` is what came of them, once it has been played.

    ``watch`` are promises of your own, beside `invariants.DEFAULT`.
    """

    run: Run

    def __init__(
        self,
        scenario: Scenario,
        *,
        level: str = LOOP,
        backend: Callable[..., Any] | None = None,
        watch: Sequence[Any] = (),
        seed: int = 0,
    ) -> None:
        if level not in (ENGINE, LOOP):
            raise PlanError(f"stories are told at the levels {ENGINE!r} and {LOOP!r}, not at {level!r}")
        if backend is not None and level != LOOP:
            raise PlanError(f"a backend of your own is played at level {LOOP!r}, not at {level!r}")
        self.scenario, self.level, self._backend, self._seed = scenario, level, backend, seed
        self._watch = tuple(watch)
        self._checks: tuple[Any, ...] = ()
        self._told: list[Statement] = []
        self._played = False

    def __enter__(self) -> Story:  # noqa: PYI034  # Self needs 3.11
        """Nothing happens yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Play it, unless that was done or the telling broke off."""
        if kind is None and not self._played:
            self.play()

    # ---- telling

    def at(self, text: str) -> Moment:
        """From the moment on at which the fault before it struck: the next time that this comes. Raises `PlanError`."""
        triggers.parse(text)
        return Moment(self, text)

    def tell(self, fault: Fault) -> Story:
        """A fault as data: what the methods of a `Moment` make. Raises `PlanError`."""
        self._told.append(checked(fault, self.level))
        return self

    def eventually(self, text: str, within_s: float) -> Story:
        """This must come within so many virtual seconds of the statement before. Raises `PlanError`."""
        if triggers.parse(text).kind in ("time", "seq"):
            raise PlanError(
                f"{text!r} comes by itself: say what must come, such as 'all running', 'step 150' or an event"
            )
        self._told.append(Eventually(text, within_s))
        return self

    def never(self, text: str) -> Story:
        """This must not come, from the beginning to the end. Raises `PlanError`."""
        if triggers.parse(text).kind not in ("record", "state"):
            raise PlanError(f"{text!r} is a moment, not something that may or may not come: say an event or a state")
        self._told.append(Never(text))
        return self

    def check(self, *invariants: Any) -> Story:
        """These promises hold after every event."""
        self._checks += invariants
        return self

    # ---- playing

    @property
    def plan(self) -> Plan:
        """The story as a plan: its faults."""
        faults = tuple(one for one in self._told if isinstance(one, Fault))
        return Plan(self.level, self.scenario, faults, self._seed)

    def play(self) -> Run:
        """Play it and judge it. Raises `Broken`, an AssertionError, which tells the story as it went."""
        self._played = True
        seen: list[Record] = []
        watch = [
            lambda _, record: seen.append(record),
            *(one for one in (*DEFAULT, *self._watch) if not isinstance(one, type)),
        ]
        promises = [one() for one in (*DEFAULT, *self._watch) if isinstance(one, type)]
        try:
            self.run = self._played_at_level([*watch, *promises])
            if self.level == ENGINE:
                for promise in promises:
                    end = getattr(promise, "end", None)
                    if end is not None:
                        end(self.run)
            self.run.check(*self._checks)
        except AssertionError as error:
            lines = [*(f"  {one}" for one in self._told), *_shown(seen)]
            raise self._broken(str(error), lines, getattr(error, "seq", 0), getattr(error, "event", "")) from error
        Judge(self, self.run, self._told).judge()
        return self.run

    def _played_at_level(self, watch: Sequence[Any]) -> Run:
        if self.level == ENGINE:
            from dlrover_core.sim.simulation import simulate

            return simulate(self.plan, watch=watch)
        return play(self.plan, backend=self._backend, watch=watch)

    def _broken(self, why: str, lines: Sequence[str], seq: int = 0, event: str = "") -> Broken:
        told = "\n".join(["the story goes otherwise:", *lines, f"  {why}", f"replay: {self.plan.token()}"])
        broken = Broken(told)
        broken.promise = f"the story goes otherwise: {why}"
        broken.seq, broken.event = seq, event
        return broken


class Judge:
    """Holds a story against its run. Times are virtual seconds since the run began."""

    def __init__(self, story: Story, run: Run, told: Sequence[Statement]) -> None:
        self._story, self._run, self._told = story, run, told
        began = run.records[0].at / 1e6 if run.records else EPOCH_S
        self._at: list[float] = getattr(run, "record_at", None) or [one.at / 1e6 - began for one in run.records]
        self._lines: list[str] = []
        self._now, self._disrupted = 0.0, False

    def judge(self) -> None:
        """Statement by statement. Raises `Broken`."""
        struck_at = self._strikes()
        for number, one in enumerate(self._told):
            if isinstance(one, Fault):
                at = struck_at[number]
                if at is None:
                    raise self._fails(one, "its moment never came", self._run.virtual_s)
                self._now, self._disrupted = at, one.kind in DISRUPTIVE
                self._note(one)
            elif isinstance(one, Eventually):
                later = (at for at in struck_at[number:] if at is not None and at >= self._now)
                self._eventually(one, min(later, default=self._run.virtual_s))
            else:
                self._never(one)

    def _strikes(self) -> list[float | None]:
        """When each statement struck; None: it is no fault, or never did."""
        exact = list(getattr(self._run, "struck_at", [])) or [
            self._at[seq - 1] if seq else 0.0 for _, seq in self._run.struck
        ]
        struck = [(fault, at) for (fault, _), at in zip(self._run.struck, exact, strict=True)]
        found: list[float | None] = []
        for one in self._told:
            mine = next((pair for pair in struck if pair[0] == one), None)
            if mine is not None:
                struck.remove(mine)
            found.append(mine[1] if mine is not None else None)
        return found

    def _eventually(self, one: Eventually, until: float) -> None:
        trigger, deadline = triggers.parse(one.text), self._now + one.within_s
        came = self._step(trigger) if trigger.kind == "step" else self._came(trigger, min(deadline, until))
        if came is None or came > deadline:
            when = f"it came after {came - self._now:.3f} s" if came is not None else "it did not come"
            raise self._fails(one, f"{when}, counted from {self._now:.3f} s", min(deadline, self._run.virtual_s))
        self._now, self._disrupted = max(came, self._now), False
        self._note(one)

    def _step(self, trigger: Trigger) -> float | None:
        step_at: list[float] | None = getattr(self._run, "step_at", None)
        if step_at is None:
            raise PlanError(
                f"at level {self._story.level!r} nobody notes when a step is made: wait for an event or a state"
            )
        return step_at[trigger.number - 1] if trigger.number <= len(step_at) else None

    def _came(self, trigger: Trigger, end: float) -> float | None:
        """When it came, since now; a record whenever it comes, a state until something else is done to the job.

        A state that held already is not news: it counts if it still holds at the end, and after something that disrupts the
        job, only if it was gone meanwhile.
        """
        if trigger.kind == "record":
            hits = (at for at, record in zip(self._at, self._run.records, strict=True) if trigger.hit(record))
            return next((at for at in hits if at >= self._now), None)
        held, gone = False, False
        for at, _, state in self._moments():
            if at > end or (trigger.name != "job over" and state.job.over):
                break
            holds = trigger.holds(state)
            if at > self._now and holds and (not held or gone):
                return at
            gone = gone or (at >= self._now and not holds)
            held = holds
        return self._now if held and not self._disrupted else None

    def _moments(self) -> Iterator[tuple[float, Record, JobState]]:
        """The state after each batch. It is one state that goes on: look at it now."""
        state, records = FOLD.new(), self._run.records
        for at, record, after in zip(self._at, records, [*self._at[1:], float("inf")], strict=True):
            FOLD.apply(state, record)
            if after > at:
                yield at, record, state

    def _never(self, one: Never) -> None:
        trigger = triggers.parse(one.text)
        if trigger.kind == "record":
            came = ((at, seen) for at, seen in zip(self._at, self._run.records, strict=True) if trigger.hit(seen))
        else:
            came = ((at, seen) for at, seen, state in self._moments() if trigger.holds(state))
        found = next(came, None)
        if found is not None:
            raise self._fails(one, f"it came at {found[0]:.3f} s, with record {found[1].seq}", *found)
        self._note(one)

    def _note(self, one: Statement) -> None:
        self._lines.append(f"  {self._now:10.3f} s  {one}")

    def _fails(self, one: Statement, why: str, at: float, record: Record | None = None) -> Broken:
        before = [seen for when, seen in zip(self._at, self._run.records, strict=True) if when <= at]
        lines = [*self._lines, f"  fails here:   {one}", *_shown(before, self._at)]
        culprit = record or (before[-1] if before else None)
        return self._story._broken(
            f"{one}: {why}", lines, culprit.seq if culprit else 0, repr(culprit.event) if culprit else ""
        )


def _shown(records: Sequence[Record], at: Sequence[float] = ()) -> list[str]:
    left_out = len(records) - SHOWN_RECORDS
    lines = [f"  ... {left_out} records before"] if left_out > 0 else []
    for one in records[-SHOWN_RECORDS:]:
        when = f"{at[one.seq - 1]:10.3f} s  " if at else ""
        lines.append(f"  {when}record {one.seq}: {one.event}")
    return lines
