"""How fast does a new leader, or anybody else, read a long log out of etcd?

1,000,000 events of a real history (see `bench_replay`) are written once per run, in batches of 64, to a real etcd of one member
on loopback. Then every trial is a fresh process (imports not counted), in turn:

- batches: all of it, decoded and checked, through the log port, as a master reads it that takes over;
- records: the same, handed out one by one, as `dlrover events` reads it;
- the peer, the floor: the same keys in ranges of a fixed size, asked for one after another by the very client that the log
  uses, and their bytes unpacked with msgpack; nothing checked, nothing made of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from typing import Any

import msgpack
import structlog
from _bench import BROKEN, Result, Row, options, say
from _etcd import BATCH_EVENTS, EtcdError, NotMeasurable, appended, batches, cluster, prepare, raw

from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.keys import Keys, end_of
from dlrover_core import open_log

MEASURES = ("src/adapters/dlrover_adapters/etcd", "src/dlrover_core/job", "src/dlrover_core/kernel")

JOB = "bench"
RATE_TARGET = 400_000.0
PAGE_KEYS = 500
CHUNK_EVENTS = 64_000
CHILD_LIMIT_S = 300


async def fill(url: str, events: int) -> None:
    """Write the history."""
    async with open_log(url) as log:
        lead = await log.lead(JOB, "bench")
        took = 0.0
        for after in range(0, events, CHUNK_EVENTS):
            took += await appended(lead, list(batches(lead.token, min(CHUNK_EVENTS, events - after), after=after)))
        await lead.resign()
    say(f"{events:,} events written in {took:.0f} s ({events / took:,.0f}/s)")


# ---- in a fresh process


async def read_batches(url: str) -> dict[str, float]:
    """Read the log by batches, as a master does that takes over."""
    async with open_log(url) as log:
        events, began = 0, time.perf_counter()
        async for batch in log.batches(JOB):
            events += len(batch.records)
        return {"s": time.perf_counter() - began, "events": events}


async def read_records(url: str) -> dict[str, float]:
    """Read the log record by record, as `dlrover events` does."""
    async with open_log(url) as log:
        events, began = 0, time.perf_counter()
        async for _ in log.read(JOB):
            events += 1
        return {"s": time.perf_counter() - began, "events": events}


async def floor(url: str) -> dict[str, float]:
    """Read the keys and unpack their bytes, nothing more."""
    keys = Keys(parse(url).prefix, JOB)
    async with raw(url) as etcd:
        events, at, end, began = 0, keys.log, end_of(keys.log), time.perf_counter()
        while True:
            page = await etcd.call("Range", etcd.range(at, end=end, limit=PAGE_KEYS))
            for one in page.kvs:
                events += len(msgpack.unpackb(one.value, use_list=False, strict_map_key=False)[5])
            if not page.more:
                return {"s": time.perf_counter() - began, "events": events}
            at = page.kvs[-1].key.decode() + "\0"


WAYS = {"batches": read_batches, "records": read_records, "floor": floor}


def child(way: str, url: str) -> int:
    """One trial; prints its result as JSON."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(_warm(url))
    print(json.dumps(asyncio.run(WAYS[way](url))))
    return 0


async def _warm(url: str) -> None:
    """Use the log once, so that its late imports are not measured."""
    async with open_log(url) as log:
        await log.head(JOB)


def trial(way: str, url: str) -> dict[str, Any]:
    """One trial in a process of its own."""
    command = [sys.executable, __file__, "--child", way, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False)
    if done.returncode != 0:
        raise NotMeasurable(f"{way}: {done.stderr[-1000:]}")
    return dict(json.loads(done.stdout))


def measure(result: Result, trials: int, events: int) -> None:
    """Write it, then all ways in turn."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with cluster(1) as etcd:
        url = etcd.url("read")
        asyncio.run(fill(url, events))
        for number in range(trials):
            for way, rates in found.items():
                told = trial(way, url)
                if told["events"] != events:
                    raise NotMeasurable(f"{way} read {told['events']:,} of {events:,} events")
                rates.append(events / told["s"])
            say(f"{number + 1}/{trials} " + ", ".join(f"{way} {rates[-1]:,.0f}/s" for way, rates in found.items()))
        result.notes.append(f"etcd {etcd.version}, batches of {BATCH_EVENTS}; the server shares the cores")
    about = f"{events:,} events read and decoded"
    result.rows = [
        Row(f"{about}, by batches", "/s", found["batches"], found["floor"], RATE_TARGET, most=False),
        Row(f"{about}, one by one", "/s", found["records"], found["floor"], RATE_TARGET, most=False),
    ]


def main() -> int:
    """Write, read, remove."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="to read (default 1000000)")
        parser.add_argument("--child", help=argparse.SUPPRESS)
        parser.add_argument("--url", help=argparse.SUPPRESS)

    chosen = options(__doc__, more=more)
    if chosen.child:
        return child(chosen.child, chosen.url)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = Result("etcd_read", f"ranges of {PAGE_KEYS} keys, unpacked, the same etcd and client")
    try:
        prepare()
        measure(result, chosen.trials, chosen.events)
    except (NotMeasurable, EtcdError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
