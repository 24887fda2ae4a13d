"""Who holds a job's name in a Ray cluster: claims, keepers and their removal, over a store that is a dictionary."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from ray_store import Store as Keys

from dlrover_backends.ray import fencing, masters, masters_keeper, mastery, private
from dlrover_backends.ray.desk import Desk
from dlrover_backends.ray.masters import InUse, NotKept, StillKept
from dlrover_backends.ray.masters_keeper import GIVEN_UP, MastersKeeper, Released
from dlrover_backends.ray.mastery import SPACE, Plan
from dlrover_backends.ray.records import Actor

JOB = "digits"


class Store(Keys):
    """The cluster's key-value store, and its table of actors."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Actor] = []
        self.driver, self.ended = "d1", set[str]()

    def begin(self, prefix: str) -> list[str]:
        """As `private.keys`."""
        return [one for one in self if one.startswith(prefix)]

    def remove(self, prefix: str) -> None:
        """As `private.remove`."""
        for one in self.begin(prefix):
            del self[one]

    def age(self, by_s: float) -> None:
        """All claims are older."""
        for one in self.begin(mastery.key(JOB, mastery.CLAIM)):
            told = json.loads(self[one])
            self[one] = json.dumps({**told, "since": told["since"] - by_s}).encode()

    def keeper(self, run: str, number: int = 0, state: str = "ALIVE") -> None:
        """A run has a keeper."""
        name = mastery.called(JOB, run, number)
        self.actors.append(Actor(f"id-{name}", name, SPACE, state))


@pytest.fixture(name="store")
def made_store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty cluster."""
    store = Store()
    for name, answers in (
        ("get", store.get),
        ("put", store.put),
        ("keys", store.begin),
        ("remove", store.remove),
        ("own_driver", lambda: store.driver),
        ("has_ended", lambda driver: driver in store.ended),
        ("actors", lambda prefix: [one for one in store.actors if one.namespace.startswith(prefix)]),
    ):
        monkeypatch.setattr(private, name, answers)
    monkeypatch.setattr(masters, "_ask", lambda _: None)
    return store


def holder() -> str:
    """The run whose name it is; empty: nobody's."""
    found = masters.find(JOB)
    return "" if found is None else found.record.run


def test_a_run_may_claim_its_name_twice(store: Store) -> None:
    """A launcher that is started again, and an order that is given again, change the address and keep the name."""
    masters.claim(JOB, "r1", "t", "a:1")
    store[mastery.key(JOB, mastery.end("r1"))] = b'{"status": 1}'
    masters.claim(JOB, "r1", "t", "b:2")
    found = masters.find(JOB)
    assert found is not None
    assert (found.record.run, found.record.driver, found.record.over) == ("r1", "b:2", None)
    assert masters.jobs() == [JOB]


def test_a_name_that_is_led_is_not_taken(store: Store) -> None:
    """A claim lives while it is young, while keepers live, and while its driver answers; then, or when it is over, it is free."""
    with socket.create_server(("127.0.0.1", 0)) as driver:
        masters.claim(JOB, "r1", "t", f"127.0.0.1:{driver.getsockname()[1]}")
        with pytest.raises(InUse, match=re.escape("as run r1: dlrover stop ray:digits ends it")):
            masters.claim(JOB, "r2", "t")
        store.age(masters.YOUNG_S + 1)
        with pytest.raises(InUse):
            masters.claim(JOB, "r2", "t")
    store.keeper("r1")
    with pytest.raises(InUse):
        masters.claim(JOB, "r2", "t")
    store.actors.clear()
    store.keeper("r0")  # another run's
    masters.claim(JOB, "r2", "t")
    assert holder() == "r2"
    store[mastery.key(JOB, mastery.end("r2"))] = b'{"status": 0}'
    masters.claim(JOB, "r3", "t")
    assert holder() == "r3"
    assert len(store) == 1, "what runs before have written is removed"


def test_a_claimant_that_died_holds_no_name(store: Store) -> None:
    """A claim whose claimant has ended before anybody kept masters is free at once; one whose masters answer is not."""
    masters.claim(JOB, "r1", "t")
    store.ended.add("another")
    with pytest.raises(InUse):
        masters.claim(JOB, "r2", "t")
    store.ended.add(store.driver)
    store.driver = "d2"
    with socket.create_server(("127.0.0.1", 0)) as driver:
        masters.claim(JOB, "r2", "t", f"127.0.0.1:{driver.getsockname()[1]}")
        store.ended.add("d2")  # the desk has died, and its launcher leads
        with pytest.raises(InUse):
            masters.claim(JOB, "r3", "t")
    masters.claim(JOB, "r3", "t", encrypts=True)
    found = masters.find(JOB)
    assert found is not None
    assert (found.record.run, found.record.claimant, found.record.encrypts) == ("r3", "d2", True)


