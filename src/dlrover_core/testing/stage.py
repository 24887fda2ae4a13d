"""Level "loop": a plan played by the real masters and the real agents, on one loop in virtual time.

Nothing is modelled but the world around them: network, machine room, log, workers. Every record is looked at as it becomes
durable: it is folded, promises are asked, and what waits for it strikes. The same plan leaves the same bytes.

```python
run = stage.play(Plan("loop", Scenario(nodes=3), (Fault("step 20", "kill_worker", 1),)))
run.check(invariants.DEFAULT)
```
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from dlrover_core.errors import PlanError
from dlrover_core.history.report import ReportBuilder
from dlrover_core.job import incidents, job, world
from dlrover_core.job.ranges import from_ranges
from dlrover_core.job.sets import Sets
from dlrover_core.job.state import CODEC, FOLD
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import Appended, Outcome
from dlrover_core.kernel.state import digest
from dlrover_core.logs import memory
from dlrover_core.logs.memory import Faults, MemoryLeadership, MemoryLog, SlowAck, Stuck
from dlrover_core.rules import coupling
from dlrover_core.runtime.backend import Backend
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.master import Outcome as End
from dlrover_core.sim import triggers
from dlrover_core.sim.faults import KINDS, LOOP, Fault, amount
from dlrover_core.sim.run import Broken, Run, Stalled, Watcher, kept
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.training import NEVER
from dlrover_core.testing import accounts, virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.loop_strikes import REPAIR_S, LoopStrikes
from dlrover_core.testing.platform import Platform
from dlrover_core.testing.training import Times, Training

COLLECTIVE_S = 600.0
"""Torch's own default for NCCL: peers of a rank that neither dies nor comes raise after it."""
AFTERMATH_S = 300.0
"""Agents that nobody can reach any more end within this, once their job is over."""
RETRY_S = 1.0
UNHEARD_S = 600.0
"""Longer than any fault that keeps an agent, a link, a master or the log from answering."""
PATIENCE_S = 2000.0
"""What one fault may cost at most: a node that never comes, an agent that is not heard of, one of each."""
DISRUPTIVE = ("kill_worker", "fail_worker", "kill_node", "kill_host", "lose_host", "dark_host", "preempt_now")
"""After one of these, a state such as "all running" is one that came after an incident."""
LIES = ("flap_node", "stale_list", "unreach_node")


def play(
    plan: Plan,
    *,
    backend: Callable[[Platform], Backend] | None = None,
    watch: Sequence[Any] = (),
    keep: bool = True,
    limit_s: float = 0.0,
) -> Played:
    """Play a plan to its job's end. A ``backend`` is made anew for every master, over the machine room.

    ``watch`` is asked about every record as it becomes durable: functions of state and record, or classes of such. The run is
    over after ``limit_s`` virtual seconds at the latest; 0: after what the plan can honestly take.

    Raises `Broken` where a promise was broken, `Stalled` where the job does not end, `PlanError`.
    """
    if plan.level != LOOP:
        raise PlanError(
            f"this plan is for level {plan.level!r}, and the stage plays {LOOP!r}: plan._replace(level={LOOP!r})"
        )
    stage = Stage(plan.check(), backend, watch, keep=keep)
    limit_s = limit_s or honest_s(plan)
    try:
        run = virtual_loop.run(stage.play(limit_s), limit_s=limit_s + 2 * AFTERMATH_S, seed=plan.seed)
    except (virtual_loop.Deadlock, virtual_loop.Runaway) as error:
        raise Stalled(str(error), stage.state.seq, stage.last) from error
    for promise in stage.watch:
        end = getattr(promise, "end", None)
        if end is not None:
            kept(lambda _state, _record, end=end: end(run), stage.state, stage.newest)  # type: ignore[misc]
    return run


@dataclass
class Played(Run):
    """A run at level "loop", which knows when everything happened, in true seconds since it began.

    ``record_at`` is by record, ``struck_at`` by fault that struck, ``step_at`` by step: when it was made first.
    """

    record_at: list[float] = field(default_factory=list)
    struck_at: list[float] = field(default_factory=list)
    step_at: list[float] = field(default_factory=list)


