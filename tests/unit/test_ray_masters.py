"""Who holds a job's name in a Ray cluster: claims, keepers and their removal, over a store that is a dictionary."""

from __future__ import annotations

import asyncio
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
from ray_store import JOB, Tables, tables

from dlrover_backends.ray import fencing, masters, masters_keeper, mastery, private
from dlrover_backends.ray.desk import Desk
from dlrover_backends.ray.fencing import Fence
from dlrover_backends.ray.masters import InUse, NotKept, StillKept
from dlrover_backends.ray.masters_keeper import GIVEN_UP, MastersKeeper, Released
from dlrover_backends.ray.mastery import Plan
from dlrover_backends.ray.names import Run

RUN = Run(JOB, "r")


@pytest.fixture(name="store")
def made_store(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """An empty cluster."""
    return tables(monkeypatch)


def holder() -> str:
    """The run whose name it is; empty: nobody's."""
    found = masters.find(JOB)
    return "" if found is None else found.record.run


def test_a_run_may_claim_its_name_twice(store: Tables) -> None:
    """A launcher that is started again, and an order that is given again, change the address and keep the name."""
    masters.claim(JOB, "r1", "t", "a:1")
    store[mastery.key(JOB, mastery.end("r1"))] = b'{"status": 1}'
    masters.claim(JOB, "r1", "t", "b:2")
    found = masters.find(JOB)
    assert found is not None
    assert (found.record.run, found.record.driver, found.record.over) == ("r1", "b:2", None)
    assert masters.jobs() == [JOB]


def test_a_name_that_is_led_is_not_taken(store: Tables) -> None:
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


def test_a_claimant_that_died_holds_no_name(store: Tables) -> None:
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


def test_a_command_leads(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_two_claim_at_once(store: Tables) -> None:
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


def test_a_claim_that_is_renewed_is_not_taken(store: Tables) -> None:
    """A launcher comes back while another run takes its old name."""
    masters.claim(JOB, "r1", "t")
    store.age(masters.YOUNG_S + 1)
    store.on_put = lambda: masters.claim(JOB, "r1", "t")
    with pytest.raises(InUse):
        masters.claim(JOB, "r2", "t")
    assert holder() == "r1"


def test_masters_of_another_run_are_not_kept(store: Tables) -> None:
    """Keepers are made for the run alone that holds the name: after its release none is made."""
    masters.claim(JOB, "r1", "t")
    with pytest.raises(NotKept, match="not claimed by run r2"):
        masters.keep(Plan(JOB, "r2", (), "t"))
    masters.release(JOB, "r1")
    with pytest.raises(NotKept, match="not claimed by run r1"):
        masters.keep(Plan(JOB, "r1", (), "t"))
    assert not store


def test_what_is_removed_with_a_run(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_when_a_name_was_claimed(store: Tables) -> None:
    """The record says it, in seconds."""
    masters.claim(JOB, "r1", "t")
    found = masters.find(JOB)
    assert found is not None
    assert abs(found.record.since - time.time()) < masters.YOUNG_S
    assert len(store) == 1


def test_a_token_never_goes_back(store: Tables) -> None:
    """Two masters give their first orders at once: the older one is known to be deposed, whoever writes last."""
    fence = Fence(RUN)
    assert fence.newest(3) == 3
    store.on_put = lambda: Fence(RUN).newest(12) and None
    assert fence.newest(4) == 12
    assert (fence.newest(1), fence.newest(12), fence.newest(3)) == (12, 12, 12)
    assert len(store) == 1
    assert not fence.is_removed
    store.clear()
    assert (fence.newest(13), fence.is_removed, len(store)) == (13, True, 0), (
        "nothing is left of a run that was removed"
    )
    assert Fence(RUN).newest(13) == 13, (
        "the keys of a run that has ended are gone, and no mark says that it was removed"
    )
    fence.newest(13)
    assert fence.is_removed


def test_a_removed_run_has_a_mark(store: Tables) -> None:
    """Whoever comes later reads it, and writes nothing; one that wrote its token at that moment takes it back."""
    store.on_put = lambda: Fence(RUN).bar()
    fence = Fence(RUN)
    fence.check(3)
    assert (fence.is_removed, list(store)) == (True, [RUN.mark])
    later = Fence(RUN)
    later.check(4)
    assert (later.is_removed, list(store)) == (True, [RUN.mark])
    other = Fence(Run(RUN.job, RUN.run + "0"))
    other.check(1)
    assert not other.is_removed


def test_marks_of_long_ago_go(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of others that are younger stay, and so does the one that is written again."""
    now = time.time()
    for name, age_s in (("old", fencing.MARK_S + 60.0), ("young", fencing.MARK_S - 60.0), ("again", 0.0)):
        monkeypatch.setattr(fencing.time, "time", lambda at=now - age_s: at)
        Fence(Run(JOB, name)).bar()
    assert sorted(store) == sorted(Run(JOB, name).mark for name in ("young", "again"))
    monkeypatch.setattr(fencing.time, "time", lambda: now + fencing.MARK_S)
    Fence(Run(JOB, "again")).bar()
    assert list(store) == [Run(JOB, "again").mark]


def keeper_that(monkeypatch: pytest.MonkeyPatch, start: Callable[[], Any]) -> MastersKeeper:
    """A masters' keeper outside Ray, whose masters are started so."""
    keeper = MastersKeeper.__new__(MastersKeeper)
    keeper._plan, keeper._number, keeper._host = Plan(JOB, "r1", (), "t"), 0, ""
    keeper._part, keeper._started, keeper._last = None, None, deque(maxlen=3)
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
    store: Tables, monkeypatch: pytest.MonkeyPatch, host: str, lives: bool, again: bool, waits: bool
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


def test_keepers_are_asked_before_they_are_killed(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_end_of_a_job_is_written_however_long_it_takes(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the state service refuses it, the keeper tries again, and does not leave: without it no end is ever known.

    Masters' address is given up after a while: they are needed more than it is. Whoever asks the keeper to leave is heard.
    """
    passed, fails = iter(range(0, 10_000, 5)), iter(range(100))

    def refuse(key: str, value: bytes, **_: Any) -> bool:
        if next(fails, None) is not None:
            raise RuntimeError("the state service is away")
        return store.put(key, value)

    masters.claim(JOB, "r1", "t")
    keeper = keeper_that(monkeypatch, lambda: None)
    monkeypatch.setattr(masters_keeper, "STORE_AGAIN_S", 0.0)
    monkeypatch.setattr(masters_keeper, "time", SimpleNamespace(monotonic=lambda: next(passed)))
    monkeypatch.setattr(private, "put", refuse)
    keeper._store(mastery.at("r1", 0), b"a:1")
    assert mastery.key(JOB, mastery.at("r1", 0)) not in store
    keeper._tell_end(3)
    assert next(fails, None) is None
    found = masters.find(JOB)
    assert found is not None
    assert found.record.over == 3
    fails = iter(range(100))
    os.eventfd_write(keeper._released, 1)
    with pytest.raises(Released):
        keeper._tell_end(3)
    assert next(fails) == 1


def test_a_keeper_of_a_released_run_writes_nothing(store: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_keepers_come_before_their_release(store: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
