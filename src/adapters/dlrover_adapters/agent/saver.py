"""The saver: one process per agent that reads ranks' states behind their backs: to storage, to hash them, to other nodes.

Forked from the zygote when the first rank says that it saves, or executed where there is none. It runs at low priority, has
threads of its own for everything that takes time, and whatever it reads is pinned so that nobody overwrites it. It keeps nothing
that its successor is not handed by the agent again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import sys

from . import wire
from .process import libc, run_executed, set_name, set_title

NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE, _IOPRIO_PROCESS = 3 << 13, 1


def serve(link: socket.socket) -> int:
    """Answer frames until the agent is gone."""
    set_name("dlrover-saver")
    _step_back()
    from .checkpoints.orders import Orders  # a zygote that never forks one need not import it

    orders = Orders(link)
    orders.start()
    while (frame := wire.receive(link)) is not None:
        match frame.body:
            case {"op": "title", "title": str(title)}:
                set_title(title)
            case body:
                orders.take(body, frame.fds)
    # Threads may be in the middle of a write to a dead file server: nobody waits for them, and drafts are known by their names.
    os._exit(0)


def _step_back() -> None:
    """Processors and disks are for training first."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc().syscall(ctypes.c_long(number), _IOPRIO_PROCESS, 0, _IOPRIO_IDLE)  # a refusal costs nothing


def main(arguments: list[str]) -> int:
    """Run a saver that was executed, not forked: where there is no zygote."""
    return run_executed("saver", arguments, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
