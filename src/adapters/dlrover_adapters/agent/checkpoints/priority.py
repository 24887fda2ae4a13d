"""Low priority for the saver's work that nobody waits for: storage, digests, and copies of whole states.

Linux keeps the niceness and the class of disk access of each thread, and a thread hands its own down to those that it starts. An
ordinary user cannot take niceness back, so work of both kinds needs two threads.

What is waited for keeps the priority of training: a lost node's state on its way back, and light copies. Those are kilobytes,
but each thread on their way would wait for its turn: where training keeps all cores busy, a niced one gets a twentieth of a
core, and the copies would fall further behind than the states that the other nodes still have.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

from dlrover_adapters.agent.process import libc

NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE, _IOPRIO_PROCESS = 3 << 13, 1


def step_back() -> None:
    """Run this thread, and those that it starts, at low priority for processors and disks. Idempotent."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc().syscall(ctypes.c_long(number), _IOPRIO_PROCESS, 0, _IOPRIO_IDLE)  # a refusal costs nothing
