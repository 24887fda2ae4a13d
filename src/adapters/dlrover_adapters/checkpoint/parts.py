"""A slot of an arena, written to storage: what one rank has of a step, and the manifest that says what the bytes must be.

The file is what `torch.distributed.checkpoint` writes: each tensor as ``torch.save`` saves it, each object as the worker pickled
it, one after the other. It is written straight from the slot, and hashed on the way. The manifest comes last: while it is not
there, nobody takes the part for written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import xxhash

from dlrover_adapters.checkpoint.geometry import fault, nested
from dlrover_adapters.checkpoint.manifests import (
    BLOCK_BYTES,
    DCP,
    METADATA,
    SEAL,
    TORCH,
    CheckpointDamaged,
    CheckpointTooNew,
    Part,
    Seal,
    StoredFile,
    StoredItem,
    StoredObject,
    packed_names,
    part_name,
    step_name,
)
from dlrover_adapters.checkpoint.places import Place, Sink
from dlrover_adapters.checkpoint.slotview import SlotDamaged, SlotGone, SlotView
from dlrover_adapters.checkpoint.table import Item, said_names
from dlrover_core.data.cut import Cut, unpack
from dlrover_core.errors import CoreError, SpecError

TORCH_FILE = "checkpoint.pt"
_SMALL_BYTES = 1024 * 1024
_PACED_BYTES = 4 * 1024 * 1024


class PartTorn(CoreError):
    """The slot was overwritten while it was written to storage; nothing was published. Try again with a newer slot."""


class PartOutdated(CoreError):
    """A newer generation of this run has written this step; nothing was touched."""


class PartReport(NamedTuple):
    """A part that is on storage. ``size``: bytes of its ``files``; ``again``: it was there already, and nothing was written."""

    step: int
    generation: int
    rank: int
    size: int
    took_us: int
    files: tuple[str, ...]
    again: bool = False


class Hashing:
    """Passes on what is written, in large pieces, at ``bytes_per_s`` at most (0: as fast as it goes), and hashes each block."""

    def __init__(self, out: Sink, bytes_per_s: float = 0.0) -> None:
        self._out, self._pace = out, bytes_per_s
        self._began = time.monotonic()
        self._small = bytearray()
        self._block: Any = xxhash.xxh3_64()
        self._in_block = self._written = 0
        self._digests: list[int] = []

    def tell(self) -> int:
        """Bytes so far."""
        return self._written + len(self._small)

    def write(self, content: Any) -> int:
        """All of a buffer."""
        view = memoryview(content).cast("B")
        if len(view) + len(self._small) <= _SMALL_BYTES:
            self._small += view
            return len(view)
        self._flush()
        self._pass(view)
        return len(view)

    def flush(self) -> None:
        """As files have it; what is small still waits for company."""

    def end(self) -> tuple[int, tuple[int, ...]]:
        """All is written: bytes, and the digest of each block."""
        self._flush()
        if self._in_block:
            self._digests.append(self._block.intdigest())
            self._in_block = 0
        return self._written, tuple(self._digests)

    def _flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._pass(memoryview(small))

    def _pass(self, view: memoryview) -> None:
        piece_bytes = _PACED_BYTES if self._pace else BLOCK_BYTES
        while len(view):
            piece = view[: min(piece_bytes, BLOCK_BYTES - self._in_block)]
            self._block.update(piece)
            self._out.write(piece)
            view = view[len(piece) :]
            self._written += len(piece)
            self._in_block += len(piece)
            if self._in_block == BLOCK_BYTES:
                self._digests.append(self._block.intdigest())
                self._block.reset()
                self._in_block = 0
            if self._pace:
                early = self._began + self._written / self._pace - time.monotonic()
                if early > 0:
                    time.sleep(early)


def write_part(
    view: SlotView,
    place: Place,
    *,
    run: str,
    generation: int | None = None,
    format: str = DCP,  # noqa: A002  # the option's name
    beside: Sequence[SlotView] = (),
    bytes_per_s: float = 0.0,
    verify: bool = True,
    job: str = "",
) -> PartReport:
    """Write what this slot holds under ``place``; the slot should be pinned. Blocks: for the saver, or a thread.

    ``format`` `DCP`: what this rank is to write of the state. `TORCH`: all of the state in one file that ``torch.load`` opens;
    the other ranks of this node that hold the rest of it are ``beside``, and nobody else writes tensors. A slot with a copy of
    objects alone is written with the tensors that its rank writes, which are taken from those ``beside`` it. ``verify``: compare
    the slots with their digests first, if they have any; leave it out right after hashing. ``bytes_per_s`` 0: as fast as it goes.
    ``job``: whose run it is, by name; retention goes by it.
    The same part again is recognised and not written again, if ``run`` is not empty: then nothing tells this job from one before
    it. A part of an older generation, or of another run, is replaced, and its step is no longer complete.

    Raises `PartTorn`, `PartOutdated`, `OSError` with the URL (nothing is published then), and `ArenaBroken` for a damaged slot.
    """
    began = time.monotonic()
    stamp, table = view.stamp, view.table
    if any((one.stamp.generation, one.stamp.step) != (stamp.generation, stamp.step) for one in beside):
        raise PartTorn(f"step {stamp.step}: the slots of this node hold different states")
    if generation not in {None, stamp.generation}:
        raise PartTorn(f"step {stamp.step}: the slot holds it as of generation {stamp.generation}, not {generation}")
    said = (table, *(one.table for one in beside if format == TORCH))
    part = Part(
        format, run, stamp.generation, stamp.step, table.world, table.rank, table.layout,
        files=(), items=(), objects=(), paths=(), writers=table.writers if format == DCP else (), job=job, own=table.own,
        covers=() if format == DCP else tuple(sorted({table.rank, *(one.table.rank for one in beside)})),
        names=packed_names(name for one in said for name in said_names(one)), alike=any(one.alike for one in said),
        cut=_cut(view),
    )  # fmt: skip
    manifest = f"{step_name(part.step)}/{part_name(part.rank)}"
    mine = _sources(view, beside) if format == DCP else tuple((item, view) for item in table.items)
    before = _before(place, part, manifest, [item for item, _ in mine], table.objects)
    if before is not None:
        return _report(before, began, again=True)
    try:
        views = (view, *beside) if format == TORCH else tuple(dict.fromkeys([view, *(one for _, one in mine)]))
        for one in views:
            one.verify(full=verify)
        part = (
            _write_dcp(view, mine, place, part, bytes_per_s)
            if format == DCP
            else _write_torch(views, place, part, bytes_per_s)
        )
    except SlotGone as error:
        raise PartTorn(f"step {part.step}: {error}") from error
    place.put(manifest, part.packed())
    return _report(part, began, again=False)


def _sources(view: SlotView, beside: Sequence[SlotView]) -> tuple[tuple[Item, SlotView], ...]:
    """What this rank writes, each with the slot that its bytes lie in. Raises `PartTorn` for what is in none of them."""
    mine = [(item, view) for item in view.table.items if item.write]
    if not view.table.elsewhere:
        return tuple(mine)
    there = {(one.name, tuple(one.offsets), tuple(one.shape)): (one, by) for by in beside for one in by.table.items}
    for item in (one for one in view.table.elsewhere if one.write):
        found = there.get((item.name, tuple(item.offsets), tuple(item.shape)))
        if found is None:
            raise PartTorn(
                f"step {view.stamp.step}: {item.name} of rank {view.table.rank} is not in this node's memory any more"
            )
        mine.append(found)
    return tuple(mine)


def _report(part: Part, began: float, *, again: bool) -> PartReport:
    took_us = int((time.monotonic() - began) * 1e6)
    files = tuple(one.name for one in part.files)
    return PartReport(part.step, part.generation, part.rank, part.size, took_us, files, again)


def _before(place: Place, part: Part, manifest: str, mine: Sequence[Item], names: Sequence[str]) -> Part | None:
    """The same part, if it is there already; whatever else is there is made to be no part, and its step incomplete."""
    folder = step_name(part.step)
    found: Part | None = None
    try:
        found = Part.unpacked(place.get(manifest), place.shown(manifest))
        there = {(item.name, item.offsets) for item in found.items}
        enough = set(part.covers).issubset(found.covers) and (
            part.kind == TORCH
            or (
                there.issuperset((item.name, tuple(item.offsets)) for item in mine)
                and {one.name for one in found.objects}.issuperset(names)
            )
        )
        if (
            part.run
            and found[:7] == part[:7]
            and enough
            and all(place.size(f"{folder}/{one.name}") == one.size for one in found.files)
        ):
            return found
    except (FileNotFoundError, CheckpointDamaged, CheckpointTooNew):
        pass
    seal: Seal | None = None
    try:
        seal = Seal.unpacked(place.get(f"{folder}/{SEAL}"), place.shown(f"{folder}/{SEAL}"))
    except FileNotFoundError:
        pass
    except (CheckpointDamaged, CheckpointTooNew):
        place.rm(f"{folder}/{SEAL}")
    for other in (found, seal):
        if other is not None and part.run and other.run == part.run and other.generation > part.generation:
            raise PartOutdated(
                f"{place.shown(folder)}: generation {other.generation} has written it, generation {part.generation} is over"
            )
    # First what says that it is complete, then what says that there is a part, and only then anything else.
    if seal is not None or found is not None:
        for name in (f"{folder}/{SEAL}", f"{folder}/{METADATA}", manifest):
            place.rm(name)
        place.sync(folder)
    return None


def _cut(view: SlotView) -> Cut:
    """How far each dataset is consumed in this state. Raises `PartTorn`, `SlotDamaged`."""
    try:
        packed = view.cut()
        return unpack(packed) if packed else ()
    except SlotGone as error:
        raise PartTorn(f"step {view.stamp.step}: {error}") from error
    except SpecError as error:
        raise SlotDamaged(f"slot {view.slot}, step {view.stamp.step}: {error}") from error


def _unchanged(views: Iterable[SlotView]) -> None:
    for view in views:
        if not view.unchanged():
            raise SlotGone(f"slot {view.slot} was overwritten while it was written to storage")


def _write_dcp(
    view: SlotView, mine: Sequence[tuple[Item, SlotView]], place: Place, part: Part, bytes_per_s: float
) -> Part:
    import torch

    from dlrover_adapters.checkpoint.torchfile import Watched, no_crc

    name = f"__{part.rank}_0.distcp"
    objects = _objects(view, view.table.objects)
    items, stored = [], []
    size_hint = sum(item.size + 1024 for item, _ in mine) + sum(map(len, objects.values()))
    with place.writer(f"{step_name(part.step)}/{name}", size_hint) as out, no_crc():
        hashing = Hashing(out, bytes_per_s)
        for one, content in objects.items():
            stored.append(StoredObject(one, 0, hashing.tell(), hashing.write(content)))
        watched = Watched(hashing)
        for item, source in mine:
            begin, tensor = hashing.tell(), source.tensor(item)
            watched.watch(tensor)
            torch.save(tensor, cast(Any, watched))
            watched.check()
            items.append(_stored(item, begin, hashing.tell() - begin, watched.found_at(begin)))
            del tensor
        size, digests = hashing.end()
        _unchanged({view, *(source for _, source in mine)})
    written = {item.name for item, _ in mine} | objects.keys()
    paths = tuple((one, tuple(path)) for one, path in view.table.paths if one in written)
    return part._replace(
        files=(StoredFile(name, size, digests),), items=tuple(items), objects=tuple(stored), paths=paths
    )


def _stored(item: Item, offset: int, length: int, data: int) -> StoredItem:
    where = (tuple(item.full_shape), tuple(item.offsets), tuple(item.shape))
    return StoredItem(item.name, item.dtype, *where, 0, offset, length, data, item.size)


def _objects(view: SlotView, names: Sequence[str]) -> dict[str, bytes]:
    blob = view.objects()
    missing = [name for name in names if name not in blob]
    if missing:
        raise SlotDamaged(f"slot {view.slot}: its blob lacks {', '.join(missing[:3])}")
    return {name: blob[name] for name in names}


def _write_torch(views: Sequence[SlotView], place: Place, part: Part, bytes_per_s: float) -> Part:
    """All of the state in one file; objects also as they are, in another: not all are of a kind that ``weights_only`` opens.

    The file is written by the node that has rank 0, or its copy; every other node has only the objects of its ranks to write.
    """
    import torch

    from dlrover_adapters.checkpoint.torchfile import Leaf, save

    chunks: dict[str, dict[tuple[int, ...], tuple[SlotView, Item]]] = {}
    objects: dict[str, bytes] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for view in views:
        for item in view.table.items:
            found = chunks.setdefault(item.name, {})
            first = found.get(tuple(item.offsets))
            # Nodes may hold different values of what is live: those of the rank that writes it count, as in `DCP`.
            if first is None or (item.write and not first[1].write):
                found[tuple(item.offsets)] = view, item
        objects.update(_objects(view, view.table.objects))
        paths.update((name, tuple(path)) for name, path in view.table.paths)
    for name, found in chunks.items():
        wrong = fault(
            next(iter(found.values()))[1].full_shape, [(at, tuple(item.shape)) for at, (_, item) in found.items()]
        )
        if wrong:
            raise CoreError(
                f"{name}: {wrong} on this node: {TORCH!r} is for states that each node holds whole; use {DCP!r}"
            )
    leaves = {}
    for name, found in chunks.items():
        item = next(iter(found.values()))[1]
        leaves[name] = Leaf(name, getattr(torch, item.dtype), tuple(item.full_shape))
    items: list[StoredItem] = []

    def landed(leaf: Leaf, data: int) -> None:
        whole, size = tuple(leaf.shape), sum(item.size for _, item in chunks[leaf.name].values())
        dtype = str(leaf.dtype).removeprefix("torch.")
        # No stream of its own: what `torch.load` opens is the file.
        items.append(StoredItem(leaf.name, dtype, whole, (0,) * len(whole), whole, 0, data, size, data, size))

    folder, size_hint = step_name(part.step), sum(len(view.data) for view in views)
    files, stored = list[StoredFile](), []
    if 0 in part.covers:
        values = _opened(objects)
        tree = nested((paths.get(name, (name,)), value) for name, value in (*leaves.items(), *values.items()))
        with place.writer(f"{folder}/{TORCH_FILE}", size_hint) as out:
            hashing = Hashing(out, bytes_per_s)
            save(hashing, tree, lambda leaf: _assembled(leaf, chunks[leaf.name].values()), landed)
            size, digests = hashing.end()
            _unchanged(views)
        files.append(StoredFile(TORCH_FILE, size, digests))
    if objects:
        name = f"__{part.rank}_0.objects"
        with place.writer(f"{folder}/{name}") as out:
            hashing = Hashing(out)
            for one, content in objects.items():
                stored.append(StoredObject(one, len(files), hashing.tell(), hashing.write(content)))
            files.append(StoredFile(name, *hashing.end()))
    return part._replace(files=tuple(files), items=tuple(items), objects=tuple(stored), paths=tuple(paths.items()))


def _assembled(leaf: Any, chunks: Any) -> Any:
    """A tensor's elements in one piece; no copy where they are."""
    import torch

    found = list(chunks)
    if len(found) == 1:
        return found[0][0].tensor(found[0][1])
    whole = torch.empty(leaf.shape, dtype=leaf.dtype)
    for view, item in found:
        box = tuple(slice(at, at + length) for at, length in zip(item.offsets, item.shape, strict=True))
        whole[box] = view.tensor(item)
    return whole


def _opened(objects: dict[str, bytes]) -> dict[str, Any]:
    """Objects of kinds that ``weights_only`` opens; the others are left out. Nothing is run that is in them."""
    import io
    import pickle

    import torch

    values = {}
    for name, content in objects.items():
        try:
            values[name] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError):
            continue
    return values
