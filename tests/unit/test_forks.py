"""Forks that fail: the zygote answers with the reason and lives on, the agent tries again for a while and then says so."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import pytest

from dlrover_adapters.agent import nursery, wire, zygote
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.nursery import Nursery
from dlrover_adapters.agent.zygote import Unfit, Zygote
from dlrover_core.errors import LaunchFailed

FORK = {"op": "fork", "role": "worker", "key": 7}


def failing(number: int) -> Callable[[], int]:
    """A fork that fails with this error."""

    def fork() -> int:
        raise OSError(number, os.strerror(number))

    return fork


def ordered() -> tuple[dict[str, object], int]:
    """What a zygote answers to an order to fork, and how many of its descriptors it kept."""
    agent, link = wire.pair()
    mine, theirs = wire.pair()
    with agent, link, mine:
        wire.send(agent, FORK, (theirs.fileno(),))
        theirs.close()
        frame = wire.receive(link)
        assert frame is not None
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names are all that is wanted
        assert Zygote(link, os.getpid(), "none", 1.0)._answer(frame) is None
        kept = len(os.listdir("/proc/self/fd")) - before + 1  # noqa: PTH208
        answer = wire.receive(agent)
        assert answer is not None
        assert wire.receive(mine) is None, "who ordered it sees the end of its socket"
        return answer.body, kept


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "no memory is left"), (errno.ENOSYS, "cannot fork")],
)
def test_a_fork_that_fails_is_answered(number: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote does not die of it: it would be replaced again and again, to the same end."""
    monkeypatch.setattr(zygote, "_fork", failing(number))
    body, kept = ordered()
    assert (body["op"], body["key"]) == ("unforked", 7)
    assert os.strerror(number) in str(body["reason"])
    assert advice in str(body["reason"])
    assert kept == 0


def test_a_go_between_that_cannot_fork_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit may be reached between the two forks."""
    real, me = zygote._fork, os.getpid()
    monkeypatch.setattr(zygote, "_fork", lambda: real() if os.getpid() == me else failing(errno.EAGAIN)())
    body, kept = ordered()
    assert body["op"] == "unforked"
    assert "ulimit -u" in str(body["reason"])
    assert kept == 0


def test_a_preload_is_not_blamed_for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe waits a while, and then says what is wrong with the host."""
    tried: list[int] = []
    monkeypatch.setattr(zygote, "PROBE_PAUSES_S", (0.0, 0.0))

    def fork() -> int:
        tried.append(1)
        return failing(errno.EAGAIN)()

    monkeypatch.setattr(zygote, "_fork", fork)
    with pytest.raises(Unfit, match="ulimit -u") as told:
        Zygote._fork_probe()
    assert told.value.preload == ""
    assert len(tried) == 3


class Answering:
    """A zygote that answers each order with the next of ``reasons``: an empty one, and it has forked a process that ends."""

    def __init__(self, link: socket.socket, reasons: list[str]) -> None:
        self.link, self.reasons, self.orders = link, reasons, 0

    def hear(self) -> None:
        """Answer one order."""
        frame = wire.receive(self.link)
        if frame is None:
            asyncio.get_running_loop().remove_reader(self.link)
            return
        if frame.body["op"] != "fork":
            return
        self.orders += 1
        reason = self.reasons.pop(0)
        key = frame.body["key"]
        os.close(*frame.fds)
        if reason:
            wire.send(self.link, {"op": "unforked", "key": key, "reason": reason})
            return
        pid = os.posix_spawn("/bin/true", ["true"], {})
        wire.send(self.link, {"op": "forked", "key": key, "pid": pid})


@pytest.mark.parametrize(("failures", "comes"), [(0, True), (2, True), (3, False)])
def test_an_order_is_repeated_with_pauses_and_then_fails(
    failures: int, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit may pass; one that does not is the launch's error, with the zygote's own words."""
    monkeypatch.setattr(nursery, "UNFORKED_PAUSES_S", (0.0, 0.0))

    async def test() -> None:
        loop = asyncio.get_running_loop()
        mine, theirs = wire.pair()
        with theirs:
            mine.setblocking(False)
            made = Nursery(LaunchConfig(("x.py",)))
            made._link = mine
            made._linked.set()
            answering = Answering(theirs, [*["cannot fork: why"] * failures, ""])
            loop.add_reader(mine, made._hear)
            loop.add_reader(theirs, answering.hear)
            try:
                if comes:
                    spare = await made.fork_keeper()
                    assert spare.child.pid
                    made.discard(spare)
                    await asyncio.gather(*made._tasks)
                else:
                    with pytest.raises(LaunchFailed, match="cannot fork: why"):
                        await made.fork_keeper()
                assert answering.orders == min(failures + 1, 3)
            finally:
                loop.remove_reader(mine)
                loop.remove_reader(theirs)
                mine.close()

    asyncio.run(test())
