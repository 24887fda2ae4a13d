"""Warm nodes on Ray: which actor a node is, how many standbys are kept, and which of them a node becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import pytest
from ray_store import Store

from dlrover_backends.ray import names, private
from dlrover_backends.ray.client import RayBackend
from dlrover_backends.ray.endings import observation
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import Actor, Host, Place, Snapshot
from dlrover_backends.ray.seating import Seating
from dlrover_backends.ray.standbys import (
    APART_S,
    CROWD_S,
    CROWDED_S,
    DEAF_S,
    FAIL_S,
    UNHEARD_S,
    Reserve,
    Standbys,
    apart,
    seat_of,
)
from dlrover_backends.ray.warm import Warm, shape_of
from dlrover_core import BackendContext
from dlrover_core.runtime.backend import SUSPENDED, GroupSize, Observation, Wanted
from dlrover_core.runtime.backends import MASTERS, NODE, SEAT, STANDBY
from dlrover_core.testing.backend_stand import make_launch

RUN = Run("j", "r")
FIRST, SECOND = names.standby("j", "worker", 0), names.standby("j", "worker", 1)
SHAPE = "a-shape"


@pytest.fixture(name="store")
def made_store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty one."""
    store = Store()
    monkeypatch.setattr(private, "get", store.get)
    monkeypatch.setattr(private, "put", store.put)
    return store


# ---- which actor a node is


def test_names_of_standbys() -> None:
    """No node is called as a standby is, whatever its group is called."""
    assert [names.number_of(one) for one in (FIRST, SECOND)] == [0, 1]
    assert all(map(names.is_standby, (FIRST, SECOND)))
    nodes = ("j-worker-0-1", "j-standby-0-1", "j-a-standby-0-1", "j-standby-0")
    assert not any(names.is_standby(one) for one in nodes[:3])


def test_a_decision_stands(store: Store) -> None:
    """Whoever asks again, the next master too, hears what was decided; a node without standbys has an actor of its own."""
    assert Seating(RUN).decide("n-0-1", [FIRST]) == FIRST
    assert Seating(RUN).decide("n-0-1", [SECOND]) == FIRST
    assert Seating(RUN).decide("n-1-1", []) == ""
    assert Seating(RUN).decide("n-1-1", [SECOND]) == ""
    assert [Seating(RUN).seat_of(one) for one in ("n-0-1", "n-1-1", "n-2-1")] == [FIRST, "", ""]
    assert [Seating(RUN).taker(one) for one in (FIRST, SECOND)] == ["n-0-1", None]
    assert store


def test_a_standby_is_one_node(store: Store) -> None:
    """Two nodes that are to be the same standby: the later one is another, or has an actor of its own."""
    one, other = Seating(RUN), Seating(RUN)
    assert one.decide("n-0-1", [FIRST, SECOND]) == FIRST
    assert other.decide("n-1-1", [FIRST, SECOND]) == SECOND
    assert other.decide("n-2-1", [FIRST, SECOND]) == ""
    assert not one.retire(FIRST)
    assert store


def test_two_masters_decide_at_once(store: Store) -> None:
    """The one that writes second does what the first has written, also where it meant another standby."""

    def before() -> None:
        assert Seating(RUN).decide("n-0-1", [SECOND]) == SECOND

    store.on_put = before
    assert Seating(RUN).decide("n-0-1", [FIRST]) == SECOND
    assert Seating(RUN).taker(FIRST) is None
    assert Seating(RUN).decide("n-1-1", [FIRST]) == FIRST


def test_a_removed_standby_is_no_node(store: Store) -> None:
    """A standby that is removed at the moment when a node is to be it stays removed, and the node is decided anew."""
    assert Seating(RUN).retire(FIRST)
    assert Seating(RUN).retire(FIRST)
    assert Seating(RUN).decide("n-0-1", [FIRST, SECOND]) == SECOND
    assert Seating(RUN).taker(FIRST) == ""
    assert store


# ---- what a standby is


def context() -> BackendContext:
    """A run."""
    return BackendContext("j", "r", ("m:1",), "t", command=("x",), args="resources=CPU%3D1")


def sizes(standby: int, memory_mib: int = 0) -> Wanted:
    """A group that wants so many."""
    return Wanted((GroupSize("worker", "", 2, 4, standby=standby, memory_mib=memory_mib),))


def test_what_fits_a_node() -> None:
    """Nodes of a group have one shape, whatever they are called and avoid; nodes with more memory have another one."""
    backend = RayBackend(context())
    plain = backend._order(make_launch(0, 1))
    again = backend._order(make_launch(3, 2)._replace(avoid=("a",)))
    more = backend._order(make_launch(0, 1)._replace(memory_mib=512))
    assert shape_of(plain, "worker") == shape_of(again, "worker") != shape_of(more, "worker")
    backend._warm.sized(sizes(1), 3)
    [told] = backend._warm.reserves()
    assert told["shape"] == shape_of(plain, "worker")
    env = told["order"]["plan"]["env"]
    assert (env[STANDBY], NODE in env, SEAT in env) == ("worker", False, False)
    backend._warm.sized(sizes(1, 512), 3)
    assert backend._warm.reserves()[0]["shape"] == shape_of(more, "worker")


