"""Which of the saver's threads run at low priority."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.checkpoints import orders, priority
from dlrover_adapters.agent.checkpoints.orders import Orders
from dlrover_adapters.agent.checkpoints.priority import NICE, step_back

SERVE = (
    "import socket, sys; from dlrover_adapters.agent.saver import serve; serve(socket.socket(fileno=int(sys.argv[1])))"
)


@contextlib.contextmanager
def saver_of() -> Iterator[tuple[socket.socket, int]]:
    """A real saver: the agent's end of its link, and its pid. It ends with 0 when the agent is gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    command = [sys.executable, "-c", SERVE, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as saver:
        theirs.close()
        yield ours, saver.pid
        ours.close()
        assert saver.wait(30) == 0


def priorities(pid: int) -> list[int]:
    """The niceness of each thread, ascending."""
    return sorted(os.getpriority(os.PRIO_PROCESS, int(one.name)) for one in Path(f"/proc/{pid}/task").iterdir())


def test_only_work_that_nobody_waits_for_steps_back() -> None:
    """Of a real saver's threads, storage, digests and whole copies do. Light copies, fetches and the link's thread do not."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with saver_of() as (ours, pid):
        found: list[int] = []
        for key in range(100):
            # No arena is there, so each order fails at once: then the thread that took it has its priority.
            for body in ({"op": "persist"}, {"op": "send", "light": False}, {"op": "send", "light": True}):
                wire.send(ours, {**body, "key": key})
            answers = [wire.unpack(ours.recv(4096)) for _ in range(3)]
            assert {(one["op"], one["key"]) for one in answers} == {("failed", key)}
            found = priorities(pid)
            if found.count(usual) == 3:  # the thread of the digests has begun, too
                break
    # The link's thread, the one that tells of progress and that of light copies; digests, storage and whole copies.
    assert found == [usual] * 3 + [max(usual, NICE)] * 3


def test_a_node_that_goes_stores_and_copies_at_usual_priority() -> None:
    """After ``haste`` orders of both kinds go to threads that never stepped back, which an ordinary user needs."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with saver_of() as (ours, pid):
        for body in (
            {"op": "haste"},
            {"op": "haste"},
            {"op": "persist", "key": 1},
            {"op": "send", "light": False, "key": 2},
        ):
            wire.send(ours, body)
        answers = [wire.unpack(ours.recv(4096)) for _ in range(2)]
        assert {(one["op"], one["key"]) for one in answers} == {("failed", 1), ("failed", 2)}
        found = priorities(pid)
    assert found.count(usual) >= 5, "the link's, that of progress, of light copies, and the two hasty ones"


class Slow(Orders):
    """Orders whose writing waits for ``go`` and is written down."""

    def __init__(self, link: socket.socket) -> None:
        super().__init__(link)
        self.go = threading.Event()
        self.began: queue.Queue[tuple[int, int]] = queue.Queue()

    def _persist(self, body: dict[str, Any]) -> dict[str, Any]:
        self.began.put((body["step"], os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        if body["step"] == 1:
            assert self.go.wait(30)
        return {}


def test_what_waits_is_hastened_beside_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is being written is not begun again by another thread; others do not wait for it."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(orders, "hasten", lambda _threads: None)  # as for an ordinary user
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs:
        one = Slow(theirs)
        one.start()
        for key, step in enumerate((1, 2, 3)):
            one.take({"op": "persist", "key": key, "step": step}, ())
        assert one.began.get(timeout=30) == (1, max(usual, priority.NICE))
        one.take({"op": "haste"}, ())
        assert [one.began.get(timeout=30) for _ in range(2)] == [(2, usual), (3, usual)]
        assert [wire.unpack(ours.recv(4096))["key"] for _ in range(2)] == [1, 2]
        one.take({"op": "persist", "key": 7, "step": 1}, ())
        one.take({"op": "persist", "key": 8, "step": 4}, ())
        assert one.began.empty()
        one.go.set()
        assert [wire.unpack(ours.recv(4096))["key"] for _ in range(3)] == [0, 7, 8]
        assert [one.began.get(timeout=30) for _ in range(2)] == [(1, usual), (4, usual)]


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