def honest_s(plan: Plan) -> float:
    """How long the plan may take: its steps in the smallest world, and for each fault its own time and every patience once."""
    scenario = plan.scenario
    smallest = scenario.nodes / (scenario.nodes_min or scenario.nodes) if scenario.fixed_batch else 1
    works = scenario.steps * (scenario.step_s + scenario.checkpoint_s / scenario.checkpoint_steps) * smallest
    lasts = sum(amount(fault) for fault in plan.faults if KINDS[fault.kind].unit == "s")
    lasts += REPAIR_S * sum(fault.kind in ("lose_host", "dark_host") for fault in plan.faults)
    slowed = sum(amount(fault) for fault in plan.faults if fault.kind == "slow_worker") * 60
    waits = scenario.room_s + 2 * scenario.spec().gang_s if scenario.groups else 0.0
    return waits + 2 * works + 2 * lasts + slowed + (len(plan.faults) + 1) * PATIENCE_S


class _Log(MemoryLog):
    """A log that says what lands in it, and takes ``append_s`` for it."""

    def __init__(self, append_s: float, landed: Callable[[Batch], None], stuck: Callable[[], None]) -> None:
        super().__init__(CODEC, _Pace(append_s, stuck))
        self._landed = landed

    def _land(self, lead: MemoryLeadership, batch: Batch) -> Outcome:
        outcome = super()._land(lead, batch)
        if isinstance(outcome, Appended):
            self._landed(batch)
        return outcome


class _Pace(Faults):
    """Every append that nothing else happens to takes its time."""

    def __init__(self, append_s: float, stuck: Callable[[], None]) -> None:
        super().__init__()
        self._append_s, self._stuck = append_s, stuck

    def take(self) -> memory.Fault | None:
        """The fault of the append that begins now."""
        fault = super().take()
        if isinstance(fault, Stuck):
            self._stuck()
        return fault if fault is not None else SlowAck(self._append_s)


class _Cluster(Cluster):
    """A cluster that says when one of its masters has ended, however it did."""

    ended: Callable[[], None]

    def _ended(self, master: Master, task: asyncio.Task[End]) -> None:
        super()._ended(master, task)
        self.ended()


