"""What an agent does about its savers: those that die, hang, or cannot be made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from storing import ORDER, mapped, until

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.checkpoints import orders, saving
from dlrover_adapters.agent.checkpoints.arenas import Arenas
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.checkpoints.saving import Saving, Unsaved
from dlrover_adapters.agent.children import Child
from dlrover_adapters.agent.nursery import Spare
from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.launcher import WorkerExit, WorkersGone

# ---- the saver


class Brood:
    """In place of a nursery: children are ours to kill, and what is sent to them is read here."""

    def __init__(self) -> None:
        self.made: list[tuple[int, socket.socket]] = []
        self.error: Exception | None = None
        self.stuck = False

    async def make(self) -> Spare:
        """One saver: a process that sleeps."""
        if self.error is not None:
            raise self.error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})  # noqa: ASYNC221  # it does not wait
        self.made.append((pid, theirs))
        child = Child(pid)
        if self.stuck:
            child.signal = lambda _: None  # type: ignore[method-assign,assignment]
        return Spare(child, ours)

    def says(self, body: dict[str, Any]) -> None:
        """The newest saver does."""
        wire.send(self.made[-1][1], body, ())


@pytest.fixture
def brood() -> Iterator[Brood]:
    """Nobody of it is left over."""
    found = Brood()
    yield found
    for pid, link in found.made:
        link.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def with_saver(brood: Brood, test: Callable[[Saving, Arenas], Any]) -> None:
    """On a loop of its own."""

    async def run() -> None:
        arenas = Arenas(Path("/"))
        one = Saving(SimpleNamespace(job="j", node="n", hung_s=0.0), arenas, brood.make, lambda _: None)  # type: ignore[arg-type]
        try:
            await test(one, arenas)
        finally:
            await one.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_order_that_kills_is_dropped_and_savers_go_on(brood: Brood) -> None:
    """Three savers die over one order: it fails, and the fourth is there for the next."""

    async def test(one: Saving, _: Arenas) -> None:
        one.begin()
        await until(lambda: one.pid)
        order = asyncio.ensure_future(one.order({"op": "persist", "ids": []}))
        for number in range(1, saving.DEATHS_MAX + 1):
            await until(functools.partial(lambda number: len(brood.made) == number and one.pid, number))
            os.kill(brood.made[-1][0], signal.SIGKILL)
        with pytest.raises(Unsaved, match="savers died over it"):
            await order
        await until(lambda: len(brood.made) == saving.DEATHS_MAX + 1 and one.pid)
        order = asyncio.ensure_future(one.order({"op": "seal"}))
        await asyncio.sleep(0)
        brood.says({"op": "done", "key": 2, "size": 5})
        assert (await order).body["size"] == 5

    with_saver(brood, test)


@pytest.mark.parametrize("error", [LaunchFailed("no"), OSError("too many files")], ids=["told", "unforeseen"])
def test_a_saver_that_cannot_be_made_is_tried_again(
    brood: Brood, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong there: orders fail in words, and one that comes a while later has it made."""
    monkeypatch.setattr(saving, "REST_S", 0.05)

    async def test(one: Saving, _: Arenas) -> None:
        one._rest_s = saving.REST_S
        brood.error = error
        one.begin()
        with pytest.raises(Unsaved, match=f"there is no saver: {error}"):
            await one.order({"op": "persist", "ids": []})
        brood.error = None
        await asyncio.sleep(0.1)
        order = asyncio.ensure_future(one.order({"op": "persist", "ids": []}))
        await until(lambda: one.pid)
        brood.says({"op": "done", "key": 2})
        await order

    with_saver(brood, test)


def test_pins_of_a_dead_saver_are_taken_back(brood: Brood, monkeypatch: pytest.MonkeyPatch) -> None:
    """No successor comes: ranks may save again into what it was reading, and not into what is held."""
    monkeypatch.setattr(saving, "USELESS_MAX", 1)

    async def test(one: Saving, arenas: Arenas) -> None:
        with mapped(arenas, 1, 4, 5) as (arena, control):
            one.begin()
            await until(lambda: one.pid)
            one.hold([[arena.id, 1, 1, 5]])
            control.pin(0)
            control.pin(1)
            os.kill(brood.made[-1][0], signal.SIGKILL)
            await until(lambda: not one.pid)
            assert (control.pinned(0), control.pinned(1)) == (False, True)
            one.hold([])
            assert not control.pinned(1)

    with_saver(brood, test)


