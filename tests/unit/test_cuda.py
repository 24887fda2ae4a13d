"""What is asked of CUDA, in which order and of which device. `cuda_shim` stands for a GPU: nothing here says how fast it is."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_shim import Cuda
from flashing import newest, saved
from torch import nn

from dlrover_adapters.torch.checkpoint import devices, filling
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.staging import FlashStager

pytestmark = pytest.mark.usefixtures("alone")
POPULATED_S = 30.0


class Split:
    """A model with a layer on each of some devices, and a buffer on the last one that forward writes."""

    def __init__(self, cuda: Cuda, *on: int, width: int = 64) -> None:
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in on), nn.BatchNorm1d(width, affine=False))
        for layer, device in zip(self.model, on, strict=False):
            for one in layer.parameters():
                cuda.put(one, device)
        for one in self.model.buffers():
            cuda.put(one, on[-1])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self._batch = torch.randn(16, width)

    def step(self) -> None:
        """One."""
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """By the names that they are saved under."""
        return {f"model.{name}": one.detach().clone() for name, one in self.model.state_dict().items()}


def is_saved(ckpt: FlashCheckpoint, wanted: dict[str, torch.Tensor]) -> None:
    """The newest state in memory is this one, bit for bit."""
    tensors = saved(ckpt)[1]
    assert wanted.keys() <= tensors.keys()
    assert [name for name, one in wanted.items() if not torch.equal(one, tensors[name])] == []


def populated(ckpt: FlashCheckpoint) -> None:
    """Until its thread has done what it can."""
    assert ckpt._engine is not None
    assert ckpt._engine.memory is not None
    assert ckpt._engine.memory.populated.wait(POPULATED_S)


@pytest.mark.parametrize("mode", ["async", "blocking"])
@pytest.mark.parametrize("verify", ["sample", "full"])
def test_states_of_several_devices_have_arrived_when_they_are_published(
    monkeypatch: pytest.MonkeyPatch, mode: str, verify: str
) -> None:
    """A slot is published once the copies of all devices are there, and no device's optimizer writes before its copy is made."""
    cuda = Cuda(monkeypatch)
    run = Split(cuda, 0, 1, 2)
    with FlashCheckpoint("", **run.parts, every=2, mode=mode, verify=verify) as ckpt:
        for number in range(1, 7):
            run.step()
            if number == 2:
                populated(ckpt)
            wanted = run.state()
            ckpt.step(number)
            if number % 2 == 0:
                run.step()
                ckpt.wait()
                is_saved(ckpt, wanted)
        assert ckpt.stats.torn == 0
        assert ckpt.stats.saves == 3
    assert {one.device for one in cuda.asked("copy")} == {0, 1, 2}


def test_the_order_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side streams begin after what was computed; the compute streams, not the training thread, wait for their end."""
    cuda = Cuda(monkeypatch)
    run = Split(cuda, 0, 1)
    with FlashCheckpoint("", **run.parts, every=1, verify="off") as ckpt:
        ckpt.restore()
        populated(ckpt)
        run.step()
        cuda.calls.clear()
        hold = threading.Event()
        assert ckpt._engine is not None
        publish = ckpt._engine._landed
        monkeypatch.setattr(ckpt._engine, "_landed", lambda *a: (hold.wait(POPULATED_S), publish(*a)))
        ckpt.step(1)
        mine = [one for one in cuda.calls if one.thread == "MainThread"]
        for device in (0, 1):
            own = [one.what for one in mine if one.device == device and one.what != "clone"]
            copies = own.count("copy")
            # The fence; the copies; where they end.
            assert own == ["record", "side waits", *["copy"] * copies, "record"]
            assert copies == 2 + 3 * device
        cuda.calls.clear()
        run.step()
        mine = [one for one in cuda.calls if one.thread == "MainThread"]
        assert {one.device for one in mine if one.what == "stream waits"} == {0, 1}
        hold.set()


def test_with_scalars_of_the_host_the_compute_stream_waits_and_the_host_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adam on CUDA has its step counters in the host's memory: those the host copies itself, and goes on."""
    cuda = Cuda(monkeypatch)
    run = Split(cuda, 0)
    run.optimizer = torch.optim.Adam(run.model.parameters())
    ended = threading.Event()
    wait = devices.Mark.wait
    with FlashCheckpoint("", model=run.model, optimizer=run.optimizer, every=1) as ckpt:
        ckpt.restore()
        populated(ckpt)
        run.step()
        monkeypatch.setattr(
            devices.Mark,
            "wait",
            lambda mark: (
                wait(mark)
                if threading.current_thread().name == "MainThread"
                else ended.wait(POPULATED_S) and wait(mark)
            ),
        )
        ckpt.step(1)
        run.step()  # returns, with the device still at work
        assert ckpt._engine is not None
        flight = ckpt._engine.copier.flight
        assert flight is not None
        assert flight.read.is_set()
        assert not flight.done.is_set()
        ended.set()
        ckpt.wait()
        assert {"optimizer.state.0.weight.step", "optimizer.state.0.bias.step"} <= saved(ckpt)[1].keys()
        assert saved(ckpt)[1]["optimizer.state.0.weight.step"] == 1


