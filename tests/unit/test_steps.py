"""What a worker tells its agent about its steps."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from dlrover_adapters.torch import steps


class Adam:
    """An optimizer, as far as counting goes."""


ADAM = Adam()


class Agent:
    """The agent's ends of both channels."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "agent.sock")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        self.slot = os.memfd_create("slot")
        os.ftruncate(self.slot, 4096)
        self.signal = steps.StepSignal(3, 1, self.path, self.slot)
        self.caller, _ = self.listener.accept()
        self.caller.setblocking(False)

    def heard(self) -> list[dict[str, Any]]:
        """Every ring so far."""
        rings = []
        while True:
            try:
                rings.append(msgpack.unpackb(self.caller.recv(4096)))
            except BlockingIOError:
                return rings


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent that listens to one worker; no script has been loaded."""
    monkeypatch.setattr(steps, "_expected", False)
    made = Agent(tmp_path)
    yield made
    made.signal.silence()
    made.caller.close()
    made.listener.close()
    os.close(made.slot)


def test_a_script_that_tells_nothing_is_counted(agent: Agent) -> None:
    """The first optimizer call rings at once, as a counted step."""
    agent.signal.optimizer_called(ADAM)
    assert agent.heard() == [{"generation": 3, "rank": 1, "step": 1, "told": False}]


def test_a_script_that_will_tell_is_not_counted_before_it_does(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script has imported `step`, the first ring bears the script's own number."""
    import dlrover_adapters.torch

    assert dlrover_adapters.torch.step is steps.tell
    agent.signal.optimizer_called(ADAM)
    assert agent.heard() == []
    agent.signal.told(61)
    assert agent.heard() == [{"generation": 3, "rank": 1, "step": 61, "told": True}]


def test_a_script_that_never_tells_is_counted_after_all(agent: Agent) -> None:
    """A script that imports `step` but does not call it is counted from its third step on."""
    steps.expect()
    for _ in range(3):
        agent.signal.optimizer_called(ADAM)
    assert [ring["step"] for ring in agent.heard()] == [3]