def test_a_storage_that_hangs(brood: Brood, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves: the order fails, the saver is killed, and the next one is there; one that moves is let alone."""
    monkeypatch.setattr(saving, "STALL_S", 0.4)
    monkeypatch.setattr(saving, "STALL_LOOK_S", 0.02)

    async def test(one: Saving, _: Arenas) -> None:
        one.begin()
        await until(lambda: one.pid)
        order = asyncio.ensure_future(one.order({"op": "persist", "ids": []}))
        for _ in range(8):
            await asyncio.sleep(0.1)
            brood.says({"op": "moves"})
        assert not order.done()
        with pytest.raises(Unsaved, match="storage hangs"):
            await order
        await until(lambda: len(brood.made) == 2 and one.pid)

    with_saver(brood, test)


def test_savers_that_hang_in_the_kernel(brood: Brood, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL does not end them: others take their place, not without bound, and storage is tried again when one has ended."""
    monkeypatch.setattr(saving, "STALL_S", 0.05)
    monkeypatch.setattr(saving, "STALL_LOOK_S", 0.02)
    monkeypatch.setattr(saving, "UNKILLABLE_S", 0.05)
    brood.stuck = True

    async def test(one: Saving, _: Arenas) -> None:
        one.begin()
        for number in range(1, saving.STUCK_MAX + 1):
            await until(functools.partial(lambda number: len(brood.made) == number and one.pid, number))
            with pytest.raises(Unsaved, match="not a byte"):
                await one.order({"op": "persist", "ids": []})
        with pytest.raises(Unsaved, match="are stuck"):
            await one.order({"op": "persist", "ids": []})
        os.kill(brood.made[0][0], signal.SIGKILL)
        await until(lambda: any(not child.alive for child in one._stuck))
        with pytest.raises(Unsaved, match="not a byte"):
            await one.order({"op": "seal"})

    with_saver(brood, test)


def test_what_works_for_storage_moves(tmp_path: Path) -> None:
    """A thread that writes is seen to, one that waits is not."""
    import threading

    go, done, over = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        (tmp_path / "file").write_bytes(bytes(1 << 20))
        done.set()
        over.wait()

    thread = threading.Thread(target=work, name="saver-persist")
    thread.start()
    before = orders.moved()
    assert orders.moved() == before
    go.set()
    assert done.wait(10)
    assert orders.moved() != before
    over.set()
    thread.join()


@pytest.mark.parametrize("code", [0, 1])
def test_a_script_that_has_ended_well_hastens_the_saver(code: int) -> None:
    """Its end waits for storage, and nothing trains here; a script that failed is started again, and is not held up."""
    done = list[str]()
    duty = CheckpointDuty(SimpleNamespace(vault=None), token=b"", host="", bind="")  # type: ignore[arg-type]
    saver = SimpleNamespace(hasten=lambda: done.append("hasten"))
    duty._site = SimpleNamespace(saving=saver, look=lambda: None)  # type: ignore[assignment]
    duty._storage = SimpleNamespace(try_anew=lambda: done.append("try"))  # type: ignore[assignment]
    duty._rest = lambda: None  # type: ignore[method-assign]
    duty.noticed(WorkerExit(3, 0, 0, code, asked=False, died_us=0))
    duty.noticed(WorkersGone(3))
    assert done == ([] if code else ["try", "hasten"])


@pytest.mark.parametrize("outcome", ["", "succeeded"])
def test_a_node_that_is_told_to_go_hastens_its_saver(brood: Brood, outcome: str) -> None:
    """Before anything is waited for; the saver that there is hears of it once, and so does its successor."""

    def heard(link: socket.socket) -> list[str]:
        link.setblocking(False)
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(wire.unpack(link.recv(65536))["op"])
        return found

    async def test(one: Saving, arenas: Arenas) -> None:
        one.begin()
        await until(lambda: one.pid)
        before: list[list[str]] = []

        async def work(*_: object) -> None:
            before.append(heard(brood.made[-1][1]))

        duty = CheckpointDuty(SimpleNamespace(), token=b"", host="", bind="")  # type: ignore[arg-type]
        duty._site = SimpleNamespace(saving=one, arenas=arenas, generation=0, whole=[])  # type: ignore[assignment]
        duty._storage = SimpleNamespace(settle=work, finish=work)  # type: ignore[assignment]
        duty._copying = SimpleNamespace(settle=work)  # type: ignore[assignment]
        duty._tell_missing = lambda *_: None  # type: ignore[method-assign]
        for _ in range(2):
            await duty.settle(ORDER._replace(leave=True, outcome=outcome))
        assert before[0].count("haste") == 1
        assert not any("haste" in later for later in before[1:])
        os.kill(brood.made[-1][0], signal.SIGKILL)
        await until(lambda: len(brood.made) == 2 and one.pid)
        assert "haste" in heard(brood.made[-1][1])

    with_saver(brood, test)
