"""Streams that have nothing to read yet: waiting is told, and is no hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from toy_streams import Toy, ToyStand, fill

from dlrover_adapters.agent.slot import StepSlot
from dlrover_adapters.data import folder_stream as folders
from dlrover_adapters.data.folder_stream import FolderStream
from dlrover_adapters.data.following import Followed
from dlrover_adapters.torch import steps
from dlrover_adapters.torch.slot import Slot
from dlrover_core.data.streams import Message
from dlrover_core.diagnosis.stall import Pulse


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a file looks often."""
    monkeypatch.setattr(folders, "LOOK_S", 0.001)


def test_waiting_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Who waits long says for what."""
    monkeypatch.setattr("dlrover_adapters.data.following.TOLD_S", 0.0)
    monkeypatch.setattr("dlrover_adapters.data.following.WAIT_S", 0.0)
    stream = FolderStream(tmp_path)
    source, found = Followed(stream), []
    thread = threading.Thread(target=lambda: found.append(source[0]))
    thread.start()
    while "waited for offset 0 of partition 0" not in capsys.readouterr().err:
        assert thread.is_alive()
    fill(tmp_path, "a.tmp", 7).rename(tmp_path / "a.jsonl")
    thread.join(60)
    assert found == [7]


# Waiting, as the agent sees it.


class Pulses(Toy):
    """Is quiet for three reads, and notes what the agent sees after so many seconds of silence."""

    def __init__(self, path: Path, agents: StepSlot) -> None:
        super().__init__(path)
        self.agents, self.seen = agents, list[Pulse]()

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """At the fourth time."""
        self.seen.append(self.agents.pulse(0, int(time.monotonic() * 1_000_000)))
        return [Message(offset, 7)] if len(self.seen) > 3 else []


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pulses, steps.StepSignal]]:
    """This process is a worker, which made its newest step an hour ago; a machine's clock begins at 0 when it starts."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 7200)
    agents = StepSlot()
    signal = steps.StepSignal(1, 0, str(tmp_path / "none.sock"), agents.fd)
    assert signal.slot is not None
    hour_ago_us = int((time.monotonic() - 3600) * 1_000_000)
    signal.slot.step(1, hour_ago_us - 1_000_000)
    signal.slot.step(2, hour_ago_us)
    monkeypatch.setattr(steps, "_signal", signal)
    ToyStand(tmp_path / "toy", Toy)
    yield Pulses(tmp_path / "toy", agents), signal
    agents.close()


def test_waiting_for_a_stream_is_no_hang(worker: tuple[Pulses, steps.StepSignal]) -> None:
    """It is a phase, which each part of the wait begins anew, and which ends with it."""
    stream, _ = worker
    assert Followed(stream)[0] == 7
    assert [one.phase for one in stream.seen] == [3] * 4
    assert max(one.idle_us for one in stream.seen) < 60_000_000
    after = stream.agents.pulse(0, int(time.monotonic() * 1_000_000))
    assert (after.phase, after.step) == (0, 2)
    assert after.idle_us < 60_000_000


def test_a_loader_process_waits_for_its_worker(
    worker: tuple[Pulses, steps.StepSignal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child's wait is seen in the worker's slot; one that has outlived the worker says nothing."""
    stream, signal = worker
    assert signal.slot is not None
    slot = Slot(stream.agents.fd)
    monkeypatch.setattr(steps, "_signal", None)
    monkeypatch.setattr(steps, "_parents", (os.getppid() + 1, slot))
    assert Followed(stream)[0] == 7
    assert min(one.idle_us for one in stream.seen) > 3_000_000_000
    monkeypatch.setattr(steps, "_parents", (os.getppid(), slot))
    stream.seen.clear()
    assert Followed(stream)[0] == 7
    assert max(one.idle_us for one in stream.seen) < 60_000_000
    signal.slot.step(3, int((time.monotonic() + 100) * 1_000_000))
    assert stream.agents.pulse(0, int((time.monotonic() + 140) * 1_000_000)).idle_us == pytest.approx(40e6, abs=5e6)


def test_a_fork_of_the_worker_may_say_that_it_waits(worker: tuple[Pulses, steps.StepSignal]) -> None:
    """The child of a real fork has the worker's slot."""
    stream, _ = worker
    child = os.fork()
    if not child:
        steps._forked()
        os._exit(0 if Followed(stream)[0] == 7 and stream.seen[-1].idle_us < 60_000_000 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert stream.agents.pulse(0, int(time.monotonic() * 1_000_000)).idle_us < 60_000_000
