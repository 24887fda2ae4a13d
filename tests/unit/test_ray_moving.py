"""Masters' keepers come to the hosts that they should be on: Ray's scheduler is a stand-in here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog
from ray_store import JOB, Tables, tables

from dlrover_backends.ray import desk, masters, mastery, parting, private
from dlrover_backends.ray.masters import NotKept
from dlrover_backends.ray.mastery import SPACE, Plan
from dlrover_backends.ray.records import Actor


@pytest.fixture(name="store")
def made_store(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """An empty cluster."""
    return tables(monkeypatch)


class Scheduler:
    """Ray, as far as it places keepers: on hosts a and b, of which raylets that have just joined know themselves alone."""

    def __init__(self, store: Tables, places: list[str]) -> None:
        self._store, self._places, self.pids = store, places, iter(range(1, 100))
        self.made: list[tuple[int, str]] = []
        self.faults: list[str] = []

    def make(self, plan: Plan, number: int, host: str) -> None:
        """As `masters._make`. The next of ``faults`` is raised before it, or, if it says so, after it."""
        fault = self.faults.pop(0) if self.faults and len(self.made) >= 2 else ""
        if fault == "before":
            raise OSError(fault)
        self.made.append((number, host))
        self._place(mastery.called(plan.job, plan.run, number))
        if fault:
            raise OSError(fault)

    def kill(self, name: str) -> None:
        """As `masters._kill`."""
        self._store.actors = [one for one in self._store.actors if one.name != name]

    def _place(self, name: str) -> None:
        pid = next(self.pids)
        self._store.actors.append(Actor(f"id-{pid}", name, SPACE, host_id=self._places.pop(0), pid=pid))


def scheduler_of(store: Tables, monkeypatch: pytest.MonkeyPatch, places: list[str]) -> Scheduler:
    """Ray places keepers so, one after the other, and the job's name is claimed."""
    ray: Any = ModuleType("ray")
    ray.nodes = lambda: [{"NodeID": one, "Alive": True} for one in ("a", "b")]
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setitem(sys.modules, "ray", ray)
    scheduler = Scheduler(store, [*places])
    monkeypatch.setattr(masters, "_make", scheduler.make)
    monkeypatch.setattr(masters, "_kill", scheduler.kill)
    monkeypatch.setattr(masters, "LOOK_S", 0.0)
    monkeypatch.setattr(private, "draining", dict)
    masters.claim(JOB, "r1", "t")
    return scheduler


@pytest.mark.parametrize(
    ("places", "ends"),
    [(["b", "a"], 0), (["b", "b", "a"], 1), (["a", "a", "b"], 1), (["b", "b", "b", "b", "a"], 3)],
    ids=["as meant", "both on the second", "both on the first", "again and again"],
)
def test_masters_keepers_move_to_their_hosts(
    store: Tables, monkeypatch: pytest.MonkeyPatch, places: list[str], ends: int
) -> None:
    """Keepers that Ray has started on one host, because a raylet did not know the other one, end on two."""
    scheduler = scheduler_of(store, monkeypatch, places)
    wanted = masters.keep(Plan(JOB, "r1", (), "t", keepers=2))
    assert scheduler.made == [(0, "b"), (1, "a")], "the driver's host comes last"
    masters.settle(Plan(JOB, "r1", (), "t", keepers=2), wanted)
    assert {one.host_id for one in store.actors} == {"a", "b"}
    assert next(scheduler.pids) == 3 + ends, "a keeper that is where it should be stays"


