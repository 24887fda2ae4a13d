"""`Chaos`: jobs under faults at any level, with or without pytest; and `hunt`, which tries seeds until one breaks a promise.

    run = Chaos(seed=7).simulate(Scenario(nodes=8))
    run.check(invariants.DEFAULT)

Under pytest the fixture ``chaos`` is one of these, and the plugin hunts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_core.sim.faults import ENGINE, LOOP, Fault
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.testing.coverage import Cell
from dlrover_core.testing.promises import Together
from dlrover_core.testing.shrink import REPLAYS_MAX, promise_of, shrink
from dlrover_core.testing.swarm import draw

if TYPE_CHECKING:
    from dlrover_core.kernel.events import Record
    from dlrover_core.sim.run import Run, Watcher
    from dlrover_core.testing.crashes import Crashes
    from dlrover_core.testing.local import LocalJob
    from dlrover_core.testing.story import Story


class Chaos:
    """Runs, under faults drawn from ``seed`` out of ``kinds`` (default: all that the level has), or under given ones.

    ``twice``: each plan is run two times and the logs must be the same. ``plan`` is what was run last, ``call`` its number,
    ``hits`` the coverage of all runs.
    """

    def __init__(self, seed: int = 0, kinds: Collection[str] | None = None, *, twice: bool = False) -> None:
        self.kinds, self.twice = kinds, twice
        self.hits: Counter[Cell] = Counter()
        self.records: list[Record] | None = None
        self.begin(seed)

    def begin(self, seed: int, replay: tuple[Plan, int] | None = None) -> None:
        """From now on draw from this seed. ``replay``: a plan, and which call of `simulate` from now on is to run it instead."""
        self.seed, self._replay = seed, replay
        self.plan: Plan | None = None
        self.call = 0

    def simulate(
        self,
        scenario: Scenario | None = None,
        faults: Iterable[Fault] | None = None,
        backend: Callable[..., Any] | None = None,
        *,
        watch: tuple[Any, ...] = (),
        seed: int | None = None,
        level: str = "",
        **options: Any,
    ) -> Run:
        """One run. Without ``faults`` they are drawn from the seed, and without a scenario so is that.

        With a ``backend``, a factory, real masters and agents run on a loop of virtual time; without, the engine alone, thousands
        of nodes of it, unless ``level`` is "loop". ``watch`` are promises asked after every event: functions of (state, record),
        or classes of such, of which each run gets its own. Raises what a broken promise raises.
        """
        __tracebackhide__ = True
        level = level or (ENGINE if backend is None else LOOP)
        self.call += 1
        if self._replay is not None and self.call == self._replay[1]:
            plan = self._replay[0]._replace(level=level)
        elif faults is None:
            plan = draw(self.seed if seed is None else seed, scenario, level=level, kinds=self.kinds)
        else:
            plan = Plan(level, scenario or Scenario(), tuple(faults), self.seed if seed is None else seed)
        self.plan = plan.check()
        run = self._run(plan, backend, watch, options)
        if self.twice:
            again = self._run(plan, backend, watch, options)
            assert again.log_hash == run.log_hash, f"one plan, two logs: {run.log_hash} and {again.log_hash}"
        self.hits.update(run.hits)
        return run

    def _run(
        self, plan: Plan, backend: Callable[..., Any] | None, watch: tuple[Any, ...], options: dict[str, Any]
    ) -> Run:
        __tracebackhide__ = True
        promises = Together(*watch)
        watchers: list[Watcher] = [promises] if watch else []
        if self.records is not None:
            self.records.clear()
            records = self.records
            watchers.insert(0, lambda _, record: records.append(record))
        if plan.level == ENGINE:
            from dlrover_core.sim.simulation import simulate

            run = simulate(plan, watch=watchers, **options)
        else:
            from dlrover_core.testing.stage import play

            run = play(plan, backend=backend, watch=watchers, **options)
        promises.end(run)
        return run

    def seeds(
        self, count: int, scenario: Scenario | None = None, kinds: Collection[str] | None = None
    ) -> Iterator[Plan]:
        """The plans of so many seeds from this one on, to run or to look at."""
        for one in range(count):
            yield draw(self.seed + one, scenario, kinds=self.kinds if kinds is None else kinds)

    def story(
        self,
        nodes: int = 4,
        *,
        level: str = LOOP,
        backend: Callable[..., Any] | None = None,
        watch: tuple[Any, ...] = (),
        **scenario: Any,
    ) -> Story:
        """What is done to a job and what must come of it, told in order: ``story.at("step 100").kill_worker(2)``.

        See `dlrover_core.testing.story`. ``scenario``: further fields of the `Scenario`.
        """
        from dlrover_core.testing.story import Story

        self.plan = None
        told = Scenario(nodes=nodes, **scenario)
        return Story(told, level=level, backend=backend, watch=watch, seed=self.seed)

    def local(self, **job: Any) -> LocalJob:
        """A job of real processes on this machine, under the same faults. See `dlrover_core.testing.local.LocalJob`."""
        from dlrover_core.testing.local import LocalJob

        self.plan = None
        return LocalJob(**job)

    def crash_at_every_index(
        self, scenario: Scenario | None = None, faults: Iterable[Fault] = (), **options: Any
    ) -> Crashes:
        """A master's death at each place of a history, tried one by one. See `dlrover_core.testing.crashes`."""
        from dlrover_core.testing.crashes import crash_at_every_index

        self.plan = None
        return crash_at_every_index(scenario or Scenario.smoke(), faults, **options)


