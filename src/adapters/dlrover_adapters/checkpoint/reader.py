"""A step on storage, read: which tensors and objects it holds, where each chunk lies, and its bytes, every one of them verified.

Complete steps and such as were never sealed, if their parts are all there. Bytes go straight to where they are wanted, and each
block of a file that anything was wanted of is hashed on the way: what comes without an error is as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from dlrover_adapters.checkpoint.geometry import fault
from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.manifests import (
    BLOCK_BYTES,
    METADATA,
    SEAL,
    CheckpointDamaged,
    CheckpointIncomplete,
    Part,
    Seal,
    SealedPart,
    StoredItem,
    StoredObject,
    names_in,
    part_name,
    part_of,
    step_name,
)
from dlrover_core.words import first_few

if TYPE_CHECKING:
    import torch

    from dlrover_adapters.checkpoint.places import Place, Source

Progress = Callable[[int], None]
"""Is told after each block how many bytes it had."""


class Chunk(NamedTuple):
    """One chunk of a tensor, and the rank whose part it lies in."""

    item: StoredItem
    rank: int


class StepReader:
    """The step ``step`` under ``place``. Reads its manifests at once, and bytes when asked.

    ``ranks``, ``run``, ``generation``: for a step without a seal, what belongs to it, as `read_parts` has it. Raises
    `CheckpointIncomplete`, `CheckpointDamaged`, `CheckpointTooNew`, and `OSError` with the URL.
    """

    def __init__(
        self,
        place: Place,
        step: int,
        ranks: Iterable[int] | None = None,
        *,
        run: str | None = None,
        generation: int | None = None,
    ) -> None:
        self.place, self.step, self._folder = place, step, step_name(step)
        self.seal: Seal | None = read_seal(place, step)
        """None: the step is not complete, its parts are."""
        self.parts: dict[int, Part] = (
            {one.rank: _told_by(place, step, self.seal, one) for one in self.seal.parts}
            if self.seal is not None
            else {
                rank: part for rank, (part, _) in read_parts(place, step, ranks, run=run, generation=generation).items()
            }
        )
        owned(self.parts, place.shown(self._folder))
        head = next(iter(self.parts.values()))
        self.kind, self.run, self.generation, self.world = head.kind, head.run, head.generation, head.world
        self.layout = head.layout
        self.items: dict[str, tuple[Chunk, ...]] = {}
        """Of each tensor its chunks, which cover it completely."""
        self.objects: dict[str, tuple[StoredObject, int]] = {}
        """Of each object where it lies, and the rank whose part that is."""
        self.paths: dict[str, tuple[Any, ...]] = {}
        """Of each name the keys that lead to it in the nested state."""
        for rank, part in sorted(self.parts.items()):
            for one in part.objects:
                self.objects.setdefault(one.name, (one, rank))
            self.paths.update(part.paths)
        found = chunks_of(self.parts)
        complete(self.parts, found, place.shown(self._folder))
        self.items.update((name, tuple(chunks)) for name, chunks in found.items())
        self._sized: set[str] = set()

    @property
    def sealed(self) -> bool:
        """Is the step complete?"""
        return self.seal is not None

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts.values())

    # ---- what was asked for

    def read(self, wanted: Iterable[tuple[Chunk, Any]], progress: Progress | None = None) -> None:
        """Fill writable buffers, each of a chunk's `size` bytes, with the chunks' elements, row-major.

        Raises `CheckpointDamaged`, which names file and offset: what the buffers hold is then good for nothing.
        """
        targets: dict[tuple[int, int], list[tuple[int, memoryview]]] = {}
        for chunk, into in wanted:
            view = memoryview(into).cast("B")
            if len(view) != chunk.item.size:
                raise ValueError(f"{chunk.item.name}: {chunk.item.size} bytes do not go into {len(view)}")
            targets.setdefault((chunk.rank, chunk.item.file), []).append((chunk.item.data, view))
        for (rank, file), found in sorted(targets.items()):
            self._read_file(rank, file, found, progress)

    def tensors(self, names: Iterable[str], progress: Progress | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors, put together from their chunks; all that lie in one block of a file at once, so ask for many."""
        import torch

        found: dict[str, torch.Tensor] = {}
        wanted, pieces = [], []
        for name in names:
            chunks = self.items[name]
            first = chunks[0].item
            whole = found[name] = torch.empty(first.full_shape, dtype=getattr(torch, first.dtype))
            for chunk in chunks:
                item = chunk.item
                box = whole[tuple(slice(at, at + length) for at, length in zip(item.offsets, item.shape, strict=True))]
                if box.is_contiguous():
                    wanted.append((chunk, buffer_of(box)))
                else:
                    piece = torch.empty(item.shape, dtype=whole.dtype)
                    wanted.append((chunk, buffer_of(piece)))
                    pieces.append((box, piece))
        self.read(wanted, progress)
        for box, piece in pieces:
            box.copy_(piece)
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, put together from its chunks."""
        return self.tensors([name])[name]

    def object(self, name: str) -> bytes:
        """What is no tensor, as ``torch.save`` wrote it."""
        one, rank = self.objects[name]
        found = bytearray(one.length)
        self._read_file(rank, one.file, [(one.offset, memoryview(found))], None)
        return bytes(found)

    # ---- all of it

    def verify(self, progress: Progress | None = None) -> None:
        """Compare every byte of the step with what was written. Raises the first `CheckpointDamaged`."""
        for one in self.damages(progress):
            raise one

    def damages(self, progress: Progress | None = None) -> Iterator[CheckpointDamaged]:
        """Everything that is not as it was written: one for each block or file."""
        if self.seal is not None and self.seal.metadata is not None:
            name = f"{self._folder}/{METADATA}"
            try:
                raw = self.place.get(name)
            except FileNotFoundError:
                raw = b""
            if (len(raw), digest(raw)) != self.seal.metadata:
                yield CheckpointDamaged(self.place.shown(name), 0, "is not as it was written")
        scratch = memoryview(bytearray(BLOCK_BYTES))
        for rank, part in self.parts.items():
            for number, file in enumerate(part.files):
                try:
                    with ExitStack() as held:
                        source = self._opened(held, rank, number)
                        for block in range(len(file.digests)):
                            into = scratch[: min(BLOCK_BYTES, file.size - block * BLOCK_BYTES)]
                            try:
                                self._block(source, part, number, block, [into])
                            except CheckpointDamaged as error:
                                yield error
                            if progress is not None:
                                progress(len(into))
                except CheckpointDamaged as error:
                    yield error

    # ---- one file

    def _opened(self, held: ExitStack, rank: int, number: int) -> Source:
        file = self.parts[rank].files[number]
        name = f"{self._folder}/{file.name}"
        try:
            if name not in self._sized:
                size = self.place.size(name)
                if size != file.size:
                    where = min(size, file.size)
                    raise CheckpointDamaged(
                        self.place.shown(name), where, f"{size:,} bytes, {file.size:,} were written"
                    )
                self._sized.add(name)
            return held.enter_context(self.place.reader(name))
        except FileNotFoundError as error:
            raise CheckpointDamaged(self.place.shown(name), 0, "the file is not there") from error

    def _read_file(
        self, rank: int, number: int, targets: list[tuple[int, memoryview]], progress: Progress | None
    ) -> None:
        part = self.parts[rank]
        size = part.files[number].size
        scratch = memoryview(bytearray(min(BLOCK_BYTES, size)))
        with ExitStack() as held:
            source = self._opened(held, rank, number)
            rest = sorted((one for one in targets if len(one[1])), key=lambda one: one[0])
            while rest:
                now, rest = _apart(rest)
                first = 0
                for block in _touched(now):
                    begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
                    while now[first][0] + len(now[first][1]) <= begin:
                        first += 1
                    self._block(source, part, number, block, _segments(now, first, begin, end, scratch))
                    if progress is not None:
                        progress(end - begin)

    def _block(self, source: Source, part: Part, number: int, block: int, into: Sequence[memoryview]) -> None:
        file = part.files[number]
        begin, length = block * BLOCK_BYTES, sum(map(len, into))
        name = self.place.shown(f"{self._folder}/{file.name}")
        found = source.read_at(begin, into)
        if found != length:
            raise CheckpointDamaged(name, begin + found, f"the file ends, {file.size:,} bytes were written")
        state = xxhash.xxh3_64()
        for view in into:
            state.update(view)
        if state.intdigest() != file.digests[block]:
            raise CheckpointDamaged(name, begin, f"these {length:,} bytes are not as they were written")


def _apart(
    targets: Sequence[tuple[int, memoryview]],
) -> tuple[list[tuple[int, memoryview]], list[tuple[int, memoryview]]]:
    """Those that do not overlap, in order, and the rest: the same bytes may be wanted twice."""
    now: list[tuple[int, memoryview]] = []
    later = []
    end = 0
    for at, view in targets:
        if at >= end:
            now.append((at, view))
            end = at + len(view)
        else:
            later.append((at, view))
    return now, later


def _touched(targets: Sequence[tuple[int, memoryview]]) -> Iterator[int]:
    last = -1
    for at, view in targets:
        for block in range(max(at // BLOCK_BYTES, last + 1), (at + len(view) - 1) // BLOCK_BYTES + 1):
            yield block
            last = block


def _segments(
    targets: Sequence[tuple[int, memoryview]], first: int, begin: int, end: int, scratch: memoryview
) -> list[memoryview]:
    """The buffers that the bytes of a block go to: those that were asked for, and between them one for what is only hashed."""
    found, at = [], begin
    for number in range(first, len(targets)):
        offset, view = targets[number]
        if offset >= end:
            break
        if offset > at:
            found.append(scratch[at - begin : offset - begin])
            at = offset
        stop = min(offset + len(view), end)
        found.append(view[at - offset : stop - offset])
        at = stop
    if at < end:
        found.append(scratch[at - begin : end - begin])
    return found


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, writable; good as long as the tensor."""
    import torch

    if not tensor.numel():
        return memoryview(b"")
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def chunks_of(parts: Mapping[int, Part]) -> dict[str, list[Chunk]]:
    """Of each tensor its chunks. What several ranks have written, one in place of another that died, is the lowest rank's."""
    found: dict[str, dict[tuple[Any, Any], Chunk]] = {}
    for rank, part in sorted(parts.items()):
        for item in part.items:
            found.setdefault(item.name, {}).setdefault((item.offsets, item.shape), Chunk(item, rank))
    return {name: list(chunks.values()) for name, chunks in found.items()}