def test_what_fits_after_a_failover() -> None:
    """Each master names itself first: the next leader's nodes have the shape of the standbys that the last one made."""
    first, second = (
        RayBackend(replace(context(), masters=masters)) for masters in (("a:1", "b:1"), ("b:1", "a:1", "c:1"))
    )
    orders = [one._order(make_launch(0, 1)) for one in (first, second)]
    assert [one["plan"]["env"][MASTERS] for one in orders] == ["a:1,b:1", "b:1,a:1,c:1"]
    assert shape_of(orders[0], "worker") == shape_of(orders[1], "worker")
    second._warm.sized(sizes(1), 1)
    [told] = second._warm.reserves()
    assert told["shape"] == shape_of(orders[0], "worker")
    assert told["order"]["plan"]["env"][MASTERS] == "b:1,a:1,c:1"  # what standbys that are made now are told


def test_who_may_be_a_standby() -> None:
    """The place of a dead node alone is a standby's, in a group that has them; a suspended job wants none."""
    backend = RayBackend(context())
    warm: Warm = backend._warm
    again = make_launch(0, 1)
    assert warm.fit(again, {}) == {}
    warm.sized(sizes(0), 1)
    assert warm.fit(again, {}) == {}
    warm.sized(sizes(1), 1)
    warm.heard(("b", "a"))
    assert warm.fit(make_launch(0, 0), {}) == {}
    fit = warm.fit(again._replace(avoid=("host-a",)), backend._order(again))
    assert (fit["group"], fit["heard"]) == ("worker", ("a", "b"))
    [told] = warm.reserves()
    assert (told["wanted"], told["nodes_min"], told["avoid"], told["heard"]) == (1, 2, ("host-a",), ("a", "b"))
    warm.sized(sizes(1)._replace(state=SUSPENDED), 1)
    assert warm.reserves() == ()


def test_the_desk_hears_of_standbys() -> None:
    """Whenever the leader says who answers the desk is told, and an error is no end; a job without standbys asks nothing."""
    asked: list[Any] = []
    heard = asyncio.Event()

    async def call(*words: Any) -> None:
        asked.append(words)
        heard.set()
        if len(asked) == 1:
            raise RuntimeError("away")

    async def told() -> None:
        warm = Warm(RayBackend(context())._order, call)
        running = asyncio.ensure_future(warm.run())
        warm.sized(sizes(0), 1)
        warm.heard(())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asked
        warm.sized(sizes(1), 7)
        for _ in range(2):
            heard.clear()
            warm.heard(("s",))
            await asyncio.wait_for(heard.wait(), 10.0)
        assert [one[:2] for one in asked] == [("reserve", 7)] * 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(told())


# ---- how many are kept