class Stage:
    """One plan being played: what has become durable so far, and which fault comes next."""

    def __init__(
        self, plan: Plan, backend: Callable[[Platform], Backend] | None, watch: Sequence[Any], *, keep: bool
    ) -> None:
        self.plan, self._backend, self._keep = plan, backend, keep
        self.watch: list[Watcher] = [one() if isinstance(one, type) else one for one in watch]
        self.state = FOLD.new()
        self.newest: Record
        self.records: list[Record] = []
        self.struck: list[tuple[Fault, int]] = []
        self.record_at: list[float] = []
        self.struck_at: list[float] = []
        self.step_at: list[float] = []
        self.hits: Counter[tuple[str, str]] = Counter()
        self._hash = hashlib.blake2b(digest_size=16)
        self._report = ReportBuilder()
        parsed = [(fault, triggers.parse(fault.at)) for fault in plan.faults]
        self._due = [(fault, trigger) for fault, trigger in parsed if trigger.kind != "time"]
        self._hit = self._incident_due = self._looking = self._retrying = False
        self._broken: BaseException | None = None
        self._succeed_in: list[float] = []
        self._cluster: _Cluster
        self._strikes: LoopStrikes
        self._over: asyncio.Future[None]

    @property
    def last(self) -> str:
        """The newest record, for whoever asks how far it came."""
        return repr(self.newest.event) if self.state.seq else "the log is empty"

    # ---- the play

    async def play(self, limit_s: float) -> Played:
        """To the end."""
        loop, scenario = asyncio.get_running_loop(), self.plan.scenario
        loop.set_exception_handler(self._uncaught)
        self._over = loop.create_future()
        cluster = self._cluster = self._built()
        cluster.ended = self._master_ended
        cluster.training.stepped = self._stepped
        self._strikes = LoopStrikes(cluster, scenario.failover_s, self._succeed_in.append)
        try:
            async with cluster:
                for _ in range(scenario.standbys):
                    cluster.start_master()
                self._begin()
                self._look_soon()
                end = await self._ended_within(limit_s)
                virtual_s = loop.time()
                await self._strikes.close()
                await self._quiet()
                self._look_back(end)
                return self._told(end, virtual_s)
        finally:
            await self._strikes.close()

    def _built(self) -> _Cluster:
        scenario = self.plan.scenario
        spec = scenario.spec()
        return _Cluster(
            spec,
            training=self._training(next(Sets(spec.groups).all(spec))),
            event_log=_Log(scenario.append_s, self._landed, self._append_stuck),
            boot_s=scenario.boot_s,
            answers=scenario.hosted_masters,
            hosts=[f"host-{number}" for number in range(scenario.hosts)],
            notice_s=scenario.notice_s,
            network_s=scenario.network_s,
            snapshot_events=scenario.snapshot_events,
            backend=self._backend,
            others=self._training,
        )

    def _training(self, name: str) -> Training:
        """The training of a coupling set; one that the job's end does not wait for goes on until it is stopped."""
        scenario = self.plan.scenario
        spec = scenario.spec()
        sets = Sets(spec.groups)
        groups = [spec.group(group) for group in sets.groups(name)]
        ranks = sum(group.nproc * (group.nodes_max if group.coupled else 1) for group in groups)
        times = Times(
            scenario.start_s,
            scenario.load_s,
            scenario.stop_s,
            scenario.exit_s,
            scenario.checkpoint_steps,
            scenario.checkpoint_s,
            ranks if scenario.fixed_batch else 0,
            scenario.cascade_ranks,
            COLLECTIVE_S,
        )
        cascade_s = scenario.cascade_s if scenario.cascade_s >= 0 and scenario.cascade_ranks else None
        steps = scenario.steps if sets.ends(name) else NEVER
        quiet = any(group.name in scenario.quiet for group in groups)
        return Training(steps, scenario.step_s, cascade_s, times, quiet=quiet)

    async def _ended_within(self, limit_s: float) -> End:
        outcome = self._cluster._outcome
        assert outcome is not None
        waited: set[asyncio.Future[Any]] = {outcome, self._over}
        await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._broken is not None:
            raise self._broken
        if not outcome.done():
            raise Stalled(
                f"the job is {self.state.job.state} after {limit_s:g} s, at step {self._cluster.training.done}, "
                f"and has not ended; nothing was recorded for {self._idle_s():.1f} s",
                self.state.seq,
                self.last,
            )
        error = outcome.exception()
        if error is not None:
            raise Broken(f"a master broke: {type(error).__name__}: {error}", self.state.seq, self.last) from error
        return outcome.result()

    def _idle_s(self) -> float:
        return asyncio.get_running_loop().time() - (self.record_at[-1] if self.record_at else 0.0)

    async def _quiet(self) -> None:
        """Whoever could not be reached as the job ended ends too. Raises `Broken`."""
        for _ in range(round(AFTERMATH_S)):
            if not self._left():
                break
            await asyncio.sleep(1.0)
        if self._left():
            who = ", ".join(self._left())
            raise Broken(f"{AFTERMATH_S:g} s after the end of the job there still are {who}", self.state.seq, self.last)
        if self._broken is not None:
            raise self._broken

    def _left(self) -> list[str]:
        # One that its scheduler denied, nobody may have known of as the job ended.
        return [node for node in self._cluster.platform.living if node not in self._cluster.platform.denied]

    def _look_back(self, end: End) -> None:
        """What can only be said of the whole."""
        leader = self._cluster.state
        if leader.seq == self.state.seq and digest(leader) != digest(self.state):
            raise Broken("the leader's state is not the fold of the log", self.state.seq, self.last)
        twice = [(node, times) for node, times in Counter(self._cluster.platform.launched).items() if times > 1]
        if twice:
            raise Broken(
                f"{twice[0][0]} was started {twice[0][1]} times: a launch must be idempotent", self.state.seq, self.last
            )
        # Where a scheduler calls a node gone that is not, nobody can keep it from going on until it is heard.
        lied = any(fault.kind in LIES for fault, _ in self.struck)
        sets, given_up = self._cluster.sets, self.state.job.given_up
        for name, training in self._cluster.trainings.items():
            if training.astray and not lied:
                raise Broken(
                    f"generation {training.astray[0][0]} of {name} made a step after a newer one had begun",
                    self.state.seq,
                    self.last,
                )
            whole = end.state == "succeeded" and sets.ends(name) and name not in given_up and self._there(name)
            check_lineage(self.plan.scenario, training.log, whole=whole)
        self._restarts()
        self._heard()

    def _there(self, name: str) -> bool:
        """Has the job still a place for a set, as it ends?"""
        return coupling.exists(self.state, name)

    def _heard(self) -> None:
        """Whoever heard of a version of addresses heard the same."""
        said: dict[tuple[str, int], str] = {}
        for node, version, peers in self._cluster.heard:
            group = node.rsplit("-", 2)[0]
            if said.setdefault((group, version), peers) != peers:
                raise Broken(
                    f"{node} was told {peers} as version {version}, and others of {group} something else",
                    self.state.seq,
                    self.last,
                )

    def _restarts(self) -> None:
        """Workers were started for worlds that formed, and once in each: a change in another set restarts nobody."""
        formed: dict[tuple[str, int], int] = {}
        for record in self.records:
            fact = record.event
            if isinstance(fact, world.WorldFormed):
                for member in from_ranges(fact.group, fact.members):
                    formed[member.node, fact.generation] = record.seq
        for name, training in self._cluster.trainings.items():
            for start, times in Counter(training.starts).items():
                if times > 1 or (self._keep and start not in formed):
                    node, generation = start
                    raise Broken(
                        f"the workers of {node} were started {times} times for generation {generation} of {name}, "
                        f"which {'formed' if start in formed else 'never formed'} with it",
                        self.state.seq,
                        self.last,
                    )

    def _told(self, end: End, virtual_s: float) -> Played:
        scenario, training = self.plan.scenario, self._cluster.training
        missed = Counter(self.plan.faults)
        missed.subtract(fault for fault, _ in self.struck)
        run = Played(
            self.plan, end.state, end.root or end.reason, self.state, self.records, self._hash.hexdigest(),
            events=self.state.seq, virtual_s=virtual_s, steps=training.done,
            lost_steps=max(0, len(training.log) - training.done),
            struck=self.struck, missed=list(missed.elements()), hits=dict(self.hits),
            record_at=self.record_at, struck_at=self.struck_at, step_at=self.step_at,
        )  # fmt: skip
        run.goodput = training.done * scenario.step_s / virtual_s
        run.by_class = accounts.by_class(self._report.report().goodput)
        return run

    # ---- what becomes durable

    def _landed(self, batch: Batch) -> None:
        if self._broken is not None:
            return
        self._hash.update(batch.payload)
        try:
            for record in CODEC.decode(batch.payload).records:
                self._take(record)
            if any(isinstance(record.event, job.LeaderStarted) for record in batch.records):
                self._compare(batch.token)
            self._listen()
        except Exception as error:  # noqa: BLE001  # raised by whoever plays; the master that appends is not to blame
            self._fail(error)
        self._look_soon()

    def _take(self, record: Record) -> None:
        FOLD.apply(self.state, record)
        self.newest = record
        self._report.feed(record)
        if self._keep:
            self.records.append(record)
            self.record_at.append(asyncio.get_running_loop().time())
        if isinstance(record.event, incidents.IncidentOpened):
            self._incident_due = False
        if self._due and self._due[0][1].hit(record):
            self._hit = True
        for promise in self.watch:
            kept(promise, self.state, record)

    def _compare(self, token: int) -> None:
        """What a new leader begins with is the fold of its log, however it came by it."""
        for master in self._cluster.masters:
            state = master.state
            if master.token == token and state.seq == self.state.seq and digest(state) != digest(self.state):
                raise Broken("a new leader's state is not the fold of its log", self.state.seq, self.last)

    def _listen(self) -> None:
        """Whatever a living agent says to a master that it is connected with is answered before long: patience mends much."""
        for node in self._cluster.platform.living:
            agent = self._cluster.agents.get(node)
            if agent is not None and agent._connected and agent._outbox._unanswered:
                number, said, at = agent._outbox._unanswered[0]
                waited_s = virtual_loop.time_of(node) - at
                if waited_s > UNHEARD_S:
                    what = f"{type(said).__name__}, number {number} of {node}, waits for an answer for {waited_s:.0f} s"
                    raise Broken(what, self.state.seq, self.last)

    def _stepped(self, step: int) -> None:
        if step > len(self.step_at):
            self.step_at.append(asyncio.get_running_loop().time())
        self._look_soon()

    def _fail(self, error: BaseException) -> None:
        self._broken = self._broken or error
        if not self._over.done():
            self._over.set_result(None)

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: nobody else would ever hear of it. Lost tasks are told when they are collected: by chance."""
        if "handle" in context and isinstance(context.get("exception"), Exception):
            self._fail(context["exception"])
        else:
            loop.default_exception_handler(context)

    # ---- when faults strike

    def _begin(self) -> None:
        """Faults at a time come at that time; each other one is awaited from the one before it on."""
        scenario, platform = self.plan.scenario, self._cluster.platform
        for number in range(scenario.hosts - scenario.short, scenario.hosts):
            platform.take_down(f"host-{number}")
            self._later(scenario.room_s, platform.bring_up, f"host-{number}")
        for fault in self.plan.faults:
            trigger = triggers.parse(fault.at)
            if trigger.kind == "time":
                self._later(trigger.number / 1e6, self._timely, fault)

    def _later(self, after_s: float, call: Callable[..., object], *args: Any) -> None:
        # In nobody's name: it comes whoever has been stopped, or killed, meanwhile.
        Context().run(asyncio.get_running_loop().call_later, after_s, call, *args)

    @property
    def _closed(self) -> bool:
        return self._over.done() or self.state.job.over

    def _timely(self, fault: Fault) -> None:
        if not self._closed and not self._strike(fault):
            self._later(RETRY_S, self._timely, fault)

    def _look_soon(self) -> None:
        """Look, in nobody's name, as soon as whoever is at work has finished."""
        if not self._looking and self._due:
            self._looking = True
            Context().run(asyncio.get_running_loop().call_soon, self._look)

    def _look(self) -> None:
        self._looking = False
        while self._due and not self._closed and self._is_due(self._due[0][1]):
            self._hit = True
            if not self._strike(self._due[0][0]):
                if not self._retrying:
                    self._retrying = True
                    self._later(RETRY_S, self._look_again)
                return
            fault, _ = self._due.pop(0)
            self._hit, self._incident_due = False, fault.kind in DISRUPTIVE

    def _look_again(self) -> None:
        self._retrying = False
        self._look_soon()

    def _strike(self, fault: Fault) -> bool:
        """Do it. False: nobody is there to be struck; soon there may be."""
        seq, phase = self.state.seq, self._phase()
        if not self._strikes.strike(fault):
            return False
        self.struck.append((fault, seq))
        self.struck_at.append(asyncio.get_running_loop().time())
        self.hits[fault.kind, phase] += 1
        return True

    def _is_due(self, trigger: triggers.Trigger) -> bool:
        if self._hit:
            return True
        if trigger.kind == "step":
            return self._cluster.training.done >= trigger.number
        if trigger.kind == "state":
            return not self._incident_due and trigger.holds(self.state)
        return trigger.kind == "seq" and self.state.seq >= trigger.number

    def _phase(self) -> str:
        """What the job is at, in a word: for the table of what was hit when. As level "engine" has it."""
        state = self.state
        if not any(master.leading and master.led.is_set() for master in self._cluster.masters):
            return "leaderless"
        if not state.job.forms:
            return state.job.state
        first = next(iter(self._cluster.trainings))
        current = state.world.at(first)
        if not current.active:
            return "waiting" if current.generation else "created"
        if len(current.started) < len(current.members):
            return "starting"
        if state.progress.of(first).generation < current.generation:
            return "loading"
        return "finishing" if current.finished else "training"

    # ---- masters

    def _append_stuck(self) -> None:
        Context().run(asyncio.get_running_loop().call_soon, self._strikes.stuck)

    def _master_ended(self) -> None:
        """Somebody leads or stands by, as many as the scenario says, a while after one has ended."""
        outcome = self._cluster._outcome
        if outcome is not None and not outcome.done() and not self._over.done():
            after_s = self._succeed_in.pop(0) if self._succeed_in else self.plan.scenario.failover_s
            self._later(after_s, self._succeed)

    def _succeed(self) -> None:
        cluster = self._cluster
        outcome = cluster._outcome
        living = sum(cluster.alive(master) for master in cluster.masters)
        if outcome is not None and not outcome.done() and living <= self.plan.scenario.standbys:
            cluster.start_master()


def check_lineage(scenario: Scenario, log: Sequence[tuple[int, int]], *, whole: bool) -> None:
    """Every step was made exactly once in the lineage that the job went on with: a new generation begins with the last state
    that was kept, and an older one makes no step after that. Raises `Broken`.
    """
    keep = scenario.checkpoint_steps
    generation = step = kept_step = 0
    for now, made in log:
        if now < generation:
            raise Broken(f"generation {now} made step {made} after generation {generation} had begun")
        expected = step + 1 if now == generation else kept_step + 1
        # A state that was just being kept as its world broke was not.
        if made != expected and not (now != generation and scenario.checkpoint_s and made == expected - keep):
            raise Broken(f"generation {now} makes step {made} where {expected} was to come: it was lost, or made twice")
        generation, step = now, made
        kept_step = made if made % keep == 0 else made - made % keep
    if whole and step != scenario.steps:
        raise Broken(f"the job ended well with step {step} of {scenario.steps}")
