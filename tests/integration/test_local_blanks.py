"""Blanks of the local backend: agents that were started before there is a node for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from local_nodes import TOKEN, Fifo, Lines, run

from dlrover_adapters.agent import looks
from dlrover_backends.local import (
    Ahead,
    LocalBackend,
    LocalCommand,
    LocalNodeHost,
    Started,
    blanks,
)
from dlrover_backends.shared import wire
from dlrover_backends.shared.process import blank
from dlrover_core.errors import ConnectionLost, LaunchRefused
from dlrover_core.testing.backend_stand import make_launch, watching

BLANK = """
    import json, signal, socket, sys
    control = socket.socket(fileno=int(sys.argv[2]))
    control.send(json.dumps({"warm": True}).encode())
    while (said := json.loads(control.recv(4096))).get("ask"):
        control.send(json.dumps({"here": True}).encode())
    open(sys.argv[1], "w").write(said["node"] + "\\n")
    signal.pause()
"""


ANSWERS_ONCE = """
    import json, signal, socket, sys
    control = socket.socket(fileno=int(sys.argv[2]))
    control.recv(4096)
    control.send(json.dumps({"here": True}).encode())
    signal.pause()
"""


def ahead(folder: Path, keep: int = 0, first: Sequence[Started] = (), code: str = BLANK) -> Ahead:
    """Blanks that say into a `Fifo` who they were told to be."""

    def command(control: int) -> LocalCommand:
        argv = (sys.executable, "-I", "-S", "-c", textwrap.dedent(code), str(folder / "said"), str(control))
        return LocalCommand(argv)

    return Ahead(command, first, keep)


def test_a_node_is_a_blank_that_was_started_before(tmp_path: Path) -> None:
    """The process that waited becomes the node, and lives and dies as any other; where none waits one is started."""
    first = blank(ahead(tmp_path).command)

    async def story() -> None:
        async with (
            LocalNodeHost(tmp_path / "s", {"worker": ahead(tmp_path, first=[first])}) as host,
            Fifo(tmp_path) as said,
        ):
            await host.warm()
            backend = LocalBackend(tmp_path / "s")
            async with watching(backend) as watch:
                for index in range(2):
                    await backend.launch(make_launch(index), TOKEN)
                    assert (await said.readline()).decode().strip() == make_launch(index).node
                assert host.pid(make_launch(0).name) == first.child.pid
                assert host.pid(make_launch(1).name) != first.child.pid
                first.signal(signal.SIGKILL)
                ended = await watch.over(make_launch(0).name)
                assert (ended.phase, ended.reason) == ("failed", "killed by SIGKILL")

    run(story)


TELLS_ALL = """
    import json, socket, sys
    control = socket.socket(fileno=int(sys.argv[2]))
    said = open(sys.argv[1], "w", buffering=1)
    while words := control.recv(4096):
        told = json.loads(words)
        if not told.get("ask"):
            said.write(json.dumps(told) + "\\n")
"""


def test_agents_are_told_where_the_masters_have_moved_to(tmp_path: Path) -> None:
    """Whoever observes names its masters: where agents know others, those that live are told, and later ones too."""
    known, moved = ["127.0.0.1:1"], ["127.0.0.1:2", "127.0.0.1:3"]

    async def story() -> None:
        agents = {"worker": ahead(tmp_path, code=TELLS_ALL)}
        async with LocalNodeHost(tmp_path / "s", agents, masters=known), Fifo(tmp_path) as said:
            first, second = LocalBackend(tmp_path / "s", known), LocalBackend(tmp_path / "s", moved)
            async with watching(first):
                await first.launch(make_launch(0), TOKEN)
                assert json.loads(await said.readline()) == {"node": make_launch(0).node}
            async with watching(second):
                assert json.loads(await said.readline()) == {"masters": moved}
                await second.launch(make_launch(1), TOKEN)
                assert json.loads(await said.readline()) == {"node": make_launch(1).node, "masters": moved}
            async with wire.connect(tmp_path / "s") as (reader, writer):
                await wire.write(writer, "observe", 7)
                with pytest.raises(ConnectionLost):
                    await wire.read(reader)

    run(story)


def test_blanks_are_kept_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is taken, or dies or hangs before it has a name, is replaced; dead ones are taken for no node."""
    monkeypatch.setattr(blanks, "REFILL_S", 0.0)
    monkeypatch.setattr(blanks, "BACK_OFF_MAX_S", 0.0)
    born = "import os; os.write(os.open(sys.argv[3], os.O_WRONLY), b'%d\\n' % os.getpid())"
    warm, _, named = BLANK.partition("    while")
    code = f"{warm}    {born}\n    while{named}"
    ready = tmp_path / "ready"
    os.mkfifo(ready)

    def command(control: int) -> LocalCommand:
        made = ahead(tmp_path, code=code).command(control)
        return LocalCommand((*made.argv, str(ready)))

    async def story() -> None:
        async with Fifo(tmp_path) as said, Lines(ready) as born:
            first = blank(command)
            async with LocalNodeHost(tmp_path / "s", {"worker": Ahead(command, [first], 1, 0.5, looks.seen)}) as host:
                assert int(await born.readline()) == first.child.pid
                first.signal(signal.SIGKILL)
                second = int(await born.readline())
                os.kill(second, signal.SIGSTOP)
                hung, second = second, int(await born.readline())
                assert not psutil.pid_exists(hung)
                await LocalBackend(tmp_path / "s").launch(make_launch(0), TOKEN)
                assert host.pid(make_launch(0).name) == second
                assert (await said.readline()).decode().strip() == make_launch(0).node
                third = int(await born.readline())
                await LocalBackend(tmp_path / "s").launch(make_launch(1), TOKEN)
                assert host.pid(make_launch(1).name) == third
                assert int(await born.readline())
        assert not psutil.pid_exists(second)

    run(story)


@pytest.mark.parametrize("cold", ["import signal; signal.pause()", ANSWERS_ONCE], ids=["importing", "answering"])
def test_a_blank_that_hangs_before_it_is_warm_is_replaced(
    cold: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ready_s`` to its first answer, and ``hung_s`` after each: whoever would take it for a node would wait for its join."""
    monkeypatch.setattr(blanks, "BACK_OFF_MAX_S", 0.0)
    commands = iter([ahead(tmp_path, code=cold).command])

    def command(control: int) -> LocalCommand:
        return next(commands, ahead(tmp_path).command)(control)

    async def story() -> None:
        first = blank(command)
        made = Ahead(command, [first], 1, 0.5, looks.seen, ready_s=0.5)
        async with LocalNodeHost(tmp_path / "s", {"worker": made}) as host, Fifo(tmp_path):
            assert first.control is not None
            await asyncio.wait_for(asyncio.to_thread(first.child.wait), 5)
            await asyncio.wait_for(host.warm(), 5)
            await LocalBackend(tmp_path / "s").launch(make_launch(0), TOKEN)
            assert host.pid(make_launch(0).name) != first.child.pid

    run(story)


def test_a_blank_that_cannot_be_executed_is_a_refusal(tmp_path: Path) -> None:
    """With the system's reason, and for good."""

    async def story() -> None:
        async with LocalNodeHost(tmp_path / "s", {"worker": Ahead(lambda _: LocalCommand(("/no/such/program",)))}):
            with pytest.raises(LaunchRefused, match="No such file") as refused:
                await LocalBackend(tmp_path / "s").launch(make_launch(), TOKEN)
            assert refused.value.permanent

    run(story)
