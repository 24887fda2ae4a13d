"""Agents as a master meets them: they obey the newest order, report with numbers until answered, and come back when cut off.

What the real agent does (`dlrover_core.runtime.agent`, `outbox`, `masters`) is done here on virtual time and without frames: the
same commands with the same origins in the same order, the same refusals of older tokens, the same pauses between tries.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from dlrover_core.job import checks, clusters, hangs, incidents, nodes, progress, world
from dlrover_core.job.orders import NodeLaunch, Order
from dlrover_core.kernel.engine import Command
from dlrover_core.sim.clock import SECOND_US, Clock, key_of
from dlrover_core.sim.hosts import SICK_AFTER_US, Host
from dlrover_core.sim.peers import Leader, Meter, Network, Scheduler, Training
from dlrover_core.sim.scenario import Scenario
from dlrover_core.spec import JobSpec, us

# As in runtime/outbox.py, runtime/masters.py and runtime/agent.py; tests/unit/test_sim_rules.py compares them.
UNANSWERED_MAX = 16
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
LAST_WORD_S = 5.0
STORES = 2
SHOW_S = 0.45
CHECK_S = 1.0
FIRST_PORT, PORTS_EACH, AGENTS = 10_000, 16, 3_000

NOTHING = Order(leave=False, reason="no master has spoken yet", grace_us=0)
SICK = "RuntimeError: CUDA error: an illegal memory access was encountered"
TIMED_OUT = "RuntimeError: NCCL watchdog: Timed out waiting for a collective"
GIVEN_UP = "stopped by its agent: no master and no steps"


class Site(Protocol):
    """What agents need of a run."""

    clock: Clock
    spec: JobSpec
    scenario: Scenario
    agents: Agents
    start_us: int
    stop_us: int
    exit_us: int

    def training_of(self, node: str) -> Training[Agent]:
        """The workers of a node's coupling set."""
        ...

    @property
    def network(self) -> Network[Agent]:
        """Their links."""
        ...

    @property
    def meter(self) -> Meter:
        """Who measures."""
        ...

    @property
    def scheduler(self) -> Scheduler:
        """Who started them."""
        ...


class Agents:
    """All agents of a run; ``of`` is the newest process of each node."""

    def __init__(self, sim: Site) -> None:
        self._sim = sim
        self.of: dict[str, Agent] = {}
        self._boots = 0

    def begin(self, launch: NodeLaunch, host: Host) -> Agent:
        """A node's agent starts."""
        self._boots += 1
        agent = self.of[launch.node] = Agent(self._sim, launch, host, self._boots)
        agent.begin()
        return agent

    def living(self) -> list[Agent]:
        """Those that have not ended, by name."""
        self.of = {name: self.of[name] for name in sorted(self.of) if not self.of[name].ended}
        return list(self.of.values())