def test_no_keeper_is_meant_for_a_host_that_is_drained(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would place it elsewhere, and it would be moved in vain. Where all are drained they are taken all the same."""
    for drained, hosts in (({"b": 1}, [(0, "a"), (1, "a")]), ({"a": 1, "b": 1}, [(0, "b"), (1, "a")])):
        scheduler = scheduler_of(store, monkeypatch, ["a", "a"])
        monkeypatch.setattr(private, "draining", lambda drained=drained: drained)
        masters.settle(plan := Plan(JOB, "r1", (), "t", keepers=2), masters.keep(plan))
        assert scheduler.made == hosts
        store.actors.clear()
        masters.release(JOB, "r1")


@pytest.mark.parametrize("faults", [["before"] * 3, ["after"]], ids=["it was not done", "it was done"])
def test_a_keeper_that_is_moved_is_made_again(
    store: Tables, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    """Ray may raise anything, before and after it has done what was asked: the keeper that was ended comes back, once."""
    scheduler = scheduler_of(store, monkeypatch, ["b", "b", "a"])
    plan = Plan(JOB, "r1", (), "t", keepers=2)
    wanted = masters.keep(plan)
    scheduler.faults = faults
    masters.settle(plan, wanted)
    assert not scheduler.faults
    assert sorted(one.host_id for one in store.actors) == ["a", "b"]
    assert [one for one, _ in scheduler.made] == [0, 1, 1]


def test_a_keeper_that_cannot_be_made_again_is_told(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that a keeper lives which was ended and could not be made again, or which Ray does not end."""
    scheduler = scheduler_of(store, monkeypatch, ["b", "b", "a"])
    plan = Plan(JOB, "r1", (), "t", keepers=2)
    wanted = masters.keep(plan)
    scheduler.faults = ["before"] * 100_000
    looks = iter(range(1_000))
    monkeypatch.setattr(masters, "time", SimpleNamespace(monotonic=lambda: float(next(looks)), sleep=lambda _: None))
    with pytest.raises(NotKept, match=r"digits#r1#1: ended .* and is not kept any more: OSError: before"):
        masters.settle(plan, wanted)
    assert [one.host_id for one in store.actors] == ["b"]
    monkeypatch.setattr(masters, "_kill", lambda _: None)
    with pytest.raises(NotKept, match=r"digits#r1#0: ended .* Ray has not ended it yet"):
        masters.settle(plan, {"digits#r1#0": "a"})
    with structlog.testing.capture_logs() as logged:
        desk._settle(plan.to_map(), {"digits#r1#0": "a"})
    assert [(one["log_level"], one["event"]) for one in logged] == [
        ("error", "masters of this job are not kept in the cluster")
    ]


@pytest.mark.parametrize("states", [["ALIVE"], ["ALIVE", "RESTARTING"], ["ALIVE", "DEAD"]])
def test_all_keepers_are_waited_for(store: Tables, monkeypatch: pytest.MonkeyPatch, states: list[str]) -> None:
    """A job of two keepers has begun when two work, not one; one that died and came back counts."""
    masters.claim(JOB, "r1", "t")
    plan = Plan(JOB, "r1", (), "t", keepers=2)
    for number, state in enumerate(states):
        store.keeper("r1", number, state)
    monkeypatch.setattr(masters, "READY_S", 0.0)
    with pytest.raises(NotKept, match=r"digits#r1#1 is (not there|RESTARTING)|cannot be kept"):
        masters.await_ready(plan)
    store.keeper("r1", 1)
    store.actors = [one for one in store.actors if one.state != "RESTARTING"]
    masters.await_ready(plan)


def test_a_keeper_takes_nothing_that_nodes_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory nor processors: a node that asks for all that a host has fits beside it. It knows its host by id."""
    asked: list[dict[str, Any]] = []
    told: list[tuple[object, ...]] = []

    def options(**more: Any) -> Any:
        asked.append(more)
        return SimpleNamespace(remote=lambda *words: told.append(words))

    ray: Any = ModuleType("ray")
    ray.method = lambda **_: lambda method: method
    ray.remote = lambda **_: lambda _: SimpleNamespace(options=options)
    strategies: Any = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda *words, **_: words
    for one in (ray, ModuleType("ray.util"), strategies):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr(private, "implicit", "node:everybody's/{}".format)
    masters._make(Plan(JOB, "r1", (), "t"), 1, "b")
    masters._make(Plan(JOB, "r1", (), "t", pinned=mastery.HEAD), 0, "b")
    masters._make(Plan(JOB, "r1", (), "t", keepers=2), 1, "b")
    wants = [{key: one.get(key) for key in ("num_cpus", "memory", "resources")} for one in asked]
    assert wants == [
        {"num_cpus": 0, "memory": None, "resources": {"node:everybody's/dlrover-masters": masters.SLIVER}},
        {"num_cpus": 0, "memory": None, "resources": {mastery.HEAD: masters.SLIVER}},
        {"num_cpus": 0, "memory": None, "resources": {"node:everybody's/dlrover-masters": masters.SLIVER}},
    ]
    assert [one[1:] for one in told] == [(1, "b", None), (0, "", None), (1, "b", masters.part)]


def test_a_keeper_is_not_moved_to_a_host_that_is_gone(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made later takes the host without another one; a host that has died meanwhile is not waited for."""
    ray: Any = ModuleType("ray")
    ray.nodes = lambda: [{"NodeID": "b", "Alive": True}, {"NodeID": "a", "Alive": True}]
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setitem(sys.modules, "ray", ray)
    scheduler = Scheduler(store, ["b"])
    monkeypatch.setattr(masters, "_make", scheduler.make)
    monkeypatch.setattr(private, "draining", dict)
    masters.claim(JOB, "r1", "t")
    store.actors.append(Actor("id-0", mastery.called(JOB, "r1", 0), SPACE, host_id="b", pid=99))
    wanted = masters.keep(Plan(JOB, "r1", (), "t", keepers=2))
    assert scheduler.made == [(1, "a")]
    ray.nodes = lambda: [{"NodeID": "b", "Alive": True}, {"NodeID": "a", "Alive": False}]
    masters.settle(Plan(JOB, "r1", (), "t", keepers=2), wanted)


# ---- keepers that come to share a host later


def keeper(number: int, host: str, state: str = "ALIVE", key: str = "") -> Actor:
    """A keeper of the run."""
    return Actor(
        key or f"id-{number}", mastery.called(JOB, "r1", number), SPACE, state, host if state == "ALIVE" else "a"
    )


@pytest.mark.parametrize(
    ("own", "keepers", "hosts", "moved"),
    [
        (0, [keeper(0, "a"), keeper(1, "b")], "ab", {}),
        (0, [keeper(0, "a"), keeper(1, "a")], "ab", {1: "b"}),
        (1, [keeper(0, "a"), keeper(1, "a")], "ab", {}),
        (0, [keeper(0, "a"), keeper(1, "a")], "a", {}),
        (0, [keeper(0, "a"), keeper(1, "b"), keeper(2, "a")], "abc", {2: "c"}),
        (0, [keeper(0, "a"), keeper(1, "a"), keeper(2, "b", "RESTARTING")], "abc", {}),
        (0, [keeper(1, "a"), keeper(2, "a")], "ab", {}),
    ],
    ids=[
        "apart",
        "together",
        "the other one moves it",
        "no other host",
        "one of three",
        "one is about to come",
        "not there",
    ],
)
def test_who_moves_whom(own: int, keepers: list[Actor], hosts: str, moved: dict[int, str]) -> None:
    """The first keeper of a host moves the others of it to hosts without any, once all have their places."""
    found = parting.moves(mastery.called(JOB, "r1", own), keepers, hosts)
    assert found == {mastery.called(JOB, "r1", one): (f"id-{one}", host) for one, host in moved.items()}


def test_keepers_that_share_a_host_are_parted(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Ray has just brought there is left alone for a while, and so is a host that is drained."""
    plan, drained = Plan(JOB, "r1", (), "t", keepers=2), {"b": 0}
    scheduler = scheduler_of(store, monkeypatch, ["b"])
    monkeypatch.setattr(private, "draining", lambda: drained)
    store.actors = [keeper(0, "a"), keeper(1, "a")]
    looks: list[set[str]] = []

    def over(bound_s: float) -> bool:
        assert bound_s == parting.LOOK_S
        looks.append({one.host_id for one in store.actors})
        match len(looks):
            case 3:
                drained.clear()
            case 4:  # it was restarted meanwhile
                store.actors = [keeper(0, "a"), keeper(1, "a", key="id-9")]
            case 6:
                monkeypatch.setattr(private, "draining", lambda: 1 / 0)  # what Ray raises is over at the next look
            case 7:
                monkeypatch.setattr(private, "draining", lambda: drained)
        return len(looks) == 9

    masters.part(plan, 0, over)
    assert looks == [{"a"}] * 5 + [{"a", "b"}] * 4
    assert scheduler.made == [(1, "b")]


class Looks:
    """A keeper's turns. ``turns``: what happens before some of them, by their numbers; then it is over."""

    def __init__(self, last: int, **turns: Any) -> None:
        self._last, self._turns, self.number = last, turns, 0

    def __call__(self, _: float) -> bool:
        """As `MastersKeeper._is_released_within`."""
        self.number += 1
        self._turns.get(f"at_{self.number}", lambda: None)()
        return self.number > self._last


def test_a_keeper_that_was_lost_while_it_was_moved(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not let it be made again in time, or its mover dies in between: another turn makes it, and says so."""
    plan = Plan(JOB, "r1", (), "t", keepers=2)
    scheduler = scheduler_of(store, monkeypatch, ["b"])
    monkeypatch.setattr(private, "draining", dict)
    store.actors = [keeper(0, "a"), keeper(1, "a")]
    scheduler.made, scheduler.faults = [(-1, ""), (-1, "")], ["before"] * 100_000
    steady = iter(range(100_000))
    monkeypatch.setattr(masters, "time", SimpleNamespace(monotonic=lambda: float(next(steady)), sleep=lambda _: None))
    left: list[list[str]] = []

    def as_before() -> None:
        scheduler.faults.clear()
        left.append([one.name for one in store.actors])

    with structlog.testing.capture_logs() as logged:
        masters.part(plan, 0, Looks(2))
        as_before()
        masters.part(plan, 0, Looks(3))  # the actor was started again, and remembers nothing
    assert left == [[mastery.called(JOB, "r1", 0)]]
    assert scheduler.made[2:] == [(1, "b")]
    assert {one.name: one.host_id for one in store.actors} == {
        mastery.called(JOB, "r1", 0): "a",
        mastery.called(JOB, "r1", 1): "b",
    }
    assert [one["event"] for one in logged] == [
        "masters' keepers may share a host, or be gone",
        "masters' keepers were gone, and are made again",
    ]


@pytest.mark.parametrize(
    ("own", "keepers", "hosts", "made"),
    [
        (0, [keeper(0, "a"), keeper(2, "b")], "abc", {1: "c"}),
        (2, [keeper(0, "a"), keeper(2, "b")], "abc", {}),
        (2, [keeper(0, "", "RESTARTING"), keeper(2, "b")], "ab", {1: "a"}),
        (0, [keeper(0, "a")], "a", {1: "a", 2: "a"}),
        (0, [keeper(0, "a"), keeper(1, "b"), keeper(2, "c")], "abc", {}),
        (0, [keeper(0, "a")], "", {}),
    ],
    ids=["to a free host", "the first one makes it", "which runs", "no other host", "none is gone", "no host stays"],
)
def test_who_makes_whom(own: int, keepers: list[Actor], hosts: str, made: dict[int, str]) -> None:
    """Of the keepers that run, the first makes those that are gone."""
    names = [mastery.called(JOB, "r1", one) for one in range(3)]
    assert parting.gone(names[own], names, keepers, hosts) == {names[one]: host for one, host in made.items()}


@pytest.mark.parametrize("why", ["it comes back", "the job is over", "the name is another run's", "the other makes it"])
def test_a_keeper_that_is_not_made_again(store: Tables, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """One look says little: a keeper that is being moved is gone for seconds. And a job that is over has no keepers."""
    scheduler = scheduler_of(store, monkeypatch, ["b"])
    monkeypatch.setattr(private, "draining", dict)
    own = 1 if why == "the other makes it" else 0
    store.actors = [keeper(0, "a"), keeper(1, "b")]
    lost = store.actors.pop() if own == 0 else None

    def comes() -> None:
        if lost is not None and why == "it comes back":
            store.actors.append(lost)

    if why == "the job is over":
        private.put(mastery.key(JOB, mastery.end("r1")), b'{"status": 0}')
    if why == "the name is another run's":
        private.put(mastery.key(JOB, mastery.claimed(9)), b'{"run": "r2", "token": "t"}')
    masters.part(Plan(JOB, "r1", (), "t", keepers=2 + own), own, Looks(6, at_2=comes))
    assert not scheduler.made


def test_keepers_that_are_well_are_looked_at_seldom(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's table of actors is read after hosts have changed, while something is amiss, and now and then."""
    scheduler_of(store, monkeypatch, [])
    drained: dict[str, int] = {}
    monkeypatch.setattr(private, "draining", lambda: drained)
    store.actors = [keeper(0, "a"), keeper(1, "b")]
    looks, read = Looks(parting.SELDOM + 12), list[int]()

    def actors(_: str) -> list[Actor]:
        read.append(looks.number)
        return store.actors

    monkeypatch.setattr(private, "actors", actors)
    looks._turns = {
        "at_4": lambda: drained.update(b=0),
        "at_7": drained.clear,
        "at_9": lambda: store.actors.__setitem__(1, keeper(1, "b", "RESTARTING")),
        f"at_{parting.SELDOM + 10}": lambda: store.actors.__setitem__(1, keeper(1, "b")),
    }
    masters.part(Plan(JOB, "r1", (), "t", keepers=2), 0, looks)
    later = parting.SELDOM + 7
    assert read == [1, 4, 5, 6, 7, later, later + 1, later + 2, later + 3]
