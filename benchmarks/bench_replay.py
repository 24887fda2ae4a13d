"""How long does a new leader need to know everything?

A history of 1,000,000 events is made once per run, through the real engine into the SQLite log, in batches of about 64
events: 64 nodes of 8 workers train, workers die of all sorts of causes, nodes vanish and are relaunched, worlds form, stores
are offered, steps are reported, masters take over. Then every trial is a fresh process (imports not counted, page cache
warm), in turn:

- everything: open the log, fold all of it by the master's own way of restoring, without a snapshot;
- snapshot: the same with a snapshot that lacks the newest 10,000 events, as many as a master ever lets it lack;
- leading: a whole master from nothing to leading (lock, token, restore, `LeaderStarted` committed), on a copy of that log;
- the peer, the floor: the same rows read with `sqlite3` and their bytes unpacked with msgpack, nothing checked, nothing folded.

The folds of everything, of snapshot and rest, and of the engine that made the history must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import structlog
from _bench import BROKEN, Result, Row, options, say
from _leading import leading

from dlrover_core import GroupSpec, JobSpec, open_log
from dlrover_core.job import incidents, job, nodes, progress, world
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Command, Engine, NotDone
from dlrover_core.kernel.events import Origin
from dlrover_core.kernel.log import Appended, EventLog, Leadership, Snapshot
from dlrover_core.kernel.state import digest
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime import restoring
from dlrover_core.testing.network import Network

MEASURES = (
    "src/dlrover_core/job",
    "src/dlrover_core/kernel",
    "src/dlrover_core/logs",
    "src/dlrover_core/rules",
    "src/dlrover_core/runtime/master.py",
    "src/dlrover_core/runtime/restoring.py",
)

NODES, NPROC = 64, 8
HOSTS = [f"host-{number}" for number in range(NODES)]
ROUNDS_MAX = 4
"""Rounds of departures and arrivals after a loss: one is enough, unless a newcomer's arrival moves somebody else."""
BATCH_EVENTS = 64
BEHIND = 10_000
FULL_TARGET_S, SNAPSHOT_TARGET_S = 4.0, 0.2
START_US = 1_700_000_000_000_000
SPEC = JobSpec(
    "bench", (GroupSpec(nodes_min=NODES, nodes_max=NODES, nproc=NPROC, relaunch_max=1_000_000),), max_restarts=1_000_000
)
DEATHS = (
    (-9, "", ""),
    (-11, "Fatal Python error: Segmentation fault", ""),
    (
        1,
        'Traceback (most recent call last):\n  File "train.py", line 88, in <module>\n',
        "RuntimeError: CUDA out of memory",
    ),
    (1, "[rank3] Connection closed by peer\n", "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed"),
    (
        134,
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "ncclInternalError: Internal check failed",
    ),
)


class NotMeasurable(Exception):
    """The history could not be made, or two folds differ."""


