"""A simulated master: the real engine behind a pipeline, and around it what levels agents and a scheduler.

Its rules are those of `dlrover_core.runtime`: one append in flight and group commit (`pipeline`), desired worked out anew after a
batch that may change it and told to whom it concerns (`master`, `sessions`), silence counted in heartbeats, ticks at the
engine's own deadlines. Its own time goes on evenly from when it took over, whatever its host's clock does (`Master.now`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from dlrover_core.diagnosis.stall import Threshold
from dlrover_core.job import hangs, incidents, job, progress, silence
from dlrover_core.job.nodes import Observed
from dlrover_core.job.orders import STRANGER, Desired, Order
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Command, CommandFailed, Engine, Reply, Resend, Tick
from dlrover_core.kernel.events import GROUP_BYTES_MAX, Batch, Origin
from dlrover_core.rules.desired import desired, farewell
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.agents import Agent
from dlrover_core.sim.clock import Clock
from dlrover_core.sim.levelling import Leveller
from dlrover_core.sim.log import DOWN, FENCED, RETRY_S, Log
from dlrover_core.sim.meter import Meter
from dlrover_core.sim.network import Network
from dlrover_core.sim.run import Broken, Input
from dlrover_core.sim.scenario import Scenario
from dlrover_core.sim.scheduler import Scheduler
from dlrover_core.sim.training import Training, World
from dlrover_core.spec import JobSpec, us

# As in runtime/pipeline.py and runtime/master.py; tests/unit/test_sim_rules.py compares them.
GROUP_COMMANDS_MAX = 512
PAUSE_US = 2_000_000
LATE_S = 2.0
TICK_S = 1.0
LEAVE_S = 10.0
SNAPSHOT_BYTES = 1024 * 1024
VERSION = "sim"

# Who gets the answer: an agent, in one of its conversations, to one of its commands.
ReplyTo = tuple[Agent, int, int]


class Site(Protocol):
    """What a leader needs of a run."""

    clock: Clock
    spec: JobSpec
    scenario: Scenario
    network: Network
    scheduler: Scheduler
    trainings: dict[str, Training]
    meter: Meter
    log: Log
    inputs: list[Input] | None
    commands: int

    def look(self) -> None:
        """Is it over?"""
        ...

    def deposed(self, leader: Leader) -> None:
        """A leader has found that another one leads."""
        ...

    def handed_over(self, leader: Leader) -> None:
        """A leader has gone, as asked."""
        ...


class Leader:
    """One leadership of one master. ``serving``: its first words are durable."""

    def __init__(self, sim: Site, state: JobState, token: int, holder: str, wall_us: int) -> None:
        self._sim, self._clock, self.token, self.holder = sim, sim.clock, token, holder
        self.engine: Engine[JobState] = Engine(MODEL, CODEC, state, token)
        self._offset = max(wall_us, state.at + 1) - self._clock.now
        self._queue: deque[tuple[Command, Origin | None, ReplyTo | None]] = deque()
        self._woken = self._appending = False
        self._answers: list[tuple[ReplyTo, Reply]] = []
        self._ticked = self._begins = False
        self._attempt = 0
        self._troubled_since = -1
        self._tick_at = -1
        self.alive, self.serving, self.paused = True, False, False
        self._paused_at = 0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.desired: Desired = desired(state)
        self._sessions: dict[str, tuple[Agent, Order | None]] = {}
        self._mind: dict[str, int] = {}
        self._minding = False
        self._calm = self._clock.now
        self._since_snapshot = self._bytes_since_snapshot = 0
        self._progress_at: dict[str, int] = {}
        self._over = self._going = False
        self._prefix = f"{sim.spec.job}-"
        self.leveller = Leveller(sim, self)

    # ---- life

    @property
    def state(self) -> JobState:
        """The working state."""
        return self.engine.state

    def now(self) -> int:
        """Microseconds by this leader's clock."""
        return self._offset + self._clock.now

    def name_of(self, node: str) -> str:
        """A node's name in the scheduler."""
        return self._prefix + node

    def begin(self, run_id: str, spec: str) -> None:
        """The first words of this leadership; for a new log, the first of the job."""
        state = self.state
        if state.seq and not state.job.over:
            self.submit(job.TakeOver(self.holder, VERSION))
        if state.job.state == "new":
            self.submit(job.CreateJob(run_id, spec))
        for node in state.nodes.nodes.values():
            if node.joined:
                self._mind[node.node] = self._clock.now
        self._keep_minding()
        self._begins = True
        self._wake()

    def _serve(self) -> None:
        self._begins, self.serving = False, True
        self.leveller.observe()
        self._sim.network.leads()
        for name in self._sim.trainings:
            self.await_progress(name)
        if self.state.job.over:
            self._is_over()

    def die(self) -> None:
        """Its process is gone, or it leads no more: connections end."""
        if not self.alive:
            return
        self.alive = self.serving = False
        self._queue.clear()
        for agent, _ in list(self._sessions.values()):
            self._sim.network.to_node(agent, agent.disconnected, agent.connection)
        self._sessions.clear()

    def pause(self, for_us: int) -> None:
        """Its process is stopped for a while."""
        self.paused, self._paused_at = True, self._clock.now
        self._clock.later(for_us, 0, self._resume)
        # Agents that hear nothing look around after a while.
        silence_us = us(self._sim.spec.silence_s + self._sim.spec.heartbeat_s)
        self._clock.later(silence_us, 0, self._given_up_on, self._paused_at)

    def _given_up_on(self, paused_at: int) -> None:
        if self.alive and self.paused and self._paused_at == paused_at:
            for agent, _ in list(self._sessions.values()):
                agent.disconnected(agent.connection)

    def _resume(self) -> None:
        self.paused = False
        if not self.alive:
            return
        if self._sim.log.token > self.token:
            self.die()
            return
        late = self._clock.now - self._paused_at
        held, self._held = self._held, []
        if late > us(LATE_S):
            self._be_calm()
            self.submit(job.NotePause(late))
        for call, args in held:
            call(*args)

    def held(self, call: Callable[..., None], *args: Any) -> bool:
        """Does nothing happen here, or not now? Then it happens when the process goes on."""
        if self.alive and self.paused:
            self._held.append((call, args))
        return not self.alive or self.paused

    def hand_over(self) -> None:
        """Finish what is queued, and leave the rest to the next master."""
        self._going = True
        if not self._appending and not self._queue:
            self._gone()

    def _gone(self) -> None:
        self.die()
        self._sim.handed_over(self)

    # ---- the pipeline

    @property
    def idle(self) -> bool:
        """Is all that it was told durable?"""
        return not self._queue and not self._appending

    def submit(self, command: Command, origin: Origin | None = None, reply: ReplyTo | None = None) -> None:
        """Queue a command."""
        if not self.alive or (self._going and not isinstance(command, Tick)):
            return
        self._queue.append((command, origin, reply))
        self._wake()

    def _wake(self) -> None:
        if not self._woken and not self._appending:
            self._woken = True
            # All that comes at this instant is one group.
            self._clock.later(0, 0, self._group)

    def _group(self) -> None:
        if self.held(self._group):
            return
        self._woken = False
        engine, queue, now = self.engine, self._queue, self.now()
        inputs, answers, handled = self._sim.inputs, self._answers, 0
        while queue and engine.pending_bytes < GROUP_BYTES_MAX and handled < GROUP_COMMANDS_MAX:
            command, origin, reply = queue.popleft()
            if inputs is not None:
                inputs.append(Input(now, command, origin, engine.state.seq))
            answer = engine.handle(command, now, origin)
            handled += 1
            if reply is not None:
                answers.append((reply, answer))
            elif type(command) is Tick:
                self._ticked = True
        self._sim.commands += handled
        batch = engine.take()
        if batch is not None:
            self._appending, self._attempt = True, 0
            self._sim.log.append(self, batch)
        else:
            self._done()

    def appended(self, batch: Batch, how: str) -> None:
        """The log has answered, or cannot."""
        if self.held(self.appended, batch, how):
            return
        if how == FENCED:
            self.die()
            self._sim.deposed(self)
        elif how == DOWN:
            if self._troubled_since < 0:
                self._troubled_since = self._clock.now
            pause_s = RETRY_S[min(self._attempt, len(RETRY_S) - 1)]
            self._attempt += 1
            self._clock.later(us(pause_s), 0, self._append_again, batch)
        else:
            if self._troubled_since >= 0:
                lasted, self._troubled_since = self._clock.now - self._troubled_since, -1
                if lasted >= PAUSE_US:
                    self._be_calm()
                    self._queue.appendleft((job.NotePause(lasted), None, None))
            self._appending = False
            self._committed(batch)
            self._done()

    def _append_again(self, batch: Batch) -> None:
        if not self.held(self._append_again, batch):
            self._sim.log.append(self, batch)

    def _done(self) -> None:
        answers, self._answers = self._answers, []
        if answers:
            self._answer(answers)
        if self._ticked:
            self._ticked = False
            if self._tick_at < 0:
                self._schedule(us(TICK_S))
        if not self.alive:
            return
        if self._queue:
            self._wake()
        elif self._begins:
            self._serve()
        elif self._going:
            self._gone()

    def _answer(self, answers: list[tuple[ReplyTo, Reply]]) -> None:
        clean: list[ReplyTo] = []
        network = self._sim.network
        for reply, outcome in answers:
            agent, connection, number = reply
            if type(outcome) is Resend:
                network.to_node(agent, agent.expected, connection, outcome.expected)
            elif agent.link.clean:
                clean.append(reply)
            else:
                network.to_node(agent, agent.answered, connection, number)
        if clean:
            self._clock.later(network.hop_us, 0, _answered, clean)

    # ---- after every commit

    def _committed(self, batch: Batch) -> None:
        state = self.state
        kinds = {type(record.event) for record in batch.records}
        if CommandFailed in kinds:
            failed = next(record for record in batch.records if isinstance(record.event, CommandFailed))
            raise Broken("deciding raised: our bug", failed.seq, repr(failed.event))
        if MODEL.levels(state, batch.records):
            self.desired = desired(state)
            self._level()
            self.leveller.wake()
        if progress.FirstStep in kinds:
            for record in batch.records:
                if isinstance(record.event, progress.FirstStep):
                    self.await_progress(state.set_of(record.event.node))
        if state.job.over and not self._over:
            self._is_over()
        self._schedule()
        self._since_snapshot += len(batch.records)
        self._bytes_since_snapshot += len(batch.payload)
        if self._since_snapshot >= self._sim.scenario.snapshot_events or self._bytes_since_snapshot >= SNAPSHOT_BYTES:
            self._since_snapshot = self._bytes_since_snapshot = 0
            self._sim.log.snapshot(self.engine.rebase())

    def _is_over(self) -> None:
        self._over = True
        spec = self._sim.spec
        self._clock.later(us(spec.stop_grace_s + spec.kill_wait_s + LEAVE_S), 0, self._clear)
        self._sim.look()

    def _clear(self) -> None:
        if self.alive:
            self.leveller.clear()

    def _schedule(self, at_least_us: int = 0) -> None:
        due = MODEL.due(self.state)
        at = -1 if due is None else max(due - self._offset + 1, self._clock.now + at_least_us)
        if at != self._tick_at:
            self._tick_at = at
            if at >= 0:
                self._clock.at(at, 0, self._tick, at)

    def _tick(self, at: int) -> None:
        if at != self._tick_at or self.held(self._tick, at):
            return
        self._tick_at = -1
        self.submit(Tick())

    # ---- agents

    def serves(self, agent: Agent) -> bool:
        """Is it still there for this agent?"""
        return self.alive and self.serving and not agent.link.cut

    def hello(self, agent: Agent) -> None:
        """An agent asks to be taken in."""
        if not self.alive:
            agent.no_answer()
            return
        if self.held(self.hello, agent):
            return
        network, state, node = self._sim.network, self.state, agent.node
        if node not in state.nodes.nodes:
            network.to_node(agent, agent.refused, self._estranged().outcome, True)
            return
        if agent.token > self.token:
            network.to_node(agent, agent.refused, "another master leads", False)
            return
        speaker, known = state.senders.get(node), state.nodes.nodes[node]
        if speaker is not None and speaker.boot != agent.boot and known.joined:
            network.to_node(agent, agent.refused, STRANGER.outcome, True)
            return
        if node in self._mind:
            self._mind[node] = self._clock.now
        network.to_node(agent, agent.welcomed, self, self.token, self._order_for(node))

    def _estranged(self) -> Order:
        return STRANGER if self.state.job.live else farewell(self.state)

    def _order_for(self, node: str) -> Order | None:
        order = self.desired.orders.get(node)
        return farewell(self.state) if order is None and not self.state.job.live else order

    def opened(self, agent: Agent, told: Order | None) -> None:
        """It has been taken in, and was ``told`` what was wanted as it asked: since then that may have changed."""
        self._sessions[agent.node] = (agent, told)
        self.heard(agent.node)
        if self._order_for(agent.node) != told:
            self._level()

    def closed(self, agent: Agent) -> None:
        """Its connection has ended."""
        known = self._sessions.get(agent.node)
        if known is not None and known[0] is agent:
            del self._sessions[agent.node]
        self.unheard(agent.node)

    def receive(self, agent: Agent, connection: int, number: int, command: Command) -> None:
        """A numbered command has come."""
        if connection != agent.connection:
            return
        if (self.paused or not self.alive) and self.held(self.receive, agent, connection, number, command):
            return
        node = agent.node
        if node not in self.engine.state.nodes.nodes:
            self._sim.network.to_node(agent, agent.refused, self._estranged().outcome, True)
            return
        if type(command) in (incidents.ReportExit, hangs.ReportStacks):
            self._sim.meter.evidence()
        if not self._going:
            self._queue.append((command, Origin(node, agent.boot, number), (agent, connection, number)))
            if not self._woken and not self._appending:
                self._wake()

    def _level(self) -> None:
        """Tell everybody connected what they should be doing now, where that is news."""
        state, orders, live = self.state, self.desired.orders, self.state.job.live
        present, network = state.nodes.nodes, self._sim.network
        told: list[tuple[Agent, int, Order]] = []
        sessions = self._sessions
        for node, (agent, last) in sessions.items():
            order = orders.get(node)
            if order is None:
                if live and node in present:
                    continue
                order = STRANGER if live else farewell(state)
            if order is last or order == last:
                continue
            sessions[node] = (agent, order)
            if agent.link.clean:
                told.append((agent, agent.connection, order))
            else:
                network.to_node(agent, agent.ordered, agent.connection, self.token, order)
        if told:
            self._clock.later(network.hop_us, 0, _ordered, self.token, told)

    # ---- silence and progress

    def heard(self, node: str) -> None:
        """An agent speaks again."""
        if node in self._mind:
            self._mind[node] = -1

    def unheard(self, node: str) -> None:
        """From now on nothing is heard of an agent."""
        if self.alive and self._mind.get(node, -1) < 0:
            self._mind[node] = self._clock.now
            self._keep_minding()

    def _be_calm(self) -> None:
        self._calm = self._clock.now

    def _keep_minding(self) -> None:
        if not self._minding and self._mind:
            self._minding = True
            self._clock.later(us(self._sim.spec.heartbeat_s), 0, self._weigh_all)

    def _weigh_all(self) -> None:
        if self.held(self._weigh_all):
            return
        self._minding = False
        if self._troubled_since < 0:
            for node, since in list(self._mind.items()):
                if not self._weigh(node, since):
                    del self._mind[node]
        self._keep_minding()

    def _weigh(self, name: str, since: int) -> bool:
        """Turn a silence, or its end, into a command. Is there more to wait for?"""
        node = self.state.nodes.nodes.get(name)
        if node is None:
            return False
        if since < 0:
            if node.joined and node.state == "suspect":
                self.submit(silence.NoteHeard(name))
            # A silence that was noted may still be on its way into the log.
            return self._appending or bool(self._queue) or node.state == "suspect"
        silent = self._clock.now - max(since, self._calm)
        if node.joined and node.state == "running" and silent > us(self._sim.spec.silence_s):
            self.submit(silence.NoteSilence(name, silent))
        return True

    def stalled(self, name: str, world: World, step: int, idle_us: int, limit: Threshold) -> None:
        """Nobody makes steps: a hang, if everybody is heard of and nobody is asked already."""
        if self.paused or not self.serving or self._troubled_since >= 0:
            return
        heard = all(node in self._sessions and self._mind.get(node, -1) < 0 for node in world.members)
        if heard and self.state.hangs.suspected(name) is None:
            self.submit(hangs.NoteStall(name, world.generation, step, idle_us, limit.us, limit.budget))

    def await_progress(self, name: str) -> None:
        """A set makes steps: the next word about them is due in a while."""
        seen = self.state.progress.of(name)
        self._progress_in(name, max(0, seen.at + us(self._sim.spec.progress_s) - self.now()))

    def _progress_in(self, name: str, after_us: int) -> None:
        beat = us(self._sim.spec.heartbeat_s)
        at = self._clock.now + -(-max(1, after_us) // beat) * beat
        if at != self._progress_at.get(name, -1):
            self._progress_at[name] = at
            self._clock.at(at, 0, self._note_progress, name, at)

    def _note_progress(self, name: str, at: int) -> None:
        if at != self._progress_at.get(name, -1) or self.held(self._note_progress, name, at):
            return
        self._progress_at[name] = -1
        training, state = self._sim.trainings[name], self.state
        seen = state.progress.of(name)
        world = training.world
        if not state.job.live or world is None or world.generation != seen.generation or not training.stepping:
            # The next generation's first step begins this anew.
            return
        step = training.step_now()
        if self._sessions and step > seen.step and self._troubled_since < 0:
            self.submit(progress.NoteProgress(name, seen.generation, step))
            self._progress_in(name, us(self._sim.spec.progress_s))
        else:
            self._progress_in(
                name, max(us(self._sim.spec.heartbeat_s), (training.when(step + 1) or 0) - self._clock.now)
            )

    # ---- the scheduler

    def observed(self, seen: Observed) -> None:
        """The scheduler says what it sees of a node."""
        if self.serving:
            if seen.phase in ("failed", "gone"):
                self._sim.meter.evidence()
            self.leveller.changed(seen)


def _answered(replies: list[ReplyTo]) -> None:
    for agent, connection, number in replies:
        agent.answered(connection, number)


def _ordered(token: int, told: list[tuple[Agent, int, Order]]) -> None:
    for agent, connection, order in told:
        agent.ordered(connection, token, order)
