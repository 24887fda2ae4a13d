"""Two desks at one name, and what one that died has left: Ray's calls are stand-ins here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dlrover_backends.ray import private
from dlrover_backends.ray.desk import Desk
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import Actor, Group
from dlrover_backends.shared.asking import StaleToken
from dlrover_core.errors import LaunchRefused

pytest.importorskip("ray")
from dlrover_backends.ray import cluster  # it imports Ray
from dlrover_backends.ray.cluster import Cluster, Made, Order

RUN = Run("j", "r")
NODE = "j-worker-0-0"
ORDER = Order(NODE, {"CPU": 1.0})


class Ray:
    """A cluster's tables. Ray has one group of a name, and one living actor of a name."""

    def __init__(self) -> None:
        self.store: dict[str, bytes] = {}
        self.actors: list[Actor] = []
        self.groups: list[Group] = []
        self.removed: list[str] = []
        self.on_pause: Callable[[], None] | None = None
        """What another desk does while this one waits."""
        self.reads: list[str] = []
        """The tables that were read whole."""
        self.told: list[str] = []
        """Whose keeper was told to end."""

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """As `private.put`."""
        new = key not in self.store
        if new or overwrite:
            self.store[key] = value
        return new

    def remove(self, prefix: str) -> None:
        """As `private.remove`."""
        for key in [one for one in self.store if one.startswith(prefix)]:
            del self.store[key]

    def make_group(self, *_: object, name: str, **__: object) -> str:
        """As Ray's ``placement_group``; its id."""
        if any(one.name == name for one in self.groups):
            raise RuntimeError(f"System error: Failed to create placement group because name '{name}' already exists")
        made = Group(f"{len(self.groups) + len(self.removed):02x}", name, "CREATED")
        self.groups.append(made)
        return made.id

    def remove_group(self, group: Any) -> None:
        """As Ray's ``remove_placement_group``. An actor in the group ends."""
        key = group if isinstance(group, str) else group.id
        self.groups = [one for one in self.groups if one.id != key]
        self.actors = [one._replace(state="DEAD") if one.host_id == key else one for one in self.actors]
        self.removed.append(key)

    def make_actor(self, order: Order, _: object, group: str, __: object) -> None:
        """As `Cluster._keeper`. Where an actor is, its host's name is its group's."""
        if any(one.name == order.name and not one.is_dead for one in self.actors):
            raise ValueError(f"The name {order.name} (namespace={RUN.space}) is already taken.")
        self.actors.append(Actor(f"a{len(self.actors)}", order.name, RUN.space, host_id=group))

    def get_actor(self, name: str, **_: object) -> Any:
        """As Ray's."""
        if not any(one.name == name and not one.is_dead for one in self.actors):
            raise ValueError(f"Failed to look up actor with name '{name}'")
        handle = MagicMock()
        handle.stop.remote = lambda _: self.told.append(name)
        handle.die = lambda: self.die(name)
        return handle

    def die(self, name: str) -> None:
        """An actor ends."""
        self.actors = [one._replace(state="DEAD") if one.name == name else one for one in self.actors]

    def read(self, table: str, rows: Iterable[Any]) -> list[Any]:
        """All of a table."""
        self.reads.append(table)
        return list(rows)

    def pause(self, _: float) -> None:
        """As ``time.sleep``."""
        if self.on_pause is not None:
            self.on_pause()


@pytest.fixture(name="ray")
def made_ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """An empty one."""
    ray = Ray()
    monkeypatch.setattr(private, "get", ray.store.get)
    monkeypatch.setattr(private, "put", ray.put)
    monkeypatch.setattr(private, "keys", lambda prefix: [one for one in ray.store if one.startswith(prefix)])
    monkeypatch.setattr(private, "remove", ray.remove)
    monkeypatch.setattr(private, "actors", lambda _: ray.read("actors", ray.actors))
    monkeypatch.setattr(private, "state_of", lambda key: next((one.state for one in ray.actors if one.id == key), ""))
    monkeypatch.setattr(private, "draining", dict)
    monkeypatch.setattr(
        cluster,
        "groups",
        lambda prefix: ray.read("groups", (one for one in ray.groups if one.name.startswith(prefix))),
    )
    monkeypatch.setattr(cluster, "placement_group", ray.make_group)
    monkeypatch.setattr(cluster, "remove_placement_group", ray.remove_group)
    monkeypatch.setattr(cluster, "PlacementGroup", lambda key: key)
    monkeypatch.setattr(cluster.ray, "PlacementGroupID", bytes.hex)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: ray.read("hosts", ()))
    monkeypatch.setattr(cluster.ray, "get_actor", ray.get_actor)
    monkeypatch.setattr(cluster.ray, "kill", lambda handle, **_: handle.die())
    monkeypatch.setattr(cluster.time, "sleep", ray.pause)
    monkeypatch.setattr(Cluster, "_keeper", lambda _, *words: ray.make_actor(*words))
    return ray