class Historian:
    """Makes a history through the engine."""

    def __init__(self, lead: Leadership, seed: int, events: int) -> None:
        self._engine = Engine(MODEL, CODEC, MODEL.new(), lead.token)
        self._lead, self._chance, self._events = lead, random.Random(seed), events
        self._now, self._stores = START_US, 0
        self._numbers: Counter[str] = Counter()
        self._snapped = False
        self.kinds: Counter[str] = Counter()
        self.batches = self.payload_bytes = 0

    @property
    def state(self) -> JobState:
        """The state after all events so far."""
        return self._engine.state

    async def tell(self, command: Command, sender: str = "", after_s: float = 0.01) -> None:
        """One command, a little later than the last."""
        self._now += int(after_s * 1e6 * self._chance.uniform(0.5, 1.5))
        origin = None
        if sender:
            self._numbers[sender] += 1
            origin = Origin(sender, 7, self._numbers[sender])
        reply = self._engine.handle(command, self._now, origin)
        if isinstance(reply, NotDone):
            raise NotMeasurable(f"{command} was refused: {reply.reason}")
        if len(self._engine._records) >= BATCH_EVENTS:
            await self.flush()

    async def flush(self) -> None:
        """Append the batch in the making."""
        batch = self._engine.take()
        if batch is None:
            return
        self.kinds.update(type(record.event).__name__ for record in batch.records)
        self.batches += 1
        self.payload_bytes += len(batch.payload)
        if not isinstance(await self._lead.append(batch), Appended):
            raise NotMeasurable("a batch was not appended")
        if not self._snapped and self.state.seq >= self._events - BEHIND:
            self._snapped = True
            await self._lead.snapshot(Snapshot(self.state.seq, MODEL.schema, self._engine.rebase()))

    async def write(self) -> None:
        """Make the whole history."""
        await self.tell(job.CreateJob("run-1", SPEC.to_json()))
        for node in list(self.state.nodes.nodes):
            await self._arrive(node)
        cycle = 0
        await self._train()
        while self.state.seq < self._events - 300:
            cycle += 1
            if cycle % 20 == 0:
                await self._lose_node()
            else:
                await self._lose_worker()
            if cycle % 500 == 0:
                await self.tell(job.TakeOver(f"host/{cycle}/abcdef12", "0.1.0"))
            await self._train()
        while self.state.seq < self._events:
            await self._step()
        await self.flush()

    async def _arrive(self, node: str) -> None:
        shunned = self.state.nodes.nodes[node].avoid
        host = self._chance.choice([one for one in HOSTS if one not in shunned])
        for phase in ("pending", "running"):
            await self.tell(nodes.ObserveNodes((nodes.Observed(node, phase, host=host),)), after_s=5.0)
        await self.tell(nodes.ReportJoined(node, host, "10.0.0.1", NPROC), node)
        await self._offer(node)

    async def _offer(self, node: str) -> None:
        if len(self.state.world.offers.get(node, ())) < 2:
            self._stores += 1
            await self.tell(world.OfferStore(node, f"10.0.0.1:{30_000 + self._stores % 30_000}"), node)

    async def _recover(self) -> None:
        """After a loss: survivors stop, released nodes end, planned ones arrive, until a world forms."""
        broken = self.state.world.worlds["worker"]
        for member in () if broken.active else broken.members:
            node = self.state.nodes.nodes.get(member.node)
            if node is not None and node.ready:
                step = self.state.progress.of("worker").step + 3
                await self.tell(world.ReportStopped(member.node, broken.generation, step), member.node)
        for _ in range(ROUNDS_MAX):
            if self.state.world.worlds["worker"].active:
                return
            for node in list(self.state.nodes.nodes.values()):
                if node.released:
                    await self.tell(nodes.ObserveNodes((nodes.Observed(node.node, "gone", reason="deleted"),)))
                elif not node.joined:
                    await self._arrive(node.node)
        raise NotMeasurable(f"no world at event {self.state.seq}")

    async def _train(self) -> None:
        """The new world starts and makes steps."""
        await self._recover()
        current = self.state.world.worlds["worker"]
        first = current.members[0].node
        for member in current.members:
            await self.tell(world.ReportStarted(member.node, current.generation), member.node)
        await self._offer(first)
        step = max(0, self.state.progress.of("worker").step - self._chance.randrange(50)) + 1
        await self.tell(progress.ReportFirstStep(first, current.generation, step, 1500, told=False), first, 0.5)
        for _ in range(self._chance.randrange(5, 40)):
            await self._step()

    async def _step(self) -> None:
        seen = self.state.progress.of("worker")
        ahead = seen.step + self._chance.randrange(50, 150)
        await self.tell(progress.NoteProgress("worker", seen.generation, ahead), after_s=3 * SPEC.progress_s)

    async def _lose_worker(self) -> None:
        current = self.state.world.worlds["worker"]
        member = self._chance.choice(current.members)
        code, tail, error = self._chance.choice(DEATHS)
        step = self.state.progress.of("worker").step + self._chance.randrange(100)
        rank = member.first_rank + self._chance.randrange(NPROC)
        exit_ = incidents.ReportExit(member.node, current.generation, rank, code, False, step, 900, tail, error)
        await self.tell(exit_, member.node)

    async def _lose_node(self) -> None:
        current = self.state.world.worlds["worker"]
        lost = self._chance.choice(current.members).node
        await self.tell(nodes.ObserveNodes((nodes.Observed(lost, "gone", reason="deleted"),)), after_s=60.0)


async def build(folder: Path, seed: int, events: int) -> dict[str, Any]:
    """Make the history; what is in it."""
    began = time.perf_counter()
    async with open_log(f"sqlite://{folder}/log.db") as log:
        lead = await log.lead(SPEC.job, "bench")
        historian = Historian(lead, seed, events)
        await historian.write()
        await lead.resign()
        told: dict[str, Any] = {
            "events": historian.state.seq,
            "batches": historian.batches,
            "events_per_batch": historian.state.seq / historian.batches,
            "payload_mib": historian.payload_bytes / 2**20,
            "digest": digest(historian.state),
            "kinds": dict(historian.kinds.most_common()),
        }
    took = time.perf_counter() - began
    say(
        f"{told['events']:,} events in {historian.batches:,} batches made in {took:.0f} s ({told['events'] / took:,.0f}/s)"
    )
    return told | {"made_in_s": took}


