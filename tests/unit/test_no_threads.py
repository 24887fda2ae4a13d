"""Hosts that let a process start no more threads: what is kept goes on being kept, and calls wait for one another."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from dlrover_adapters.agent import ground, leftovers
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.ground import Watch
from dlrover_adapters.agent.leftovers import Leavings
from dlrover_adapters.cli import upkeep
from dlrover_adapters.cli.settings import Settings
from dlrover_backends.shared import orphans
from dlrover_core.host import threads


def refuse(_: threading.Thread) -> NoReturn:
    """As `ulimit -u` has it."""
    raise RuntimeError("can't start new thread")


def test_calls_wait_for_the_threads_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is there from the beginning; where there is none, that is an error."""

    async def test() -> None:
        threads.install()
        await asyncio.to_thread(int)
        first = asyncio.ensure_future(asyncio.to_thread(released.wait, 20))
        await asyncio.sleep(0)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            second = asyncio.ensure_future(asyncio.to_thread(lambda: "done"))
            await asyncio.sleep(0)
            released.set()
            assert await first
            assert await second == "done"
            asyncio.get_running_loop().set_default_executor(threads.Threads())
            with pytest.raises(RuntimeError, match="new thread"):
                await asyncio.to_thread(int)

    released = threading.Event()
    asyncio.run(test())


async def while_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few looks without any thread."""
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        for _ in range(20):
            await asyncio.sleep(0.01)


def test_an_agents_folder_is_kept_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watch says once that nothing can be looked at, and looks again later; orphans are reaped again later."""
    monkeypatch.setattr(ground, "LOOK_S", 0.01)
    monkeypatch.setattr(leftovers, "REAP_S", 0.01)
    said, reaped, anew = list[str](), asyncio.Event(), asyncio.Event()

    def say(words: str) -> None:
        said.append(words)
        if len(said) == 2:
            anew.set()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(threads.Threads())
        monkeypatch.setattr(leftovers, "reap_orphans", lambda _: loop.call_soon_threadsafe(reaped.set))
        watch, leavings = Watch(str(tmp_path / "run"), (), say), Leavings((), lambda _: None, say)
        with monkeypatch.context() as inline:
            inline.setattr(asyncio, "to_thread", now)
            await watch.begin()
            await leavings.begin()
        await while_refused(monkeypatch)
        (tmp_path / "run").rmdir()
        reaped.clear()
        await asyncio.wait_for(reaped.wait(), 10)
        await asyncio.wait_for(anew.wait(), 10)
        await leavings.close()
        await watch.end()

    asyncio.run(asyncio.wait_for(test(), 20))
    assert len(said) == 2
    assert "no thread can be started" in said[0]
    assert "was made anew" in said[1]


async def now(work: object, *arguments: object) -> object:
    """Call it here."""
    return work(*arguments)  # type: ignore[operator]  # what threads are given


def test_a_launchers_folders_are_kept_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the agent's are."""
    monkeypatch.setattr(upkeep, "LOOK_S", 0.01)
    folder = tmp_path / "state" / "jobs" / "a"
    settings = Settings(spec="{}", run="r", mark="r", log="", directory=str(folder), argv=(), nproc=1, mode="script")
    restored, there = list[bool](), asyncio.Event()

    async def restore() -> None:
        restored.append(folder.exists())
        if folder.exists():
            there.set()

    async def test() -> None:
        monkeypatch.setattr(orphans, "reap", lambda: None)
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            kept = upkeep.kept(settings, "", "dlrover-run", restore)
            await kept.__aenter__()
            for _ in range(20):
                await asyncio.sleep(0.01)
        assert not any(restored)
        await asyncio.wait_for(there.wait(), 10)
        await kept.__aexit__(None, None, None)

    asyncio.run(asyncio.wait_for(test(), 20))


def test_workers_that_cannot_be_started_for_want_of_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is an answer to the master, and no end of the agent."""
    from dlrover_adapters.agent.launcher import LinuxLauncher
    from dlrover_core.errors import LaunchFailed

    async def test() -> None:
        launcher = LinuxLauncher(LaunchConfig(argv=("true",), nproc=1, run_dir=str(tmp_path)))
        threads.install()
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            with pytest.raises(LaunchFailed, match="no thread can be started"):
                await launcher.open()

    asyncio.run(asyncio.wait_for(test(), 20))
