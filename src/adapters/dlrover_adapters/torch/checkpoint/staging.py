"""The stager for torch.distributed.checkpoint: states copied into memory that is used again, but not while it is read."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from dlrover_core.errors import CoreError

from . import devices, staged
from .shelf import ASIDE_MAX_S, ASIDE_S, WAIT_S, Lasting


class _Staged(dict[Any, Any]):
    """A state dict that is there for as long as anybody may read it."""

    __slots__ = ("__weakref__",)


class FlashStager(AsyncStager):
    """Copies a state dict into memory that is used again and again, so that only the first copy touches fresh pages.

    Keyed by where a tensor is in the state dict, not by its storage: dicts that are made anew for every save hit too. Two sets
    take turns: training may go on, and the save before may still be read. A third save waits for the first: for as long as what
    `stage` returned is in use, be it by torch's thread, its memory is not touched.
    """

    _synchronize_after_execute = False  # staged when `stage` returns

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._pause = clock, pause
        self._lock = threading.Lock()
        self.sets: tuple[dict[tuple[Any, ...], torch.Tensor], ...] = ({}, {})
        self._staged: list[weakref.ref[_Staged] | None] = [None, None]
        self._turn = 0
        self._used: set[torch.device] = set()
        """The CUDA devices that the save under way copies from."""
        staged.count(self)

    def stage(self, state_dict: Any) -> Any:
        """The same state dict with copies of its tensors on the CPU. Raises `CoreError` where both sets stay in use."""
        with self._lock:
            turn = self._turn = self._free()
            self._used.clear()
            with torch.no_grad():
                copied = _Staged(self._copied(dict(state_dict), (), self.sets[turn]))
            devices.wait_for(self._used)
            self._staged[turn] = weakref.ref(copied)
            return copied

    def _free(self) -> int:
        """The set whose turn it is, or the other one: that which nobody reads."""
        pause = ASIDE_S
        with Lasting(self._clock) as lasting:
            while True:
                for turn in (self._turn ^ 1, self._turn):
                    last = self._staged[turn]
                    if last is None or last() is None:
                        return turn
                if lasting.seconds >= WAIT_S:
                    raise CoreError(
                        f"two saves are not over after {WAIT_S:.0f} s, and their memory is not free: wait for the future of "
                        "each save before the next one, and keep neither it nor what was staged"
                    )
                if lasting.look("a save waits for the two before it: wait for the future of each before the next one"):
                    gc.collect()  # a save that failed refers to itself, and to what it saved
                self._pause(pause)
                pause = min(ASIDE_MAX_S, 2 * pause)

    def synchronize_staging(self) -> None:
        """It is staged."""

    def close(self) -> None:
        """Let the memory go."""
        self.sets, self._staged = ({}, {}), [None, None]

    def _copied(self, value: Any, path: tuple[Any, ...], room: dict[tuple[Any, ...], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            shard = getattr(value, "_local_tensor", None)
            if shard is None:
                return self._copy(value, path, room)
            from torch.distributed.tensor import DTensor

            assert isinstance(value, DTensor)
            return DTensor.from_local(
                self._copy(shard, path, room),
                _on_cpu(value.device_mesh),
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        if isinstance(value, dict):
            return {key: self._copied(one, (*path, key), room) for key, one in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(self._copied(one, (*path, number), room) for number, one in enumerate(value))
        return value

    def _copy(
        self, tensor: torch.Tensor, path: tuple[Any, ...], room: dict[tuple[Any, ...], torch.Tensor]
    ) -> torch.Tensor:
        there = room.get(path)
        if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
            there = room[path] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=devices.on_cuda(tensor))
        if not devices.on_cuda(tensor):
            return there.copy_(tensor.detach())
        self._used.add(devices.of(tensor))
        devices.copy(devices.of(tensor), there, tensor.detach())
        return there


def _on_cpu(mesh: Any) -> Any:
    if mesh.device_type == "cpu":
        return mesh
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
