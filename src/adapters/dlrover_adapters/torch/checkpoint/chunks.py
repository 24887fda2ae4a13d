"""Chunks: the part of a tensor that is on this rank, and its place in the whole tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from dlrover_core.errors import SpecError

from .sources import Found, Path, address, local


class Chunk(NamedTuple):
    """The part of one tensor that is on this rank.

    ``name``, ``path``: of the tensor in the state.
    ``tensor``: local memory.
    ``dtype``: without "torch.".
    ``full_shape``: of the whole tensor.
    ``offsets``: where this part begins in the whole tensor.
    ``live``: something else than the optimizer writes it.
    ``same_as``: the name of a tied tensor that is saved already; empty: not tied.
    ``shard``: which part of how many this is, for `replicas`; "": the whole tensor, None: no other rank has this part.
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
    """Raise `SpecError` for a tensor without memory of its own, such as one made of others: reading it would end the process."""
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
    """The chunk of a tensor on this rank; None: there is none. Raises `SpecError` for layouts that cannot be saved."""
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
    """A name for this rank's shard of a DTensor; None: no other rank of the world has the same shard."""
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