class Agent:
    """One agent's process and its workers.

    ``connection`` numbers its conversations; 0: it has none. ``busy`` is what its levelling is at.
    """

    __slots__ = (
        "_called",
        "_checked",
        "_clock",
        "_exits_by",
        "_first_told",
        "_gave_up",
        "_held",
        "_next",
        "_outbox",
        "_rounds",
        "_sent",
        "_shown",
        "_sim",
        "_stepped_at",
        "_stores",
        "_stores_made",
        "_told_over",
        "_training",
        "_watching",
        "asked",
        "boot",
        "busy",
        "connection",
        "connections",
        "dead",
        "dialling",
        "ended",
        "first_rank",
        "frozen",
        "generation",
        "host",
        "key",
        "launch",
        "leader",
        "leaving",
        "link",
        "mastered_at",
        "name",
        "node",
        "nproc",
        "order",
        "peers",
        "running",
        "seen",
        "token",
    )  # fmt: skip

    def __init__(self, sim: Site, launch: NodeLaunch, host: Host, boot: int) -> None:
        self._sim, self._clock, self.launch, self.host, self.boot = sim, sim.clock, launch, host, boot
        self.node, self.name, self.nproc, self.key = launch.node, launch.name, launch.nproc, key_of(launch.node)
        self.link, self._training = sim.network.link(launch.node), sim.training_of(launch.node)
        self._called, self.peers = False, 0
        self.order, self.token = NOTHING, 0
        self.generation = self.first_rank = 0
        self.running = self.asked = self.ended = self.frozen = self.leaving = self.dialling = False
        self.dead: set[int] = set()
        self.busy = ""
        self.connection = self.connections = 0
        self.leader: Leader[Agent] | None = None
        self.mastered_at = self._stepped_at = self._clock.now
        self._outbox: deque[tuple[int, Command, int]] = deque()
        self._next, self._sent = 1, 0
        self._told_over = self._first_told = self._gave_up = self.seen = self._exits_by = 0
        self._stores: list[str] = []
        self._stores_made = self._rounds = 0
        self._shown = 0
        self._checked = (0, 0)
        self._watching = False
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # ---- life

    def begin(self) -> None:
        """Its first words."""
        self.add(nodes.ReportJoined(self.node, self.host.name, self.node, self.nproc))
        for _ in range(STORES):
            self._offer()
        self.dial()

    def killed(self) -> None:
        """Its process and its workers are dead; their kernel ends the connections, where it still can."""
        self._die()
        if not self.link.black:
            self._sim.network.hang_up(self)

    def lost(self) -> None:
        """The same by a power cut: nobody is told."""
        self.link.black_out()
        self._die(noisy=False)

    def _die(self, *, noisy: bool = True) -> None:
        if self.ended:
            return
        self.ended = True
        if self.running:
            self._training.died(self, self.generation, cascades=noisy)
            self._training.left(self, self.generation)
        if self.leader is not None:
            self.leader.unheard(self.node)
        self.running = False
        self._sim.meter.stopping(self.node, busy=False)

    def freeze(self, for_us: int) -> None:
        """SIGSTOP, and SIGCONT after so long: workers train on, nothing else happens."""
        if self.frozen:
            return
        self.frozen = True
        if self.leader is not None:
            self.leader.unheard(self.node)
        self._clock.later(for_us, self.key, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        if self.ended:
            return
        held, self._held = self._held, []
        if self.connection and self._clock.now - self.mastered_at > us(self._sim.spec.silence_s):
            # What had come meanwhile is read before the beat finds how late it is.
            self._disconnected(self.connection, False)
        for call, args in held:
            call(*args)
        if self.connection and self.leader is not None:
            self.leader.heard(self.node)

    def _stopped_by_signal(self, call: Callable[..., None], *args: Any) -> bool:
        if self.frozen:
            self._held.append((call, args))
        return self.frozen or self.ended

    # ---- the order

    def ordered(self, connection: int, token: int, order: Order) -> None:
        """A level has come."""
        if self.frozen:
            self._held.append((self.ordered, (connection, token, order)))
            return
        if self.ended or connection != self.connection:
            return
        self.mastered_at = self._clock.now
        if token < self.token:
            self._disconnected(connection, False)
            return
        self.token, self.order = token, order
        self._count_worlds(order)
        if order.work.store in self._stores:
            self._stores.remove(order.work.store)
            self._offer()
        if order.parts:
            self._told(order.part(hangs.Probe).hang, order.part(checks.CheckWork))
            self._hear(order.part(clusters.Cluster))
        if not self.busy or self.busy == "lingering":
            self.level()

    def _told(self, hang: int, check: checks.CheckWork) -> None:
        if hang > self._shown and self.running:
            self._shown = hang
            self._clock.later(us(SHOW_S), self.key, self._show, hang)
        if check[:2] > self._checked:
            self._checked = (check.number, check.round)
            self._clock.later(us(CHECK_S), self.key, self._check, check)

    def _hear(self, cluster: clusters.Cluster) -> None:
        """Where others are called; and where it is called itself, once."""
        self.peers = max(self.peers, cluster.version)
        if cluster.ports and not self._called and not self.order.leave:
            self._called = True
            again = cluster.first if cluster.address == self.host.name else 0
            first = again or FIRST_PORT + PORTS_EACH * (self.boot % AGENTS)
            self.add(clusters.OfferPorts(self.node, self.host.name, first, cluster.ports))

    def _check(self, check: checks.CheckWork) -> None:
        """Its part of a node check: a sick host shows alone, and drags its partners down."""
        if self._stopped_by_signal(self._check, check) or self._checked != self.order.part(checks.CheckWork)[:2]:
            return
        others = [self._sim.agents.of[one].host for one in check.others if one in self._sim.agents.of]
        sick, dragged = self.host.sick_until > self._clock.now, any(one.sick_until > self._clock.now for one in others)
        what = self.host.cause or SICK if sick else "its partner failed alone" if dragged else ""
        took_us = us(CHECK_S)
        self.add(checks.ReportCheck(self.node, *self._checked, not what, not sick, took_us, took_us // 2, what))

    def _show(self, hang: int) -> None:
        """What its ranks are at, because the leader suspects a hang."""
        if not self._stopped_by_signal(self._show, hang) and self.running:
            self.add(hangs.ReportStacks(self.node, hang, self._training.shown(self)))

    def _count_worlds(self, order: Order) -> None:
        seen, newest = self.seen, max(order.generation, order.over)
        self.seen = max(seen, newest)
        if (newest > seen + 1 and seen) or (newest > seen and not order.generation):
            for address in self._stores:
                self.add(world.WithdrawStore(self.node, address))
            withdrawn = len(self._stores)
            self._stores = []
            for _ in range(withdrawn):
                self._offer()

    def _offer(self) -> None:
        self._stores_made += 1
        address = f"{self.node}:{self._stores_made}"
        self._stores.append(address)
        self.add(world.OfferStore(self.node, address))

    def level(self) -> None:
        """Make the workers match the order."""
        order = self.order
        if order.leave:
            self.leaving = True
            self._stop(order)
        elif order.generation != self.generation or order.over > self._told_over:
            if order.linger_us and self.running and self.busy != "lingering" and len(self.dead) < self.nproc:
                self.busy = "lingering"
                self._clock.later(order.linger_us, self.key, self._lingered, order)
            else:
                self._stop(order)

    def _lingered(self, order: Order) -> None:
        if self._stopped_by_signal(self._lingered, order):
            return
        if self.busy == "lingering" and order is self.order:
            self._stop(order)

    def _stop(self, order: Order) -> None:
        if not self.running:
            self._stopped(order)
            return
        self.busy, self.asked = "stopping", True
        self._training.left(self, self.generation)
        self._sim.meter.stopping(self.node, busy=True)
        # Whoever hears that we have stopped must have heard every exit before.
        told_us = max(0, self._exits_by - self._clock.now)
        stop_us = self._sim.stop_us if len(self.dead) < self.nproc else 0
        self._clock.later(max(stop_us, told_us), self.key, self._stopped, order)

    def _stopped(self, order: Order) -> None:
        if self._stopped_by_signal(self._stopped, order):
            return
        if self.running:
            self._sim.meter.stopping(self.node, busy=False)
        self.generation, self.running, self.busy = 0, False, ""
        if order.leave:
            self.add(nodes.ReportLeft(self.node))
            self.busy = "leaving"
            self._clock.later(us(LAST_WORD_S), self.key, self._end)
            return
        if order.over > self._told_over:
            self._told_over = order.over
            self.add(world.ReportStopped(self.node, order.over, self._training.made))
        if order is not self.order:
            self.level()
        elif order.generation:
            self._start(order)

    def _start(self, order: Order) -> None:
        self.busy = "starting"
        self.generation, self.first_rank, self.asked = order.generation, order.work.first_rank, False
        self._stepped_at = self._clock.now
        if self.dead:
            self.dead = set()
        self._clock.later(self._sim.start_us, self.key, self._started, order)

    def _started(self, order: Order) -> None:
        if self._stopped_by_signal(self._started, order):
            return
        self.busy, self.running = "", True
        self.add(world.ReportStarted(self.node, order.generation))
        self._training.joined(self, order.generation, order.work.nodes)
        if self.host.sick_until > self._clock.now:
            self._clock.later(SICK_AFTER_US, self.key, self.sicken, order.generation)
        if order is not self.order:
            self.level()

    def _end(self) -> None:
        """It has said its last word, or waited long enough to."""
        if self._stopped_by_signal(self._end):
            return
        self.ended = True
        self._sim.network.hang_up(self)
        self._sim.scheduler.left(self.name)

    # ---- workers

    def fail(self, generation: int, local: int, error: str, code: int = 1) -> int:
        """One of its workers dies by itself; returns how many did."""
        if self.ended or not self.running or self.asked or generation != self.generation:
            return 0
        alive = [one for one in range(self.nproc) if one not in self.dead]
        if not alive:
            return 0
        one = alive[local % len(alive)]
        self.dead.add(one)
        step = self._training.step_now()
        cascades = "closed by peer" not in error and error != TIMED_OUT
        self._training.died(self, generation, cascades=cascades)
        exit_us = self._sim.exit_us
        self._exits_by = self._clock.now + exit_us
        self._clock.later(exit_us, self.key, self._exited, generation, self.first_rank + one, code, step, error)
        return 1

    def _exited(self, generation: int, rank: int, code: int, step: int, error: str) -> None:
        if self._stopped_by_signal(self._exited, generation, rank, code, step, error):
            return
        age = self._sim.exit_us
        self.add(incidents.ReportExit(self.node, generation, rank, code, False, step, age, "", error))
        if self.busy == "lingering" and len(self.dead) == self.nproc:
            self._stop(self.order)

    def sicken(self, generation: int) -> None:
        """Its host is sick: a worker dies, if it has not been cured meanwhile."""
        if self.host.sick_until > self._clock.now:
            self.fail(generation, 0, self.host.cause or SICK)

    def finish(self, generation: int, step: int) -> None:
        """Its workers end well."""
        if not self.ended and self.running and generation == self.generation:
            self.dead.update(range(self.nproc))
            later_us = us(self._sim.scenario.finish_s) * self.launch.index // self._sim.scenario.nodes
            self._clock.later(self._sim.exit_us + later_us, self.key, self._finished, generation, step)

    def _finished(self, generation: int, step: int) -> None:
        if not self._stopped_by_signal(self._finished, generation, step):
            self.add(world.ReportFinished(self.node, generation, step))

    def first_step(self, generation: int, step: int) -> None:
        """Rank 0, which is here, has made the first step of its generation."""
        if self._stopped_by_signal(self.first_step, generation, step):
            return
        if self._first_told < generation:
            self._first_told = generation
            self.add(progress.ReportFirstStep(self.node, generation, step, 0, told=True))

    def mind_silence(self) -> None:
        """Without a master and without steps, for half of what would get it replaced, it stops its workers."""
        if self._watching or self.connection or not self.running:
            return
        self._watching = True
        self._clock.later(us(self._sim.spec.unreachable_s / 2), self.key, self._mind)

    def _mind(self) -> None:
        if self._stopped_by_signal(self._mind):
            return
        self._watching = False
        if self.connection or not self.running or self.generation <= self._gave_up:
            return
        training = self._training
        if training.stepping and training.world is not None and training.world.generation == self.generation:
            self._stepped_at = self._clock.now
        patience = us(self._sim.spec.unreachable_s / 2)
        waited = self._clock.now - max(self._stepped_at, self.mastered_at)
        if waited < patience:
            self._watching = True
            self._clock.later(max(1, patience - waited), self.key, self._mind)
            return
        self._gave_up = self.generation
        self.asked = True
        training.left(self, self.generation)
        self.dead.update(range(self.nproc))
        rank, step = self.order.work.first_rank, training.made
        self.add(incidents.ReportExit(self.node, self.generation, rank, -9, False, step, 0, "", GIVEN_UP))

    # ---- the outbox

    def add(self, command: Command) -> None:
        """Number a command and send it as soon as may be."""
        self._outbox.append((self._next, command, self._clock.now))
        self._next += 1
        if self.connection:
            self._pump()

    def _pump(self) -> None:
        outbox = self._outbox
        while self._sent < len(outbox) and self._sent < UNANSWERED_MAX and self.connection:
            number, command, added = outbox[self._sent]
            self._sent += 1
            if added != self._clock.now and isinstance(command, (incidents.ReportExit, progress.ReportFirstStep)):
                command = command._replace(age_us=command.age_us + self._clock.now - added)
            self._sim.network.report(self, number, command)

    def answered(self, connection: int, number: int) -> None:
        """A command and all before it are durable."""
        if connection != self.connection or self.ended:
            return
        if self.frozen:
            self._held.append((self.answered, (connection, number)))
            return
        outbox = self._outbox
        self.mastered_at = self._clock.now
        while outbox and outbox[0][0] <= number:
            outbox.popleft()
            self._sent = max(0, self._sent - 1)
        if outbox:
            self._pump()
        elif self.busy == "leaving":
            self._end()

    def expected(self, connection: int, number: int) -> None:
        """The leader asks again from a number on."""
        if connection != self.connection or self.ended:
            return
        if self.frozen:
            self._held.append((self.expected, (connection, number)))
            return
        if self._outbox and number < self._outbox[0][0]:
            # It was answered long ago: a leader that asks for it does not know this node.
            self._disconnected(connection, False)
            return
        self._sent = sum(1 for one, _, _ in self._outbox if one < number)
        self._pump()

    # ---- the master

    def dial(self) -> None:
        """Ask whoever should lead to be taken in."""
        self.dialling = False
        if self._stopped_by_signal(self.dial) or self.connection:
            return
        self._sim.network.dial(self)

    def welcomed(self, leader: Leader[Agent], token: int, order: Order | None) -> None:
        """A leader has taken it in, and says what to do."""
        if self._stopped_by_signal(self.welcomed, leader, token, order):
            return
        if token < self.token or not leader.serves(self):
            self._try_again()
            return
        self.connections += 1
        self.connection, self.leader, self.token = self.connections, leader, token
        self.mastered_at, self._sent, self._rounds = self._clock.now, 0, 0
        leader.opened(self, order)
        if order is not None:
            self.ordered(self.connection, token, order)
        self._pump()
        if not self._outbox and self.busy == "leaving":
            self._end()

    def refused(self, outcome: str, leave: bool) -> None:
        """A leader has turned it away; for good, if it is to leave."""
        if self._stopped_by_signal(self.refused, outcome, leave):
            return
        if not leave:
            self._try_again()
            return
        if not self.leaving:
            self.leaving = True
            self._outbox.clear()
            self.order = Order(leave=True, reason=outcome, grace_us=0, outcome=outcome)
            if self.running:
                self._training.left(self, self.generation)
            self._clock.later(self._sim.stop_us if self.running else 0, self.key, self._end)

    def disconnected(self, connection: int) -> None:
        """Its connection has ended, and it is told so."""
        self._disconnected(connection, True)

    def _disconnected(self, connection: int, told: bool) -> None:
        if connection != self.connection or self.ended or not connection:
            return
        if self.frozen:
            self._held.append((self._disconnected, (connection, told)))
            return
        if self.leader is not None:
            self.leader.closed(self)
        self.connection = 0
        self.mind_silence()
        # After a conversation at once; then with growing pauses.
        self._clock.later(0, self.key, self.dial)

    def no_answer(self) -> None:
        """Nobody took it in: it tries again, later and later."""
        if self._stopped_by_signal(self.no_answer):
            return
        self._try_again()

    def _try_again(self) -> None:
        if self.dialling or self.connection:
            return
        self.dialling = True
        self._rounds += 1
        self.mind_silence()
        self._clock.later(int(pause_s(self.node, self._rounds - 1) * SECOND_US), self.key, self.dial)


def pause_s(node: str, attempt: int) -> float:
    """How long an agent that nobody took in waits before it tries again."""
    jitter = zlib.crc32(f"{node}:{attempt}".encode()) / 2**32
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(attempt, 10)) * (0.5 + jitter / 2)
