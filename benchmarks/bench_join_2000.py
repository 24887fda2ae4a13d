"""How long do 2,000 agents take to come into one world?

The real `Master` with the real HTTP listener in a process of its own, its log in SQLite (synchronous=FULL). Every agent has
connected and shown the token. Then the clock starts: each says Hello; welcomed, it reports that it has joined and offers a
store; when the last has joined, one world of all forms, each is told its rank, and reports that its workers have started. The
clock stops when the last of these reports is acknowledged, which is when it is on disk. The agents are simulated, in this
process (benchmarks/_agents.py). A row of its own has the connections in it too: TCP, HTTP, token, WebSocket.

Once more with 500, for which dlrover 0.6.1's master was measured on such a machine: 0.5 s, a constant, not run here. And once
more in one process over the in-memory transport, without sockets and HTTP: what the decisions alone take.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog
from _agents import Broken, Joining, Swarm, dialled, node, room_for
from _bench import BROKEN, Result, Row, options, say
from _leading import leading
from _master import started

from dlrover_adapters.cli.collector import settle
from dlrover_core import GroupSpec, JobSpec, open_log
from dlrover_core.job import nodes, world
from dlrover_core.runtime import messages
from dlrover_core.runtime.messages import Answer, Hello, Level, Welcome, numbered
from dlrover_core.runtime.transport import Connection
from dlrover_core.testing.network import Network

MEASURES = (
    "src/adapters/dlrover_adapters/cli/collector.py",
    "src/adapters/dlrover_adapters/http",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)

TARGET_S = 2.0
PEER_500_S = 0.5
GREETINGS_AT_ONCE = 500


class Trial(NamedTuple):
    """Seconds: from the first Hello to the last acknowledgement, the same with connecting, and the master's CPU."""

    join_s: float
    all_s: float
    cpu_s: float


def over_http(agents: int, folder: Path) -> Trial:
    """One trial over the real server."""
    with started(folder, agents) as master:
        used, began = master.cpu_s(), time.perf_counter()
        here = [
            one
            for first in range(0, agents, GREETINGS_AT_ONCE)
            for one in dialled(range(first, min(agents, first + GREETINGS_AT_ONCE)), master.address, master.token)
        ]
        connected = time.perf_counter()
        swarm, joining = Swarm(here), Joining(here)
        joining.greet()
        swarm.run(joining.heard)
        done = time.perf_counter()
        used = master.cpu_s() - used
        swarm.close()
    return Trial(done - connected, done - began, used)


def in_memory(agents: int, folder: Path) -> float:
    """Over the in-memory transport, everything in this process: from the first Hello to the last acknowledgement."""

    async def story() -> float:
        network = Network(delay_s=0.0)
        spec = JobSpec("bench", (GroupSpec(nodes_min=agents, nodes_max=agents),))
        async with open_log(f"sqlite://{folder}/log.db") as log, leading(spec, log, network.listener("master:1")):
            connections = [network.connect(f"host-{number}", "master:1") for number in range(agents)]
            began = time.perf_counter()
            await asyncio.gather(*(_join(number, connection) for number, connection in enumerate(connections)))
            return time.perf_counter() - began

    return asyncio.run(story())


async def _join(number: int, connection: Connection) -> None:
    """One agent's way into the world."""
    name, generation = node(number), 0
    await connection.send(messages.encode(Hello(messages.VERSION, "run-1", name, 7, 0, 0)))
    while True:
        match messages.decode(await connection.receive()):
            case Welcome():
                await connection.send(messages.encode(numbered(1, nodes.ReportJoined(name, f"host-{number}", name, 1))))
                await connection.send(messages.encode(numbered(2, world.OfferStore(name, f"{name}:1"))))
            case Level(_, (_, work, _)) if work and work[0] > generation:
                generation = work[0]
                await connection.send(messages.encode(numbered(3, world.ReportStarted(name, generation))))
            case Level():
                pass
            case Answer(answered, _, reason) if not reason:
                if answered == 3:
                    return
            case other:
                raise Broken(f"{name} was told {other}")


def in_folder(run: Callable[[int, Path], object], agents: int) -> object:
    """One trial in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    try:
        return run(agents, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--agents", type=int, default=2000, metavar="N", help="agents (default 2000)")

    chosen = options(__doc__, trials=5, more=more)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    room_for(chosen.agents)
    settle()
    result = Result(
        "join_2000", "dlrover 0.6.1's gRPC master, a constant: 500 agents in 0.5 s on such a machine, not run here"
    )
    many, few, alone = list[Trial](), list[Trial](), list[float]()
    try:
        for number in range(chosen.trials):
            many.append(in_folder(over_http, chosen.agents))  # type: ignore[arg-type]
            few.append(in_folder(over_http, 500))  # type: ignore[arg-type]
            alone.append(in_folder(in_memory, chosen.agents))  # type: ignore[arg-type]
            say(
                f"{number + 1}/{chosen.trials} {chosen.agents} agents {many[-1].join_s:.2f} s, with connecting "
                f"{many[-1].all_s:.2f} s, CPU of the master {many[-1].cpu_s:.2f} s; "
                f"500 {few[-1].join_s:.2f} s; in memory {alone[-1]:.2f} s"
            )
    except (Broken, OSError, RuntimeError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    what = f"{chosen.agents:,} agents"
    result.rows = [
        Row(f"{what}: first Hello to the last start acknowledged", "s", [one.join_s for one in many], (), TARGET_S),
        Row(f"{what}: the same with connecting", "s", [one.all_s for one in many]),
        Row(f"{what}: CPU of the master, connecting included", "s", [one.cpu_s for one in many]),
        Row(
            "500 agents: first Hello to the last start acknowledged",
            "s",
            [one.join_s for one in few],
            [PEER_500_S],
            constant=True,
        ),
        Row(f"{what}: the same in one process, without sockets", "s", alone),
    ]
    result.notes.append("every agent's three commands, and the world, are on disk before the clock stops")
    result.details = {"agents": chosen.agents}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