@pytest.mark.parametrize("followed", [True, False])
def test_orders_read_no_table(ray: Ray, *, followed: bool) -> None:
    """However many nodes are launched and ended: the list of all actors, dead ones too, may take a second in a large cluster.

    Where nothing is published the list of hosts is read for each launch.
    """
    nodes = [f"j-worker-{rank}-0" for rank in range(40)]

    async def told() -> None:
        run = Cluster(RUN)
        desk = Desk(run, Path("unused"))
        if followed:
            run.tables.follow()
        await desk._lookout.look()
        for name in nodes:
            assert await desk._launch(1, ORDER._replace(name=name)._asdict(), {}) == ("done", None)
        begun = Counter(ray.reads)
        assert begun == {"actors": 1, "groups": 1, "hosts": 1 if followed else 1 + len(nodes)}
        for one in ray.actors:
            run.tables.changed(one)
        await desk._lookout.look(anew=False)
        lists = Counter(ray.reads)
        for name in nodes:
            await desk._delete(1, name, 5.0)
        assert Counter(ray.reads) == lists, "each of them was seen to run"
        assert ray.told == nodes
        for rank, one in enumerate(ray.actors):
            ray.actors[rank] = one._replace(state="DEAD")
            run.tables.changed(ray.actors[rank])
        await desk._lookout.look(anew=False)
        for name in nodes:
            await desk._delete(1, name, 5.0)
        lists = Counter(ray.reads) - begun
        assert (lists["actors"], lists["groups"]) == ((0, 2) if followed else (2, 2)), "one for each look"
        assert ray.groups == []

    asyncio.run(told())


def test_a_node_that_was_never_seen_is_looked_for(ray: Ray) -> None:
    """It was launched a moment ago, and is not published yet: whoever deletes it ends it."""

    async def told() -> None:
        run = Cluster(RUN)
        desk = Desk(run, Path("unused"))
        run.tables.follow()
        await desk._lookout.look()
        await desk._launch(1, ORDER._asdict(), {})
        await desk._delete(1, NODE, 5.0)

    asyncio.run(told())
    assert ray.told == [NODE]


def test_an_order_that_a_dead_desk_has_half_done(ray: Ray) -> None:
    """The actor lives, and is asked for by its name; one that is dead by now is found in the list alone."""
    assert Cluster(RUN).create(ORDER).new
    ray.store[RUN.key("place", NODE)] = b"{}"
    ray.reads.clear()
    assert Cluster(RUN).create(ORDER).new
    assert "actors" not in ray.reads
    ray.store[RUN.key("place", NODE)] = b"{}"
    ray.actors[0] = ray.actors[0]._replace(state="DEAD")
    assert Cluster(RUN).create(ORDER).new
    assert len(ray.actors) == 1, "a name is used once"


def test_a_group_that_another_desk_has_just_made(ray: Ray) -> None:
    """Its actor comes a moment later: it is left alone, and the name is used once."""
    ray.store[RUN.key("place", NODE)] = b"{}"
    other = ray.make_group(name=RUN.group(NODE))
    ray.on_pause = lambda: ray.make_actor(ORDER, None, other, None)
    assert Cluster(RUN).create(ORDER) == Made(new=True)
    assert ([one.state for one in ray.actors], ray.removed) == (["ALIVE"], [])


def test_a_group_that_a_dead_desk_has_left(ray: Ray) -> None:
    """It has no actor, and none comes: it is removed, and the node is placed anew."""
    ray.store[RUN.key("place", NODE)] = b"{}"
    left = ray.make_group(name=RUN.group(NODE))
    assert Cluster(RUN).create(ORDER).new
    assert (len(ray.actors), len(ray.groups), ray.removed) == (1, 1, [left])


