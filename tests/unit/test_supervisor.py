"""What successors of dead masters are told."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.cli import supervisor
from dlrover_adapters.cli.settings import EX_AGAIN, EX_OVER
from dlrover_adapters.cli.supervisor import MastersFailed, NoNodes, Supervisor


def settings_of(**more: Any) -> Any:
    """Settings of a job whose log is shared by hosts, as far as a supervisor reads them."""
    return SimpleNamespace(
        directory="",
        shared=True,
        nodes_elsewhere=True,
        mark="",
        in_memory=lambda: os.memfd_create("settings"),
        job=SimpleNamespace(job="j", hung_s=0.0),
        holder=lambda pid, number: f"host-{pid}-{number}",
        **more,
    )


async def told_of_the_dead(monkeypatch: pytest.MonkeyPatch, codes: list[int], lives: list[float]) -> list[list[str]]:
    """Which dead masters each one is told of; ``codes`` they end with, after ``lives`` seconds by the loop's clock."""
    told: list[list[str]] = []
    loop, ahead = asyncio.get_running_loop(), 0.0
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + ahead)

    async def started(*words: str, **_: Any) -> Any:
        told.append([after for word, after in itertools.pairwise(words) if word == "--dead"])
        number = len(told) - 1

        async def wait() -> int:
            nonlocal ahead
            ahead += lives[number]
            return codes[number]

        return SimpleNamespace(pid=100 + len(told), wait=wait, returncode=codes[number])

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(supervisor, "BACK_OFF_S", 0.0)
    with socket.socket() as port:
        settings = settings_of()
        await asyncio.wait_for(Supervisor(settings, "t", port, NoNodes()).run(), 10_000)
    return told


def test_a_successor_is_told_of_every_dead_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever led last may have died before two that the log refused: its lease is waited for unless it, too, is named."""
    told = asyncio.run(told_of_the_dead(monkeypatch, [-9, EX_AGAIN, EX_AGAIN, EX_OVER], [60.0, 0.1, 0.1, 0.1]))
    assert told == [[], ["host-101-1"], ["host-101-1", "host-102-2"], ["host-101-1", "host-102-2", "host-103-3"]]


def test_of_too_many_those_that_lived_longest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log refuses masters for minutes: the one that led is named still."""
    monkeypatch.setattr(supervisor, "DEAD_MAX", 2)
    told = asyncio.run(told_of_the_dead(monkeypatch, [-9, *[EX_AGAIN] * 4, EX_OVER], [60.0, *[1.0] * 5]))
    assert [("host-101-1" in one, len(one)) for one in told] == [(False, 0), (True, 1), *[(True, 2)] * 4]


def test_a_doubt_about_the_leader_brings_a_second_master_that_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a shared log there is one master here, until it leads and does not answer; the second leaves its port to it."""

    async def story() -> list[bool]:
        quiet: list[bool] = []
        over, first, second = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def started(*words: str, **_: Any) -> Any:
            quiet.append("--quiet" in words)
            (first if len(quiet) == 1 else second).set()

            async def wait() -> int:
                await over.wait()
                return EX_OVER

            return SimpleNamespace(pid=100 + len(quiet), wait=wait, returncode=EX_OVER)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        with socket.socket() as port:
            settings = settings_of()
            made = Supervisor(settings, "t", port, NoNodes())
            running = asyncio.ensure_future(made.run())
            await asyncio.wait_for(first.wait(), 10)
            assert quiet == [False]
            made._doubt.set()
            await asyncio.wait_for(second.wait(), 10)
            over.set()
            await asyncio.wait_for(running, 10)
        return quiet

    assert asyncio.run(story()) == [False, True]


def supervised(monkeypatch: pytest.MonkeyPatch, tries: list[int]) -> list[float]:
    """Run a supervisor whose masters end with these codes, errors' numbers below 0 where none can be started; its pauses."""
    left, pauses = list(tries), []

    async def started(*_words: str, **_: Any) -> Any:
        code = left.pop(0)
        if code < 0:
            raise OSError(-code, os.strerror(-code))

        async def wait() -> int:
            return code

        return SimpleNamespace(pid=7, wait=wait, returncode=code)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def run() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        with socket.socket() as port:
            settings = settings_of(control_log="control.log")
            made = Supervisor(settings, "t", port, NoNodes())
            monkeypatch.setattr(asyncio, "sleep", sleep)
            await made._keep_one()

    try:
        asyncio.run(run())
    finally:
        assert not left
    return pauses


def test_a_limit_of_processes_does_not_end_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without a master: one is started when the limit has passed."""
    pauses = supervised(monkeypatch, [-errno.EAGAIN, -errno.ENOMEM, EX_OVER])
    assert pauses == [supervisor.UNFORKED_PAUSE_S] * 2


def test_a_limit_that_does_not_pass_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's own words, and where to look."""
    monkeypatch.setattr(supervisor, "UNFORKED_MAX", 3)
    with pytest.raises(MastersFailed, match="Resource temporarily unavailable; see ulimit -u"):
        supervised(monkeypatch, [-errno.EAGAIN] * 3)
