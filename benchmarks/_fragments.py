"""A leased dataset of 10^10 samples at its worst: a leader that knows 10,000 fragments of it.

The real master in a process of its own, with its SQLite log; `NODES` simulated agents. Each is granted a part of the dataset,
says that every second piece of it was used, and gives the rest back. Then what is used, and what is free, are `FRAGMENTS`
ranges each, all over the dataset, and nodes are granted what is free of it once more.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from _agents import ANSWER, BEAT, LEVEL, Broken, Joining, SimAgent, Swarm, dialled
from _master import Running, started

from dlrover_core.data.ranges import FRAGMENTS_MAX, Ranges
from dlrover_core.job.leases import Leases, LeaseTold, ReportAcked, ReturnLease
from dlrover_core.job.shards import LEASE, RegisterDataset
from dlrover_core.kernel.wire import number_of
from dlrover_core.runtime.leasing import Ask, LeaseBeat

NODES = 10
LARGE = 10**10
FRAGMENTS = FRAGMENTS_MAX
PIECES = FRAGMENTS // NODES
ASKS, LEASES = number_of(LeaseBeat), number_of(Leases)
LIMIT_S = 30.0
KIB_IN_MIB = 1024


class Fragmented(NamedTuple):
    """One trial.

    registered_ms: from the command to the order that names the dataset
    before_mib:    the leader's peak memory before it knew of any dataset
    peak_mib:      its peak memory at the end
    cut_bytes:     what was used, packed
    """

    registered_ms: float
    before_mib: float
    peak_mib: float
    cut_bytes: float


class Holders:
    """Keeps, for each agent, the newest order and the number of the last command that was answered."""

    def __init__(self, agents: list[SimAgent], swarm: Swarm) -> None:
        self._agents, self._swarm = agents, swarm
        self.told: dict[str, LeaseTold] = {}
        self._answered: dict[str, int] = {}

    def heard(self, agent: SimAgent, message: Any) -> bool:
        """Take in one message."""
        kind, fields = message
        if kind == LEVEL:
            known = [one for number, its in fields[1][2] if number == LEASES for one in its[0]]
            self.told[agent.name] = LeaseTold(*known[0]) if known else self.told.get(agent.name, LeaseTold(*NOTHING))
        elif kind == ANSWER:
            if fields[2]:
                raise Broken(f"command {fields[0]} of {agent.name} was refused: {fields[2]}")
            self._answered[agent.name] = fields[0]
        return False

    def until(self, true: Any) -> None:
        """Hear until something is true. Raises `Broken`."""
        began = time.monotonic()
        while not true():
            self._swarm.look(self.heard, 0.1)
            if time.monotonic() - began > LIMIT_S:
                raise Broken(f"the master has not said for {LIMIT_S:g} s what was waited for")

    def held(self, agent: SimAgent) -> Ranges:
        """The positions that an agent holds, by its newest order."""
        told = self.told.get(agent.name)
        return Ranges.unpack(told.spans) if told is not None and told.spans else Ranges()

    def granted(self, agent: SimAgent) -> Ranges:
        """Ask for a grant, wait for it, and want no more."""
        beat(agent, LARGE // NODES)
        self.until(lambda: self.held(agent))
        beat(agent, 0)
        return self.held(agent)

    def command(self, agent: SimAgent, command: tuple[Any, ...]) -> None:
        """Send a command, and wait until it is durable."""
        number = agent.next_number
        agent.say(agent.command(command))
        self.until(lambda: self._answered.get(agent.name, 0) >= number)

    def use_half(self, agent: SimAgent) -> Ranges:
        """Use every second piece of a lease, give the rest back, and return what was used."""
        start, end = max(self.held(agent), key=lambda span: span.end - span.start)
        step = (end - start) // (2 * PIECES)
        used = Ranges((start + 2 * at * step, start + (2 * at + 1) * step) for at in range(PIECES))
        self.command(agent, ReportAcked(agent.name, "large", used.pack()))
        self.command(agent, ReturnLease(agent.name, "large"))
        self.until(lambda: not self.held(agent))
        return used


NOTHING = ("", 1, 0, "", "", 1)


def beat(agent: SimAgent, aim: int) -> None:
    """A heartbeat of a node that wants to hold so many positions."""
    ask = Ask("large", aim=aim, least=1, rate=10**6, idle=aim > 0)
    agent.say((BEAT, (agent.generation, 1, 10, ((ASKS, LeaseBeat((ask,))),))))


def peak_mib(master: Running) -> float:
    """The largest memory that the process ever had."""
    for line in Path(f"/proc/{master.process.pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / KIB_IN_MIB
    raise Broken("no VmHWM in /proc")


def fragmented() -> Fragmented:
    """One master. Raises `Broken`."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        with started(folder, NODES) as master:
            agents = dialled(range(NODES), master.address, master.token)
            swarm, joining = Swarm(agents), Joining(agents)
            joining.greet()
            swarm.run(joining.heard)
            holders = Holders(agents, swarm)
            before, first = peak_mib(master), agents[0]
            began = time.perf_counter()
            terms = ("large", LARGE, 7, "shuffled", "", 1, 0, LEASE)
            first.say(first.command(RegisterDataset(first.name, first.generation, *terms)))
            holders.until(lambda: first.name in holders.told)
            registered_ms = (time.perf_counter() - began) * 1e3
            for agent in agents:
                holders.granted(agent)
            used = Ranges(span for agent in agents for span in holders.use_half(agent))
            if len(used) != FRAGMENTS:
                raise Broken(f"{len(used)} fragments instead of {FRAGMENTS}")
            for agent in agents:
                holders.granted(agent)
            packed = used.pack()
            peak = peak_mib(master)
            swarm.close()
            return Fragmented(registered_ms, before, peak, float(len(packed)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
