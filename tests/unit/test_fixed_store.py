"""A port that somebody named: each generation's store listens there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch_store = pytest.importorskip("torch._C._distributed_c10d")

from dlrover_adapters.agent import keeper, wire  # noqa: E402
from dlrover_adapters.agent.config import LaunchConfig, Mode  # noqa: E402
from dlrover_adapters.agent.keeper import FixedPort  # noqa: E402
from dlrover_adapters.agent.seat import seat_for  # noqa: E402
from dlrover_adapters.torch.worker import serve_store  # noqa: E402
from dlrover_core.runtime.launcher import WorkersLaunch  # noqa: E402


@pytest.fixture
def port() -> int:
    """A free one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def fixed() -> Iterator[FixedPort]:
    """Closed in the end."""
    made = FixedPort(serve_store)
    yield made
    made.close()


def client(port: int) -> Any:
    """A client of the store that listens there."""
    return torch_store.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def test_every_generation_has_a_fresh_store_at_the_same_port(fixed: FixedPort, port: int) -> None:
    """What the attempt before left is not found there."""
    for _ in range(4):
        fixed.open("127.0.0.1", port)
        one = client(port)
        assert not one.check(["left"])
        one.set("left", "behind")


def test_who_connects_between_two_generations_waits_for_the_next(fixed: FixedPort, port: int) -> None:
    """The port is never given up in between, so nobody is refused and nobody else can take it."""
    fixed.open("127.0.0.1", port)
    fixed._store = None
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    found: list[int] = []
    early = threading.Thread(target=lambda: found.append(client(port).add("here", 1)))
    early.start()
    fixed.open("127.0.0.1", port)
    early.join(20)
    assert found == [1]


def test_a_port_that_is_given_back_is_waited_for(fixed: FixedPort, port: int) -> None:
    """The node that had rank 0 gives it back at about the same time."""
    other = FixedPort(serve_store)
    other.open("127.0.0.1", port)
    giving = threading.Timer(0.1, other.close)
    giving.start()
    fixed.open("127.0.0.1", port)
    assert client(port).add("here", 1) == 1
    giving.join()


def test_a_port_that_is_taken_is_answered(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, after a while."""
    monkeypatch.setattr(keeper, "PATIENT_S", 0.05)
    ours, theirs = wire_pair()
    with ours, theirs, socket.create_server(("127.0.0.1", port)):
        keeper._fix(theirs, FixedPort(serve_store), "127.0.0.1", port)
        while (frame := wire.receive(ours)) is not None and frame.body["op"] == "here":
            pass  # it says that it lives while it waits
    assert frame is not None
    assert frame.body["op"] == "fixed"
    assert "Address already in use" in frame.body["reason"]


def wire_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a line as an agent and its keeper have it."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_workers_are_told_the_named_port() -> None:
    """In place of the store that the world has named."""
    launch = WorkersLaunch("run", 1, 0, 1, 1, 0, 1, "127.0.0.1:40001", 0, 3)
    config = LaunchConfig(("x.py",), mode=Mode.SCRIPT)
    assert seat_for(config, launch, 0, "", "").launch.store == "127.0.0.1:40001"
    named = config._replace(store_at="127.0.0.1:29500")
    assert seat_for(named, launch, 0, "", "").launch.store == "127.0.0.1:29500"
