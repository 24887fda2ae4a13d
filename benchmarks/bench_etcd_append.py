"""How many events per second are durable in etcd?

On a real etcd of 1 member and of 3, all on loopback, each in turn:

- the log port: one leader appends batches of 64 events, one after another; each returns when a majority has it on disk. The
  events are those of a real history (see `bench_replay`), packed beforehand: what is measured is the log.
- the peer, the raw limit of the same etcd: one event per put, one after another, through the log's own client.
- the engine: the senders, commands and master of `bench_commands` over this log: 64 senders, one event each, in a closed loop.
  Deciding, packing and the senders themselves are in this figure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
import time

import structlog
from _bench import BROKEN, Result, Row, options, say
from _etcd import BATCH_EVENTS, Cluster, Etcd, EtcdError, NotMeasurable, appended, batches, cluster, prepare
from _leading import leading
from bench_commands import SPEC, Trial, closed_loop, populate
from bench_commands import NotMeasurable as Refused

from dlrover_adapters.etcd.log import EtcdLog
from dlrover_core import open_log
from dlrover_core.testing.network import Network

MEASURES = (
    "src/adapters/dlrover_adapters/etcd",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)

RATIO_TARGET, RATE_TARGET = 30.0, 50_000.0
_numbers = itertools.count(1)


async def port(url: str, events: int, puts: int) -> tuple[float, float]:
    """Events per second at the log port; puts per second through the same client, so to the same member."""
    async with open_log(url) as log:
        assert isinstance(log, EtcdLog)
        lead = await log.lead("bench", "bench")
        those = list(batches(lead.token, events))
        took = await appended(lead, those)
        await lead.resign()
        return events / took, await one_by_one(log.etcd, puts)


async def one_by_one(etcd: Etcd, puts: int) -> float:
    """Puts per second."""
    payloads = [batch.payload for batch in batches(1, puts, size=1)]
    requests = [
        etcd.rpc.PutRequest(key=f"raw/{number:020d}".encode(), value=one) for number, one in enumerate(payloads)
    ]
    began = time.perf_counter()
    for request in requests:
        await etcd.call("Put", request)
    return puts / (time.perf_counter() - began)


async def engine(url: str, turns: int) -> Trial:
    """Commands per second into `Master.submit`."""
    async with open_log(url) as log, leading(SPEC, log, Network().listener("master:1")) as master:
        await populate(master.submit)
        return await closed_loop(master.submit, log, turns)


def fresh(etcd: Cluster) -> str:
    """A log of its own for each trial."""
    return etcd.url(f"t{next(_numbers)}")


def measure(result: Result, members: int, chosen: argparse.Namespace) -> None:
    """All ways in turn on one cluster."""
    ours, puts, engines = list[float](), list[float](), list[Trial]()
    with cluster(members) as etcd:
        result.details["etcd"] = etcd.version
        for trial in range(chosen.trials):
            batched, single = asyncio.run(port(fresh(etcd), chosen.events, chosen.puts))
            ours.append(batched)
            puts.append(single)
            engines.append(asyncio.run(engine(fresh(etcd), chosen.turns)))
            say(
                f"{trial + 1}/{chosen.trials} {ours[-1]:,.0f} events/s in batches, {puts[-1]:,.0f} puts/s; "
                f"engine {engines[-1].rate:,.0f}/s, p99 {engines[-1].p99_ms:.1f} ms"
            )
    where = f"{members} member{'s' if members > 1 else ''}"
    rate = f"{where}: events at the log port, batches of {BATCH_EVENTS}"
    target, of = (RATE_TARGET, "ours") if members == 1 else (RATIO_TARGET, "ratio")
    result.rows += [
        Row(rate, "/s", ours, puts, target, of, most=False),
        Row(f"{where}: commands of 64 senders, through the engine", "/s", [one.rate for one in engines], puts),
        Row(f"{where}: submit to durable reply, p99", "ms", [one.p99_ms for one in engines]),
    ]
    result.details[where] = {"engine": [one._asdict() for one in engines]}


def main() -> int:
    """Three members, then one."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--events", type=int, default=192_000, metavar="N", help="in batches (default 192000)")
        parser.add_argument("--puts", type=int, default=3000, metavar="N", help="one by one (default 3000)")
        parser.add_argument("--turns", type=int, default=1500, metavar="N", help="commands of a sender (default 1500)")

    chosen = options(__doc__, more=more)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = Result("etcd_append", "one event per put, the same etcd and client")
    try:
        prepare()
        for members in (3, 1):
            measure(result, members, chosen)
    except (NotMeasurable, Refused, EtcdError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.notes.append(
        f"etcd {result.details['etcd']}, its members, the client and the senders share the cores; nothing is compacted"
    )
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
