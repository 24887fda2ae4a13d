"""Detects torn copies of tensors on CUDA devices: compares their values at the save's begin with what arrived in the slot.

The looks are taken on the device, by the stream that computes, so they come before whatever training asks of it next; the host
does not wait for them. ``sample`` gathers random blocks into one small buffer. ``full`` adds up the words of each tensor: that
tells a change of any of them, though not an exchange of two. Nothing of this has run on a GPU yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import devices


class Block(NamedTuple):
    """``size`` bytes from ``at`` on: of a tensor on a device, and of its place in the slot."""

    place: torch.Tensor
    tensor: torch.Tensor
    at: int
    size: int
    view: torch.Tensor | None
    """A view of the block's bytes on the device; None: the tensor is not contiguous, so the bytes are read from a copy."""
    word: torch.dtype
    """The type in which the bytes are added up: bytes, where the block's address or size does not allow 32-bit words."""

    def bytes_there(self) -> torch.Tensor:
        """The bytes of the block on the device."""
        return self.view if self.view is not None else _bytes(self.tensor)[self.at : self.at + self.size]

    def bytes_here(self) -> torch.Tensor:
        """The bytes of the block in the slot."""
        return _bytes(self.place)[self.at : self.at + self.size]


class Look(NamedTuple):
    """Values of blocks of one device.

    ``device``: where the tensors are.
    ``seen``: the values, on that device.
    ``arrived``: the host's copy of ``seen``; complete once the device's copies have ended.
    ``blocks``: the blocks.
    ``full``: the values are sums, not bytes.
    """

    device: torch.device
    seen: torch.Tensor
    arrived: torch.Tensor
    blocks: Sequence[Block]
    full: bool

    def differs(self) -> bool:
        """Whether the slot has other bytes than were seen. Call it once the device's copies have ended."""
        return not torch.equal(
            self.arrived, _look(self.blocks, [one.bytes_here() for one in self.blocks], full=self.full)
        )


class Looks:
    """Looks at blocks of one slot's tensors. The blocks are drawn once, so that a look costs the training thread few calls."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], chance: random.Random) -> None:
        """``pairs``: a place in the slot, and its tensor on a device."""
        self._chance = chance
        self._pairs = sorted(pairs, key=lambda one: -one[1].nbytes)
        self._drawn: dict[torch.device, list[Block]] | None = None

    def take(self, verify: str, *, tensors: int, block_bytes: int, every_bytes: int) -> list[Look]:
        """Look now, on every device: a block of each of so many tensors, and of so many bytes. Raises `devices.OutOfMemory`."""
        if verify == "off" or not self._pairs:
            return []
        full = verify == "full"
        if self._drawn is None:
            self._drawn = {}
            for number, (place, tensor) in enumerate(self._pairs):
                if not full and number >= tensors and tensor.nbytes < every_bytes:
                    break
                blocks = self._drawn.setdefault(devices.of(tensor), [])
                size = tensor.nbytes if full else min(block_bytes, tensor.nbytes)
                for _ in range(1 if full else max(1, tensor.nbytes // every_bytes)):
                    blocks.append(_block(place, tensor, self._chance.randrange(tensor.nbytes - size + 1), size))
        found = []
        for device, blocks in self._drawn.items():
            seen = _look(blocks, [one.bytes_there() for one in blocks], full=full)
            found.append(Look(device, seen, devices.room_for(seen), blocks, full))
        return found


def _block(place: torch.Tensor, tensor: torch.Tensor, at: int, size: int) -> Block:
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    view = _bytes(tensor)[at : at + size] if plain else None
    begin = at if view is None else int(view.storage_offset())
    return Block(place, tensor, at, size, view, torch.uint8 if begin % 4 or size % 4 else torch.int32)


def _look(blocks: Sequence[Block], raw: Sequence[torch.Tensor], *, full: bool) -> torch.Tensor:
    """The values of these bytes: with ``full`` their sums modulo 2 ** 64, one for each block; else the bytes themselves."""
    with torch.no_grad():
        if not full:
            return torch.cat(list(raw))
        return torch.stack(
            [one.view(block.word).sum(dtype=torch.int64) for block, one in zip(blocks, raw, strict=True)]
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view, where the tensor is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
