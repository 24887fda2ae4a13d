"""Arenas with states in them, as workers leave them, for tests of what is done with their bytes."""

from __future__ import annotations

import io
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlrover_adapters.checkpoint.hashing import digest, digests
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob
from dlrover_adapters.checkpoint.table import light as lightened
from dlrover_core.checkpoint.arena import PAGE, Control, Geometry, Stamp

Chunk = tuple[str, torch.Tensor, Sequence[int], Sequence[int]]
"""Name, the chunk's elements, its offsets, and the whole tensor's shape."""


def pickled(value: Any) -> bytes:
    """As a worker serialises what is no tensor."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


class Arena:
    """The memory of one rank's arena, with one state in slot 0."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        objects: Mapping[str, Any],
        *,
        rank: int = 0,
        world: int = 1,
        step: int = 120,
        generation: int = 1,
        writes: Sequence[str] | None = None,
        paths: Mapping[str, tuple[Any, ...]] | None = None,
        hashed: bool = True,
        writers: Sequence[int] = (),
        told: Sequence[str] | None = None,
        own: Sequence[int] = (),
        light: bool = False,
        alike: bool = False,
        raw: Mapping[str, bytes] | None = None,
    ) -> None:
        items, at = [], 0
        for name, tensor, offsets, full in chunks:
            size = tensor.numel() * tensor.element_size()
            kind = str(tensor.dtype).removeprefix("torch.")
            written = writes is None or name in writes
            items.append(
                Item(name, kind, tuple(full), tuple(offsets), tuple(tensor.shape), at, size, live=False, write=written)
            )
            at += -(-size // 64) * 64
        names = [item.name for item in items] + list(objects)
        named = tuple((name, tuple((paths or {}).get(name, name.split(".")))) for name in dict.fromkeys(names))
        mine = tuple(objects if told is None else told)
        table = Table(7, world, rank, ((rank,),), tuple(items), mine, named, tuple(writers), (), tuple(own), alike)
        if light:
            table, _ = lightened(table)
            items, chunks, at = list(table.items), [], 0
        packed = table.packed()
        blob = pack_blob({**{name: pickled(value) for name, value in objects.items()}, **(raw or {})})
        self.geometry = Geometry(2, len(packed), len(blob) + 100, at)
        self.memory = mmap.mmap(-1, self.geometry.total_bytes)
        self.memory[PAGE : PAGE + len(packed)] = packed
        self.control = Control(self.memory, self.geometry)
        self.control.make(
            layout=7, rank=rank, world=world, local_rank=rank, table_bytes=len(packed), table_digest=digest(packed)
        )
        data_at = self.geometry.data_at(0)
        for item, (_, tensor, _, _) in zip(items, chunks, strict=True):
            if item.size:
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                self.memory[data_at + item.at : data_at + item.at + item.size] = raw
        blob_at = self.geometry.blob_at(0)
        self.memory[blob_at : blob_at + len(blob)] = blob
        self.stamp = Stamp(generation, step, 1, len(blob), digest(blob))
        self.control.publish(0, self.stamp)
        if hashed:
            self.hash()

    def hash(self) -> None:
        """As the saver does after a publication."""
        sizes = self.geometry
        data = memoryview(self.memory)[sizes.data_at(0) : sizes.data_at(0) + sizes.data_bytes]
        for block, found in enumerate(digests(data)):
            at = sizes.digests_at(0) + 8 * block
            self.memory[at : at + 8] = found.to_bytes(8, "little")
        self.control.note_hashed(0, self.stamp.sequence)

    def view(self) -> SlotView:
        """What is in it."""
        return SlotView(self.memory, 0)


def state(seed: int = 0, rows: int = 10) -> dict[str, torch.Tensor]:
    """A small state of tensors of many kinds: shapes without elements, without dimensions, several dtypes."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(rows, 4, generator=dice),
        "model.bias": torch.randn(rows, generator=dice).to(torch.bfloat16),
        "model.empty": torch.empty(0, 3),
        "model.steps": torch.tensor(17 + seed),
        "optimizer.state.weight.exp_avg": torch.randn(rows, 4, generator=dice, dtype=torch.float64),
        "optimizer.state.weight.mask": torch.randint(0, 2, (rows,), generator=dice).bool(),
    }


OBJECTS = {"optimizer.param_groups": [{"lr": 0.1, "params": ["weight", "bias"]}], "extra": {"epoch": 3}}


def whole(tensors: Mapping[str, torch.Tensor], **more: Any) -> Arena:
    """One rank that holds all of a state."""
    return Arena(
        [(name, one, [0] * one.dim(), one.shape) for name, one in tensors.items()], more.pop("objects", OBJECTS), **more
    )


def sharded(tensors: Mapping[str, torch.Tensor], world: int, **more: Any) -> list[Arena]:
    """Ranks that hold a row block each, as FSDP's: the last ones less, or nothing; what cannot be cut is rank 0's."""
    arenas = []
    for rank in range(world):
        chunks: list[Chunk] = []
        for name, one in tensors.items():
            if one.dim() == 0 or one.shape[0] == 0:
                if rank == 0:
                    chunks.append((name, one, [0] * one.dim(), one.shape))
                continue
            rows = -(-one.shape[0] // world)
            begin = min(rank * rows, one.shape[0])
            piece = one[begin : begin + rows]
            if len(piece):
                chunks.append((name, piece, [begin] + [0] * (one.dim() - 1), one.shape))
        objects = OBJECTS if rank == 0 else {f"rank.{rank}.rng": {"seed": rank}}
        arenas.append(Arena(chunks, objects, rank=rank, world=world, **more))
    return arenas
