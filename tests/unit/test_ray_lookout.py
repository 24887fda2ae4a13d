"""What the desk believes of hosts, beyond what Ray says."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_backends.ray import lookout as module
from dlrover_backends.ray import names, private, records
from dlrover_backends.ray.deletions import Deletions
from dlrover_backends.ray.desk import Desk
from dlrover_backends.ray.endings import observation
from dlrover_backends.ray.lookout import KILL_WAIT_S, Lookout
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import ORPHAN_S, Actor, Group, Host, Place, Snapshot
from dlrover_backends.ray.seating import GRACE_S
from dlrover_core.runtime.backend import Observation


class ActorUnavailableError(Exception):
    """As Ray calls it."""


def answer(error: Exception | None) -> Any:
    """What a call of Ray's has come to."""
    return SimpleNamespace(exception=lambda: error)


def test_a_raylet_that_has_ended() -> None:
    """An actor is out of reach, and its host says that nobody listens there: the node has failed, before Ray knows.

    A host that answers, whose actors all answer, or that was never reached from here, is believed in; and of a host that Ray has
    given up Ray's word counts.
    """
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.create_server(("127.0.0.1", 0)) as closed:
        port, gone = raylet.getsockname()[1], closed.getsockname()[1]
        closed.close()
        hosts = {
            "a": Host("a", "host-a", "127.0.0.1", port=gone),
            "b": Host("b", "host-b", "127.0.0.1", port=port),
            "c": Host("c", "host-c", "127.0.0.1", port=gone),
        }
        actors = {f"j-worker-{key}-0": Actor(f"id-{key}", f"j-worker-{key}-0", host_id=key) for key in hosts}
        seen = Snapshot(actors, hosts, {})
        cluster = SimpleNamespace(ended=set[str]())

        async def told() -> None:
            lookout = Lookout(cast(Any, cluster))
            assert await lookout._believed(seen) == seen
            lookout._answered("id-a", answer(ActorUnavailableError()))
            assert await lookout._believed(seen) == seen, "the host was never reached"
            for key in ("a", "b"):
                lookout._answered(f"id-{key}", answer(None))
                lookout._answered(f"id-{key}", answer(ActorUnavailableError()))
            believed = await lookout._believed(seen)
            assert cluster.ended == {"a"}
            found = {name: observation(one, believed, None, Place(), time.time()) for name, one in actors.items()}
            assert found["j-worker-a-0"].phase == "failed"
            assert found["j-worker-a-0"].reason == "NODE_DIED: the raylet of host-a has ended"
            assert {found[f"j-worker-{key}-0"].phase for key in "bc"} == {"running"}
            await lookout._believed(seen._replace(hosts={**hosts, "a": hosts["a"]._replace(alive=False)}))
            assert cluster.ended == set()

        asyncio.run(told())


def test_hosts_that_swallow_what_is_sent_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked once, however many actors are silent there, and all at the same time: none waits for another one's answer."""
    hosts = {f"h{number}": Host(f"h{number}", f"host-{number}", f"{number}", port=1) for number in range(30)}
    actors = {f"{key}-{one}": Actor(f"{key}-{one}", f"{key}-{one}", host_id=key) for key in hosts for one in "abc"}
    asked: list[str] = []

    async def connect(address: str, _: int) -> Any:
        asked.append(address)
        if len(asked) == len(hosts):
            together.set()
        await together.wait()
        if address == "7":
            raise ConnectionRefusedError
        monkeypatch.setattr(records, "PROBE_S", 0.0)  # no more is waited for
        await asyncio.Event().wait()

    async def told() -> None:
        nonlocal together
        together = asyncio.Event()
        lookout = Lookout(cast(Any, SimpleNamespace(ended=set[str]())))
        for key in actors:
            lookout._answered(key, answer(None))
            lookout._answered(key, answer(ActorUnavailableError()))
        believed = await asyncio.wait_for(lookout._believed(Snapshot(actors, hosts, {})), 30.0)
        assert [key for key, one in believed.hosts.items() if one.ended] == ["h7"]

    together = cast(Any, None)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    asyncio.run(told())
    assert sorted(asked) == sorted(one.address for one in hosts.values())