# ---- in a fresh process


async def restore(url: str, use_snapshot: bool) -> dict[str, Any]:
    """Open the log and fold it, as a master does."""
    began = time.perf_counter()
    async with open_log(url) as log:
        if not use_snapshot:
            _hide_snapshots(log)
        state = await restoring.restored(log, SPEC.job)
        return {"s": time.perf_counter() - began, "digest": digest(state), "events": state.seq}


def _hide_snapshots(log: EventLog) -> None:
    async def none(_: str) -> None:
        return None

    setattr(log, "latest_snapshot", none)


async def lead(url: str) -> dict[str, Any]:
    """A master from nothing to leading."""
    began = time.perf_counter()
    async with open_log(url) as log, leading(SPEC, log, Network().listener("master:1")) as master:
        return {"s": time.perf_counter() - began, "events": master.state.seq}


def floor(path: Path) -> dict[str, Any]:
    """Read the rows and unpack their bytes, nothing more."""
    began = time.perf_counter()
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    events = 0
    for (payload,) in db.execute("SELECT payload FROM batches ORDER BY place"):
        events += len(msgpack.unpackb(payload, use_list=False, strict_map_key=False)[5])
    db.close()
    return {"s": time.perf_counter() - began, "events": events}


def child(mode: str, folder: Path) -> int:
    """One trial; prints its result as JSON."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    url = f"sqlite://{folder}/log.db"
    if mode == "floor":
        told = floor(folder / "log.db")
    elif mode == "leading":
        told = asyncio.run(lead(url))
    else:
        told = asyncio.run(restore(url, mode == "snapshot"))
    print(json.dumps(told))
    return 0


def trial(mode: str, folder: Path) -> dict[str, Any]:
    """One trial in a process of its own; a master gets a copy to write to."""
    where = folder
    if mode == "leading":
        where = folder.with_name(folder.name + ".copy")
        shutil.copytree(folder, where)
    try:
        command = [sys.executable, __file__, "--child", mode, "--dir", str(where)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise NotMeasurable(f"{mode}: {done.stderr[-1000:]}")
        return dict(json.loads(done.stdout))
    finally:
        if where != folder:
            shutil.rmtree(where, ignore_errors=True)


def measure(result: Result, folder: Path, trials: int, seed: int, events: int) -> None:
    """Make the history, then all ways in turn."""
    history = asyncio.run(build(folder, seed, events))
    found: dict[str, list[float]] = {"everything": [], "floor": [], "snapshot": [], "leading": []}
    for number in range(trials):
        for mode, times in found.items():
            told = trial(mode, folder)
            times.append(told["s"])
            if told["events"] < history["events"] or told.get("digest", history["digest"]) != history["digest"]:
                raise NotMeasurable(f"{mode} came to another state: {told}")
        shown = ", ".join(f"{mode} {1000 * times[-1]:,.0f} ms" for mode, times in found.items())
        say(f"{number + 1}/{trials} {shown}")
    result.rows = [
        Row(f"{history['events']:,} events to state", "s", found["everything"], found["floor"], FULL_TARGET_S),
        Row(f"from a snapshot {BEHIND:,} events old", "s", found["snapshot"], target=SNAPSHOT_TARGET_S),
        Row("from nothing to leading, by that snapshot", "s", found["leading"], target=SNAPSHOT_TARGET_S),
    ]
    size = (folder / "log.db").stat().st_size
    mib = f"{history['payload_mib']:.0f} MiB of them, {size / 2**20:.0f} MiB on disk"
    result.notes.append(f"{history['events_per_batch']:.0f} events a batch, {mib}; warm cache")
    result.details = {"history": history, "on_disk_mib": size / 2**20}


def main() -> int:
    """Make the history, measure, remove it."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--events", type=int, default=1_000_000, metavar="N", help="length of the history (default 1000000)"
        )
        parser.add_argument("--seed", type=int, default=1, help="of the history (default 1)")
        parser.add_argument(
            "--dir", type=Path, metavar="DIR", help="where the log lies (default: a temporary directory)"
        )
        parser.add_argument("--child", help=argparse.SUPPRESS)

    chosen = options(__doc__, more=more)
    if chosen.child:
        return child(chosen.child, chosen.dir)
    result = Result("replay", "reading and unpacking the same bytes, nothing folded", seed=chosen.seed)
    parent = Path(tempfile.mkdtemp(prefix="dlb-", dir=chosen.dir))
    try:
        (parent / "log").mkdir()
        measure(result, parent / "log", chosen.trials, chosen.seed, chosen.events)
    except NotMeasurable as error:
        say(f"nothing measured: {error}")
        return BROKEN
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