class Ground:
    """A cluster of two hosts, and what the desk sees of it; nodes run on ``a``."""

    def __init__(self) -> None:
        self.now, self.run, self.seating = 1000.0, RUN, Seating(RUN)
        self.hosts = {one: Host(one, f"host-{one}", has={"CPU": 4.0}) for one in "ab"}
        self.standbys: dict[str, Actor] = {}
        self.nodes = {f"j-worker-{one}-0": Observation(f"j-worker-{one}-0", "running") for one in range(2)}
        self.left: dict[str, dict[str, float]] = {"a": {"CPU": 4.0}, "b": {"CPU": 4.0}}
        self.places: dict[str, Place] = {}
        self.ended: list[str] = []
        self.without: list[set[str]] = []
        self.looks = 0
        self.kept = Standbys(cast(Any, self), cast(Any, self), lambda: self.now)

    # what the cluster does

    def create(self, order: Any, without: Collection[str]) -> Any:
        """As `Cluster.create`: the actor runs at once."""
        assert order.name not in self.standbys
        self.without.append(set(without))
        self.places[order.name] = Place(order.wants, order.avoid, order.group, order.shape)
        assert order.plan["env"][SEAT] == order.name
        host = next((one for one in "ab" if one not in without), "")
        self.standbys[order.name] = Actor(order.name, order.name, host_id=host)
        return cast(Any, type("Made", (), {"new": True}))

    def free(self) -> Any:
        """As `Cluster.free`."""
        return self.left

    def end(self, actor: Actor, _: float) -> None:
        """As `Cluster.end`."""
        self.ended.append(actor.name)
        self.standbys[actor.name] = actor._replace(state="DEAD")

    # what the lookout sees

    @property
    def has_looked(self) -> bool:
        """As `Lookout.has_looked`."""
        return self.looks > 0

    @property
    def seen(self) -> Snapshot:
        """As `Lookout.seen`."""
        if not self.has_looked:
            return Snapshot({}, {}, {})
        takers = {name: self.seating.taker(name) for name in self.standbys}
        here = {name: one for name, one in self.standbys.items() if not takers[name]}
        nodes = {node: self.standbys[name]._replace(name=node, seat=name) for name, node in takers.items() if node}
        nodes["j-worker-0-0"] = Actor("n", "j-worker-0-0", host_id="a")
        return Snapshot(nodes, self.hosts, {}, here, frozenset(one for one in here if takers[one] == ""))

    def place(self, name: str) -> Place:
        """As `Lookout.place`."""
        return self.places.get(name, Place())

    async def look(self) -> None:
        """As `Lookout.look`: everything is seen."""
        self.looks += 1

    def ends(self, *_: object) -> None:
        """As `Lookout.ends`."""

    # what a test does

    def level(self, count: int = 1, by_s: float = 0.0, **more: Any) -> list[str]:
        """The master says what it wants, ``by_s`` later; the standbys that are free then, and live."""
        self.now += by_s
        order = {"name": "x", "wants": {"CPU": 1.0}, "plan": {"env": {}}}
        told = Reserve(
            **{
                "group": "worker",
                "wanted": count,
                "nodes_min": 2,
                "avoid": (),
                "heard": (),
                "shape": SHAPE,
                "order": order,
                **more,
            }
        )
        asyncio.run(self.kept.level([told] if count >= 0 else []))
        seen = self.seen
        return [name for name, one in seen.standbys.items() if name not in seen.retired and not one.is_dead]


@pytest.fixture(name="ground")
def made_ground(store: Store) -> Ground:
    """A fresh one. Ray is imported here: it holds a loop for half a second."""
    pytest.importorskip("dlrover_backends.ray.cluster")
    assert not store
    return Ground()


def test_so_many_are_kept(ground: Ground) -> None:
    """They are made once enough nodes run and none waits; one too many goes, and all where none are wanted."""
    node = ground.nodes.pop("j-worker-1-0")
    assert ground.level() == []
    ground.nodes[node.name] = node._replace(phase="pending")
    assert ground.level() == []
    ground.nodes[node.name] = node
    assert ground.level(2) == [FIRST, SECOND]
    assert ground.level(2) == [FIRST, SECOND]
    assert ground.level(1) == [FIRST]
    assert ground.ended == [SECOND]
    assert ground.level(-1) == []
    assert ground.level(1) == [names.standby("j", "worker", 2)], "a name is used once"


def test_a_desk_that_has_just_begun(ground: Ground) -> None:
    """It looks before it makes any: a group that may have no nodes has its standby already."""
    assert ground.level(nodes_min=0) == [FIRST]
    ground.kept, ground.looks = Standbys(cast(Any, ground), cast(Any, ground), lambda: ground.now), 0
    assert ground.level(nodes_min=0) == [FIRST]
    assert ground.looks == 1


def test_many_standbys_are_looked_at_once(ground: Ground) -> None:
    """A look behind those that were made reads all actors of the cluster: one is enough for all of them."""
    ground.looks = 1
    assert len(ground.level(20)) == 20
    assert ground.looks == 2


def test_one_that_is_a_node_is_replaced_and_left_alone(ground: Ground) -> None:
    """What a node has become is no standby, and stays though none are wanted."""
    ground.level()
    assert ground.kept.fitting("worker", SHAPE, (), ()) == [FIRST]
    assert ground.seating.decide("j-worker-0-1", [FIRST]) == FIRST
    assert ground.level() == [SECOND]
    assert ground.level(0) == []
    assert ground.ended == [SECOND]


def test_which_one_a_node_becomes(ground: Ground) -> None:
    """One whose agent answers comes first, then the oldest; none that starts, ends, fits other nodes, or is on a bad host."""
    third = names.standby("j", "worker", 2)
    ground.level(3)
    ask = ground.kept.fitting
    assert ask("worker", SHAPE, (seat_of(third),), ()) == [third, FIRST, SECOND]
    assert ask("worker", "other", (), ()) == ask("ps", SHAPE, (), ()) == []
    ground.standbys[FIRST] = ground.standbys[FIRST]._replace(state="PENDING_CREATION")
    ground.standbys[SECOND] = ground.standbys[SECOND]._replace(state="DEAD")
    assert ask("worker", SHAPE, (), ()) == [third]
    host = ground.standbys[third].host_id
    assert ask("worker", SHAPE, (), (f"host-{host}",)) == []
    for wrong in ({"alive": False}, {"ended": True}, {"drain_ms": 0}):
        ground.hosts[host] = Host(host, f"host-{host}")._replace(**cast(Any, wrong))
        assert ask("worker", SHAPE, (), ()) == []


