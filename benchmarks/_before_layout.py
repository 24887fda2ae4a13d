"""The exchange of layouts as it was before: every rank's chunk list goes to every rank, and each rank assigns all chunks.

Kept as the peer of `bench_layout.py`, word for word where that matters for its cost.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_adapters.torch.checkpoint.capture import Signature
from dlrover_adapters.torch.checkpoint.chunks import Chunk
from dlrover_adapters.torch.checkpoint.meeting import Meeting

Key = tuple[str, tuple[int, ...], tuple[int, ...]]


class Piece(NamedTuple):
    """One chunk of the whole state, as all ranks know it."""

    key: Key
    size: int
    live: bool


class MeetingBefore(Meeting):
    """All values are fetched one by one, and read again before they are deleted."""

    def decide(
        self, name: str, mine: bytes, how: Callable[[list[bytes]], bytes], *, limit_s: float | None = None
    ) -> bytes:
        """What rank 0 makes of what every rank has to say."""
        limit_s = self.limit_s if limit_s is None else limit_s
        key = self._round(name)
        if self.rank:
            self.post(f"{key}/{self.rank}", mine)
            return self._heard(name, f"{key}/decided", limit_s)
        keys = [f"{key}/{rank}" for rank in range(1, self.world)]
        self._wait(name, keys, range(1, self.world), limit_s)
        decided = how([mine, *map(self._taken, keys)])
        self.post(f"{key}/decided", msgpack.packb([None, decided]))
        for one in (*(one for one, _ in self._stale), *keys):
            self._forget_before(one)
        self._stale = [(f"{key}/decided", b"")]
        return decided

    def all_gather(self, name: str, mine: bytes) -> list[bytes]:
        """What every rank has to say, by rank."""
        return cast("list[bytes]", msgpack.unpackb(self.decide(name, mine, msgpack.packb)))

    def _forget_before(self, key: str) -> None:
        count = int(self._get(key).partition(b":")[0])
        for one in (*(f"{key}#{number}" for number in range(1, count)), key):
            self._store.delete_key(one)


def divided(pieces: Sequence[Sequence[Piece]], nodes: Sequence[int]) -> dict[Key, list[int]]:
    """By chunk the ranks that keep it; the first of them writes it."""
    having: dict[Key, list[int]] = defaultdict(list)
    known: dict[Key, Piece] = {}
    for one, mine in enumerate(pieces):
        for piece in mine:
            having[piece.key].append(one)
            first = known.setdefault(piece.key, piece)
            if piece.live and not first.live:
                known[piece.key] = piece
    load = [0] * len(pieces)
    keepers: dict[Key, list[int]] = {}
    for key, piece in sorted(known.items(), key=lambda one: (-one[1].size, one[0])):
        by_node: dict[int, list[int]] = defaultdict(list)
        for one in having[key]:
            by_node[nodes[one]].append(one)
        chosen = [min(ranks) if piece.live else min(ranks, key=lambda r: (load[r], r)) for ranks in by_node.values()]
        for one in chosen:
            load[one] += piece.size
        keepers[key] = sorted(chosen)
    return keepers


def packed(chunks: Sequence[Chunk]) -> bytes:
    """A rank's list."""
    return cast(
        bytes,
        msgpack.packb([[one.name, one.offsets, tuple(one.tensor.shape), one.size, one.live] for one in chunks]),
    )


def unpacked(raw: bytes) -> list[Piece]:
    """A rank's list."""
    return [
        Piece((name, tuple(offsets), tuple(shape)), size, live)
        for name, offsets, shape, size, live in msgpack.unpackb(raw)
    ]


def agreed(chunks: Sequence[Chunk], signature: Signature, meeting: Meeting, node: int) -> frozenset[Key]:
    """What this rank keeps."""
    mine = packed(chunks)
    form = hashlib.blake2b(repr(signature.chunks).encode(), digest_size=16).digest()
    told: list[Any] = [msgpack.unpackb(one) for one in meeting.all_gather("forms", msgpack.packb((node, form, False)))]
    nodes, forms = [one[0] for one in told], [one[1] for one in told]
    lists = meeting.all_gather("chunks", mine if forms.index(form) == meeting.rank else b"")
    by_form = {forms[one]: unpacked(raw) for one, raw in enumerate(lists) if raw}
    keepers = divided([by_form[one] for one in forms], nodes)
    return frozenset(key for key, ranks in keepers.items() if meeting.rank in ranks)
