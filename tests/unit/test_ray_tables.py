"""What the desk keeps of the cluster's tables: lists, and what was published since."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_backends.ray import private, tables
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.private import News
from dlrover_backends.ray.records import Actor, Group, Host
from dlrover_backends.ray.tables import LOOK_SHARE, RELIST_S, Cache, Source, follow

RUN = Run("j", "r")


def actor(name: str, state: str = "ALIVE", space: str = RUN.space) -> Actor:
    """An actor of the run."""
    return Actor(f"id-{name}", name, space, state)


class Ground:
    """A cluster's tables, and how often each was read. ``now``: the steady clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actors, self.hosts, self.groups = [actor("a")], [Host("h", "host")], [Group("g", RUN.group("a"))]
        self.read: list[str] = []
        self.while_listed: Any = lambda: None
        self.cache = Cache(
            RUN,
            Source(self.listed, lambda: self.told("hosts", self.hosts), lambda: self.told("groups", self.groups)),
            lambda: self.now,
        )

    def told(self, name: str, table: Any) -> Any:
        """A table as it is now."""
        self.read.append(name)
        return list(table)

    def listed(self) -> Any:
        """The actors, and what comes while they are on their way."""
        found = self.told("actors", self.actors)
        self.while_listed()
        return found

    def states(self, *, anew: bool = False) -> dict[str, str]:
        """What is known of actors."""
        return {one.name: one.state for one in self.cache.read(anew=anew).actors}

    def reads(self) -> list[str]:
        """What was read since it was asked last."""
        found, self.read = self.read, []
        return found


ALL = ["actors", "hosts", "groups"]


def test_tables_are_read_where_nothing_is_published() -> None:
    """Every look reads all of them."""
    ground = Ground()
    for _ in range(2):
        assert ground.states() == {"a": "ALIVE"}
        assert ground.reads() == ALL
    ground.cache.follow()
    ground.states()
    ground.cache.lose()
    ground.states()
    assert ground.reads() == [*ALL, *ALL]


def test_what_is_published_counts() -> None:
    """Between two lists actors are as published, hosts are read when one comes or goes, and places while one may change."""
    ground = Ground()
    ground.cache.follow()
    ground.states()
    assert ground.reads() == ALL, "what came before is in no message"
    ground.states()
    assert ground.reads() == [], "all is settled"
    assert not ground.cache.changed(actor("a", "DEAD", "others"))
    assert ground.cache.changed(actor("a", "DEAD"))
    assert ground.states() == {"a": "DEAD"}
    assert ground.reads() == ["groups"]
    ground.states()
    assert ground.reads() == ["groups"], "the place of a dead one is about to be given back"
    ground.groups = []
    ground.states()
    ground.states()
    assert ground.reads() == ["groups"]
    ground.cache.changed(actor("b", "PENDING_CREATION"))
    for _ in range(2):
        assert ground.states() == {"a": "DEAD", "b": "PENDING_CREATION"}
    assert ground.reads() == ["groups", "groups"], "it waits for its place"
    ground.cache.changed(actor("b"))
    ground.groups = [Group("g", RUN.group("b"))]
    ground.states()
    ground.states()
    assert ground.reads() == ["groups"]
    ground.cache.hosts_changed()
    ground.states()
    assert ground.reads() == ["hosts"]


def test_a_new_list_counts_more() -> None:
    """After a while, and when something was ordered, all is read; what is published behind its time does not count."""
    ground = Ground()
    ground.cache.follow()
    ground.states()
    ground.actors = [actor("a", "DEAD"), actor("c", "PENDING_CREATION"), actor("z", space="others")]
    ground.now += RELIST_S - 1.0
    assert ground.states() == {"a": "ALIVE"}
    assert ground.states(anew=True) == {"a": "DEAD", "c": "PENDING_CREATION"}
    ground.cache.changed(actor("a"))
    assert ground.states() == {"a": "DEAD", "c": "PENDING_CREATION"}
    ground.actors = [actor("c")]
    ground.now += 2.0
    assert "id-a" in {one.id for one in ground.cache.read(anew=False).actors}
    ground.now += RELIST_S
    assert ground.states() == {"c": "ALIVE"}


def test_what_is_published_while_a_list_comes() -> None:
    """It counts beside that list, and a new subscription in between asks for another one."""
    ground = Ground()
    ground.cache.follow()
    ground.while_listed = lambda: ground.cache.changed(actor("a", "DEAD"))
    assert ground.states() == {"a": "DEAD"}
    ground.while_listed = ground.cache.follow
    ground.states(anew=True)
    ground.reads()
    ground.while_listed = lambda: None
    ground.states()
    assert ground.reads() == ["actors"], "the others were read behind it"


def test_a_list_that_fails_is_owed() -> None:
    """What was published before it may be known to nobody else."""
    ground = Ground()
    ground.cache.follow()

    def fails() -> None:
        raise ConnectionError

    ground.while_listed = fails
    with pytest.raises(ConnectionError):
        ground.states()
    ground.while_listed = lambda: None
    ground.reads()
    ground.states()
    assert ground.reads() == ALL
    # All was read and settled; the next list is asked for by an order, after a death was published.
    ground.cache.changed(actor("a", "DEAD"))
    ground.actors = [actor("a", "DEAD")]
    ground.now += 1.0
    ground.while_listed = fails
    with pytest.raises(ConnectionError):
        ground.states(anew=True)
    ground.while_listed = lambda: None
    assert ground.states() == {"a": "DEAD"}