@pytest.mark.parametrize(("verify", "told"), [("sample", 1), ("full", 1), ("off", 0)])
def test_a_copy_that_was_torn_on_a_device_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch, verify: str, told: int
) -> None:
    """Something else than the optimizer writes a parameter before its copy is made."""
    cuda = Cuda(monkeypatch)
    run = Split(cuda, 1)
    monkeypatch.setattr("dlrover_adapters.torch.checkpoint.copier.Copier.before_overwriting", lambda _self: 0.0)
    with FlashCheckpoint("", **run.parts, every=1, verify=verify) as ckpt:
        ckpt.restore()
        populated(ckpt)
        run.step()
        with cuda.lock:  # the copier's wait makes the copies
            ckpt.step(1)
            with torch.no_grad():
                run.model[0].weight.data.add_(1.0)
        if told:
            with pytest.warns(RuntimeWarning, match="written while it was copied"):
                ckpt.wait()
        else:
            ckpt.wait()
        assert ckpt.stats.torn == told


def test_a_change_of_one_number_is_seen_by_a_full_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tensor that is not contiguous, too."""
    cuda = Cuda(monkeypatch)
    weights = {"wide": torch.randn(64, 4096), "turned": torch.randn(300, 500).t(), "half": torch.randn(3).bfloat16()}
    for one in weights.values():
        cuda.put(one, 0)
    with FlashCheckpoint("", state=weights, frozen=["*"], every=1, verify="full") as ckpt:
        ckpt.restore()
        populated(ckpt)
        for number, one in enumerate(weights.values()):
            with cuda.lock:
                ckpt.step(number + 1)
                one[-1:].zero_()
            with pytest.warns(RuntimeWarning) if number == 0 else pytest.MonkeyPatch.context():  # type: ignore[attr-defined]
                ckpt.wait()
            assert ckpt.stats.torn == number + 1


@pytest.mark.parametrize("verify", ["sample", "full"])
def test_tensors_that_begin_anywhere_are_not_taken_for_torn(monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    """Of any type and size, and in the middle of other memory: words there need not be words in the slot."""
    cuda = Cuda(monkeypatch)
    weights = {
        "odd": torch.randn(101).bfloat16()[1:],
        "bytes": torch.arange(103, dtype=torch.uint8)[3:],
        "flags": torch.rand(7) > 0.5,
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    for one in weights.values():
        cuda.put(one, 0)
    with FlashCheckpoint("", state=weights, frozen=["*"], every=1, verify=verify) as ckpt:
        ckpt.restore()
        populated(ckpt)
        ckpt.step(1)
        ckpt.wait()
        assert (ckpt.stats.torn, ckpt.stats.saves) == (0, 1)
        is_saved(ckpt, {f"state.{name}": one.resolve_conj() for name, one in weights.items()})


@pytest.mark.parametrize(
    ("device_bytes", "room", "clones"),
    [(2**20, None, True), (0, None, False), (2**20, 100, True), (300, None, True)],
    ids=["room", "none wanted", "out of memory", "some"],
)
def test_live_tensors_are_put_aside_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device_bytes: int, room: int | None, clones: bool
) -> None:
    """What is written outside the optimizer is saved as it is now, and a full device never ends training."""
    cuda = Cuda(monkeypatch, room=room)
    run = Split(cuda, 0, 1)
    with FlashCheckpoint("", **run.parts, every=1, device_bytes=device_bytes) as ckpt:
        ckpt.restore()
        populated(ckpt)
        for number in (1, 2):
            run.step()
            wanted = run.state()
            with cuda.lock:
                ckpt.step(number)
                for one in run.model.buffers():
                    one.zero_()
            ckpt.wait()
            is_saved(ckpt, wanted)
    # Of a device that is nearly full the first tensors may fit.
    assert bool(cuda.asked("clone")) == clones or room is not None
    assert cuda.cloned <= min(2 * device_bytes, room or 2 * device_bytes)
    assert caplog.text.count("no memory to put") == (room is not None)


def test_memory_is_pinned_by_a_thread_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this rank's asks anything of the first GPU, which is another rank's; every slot is pinned, and unpinned."""
    cuda = Cuda(monkeypatch)
    run = Split(cuda, 3)
    with FlashCheckpoint("", **run.parts, every=2) as ckpt:
        ckpt.restore()
        populated(ckpt)
        for number in range(1, 5):
            run.step()
            ckpt.step(number)
        ckpt.wait()
        assert ckpt.stats.pinned
        assert ckpt._engine is not None
        memory = ckpt._engine.memory
        assert memory is not None
        slots = range(memory.geometry.slots)
        assert [one.at[0] for one in cuda.asked("pin")] == [memory.data_at(slot) for slot in slots]
        assert newest(ckpt) in slots
    assert cuda.pinned == {}
    away = [one for one in cuda.calls if one.device != 3]
    assert away == []
    assert [one for one in cuda.calls if one.thread != "MainThread" and one.current != 3] == []


