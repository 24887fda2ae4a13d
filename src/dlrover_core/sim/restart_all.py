"""The other policy: what torchrun with a watchdog does. Whatever breaks, all workers stop, and begin again from a checkpoint.

A model, without an engine: it reads the same failures as the simulation of ours and gives the same kind of account. It is given
the best of what its users do: checkpoints as far apart as Young's formula says, spares that are used at once, and a restart on
fewer hosts where the job allows it, and on more as soon as one is back. It differs in what it costs:

- an error is noticed within torchrun's monitor interval, a hang or a power cut when torch's watchdog gives up, after 600 s;
- a restart of everybody takes 10 minutes at 98,304 GPUs (FT-HSDP, arXiv 2602.00277, the synchronous baseline) and falls with the
  square root of their number, which is our rule; nobody has published one;
- checkpoints go to storage, and all since the last one is made again. Training stands still until storage has it, or
  (*asynchronous*, as torch's ``async_save``) only for the copy to the host: what is written beside training counts once it is
  whole, and the next copy waits for that;
- a failure while it restarts makes it begin anew; a host that is broken fails it until it is taken away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlrover_core.checkpoint.cadence import young_s
from dlrover_core.sim import triggers
from dlrover_core.sim.constants import ALL_RESTART_GPUS, Constants
from dlrover_core.sim.faults import Fault, amount
from dlrover_core.sim.hosts import SICK_AFTER_US
from dlrover_core.sim.run import CHECKPOINT, CLASSES, DEGRADED, DETECT, FORM, REPLAY, STARTUP, TRAINING, WAIT, Recovery
from dlrover_core.sim.scenario import Scenario
from dlrover_core.sim.training import COLLECTIVE_S, SLOW_S

_ERRORS = frozenset({"kill_worker", "fail_worker", "kill_node", "preempt", "preempt_now", "crash_master", "interrupt"})
_EPSILON = 1e-9
UP, DOWN_DETECT, DOWN_WAIT, DOWN_RESTART = "up", "detect", "wait", "restart"


@dataclass
class Account:
    """What became of the job in ``virtual_s``: seconds by class, which sum to it, and every stop by phases."""

    virtual_s: float
    by_class: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    recoveries: list[Recovery] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    lost_s: float = 0.0

    @property
    def goodput(self) -> float:
        """The share of time in which full-speed work was made that had not been made before."""
        return self.by_class[TRAINING] / self.virtual_s if self.virtual_s else 0.0


def restart_s(gpus: int, constants: Constants) -> float:
    """A restart of so many."""
    return constants["all_restart_s"] * math.sqrt(gpus / ALL_RESTART_GPUS)


def run(
    scenario: Scenario,
    faults: Sequence[Fault],
    until_s: float,
    mttf: float,
    constants: Constants,
    *,
    asynchronous: bool = False,
) -> Account:
    """The job for so long. ``faults`` are at times; of one that could not hit a model of restarts nothing happens."""
    model = _Model(scenario, until_s, mttf, constants, asynchronous=asynchronous)
    for fault in faults:
        at = triggers.parse(fault.at)
        if at.kind != "time" or at.number / 1e6 > until_s:
            model.account.missed.append(fault)
            continue
        model.advance(at.number / 1e6)
        model.strike(fault)
    model.advance(until_s)
    return model.account


class _Model:
    def __init__(
        self, scenario: Scenario, until_s: float, mttf: float, constants: Constants, *, asynchronous: bool
    ) -> None:
        self.account = Account(until_s)
        self._scenario, self._constants = scenario, constants
        self._stall = constants["async_stall_s" if asynchronous else "all_checkpoint_s"]
        self._write = constants["async_write_s"] if asynchronous else 0.0
        best = constants["all_checkpoint_every_s"] or young_s(self._stall, mttf) or math.inf
        self._tau = max(1.0, self._write, best)
        self._restart = restart_s(scenario.nodes * scenario.workers_per_node, constants)
        self._now = 0.0
        self._phase, self._phase_ends = DOWN_RESTART, self._restart
        self._class = STARTUP
        self._down: dict[int, float] = {}
        self._sick: dict[int, float] = {}
        self._slow: list[tuple[float, float]] = []
        self._using = frozenset(range(scenario.nodes))
        self._up_since = 0.0
        self._since = self._behind = self._stalled = 0.0
        # What is being written beside training, and when that is whole.
        self._pending = self._whole_at = 0.0
        self._stop: list[float] = []
        self._cause = ""

    # ---- time

    def advance(self, to: float) -> None:
        """All that happens by itself until then."""
        while self._now < to - _EPSILON:
            if self._phase == UP:
                self._train(to)
            elif self._phase == DOWN_WAIT:
                self._spend(min(to, self._next_host()), WAIT)
                self._find_hosts()
            else:
                self._spend(min(to, self._phase_ends), self._class)
                if self._now >= self._phase_ends - _EPSILON:
                    self._next_phase()

    def _spend(self, until: float, kind: str) -> None:
        self.account.by_class[kind] += until - self._now
        if self._stop and kind in (DETECT, WAIT, FORM):
            self._stop[(DETECT, WAIT, FORM).index(kind)] += until - self._now
        self._now = until

    def _train(self, to: float) -> None:
        """Until then, or until something changes."""
        account = self.account.by_class
        self._slow = [one for one in self._slow if one[0] > self._now]
        grows = self._next_host() if len(self._using) < self._scenario.nodes else math.inf
        to = min([to, grows, self._sick_shows(), *(until for until, _ in self._slow)])
        if self._stalled > 0:
            span = min(self._stalled, to - self._now)
            account[CHECKPOINT] += span
            self._stalled, self._now = self._stalled - span, self._now + span
            if self._stalled <= _EPSILON:
                self._saved()
        else:
            rate = len(self._using) / self._scenario.nodes / math.prod(times for _, times in self._slow)
            work = self._tau - self._since
            work = min(work, self._behind) if self._behind > 0 else work
            span = min(to - self._now, work / rate)
            work = span * rate
            account[REPLAY if self._behind > 0 else TRAINING] += work
            account[DEGRADED] += span - work
            self._behind = self._behind - work if self._behind - work > _EPSILON else 0.0
            self._since, self._now = self._since + work, self._now + span
            if self._since >= self._tau - _EPSILON:
                self._stalled = self._stall
                if not self._stall:
                    self._saved()
        if self._now >= self._sick_shows() - _EPSILON:
            self._break(self._constants["all_detect_s"], self._cause)
        elif self._now >= grows - _EPSILON:
            # As torchrun does when somebody waits to join: everybody begins again.
            self._break(0.0, "a host is back")

    def _saved(self) -> None:
        """The copy is made; storage has it now, or once it is written."""
        self._pending, self._whole_at = (self._since, self._now + self._write) if self._write else (0.0, 0.0)
        self._since = self._stalled = 0.0

    def _sick_shows(self) -> float:
        """When a broken host that is in use fails its workers."""
        hurt = any(until > self._now and host in self._using for host, until in self._sick.items())
        return max(self._up_since + SICK_AFTER_US / 1e6, self._now) if hurt else math.inf

    def _next_phase(self) -> None:
        if self._phase == DOWN_DETECT:
            self._phase = DOWN_WAIT
            self._find_hosts()
        else:
            self._phase, self._up_since = UP, self._now
            self._close()

    def _close(self) -> None:
        """Training goes on: one more stop is over."""
        if self._stop:
            detect, wait, restart, replay = self._stop
            number = len(self.account.recoveries) + 1
            self.account.recoveries.append(Recovery(number, self._cause, detect, 0.0, 0.0, restart, 0.0, replay, wait))
            self._stop = []

    # ---- hosts

    def _next_host(self) -> float:
        return min((until for until in self._down.values() if until > self._now + _EPSILON), default=math.inf)

    def _find_hosts(self) -> None:
        """Begin again if there are enough hosts, a multiple of the unit, on those of the lowest number."""
        scenario, count = self._scenario, self._scenario.nodes + self._scenario.spares
        self._down = {host: until for host, until in self._down.items() if until > self._now + _EPSILON}
        size = min(count - len(self._down), scenario.nodes) // scenario.unit * scenario.unit
        if size < (scenario.nodes_min or scenario.nodes):
            return
        if len(self._using) != size or not self._using.isdisjoint(self._down):
            self._using = frozenset([host for host in range(count) if host not in self._down][:size])
        self._phase, self._phase_ends, self._class = DOWN_RESTART, self._now + self._restart, FORM

    # ---- failures

    def strike(self, fault: Fault) -> None:
        """One fault, now."""
        self.account.struck.append(fault)
        explicit = self._constants["all_detect_s"]
        for host in self._hosts(fault):
            if fault.kind == "sick_host":
                self._sick[host] = self._now + amount(fault)
            elif fault.kind in ("kill_host", "kill_rack", "lose_host"):
                self._down[host] = max(self._down.get(host, 0.0), self._now + amount(fault))
                self._sick.pop(host, None)
        hit = any(host in self._using for host in self._hosts(fault))
        if fault.kind in _ERRORS or (hit and fault.kind in ("sick_host", "kill_host", "kill_rack")):
            self._break(0.0 if fault.kind == "interrupt" else explicit, fault.cause or fault.kind)
        elif hit and fault.kind == "lose_host":
            self._break(COLLECTIVE_S, fault.cause or fault.kind)
        elif fault.kind == "hang_worker":
            self._break(min(COLLECTIVE_S, fault.amount or COLLECTIVE_S), fault.cause or fault.kind)
        elif fault.kind == "slow_worker":
            self._slow.append((self._now + SLOW_S, max(1.0, amount(fault))))

    def _hosts(self, fault: Fault) -> list[int]:
        if fault.kind not in ("sick_host", "kill_host", "kill_rack", "lose_host"):
            return []
        count = self._scenario.nodes + self._scenario.spares
        number = fault.target if isinstance(fault.target, int) else int(fault.target.rpartition("-")[2])
        if fault.kind != "kill_rack":
            return [number % count]
        racks = -(-count // self._scenario.hosts_per_rack)
        first = number % racks * self._scenario.hosts_per_rack
        return list(range(first, min(count, first + self._scenario.hosts_per_rack)))

    def _break(self, detect_s: float, cause: str) -> None:
        """Everybody stops. While it restarts it begins anew; while it has not noticed there is nothing more to break."""
        if self._phase in (DOWN_DETECT, DOWN_WAIT):
            return
        if self._phase == UP:
            self._cause = cause
            lost = self._since + (self._pending if self._now < self._whole_at else 0.0)
            self._stop = [0.0, 0.0, 0.0, lost]
            self.account.lost_s += lost
            self._behind, self._since, self._stalled, self._pending = self._behind + lost, 0.0, 0.0, 0.0
        self._phase, self._phase_ends, self._class = DOWN_DETECT, self._now + detect_s, DETECT