def covered(found: dict[str, list[Chunk]], where: str) -> None:
    """Raise `CheckpointIncomplete` for a tensor whose chunks do not cover it completely and once."""
    for name, chunks in found.items():
        first = chunks[0].item
        if any((one.item.dtype, one.item.full_shape) != (first.dtype, first.full_shape) for one in chunks):
            raise CheckpointIncomplete(f"{where}: {name}: its chunks are of different tensors")
        if len(chunks) == 1 and first.shape == first.full_shape and not any(first.offsets):
            continue
        wrong = fault(first.full_shape, [(one.item.offsets, one.item.shape) for one in chunks])
        if wrong:
            raise CheckpointIncomplete(f"{where}: {name}: {wrong}")


def complete(parts: Mapping[int, Part], found: dict[str, list[Chunk]], where: str) -> None:
    """Raise `CheckpointIncomplete` where a tensor or an object that some rank has is in no part, or not all of it."""
    covered(found, where)
    there = found.keys() | {one.name for part in parts.values() for one in part.objects}
    lost: dict[str, list[int]] = {}
    common = names_in(parts[0].names) - there if 0 in parts else frozenset[str]()
    for rank, part in sorted(parts.items()):
        if part.alike and not (0 in parts and parts[0].names):
            raise CheckpointIncomplete(f"{where}: there is no part of rank 0, which says what rank {rank} has")
        for name in (names_in(part.names) - there) | (common if part.alike else frozenset()):
            lost.setdefault(name, []).append(rank)
    if lost:
        name, ranks = min(lost.items())
        more = f", and {len(lost) - 1:,} more are missing" if len(lost) > 1 else ""
        who = first_few(ranks)
        raise CheckpointIncomplete(
            f"{where}: {name} is in no part, though rank {who} had it in this state{more}. Restore another step; if ranks "
            "wrote this one without an error, report it as a bug of dlrover"
        )


