"""Which processes count as what workers have left running."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dlrover_adapters.agent import leftovers
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
