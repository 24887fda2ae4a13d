"""Checks that ranks which hold a tensor of the same name hold the same values.

A layout takes tensors of one name, offset and shape for replicas, and saves one of them. Shards, pipeline stages and experts in
plain tensors look the same and are not: all but one would be lost. So at the first save of a layout each rank hashes samples of
every tensor that another rank may hold, and the ranks compare. Each rank posts one combined digest per kind of shard. Where all
agree, that is all that is said. Where some differ, one rank per combined digest posts the digest of each tensor.
"""

from __future__ import annotations

import ctypes
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import msgpack
import torch
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_core.errors import SpecError

from .capture import Capture
from .chunks import Chunk

WHOLE_BYTES = 16 * 1024
"""Tensors up to this size are hashed whole. Of larger ones blocks are hashed, spread evenly from the first byte to the last."""
BLOCK_BYTES, BLOCKS_MIN, BLOCKS_MAX, EVERY_BYTES = 1024, 4, 16, 32 * 1024
"""Samples of a tensor: one block of `BLOCK_BYTES` in every `EVERY_BYTES`, but `BLOCKS_MIN` to `BLOCKS_MAX` blocks."""
FINGERPRINT_MAX = 64
"""Tensors, about, of which a fingerprint has samples: some 0.1 ms."""
PIECE_BYTES = 64 * 1024 * 1024
"""Bytes of a device's tensor that are copied to the host at once, where all of it is hashed."""
_NAME = "replicas"
TOLD_MAX = 8
"""Tensors, and ranks, that an error names."""
_REMEDIES = {
    "buffer": (
        "DDP does not broadcast this buffer (broadcast_buffers=False, or no DDP that we know of). Use SyncBatchNorm or "
        "broadcast_buffers=True, or give each rank's model its own key: {own}"
    ),
    "state": (
        "Give what each rank has of its own as extra= (an object with state_dict and load_state_dict), and keep in state= only "
        "what is the same on all ranks"
    ),
    "data": "Give every rank the same data=, with the same size, seed and order, and count each step on all ranks",
    "other": (
        "If these are shards, stages or experts, give each its own key, and the same key to ranks that hold copies: {own}. "
        "If they should be the same, look for a step or an initialisation that is not synchronised"
    ),
}


class Meets(Protocol):
    """The part of `Meeting` that is needed here."""

    rank: int
    world: int

    def decide(self, name: str, mine: bytes, how: Callable[[list[bytes]], bytes]) -> bytes:
        """Rank 0 gets the words of all ranks and applies ``how``; every rank returns the outcome."""

    def refusing(self, name: str) -> AbstractContextManager[None]:
        """Pass an error in the block on to all ranks that meet under this name."""

    def post(self, name: str, value: bytes) -> None:
        """Leave a value under a name for other ranks."""

    def look(self, name: str) -> bytes | None:
        """The value that was left under a name; None: nothing yet."""


class Digest(NamedTuple):
    """The digest of one tensor that other ranks may hold.

    ``name``: of the tensor.
    ``key``: a hash of name, offsets and shape.
    ``value``: a hash of dtype and values.
    ``address``: of its memory; 0: it is no tensor.
    ``buffer``: it is a module's buffer.
    """

    name: str
    key: int
    value: int
    address: int
    buffer: bool = False


Digests = Mapping[str, Sequence[Digest]]
"""Digests by kind: "" for whole tensors, else the name of a shard. Replicas of a tensor are of one kind on all their ranks."""


