"""`torch.cuda` without a GPU: tensors of the host's memory that claim a device, streams that do nothing until somebody waits.

    cuda = Cuda(monkeypatch)
    cuda.put(model.weight, 1)     # it claims to lie on cuda:1

A copy from a device is made when its stream is waited for, and not before: the latest moment that CUDA allows. So what nobody
waits for never arrives, and a tensor that is written too early is copied as it is then. What a test computes happens at once, as
the compute stream's work; when a compute stream is told to wait for an event, what the event stands for is done first.
Every thread begins on device 0, and what it asks for is noted with its name: `calls`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from dlrover_adapters.torch.checkpoint import devices

FAILED = 2


class Call(NamedTuple):
    """``what`` was asked by a thread of this name, whose device was ``current``, of ``device``; ``at``: an address and a size."""

    what: str
    thread: str
    current: int
    device: int
    at: tuple[int, int] = (0, 0)


class Stream:
    """Work in order, done when it is waited for."""

    def __init__(self, cuda: Cuda, device: int, *, computes: bool) -> None:
        self.cuda, self.device, self.computes = cuda, device, computes
        self._work: list[Callable[[], object]] = []
        self._done = 0

    def ask(self, one: Callable[[], object]) -> None:
        """Later."""
        with self.cuda.lock:
            self._work.append(one)

    @property
    def end(self) -> int:
        """How much was asked so far."""
        return len(self._work)

    def run(self, until: int) -> None:
        """Do what was asked up to there."""
        with self.cuda.lock:
            while self._done < until:
                self._done += 1
                self._work[self._done - 1]()

    def wait_stream(self, other: Stream) -> None:
        """As torch's."""
        self.cuda.note("side waits", self.device)
        until = other.end
        self.ask(lambda: other.run(until))

    def synchronize(self) -> None:
        """As torch's."""
        self.cuda.note("host waits for stream", self.device)
        self.run(self.end)


class Event:
    """As torch's."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._of: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """As torch's; without a stream that of this thread's device."""
        stream = stream or self.cuda.current(None)
        self.cuda.note("record", stream.device)
        self._of = (stream, stream.end)

    def wait(self, stream: Stream | None = None) -> None:
        """As torch's."""
        stream = stream or self.cuda.current(None)
        self.cuda.note("stream waits", stream.device)
        if stream.computes:
            self.synchronize()
        else:
            stream.ask(self.synchronize)

    def synchronize(self) -> None:
        """As torch's."""
        assert self._of is not None, "waited for before it was recorded"
        stream, until = self._of
        self.cuda.note("host waits", stream.device)
        stream.run(until)


class Cuda:
    """Replaces `torch.cuda`'s calls. ``room``: bytes that clones may take in all, None: any; ``pins``: can memory be pinned?"""

    def __init__(self, patch: pytest.MonkeyPatch, *, room: int | None = None, pins: bool = True) -> None:
        self.room, self.pins = room, pins
        self.calls: list[Call] = []
        self.cloned = 0
        """Bytes of all clones."""
        self.pinned: dict[int, int] = {}
        """Sizes by address."""
        self.lock = threading.RLock()
        self._claims: dict[int, tuple[int, torch.Tensor]] = {}
        self._threads = threading.local()
        self._computing: dict[int, Stream] = {}
        for name, fake in {
            "Stream": lambda device: Stream(self, _number(device), computes=False),
            "Event": lambda: Event(self),
            "stream": self._stream,
            "current_stream": self.current,
            "set_device": self._set_device,
            "device": self._on,
            "cudart": lambda: self,
        }.items():
            patch.setattr(torch.cuda, name, fake)
        for name, fake in {
            "of": self.of,
            "copy": self._copy,
            "clone": self._clone,
            "room_for": torch.empty_like,
        }.items():
            patch.setattr(devices, name, fake)

    # ---- for tests

    def put(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """It claims to lie there from now on, with all that shares its memory."""
        self._claims[tensor.untyped_storage().data_ptr()] = (device, tensor)
        return tensor

    def asked(self, what: str) -> list[Call]:
        """Calls of one kind."""
        return [one for one in self.calls if one.what == what]

    def note(self, what: str, device: int, at: tuple[int, int] = (0, 0)) -> None:
        """Of this thread."""
        self.calls.append(Call(what, threading.current_thread().name, self._device, device, at))

    # ---- in torch.cuda's place

    @property
    def _device(self) -> int:
        return getattr(self._threads, "device", 0)

    def _set_device(self, device: torch.device) -> None:
        self._threads.device = device.index
        self.note("set_device", device.index)

    @contextlib.contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before, self._threads.device = self._device, _number(device)
        try:
            yield
        finally:
            self._threads.device = before

    def current(self, device: torch.device | None = None) -> Stream:
        """The stream that this thread asks work of for a device."""
        number = self._device if device is None else _number(device)
        chosen: dict[int, Stream] = self._threads.__dict__.setdefault("streams", {})
        with self.lock:
            computing = self._computing.setdefault(number, Stream(self, number, computes=True))
        return chosen.get(number, computing)

    @contextlib.contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        chosen: dict[int, Stream] = self._threads.__dict__.setdefault("streams", {})
        chosen[stream.device] = stream
        try:
            yield
        finally:
            del chosen[stream.device]

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802  # the runtime's
        """Pin."""
        self.note("pin", self._device, (address, size))
        if not self.pins:
            return FAILED
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # the runtime's
        """Unpin."""
        self.note("unpin", self._device, (address, self.pinned.pop(address)))
        return 0

    # ---- in the place of the few calls of `devices` that need a tensor of a device

    def of(self, tensor: torch.Tensor) -> torch.device:
        """The device that it claims."""
        if tensor.device.type == "meta" or not tensor.numel():
            return tensor.device
        claimed = self._claims.get(tensor.untyped_storage().data_ptr())
        return torch.device("cuda", claimed[0]) if claimed is not None else tensor.device

    def _copy(self, device: torch.device, place: torch.Tensor, tensor: torch.Tensor) -> None:
        self.note("copy", _number(device))
        self.current(device).ask(lambda: place.copy_(tensor.detach()))

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.room is not None and self.cloned + tensor.nbytes > self.room:
            raise devices.OutOfMemory("CUDA out of memory. Tried to allocate")
        self.cloned += tensor.nbytes
        self.note("clone", _number(self.of(tensor)))
        return self.put(tensor.detach().clone(), _number(self.of(tensor)))


def _number(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index or 0
