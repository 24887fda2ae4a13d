"""Process numbers are used again: whoever kills or reaps by number looks again whose it is."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from dlrover_adapters.agent import leftovers, process
from dlrover_adapters.agent.children import Child
from dlrover_adapters.cli import doctor_workers
from dlrover_backends.shared import orphans
from dlrover_core.host import procfs
from dlrover_core.testing import guard

WAITS = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
MARK = "DLROVER_LOCAL_NODE=of-this-test"


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own that has got the number of a process which somebody has listed before."""
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE, start_new_session=True) as child:
        yield child
        child.kill()


def listed(pid: int) -> procfs.Member:
    """The process that had this number before: it began earlier."""
    now = next(one for one in procfs.processes() if one.pid == pid)
    return now._replace(born=now.born - 1)


def lives(child: subprocess.Popen[bytes]) -> bool:
    """A signal on its way would have arrived: whoever is asked for it answers, or is dead."""
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    return True


@pytest.mark.parametrize("ends", ["end_sessions", "end_strays", "leftovers"])
def test_a_number_that_changed_hands_between_the_look_and_the_kill(
    ends: str, stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer is not killed."""
    before = listed(stranger.pid)._replace(parent=os.getpid(), name="ours", session=1)
    looks = iter([[before], []])
    if ends == "end_sessions":
        monkeypatch.setattr(process, "members_of", lambda _: next(looks))
        process.end_sessions([1], 5.0)
    elif ends == "end_strays":
        monkeypatch.setattr(process, "processes", lambda: next(looks))
        process.end_strays(frozenset({"ours"}), frozenset(), 5.0)
    else:
        monkeypatch.setattr(leftovers, "left", lambda *_: next(looks))
        leftovers.end([1], (), 5.0)
    assert lives(stranger)


def test_a_process_that_is_still_the_same_is_killed(stranger: subprocess.Popen[bytes]) -> None:
    """And its death is waited for by the descriptor."""
    now = next(one for one in procfs.processes() if one.pid == stranger.pid)
    fd = procfs.kill(now)
    assert fd is not None
    process.wait_all([fd], time.monotonic() + 10)
    assert stranger.wait(10) == -9


def test_a_dead_newcomer_is_not_reaped(stranger: subprocess.Popen[bytes]) -> None:
    """Its exit code belongs to whoever started it."""
    before = listed(stranger.pid)
    stranger.kill()
    os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT)
    procfs.reap(before)
    assert stranger.wait(10) == -9


def test_a_group_whose_leader_somebody_else_has_reaped() -> None:
    """Its number may be another group's: nobody is killed by it."""

    async def play() -> None:
        dies = subprocess.Popen(WAITS, stdin=subprocess.PIPE, start_new_session=True)  # noqa: ASYNC220  # it is over at once
        child = Child(dies.pid)
        dies.communicate()
        with mock.patch("os.killpg") as killpg:
            child.kill_group()
        assert not killpg.called
        assert await child.dead == -1000
        child.reap()

    asyncio.run(play())


def test_an_orphan_whose_number_changed_hands_while_another_was_waited_for(
    stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher kills the one that it saw, or nobody."""
    now = next(one for one in procfs.children_of_ours() if one.pid == stranger.pid)
    looks = iter([[now._replace(born=now.born - 1)], []])
    monkeypatch.setattr(orphans, "_adopts", [True])
    monkeypatch.setattr(orphans, "children_of_ours", lambda: next(looks))
    monkeypatch.setattr(orphans, "_is_orphan", lambda _: True)
    assert orphans.end(5.0) == 0
    assert lives(stranger)


def test_a_guard_kills_only_who_bears_its_mark(stranger: subprocess.Popen[bytes]) -> None:
    """Whatever number it had listed."""
    guard._kill(stranger.pid, MARK.encode())
    assert lives(stranger)
    name, _, value = MARK.partition("=")
    with subprocess.Popen(WAITS, stdin=subprocess.PIPE, env={**os.environ, name: value}) as marked:
        while not guard.bears(marked.pid, MARK.encode()):  # until it is executed
            time.sleep(0.01)
        guard._kill(marked.pid, MARK.encode())
        assert marked.wait(10) == -9


def test_a_strangers_group_under_the_number_of_a_reaped_probe(stranger: subprocess.Popen[bytes]) -> None:
    """The doctor's own probe is reaped; who has its number now is somebody else."""
    probe = mock.Mock(pid=stranger.pid, returncode=0)
    doctor_workers._end_group(probe)
    assert lives(stranger)
    probe.returncode = None
    doctor_workers._end_group(probe)
    assert stranger.wait(10) == -9