class Replicas:
    """Compares this rank's tensors with those of other ranks, at the saves where that is due. Options as in `FlashCheckpoint`."""

    def __init__(self, capture: Capture, meeting: Meets, verify: str, *, coupled: bool) -> None:
        self._capture, self._meeting, self._verify, self._coupled = capture, meeting, verify, coupled
        self._layouts = 0
        self._done = False
        self._uncoupled: Uncoupled | None = None
        self.closing = False
        """True while the script ends: ranks end one by one, so a comparison that has been made is not repeated."""

    def word(self, objects: Iterable[str], *, foreseen: bool) -> bytes:
        """Equal on all ranks that have objects of the same names and foresee their tensors (b"1") or do not (b"0")."""
        return (b"1" if foreseen else b"0") + digest(msgpack.packb(sorted(self._shared(objects)))).to_bytes(8, "little")

    def _shared(self, objects: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in objects if not self._capture.own(name))

    def begin(self, objects: Iterable[str], *, alike: bool, name: str) -> frozenset[str]:
        """A new layout: nothing of it is compared yet. Returns the objects that no other rank writes.

        ``alike``: all ranks are known to have objects of the same names. Else a collective of this ``name``.
        """
        shared = self._shared(objects)
        own = frozenset(objects) - shared
        if not alike and self._meeting.world > 1:
            own |= unshared(self._meeting, shared, name)
        # Only now: where a rank did not come, no rank compares what that one does not.
        self._layouts += 1
        self._done, self._uncoupled = self._meeting.world == 1 or self._verify == "off", None
        return own

    @property
    def _due(self) -> bool:
        """Whether this save is to compare."""
        again = self._verify == "full" and self._meeting.world > 1 and not self.closing
        return again or not self._done

    def refusing(self) -> AbstractContextManager[None]:
        """Pass an error in the block on to the other ranks: it keeps this rank from `compare`, and they would wait for it."""
        return self._meeting.refusing(_NAME) if self._coupled and self._due else nullcontext()

    def compare(self, chunks: Sequence[Chunk], step: int) -> None:
        """Raise `SpecError` where ranks hold different values under one name. At the first save of a layout; "full": at each.

        A collective where ranks are coupled.
        """
        if not self._due:
            return
        full = self._verify == "full"
        if self._coupled:
            with self._meeting.refusing(_NAME):
                mine = digests(self._capture, chunks, full=full)
            compare(mine, self._meeting)
            self._done = True
            return
        if self._uncoupled is None or self._uncoupled.done:
            mine = digests(self._capture, chunks, full=full)
            self._uncoupled = Uncoupled(
                self._meeting, f"{self._layouts}/{step}" if full else f"{self._layouts}", step, mine
            )
        self._uncoupled.look()
        self._done = self._uncoupled.done


def digests(capture: Capture, chunks: Iterable[Chunk], *, full: bool) -> Digests:
    """The digests of all tensors that other ranks may hold too. ``full``: hash all bytes, not samples."""
    broadcast = _broadcast(_wrappers(capture.models.values()))
    buffers = {one.data_ptr() for model in capture.models.values() for one in model.buffers() if one.numel()}
    held = [
        one
        for one in chunks
        if one.shard is not None
        and one.size
        and not one.same_as
        and not capture.own(one.name)
        and one.tensor.data_ptr() not in broadcast
    ]
    found: dict[str, list[Digest]] = defaultdict(list)
    for one, value in zip(held, _hashed(held) if full else _sampled(held), strict=True):
        key = digest(repr((one.name, one.offsets, tuple(one.tensor.shape))).encode())
        value ^= digest(repr((one.dtype, one.full_shape)).encode())
        address = one.tensor.data_ptr()
        found[one.shard or ""].append(Digest(one.name, key, value, address, address in buffers))
    for name, form in capture.forms():
        found[""].append(Digest(name, digest(name.encode()), digest(form.encode()), 0))
    return found


def compare(mine: Digests, meeting: Meets) -> None:
    """Raise `SpecError`, on all ranks alike, where two ranks hold different values under one name. A collective."""
    told: list[bytes] = []

    def ask(words: list[bytes]) -> bytes:
        told.extend(words)
        return _to_ask(words)

    asked = msgpack.unpackb(meeting.decide(_NAME, _combined(mine), ask))
    if not asked:
        return
    kinds = {kind: mine[kind] for kind, ranks in asked.items() if meeting.rank in ranks}
    excused = _broadcast(_wrappers((), everywhere=True)) if kinds else frozenset()
    details = msgpack.packb(
        {kind: [(one.key, one.value, one.address in excused) for one in its] for kind, its in kinds.items()}
    )
    conflicts = meeting.decide("replicas/details", details, lambda words: _conflicts(words, told))
    total, found = msgpack.unpackb(conflicts, strict_map_key=False)
    if not total:
        return
    wanted = {key for key, _groups in found}
    names = {one.key: (one.name, one.buffer) for its in mine.values() for one in its if one.key in wanted}
    said = meeting.decide("replicas/names", msgpack.packb(names), _names)
    known = msgpack.unpackb(said, strict_map_key=False)
    raise _error([(*known[key], groups) for key, groups in found], total)


