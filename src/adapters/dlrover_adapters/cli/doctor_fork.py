"""Does this kernel let us own processes? ``python -m dlrover_adapters.cli.doctor_fork`` does it, and prints JSON.

A process of its own, because being a subreaper cannot be undone and a fork that hangs must be killable. What it tries is what
the launcher lives on: orphans become ours, their end rings a pidfd, and a child dies with its parent.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import NoReturn

from dlrover_adapters.agent import process

WAIT_MS = 5000


class _Broken(Exception):
    """One of the three does not work."""


def _ended(pidfd: int, what: str) -> int:
    """Wait for a process and reap it: its exit code, negative for a signal."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(WAIT_MS):
        raise _Broken(f"{what} within {WAIT_MS / 1000:g} s")
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert result is not None, "a pidfd that is ready has a status"
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _grandchild(*, bound_to_parent: bool) -> tuple[int, int, float]:
    """A child with a child, as (its pid, the grandchild's pid, seconds that forking took). The child waits for a signal."""
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(writer, bound_to_parent)
    took = time.monotonic() - began
    os.close(writer)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    told = os.read(reader, 4) if poll.poll(WAIT_MS) else b""
    os.close(reader)
    if len(told) != 4:
        os.kill(child, signal.SIGKILL)
        raise _Broken("a forked process could not fork and have itself bound to its parent's life")
    return child, int.from_bytes(told, "little"), took


def _be_child(writer: int, bound_to_parent: bool) -> NoReturn:
    """Fork, have the grandchild tell its pid, and wait, both, for a signal."""
    try:
        me = os.getpid()
        if os.fork() == 0 and (not bound_to_parent or process.die_with_parent(me)):
            os.write(writer, os.getpid().to_bytes(4, "little"))
        while True:
            signal.pause()
    finally:
        os._exit(1)  # never back into the code of whoever forked us


def look() -> dict[str, object]:
    """Try all three. Raises `_Broken` and OSError."""
    process.become_subreaper()
    child, orphan, took = _grandchild(bound_to_parent=False)
    orphans = os.pidfd_open(orphan)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    signal.pidfd_send_signal(orphans, signal.SIGTERM)
    try:
        code = _ended(orphans, "the end of an orphan rang no pidfd")
    except ChildProcessError as error:
        raise _Broken("an orphan did not become a child of its subreaper") from error
    if code != -signal.SIGTERM:
        raise _Broken(f"an orphan killed by SIGTERM was reported with exit code {code}")
    child, bound, _ = _grandchild(bound_to_parent=True)
    bounds = os.pidfd_open(bound)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    code = _ended(bounds, "a child outlived its parent although it was to die with it")
    if code != -signal.SIGKILL:
        raise _Broken(f"a child that was to die with its parent ended with exit code {code}")
    return {"fork_s": took}


def main(_arguments: list[str] | None = None) -> int:
    """Print what works."""
    try:
        told = look()
    except (OSError, AttributeError, _Broken) as error:  # AttributeError: a libc or a Python without pidfds
        told = {"fault": str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"}
    finally:
        for pid in [int(one) for one in _children()]:
            os.kill(pid, signal.SIGKILL)
    print(json.dumps(told), flush=True)
    return 0


def _children() -> list[str]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return file.read().split()
    except OSError:  # a kernel without it, or no /proc: then those killed with our session are all
        return []


if __name__ == "__main__":
    sys.exit(main())
