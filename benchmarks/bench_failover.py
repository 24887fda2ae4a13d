"""The leading master dies with its host, or is told to go: when can another one decide?

A real etcd of 3 members on loopback, two ``dlrover master --log etcd://...?ttl=2``, each with its launcher, ports and state
directory as on a host of its own, and a ``dlrover-run --master`` of 2 workers that make steps. In turn:

- kill: SIGKILL of launcher and master of the side that leads;
- hand-over: SIGTERM of its launcher;
- crash: SIGKILL of its master alone, whose launcher knows that it is dead.

Measured from the signal to the first answer to a command that is sent to both sides: the answer comes when the decision is
durable. (A node that does not exist is to be drained; that is refused, and the refusal is recorded.) On the way: when
etcd dropped the dead leader's key, when the new key was there, when `LeaderStarted` was decided, when the new address was told,
and when the agent was back. Before the next blow the struck side is started again and stands by, warm. Workers started anew,
worlds formed and processes that ended are counted: there must be none.

The peer of a kill is the lease alone: a bare lease of the same length on the same etcd, renewed as often by the same
client, until the same moment; and how long its key was still there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import NamedTuple

import structlog
from _bench import A_JOB, BROKEN, Result, Row, options, say
from _etcd import Etcd, EtcdError, NotMeasurable, cluster, raw
from _jobs import clock_offset
from _masters import JOB, Pair, Side, pair

from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.keys import Keys, Leader
from dlrover_core.job.incidents import WorkerExited
from dlrover_core.job.job import LeaderStarted
from dlrover_core.job.world import WorldFormed

MEASURES = (*A_JOB, "src/adapters/dlrover_adapters/etcd", "src/dlrover_core/host")

TTL_S = 2
SLACK_S, HAND_OVER_S = 1.0, 0.2
LIMIT_S = 30.0
PUT, DELETE = 0, 1
AGAIN_S = 0.005
_numbers = itertools.count(1)


class Blow(NamedTuple):
    """What followed one signal, in seconds from it. ``lease_alone_s`` is the peer's."""

    dropped_s: float
    taken_s: float
    decided_s: float
    told_s: float
    durable_s: float
    agents_s: float
    restarts: int
    lease_alone_s: float


async def changes(etcd: Etcd, prefix: str, since: int) -> AsyncGenerator[tuple[int, bytes, float], None]:
    """What happens to a key after a revision: kind, value, and when it was heard, by CLOCK_MONOTONIC."""
    async with contextlib.aclosing(etcd.watch(prefix, since + 1)) as responses:
        async for response in responses:
            at = time.monotonic()
            for one in response.events:
                yield one.type, one.kv.value, at


class LeaseAlone:
    """A bare lease with a key, renewed four times in its life."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd, self._key = etcd, f"raw/lease-{next(_numbers)}"
        self._lease = self._revision = 0
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Grant, put, renew from now on."""
        etcd = self._etcd
        self._lease = (await etcd.call("LeaseGrant", etcd.rpc.LeaseGrantRequest(TTL=TTL_S))).ID
        put = etcd.rpc.PutRequest(key=self._key.encode(), lease=self._lease)
        self._revision = (await etcd.call("Put", put)).header.revision
        self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 4)
            await self._etcd.keep_alive(self._lease, timeout_s=TTL_S / 4)

    def stop(self) -> None:
        """Renew no more."""
        assert self._task is not None
        self._task.cancel()

    async def gone(self) -> float:
        """When its key was dropped."""
        async with contextlib.aclosing(changes(self._etcd, self._key, self._revision)) as heard:
            async for kind, _, at in heard:
                if kind == DELETE:
                    return at
        raise NotMeasurable("the watch on a bare lease ended")


class Watched(NamedTuple):
    """The leader's key: when the old one was dropped, when the new one was there, when it bore an address."""

    dropped: float
    taken: float
    told: float


async def leader_key(etcd: Etcd, url: str, since: int, gone: asyncio.Event) -> Watched:
    """Watch a change of leaders. ``gone`` is set when the old one's key is dropped."""
    dropped = taken = 0.0
    async with contextlib.aclosing(changes(etcd, Keys(parse(url).prefix, JOB).leader, since)) as heard:
        async for kind, value, at in heard:
            if kind == DELETE and not dropped:
                dropped = at
                gone.set()
            elif kind == PUT and dropped:
                taken = taken or at
                if Leader.unpacked(value).address:
                    return Watched(dropped, taken, at)
    raise NotMeasurable("the watch on the leader's key ended")


class Answered(NamedTuple):
    """Who answered a command, and when."""

    at: float
    side: Side


