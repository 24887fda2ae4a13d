"""The agent's sockets when the process has no descriptors left: callers wait, and the loop does not spin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_adapters.agent import listener
from dlrover_adapters.agent.listener import PacketListener


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit on descriptors that tests may reach."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def call(path: str) -> socket.socket:
    """A connection to it, which nobody may have accepted yet."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(path)
    return made


def all_files() -> list[int]:
    """Every descriptor that is left."""
    found = []
    with contextlib.suppress(OSError):
        while True:
            found.append(os.open("/dev/null", os.O_RDONLY))
    return found


@pytest.mark.usefixtures("few_files")
def test_a_caller_waits_while_there_are_no_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop hears of the connection a few times a second, never in each turn; it is taken once there is a descriptor."""
    monkeypatch.setattr(listener, "RETRY_S", 0.02)
    asked, wrong, taken = [0], list[object](), asyncio.Event()

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

        def ready() -> bool:
            asked[0] += 1
            found = heard.accept()
            if found is not None:
                found.close()
                taken.set()
            return found is not None

        heard = PacketListener(str(tmp_path / "agent.sock"), ready)
        heard.open()
        caller = call(heard.path)
        held = all_files()
        turns = 0
        while asked[0] < 3:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20
        assert not taken.is_set()
        assert not ready()  # as a worker's end has it asked, meanwhile
        for fd in held:
            os.close(fd)
        await asyncio.wait_for(taken.wait(), 10)
        caller.close()
        held = all_files()
        os.close(held.pop())
        late = call(heard.path)
        ready()
        heard.close()  # while it pauses
        late.close()
        for fd in held:
            os.close(fd)

    asyncio.run(test())
    assert wrong == []