class Found(NamedTuple):
    """A broken promise: of which seed (the ``nth`` tried), what it took at first and at least, and what was raised.

    ``plan`` is None where something failed before any run; ``call`` is which run of the test it was.
    """

    seed: int
    nth: int
    error: BaseException
    drawn: Plan | None
    plan: Plan | None
    call: int
    replays: int
    whole: bool

    @property
    def token(self) -> str:
        """What replays it."""
        if self.plan is None:
            return ""
        return self.plan.token() + (f"@{self.call}" if self.call > 1 else "")

    def lines(self) -> list[str]:
        """What happened, for people."""
        told = [f"seed {self.seed}, number {self.nth}" if self.nth else f"a replay, seed {self.seed}"]
        if self.plan is not None and self.drawn is not None:
            if self.replays:
                told[0] += f": {_count(len(self.drawn.faults), 'fault')}, shrunk to {len(self.plan.faults)}"
                told[0] += f" in {_count(self.replays, 'replay')}"
                told[0] += "" if self.whole else " (stopped early; there may be less)"
            told += [f"  {fault}" for fault in self.plan.faults] or ["  no faults at all"]
            told += [f"scenario: {scenario_line(self.plan.scenario)}"]
        return [*told, *broken_lines(self.error)]


class Hunted(NamedTuple):
    """What a hunt came to: how many seeds were tried, and what was found, if anything."""

    seeds: int
    found: Found | None


def hunt(
    chaos: Chaos,
    body: Callable[[], object],
    seeds: Iterable[int],
    *,
    failures: tuple[type[BaseException], ...] = (Exception,),
    enough: Callable[[], bool] = lambda: False,
    replays_max: int = REPLAYS_MAX,
    shrink_s: float = float("inf"),
) -> Hunted:
    """Run ``body``, which uses ``chaos``, once per seed, until one of ``failures`` is raised. Never raises them: returns what was
    found, shrunk.

    ``enough`` is asked before every seed but the first. Shrinking stops after ``replays_max`` or ``shrink_s`` real seconds.
    """
    __tracebackhide__ = True
    tried = 0
    for seed in seeds:
        if tried and enough():
            break
        tried += 1
        chaos.begin(seed)
        raised = None
        try:
            body()
        except failures as error:
            raised = error
        if raised is not None:
            # Not where it is handled: whatever replays raise would be told as raised in the course of that.
            return Hunted(tried, _found(chaos, body, raised, tried, failures, replays_max, shrink_s))
    return Hunted(tried, None)


def replay(
    chaos: Chaos,
    body: Callable[[], object],
    plan: Plan,
    call: int,
    failures: tuple[type[BaseException], ...] = (Exception,),
) -> Found | None:
    """Run ``body`` once, with this plan in place of whatever its simulation number ``call`` would run."""
    __tracebackhide__ = True
    chaos.begin(plan.seed, (plan, call))
    try:
        body()
    except failures as error:
        return Found(plan.seed, 0, error, plan, plan, call, 0, whole=True)
    return None


def _found(
    chaos: Chaos,
    body: Callable[[], object],
    error: BaseException,
    nth: int,
    failures: tuple[type[BaseException], ...],
    replays_max: int,
    shrink_s: float,
) -> Found:
    seed, plan, call = chaos.seed, chaos.plan, chaos.call
    if plan is None or not replays_max:
        return Found(seed, nth, error, plan, plan, call, 0, whole=True)

    ends = time.monotonic() + shrink_s

    def again(smaller: Plan) -> None:
        __tracebackhide__ = True
        chaos.begin(seed, (smaller, call))
        body()

    least = shrink(
        plan,
        again,
        error=error,
        replays_max=replays_max,
        failures=failures,
        enough=lambda: time.monotonic() > ends,
    )
    return Found(seed, nth, least.error, plan, least.plan, call, least.replays, least.whole)


def broken_lines(error: BaseException) -> list[str]:
    """The promise that was broken, and the event at which it was; or what was raised, where nobody promised anything."""
    seq, event = getattr(error, "seq", 0), getattr(error, "event", "")
    promise = getattr(error, "promise", "") or f"{promise_of(error)}: {error}"
    at = [f"  at record {seq}{': ' if event else ''}{event}"] if seq else []
    return [f"broken: {promise.partition(chr(10))[0]}", *at]


def scenario_line(scenario: Scenario) -> str:
    """A scenario, by what it changes: as one writes it."""
    plain = Scenario()
    changed = [
        f"{spot.name}={getattr(scenario, spot.name)!r}"
        for spot in fields(Scenario)
        if spot.name in ("nodes", "steps") or getattr(scenario, spot.name) != getattr(plain, spot.name)
    ]
    return f"Scenario({', '.join(changed)})"


def _count(many: int, what: str) -> str:
    return f"{many} {what}{'' if many == 1 else 's'}"