def test_an_actor_out_of_reach_is_looked_at_once() -> None:
    """What stays out of reach does not keep the desk looking all the time."""

    async def told() -> None:
        lookout = Lookout(cast(Any, SimpleNamespace(ended=set[str]())))
        woken = []
        for error in (ActorUnavailableError(), ActorUnavailableError(), None, ActorUnavailableError(), RuntimeError()):
            lookout._wake.clear()
            lookout._answered("id", answer(error))
            await asyncio.sleep(0)
            woken.append(lookout._wake.is_set())
        assert woken == [True, False, True, True, True]

    asyncio.run(told())


@pytest.mark.parametrize("slow", [False, True])
def test_an_actor_that_ray_forgot_is_killed(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place stands, and it gets no process, as after a restart of the state service. One that waits for a place stays."""
    killed: list[str] = []
    run = Run("j", "r")
    cluster = SimpleNamespace(ended=set[str](), run=run, handle=lambda _: None, kill=killed.append)
    actors = {name: Actor(f"id-{name}", name, state="PENDING_CREATION") for name in ("forgotten", "waits", "bare")}
    actors["placed"] = Actor("id-placed", "placed", state="PENDING_CREATION", host_id="a")
    states = {"forgotten": "CREATED", "waits": "PENDING", "placed": "CREATED"}
    groups = {run.group(name): Group("g", run.group(name), state) for name, state in states.items()}
    seen = Snapshot(actors, {}, groups)

    async def told() -> None:
        lookout = Lookout(cast(Any, cluster))
        lookout._places = dict.fromkeys(actors, Place(slow=slow))
        lookout._tidy(seen, set())
        lookout._tidy(seen, set())
        assert killed == []
        monkeypatch.setattr(
            "dlrover_backends.ray.lookout.SLOW_S" if slow else "dlrover_backends.ray.lookout.UNPLACED_S", -1.0
        )
        lookout._tidy(seen, set())
        assert killed == ["forgotten", "bare"], "the place of one stands, and that of the other is gone"
        lookout._tidy(seen._replace(actors={"forgotten": actors["forgotten"]._replace(state="ALIVE")}), set())
        assert "id-forgotten" not in lookout._unplaced
        dead = {"reason": "RAY_KILL", "error_message": "The actor is dead because it was killed by `ray.kill`."}
        ends = {
            name: actors[name]._replace(state="DEAD", cause={"actor_died_error_context": dead})
            for name in ("forgotten", "placed")
        }
        cluster.look, cluster.deletions = lambda *, anew: Snapshot(ends, {}, {}), SimpleNamespace(names=set[str])
        await lookout.look()
        with lookout.told(cast(Any, None)) as nodes:
            reasons = {one.name: one.reason for one in nodes}
        assert reasons["forgotten"].startswith("NOT_STARTED: Ray did not start the actor within 0 s")
        assert reasons["placed"].startswith("RAY_KILL: somebody"), "this desk has not killed that one"

    asyncio.run(told())


# ---- nodes that are to end

NODE = "j-worker-1-0"
RUN = Run("j", "r")


class Ground:
    """A cluster in which one node runs that does not end by itself. Desks come and go; ``now``: the steady clock of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.ended, self.now = RUN, set[str](), 1000.0
        self.deletions, self.seating = Deletions(RUN), None
        self.fence = SimpleNamespace(check=lambda _: None, is_removed=False)
        self.standbys: dict[str, Actor] = {}
        self.retired: set[str] = set()
        self.actors = {NODE: Actor("id", NODE, host_id="a")}
        self.groups = {RUN.group(NODE): Group("g", RUN.group(NODE), "CREATED")}
        self.killed: list[str] = []
        self.told: list[tuple[str, float]] = []
        self.store: dict[str, bytes] = {}
        monkeypatch.setattr(private, "get", self.store.get)
        monkeypatch.setattr(private, "put", lambda key, value: self.store.update({key: value}))
        monkeypatch.setattr(private, "keys", lambda prefix: [one for one in self.store if one.startswith(prefix)])
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))

    def look(self, **_: bool) -> Snapshot:
        """As `Cluster.look`."""
        hosts = {"a": Host("a", "host-a")}
        return Snapshot(dict(self.actors), hosts, dict(self.groups), dict(self.standbys), frozenset(self.retired))

    def place(self, _: str) -> Place:
        """As `Cluster.place`."""
        return Place()

    def handle(self, _: str) -> None:
        """As `Cluster.handle`."""

    def end(self, actor: Actor, grace_s: float) -> None:
        """As `Cluster.end`: the node is told, and goes on."""
        self.told.append((actor.name, grace_s))

    def sweep(self) -> None:
        """As `Cluster.sweep`."""

    def kill(self, name: str) -> None:
        """As `Cluster.kill`."""
        self.killed.append(name)

    def remove_group(self, group: Group) -> None:
        """As `Cluster.remove_group`."""
        self.groups.pop(group.name, None)

    def desk(self) -> Desk:
        """A new desk: it holds nothing."""
        return Desk(cast(Any, self), Path("unused"))

    async def killed_by(self, *lookouts: Lookout, by_s: float = 0.0) -> bool:
        """Has the node been killed ``by_s`` later, when all of these have looked?"""
        self.now += by_s
        for one in lookouts:
            await one.look()
        return bool(self.killed)


