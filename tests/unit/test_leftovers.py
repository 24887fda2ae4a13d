"""Which processes count as what workers have left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_adapters.agent import leftovers, process, signals
from dlrover_adapters.agent.leftovers import Leavings
from dlrover_adapters.agent.zygote import Zygote
from dlrover_core.host.cgroups import Group


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process in a session of its own, which no launcher has started."""
    line = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True) as child:
        yield child
        child.kill()


def test_children_of_a_program_that_embeds_a_launcher_are_its_own(stranger: subprocess.Popen[bytes]) -> None:
    """They are neither killed nor reaped."""
    assert leftovers.left((), ()) == []
    assert leftovers.end((), (), 1.0) == []
    assert stranger.poll() is None
    stranger.kill()
    leftovers.reap_orphans(())
    assert stranger.wait(10) == -9


def test_a_wait_may_be_as_long_as_a_duration(stranger: subprocess.Popen[bytes]) -> None:
    """`poll` takes 24 days at most, and ``stop_grace_s`` more than that; so does ``probe_s``."""
    fd = os.pidfd_open(stranger.pid)
    stranger.kill()
    process.wait_all([fd], time.monotonic() + 9e8)
    zygote = Zygote.__new__(Zygote)
    zygote._probe_s = 9e8
    reader, writer = os.pipe()
    os.write(writer, b"fit")
    assert zygote._answer_of_probe(reader) == ""
    os.close(reader)
    os.close(writer)


def test_whoever_stops_the_job_waits_for_no_leavings(
    stranger: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to the launcher ends their grace."""
    monkeypatch.setattr(leftovers, "ASK_S", 0.01)
    monkeypatch.setattr(leftovers, "_adopting", True)
    said = list[str]()

    def say(words: str) -> None:
        said.append(words)
        signals.tell(str(tmp_path), signal.SIGINT)

    ending = Leavings((), lambda _: None, say).end(600.0, lambda: signals.asked(str(tmp_path)))
    asyncio.run(asyncio.wait_for(ending, 20))
    assert not Path(f"/proc/{stranger.pid}").exists()
    assert said[0].startswith("waiting up to 600 s (stop_grace_s)")
    assert said[1].startswith("stopped what still ran as the job was to stop: ")


def test_an_agent_takes_unknown_children_for_orphans(
    stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has started none but those that it knows."""
    monkeypatch.setattr(leftovers, "_adopting", False)  # and so again afterwards
    leftovers.adopt()
    assert [one.pid for one in leftovers.left((), ())] == [stranger.pid]


def test_what_is_in_the_workers_group_is_left_by_them(
    stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whosever child it is; but not a spare, which the launcher knows."""

    class Shared(Group):
        def members(self) -> list[int]:
            return [stranger.pid, spare]

    spare = os.getpid()
    monkeypatch.setattr(leftovers, "known", lambda: frozenset({spare}))
    group = Shared("nowhere")
    assert [one.pid for one in leftovers.left((), (), group)] == [stranger.pid]
    assert leftovers.end((), (), 10.0, group) == []
    stranger.wait(10)