async def deciding(sides: Sequence[Side], gone: asyncio.Event) -> Answered:
    """The first answer to a command, sent to both sides again and again once the old leader's key is dropped."""

    async def one(side: Side) -> Answered:
        while True:
            if await side.decides():
                return Answered(time.monotonic(), side)
            await asyncio.sleep(AGAIN_S)

    await gone.wait()
    tasks = [asyncio.ensure_future(one(side)) for side in sides]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return min(task.result() for task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def agents(side: Side) -> float:
    """When the agent was back."""
    while True:
        if (await side.status()).get("agents", 0):
            return time.monotonic()
        await asyncio.sleep(AGAIN_S)


async def blow(job: Pair, etcd: Etcd, what: str) -> Blow:
    """One change of leaders."""
    struck, _, before = await job.settled()
    begun = job.workers()
    seen = await etcd.call("Range", etcd.range(Keys(parse(job.log).prefix, JOB).leader))
    alone = LeaseAlone(etcd)
    await alone.begin()
    gone = asyncio.Event()
    watching = asyncio.ensure_future(leader_key(etcd, job.log, seen.header.revision, gone))
    answered = asyncio.ensure_future(deciding(job.sides, gone))
    dropped_alone = asyncio.ensure_future(alone.gone())
    tasks = (watching, answered, dropped_alone)
    try:
        # The bare lease and the leader's are renewed at times of their own.
        await asyncio.sleep(TTL_S / 2 + TTL_S / 4 * (next(_numbers) * 0.618 % 1.0))
        offset = clock_offset()
        at = STRIKES[what](struck)
        alone.stop()
        durable, side = await asyncio.wait_for(answered, LIMIT_S)
        key = await asyncio.wait_for(watching, LIMIT_S)
        back = await asyncio.wait_for(agents(side), LIMIT_S)
        alone_s = await asyncio.wait_for(dropped_alone, LIMIT_S) - at
    except asyncio.TimeoutError as error:
        raise NotMeasurable(f"nobody decides; they said: {[side.said() for side in job.sides]}") from error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    records = await job.records(int(before["seq"]))
    decided = [one.at / 1e6 - offset for one in records if isinstance(one.event, LeaderStarted)]
    if len(decided) != 1:
        raise NotMeasurable(f"{len(decided)} leaders began")
    anew = sum(isinstance(one.event, (WorldFormed, WorkerExited)) for one in records)
    restarts = anew + sum(begun.get(rank) != when for rank, when in job.workers().items())
    if what != "crashed":
        await asyncio.to_thread(restarted, struck)
    key = Watched(*(one - at for one in key))
    return Blow(key.dropped, key.taken, decided[0] - at, key.told, durable - at, back - at, restarts, alone_s)


def restarted(side: Side) -> None:
    """Start the struck side again, when it has ended."""
    assert side.process is not None
    side.process.wait(LIMIT_S)
    side.start()


STRIKES: Mapping[str, Callable[[Side], float]] = {
    "killed": Side.kill,
    "handed over": Side.hand_over,
    "crashed": Side.kill_master,
}


async def measure(url: str, wanted: Mapping[str, int]) -> Mapping[str, list[Blow]]:
    """Kills, and the others spread among them."""
    found: dict[str, list[Blow]] = {what: [] for what in STRIKES}
    with pair(url) as job:
        async with raw(url) as etcd:
            for number in range(1, wanted["killed"] + 1):
                for what, blows in found.items():
                    if len(blows) * wanted["killed"] < number * wanted[what]:
                        blows.append(await blow(job, etcd, what))
                        say(f"{len(blows)}/{wanted[what]} {what}: {shown(blows[-1])}")
    return found


def shown(one: Blow) -> str:
    """For people, in seconds."""
    return (
        f"key dropped {one.dropped_s:.3f}, taken {one.taken_s:.3f}, decided {one.decided_s:.3f}, address told "
        f"{one.told_s:.3f}, durable {one.durable_s:.3f}, agents {one.agents_s:.3f}; {one.restarts} restarts"
    )


def rows(found: Mapping[str, list[Blow]]) -> list[Row]:
    """The table."""
    kills, again = found["killed"], "a command is durable again"
    durable, alone = [one.durable_s for one in kills], [one.lease_alone_s for one in kills]
    what = f"host of the leader killed: {again}"
    made = [
        Row(f"{what}, worst", "s", [max(durable)], [max(alone)], TTL_S + SLACK_S, exact=True, n=len(kills)),
        Row(f"{what}, p50", "s", durable, alone),
        Row(
            "host of the leader killed: from the dropped key to that",
            "s",
            [one.durable_s - one.dropped_s for one in kills],
        ),
        Row("host of the leader killed: agents are back", "s", [one.agents_s for one in kills]),
    ]
    if handed := [one.durable_s for one in found["handed over"]]:
        what = f"leader told to go: {again}"
        made.append(Row(f"{what}, worst", "s", [max(handed)], target=HAND_OVER_S, exact=True, n=len(handed)))
        made.append(Row(f"{what}, p50", "s", handed))
    if crashed := [one.durable_s for one in found["crashed"]]:
        made.append(Row(f"leader's process killed, not its launcher: {again}", "s", crashed))
    restarts = float(max(one.restarts for blows in found.values() for one in blows))
    count = sum(map(len, found.values()))
    made.append(Row("workers started anew, worlds formed, exits (worst)", "workers", [restarts], target=0.0, n=count))
    return made


def main() -> int:
    """Trials in turn."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--hand-overs", type=int, default=20, metavar="N", help="among them (default 20)")
        parser.add_argument("--crashes", type=int, default=10, metavar="N", help="among them (default 10)")

    chosen = options(__doc__, trials=50, more=more)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    result = Result("failover", "a bare lease of the same length that is not renewed, on the same etcd")
    wanted = {"killed": chosen.trials, "handed over": chosen.hand_overs, "crashed": chosen.crashes}
    try:
        with cluster(3) as etcd:
            about = f"etcd {etcd.version}, 3 members; lease {TTL_S} s"
            result.notes.append(f"{about}; members, masters and workers share the cores")
            found = asyncio.run(measure(etcd.url("failover", ttl=str(TTL_S)), wanted))
    except (NotMeasurable, EtcdError) as error:
        say(f"nothing measured: {error}")
        return BROKEN
    result.rows = rows(found)
    result.details = {what: [one._asdict() for one in blows] for what, blows in found.items()}
    return result.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