def test_memory_that_cannot_be_pinned_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving goes on, slowly."""
    run = Split(Cuda(monkeypatch, pins=False), 0)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        ckpt.restore()
        populated(ckpt)
        run.step()
        ckpt.step(1)
        ckpt.wait()
        assert not ckpt.stats.pinned
        assert ckpt.stats.populated
        is_saved(ckpt, run.state())
    assert caplog.text.count("cannot be pinned") == 1


def test_a_slot_that_is_not_pinned_yet_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are there, but copies into it would stand."""
    cuda = Cuda(monkeypatch)
    reached, go_on = threading.Event(), threading.Event()
    pin = devices.pin

    def slow(address: int, size: int) -> str:
        reached.set()
        assert go_on.wait(POPULATED_S)
        return pin(address, size)

    monkeypatch.setattr(devices, "pin", slow)
    monkeypatch.setattr("dlrover_adapters.torch.checkpoint.memory.WORTH_WAITING_BYTES", 0)
    run = Split(cuda, 0)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        ckpt.restore()
        assert reached.wait(POPULATED_S)
        assert ckpt._engine is not None
        memory = ckpt._engine.memory
        assert memory is not None
        assert memory.costs(0)
        go_on.set()
        populated(ckpt)
        assert not memory.costs(0)


def test_the_fence_is_of_the_devices_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the script never chose a device: the thread's would be the first one."""
    cuda = Cuda(monkeypatch)
    run = Split(cuda, 1, 2)
    with FlashCheckpoint("", **run.parts, every=100) as ckpt:
        for number in (1, 2, 3):
            run.step()
            ckpt.step(number)
        assert [one.device for one in cuda.asked("record")] == [1, 2] * 3
        assert [one.device for one in cuda.asked("host waits")] == [1, 2] * 2


def test_restoring_threads_use_the_targets_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pool's threads begin on the first GPU."""
    run = Split(Cuda(monkeypatch), 1)
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1) as ckpt:
        run.step()
        ckpt.step(1)
        ckpt.wait()
    cuda = Cuda(monkeypatch)
    again = Split(cuda, 1)
    ran: list[int] = []
    monkeypatch.setattr(filling, "threads_for", lambda _world: 2)
    beside = filling._beside

    def spied(threads: int, work: Any, used: Any = ()) -> None:
        beside(threads, [*work, *[lambda: ran.append(cuda._device)] * (8 * len(work))], used)

    monkeypatch.setattr(filling, "_beside", spied)
    with FlashCheckpoint(str(tmp_path), **again.parts, every=1) as ckpt:
        assert ckpt.restore() == 1
    assert set(ran) == {1}
    assert all(torch.equal(one, other) for one, other in zip(run.state().values(), again.state().values(), strict=True))


def test_devices_without_streams_of_ours_are_saved_while_training_stands(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """XPU, NPU, MPS: no fence is known for them."""
    caplog.set_level(logging.WARNING)
    model = nn.Linear(4, 4)
    monkeypatch.setattr(devices, "of", lambda one: torch.device("xpu", 0) if one is model.weight else one.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashCheckpoint("", model=model, optimizer=optimizer, every=1) as ckpt:
        ckpt.step(1)
        assert ckpt._engine is not None
        assert not ckpt._engine.beside
    assert "there are parameters on xpu:0" in caplog.text


def test_the_stager_waits_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is staged has arrived when `stage` returns."""
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(torch, "empty", _unpinned(torch.empty))
    tensors = {f"on {device}": cuda.put(torch.randn(50), device) for device in (0, 1)}
    staged = FlashStager().stage(tensors)
    assert all(torch.equal(staged[name], one) for name, one in tensors.items())
    assert {one.device for one in cuda.asked("host waits for stream")} == {0, 1}


def _unpinned(empty: Any) -> Any:
    def made(*sizes: Any, pin_memory: bool = False, **more: Any) -> Any:
        assert pin_memory
        return empty(*sizes, **more)

    return made
