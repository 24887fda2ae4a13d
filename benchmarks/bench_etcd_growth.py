"""How much room does a job's log take in etcd, and does it stay bounded?

On a real etcd of one member on loopback:

- room: events of a real history (see `bench_replay`) are appended in batches of 64, of 8 and of 1, each to an etcd of its own
  that compacts nothing. Measured is by how much its database file has grown, over the events; the peer is their payload,
  without keys, without what etcd keeps beside them, without the old versions of the head.
- bounded: 64 senders make a real master decide 1,000,000 events (see `bench_commands`) over a log with ``?archive=DIR``. The
  master takes snapshots, archives and truncates; etcd compacts by itself (``--auto-compaction-retention=2s``, for this run is
  over before any usual period). The file, what is in use of it, and the keys are looked at four times a second. Bounded is:
  the file's largest size in the second half of the run is at most half above that of the first half; unbounded it doubles. The
  peer is the same run without an archive, in which nothing may be deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import structlog
from _bench import BROKEN, Result, Row, options, say
from _etcd import BATCH_EVENTS, Cluster, EtcdError, NotMeasurable, appended, batches, cluster, prepare
from _leading import leading
from bench_commands import SENDERS, SPEC, closed_loop, populate
from bench_commands import NotMeasurable as Refused

from dlrover_core import open_log
from dlrover_core.testing.network import Network

MEASURES = (
    "src/adapters/dlrover_adapters/etcd",
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs/archive.py",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime",
)

BYTES_TARGET, GROWTH_TARGET = 150.0, 1.5
COMPACTING = ("--auto-compaction-mode=periodic", "--auto-compaction-retention=2s")
LOOK_S = 0.25
SETTLE_S = 0.5  # etcd writes its file ten times a second
MIB = 2**20
ALL = base64.b64encode(b"\0").decode()


class Look(NamedTuple):
    """One look: seconds since the begin, the file, what is in use of it, keys."""

    at_s: float
    file_bytes: int
    used_bytes: int
    keys: int


def look(etcd: Cluster, began: float) -> Look:
    """What etcd says of itself."""
    said = etcd._ask(0, "maintenance/status", {})
    count = etcd._ask(0, "kv/range", {"key": ALL, "range_end": ALL, "count_only": True}).get("count", 0)
    return Look(time.monotonic() - began, int(said["dbSize"]), int(said["dbSizeInUse"]), int(count))


@contextmanager
def looking(etcd: Cluster, found: list[Look]) -> Iterator[None]:
    """Look again and again, in a thread, while the block runs."""
    over, began = threading.Event(), time.monotonic()

    def again() -> None:
        while not over.wait(LOOK_S):
            found.append(look(etcd, began))

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        found.append(look(etcd, began))


async def write(url: str, events: int, size: int) -> float:
    """Append events in batches of ``size``, and return the bytes of their payload."""
    async with open_log(url) as log:
        lead = await log.lead("bench", "bench")
        those = list(batches(lead.token, events, size=size))
        await appended(lead, those)
        await lead.resign()
        return float(sum(len(batch.payload) for batch in those))


def room(events: int, size: int) -> tuple[float, float]:
    """By how many bytes an event the file grows, and how many of them are payload."""
    with cluster(1) as etcd:
        before = look(etcd, 0.0).file_bytes
        payload = asyncio.run(write(etcd.url("growth"), events, size))
        time.sleep(SETTLE_S)
        return (look(etcd, 0.0).file_bytes - before) / events, payload / events


async def decide(url: str, turns: int) -> float:
    """Events per second of a master under load."""
    async with open_log(url) as log, leading(SPEC, log, Network().listener("master:1")) as master:
        await populate(master.submit)
        return (await closed_loop(master.submit, log, turns)).rate


def run(events: int, archived: bool) -> list[Look]:
    """Let a master decide so many events, and return the looks at etcd meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="dlb-"))
    found: list[Look] = []
    try:
        with cluster(1, *COMPACTING) as etcd:
            url = etcd.url("growth", archive=str(folder)) if archived else etcd.url("growth")
            with looking(etcd, found):
                rate = asyncio.run(decide(url, events // SENDERS))
        say(f"{'with' if archived else 'without'} an archive: {rate:,.0f} events/s; {shown(found[-1])} in the end")
        if archived and not any(folder.rglob("*.seg")):
            raise NotMeasurable("nothing was archived")
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shown(one: Look) -> str:
    """The look in words."""
    return f"file {one.file_bytes / MIB:.1f} MiB, in use {one.used_bytes / MIB:.1f} MiB, {one.keys:,} keys"


def growth(found: list[Look]) -> float:
    """The largest size in the second half of a run over that in the first."""
    half = len(found) // 2
    return max(one.file_bytes for one in found[half:]) / max(one.file_bytes for one in found[:half])


def main() -> int:
    """Measure room, then growth."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--events", type=int, default=1_000_000, metavar="N", help="of a master (default 1000000)")
        parser.add_argument("--room-events", type=int, default=320_000, metavar="N", help="in batches (default 320000)")

    chosen = options(__doc__, trials=3, more=more)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = Result("etcd_growth", "the payload alone; the same run without an archive")
    try:
        prepare()
        for size in (BATCH_EVENTS, 8, 1):
            found = [room(chosen.room_events * size // BATCH_EVENTS, size) for _ in range(chosen.trials)]
            say(f"batches of {size}: {found[-1][0]:.0f} bytes per event, {found[-1][1]:.0f} of them payload")
            target = BYTES_TARGET if size == BATCH_EVENTS else None
            what = f"database per event, batches of {size}"
            result.rows.append(Row(what, "bytes", [one for one, _ in found], [one for _, one in found], target))
        runs = [(run(chosen.events, archived=True), run(chosen.events, archived=False)) for _ in range(chosen.trials)]
    except (NotMeasurable, Refused, EtcdError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    about = f"{chosen.events:,} events of a master, truncated"

    def row(what: str, unit: str, of: Callable[[list[Look]], float], target: float | None = None) -> Row:
        return Row(f"{about}: {what}", unit, [of(kept) for kept, _ in runs], [of(grown) for _, grown in runs], target)

    result.rows += [
        row("second half's largest file over the first's", "x", growth, GROWTH_TARGET),
        row("largest file", "MiB", lambda found: max(one.file_bytes for one in found) / MIB),
        row("in use in the end", "MiB", lambda found: found[-1].used_bytes / MIB),
        row("keys in the end", "keys", lambda found: float(found[-1].keys)),
    ]
    result.notes.append(
        "pages that compaction frees are used again, and the file never shrinks: it holds the most that was ever in use"
    )
    kept, grown = runs[0]
    result.details = {"curve": [one._asdict() for one in kept], "curve_of_peer": [one._asdict() for one in grown]}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