def test_they_give_way(ground: Ground) -> None:
    """A node that waits for room gets theirs after a moment, and for a while none is made."""
    ground.level()
    ground.nodes["j-worker-2-0"] = Observation("j-worker-2-0", "pending", waits="NO_RESOURCES: CPU=4 are not free")
    assert ground.level(by_s=1.0) == [FIRST]
    assert ground.level(by_s=CROWD_S + 1.0) == []
    del ground.nodes["j-worker-2-0"]
    assert ground.level(by_s=CROWDED_S - 1.0) == []
    assert ground.level(by_s=2.0) == [SECOND]


@pytest.mark.parametrize("wrong", [{"shape": "another"}, {"avoid": ("host-b",)}])
def test_one_that_is_of_no_use_is_replaced(ground: Ground, wrong: dict[str, Any]) -> None:
    """Nodes that are made otherwise, a host that is avoided: another one takes its place at once."""
    assert ground.level() == [FIRST]
    assert ground.level(**wrong) == [SECOND]


def test_one_on_a_host_that_goes_is_replaced(ground: Ground) -> None:
    """A drain takes a standby before it takes its host."""
    assert ground.level() == [FIRST]
    ground.hosts["b"] = ground.hosts["b"]._replace(drain_ms=0)
    assert ground.level() == [SECOND]
    assert ground.without[-1] == set(), "no other host is free"


def test_those_that_end_are_made_more_and_more_rarely(ground: Ground) -> None:
    """One that ends is replaced after a second, the next one after five."""
    ground.level()
    for number, wait_s in enumerate(FAIL_S[:2]):
        name = names.standby("j", "worker", number)
        ground.standbys[name] = ground.standbys[name]._replace(state="DEAD")
        assert ground.level() == []
        assert ground.level(by_s=wait_s - 0.5) == []
        assert ground.level(by_s=1.0) == [names.standby("j", "worker", number + 1)]
    assert not ground.ended


def test_one_that_nobody_hears_is_replaced(ground: Ground) -> None:
    """It runs, and no master hears its agent for minutes; one that is heard stays."""
    ground.level()
    for _ in range(3):
        assert ground.level(by_s=DEAF_S - 1.0, heard=(seat_of(FIRST),)) == [FIRST]
    assert ground.level(by_s=DEAF_S - 1.0) == [FIRST]
    ground.level(by_s=2.0)
    assert ground.ended == [FIRST]


def test_one_that_nobody_hears_becomes_no_node(ground: Ground) -> None:
    """It has run for half a minute, and no master hears its agent: an actor of its own starts sooner. Heard again, it may."""
    ask, heard = ground.kept.fitting, (seat_of(FIRST),)
    ground.level()
    ground.level()  # it is seen to run
    assert ground.level(by_s=UNHEARD_S - 1.0) == [FIRST]
    assert ask("worker", SHAPE, (), ()) == [FIRST], "it may still be starting"
    assert ground.level(by_s=2.0) == [FIRST], "it is not replaced yet"
    assert ask("worker", SHAPE, (), ()) == []
    assert ask("worker", SHAPE, heard, ()) == [FIRST]
    ground.level(heard=heard)
    assert ask("worker", SHAPE, (), ()) == [FIRST]


def test_away_from_other_nodes(ground: Ground) -> None:
    """A standby is kept away from the run's hosts where another one has room, and anywhere where none comes."""
    ground.level()
    assert ground.without == [{"a"}]
    ground.standbys[FIRST] = ground.standbys[FIRST]._replace(state="PENDING_CREATION", host_id="")
    assert ground.level() == [FIRST]
    assert ground.level(by_s=APART_S - 1.0) == [FIRST]
    assert ground.level(by_s=2.0) == [SECOND]
    assert ground.without == [{"a"}, set()]
    seen = Snapshot({}, ground.hosts, {})
    assert apart(seen, ground.left, {"CPU": 4.0}, ("host-a",))
    assert not apart(seen, ground.left, {"CPU": 4.0}, ("host-a", "host-b"))
    assert not apart(seen, ground.left, {"CPU": 5.0}, ())


def test_a_node_says_its_seat() -> None:
    """So a master that takes over names the agents that wait."""
    actor = Actor("1", "j-worker-0-1", host_id="a", seat=FIRST)
    seen = Snapshot({actor.name: actor}, {"a": Host("a", "host-a")}, {})
    node = observation(actor, seen, None, Place(), 0.0)
    assert (node.name, node.phase, node.seat) == ("j-worker-0-1", "running", seat_of(FIRST))
    assert (actor.called, actor._replace(seat="").called) == (FIRST, "j-worker-0-1")