def test_a_command_leads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters beside the command that was typed are known by their port: no keeper's masters are there, and they answer."""
    answering = {"a:1"}
    monkeypatch.setattr(masters, "_answers", answering.__contains__)
    assert masters.led_outside(JOB, "r1") == ""
    masters.claim(JOB, "r1", "t", "a:1")
    assert (masters.led_outside(JOB, "r1"), masters.led_outside(JOB, "r0")) == ("a:1", "")
    store[mastery.key(JOB, mastery.at("r1", 0))] = b"b:2"  # another host's, with the same log in etcd
    assert masters.led_outside(JOB, "r1") == "a:1"
    store[mastery.key(JOB, mastery.at("r1", 0))] = (
        b"10.0.0.1:1"  # the command is dead, and a keeper on its host goes on
    )
    assert masters.led_outside(JOB, "r1") == ""
    store.remove(mastery.key(JOB, mastery.at("r1", 0)))
    answering.clear()
    assert masters.led_outside(JOB, "r1") == ""
    answering.add("a:1")
    store[mastery.key(JOB, mastery.end("r1"))] = b'{"status": 0}'
    assert masters.led_outside(JOB, "r1") == ""


def test_two_claim_at_once(store: Store) -> None:
    """Whoever writes second is refused, a new name and one that is taken over alike; also if the first released meanwhile."""
    store.on_put = lambda: masters.claim(JOB, "r2", "t")
    with pytest.raises(InUse, match="just been started"):
        masters.claim(JOB, "r1", "t")
    assert holder() == "r2"
    store.age(masters.YOUNG_S + 1)

    def released_and_claimed() -> None:
        masters.release(JOB, "r2")
        masters.claim(JOB, "r4", "t")
        masters.claim(JOB, "r4", "t")

    store.on_put = released_and_claimed
    with pytest.raises(InUse, match="just been started"):
        masters.claim(JOB, "r3", "t")
    assert holder() == "r4"


def test_a_claim_that_is_renewed_is_not_taken(store: Store) -> None:
    """A launcher comes back while another run takes its old name."""
    masters.claim(JOB, "r1", "t")
    store.age(masters.YOUNG_S + 1)
    store.on_put = lambda: masters.claim(JOB, "r1", "t")
    with pytest.raises(InUse):
        masters.claim(JOB, "r2", "t")
    assert holder() == "r1"


def test_masters_of_another_run_are_not_kept(store: Store) -> None:
    """Keepers are made for the run alone that holds the name: after its release none is made."""
    masters.claim(JOB, "r1", "t")
    with pytest.raises(NotKept, match="not claimed by run r2"):
        masters.keep(Plan(JOB, "r2", (), "t"))
    masters.release(JOB, "r1")
    with pytest.raises(NotKept, match="not claimed by run r1"):
        masters.keep(Plan(JOB, "r1", (), "t"))
    assert not store


class Scheduler:
    """Ray, as far as it places keepers: on hosts a and b, of which raylets that have just joined know themselves alone."""

    def __init__(self, store: Store, places: list[str]) -> None:
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


def scheduler_of(store: Store, monkeypatch: pytest.MonkeyPatch, places: list[str]) -> Scheduler:
    """Ray places keepers so, one after the other, and the job's name is claimed."""
    ray: Any = ModuleType("ray")
    ray.nodes = lambda: [{"NodeID": one, "Alive": True} for one in ("a", "b")]
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setitem(sys.modules, "ray", ray)
    scheduler = Scheduler(store, [*places])
    monkeypatch.setattr(masters, "_make", scheduler.make)
    monkeypatch.setattr(masters, "_kill", scheduler.kill)
    monkeypatch.setattr(masters, "LOOK_S", 0.0)
    masters.claim(JOB, "r1", "t")
    return scheduler


@pytest.mark.parametrize(
    ("places", "ends"),
    [(["b", "a"], 0), (["b", "b", "a"], 1), (["a", "a", "b"], 1), (["b", "b", "b", "b", "a"], 3)],
    ids=["as meant", "both on the second", "both on the first", "again and again"],
)
def test_masters_keepers_move_to_their_hosts(
    store: Store, monkeypatch: pytest.MonkeyPatch, places: list[str], ends: int
) -> None:
    """Keepers that Ray has started on one host, because a raylet did not know the other one, end on two."""
    scheduler = scheduler_of(store, monkeypatch, places)
    wanted = masters.keep(Plan(JOB, "r1", (), "t", keepers=2))
    assert scheduler.made == [(0, "b"), (1, "a")], "the driver's host comes last"
    masters.settle(Plan(JOB, "r1", (), "t", keepers=2), wanted)
    assert {one.host_id for one in store.actors} == {"a", "b"}
    assert next(scheduler.pids) == 3 + ends, "a keeper that is where it should be stays"