class Uncoupled:
    """The same comparison for ranks that do not wait for each other: each posts its digests, and looks at what others posted.

    Every rank is compared with rank 0, by whichever of the two comes later.
    """

    def __init__(self, meeting: Meets, name: str, step: int, mine: Digests) -> None:
        self._meeting, self._prefix, self._step = meeting, f"replicas/{name}", step
        self._mine = {one.key: one for its in mine.values() for one in its}
        self._unheard = set(range(1, meeting.world)) if meeting.rank == 0 else {0}
        columns = [(one.key, one.value) for one in self._mine.values()]
        meeting.post(f"{self._prefix}/{meeting.rank}", msgpack.packb((step, columns)))

    @property
    def done(self) -> bool:
        """Whether this rank has been compared with all ranks that it is to be compared with."""
        return not self._unheard

    def look(self) -> None:
        """Compare with those who have posted meanwhile. Raises `SpecError`."""
        for rank in sorted(self._unheard):
            raw = self._meeting.look(f"{self._prefix}/{rank}")
            if raw is None:
                continue
            self._unheard.discard(rank)
            step, columns = msgpack.unpackb(raw)
            if step != self._step:
                continue
            other = [key for key, value in columns if key in self._mine and self._mine[key].value != value]
            excused = _broadcast(_wrappers((), everywhere=True)) if other else frozenset()
            other = [key for key in other if self._mine[key].address not in excused]
            if other:
                groups = sorted([[self._meeting.rank], [rank]])
                first = [self._mine[key] for key in other[:TOLD_MAX]]
                raise _error([(one.name, one.buffer, groups) for one in first], len(other))


def unshared(meeting: Meets, names: Iterable[str], name: str = "objects") -> frozenset[str]:
    """Objects that rank 0 does not have, and this rank is the first to have: it writes them. A collective."""

    def first(words: list[bytes]) -> bytes:
        told = [msgpack.unpackb(one) for one in words]
        known, found = set(told[0]), {}
        for rank, its in enumerate(told):
            new = sorted(set(its) - known)
            known.update(new)
            if new:
                found[rank] = new
        return msgpack.packb(found)  # type: ignore[no-any-return]

    answer = meeting.decide(name, msgpack.packb(sorted(names)), first)
    return frozenset(msgpack.unpackb(answer, strict_map_key=False).get(meeting.rank, ()))