def test_two_desks_that_saw_nothing(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables were read before the other one wrote: the later desk makes nothing, and takes nothing away."""
    made = Cluster(RUN).create(ORDER)
    assert made.new
    ray.store.pop(RUN.key("place", NODE))
    with monkeypatch.context() as stale:
        stale.setattr(private, "actors", lambda _: [])
        stale.setattr(cluster, "groups", lambda _: [])
        with pytest.raises(RuntimeError, match="already exists"):  # no refusal: it is asked again
            Cluster(RUN).create(ORDER)
    assert ([one.state for one in ray.actors], ray.removed) == (["ALIVE"], [])
    assert Cluster(RUN).create(ORDER).new


def test_a_name_that_was_taken_meanwhile(ray: Ray) -> None:
    """An actor of the name is there when this one is to be made: it is the node, and nothing was refused."""
    place = ray.make_group(name="elsewhere")
    one = Actor("a", NODE, RUN.space, host_id=place)

    def made_between(*words: Any) -> None:
        ray.actors.append(one)
        Ray.make_actor(ray, *words)

    ray.make_actor = made_between  # type: ignore[method-assign]
    assert Cluster(RUN).create(ORDER) == Made(new=False)
    assert (ray.actors, [group.name for group in ray.groups]) == ([one], ["elsewhere"])
    assert Cluster(RUN).create(ORDER) == Made(new=False)


def test_what_ray_refuses_is_refused(ray: Ray) -> None:
    """A `ValueError` where no actor of the name is: it stays one, and the place is given back."""

    def refuse(*_: object) -> None:
        raise ValueError("no such label")

    ray.make_actor = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such label"):
        Cluster(RUN).create(ORDER)
    assert ray.groups == []


def test_a_deposed_master_places_nothing(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another master gives orders while a folder is sent: what was ordered before is not done."""
    run = Cluster(RUN)
    monkeypatch.setattr(run, "sent", lambda _: run.fence.newest(8) and {})
    run.fence.check(7)
    with pytest.raises(StaleToken):
        run.create(ORDER, token=7)
    with pytest.raises(StaleToken):
        run.admit(7)
    run.admit(8)
    assert (ray.actors, ray.groups) == ([], [])


@pytest.mark.parametrize("when", ["sends", "makes"])
def test_a_run_that_is_removed_meanwhile(ray: Ray, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """`dlrover ray rm` beside a desk that works off orders: the one that it is at, and those that are queued, leave nothing."""
    run, make, times = Cluster(RUN), ray.make_actor, iter("1")

    def remove(*_: object) -> dict[str, Any]:
        for _ in times:
            Cluster(RUN).clear(5.0)
        return {}

    def made(*words: Any) -> None:
        remove()
        make(*words)

    if when == "sends":
        monkeypatch.setattr(run, "sent", remove)
    else:
        monkeypatch.setattr(ray, "make_actor", made)

    async def told() -> None:
        desk = Desk(run, Path("unused"))
        for name in (NODE, NODE, "j-worker-1-0"):
            with pytest.raises(LaunchRefused, match="run r of job j was removed") as refused:
                await desk._launch(1, ORDER._replace(name=name)._asdict(), {})
            assert refused.value.permanent

    asyncio.run(told())
    assert len(ray.actors) == (0 if when == "sends" else 1)
    assert [one.name for one in ray.actors if not one.is_dead] == []
    assert (ray.groups, ray.store) == ([], {})
    assert bool(ray.removed) == (when == "makes"), "no place is asked for any more"


def rm(bound_s: float = 5.0) -> None:
    """As ``dlrover ray rm``."""
    other = Cluster(RUN)
    other.fence.bar()
    other.clear(bound_s)


def test_a_desk_that_gave_no_order_before_a_removal(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows nothing of the run, and heeds its mark: nothing is made, no key is written, and no list shows the run."""
    Cluster(RUN).create(ORDER, token=1)
    ray.die(NODE)
    rm()
    monkeypatch.setattr(private, "put", lambda *_, **__: pytest.fail("a key is written"))

    async def told() -> None:
        desk = Desk(Cluster(RUN), Path("unused"))
        with pytest.raises(LaunchRefused, match="run r of job j was removed"):
            await desk._launch(1, ORDER._asdict(), {})
        desk = Desk(Cluster(RUN), Path("unused"))
        with pytest.raises(LaunchRefused, match="run r of job j was removed"):
            await desk._reserve(1, ())
        desk = Desk(Cluster(RUN), Path("unused"))
        assert await desk._delete(1, NODE, 5.0) == ("done", None)

    asyncio.run(told())
    assert (ray.groups, list(ray.store), cluster.runs()) == ([], [RUN.mark], {})
    assert all(one.is_dead for one in ray.actors)
    monkeypatch.setattr(private, "put", ray.put)
    assert Cluster(Run("j", "r2")).create(ORDER).new, "another run of the job is none of that"


@pytest.mark.parametrize("order", ["delete", "reserve"])
def test_an_order_that_was_begun_before_a_removal_leaves_no_key(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """It was admitted, and `dlrover ray rm` has removed the keys by the time that it writes."""
    run = Cluster(RUN)
    run.fence.check(1)

    def late(*_: object, **__: object) -> str:
        rm()
        ray.put(RUN.key("deleted", NODE), b"{}")
        return ""

    monkeypatch.setattr(run.deletions if order == "delete" else run, "mark" if order == "delete" else "shape", late)

    async def told() -> None:
        desk = Desk(run, Path("unused"))
        if order == "delete":
            await desk._delete(1, NODE, 5.0)
            return
        wanted = {"group": "g", "wanted": 0, "nodes_min": 0, "avoid": (), "heard": (), "shape": ""}
        await desk._reserve(1, ({**wanted, "order": {"runtime_env": {}}},))

    asyncio.run(told())
    assert list(ray.store) == [RUN.mark]


def test_launches_are_refused_before_nodes_end(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that does not end keeps the run's keys, and holds up no refusal."""
    Cluster(RUN).create(ORDER, token=1)
    before = set(ray.store)
    monkeypatch.setattr(cluster.ray, "kill", lambda *_, **__: None)
    monkeypatch.setattr(ray, "remove_group", lambda _: None)
    monkeypatch.setattr(cluster, "remove_placement_group", lambda _: None)
    with pytest.raises(cluster.StillAlive):
        rm(0.0)
    assert set(ray.store) == {*before, RUN.mark}
    with pytest.raises(LaunchRefused):
        Cluster(RUN).admit(1)


@pytest.mark.parametrize("token", [1, None])
@pytest.mark.parametrize("marked", [True, False])
def test_a_run_that_is_removed_right_before_a_group_is_asked_for(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, token: int | None, *, marked: bool
) -> None:
    """No place is asked for, of a node or of a standby (which has no token)."""
    run, times = Cluster(RUN), iter("1")
    run.fence.check(1)
    stand = run._must_stand

    def stands(name: str) -> None:
        stand(name)
        for _ in times:
            rm() if marked else Cluster(RUN).clear(5.0)

    monkeypatch.setattr(run, "_must_stand", stands)
    with pytest.raises(LaunchRefused, match="was removed"):
        run.create(ORDER, token=token)
    assert (ray.groups, ray.removed, ray.actors) == ([], [], [])
    assert list(ray.store) == ([RUN.mark] if marked else [])


def test_a_run_that_is_removed_while_an_order_ends(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key that the order writes goes, too."""
    run, put = Cluster(RUN), private.put

    def late(key: str, value: bytes, *, overwrite: bool = True) -> bool:
        if b"made" in value:
            monkeypatch.setattr(private, "put", put)
            rm()
        return put(key, value, overwrite=overwrite)

    monkeypatch.setattr(private, "put", late)
    with pytest.raises(LaunchRefused, match="was removed"):
        run.create(ORDER, token=1)
    assert (ray.groups, list(ray.store)) == ([], [RUN.mark])
    assert all(one.is_dead for one in ray.actors)


class Clock:
    """Seconds that pass when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, by_s: float) -> None:
        """As ``time.sleep``."""
        self.now += by_s


@pytest.mark.parametrize("marked", [True, False])
def test_a_second_look_has_time_of_its_own(ray: Ray, monkeypatch: pytest.MonkeyPatch, *, marked: bool) -> None:
    """The first one took all of its own. An actor seen by the second is told to end; if it does not, orders are refused."""
    run, clock = Cluster(RUN), Clock(monkeypatch)
    run.create(ORDER, token=1)
    emptied, looks = run._emptied, list[float]()

    def looked(bound_s: float) -> tuple[Any, list[Actor]]:
        looks.append(bound_s)
        if len(looks) == 1:
            ray.die(NODE)
            clock.now += bound_s
        else:
            ray.actors.append(Actor("late", "j-worker-1-0", RUN.space))
        return emptied(bound_s)

    monkeypatch.setattr(run, "_emptied", looked)
    monkeypatch.setattr(cluster.ray, "kill", lambda *_, **__: None)
    if marked:
        run.fence.bar()
    with pytest.raises(cluster.StillAlive, match="j-worker-1-0"):
        run.clear(20.0)
    assert (ray.told, looks, clock.now > 23.9) == (["j-worker-1-0"], [20.0, 4.0], True)
    assert (RUN.key("place", NODE) in ray.store) == marked
    with pytest.raises(LaunchRefused):
        Cluster(RUN).admit(1)


def test_a_dead_actor_whose_end_was_missed(ray: Ray) -> None:
    """A desk died between the actor and its last key, and then the actor: the next desk's list is older than both."""
    run = Cluster(RUN)
    run.tables.follow()
    run.look()
    Cluster(RUN).create(ORDER)
    ray.store[RUN.key("place", NODE)] = b"{}"
    ray.die(NODE)
    assert run.create(ORDER).new
    assert len(ray.actors) == 1, "a name is used once"


@pytest.mark.parametrize(("state", "stops"), [("ALIVE", True), ("PENDING_CREATION", False)])
def test_a_node_that_was_last_seen_as_pending_has_its_grace(ray: Ray, state: str, *, stops: bool) -> None:
    """That it runs is published late: it is told to end. One that is pending indeed is killed, and no table is read."""
    pending = Actor("a", NODE, RUN.space, "PENDING_CREATION")
    ray.actors = [pending._replace(state=state)]
    Cluster(RUN).end(pending, 5.0)
    assert (ray.told, ray.actors[0].is_dead) == ([NODE] if stops else [], not stops)
    assert ray.reads == []


def test_a_node_that_is_made_while_its_run_is_removed(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order has seen its key, and `dlrover ray rm` has seen no actor: whoever removes the keys looks once more."""
    run = Cluster(RUN)
    first = private.remove

    def remove(prefix: str) -> None:
        monkeypatch.setattr(private, "remove", first)
        ray.make_actor(ORDER, None, ray.make_group(name=RUN.group(NODE)), None)
        first(prefix)

    monkeypatch.setattr(private, "remove", remove)
    monkeypatch.setattr(run, "end", lambda actor, _: ray.die(actor.name))
    run.clear(5.0)
    assert [one.state for one in ray.actors] == ["DEAD"]
    assert (ray.groups, ray.store) == ([], {})


@pytest.mark.parametrize("part", ["GcsClient", "IMPLICIT_RESOURCE_PREFIX", "read_ray_address"])
def test_a_part_that_this_ray_lacks(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins a cluster is told the name of what is missing, before anything is started."""
    from ray import _raylet
    from ray._private import utils

    assert private.missing() == ""
    monkeypatch.delattr(utils if part == "read_ray_address" else _raylet, part)
    with pytest.raises(RuntimeError, match=rf"has no ray\._\w+(\.utils)?\.{part}$"):
        Cluster(RUN).connect("")


def test_a_driver_waits_for_a_state_service_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's threads ask again at once where nobody answers: each such question waits, a good one and the driver's end do not."""
    answers: list[Any] = [{"lines": ["a"]}, {"pid": None, "lines": []}, None, (b"key", {"job_id": None}), (None, None)]

    class Subscriber:
        def poll(self, timeout: float | None = None) -> Any:
            return answers.pop(0)

    class Stopped:
        def __init__(self) -> None:
            self.waits: list[int] = []

        def wait(self, timeout: float) -> None:
            assert timeout > 0
            self.waits.append(len(answers))

    stopped = Stopped()
    monkeypatch.setattr("ray._private.worker.global_worker.threads_stopped", stopped)
    monkeypatch.setattr("ray._raylet.GcsLogSubscriber", Subscriber)
    monkeypatch.setattr("ray._raylet.GcsErrorSubscriber", Subscriber)
    from ray import _raylet

    made: list[Any] = []
    monkeypatch.setattr(private, "authenticate", lambda _: None)
    monkeypatch.setattr(
        "ray.init",
        lambda **_: made.extend([_raylet.GcsLogSubscriber(), _raylet.GcsErrorSubscriber()]),  # type: ignore[attr-defined]  # compiled
    )
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="h:1"))
    Cluster(RUN).connect("h:1")
    logs, errors = made
    assert logs.poll() == {"lines": ["a"]}
    assert logs.poll() == {"pid": None, "lines": []}
    assert logs.poll() is None
    assert errors.poll(timeout=1.0) == (b"key", {"job_id": None})
    assert errors.poll() == (None, None)
    assert stopped.waits == [3, 2, 0]
    assert _raylet.GcsLogSubscriber is Subscriber, "Ray's own class is as it was"  # type: ignore[attr-defined]  # compiled