def test_one_reads_at_a_time() -> None:
    """A list that was begun earlier does not take the place of one that somebody else has begun later."""
    ground = Ground()
    known: list[dict[str, str]] = []
    other = threading.Thread(target=lambda: known.append(ground.states(anew=True)))

    def meanwhile() -> None:
        ground.while_listed = lambda: None
        ground.actors = [actor("a", "DEAD")]
        other.start()
        other.join(0.1)  # it waits for us

    ground.cache.follow()
    ground.while_listed = meanwhile
    assert ground.states() == {"a": "ALIVE"}
    other.join(30.0)
    assert known == [{"a": "DEAD"}]
    assert ground.states() == {"a": "DEAD"}


def test_what_a_list_takes() -> None:
    """It is told apart from the rest while its changes are published, and then the next list is put off for it."""
    ground = Ground()

    def takes() -> None:
        ground.now += RELIST_S

    ground.while_listed = takes
    ground.states()
    assert ground.cache.listed_s == 0.0, "the next look reads one, too"
    ground.cache.follow()
    ground.states()
    assert ground.cache.listed_s == RELIST_S
    ground.reads()
    ground.now += LOOK_SHARE * RELIST_S - 1.0
    ground.states()
    assert (ground.reads(), ground.cache.listed_s) == ([], 0.0)
    ground.now += 1.0
    ground.states()
    assert ground.reads() == ALL


# ---- following


class Service:
    """A state service that publishes what it is given; each entry is one subscription's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lives: tuple[object, ...]) -> None:
        self.lives, self.ground, self.woken, self.times = list(lives), Ground(), 0, 0
        self.enough = asyncio.Event()
        self.known: list[dict[str, str]] = []
        monkeypatch.setattr(private, "published", self.published)
        monkeypatch.setattr(tables, "AGAIN_S", 0.0)

    async def published(self, address: str, prefix: str) -> AsyncGenerator[News, None]:
        """As `private.published`; at the end of its last life nothing comes any more."""
        assert (address, prefix) == ("h:1", RUN.space)
        for told in self.lives.pop(0):
            if isinstance(told, Exception):
                raise told
            assert isinstance(told, News)
            yield told
        if not self.lives:
            await asyncio.Event().wait()

    def wake(self) -> None:
        """As the lookout's."""
        self.woken += 1
        self.known.append(self.ground.states())
        if self.woken == self.times:
            self.enough.set()

    async def told(self, times: int) -> None:
        """Follow until it has woken so often."""
        self.times = times
        tasks = [
            asyncio.ensure_future(one) for one in (follow(self.ground.cache, "h:1", self.wake), self.enough.wait())
        ]
        done, _ = await asyncio.wait(tasks, timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
        assert done
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_following(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes for what is the run's or a host's, and for nothing else."""
    begins, dead = News(begins=True), News(actors=(actor("a", "DEAD"),))
    others = (News(), News(actors=(actor("x", space="others"),)))
    service = Service(monkeypatch, (begins, *others, dead, *others, News(hosts=True)))
    asyncio.run(service.told(3))
    assert service.known == [{"a": "ALIVE"}, {"a": "DEAD"}, {"a": "DEAD"}]
    assert service.ground.reads() == [*ALL, "groups", "hosts", "groups"]
    service.ground.states()
    assert service.ground.reads() == ALL, "when nobody follows"


@pytest.mark.parametrize("error", [private.Gap("another state service publishes"), ConnectionError("away")])
def test_another_service(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whatever breaks a subscription, the next one begins with a list."""
    begins = News(begins=True)
    service = Service(monkeypatch, (begins, error), (error,), (begins, News(actors=(actor("a", "DEAD"),))))
    asyncio.run(service.told(3))
    assert service.known == [{"a": "ALIVE"}, {"a": "ALIVE"}, {"a": "DEAD"}]
    assert service.ground.reads() == [*ALL, *ALL, "groups"]


def test_a_subscription_that_breaks_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins well each time: that is said once, and tried more and more seldom, until something has come."""
    broken, news = (News(begins=True), ConnectionError("reset")), News()
    service = Service(
        monkeypatch, *[broken] * 7, (News(begins=True), news, ConnectionError("away")), (News(begins=True),)
    )
    monkeypatch.setattr(tables, "AGAIN_S", 1.0)
    waits: list[float] = []

    async def sleep(bound_s: float) -> None:
        waits.append(bound_s)

    monkeypatch.setattr(tables, "asyncio", SimpleNamespace(sleep=sleep))
    asyncio.run(service.told(9))
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0]
    assert capsys.readouterr().out.count("publishes nothing any more") == 2


def test_a_ray_that_publishes_nothing_to_us(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is said once, with the reason, and tables are read."""
    service = Service(monkeypatch, (private.Unpublished("No module named 'grpc'"),), ())
    asyncio.run(service.told(1))
    said = capsys.readouterr().out
    assert said.count("once a second") == 1
    assert "No module named 'grpc'" in said
    assert (service.woken, len(service.lives)) == (0, 1)
    service.ground.states()
    service.ground.states()
    assert service.ground.reads() == [*ALL, *ALL]
