"""Processes that a check starts: each in a session of its own, bounded in time, its output in a file, and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlrover_adapters.agent.children import Child, wait_dead
from dlrover_adapters.agent.process import end_sessions
from dlrover_adapters.agent.spawn import module_command
from dlrover_core.runtime.launcher import TAIL_BYTES_MAX

END_S = 5.0


class Command(NamedTuple):
    """What is run, with which environment: an executable with its arguments, or else a module of ours."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    module: bool = False


class Ended(NamedTuple):
    """How a process ended: its exit code, or None where its time was over; the end of what it said."""

    exit_code: int | None
    said: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        return lines[-1] if lines else ""


async def run(commands: Sequence[Command], limit_s: float, folder: str | None = None) -> list[Ended]:
    """Run all of them at once, at most ``limit_s``; how each ended. Raises `OSError` where one cannot be started.

    On the agent's loop, in its main thread: processes die with the thread that started them. When this returns, or is
    cancelled, nothing of them lives.
    """
    children: list[Child] = []
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in commands]
        try:
            for command, file in zip(commands, files, strict=True):
                children.append(_start(command, file.fileno()))
            await wait_dead(children, limit_s)
            timely = [not one.alive for one in children]
        finally:
            await _end(children)
        said = [_tail(file.fileno()) for file in files]
        codes = [one.dead.result() if done else None for one, done in zip(children, timely, strict=True)]
        return [Ended(code, text) for code, text in zip(codes, said, strict=True)]


def _start(command: Command, output: int) -> Child:
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    kind = "module" if command.module else "command"
    argv = [*module_command(f"{__package__}.child"), str(os.getpid()), kind, *command.argv]
    pid = os.posix_spawn(argv[0], argv, dict(command.env), file_actions=actions, setsigmask=())
    return Child(pid)


async def _end(children: list[Child]) -> None:
    """Kill whatever is left of their sessions, and reap them."""
    for one in children:
        one.look()
        one.kill_group()
        if one.alive:
            one.signal(9)  # it may not lead its session yet
    if not children:
        return
    # A cancelled check waits for this too: nobody else knows of them.
    ending = asyncio.ensure_future(asyncio.to_thread(end_sessions, [one.pid for one in children], END_S))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    await wait_dead(children, END_S)
    for one in children:
        if not one.alive:
            one.reap()
    if cancelled is not None:
        raise cancelled


def _tail(fd: int) -> str:
    size = os.lseek(fd, 0, os.SEEK_END)
    return os.pread(fd, TAIL_BYTES_MAX, max(0, size - TAIL_BYTES_MAX)).decode(errors="replace")
