"""What the desk sees of a run: the cluster's own tables, whenever their changes are published (`tables`), and once a second.

A call that an actor answers when it is ready says that its host can be reached from here; one that it answers at its end alone
fails where it is out of reach, long before Ray knows. Once a second is asked what nobody publishes: which hosts are drained, and
what other desks have deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from dlrover_backends.ray import endings, names, tables
from dlrover_backends.ray.records import ORPHAN_S, Actor, Group, Place, Snapshot
from dlrover_backends.ray.seating import GRACE_S
from dlrover_backends.shared.observers import Observer
from dlrover_core.runtime.backend import Observation
from dlrover_core.runtime.within import any_within

if TYPE_CHECKING:
    from dlrover_backends.ray.cluster import Cluster

LOOK_S = 1.0
KILL_WAIT_S = 8.0
"""So long beyond its grace a keeper may take to end; then Ray ends it."""
UNPLACED_S, SLOW_S = 90.0, 660.0
"""So long an actor whose place stands may wait for a process. Ray gives up a process that has not started after 60 s, and a
runtime environment that is not made after 600 s. What it forgot when its state service was restarted (Ray 2.60) never starts."""
NOTICE_SLACK_US = 2_000_000

log = structlog.get_logger("dlrover.desk")


class Lookout:
    """Looks at one run. Use it in one event loop; what blocks is done in threads.

    ``seen``: what was seen last; ``has_looked``: was it seen at all?
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._observers: set[Observer] = set()
        self._nodes: dict[str, Observation] = {}
        self.seen, self.has_looked = Snapshot({}, {}, {}), False
        self._places: dict[str, Place] = {}
        self._listening: set[str] = set()
        self._silent: set[str] = set()
        """Actors that were out of reach when they were asked last."""
        self._spoke: set[str] = set()
        """Actors that have answered this desk once: their hosts can be reached from here."""
        self._due: dict[str, float] = {}
        self._graces: dict[str, float] = {}
        """The graces of deleted nodes that are heeded already. Other desks' orders are read from the cluster alone."""
        self._unplaced: dict[str, float] = {}
        """When actors without a process were seen first whose place stood already, or was gone, by their ids."""
        self._bare: dict[str, float] = {}
        """When groups without an actor were seen first, by their ids."""
        self._looked_s = time.time()
        """When the newest look was. By the wall clock, because Ray dates drains by it."""
        self._probed_s = 0.0
        """So many seconds the newest look waited for hosts to answer."""
        self._given_up: dict[str, str] = {}
        """Why this desk has killed actors that Ray did not start, by their ids."""
        self._lock, self._wake = asyncio.Lock(), asyncio.Event()

    async def run(self) -> None:
        """Look until cancelled."""
        following = asyncio.ensure_future(tables.follow(self._cluster.tables, self._cluster.address, self.wake))
        try:
            while True:
                began = time.monotonic()
                try:
                    await self.look(anew=False)
                except Exception as error:  # noqa: BLE001  # Ray raises anything; while its state service is away nothing is news
                    log.warning("the cluster cannot be looked at", error=f"{type(error).__name__}: {error}")
                # A list that the next looks do without holds up no other question, such as which hosts are drained. Nor does the
                # silence of a host: the state service had nothing to do meanwhile.
                spent_s = time.monotonic() - began - self._cluster.tables.listed_s - self._probed_s
                await any_within(max(LOOK_S, tables.LOOK_SHARE * spent_s), self._wake)
                self._wake.clear()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def actor(self, name: str) -> Actor | None:
        """The node's actor as it was seen last."""
        return self.seen.actors.get(name)

    @property
    def nodes(self) -> Mapping[str, Observation]:
        """What was observed last of nodes, by their names."""
        return self._nodes

    def place(self, name: str) -> Place:
        """What a node, or a standby, was launched with, as far as it was seen."""
        return self._places.get(name, Place())

    def ends(self, name: str, grace_s: float) -> None:
        """A node was told to end: look again soon, and have it killed where it does not."""
        self._must_end(name, grace_s)
        self._wake.set()

    def wake(self) -> None:
        """Look again at once."""
        self._wake.set()

    @contextlib.contextmanager
    def told(self, observer: Observer) -> Iterator[tuple[Observation, ...]]:
        """All nodes as of now; within the block ``observer`` is told every change."""
        self._observers.add(observer)
        try:
            yield tuple(self._nodes.values())
        finally:
            self._observers.discard(observer)

    async def look(self, *, anew: bool = True) -> None:
        """Look at the cluster, and tell observers what has changed. Raises whatever Ray does.

        ``anew``: what was ordered before is seen, even if it is not published yet.
        """
        async with self._lock:
            seen, deleted = await asyncio.to_thread(self._seen, anew)
            seen = await self._believed(seen)
            wall_s = time.time()
            elapsed_us, self._looked_s = int((wall_s - self._looked_s) * 1e6), wall_s
            nodes: dict[str, Observation] = {}
            for name, actor in seen.actors.items():
                if name in deleted and actor.is_dead:
                    continue
                group = seen.groups.get(self._cluster.run.group(actor.called))
                one = endings.observation(actor, seen, group, self._places[name], wall_s)
                given_up = self._given_up.get(actor.id, "") if actor.is_dead else ""
                nodes[name] = one._replace(reason=given_up) if given_up else one
            before, self._nodes, self.seen, self.has_looked = self._nodes, nodes, seen, True
            for name, node in nodes.items():
                if name not in before or _is_news(before[name], node, elapsed_us):
                    self._tell(node)
            for name in before.keys() - nodes.keys():
                self._tell(Observation(name, "gone", host=before[name].host))
            await asyncio.to_thread(self._tidy, seen, deleted)

    def _seen(self, anew: bool) -> tuple[Snapshot, set[str]]:
        seen, deleted = self._cluster.look(anew=anew), self._cluster.deletions.names()
        for name in (*seen.actors, *seen.standbys):
            if name not in self._places:
                self._places[name] = self._cluster.place(name)
        return seen, deleted

    async def _believed(self, seen: Snapshot) -> Snapshot:
        """With the hosts whose raylet has ended: Ray believes in them until its health checks have failed, up to 15 s.

        A raylet takes its actors with it; and one that is started again has another id. A refused connection says nothing of
        a host that was never reached from here: something between may refuse it. All hosts in question are asked at once.
        """
        actors = (*seen.actors.values(), *seen.standbys.values())
        reached = {one.host_id for one in actors if one.id in self._spoke}
        silent = {one.host_id for one in actors if one.id in self._silent}
        alive = {key: host for key, host in seen.hosts.items() if host.alive}
        ended = self._cluster.ended & alive.keys()
        asked = [alive[key] for key in sorted(silent & reached & alive.keys() - ended) if alive[key].port]
        began = time.monotonic()
        for host, is_gone in zip(asked, await asyncio.gather(*(one.has_no_raylet() for one in asked)), strict=True):
            if is_gone:
                log.warning("a raylet has ended", host=host.name)
                ended.add(host.id)
        self._probed_s = time.monotonic() - began
        self._cluster.ended = ended
        return seen._replace(
            hosts={**seen.hosts, **{key: alive[key]._replace(alive=False, ended=True) for key in ended}}
        )

    def _tell(self, node: Observation) -> None:
        for observer in self._observers:
            observer.tell(node)

    def _tidy(self, seen: Snapshot, deleted: set[str]) -> None:
        """Give back the places of the dead, listen to the living, and end what was told to end and has not. Blocks."""
        now = time.monotonic()
        for name, actor in (*seen.actors.items(), *seen.standbys.items()):
            if actor.is_dead:
                self._listening.discard(actor.id)
                self._silent.discard(actor.id)
                self._spoke.discard(actor.id)
                self._due.pop(name, None)
                self._graces.pop(name, None)
                self._unplaced.pop(actor.id, None)
                group = seen.groups.get(self._cluster.run.group(actor.called))
                if group is not None:
                    self._cluster.remove_group(group)
                continue
            self._listen(actor)
            self._start_anew(name, actor, seen, now)
            if name in deleted:
                grace_s = self._cluster.deletions.grace_s(name)
                if self._graces.get(name) != grace_s:
                    self._graces[name] = grace_s
                    self._must_end(name, grace_s)
            elif name in seen.retired:
                self._due.setdefault(name, now + GRACE_S + KILL_WAIT_S)
            if now > self._due.get(name, now):
                log.warning("a keeper does not end, and is killed", node=name)
                self._cluster.kill(actor.called)

        for group in self._orphaned(seen, deleted, now):
            log.info("a place that never had an actor is given back", group=group.name)
            self._cluster.remove_group(group)

    def _orphaned(self, seen: Snapshot, deleted: set[str], now: float) -> list[Group]:
        """The groups that have no actor, of deleted names and, after `ORPHAN_S`, of standbys: a desk died in between. Blocks.

        One of a node that is not deleted is left to its next order.
        """
        called = {actor.called for actor in (*seen.actors.values(), *seen.standbys.values())}
        prefix = self._cluster.run.group("")
        bare = {name: one for group, one in seen.groups.items() if (name := group.removeprefix(prefix)) not in called}
        self._bare = {one.id: self._bare.get(one.id, now) for one in bare.values()}
        return [
            one
            for name, one in bare.items()
            if (name in deleted or (names.is_standby(name) and now - self._bare[one.id] > ORPHAN_S))
            and self._cluster.handle(name) is None
        ]

    def _must_end(self, name: str, grace_s: float) -> None:
        """From now on; what was ordered before may make it sooner, never later."""
        due = time.monotonic() + grace_s + KILL_WAIT_S
        self._due[name] = min(due, self._due.get(name, due))

    def _start_anew(self, name: str, actor: Actor, seen: Snapshot, now: float) -> None:
        """Kill an actor that Ray does not start though its place stands, or is gone: its node has failed then, and comes anew."""
        group = seen.groups.get(self._cluster.run.group(actor.called))
        waits_for_place = group is not None and group.state != "CREATED"
        if actor.state != "PENDING_CREATION" or actor.host_id or waits_for_place:
            self._unplaced.pop(actor.id, None)
            return
        waits_s = now - self._unplaced.setdefault(actor.id, now)
        if waits_s > (SLOW_S if self._places[name].slow else UNPLACED_S):
            log.warning(
                "Ray does not start an actor whose place stands or is gone, and it is killed",
                node=name,
                waits_s=round(waits_s),
            )
            self._given_up[actor.id] = endings.given_up(waits_s)
            self._cluster.kill(actor.called)

    def _listen(self, actor: Actor) -> None:
        if actor.id in self._listening:
            return
        handle = self._cluster.handle(actor.called)
        if handle is None:
            return
        self._listening.add(actor.id)
        for answer in (handle.ready.remote(), handle.run.remote()):
            answer.future().add_done_callback(functools.partial(self._answered, actor.id))

    def _answered(self, actor: str, answer: Any) -> None:
        """In a thread of Ray's: the actor is ready, or it is over, or it was out of reach and is asked again at the next look."""
        error = answer.exception()
        if error is None:
            self._spoke.add(actor)
        else:
            self._listening.discard(actor)
        again = error is not None and type(error).__name__ == "ActorUnavailableError"
        was_silent = actor in self._silent
        if again:
            self._silent.add(actor)
        else:
            self._silent.discard(actor)
        if not (again and was_silent):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake.set)


def _is_news(before: Observation, now: Observation, elapsed_us: int) -> bool:
    """Has anything changed, apart from what ``elapsed_us`` microseconds change by themselves?"""
    if before._replace(notice_us=0, age_us=0) != now._replace(notice_us=0, age_us=0):
        return True
    # The time left until a deadline shrinks by itself. A deadline that was moved is news, whether it is later now or sooner.
    expected = max(1, before.notice_us - elapsed_us) if before.notice_us else 0
    return bool(expected) != bool(now.notice_us) or abs(now.notice_us - expected) > NOTICE_SLACK_US