@pytest.mark.parametrize("faults", [["before"] * 3, ["after"]], ids=["it was not done", "it was done"])
def test_a_keeper_that_is_moved_is_made_again(store: Store, monkeypatch: pytest.MonkeyPatch, faults: list[str]) -> None:
    """Ray may raise anything, before and after it has done what was asked: the keeper that was ended comes back, once."""
    scheduler = scheduler_of(store, monkeypatch, ["b", "b", "a"])
    plan = Plan(JOB, "r1", (), "t", keepers=2)
    wanted = masters.keep(plan)
    scheduler.faults = faults
    masters.settle(plan, wanted)
    assert not scheduler.faults
    assert sorted(one.host_id for one in store.actors) == ["a", "b"]
    assert [one for one, _ in scheduler.made] == [0, 1, 1]


def test_a_keeper_that_cannot_be_made_again_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("states", [["ALIVE"], ["ALIVE", "RESTARTING"], ["ALIVE", "DEAD"]])
def test_all_keepers_are_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch, states: list[str]) -> None:
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
    wants = [{key: one.get(key) for key in ("num_cpus", "memory", "resources")} for one in asked]
    assert wants == [
        {"num_cpus": 0, "memory": None, "resources": {"node:everybody's/dlrover-masters": masters.SLIVER}},
        {"num_cpus": 0, "memory": None, "resources": {mastery.HEAD: masters.SLIVER}},
    ]
    assert [one[1:] for one in told] == [(1, "b"), (0, "")]


def test_a_keeper_is_not_moved_to_a_host_that_is_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made later takes the host without another one; a host that has died meanwhile is not waited for."""
    ray: Any = ModuleType("ray")
    ray.nodes = lambda: [{"NodeID": "b", "Alive": True}, {"NodeID": "a", "Alive": True}]
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setitem(sys.modules, "ray", ray)
    scheduler = Scheduler(store, ["b"])
    monkeypatch.setattr(masters, "_make", scheduler.make)
    masters.claim(JOB, "r1", "t")
    store.actors.append(Actor("id-0", mastery.called(JOB, "r1", 0), SPACE, host_id="b", pid=99))
    wanted = masters.keep(Plan(JOB, "r1", (), "t", keepers=2))
    assert scheduler.made == [(1, "a")]
    ray.nodes = lambda: [{"NodeID": "b", "Alive": True}, {"NodeID": "a", "Alive": False}]
    masters.settle(Plan(JOB, "r1", (), "t", keepers=2), wanted)


def test_what_is_removed_with_a_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own keepers alone, though nobody claims the name for it; the name of a run whose keepers live stays claimed."""
    killed: list[str] = []

    def kill(name: str) -> None:
        killed.append(name)
        store.actors = [one for one in store.actors if one.name != name]

    monkeypatch.setattr(masters, "_kill", kill)
    masters.claim(JOB, "r1", "t")
    store[mastery.key(JOB, mastery.at("r1", 0))] = b"a:1"
    store.keeper("r1")
    store.keeper("r10")
    assert masters.kept() == {(JOB, "r1"), (JOB, "r10")}
    masters.release(JOB, "r10")
    assert killed == [mastery.called(JOB, "r10", 0)]
    found = masters.find(JOB)
    assert found is not None
    assert (found.record.addresses, len(found.keepers)) == ({0: "a:1"}, 1)
    monkeypatch.setattr(masters, "_kill", lambda _: None)
    monkeypatch.setattr(masters, "GONE_S", 0.0)
    with pytest.raises(StillKept, match="do this again then"):
        masters.release(JOB, "r1")
    assert holder() == "r1"
    monkeypatch.setattr(masters, "_kill", kill)
    monkeypatch.setattr(masters, "GONE_S", 20.0)
    masters.release(JOB, "r1")
    assert not store


def test_when_a_name_was_claimed(store: Store) -> None:
    """The record says it, in seconds."""
    masters.claim(JOB, "r1", "t")
    found = masters.find(JOB)
    assert found is not None
    assert abs(found.record.since - time.time()) < masters.YOUNG_S
    assert len(store) == 1