def element_bytes(item: StoredItem) -> int:
    """Of its dtype, in bytes; 0 for a chunk without elements."""
    count = prod(item.shape)
    return item.size // count if count else 0


# ---- manifests


def read_seal(place: Place, step: int) -> Seal | None:
    """What makes a step complete; None: it is not."""
    name = f"{step_name(step)}/{SEAL}"
    try:
        raw = place.get(name)
    except FileNotFoundError:
        return None
    seal = Seal.unpacked(raw, place.shown(name))
    if seal.step != step or not seal.parts:
        raise CheckpointDamaged(place.shown(name), 0, f"this is of step {seal.step}, in {len(seal.parts)} parts")
    return seal


def _told_by(place: Place, step: int, seal: Seal, one: SealedPart) -> Part:
    """A part of a complete step: exactly the one that was sealed."""
    name = f"{step_name(step)}/{part_name(one.rank)}"
    try:
        raw = place.get(name)
    except FileNotFoundError as error:
        raise CheckpointDamaged(place.shown(name), 0, "the manifest of this part is not there") from error
    if (len(raw), digest(raw)) != (one.manifest_bytes, one.manifest_digest):
        # In words of its own, if it has any: written by a newer version, or damaged.
        Part.unpacked(raw, place.shown(name))
        raise CheckpointDamaged(place.shown(name), 0, "another manifest than the one that was sealed")
    part = Part.unpacked(raw, place.shown(name))
    told = (part.kind, part.job, part.run, part.generation, part.step, part.world, part.rank)
    if told != (seal.kind, seal.job, seal.run, seal.generation, seal.step, seal.world, one.rank):
        raise CheckpointDamaged(place.shown(name), 0, "the manifest of another part")
    return part


