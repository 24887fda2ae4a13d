"""Which of the saver's threads run at low priority."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.checkpoints.priority import NICE, step_back

SERVE = (
    "import socket, sys; from dlrover_adapters.agent.saver import serve; serve(socket.socket(fileno=int(sys.argv[1])))"
)


def test_only_work_that_nobody_waits_for_steps_back() -> None:
    """Of a real saver's threads, storage, digests and whole copies do. Light copies, fetches and the link's thread do not."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with (
        ours,
        theirs,
        subprocess.Popen([sys.executable, "-c", SERVE, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as saver,
    ):
        theirs.close()
        found: list[int] = []
        for key in range(100):
            # No arena is there, so each order fails at once: then the thread that took it has its priority.
            for body in ({"op": "persist"}, {"op": "send", "light": False}, {"op": "send", "light": True}):
                wire.send(ours, {**body, "key": key})
            answers = [wire.unpack(ours.recv(4096)) for _ in range(3)]
            assert {(one["op"], one["key"]) for one in answers} == {("failed", key)}
            tasks = Path(f"/proc/{saver.pid}/task").iterdir()
            found = sorted(os.getpriority(os.PRIO_PROCESS, int(one.name)) for one in tasks)
            if found.count(usual) == 3:  # the thread of the digests has begun, too
                break
        ours.close()  # the agent is gone
        assert saver.wait(30) == 0
    # The link's thread, the one that tells of progress and that of light copies; digests, storage and whole copies.
    assert found == [usual] * 3 + [max(usual, NICE)] * 3


def test_threads_inherit_a_low_priority() -> None:
    """Those that write parts beside each other are made by the thread of storage."""
    found: list[int] = []

    def inside() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def outside() -> None:
        step_back()
        step_back()
        child = threading.Thread(target=inside)
        child.start()
        child.join()

    one = threading.Thread(target=outside)
    one.start()
    one.join()
    assert found == [max(NICE, os.getpriority(os.PRIO_PROCESS, 0))]
