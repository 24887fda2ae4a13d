"""The cluster's tables of actors, hosts and placement groups, as far as one run needs them.

Each of them can be read whole, which costs more the larger the cluster is, and its dead: Ray keeps 100,000 dead actors. So they
are read when the desk begins, and every `RELIST_S`; between, what the state service publishes counts.
While nothing is published, each look reads all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from dlrover_backends.ray import private
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import STATES, Actor, Group, Host

RELIST_S = 60.0
"""So long tables are kept by published changes alone: what was missed for an unknown reason is known then."""
LOOK_SHARE = 20.0
"""Reading takes at most this part of the time: in a cluster that keeps 100,000 dead actors, a list of them takes a second."""
AGAIN_S, AGAIN_MAX_S = 1.0, 30.0

log = structlog.get_logger("dlrover.desk")


class Tables(NamedTuple):
    """All that a cluster says of one run. ``actors``: with the names that Ray knows them by; ``hosts``: the whole cluster's."""

    actors: tuple[Actor, ...]
    hosts: tuple[Host, ...]
    groups: tuple[Group, ...]


class Source(NamedTuple):
    """How tables are read whole. All of it blocks, and raises whatever Ray does."""

    actors: Callable[[], Iterable[Actor]]
    hosts: Callable[[], Iterable[Host]]
    groups: Callable[[], Iterable[Group]]


class Cache:
    """The tables of one run, cached. `read` may be called in any thread, everything else in the desk's loop.

    ``run``: whose tables; ``now``: steady seconds.
    """

    def __init__(self, run: Run, source: Source, now: Callable[[], float] = time.monotonic) -> None:
        self.run, self._source, self._now = run, source, now
        self._follows, self._list_at, self._listed_s = False, 0.0, 0.0
        self._reading = threading.Lock()
        self._listed: dict[str, Actor] = {}
        self._news: dict[str, Actor] = {}
        """What was published since the last list of actors began, by the actors' ids."""
        self._hosts: tuple[Host, ...] = ()
        self._groups: tuple[Group, ...] = ()
        self._actors_old, self._hosts_old, self._groups_old = _Age(), _Age(), _Age()

    # ---- what is published

    def follow(self) -> None:
        """From now on every change is published; what came before is in the next list."""
        self._follows = True
        for one in (self._actors_old, self._hosts_old, self._groups_old):
            one.grow()

    def lose(self) -> None:
        """Nothing is published any more."""
        self._follows = False

    def changed(self, actor: Actor) -> bool:
        """An actor has changed; is it of this run?"""
        if actor.namespace != self.run.space:
            return False
        self._news[actor.id] = _further(self._news.get(actor.id), actor)
        self._groups_old.grow()
        return True

    def hosts_changed(self) -> None:
        """A host has come, or has gone."""
        self._hosts_old.grow()

    # ---- what is there

    @property
    def listed_s(self) -> float:
        """So many seconds of the last `read` went into a list that the next ones do without, for its changes are published."""
        return self._listed_s if self._follows else 0.0

    def read(self, *, anew: bool) -> Tables:
        """The tables as they are now; ``anew``: all of them are read. Blocks, and raises whatever Ray does.

        Whoever comes meanwhile waits: an older list must not take the place of a newer one.
        """
        with self._reading:
            return self._read(anew)

    def hosts(self) -> tuple[Host, ...]:
        """The cluster's hosts as they are now. Blocks, and raises whatever Ray does."""
        with self._reading:
            return self._read_hosts(anew=not self._follows)

    def _read_hosts(self, *, anew: bool) -> tuple[Host, ...]:
        if anew or self._hosts_old:
            seen = self._hosts_old.seen()
            self._hosts = tuple(self._source.hosts())
            self._hosts_old.younger(seen)
        return self._hosts

    def _read(self, anew: bool) -> Tables:
        self._listed_s = 0.0
        anew = anew or not self._follows or self._now() >= self._list_at
        if anew or self._actors_old:
            seen, began = self._actors_old.seen(), self._now()
            self._list_at = 0.0  # where this list does not come, another one has to: what was published is dropped
            self._news = {}  # Ray publishes what its table has: the list has all that was published before
            self._listed = {one.id: one for one in self._source.actors() if one.namespace == self.run.space}
            self._actors_old.younger(seen)
            self._listed_s = self._now() - began
            self._list_at = self._now() + max(RELIST_S, LOOK_SHARE * self._listed_s)
        hosts = self._read_hosts(anew=anew)
        news = dict(self._news)
        found = {**self._listed, **{key: _further(self._listed.get(key), one) for key, one in news.items()}}
        if anew or self._groups_old or not self._is_settled(found.values()):
            seen = self._groups_old.seen()
            self._groups = tuple(self._source.groups())
            self._groups_old.younger(seen)
        return Tables(tuple(found.values()), hosts, self._groups)

    def _is_settled(self, actors: Iterable[Actor]) -> bool:
        """Has each actor that lives its place, and nobody else one? Then no place changes without an actor."""
        living = [one for one in actors if not one.is_dead]
        placed = {self.run.group(one.name) for one in living}
        return all(one.state == "ALIVE" for one in living) and placed == {one.name for one in self._groups}


class _Age:
    """Whether a table may have changed since it was read: reading takes time, and it may change meanwhile."""

    def __init__(self) -> None:
        self._wanted, self._has = 1, 0

    def __bool__(self) -> bool:
        return self._has != self._wanted

    def grow(self) -> None:
        """It has changed."""
        self._wanted += 1

    def seen(self) -> int:
        """For `younger`, before reading begins."""
        return self._wanted

    def younger(self, seen: int) -> None:
        """It was read."""
        self._has = seen


def _further(known: Actor | None, told: Actor) -> Actor:
    """The later of two records of one actor: Ray publishes in order, but a list may be newer than what is published behind it."""
    return known if known is not None and STATES.index(known.state) > STATES.index(told.state) else told


async def follow(cache: Cache, address: str, woken: Callable[[], None]) -> None:
    """Keep tables by what the state service at ``address`` publishes, until cancelled; ``woken``: there is news.

    Another service, or an error, means a new list. What breaks again before anything came is tried more and more seldom, up to
    `AGAIN_MAX_S`, and said once. Where this Ray cannot do it, that is said, and tables are read each time.
    """
    fails = 0
    while True:
        try:
            async with contextlib.aclosing(private.published(address, cache.run.space)) as news:
                async for told in news:
                    if told.begins:
                        cache.follow()
                    else:  # even where nothing is published, an answer comes once a minute
                        fails = 0
                    if told.hosts:
                        cache.hosts_changed()
                    of_run = [cache.changed(one) for one in told.actors]
                    if told.begins or told.hosts or any(of_run):
                        woken()
        except private.Unpublished as error:
            log.warning(
                "changes are not published to us; the cluster's tables are read once a second", reason=str(error)
            )
            return
        except Exception as error:  # noqa: BLE001  # gRPC raises anything
            if not fails:
                log.warning("the cluster publishes nothing any more; its tables are read", error=_words(error))
            fails += 1
        finally:
            cache.lose()
        await asyncio.sleep(min(AGAIN_MAX_S, AGAIN_S * 2.0 ** min(max(0, fails - 1), 10)))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
