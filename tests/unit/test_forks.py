"""Forks that fail: the zygote answers with the reason and lives on, the agent tries again for a while and then says so."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_adapters.agent import import_list, nursery, wire, zygote
from dlrover_adapters.agent.config import AUTO, LaunchConfig
from dlrover_adapters.agent.nursery import Nursery
from dlrover_adapters.agent.spawn import Spawned
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
    assert told.value.host
    assert len(tried) == 3


class Zygotes:
    """In place of `spawn_zygote`: each says the next of ``words`` and ends, but one that is ready lives. An error is raised."""

    def __init__(self, *words: dict[str, object] | OSError) -> None:
        self.words, self.spoken = list(words), asyncio.Event()

    def __call__(self, *_: object) -> Spawned:
        """The next one."""
        word = self.words.pop(0)
        if not self.words:
            self.spoken.set()
        if isinstance(word, OSError):
            raise LaunchFailed("cannot execute python") from word
        link, theirs = wire.pair()
        with theirs:
            wire.send(theirs, word)
        link.setblocking(False)
        command = ["sleep", "60"] if word["op"] == "ready" else ["true"]
        return Spawned(os.posix_spawnp(command[0], command, {"PATH": os.defpath}), link)


UNFORKED = {"op": "unfit", "preload": "", "reason": "cannot fork: see ulimit -u", "kept": 0, "host": True}
LIMIT = OSError(errno.EAGAIN, "no")


@pytest.mark.parametrize(
    ("words", "plain"),
    [((UNFORKED, {"op": "ready"}), False), ((UNFORKED, LIMIT, {"op": "ready"}), False), ((UNFORKED,) * 3, True)],
)
def test_a_limit_that_passes_does_not_cost_the_zygote(
    monkeypatch: pytest.MonkeyPatch, words: tuple[dict[str, object] | OSError, ...], plain: bool
) -> None:
    """Another is tried after a pause, and once more after a longer one; then workers are executed for good."""
    monkeypatch.setattr(nursery, "FORKLESS_PAUSES_S", (0.0, 0.0))
    spawned = Zygotes(*words)
    monkeypatch.setattr(nursery, "spawn_zygote", spawned)

    async def test() -> None:
        made = Nursery(LaunchConfig(("x.py",)))
        made.open()
        assert made._life is not None
        await asyncio.wait_for(spawned.spoken.wait(), 20)
        waits = made._life if plain else asyncio.ensure_future(made.ready())
        await asyncio.wait_for(asyncio.shield(waits), 20)
        assert made.plain == plain
        assert made.refused == {}
        await made.close()

    asyncio.run(test())


def test_workers_are_executed_while_the_limit_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the pause to end, neither a start nor the end of the launcher."""
    monkeypatch.setattr(nursery, "FORKLESS_PAUSES_S", (600.0,))
    monkeypatch.setattr(nursery, "spawn_zygote", Zygotes(UNFORKED))

    async def test() -> None:
        made = Nursery(LaunchConfig(("x.py",)))
        made.open()
        await asyncio.wait_for(made.ready(), 20)
        assert made.plain
        await asyncio.wait_for(made.close(), 20)

    asyncio.run(test())


def test_a_list_that_is_refused_while_there_is_no_zygote_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers are executed then, and nothing of the list is in them."""

    async def test() -> None:
        script = tmp_path / "x.py"
        script.write_text("")
        made = Nursery(LaunchConfig((str(script),), imports=str(tmp_path / "imports")))
        import_list.write(made._imports, import_list.ImportList(), [], [str(script)])
        import_list.refuse(made._imports, "why")
        assert import_list.refused(made._imports) == "why"
        made._loading, made.plain = AUTO, True
        made._settled.set()
        await made._heed_workers()
        assert made.refused == {}
        await asyncio.wait_for(made.ready(), 1)

    asyncio.run(test())


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
