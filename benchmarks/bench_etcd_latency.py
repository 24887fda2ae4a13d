"""How long does one decision wait for etcd, when nothing else happens?

On a real etcd of 1 member and of 3, all on loopback, one event is committed at the log port (fence, position and event in
one transaction), then the same bytes are put through the log's own client, so to the same member, and so on in turn within
one loop, who goes first drawn anew each time, with a pause before each. Of every trial the median and the worst one in a
hundred of each.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from typing import NamedTuple

import structlog
from _bench import BROKEN, Result, Row, options, quantile, say
from _etcd import EtcdError, NotMeasurable, appended, batches, cluster, prepare

from dlrover_adapters.etcd.log import EtcdLog
from dlrover_core import open_log

MEASURES = ("src/adapters/dlrover_adapters/etcd", "src/dlrover_core/kernel")

P50_TARGET, P99_TARGET = 1.3, 2.0
WARM_UP = 50


class Waits(NamedTuple):
    """Two quantiles of waiting times, in milliseconds."""

    p50: float
    p99: float


def waits(seconds: list[float]) -> Waits:
    """The quantiles of these seconds."""
    return Waits(1000 * quantile(seconds, 0.5), 1000 * quantile(seconds, 0.99))


async def pairs(url: str, count: int, pause_s: float, chance: random.Random) -> tuple[Waits, Waits]:
    """Commits and puts in turn; what each waited."""
    async with open_log(url) as log:
        assert isinstance(log, EtcdLog)
        lead, etcd = await log.lead("bench", "bench"), log.etcd
        ours, puts = list[float](), list[float]()
        clock = time.perf_counter
        for number, batch in enumerate(batches(lead.token, count + WARM_UP, size=1)):
            request = etcd.rpc.PutRequest(key=f"raw/{number:020d}".encode(), value=batch.payload)
            for commit in chance.sample((True, False), 2):
                await asyncio.sleep(pause_s)
                began = clock()
                if commit:
                    await appended(lead, (batch,))
                    ours.append(clock() - began)
                else:
                    await etcd.call("Put", request)
                    puts.append(clock() - began)
        await lead.resign()
        return waits(ours[WARM_UP:]), waits(puts[WARM_UP:])


def measure(result: Result, members: int, chosen: argparse.Namespace, chance: random.Random) -> None:
    """Trials on one cluster."""
    found = list[tuple[Waits, Waits]]()
    with cluster(members) as etcd:
        result.details["etcd"] = etcd.version
        for trial in range(chosen.trials):
            found.append(asyncio.run(pairs(etcd.url(f"t{trial}"), chosen.pairs, chosen.pause_ms / 1000, chance)))
            ours, puts = found[-1]
            say(
                f"{trial + 1}/{chosen.trials} commit p50 {ours.p50:.3f} ms, p99 {ours.p99:.3f} ms; "
                f"put p50 {puts.p50:.3f} ms, p99 {puts.p99:.3f} ms"
            )
    where = f"{members} member{'s' if members > 1 else ''}: one event committed"
    mine, raws = [one for one, _ in found], [one for _, one in found]
    result.rows += [
        Row(f"{where}, p50", "ms", [one.p50 for one in mine], [one.p50 for one in raws], P50_TARGET, "ratio"),
        Row(f"{where}, p99", "ms", [one.p99 for one in mine], [one.p99 for one in raws], P99_TARGET, "ratio"),
    ]


def main() -> int:
    """One member, then three."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--pairs", type=int, default=1000, metavar="N", help="pairs of a trial (default 1000)")
        parser.add_argument("--pause-ms", type=float, default=1.0, metavar="MS", help="before each (default 1)")

    chosen = options(__doc__, more=more)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = Result("etcd_latency", "a raw put, the same etcd and client", seed=1)
    chance = random.Random(result.seed)
    try:
        prepare()
        for members in (1, 3):
            measure(result, members, chosen, chance)
    except (NotMeasurable, EtcdError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.notes.append(
        f"etcd {result.details['etcd']}; {chosen.trials} trials of {chosen.pairs} pairs, {chosen.pause_ms:g} ms of rest each time"
    )
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
