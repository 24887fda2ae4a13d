"""The end of a step on storage: all parts are there and fit together, so it gets torch's ``.metadata``, and then its seal.

What lies there is then an ordinary checkpoint of `torch.distributed.checkpoint`, for any world size and any sharding.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.manifests import (
    DCP,
    METADATA,
    SEAL,
    CheckpointDamaged,
    CheckpointIncomplete,
    CheckpointTooNew,
    Part,
    Seal,
    SealedPart,
    StoredItem,
    is_ours,
    part_name,
    part_of,
    step_name,
)
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import chunks_of, complete, read_parts

DCP_VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch's ``filesystem.py``."""


class Sealed(NamedTuple):
    """A step that is complete on storage. ``size``: bytes of its parts; ``again``: it was so already."""

    step: int
    generation: int
    size: int
    took_us: int
    again: bool = False


def seal(
    place: Place,
    step: int,
    ranks: Iterable[int] | None = None,
    *,
    run: str | None = None,
    generation: int | None = None,
) -> Sealed:
    """Make a step complete, once each of ``ranks`` has written its part. Doing it again changes nothing.

    ``run`` and ``generation``: whose parts count, as `read_parts` has it. Parts of other runs and of older generations that lie
    there since before are removed.

    Raises `CheckpointIncomplete` where a part is missing or of another state, or where a tensor or an object that some rank has
    is in no part, or not all of it; `CheckpointDamaged` where a file is not of the size that was written; `OSError` with the
    URL. The step is not complete then.
    """
    began = time.monotonic()
    folder = step_name(step)
    found = read_parts(place, step, ranks, run=run, generation=generation)
    parts = {rank: part for rank, (part, _) in found.items()}
    for part in parts.values():
        for file in part.files:
            name = f"{folder}/{file.name}"
            try:
                size = place.size(name)
            except FileNotFoundError as error:
                raise CheckpointIncomplete(f"{place.shown(name)} is not there") from error
            if size != file.size:
                raise CheckpointDamaged(
                    place.shown(name), min(size, file.size), f"{size:,} bytes, {file.size:,} were written"
                )
    complete(parts, chunks_of(parts), place.shown(folder))
    head = next(iter(parts.values()))
    sealed = tuple(SealedPart(rank, len(raw), digest(raw), part.size) for rank, (part, raw) in sorted(found.items()))
    wanted = Seal(head.kind, head.run, head.generation, step, head.world, sealed, metadata=None, job=head.job)
    again = _there(place, wanted)
    if not again:
        if head.kind == DCP:
            raw = metadata_of(parts)
            place.put(f"{folder}/{METADATA}", raw)
            wanted = wanted._replace(metadata=(len(raw), digest(raw)))
        place.put(f"{folder}/{SEAL}", wanted.packed())
        _still(place, wanted, {rank: raw for rank, (_, raw) in found.items()})
    _sweep(place, parts)
    return Sealed(step, head.generation, wanted.size, int((time.monotonic() - began) * 1e6), again)


def _there(place: Place, wanted: Seal) -> bool:
    """Is it sealed just so?"""
    name = f"{step_name(wanted.step)}/{SEAL}"
    with contextlib.suppress(FileNotFoundError, CheckpointDamaged):
        before = Seal.unpacked(place.get(name), place.shown(name))
        if before._replace(metadata=None) == wanted:
            if before.metadata is None:
                return True
            raw = place.get(f"{step_name(wanted.step)}/{METADATA}")
            return (len(raw), digest(raw)) == before.metadata
    return False


def _still(place: Place, wanted: Seal, raws: Mapping[int, bytes]) -> None:
    """A part of a newer generation may have come while this was being sealed: then nothing is complete."""
    folder = step_name(wanted.step)
    for rank, raw in raws.items():
        try:
            there = place.get(f"{folder}/{part_name(rank)}")
        except FileNotFoundError:
            there = b""
        if there != raw:
            place.rm(f"{folder}/{SEAL}")
            raise CheckpointIncomplete(
                f"{place.shown(folder)}: the part of rank {rank} was replaced while the step was sealed"
            )


def _sweep(place: Place, parts: Mapping[int, Part]) -> None:
    """Remove parts of other runs and of older generations that were there before: they are of no state that could be whole."""
    head = next(iter(parts.values()))
    folder = step_name(head.step)
    there = {part_of(one.name): one.changed for one in place.ls(folder)}
    since = max((there.get(rank, 0.0) for rank in parts), default=0.0)
    used = {file.name for part in parts.values() for file in part.files}
    for rank, changed in there.items():
        if rank is None or rank in parts or changed > since:
            continue
        name = f"{folder}/{part_name(rank)}"
        try:
            part = Part.unpacked(place.get(name), place.shown(name))
        except (FileNotFoundError, CheckpointDamaged, CheckpointTooNew):
            continue  # nothing says whose it is
        if part.run == head.run and (part.generation, part.world) >= (head.generation, head.world):
            continue
        place.rm(name)
        place.sync(folder)
        for file in part.files:
            if is_ours(file.name) and file.name not in used:
                place.rm(f"{folder}/{file.name}")


class Placed(NamedTuple):
    """Where something lies for torch: a file beside ``.metadata``, and bytes of it."""

    file: str
    offset: int
    length: int


def metadata_of(parts: Mapping[int, Part]) -> bytes:
    """``.metadata`` of these parts."""
    items = [
        (item, Placed(parts[rank].files[item.file].name, item.offset, item.length))
        for chunks in chunks_of(parts).values()
        for item, rank in chunks
    ]
    objects: dict[str, Placed] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for _, part in sorted(parts.items()):
        for one in part.objects:
            objects.setdefault(one.name, Placed(part.files[one.file].name, one.offset, one.length))
        paths.update(part.paths)
    return pickle.dumps(metadata(items, objects, paths))


def metadata(
    items: Iterable[tuple[StoredItem, Placed]], objects: Mapping[str, Placed], paths: Mapping[str, tuple[Any, ...]]
) -> Any:
    """Torch's `Metadata`, as ``_FileSystemWriter.finish`` writes it: what is where, and how the flat names nest."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    told: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for item, placed in items:
        if item.name not in told:
            properties = TensorProperties(dtype=getattr(torch, item.dtype))
            told[item.name] = TensorStorageMetadata(properties, torch.Size(item.full_shape), [])
        tensor = told[item.name]
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.shape)))
        stored[MetadataIndex(item.name, item.offsets)] = _StorageInfo(*placed)
    for name, placed in objects.items():
        told[name] = BytesStorageMetadata()
        stored[MetadataIndex(name)] = _StorageInfo(*placed)
    found = Metadata(told, planner_data={name: tuple(paths.get(name, (name,))) for name in told}, storage_data=stored)
    if hasattr(found, "version"):  # absent before torch 2.6
        found.version = DCP_VERSION
    return found
