"""Low priority for the saver's work that nobody waits for: storage, digests, and copies of whole states.

Linux keeps the niceness and the class of disk access of each thread, and a thread hands its own down to those that it starts. An
ordinary user cannot take niceness back, so work of both kinds needs two threads.

What is waited for keeps the priority of training: a lost node's state on its way back, and light copies. Those are kilobytes,
but each thread on their way would wait for its turn: where training keeps all cores busy, a niced one gets a twentieth of a
core, and the copies would fall further behind than the states that the other nodes still have.

When a script has ended well, or a node is about to go, storage and whole copies are waited for as well. Then orders go to
threads of usual priority, and `hasten` gives back what the kernel lets a thread have back: its turn at the disks, and its
niceness to root and where RLIMIT_NICE allows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable

from dlrover_adapters.agent.process import libc

NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE, _IOPRIO_BY_NICENESS, _IOPRIO_PROCESS = 3 << 13, 0, 1


def step_back() -> None:
    """Run this thread, and those that it starts, at low priority for processors and disks. Idempotent."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    _disk_class(_IOPRIO_IDLE, 0)


def hasten(threads: Iterable[int]) -> None:
    """Undo `step_back` for these threads of this process, as far as the kernel lets it. Idempotent."""
    for thread in threads:
        with contextlib.suppress(OSError):  # an ordinary user may not, or the thread has ended
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, os.getpid()))
        _disk_class(_IOPRIO_BY_NICENESS, thread)


def _disk_class(value: int, thread: int) -> None:
    """The class of disk access of a thread; 0: of this one. A refusal costs nothing."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc().syscall(ctypes.c_long(number), _IOPRIO_PROCESS, thread, value)
