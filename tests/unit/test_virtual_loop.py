"""The virtual-time loop: time jumps, order is kept, deadlocks are named, and an owner can be frozen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.virtual_loop import Deadlock, Runaway, ThreadHop, VirtualLoop, spawn


def test_time_jumps() -> None:
    """A year passes in no time, and the loop's clock says so."""

    async def story() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert virtual_loop.run(story(), limit_s=1e9) == 365 * 86_400
    assert time.monotonic() - began < 5


def test_order_of_timers() -> None:
    """Timers of one moment fire in the order in which they were set; earlier moments first."""

    async def story() -> list[int]:
        loop, fired = asyncio.get_running_loop(), list[int]()
        for number in range(20):
            loop.call_at(1.0, fired.append, number)
        loop.call_at(0.5, fired.append, -1)
        await asyncio.sleep(2)
        return fired

    assert virtual_loop.run(story()) == [-1, *range(20)]


def test_timers_never_fire_early() -> None:
    """A timer finds the clock at its moment or after it, whatever the size of the numbers."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        for moment in (1e-7, 0.1, 0.1 + 1e-9, 1 / 3, 1e6 + 1e-9, 1e6 + 0.1):
            done = loop.create_future()
            loop.call_at(moment, done.set_result, None)
            await done
            assert loop.time() >= moment

    virtual_loop.run(story(), limit_s=1e7)


def test_deadlock() -> None:
    """When everybody waits for ever the loop says who does."""

    async def waits_in_vain() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop()
    try:
        with pytest.raises(Deadlock, match="waits_in_vain"):
            loop.run_until_complete(waits_in_vain())
    finally:
        virtual_loop._clean_up(loop)


def test_limit() -> None:
    """A story that takes too long in virtual time is ended."""
    with pytest.raises(asyncio.TimeoutError):
        virtual_loop.run(asyncio.sleep(100), limit_s=10)


def test_jump() -> None:
    """After a jump all that is overdue happens at once, as to a process that was stopped."""

    async def story() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        nap = asyncio.ensure_future(asyncio.sleep(1, loop.time()))
        await asyncio.sleep(0)
        loop.jump(100)
        await nap
        return loop.time()

    assert virtual_loop.run(story()) == 100


def test_freeze() -> None:
    """A frozen owner runs nothing, nor does what it has started; thawed, it goes on with what has reached it."""

    async def story() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        heard, inbox = list[str](), asyncio.Queue[str]()

        async def listens() -> None:
            while True:
                heard.append(f"{await inbox.get()} at {loop.time():g}")

        async def counts() -> None:
            child = asyncio.ensure_future(listens())
            for number in range(3):
                await asyncio.sleep(1)
                heard.append(f"{number} at {loop.time():g}")
            child.cancel()

        task = spawn("one", counts())
        await asyncio.sleep(1.5)
        loop.freeze("one")
        inbox.put_nowait("word")
        await asyncio.sleep(10)
        assert heard == ["0 at 1"]
        loop.thaw("one")
        await task
        return heard

    assert virtual_loop.run(story()) == ["0 at 1", "word at 11.5", "1 at 11.5", "2 at 12.5"]


def test_cleans_up() -> None:
    """Whatever is left running at the end is cancelled and awaited, frozen or not."""
    ended: list[str] = []

    async def lingers(name: str) -> None:
        try:
            await asyncio.sleep(1e5)
        finally:
            ended.append(name)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        tasks = [spawn("one", lingers("one")), spawn("two", lingers("two"))]
        await asyncio.sleep(1)
        loop.freeze("two")
        assert not any(task.done() for task in tasks)

    virtual_loop.run(story())
    assert sorted(ended) == ["one", "two"]


def test_deadlock_names_everybody() -> None:
    """A deadlock names every task that waits, whose it is, in which function of its own it waits, and who is frozen."""

    async def inner() -> None:
        await asyncio.get_running_loop().create_future()

    async def outer() -> None:
        await inner()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        tasks = [spawn("one", outer()), spawn("two", inner()), spawn("three", asyncio.sleep(5))]
        await asyncio.sleep(0)
        loop.freeze("three")
        await asyncio.wait(tasks)

    loop = VirtualLoop()
    try:
        with pytest.raises(Deadlock) as found:
            loop.run_until_complete(story())
    finally:
        virtual_loop._clean_up(loop)
    assert [line.partition(":")[0] for line in found.value.waiting] == ["-", "one", "three (frozen)", "two"]
    assert all(line in str(found.value) for line in found.value.waiting)
    assert "outer > " in found.value.waiting[1]
    assert "inner at test_virtual_loop.py:" in found.value.waiting[1]


def test_no_work_for_threads() -> None:
    """Work for a thread is refused where it is asked for, and nothing of it is done: not a look-up of a name either."""

    async def story() -> list[str]:
        loop, done = asyncio.get_running_loop(), list[str]()
        with pytest.raises(ThreadHop, match="thread"):
            await asyncio.to_thread(done.append, "in a thread")
        with pytest.raises(ThreadHop, match="thread"):
            await loop.getaddrinfo("localhost", 80)
        assert _from_a_thread(lambda: loop.call_soon_threadsafe(done.append, "from a thread")) is ThreadHop
        loop.call_soon_threadsafe(done.append, "its own")
        await asyncio.sleep(1)
        return done

    assert virtual_loop.run(story()) == ["its own"]


def _from_a_thread(work: Callable[[], object]) -> type[BaseException] | None:
    """What ``work`` raises in another thread."""
    raised = list[type[BaseException]]()

    def tries() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # that is the question
            raised.append(type(error))

    thread = threading.Thread(target=tries)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_runaway() -> None:
    """What goes on for ever at one moment is an error that names it."""

    async def spins() -> None:
        while True:  # noqa: ASYNC110  # that is the mistake
            await asyncio.sleep(0)

    async def story() -> None:
        await spawn("spinner", spins())

    with pytest.raises(Runaway, match=r"spinner: .*spins"):
        virtual_loop.run(story())


def test_clock_of_an_owner() -> None:
    """Who has a fast clock finds more time gone by, and its timers are over sooner; nobody else notices."""

    async def naps(seconds: float) -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(seconds)
        return began, loop.time()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        long = spawn("fast", naps(30))
        await asyncio.sleep(10)
        loop.skew("fast", 2.0)
        again, other = spawn("fast", naps(6)), spawn("slow", naps(6))
        assert await again == (10, 16)
        assert loop.time() == 13
        assert await other == (10, 16)
        assert await long == (0, 30)
        assert loop.time() == 20

    virtual_loop.run(story())


@pytest.mark.parametrize("rate", [0.1, 0.999999, 1.0000001, 1 / 3, 7.3, 1e4])
def test_timers_of_a_skewed_clock_never_fire_early(rate: float) -> None:
    """By the clock of whoever set it, no timer fires before its moment: who then waits for the rest does not spin."""

    async def waits() -> None:
        loop = asyncio.get_running_loop()
        for moment in (0.1, 1 / 3, 1.0, 1e3 + 0.1, 1e6 / 7):
            due = loop.time() + moment
            turns = 0
            while loop.time() < due:
                turns += 1
                await asyncio.sleep(due - loop.time())
            assert turns == 1

    async def story() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(1e5 / 3)
        loop.skew("one", rate)
        await spawn("one", waits())

    virtual_loop.run(story(), limit_s=1e9)


def test_who_looks_again_looks_where_something_has_run() -> None:
    """The moments of a look are those of sleeping anew each time; those before which nothing has run are passed over."""

    async def looks(passing: bool) -> list[float]:
        loop, found, state = asyncio.get_running_loop(), list[float](), list[int]()
        assert isinstance(loop, VirtualLoop)
        for moment in (0.35, 1.0, 1.05, 7.777):
            loop.call_at(moment, state.append, 0)
        while len(state) < 4:
            before = len(state)
            await (loop.tick(0.1) if passing else asyncio.sleep(0.1))
            if len(state) > before or passing:
                found.append(loop.time())
        return found

    passed, each = virtual_loop.run(looks(True)), virtual_loop.run(looks(False))
    assert [moment for moment in each if moment not in passed] == []
    assert len(passed) <= len(each) + 2  # one look may find that a timer of the loop itself has run


def test_a_look_at_the_clock_is_repeated_though_nothing_runs() -> None:
    """What comes true by the time alone is found at its moment, and not when something runs again."""

    async def story() -> float:
        async with Cluster(JobSpec("job", (GroupSpec("worker", 1),))) as cluster:
            loop = asyncio.get_running_loop()
            await cluster.until(lambda: loop.time() >= 0.4567)
            return loop.time()

    assert 0.4567 <= virtual_loop.run(story()) < 0.4587