def fingerprint(chunks: Sequence[Chunk]) -> int:
    """Hash samples of some tensors that only an optimizer should write: another number means that the state has changed."""
    steady = [one for one in chunks if one.size and not one.live and not one.same_as]
    apart = max(1, len(steady) // FINGERPRINT_MAX)
    return digest(msgpack.packb(_sampled(steady[::apart])))


# ---- on rank 0


def _combined(mine: Digests) -> bytes:
    """One combined digest for each kind: a number for the set of tensors, and a number for their values."""
    found = {}
    for kind, its in mine.items():
        ordered = sorted((one.key, one.value) for one in its)
        keys, values = ([one[number] for one in ordered] for number in (0, 1))
        found[kind] = digest(msgpack.packb(keys)), digest(msgpack.packb(values))
    return msgpack.packb(found)  # type: ignore[no-any-return]


def _same(told: Sequence[bytes]) -> dict[str, dict[tuple[int, int], list[int]]]:
    """For each kind the groups of ranks with equal combined digests."""
    found: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, one in enumerate(told):
        for kind, combined in msgpack.unpackb(one).items():
            found[kind][tuple(combined)].append(rank)
    return found


def _to_ask(told: Sequence[bytes]) -> bytes:
    """For each kind with several groups the first rank of each group: those ranks are to post the digests of their tensors."""
    asked = {kind: [ranks[0] for ranks in same.values()] for kind, same in _same(told).items() if len(same) > 1}
    return msgpack.packb(asked)  # type: ignore[no-any-return]


def _conflicts(details: Sequence[bytes], told: Sequence[bytes]) -> bytes:
    """The number of tensors that differ, and for the first `TOLD_MAX` of them the key and the groups of ranks that agree."""
    agreeing = {(kind, ranks[0]): ranks for kind, same in _same(told).items() for ranks in same.values()}
    values: dict[tuple[str, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    excused = set()
    for rank, one in enumerate(details):
        for kind, columns in msgpack.unpackb(one).items():
            for key, value, excuse in columns:
                values[kind, key][value] += agreeing[kind, rank]
                if excuse:
                    excused.add((kind, key))
    differing = [
        (key, sorted(sorted(ranks)[:TOLD_MAX] for ranks in groups.values())[:TOLD_MAX])
        for (kind, key), groups in values.items()
        if len(groups) > 1 and (kind, key) not in excused
    ]
    return msgpack.packb((len(differing), differing[:TOLD_MAX]))  # type: ignore[no-any-return]


def _names(words: Sequence[bytes]) -> bytes:
    known: dict[int, str] = {}
    for one in words:
        known.update(msgpack.unpackb(one, strict_map_key=False))
    return msgpack.packb(known)  # type: ignore[no-any-return]


def _error(found: Sequence[tuple[str, bool, Sequence[Sequence[int]]]], total: int) -> SpecError:
    """``found``: names of tensors, whether they are buffers, and the groups of ranks that agree; ``total``: how many differ."""
    name, buffer, groups = found[0]
    first, second = groups[0][0], groups[1][0]
    same = "; ".join(map(_ranks, groups))
    more = ", ".join(one[0] for one in found[1:3])
    also = f" So do {total - 1} more ({more}{', ...' if total > 3 else ''})." if more else ""
    return SpecError(
        name,
        f"rank {first} and rank {second} have different values under this name, so they hold no copies of each other, and a "
        f"checkpoint would keep the values of one rank only (equal among each other: {same}).{also} "
        f"{_remedy(name, first, second, buffer=buffer)}. Nothing was saved",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" + ", ..." * (len(ranks) >= TOLD_MAX)


def _remedy(name: str, first: int, second: int, *, buffer: bool) -> str:
    own = f'model={{"tp0": model}} on rank {first}, model={{"tp1": model}} on rank {second}, and optimizer= likewise'
    root = name.partition(".")[0]
    kind = "buffer" if buffer else root if root in {"state", "data"} else "other"
    return _REMEDIES[kind].format(own=own)


# ---- buffers that DDP broadcasts


def _wrappers(models: Iterable[torch.nn.Module], *, everywhere: bool = False) -> list[DistributedDataParallel]:
    """DDP modules in these models. ``everywhere``: in this process, as a script may give the bare model (a slow search)."""
    if everywhere:
        return [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return [one for model in models for one in model.modules() if isinstance(one, DistributedDataParallel)]


def _broadcast(wrappers: Iterable[DistributedDataParallel]) -> frozenset[int]:
    """Addresses of buffers that rank 0 broadcasts before each forward: between forwards they differ, and rank 0's count."""
    return frozenset(
        buffer.data_ptr()
        for one in wrappers
        if getattr(one, "broadcast_buffers", False)
        for name, buffer in one.module.named_buffers()
        if buffer.numel() and name not in one.parameters_to_ignore
    )


# ---- hashes


def _sampled(held: Sequence[Chunk]) -> list[int]:
    """Hashes of samples. Samples on a device are gathered there, and copied to the host once."""
    found = [0] * len(held)
    elsewhere: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, one in enumerate(held):
        tensor = one.tensor
        device = _device(tensor)
        if device == "cpu" and one.size <= WHOLE_BYTES and _is_plain(tensor):
            found[number] = _hash(tensor.data_ptr(), one.size)
            continue
        sample = _sample(tensor)
        if device == "cpu":
            found[number] = _hash(sample.data_ptr(), sample.numel())
        else:
            elsewhere[device].append((number, sample))
    for samples in elsewhere.values():
        gathered = torch.cat([one for _number, one in samples]).cpu()
        at = gathered.data_ptr()
        for number, sample in samples:
            found[number] = _hash(at, sample.numel())
            at += sample.numel()
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some bytes of it, the same of each tensor of this shape and dtype whatever its strides are; on its device."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    size = flat.numel()
    if size <= WHOLE_BYTES:
        return flat
    blocks = min(BLOCKS_MAX, max(BLOCKS_MIN, size // EVERY_BYTES))
    apart = (size - BLOCK_BYTES) // (blocks - 1)
    width = size - apart * (blocks - 1)  # the last one ends where the tensor does
    return flat.as_strided((blocks, width), (apart, 1), flat.storage_offset()).reshape(-1)


def _hashed(held: Sequence[Chunk]) -> list[int]:
    """Hashes of all bytes."""
    return [_whole(one.tensor) for one in held]


def _whole(tensor: torch.Tensor) -> int:
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return _hash(flat.data_ptr(), flat.numel())
    told = b""
    for at in range(0, flat.numel(), PIECE_BYTES):
        piece = flat[at : at + PIECE_BYTES].cpu()
        told += _hash(piece.data_ptr(), piece.numel()).to_bytes(8, "little")
    return digest(told)


def _device(tensor: torch.Tensor) -> str:
    return str(tensor.device)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _hash(address: int, size: int) -> int:
    return digest((ctypes.c_char * size).from_address(address))
