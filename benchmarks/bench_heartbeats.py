"""How many heartbeats does a master answer per second, with the agents that send them on the same two cores?

The real `Master` with the real HTTP listener in a process of its own, its log in SQLite; 500 agents that have joined, offered a
store and started one world, each over a WebSocket of its own that has shown the job's token. A heartbeat is a full
`Beat` frame with what a node that trains and keeps a checkpoint in memory tells (`Pulse`, `KeptBeat`); the master parses and
checks it, compares what the agent was told last with what is desired, and answers: with the order before the answer where the
two differ. Every twentieth comes with a numbered command in the same write (a store offered and withdrawn in turn, each an
event): it is deduplicated by its number, decided, and on disk before it is answered.

Closed loop: an agent sends its next heartbeat when it has the answer to the last, and has parsed it. The agents are simulated,
all in this process (benchmarks/_agents.py says what they do and what they spare themselves). Measured over `--seconds`.

The peer's figure is a constant, not measured here: dlrover 0.6.1's gRPC master answered 2,100 requests/s on such a machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from _agents import ANSWER, BEAT, BEAT_SEEN, GOODBYE, Broken, Joining, SimAgent, Swarm, dialled, room_for
from _bench import BROKEN, Result, Row, options, quantile, say
from _master import cpu_s, started

from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.job import world
from dlrover_core.kernel.wire import number_of
from dlrover_core.runtime.keeping import KeptBeat

MEASURES = (
    "src/adapters/dlrover_adapters/cli/collector.py",
    "src/adapters/dlrover_adapters/http",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)

PEER_RATE = 2_100.0
RATE_TARGET = 12_000.0
COMMAND_EVERY = 20
SPARE_STORE = "10.9.9.9:2"
PULSE, KEPT = number_of(Pulse), number_of(KeptBeat)


class Trial(NamedTuple):
    """One closed loop. CPU times are of one heartbeat, the share of commands included."""

    rate: float
    commands: float
    p50_ms: float
    p99_ms: float
    master_us: float
    agents_us: float


class Beating:
    """The closed loop of all agents."""

    def __init__(self, agents: list[SimAgent]) -> None:
        self._sent = [0.0] * len(agents)
        self._turns = [0] * len(agents)
        self._waiting = [0] * len(agents)
        self.waits: list[float] = []
        self.answered = 0

    def say(self, agent: SimAgent) -> None:
        """The next heartbeat, and with every twentieth a command."""
        number = agent.number
        turn = self._turns[number] = self._turns[number] + 1
        kept = KeptBeat(agent.generation, held=(1,))
        beat = (BEAT, (agent.generation, turn, 10, ((PULSE, Pulse(turn, 3_000, 20_000)), (KEPT, kept))))
        self._sent[number] = time.perf_counter()
        if (turn + number) % COMMAND_EVERY or self._waiting[number]:
            agent.say(beat)
            return
        offers = turn // COMMAND_EVERY % 2 == 0
        self._waiting[number] = agent.next_number
        command = (world.OfferStore if offers else world.WithdrawStore)(agent.name, SPARE_STORE)
        agent.say(beat, agent.command(command))

    def heard(self, agent: SimAgent, message: Any) -> bool:
        """An answer: to the heartbeat, or to the command."""
        kind, fields = message
        if kind == BEAT_SEEN:
            if fields[0] != agent.token:
                raise Broken(f"{agent.name} is answered under token {fields[0]}")
            self.waits.append(time.perf_counter() - self._sent[agent.number])
            self.say(agent)
        elif kind == ANSWER and fields[0] == self._waiting[agent.number]:
            # Refused where the one before was answered late and offers and withdrawals are out of step: decided all the same.
            self._waiting[agent.number] = 0
            self.answered += 1
        elif kind in (ANSWER, GOODBYE):
            raise Broken(f"{agent.name} was told {message}")
        return False


def trial(agents: int, seconds: float) -> Trial:
    """One master, one world, one closed loop."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        with started(folder, agents) as master:
            here = dialled(range(agents), master.address, master.token)
            swarm, joining = Swarm(here), Joining(here)
            joining.greet()
            swarm.run(joining.heard)
            beating = Beating(here)
            before, mine, began = master.cpu_s(), cpu_s(os.getpid()), time.perf_counter()
            for agent in here:
                beating.say(agent)
            swarm.run(beating.heard, lambda: time.perf_counter() - began > seconds)
            took, beats = time.perf_counter() - began, len(beating.waits)
            used, own = master.cpu_s() - before, cpu_s(os.getpid()) - mine
            swarm.close()
            return Trial(
                beats / took,
                beating.answered / took,
                1000 * quantile(beating.waits, 0.5),
                1000 * quantile(beating.waits, 0.99),
                1e6 * used / beats,
                1e6 * own / beats,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Trials, one after the other."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--agents", type=int, default=500, metavar="N", help="agents (default 500)")
        parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each trial (default 5)")

    chosen = options(__doc__, trials=5, more=more)
    room_for(chosen.agents)
    result = Result(
        "heartbeats", "dlrover 0.6.1's gRPC master, a constant: 2,100 requests/s on such a machine, not run here"
    )
    found = list[Trial]()
    try:
        for number in range(chosen.trials):
            found.append(trial(chosen.agents, chosen.seconds))
            one = found[-1]
            say(
                f"{number + 1}/{chosen.trials} {one.rate:,.0f}/s with {one.commands:,.0f} commands/s, p99 {one.p99_ms:.1f} ms; "
                f"CPU {one.master_us:.1f} us of the master, {one.agents_us:.1f} us of its agent"
            )
    except (Broken, OSError, RuntimeError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.rows = [
        Row(
            "heartbeats answered",
            "/s",
            [one.rate for one in found],
            [PEER_RATE],
            RATE_TARGET,
            most=False,
            constant=True,
        ),
        Row("numbered commands among them", "/s", [one.commands for one in found]),
        Row("heartbeat to answer, p50", "ms", [one.p50_ms for one in found]),
        Row("heartbeat to answer, p99", "ms", [one.p99_ms for one in found]),
        Row("CPU of the master for one heartbeat", "us", [one.master_us for one in found]),
        Row("CPU of its simulated agent", "us", [one.agents_us for one in found]),
    ]
    result.notes.append(f"{chosen.agents} agents in a closed loop: all of them have a heartbeat under way all the time")
    result.details = {"agents": chosen.agents, "seconds": chosen.seconds, "command_every": COMMAND_EVERY}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
