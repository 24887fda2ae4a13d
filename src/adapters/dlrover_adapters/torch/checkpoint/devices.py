"""Calls CUDA for checkpoints: devices of tensors, streams, events, pinned memory. No other module of this package calls CUDA.

Every call names its device. A new thread begins on device 0, whatever device the training thread has chosen: what it asks for
without naming a device goes there, and makes a context of several hundred MB on a GPU that another rank uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

OutOfMemory = torch.cuda.OutOfMemoryError
Copy = tuple[torch.Tensor, torch.Tensor]
"""A place in the host's memory, and the tensor that goes there."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of this process


def of(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor."""
    return tensor.device


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a CUDA device."""
    return of(tensor).type == "cuda"


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the host's memory."""
    return of(tensor).type == "cpu"


def is_plain(tensor: torch.Tensor) -> bool:
    """Does it lie in host memory as its values are, one element after the other?"""
    return on_host(tensor) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def used_by(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The CUDA devices of these tensors, each once, in order."""
    return list(dict.fromkeys(of(one) for one in tensors if on_cuda(one)))


def why_blocking(tensors: Iterable[torch.Tensor]) -> str:
    """Why training must stand while these are copied; empty: it need not."""
    other = next((of(one) for one in tensors if of(one).type not in {"cpu", "cuda", "meta"}), None)
    return f"there are parameters on {other}, and only CUDA's streams are known here" if other is not None else ""


def choose(device: torch.device) -> None:
    """Make this device the calling thread's current one."""
    torch.cuda.set_device(device)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the same device. Raises `OutOfMemory`."""
    return tensor.detach().clone()


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory of the host, of this tensor's shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def copy(_device: torch.device, place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Ask for a copy from a tensor's device into the host's memory, on the stream that is current for that device."""
    place.copy_(tensor, non_blocking=True)


def grouped(copies: Iterable[Copy]) -> dict[torch.device, list[Copy]]:
    """Copies grouped by the device of their tensor."""
    found: dict[torch.device, list[Copy]] = {}
    for place, tensor in copies:
        found.setdefault(of(tensor), []).append((place, tensor))
    return found


class Mark(NamedTuple):
    """A point in the work of one device's stream."""

    device: torch.device
    event: Any

    def hold(self) -> None:
        """Have the device's current stream go on only after this point. The host does not wait."""
        self.event.wait(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """The host waits for this point."""
        self.event.synchronize()


def mark(device: torch.device, stream: Any = None) -> Mark:
    """The end of what was asked so far of a stream of this device, as a rule the current one."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device) if stream is None else stream)
    return Mark(device, event)


def wait_for(devices: Iterable[torch.device]) -> None:
    """The host waits for the current stream of each device."""
    for one in devices:
        torch.cuda.current_stream(one).synchronize()


class SideStreams:
    """One stream a device, for copies that run beside training."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, copies: Mapping[torch.device, Sequence[Copy]]) -> list[Mark]:
        """Copy each device's tensors on its own stream, after what was computed there so far; where those copies end."""
        marks = []
        for device, those in copies.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for place, tensor in those:
                    copy(device, place, tensor)
            marks.append(mark(device, stream))
        return marks


def pin(address: int, size: int) -> str:
    """Pin memory of this process, from a thread that has chosen its device. Why that failed; empty: it is pinned."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(address, size, _PORTABLE)
    return "" if int(code) == 0 else f"cudaHostRegister of {size:,} bytes: error {int(code)}"


def unpin(device: torch.device, addresses: Iterable[int]) -> None:
    """Unpin memory that `pin` has pinned for this device. Any thread may call it."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for address in addresses:
            runtime.cudaHostUnregister(address)