def test_a_token_never_goes_back(store: Store) -> None:
    """Two masters give their first orders at once: the older one is known to be deposed, whoever writes last."""
    assert fencing.newest("token/", 3) == 3
    store.on_put = lambda: fencing.newest("token/", 12) and None
    assert fencing.newest("token/", 4) == 12
    assert (fencing.newest("token/", 1), fencing.newest("token/", 12), fencing.newest("token/", 3)) == (12, 12, 12)
    assert len(store) == 1


def keeper_that(monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]) -> MastersKeeper:
    """A masters' keeper outside Ray, whose masters are started so."""
    keeper = MastersKeeper.__new__(MastersKeeper)
    keeper._plan, keeper._number, keeper._host = Plan(JOB, "r1", (), "t"), 0, ""
    keeper._started, keeper._last = None, deque(maxlen=3)
    keeper._released, keeper._idle = os.eventfd(0, os.EFD_CLOEXEC), threading.Event()
    monkeypatch.setattr(keeper, "_start", start)
    return keeper


@pytest.mark.parametrize("beside", [False, True])
def test_a_keeper_that_is_to_leave(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a living driver, or with masters of its own, which are killed: its task is over, and its process awaits its end."""
    driver = f"{os.getpid()}:{masters_keeper.started_at(os.getpid())}" if beside else ""
    reading, writing = os.pipe()
    begun, done = threading.Event(), list[str]()

    def kill(number: int) -> None:
        done.append(f"signal {number}")
        os.close(writing)

    def start() -> Any:
        begun.set()
        return SimpleNamespace(pidfd=reading, signal=kill, bury=lambda _: (-9, 0), close=lambda: done.append("close"))

    again: list[tuple[object, ...]] = []
    timer = SimpleNamespace(start=lambda: done.append("timer"))
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # which has no exit_actor
    monkeypatch.setattr(masters_keeper, "raylet", lambda: -1)
    monkeypatch.setattr(threading, "Timer", lambda *words: again.append(words) or timer)
    keeper = keeper_that(monkeypatch, start)
    keeper._plan = Plan(JOB, "r1", (), "t", driver=driver)
    running = threading.Thread(target=keeper.run, daemon=True)
    running.start()
    assert beside or begun.wait(10.0)
    keeper.leave()
    running.join(10.0)
    os.close(reading)
    assert not running.is_alive()
    assert done == (["timer"] if beside else ["signal 9", "close", "timer"])
    assert again == [(masters_keeper.IDLE_S, os._exit, (masters_keeper.BROKEN,))]


@pytest.mark.parametrize(
    ("host", "lives", "again", "waits"),
    [("b", True, False, True), ("a", True, False, False), ("b", False, False, False), ("b", True, True, False)],
    ids=["elsewhere", "as meant", "a dead host", "started again"],
)
def test_a_keeper_on_the_wrong_host_tells_no_address(
    store: Store, monkeypatch: pytest.MonkeyPatch, host: str, lives: bool, again: bool, waits: bool
) -> None:
    """It waits to be replaced, so that the other keeper's masters are never told an address that nobody will answer at."""
    ray: Any = ModuleType("ray")
    ray.nodes = lambda: [{"NodeID": "b", "Alive": lives}]
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "a", was_current_actor_reconstructed=again)
    ray.actor = SimpleNamespace(exit_actor=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    bounds: list[float] = []
    select = masters_keeper.select.select
    monkeypatch.setattr(
        masters_keeper,
        "select",
        SimpleNamespace(select=lambda *words: bounds.append(words[3]) or select(*words[:3], 0.0)),
    )

    def start() -> Any:
        keeper._store(mastery.at("r1", 0), b"a:1")
        raise Released

    def at() -> bytes | None:
        return store.get(mastery.key(JOB, mastery.at("r1", 0)))

    masters.claim(JOB, "r1", "t")
    keeper = keeper_that(monkeypatch, start)
    keeper._host = host
    os.eventfd_write(keeper._released, 1)
    keeper.run()  # it is replaced at once
    assert at() == (None if waits else b"a:1")
    assert keeper._idle.is_set()
    os.eventfd_read(keeper._released)
    bounds.clear()
    keeper.run()  # nobody replaces it
    assert at() == b"a:1"
    assert bounds == ([masters_keeper.SETTLE_S, 0] if waits else [0])
    assert masters_keeper.OTHERS_S > masters_keeper.SETTLE_S, "the other keeper would start without this one's address"


def test_keepers_are_asked_before_they_are_killed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray alarms the job's driver of a task that a kill ends. One that is being restarted is killed alone."""
    done: list[str] = []

    def kill(name: str) -> None:
        done.append(f"kill {name[-1]}")
        if done.count(f"kill {name[-1]}") == 2:  # it is seen to be dead a moment later
            store.actors = [one for one in store.actors if one.name != name]

    monkeypatch.setattr(masters, "_kill", kill)
    monkeypatch.setattr(masters, "_ask", lambda name: done.append(f"ask {name[-1]}"))
    masters.claim(JOB, "r1", "t")
    store.keeper("r1", 0)
    store.keeper("r1", 1, "RESTARTING")
    masters.release(JOB, "r1")
    assert done == ["ask 0", "kill 0", "kill 1", "kill 0", "kill 1"]


def test_masters_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ended, the reason is among the last words, and they are tried again."""
    ended: list[bool] = []
    broken = SimpleNamespace(pidfd="none", end=lambda: ended.append(True))

    def start() -> Any:
        keeper._started = cast(Any, broken)
        return broken

    keeper = keeper_that(monkeypatch, start)
    assert keeper._once() == GIVEN_UP
    assert (ended, keeper._started) == ([True], None)
    assert "TypeError" in keeper._last[-1]


def test_a_keeper_of_a_released_run_writes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may outlive its actor: it sees a good end as the driver's death, and leaves no key."""
    started: list[str] = []

    def start() -> Any:
        keeper._store(mastery.at("r1", 0), b"a:1")
        started.append("masters")

    keeper = keeper_that(monkeypatch, start)
    ray = ModuleType("ray")
    vars(ray).update(actor=SimpleNamespace(exit_actor=lambda: started.append("exit")))
    monkeypatch.setitem(sys.modules, "ray", ray)
    masters.claim(JOB, "r1", "t")
    masters.release(JOB, "r1")
    keeper.run()
    assert (started, dict(store)) == (["exit"], {})
    masters.claim(JOB, "r1", "t")
    keeper._store(mastery.at("r1", 0), b"a:1")
    store.on_put = lambda: masters.release(JOB, "r1")
    with pytest.raises(Released):
        keeper._store(mastery.at("r1", 0), b"a:1")
    assert not store
    # What is written between the first removal and the claim's is removed as well.
    masters.claim(JOB, "r1", "t")
    remove = private.remove

    def late(key: str) -> None:
        if mastery.CLAIM in key:
            store[mastery.key(JOB, mastery.at("r1", 0))] = b"a:1"
        remove(key)

    monkeypatch.setattr(private, "remove", late)
    masters.release(JOB, "r1")
    assert not store


def test_a_keeper_that_breaks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, so that Ray starts it again: an actor whose method has raised would live on, idle."""

    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    def breaks(driver: str) -> None:
        raise OSError(f"too many open files: {driver}")

    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(masters_keeper, "_await_end", breaks)
    with pytest.raises(Ended, match="1"):
        keeper_that(monkeypatch, lambda: None).run()


def test_a_keeper_calls_itself_until_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started again may learn just now that its actor restarts, and a call without retries is dropped then."""
    calls: list[dict[str, int]] = []

    def options(**more: int) -> Any:
        return SimpleNamespace(remote=lambda: calls.append(more))

    ray = ModuleType("ray")
    actor = SimpleNamespace(run=SimpleNamespace(options=options))
    vars(ray).update(get_runtime_context=lambda: SimpleNamespace(current_actor=actor))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(masters_keeper.signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", {"DLROVER_NODE": "x", "PATH": "/bin"})
    MastersKeeper(Plan(JOB, "r1", (), "t").to_map(), 0)
    assert (calls, os.environ) == ([{"max_task_retries": -1}], {"PATH": "/bin"})


def test_keepers_come_before_their_release(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders about masters are done in turn: what is being kept when the job ends is removed, too."""
    done: list[str] = []

    async def both() -> None:
        begun = threading.Event()

        def keep(_: Plan) -> None:
            begun.set()
            released.wait(0.2)  # it comes only if orders are not done in turn
            done.append("keep")

        def release(*_: str) -> None:
            done.append("release")
            released.set()

        released = threading.Event()
        monkeypatch.setattr(masters, "keep", keep)
        monkeypatch.setattr(masters, "release", release)
        desk = Desk(cast(Any, SimpleNamespace(ended=set())), tmp_path / "desk")
        keeping = asyncio.ensure_future(desk._answer(("keep", Plan(JOB, "r1", (), "t").to_map())))
        assert await asyncio.to_thread(begun.wait, 10.0)
        await asyncio.gather(keeping, desk._answer(("release", JOB, "r1")))

    asyncio.run(both())
    assert done == ["keep", "release"]
