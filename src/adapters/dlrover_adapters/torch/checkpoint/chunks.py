"""Chunks: what of one tensor is on this rank, where it lies in the whole, and in whose memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from dlrover_core.errors import SpecError

from .sources import Found, Path, address, local


class Chunk(NamedTuple):
    """What of one tensor is on this rank. ``tensor`` is local memory; ``same_as``: the name under which its bytes lie already.

    ``shard``: which part of how many it is, as `replicas` compares them; "" for all of it, None where no other rank has it.
    """

    name: str
    path: Path
    tensor: torch.Tensor
    dtype: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    live: bool
    same_as: str = ""
    shard: str | None = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Is there memory to copy? Tensors that are made of others have none, and reading it would end the process."""
    here = local(tensor)
    of_others = type(here).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if here.device.type != "meta" and (
        of_others or (here.numel() and here.layout == torch.strided and not address(here))
    ):
        raise SpecError(
            name,
            f"a {type(here).__name__} has no memory of its own, so it cannot be copied; give the tensors that it is made of with "
            "state=..., and leave out what contains it",
        )


def chunk_of(name: str, found: Found, *, live: bool) -> Chunk | None:
    """What of a tensor is here; None: nothing."""
    tensor = found.tensor.detach()
    here = local(tensor)
    if here.layout != torch.strided or here.is_quantized or here.device.type == "meta":
        raise SpecError(
            name, f"a tensor of {here.layout} on {here.device} cannot be saved; leave it out, or give it dense"
        )
    full, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    shard: str | None = ""
    if here is not tensor:
        shape, offsets = place_of(name, tensor)
        shard = "" if shape == full else _shard(tensor)
        if tuple(here.shape) != shape:
            raise SpecError(name, f"its shard is {list(here.shape)} where its placements say {list(shape)}")
        if here.numel() == 0 and tensor.numel():
            return None
    return Chunk(name, found.path, here, str(here.dtype).removeprefix("torch."), full, offsets, live, shard=shard)


def _shard(tensor: Any) -> str | None:
    """Which of a DTensor's shards is here; None: each rank of the world has another one."""
    mesh = tensor.device_mesh
    cut = [number for number, one in enumerate(tensor.placements) if not one.is_replicate()]
    if math.prod(mesh.size(one) for one in cut) == torch.distributed.get_world_size():
        return None
    at = mesh.get_coordinate() or ()
    return repr([(mesh.size(one), at[one]) for one in cut])


def place_of(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offsets of a DTensor's shard."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(one.is_partial() for one in tensor.placements):
        raise SpecError(name, f"a DTensor placed {tensor.placements} is a sum in the making; reduce it first")
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offsets)


def add(chunks: list[Chunk], seen: dict[Any, int], chunk: Chunk) -> None:
    """Tied tensors are copied once; where one of the names is live, all are."""
    tensor = chunk.tensor
    key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    if tensor.numel() and key in seen:
        first = seen[key]
        live = chunk.live and chunks[first].live
        chunks[first] = chunks[first]._replace(live=live)
        chunk = chunk._replace(same_as=chunks[first].name, live=live)
    else:
        seen[key] = len(chunks)
    chunks.append(chunk)