def read_parts(
    place: Place,
    step: int,
    ranks: Iterable[int] | None = None,
    *,
    run: str | None = None,
    generation: int | None = None,
) -> dict[int, tuple[Part, bytes]]:
    """The parts of a step by rank, with their manifests as they lie there: those of ``ranks``, or all of one state.

    What another run or generation than ``run`` and ``generation`` has written counts as not there. Where ``ranks`` are not given
    and these neither, the state is that of the run that wrote last, and of the newest generation in it.

    Raises `CheckpointIncomplete` where one is missing or they are not of one state, `CheckpointDamaged`.
    """
    folder = step_name(step)
    changed: dict[int, float] = {}
    if ranks is None:
        for one in place.ls(folder):
            rank = part_of(one.name)
            if rank is not None:
                changed[rank] = one.changed
    found: dict[int, tuple[Part, bytes]] = {}
    missing = []
    for rank in sorted(changed if ranks is None else set(ranks)):
        name = f"{folder}/{part_name(rank)}"
        try:
            raw = place.get(name)
        except FileNotFoundError:
            missing.append(rank)
            continue
        part = Part.unpacked(raw, place.shown(name))
        if (part.step, part.rank) != (step, rank):
            raise CheckpointDamaged(
                place.shown(name), 0, f"the manifest of rank {part.rank}'s part of step {part.step}"
            )
        if run in {None, part.run} and generation in {None, part.generation}:
            found[rank] = part, raw
        elif ranks is not None:
            missing.append(rank)
    if missing or not found:
        told = f"no part of rank {', '.join(map(str, missing[:8]))}" if missing else "no part at all"
        raise CheckpointIncomplete(f"{place.shown(folder)}: there is {told}")
    if ranks is None:
        found = _of_one_state(found, changed)
    heads = {(part.kind, part.job, part.run, part.generation, part.world, part.layout) for part, _ in found.values()}
    if len(heads) > 1:
        raise CheckpointIncomplete(f"{place.shown(folder)}: its parts are of {len(heads)} different states")
    _all_there({rank: part for rank, (part, _) in found.items()}, place.shown(folder))
    return found


def _of_one_state(
    found: Mapping[int, tuple[Part, bytes]], changed: Mapping[int, float]
) -> dict[int, tuple[Part, bytes]]:
    """Without those of other runs: their generations are not comparable; and without older generations."""
    last = max(found, key=lambda rank: (changed.get(rank, 0.0), found[rank][0].generation))
    run = found[last][0].run
    newest = max(part.generation for part, _ in found.values() if part.run == run)
    return {rank: one for rank, one in found.items() if (one[0].run, one[0].generation) == (run, newest)}


def owned(parts: Mapping[int, Part], where: str) -> None:
    """Raise `CheckpointIncomplete` where the objects that only one rank has are in no part. Old parts do not say who has any."""
    there = {rank for part in parts.values() for rank in (part.covers or (part.rank,))}
    missing = sorted({rank for part in parts.values() for rank in part.own} - there)
    if missing:
        told = first_few(missing)
        raise CheckpointIncomplete(
            f"{where}: the objects that only rank {told} has (its random numbers, its extra) are missing: there is no part of it"
        )


def _all_there(parts: Mapping[int, Part], name: str) -> None:
    """Where nobody had to stand in for another, all have written that have anything to write: it may be objects alone."""
    owned(parts, name)
    if any(part.stands_in for part in parts.values()):
        return
    missing = sorted({rank for part in parts.values() for rank in part.writers} - parts.keys())
    if missing:
        raise CheckpointIncomplete(f"{name}: there is no part of rank {', '.join(map(str, missing[:8]))}")