@pytest.fixture(name="ground")
def made_ground(monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A fresh one."""
    return Ground(monkeypatch)


def test_a_removal_waits_for_its_grace(ground: Ground) -> None:
    """Whoever looks, the desk that ordered it and one beside another master: the node is killed when its grace is over."""

    async def told() -> None:
        desk, follower = ground.desk(), Lookout(cast(Any, ground))
        await follower.look()
        await desk._delete(1, NODE, 60.0)
        assert ground.told == [(NODE, 60.0)]
        both = (desk._lookout, follower)
        assert not await ground.killed_by(*both)
        for _ in range(3):
            assert not await ground.killed_by(*both, by_s=20.0)
        assert not await ground.killed_by(*both, by_s=KILL_WAIT_S - 1.0)
        assert await ground.killed_by(desk._lookout, by_s=2.0)
        ground.killed.clear()
        assert await ground.killed_by(follower)

    asyncio.run(told())


def test_a_desk_that_comes_in_mid_grace(ground: Ground) -> None:
    """It reads how long the node has: it neither kills it at once nor lets it stay."""

    async def told() -> None:
        await ground.desk()._delete(1, NODE, 60.0)
        fresh = Lookout(cast(Any, ground))
        assert not await ground.killed_by(fresh, by_s=20.0)
        assert not await ground.killed_by(fresh, by_s=20.0)
        assert await ground.killed_by(fresh, by_s=60.0)

    asyncio.run(told())


def test_a_shorter_grace_holds(ground: Ground) -> None:
    """Asked again, the earlier end counts for every desk; a longer one comes too late."""

    async def told() -> None:
        desk, follower = ground.desk(), Lookout(cast(Any, ground))
        both = (desk._lookout, follower)
        await desk._delete(1, NODE, 60.0)
        assert not await ground.killed_by(*both, by_s=20.0)
        await desk._delete(2, NODE, 5.0)
        await desk._delete(2, NODE, 600.0)
        assert not await ground.killed_by(*both)
        assert not await ground.killed_by(*both, by_s=5.0 + KILL_WAIT_S - 1.0)
        assert await ground.killed_by(follower, by_s=2.0)
        ground.killed.clear()
        assert await ground.killed_by(desk._lookout)

    asyncio.run(told())


def test_a_mark_of_an_earlier_version(ground: Ground) -> None:
    """It says no grace: the node is killed a few seconds after it was seen first. A grace asked for then is written."""
    ground.store[RUN.key(names.DELETED, NODE)] = b"1"

    async def told() -> None:
        fresh = Lookout(cast(Any, ground))
        assert not await ground.killed_by(fresh)
        assert not await ground.killed_by(fresh, by_s=KILL_WAIT_S - 1.0)
        assert await ground.killed_by(fresh, by_s=2.0)

    asyncio.run(told())
    ground.deletions.mark(NODE, 30.0)
    assert (ground.deletions.names(), ground.deletions.grace_s(NODE)) == ({NODE}, 30.0)


def test_a_standby_that_is_removed_has_its_grace(ground: Ground) -> None:
    """Seen first by a desk that did not order it: its agent has as long as one that did gives it."""
    name = names.standby("j", "worker", 0)
    ground.standbys[name] = Actor("s", name)
    ground.retired.add(name)

    async def told() -> None:
        lookout = Lookout(cast(Any, ground))
        assert not await ground.killed_by(lookout)
        assert not await ground.killed_by(lookout, by_s=KILL_WAIT_S + 1.0)
        assert await ground.killed_by(lookout, by_s=GRACE_S)
        assert ground.killed == [name]

    asyncio.run(told())


def test_a_place_that_never_had_an_actor(ground: Ground) -> None:
    """A desk died between the two: whoever deletes the node gives its place back, and so does any desk that looks later."""
    ground.actors.clear()
    other = RUN.group("j-worker-2-0")
    ground.groups[other] = Group("h", other, "CREATED")

    async def told() -> None:
        await ground.desk()._delete(1, NODE, 60.0)
        assert set(ground.groups) == {other}, "nobody has deleted the other one"
        ground.deletions.mark("j-worker-2-0", 60.0)
        await Lookout(cast(Any, ground)).look()
        assert not ground.groups

    asyncio.run(told())


def test_the_place_of_a_standby_that_never_had_an_actor(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """A desk died between the two, and nobody wants that standby again: its place is given back after a moment.

    One whose actor comes late stays, and so does that of a node: its next order makes the actor.
    """
    ground.actors.clear()
    name, late = (names.standby("j", "worker", number) for number in (0, 1))
    for one in (name, late, "j-worker-2-0"):
        ground.groups[RUN.group(one)] = Group(one, RUN.group(one), "CREATED")
    monkeypatch.setattr(ground, "handle", lambda one: SimpleNamespace() if one == late else None)

    async def told() -> None:
        lookout = Lookout(cast(Any, ground))
        before = set(ground.groups)
        for _ in range(2):
            await lookout.look()
            assert set(ground.groups) == before, "its actor may come yet"
            ground.now += ORPHAN_S / 2
        ground.now += 0.1
        await lookout.look()
        assert before - set(ground.groups) == {RUN.group(name)}

    asyncio.run(told())


@pytest.mark.parametrize(("listed_s", "rest_s"), [(0.0, 40.0), (1.5, 10.0), (2.0, 1.0)])
def test_how_long_the_desk_rests(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, listed_s: float, rest_s: float
) -> None:
    """A twentieth of its time it looks; what only a list took, which the next looks do without, is no part of that."""
    rests: list[float] = []

    async def rested(bound_s: float, _: asyncio.Event) -> None:
        rests.append(bound_s)
        raise EOFError

    def look(**_: bool) -> Snapshot:
        ground.now += 2.0
        return Snapshot({}, {}, {})

    cluster = cast(Any, ground)
    cluster.tables, cluster.address, cluster.look = SimpleNamespace(listed_s=listed_s), "h:1", look
    monkeypatch.setattr(module, "any_within", rested)
    monkeypatch.setattr(module.tables, "follow", lambda *_: asyncio.sleep(0))

    async def told() -> None:
        with pytest.raises(EOFError):
            await Lookout(cluster).run()

    asyncio.run(told())
    assert rests == [rest_s]


def test_the_desk_does_not_rest_for_a_silent_host(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the host's answer, and asks the state service nothing meanwhile: drains are asked for every second."""
    rests: list[float] = []

    async def rested(bound_s: float, _: asyncio.Event) -> None:
        rests.append(bound_s)
        raise EOFError

    async def silent(_: Host) -> bool:
        ground.now += 1.0
        return False

    cluster = cast(Any, ground)
    cluster.tables, cluster.address = SimpleNamespace(listed_s=0.0), "h:1"
    cluster.look = lambda **_: Snapshot(ground.actors, {"a": Host("a", "host-a", port=1)}, ground.groups)
    monkeypatch.setattr(Host, "has_no_raylet", silent)
    monkeypatch.setattr(module, "any_within", rested)
    monkeypatch.setattr(module.tables, "follow", lambda *_: asyncio.sleep(0))

    async def told() -> None:
        lookout = Lookout(cluster)
        lookout._spoke, lookout._silent = {"id"}, {"id"}
        with pytest.raises(EOFError):
            await lookout.run()

    asyncio.run(told())
    assert (rests, ground.now) == ([module.LOOK_S], 1001.0)


def test_a_deadline_that_moves_is_told_and_time_that_passes_is_not() -> None:
    """To a later moment, and to a sooner one: a host that is drained is pre-empted."""
    before = Observation("n", "running", host="h", notice="Ray drains h", notice_us=600_000_000)
    for left_s, elapsed_s, news in (
        (590, 10, False),
        (598.5, 0.5, False),
        (30, 10, True),
        (900, 10, True),
        (0, 10, True),
        (0.000001, 700, False),
    ):
        now = before._replace(notice_us=int(left_s * 1e6))
        assert module._is_news(before, now, int(elapsed_s * 1e6)) is news, (left_s, elapsed_s)
    assert module._is_news(before._replace(notice_us=0), before, 0)
