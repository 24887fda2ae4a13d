"""How many commands does a master take per second, and how long does each wait?

The real `Master` in this process, its real engine, the SQLite log on disk (synchronous=FULL), an in-memory listener. 64 nodes
have joined and train in one world; 64 senders, one per node, each with its numbered commands in a closed loop: an agent's
`OfferStore` and `WithdrawStore` in turn, each one event. A sender sends its next command when it has the durable reply to
the last. Measured over the whole trial, no warm-up left out: commands per second, and the time from `submit` to the reply.
Python's garbage collector is set as `dlrover master` sets it.

The peer, in turn: the same senders, commands, engine and log, but one event per SQLite transaction, as without group commit.
For the record, not measured here: dlrover 0.6.1's gRPC master was timed at 2,100 requests/s on two cores, without durability.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import structlog
from _bench import BROKEN, Result, Row, options, quantile, say
from _leading import leading

from dlrover_adapters.cli.collector import settle
from dlrover_core import GroupSpec, JobSpec, open_log
from dlrover_core.job import job, nodes, world
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import Accepted, Command, Engine, Reply
from dlrover_core.kernel.events import Origin
from dlrover_core.kernel.log import Appended, EventLog
from dlrover_core.rules.model import MODEL
from dlrover_core.testing.network import Network

MEASURES = (
    "src/adapters/dlrover_adapters/cli/collector.py",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)

SENDERS = 64
RATE_TARGET, P99_TARGET_MS = 25_000.0, 10.0
SPEC = JobSpec("bench", (GroupSpec(nodes_min=SENDERS, nodes_max=SENDERS),))

Submit = Callable[[Command, Origin], Awaitable[Reply]]


class Trial(NamedTuple):
    """One closed loop."""

    rate: float
    p50_ms: float
    p99_ms: float
    worst_ms: float


class NotMeasurable(Exception):
    """Something was refused that should not have been."""


def node(number: int) -> str:
    """The name of a sender's node."""
    return f"worker-{number}-0"


async def populate(submit: Submit) -> None:
    """Every node joins, the world forms, every node starts: 3 numbers of each sender, 4 of the first."""
    for number in range(SENDERS):
        name = node(number)
        commands: list[Command] = [nodes.ReportJoined(name, f"host-{number}", "10.0.0.1", 1)]
        commands += [world.OfferStore(name, "10.0.0.1:1")] if number == 0 else []
        for at, command in enumerate(commands, start=1):
            await expect(submit(command, Origin(name, 1, at)))
    for number in range(SENDERS):
        await expect(submit(world.ReportStarted(node(number), 1), Origin(node(number), 1, 3 if number == 0 else 2)))


async def expect(reply: Awaitable[Reply]) -> None:
    """The reply must be an acceptance."""
    found = await reply
    if not isinstance(found, Accepted):
        raise NotMeasurable(f"a command was not accepted: {found}")


def command(number: int, turn: int) -> tuple[Command, Origin]:
    """The ``turn``th command of a sender, from 0."""
    name = node(number)
    one = world.OfferStore(name, "10.0.0.1:2") if turn % 2 == 0 else world.WithdrawStore(name, "10.0.0.1:2")
    return one, Origin(name, 1, turn + (4 if number == 0 else 3))


async def closed_loop(submit: Submit, log: EventLog, turns: int) -> Trial:
    """All senders, each one command at a time."""
    waits: list[float] = []
    clock = time.perf_counter
    before = await log.head(SPEC.job)

    async def sender(number: int) -> None:
        for turn in range(turns):
            one, origin = command(number, turn)
            began = clock()
            reply = await submit(one, origin)
            waits.append(clock() - began)
            if type(reply) is not Accepted:
                raise NotMeasurable(f"a command was not accepted: {reply}")

    began = clock()
    await asyncio.gather(*(sender(number) for number in range(SENDERS)))
    took = clock() - began
    events = await log.head(SPEC.job) - before
    if events < SENDERS * turns:
        raise NotMeasurable(f"{SENDERS * turns} commands made {events} events")
    return Trial(SENDERS * turns / took, 1000 * quantile(waits, 0.5), 1000 * quantile(waits, 0.99), 1000 * max(waits))


async def with_master(folder: Path, turns: int) -> Trial:
    """One trial through `Master.submit`."""
    async with (
        open_log(f"sqlite://{folder}/log.db") as log,
        leading(SPEC, log, Network().listener("master:1")) as master,
    ):
        await populate(master.submit)
        settle()
        return await closed_loop(master.submit, log, turns)


async def one_by_one(folder: Path, turns: int) -> Trial:
    """One trial with one event per transaction: the same senders wait for their turn."""
    async with open_log(f"sqlite://{folder}/log.db") as log:
        lead = await log.lead(SPEC.job, "bench")
        engine = Engine(MODEL, CODEC, MODEL.new(), lead.token)

        turn = asyncio.Lock()  # first come, first served

        async def submit(one: Command, origin: Origin | None = None) -> Reply:
            async with turn:
                reply = engine.handle(one, time.time_ns() // 1000, origin)
                batch = engine.take()
                if batch is not None and not isinstance(await lead.append(batch), Appended):
                    raise NotMeasurable("a batch was not appended")
                return reply

        await submit(job.CreateJob("run-1", SPEC.to_json()))
        await populate(submit)
        found = await closed_loop(submit, log, turns)
        await lead.resign()
        return found


def in_folder(run: Callable[[Path, int], Awaitable[Trial]], parent: Path | None, turns: int) -> Trial:
    """One trial in a loop and a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-", dir=parent))

    async def go() -> Trial:
        return await run(folder, turns)

    try:
        return asyncio.run(go())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--turns", type=int, default=1500, metavar="N", help="commands of each sender (default 1500)"
        )
        parser.add_argument("--peer-turns", type=int, default=60, metavar="N", help="the same one by one (default 60)")
        parser.add_argument("--dir", type=Path, metavar="DIR", help="where the logs lie (default: TMPDIR)")

    chosen = options(__doc__, trials=7, more=more)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = Result("commands", "one event per SQLite transaction, the same engine and log")
    mine, single = list[Trial](), list[Trial]()
    try:
        for trial in range(chosen.trials):
            mine.append(in_folder(with_master, chosen.dir, chosen.turns))
            single.append(in_folder(one_by_one, chosen.dir, chosen.peer_turns))
            say(
                f"{trial + 1}/{chosen.trials} {mine[-1].rate:,.0f}/s, p50 {mine[-1].p50_ms:.2f} ms, "
                f"p99 {mine[-1].p99_ms:.2f} ms, worst {mine[-1].worst_ms:.1f} ms; one by one {single[-1].rate:,.0f}/s"
            )
    except NotMeasurable as error:
        say(f"nothing measured: {error}")
        return BROKEN
    rates, waits = [one.rate for one in mine], "submit to durable reply"
    p99s = [one.p99_ms for one in mine]
    result.rows = [
        Row("commands", "/s", rates, [one.rate for one in single], RATE_TARGET, most=False),
        Row(f"{waits}, p99", "ms", p99s, [one.p99_ms for one in single], P99_TARGET_MS),
        Row(f"{waits}, p50", "ms", [one.p50_ms for one in mine], [one.p50_ms for one in single]),
        Row(f"{waits}, worst", "ms", [one.worst_ms for one in mine], [one.worst_ms for one in single]),
    ]
    result.notes.append(
        f"{SENDERS} senders x {chosen.turns} commands a trial, every one an event, all on disk before its reply"
    )
    result.details = {"senders": SENDERS, "turns": chosen.turns, "logs_in": chosen.dir or tempfile.gettempdir()}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
