"""The campaign `corruption`: damage of every kind, to steps on storage and to slots in memory; all of it must be noticed.

A trial takes one of a few whole steps, or a slot of an arena, and does one thing to it that its seed draws: a bit is flipped, a
file is cut short, lengthened, emptied in the middle, lost, exchanged with another rank's, or replaced by the one of another step
or life of the job; a bit of a slot's header, digests, blob, table or data is flipped. Then everything is read as a restore would,
and verified. Damage must be told, and what is read without an error must be what was written. Afterwards the damage is taken
back, and all must be well again: nothing may be told where nothing is wrong.
"""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.unit.stored import OBJECTS, Arena, pickled, sharded, state, whole

from dlrover_adapters.checkpoint.manifests import METADATA, SEAL, CheckpointTooNew, step_name
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.checkpoint.verify import verify
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken
from dlrover_core.errors import CoreError

STEP, OTHER = 120, 130
FEW = 20
"""One trial in so many takes the step whose files have several blocks."""
_SLOT_AT, _WORDS, _WORD_BYTES = 1024, 9, 8


class Unnoticed(AssertionError):
    """Damage that nobody noticed, or good bytes that were called damaged."""


class Step(NamedTuple):
    """A whole step on storage, and beside it others to take foreign files from."""

    place: Place
    folder: Path
    foreign: tuple[Path, ...]
    tensors: dict[str, torch.Tensor]
    objects: dict[str, bytes]


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="corruption-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _objects(world: int) -> dict[str, bytes]:
    others = {f"rank.{rank}.rng": pickled({"seed": rank}) for rank in range(1, world)}
    return {**{name: pickled(value) for name, value in OBJECTS.items()}, **others}


@functools.cache
def stored(kind: str) -> Step:
    """A step, and the same of another number, another life and another run."""
    folder, world = _root() / kind, 3
    rows = 10 if kind != "large" else BLOCK_BYTES // 16
    if kind == "large":
        world = 1
    told = (
        ("here", STEP, 1, 0, "r"),
        ("here", OTHER, 1, 1, "r"),
        ("life", STEP, 2, 2, "r"),
        ("run", STEP, 1, 0, "other"),
    )
    for name, step, generation, seed, run in told:
        place = Place(str(folder / name))
        arenas = sharded(state(seed, rows), world, step=step, generation=generation)
        if kind == "torch":
            first, *others = (arena.view() for arena in arenas)
            write_part(first, place, run=run, format="torch", beside=others)
            seal(place, step, [0])
            continue
        for arena in arenas:
            write_part(arena.view(), place, run=run)
        seal(place, step, range(world))
    foreign = (folder / "here" / step_name(OTHER), folder / "life" / step_name(STEP), folder / "run" / step_name(STEP))
    here = folder / "here"
    return Step(Place(str(here)), here / step_name(STEP), foreign, state(0, rows), _objects(world))


def on_storage(dice: random.Random) -> str:
    """Damage a step, look, and take it back. Returns the kind of damage."""
    step = stored("large" if dice.randrange(FEW) == 0 else dice.choice(("dcp", "torch")))
    kind = dice.choice(sorted(DAMAGES))
    before = {one.name: one.read_bytes() for one in step.folder.iterdir()}
    after = dict(before)
    told = DAMAGES[kind](dice, step, after)
    if after == before:
        kind, told = "bit", _bit(dice, step, after)
    try:
        _put(step.folder, before, after)
        if _fine(step):
            raise Unnoticed(f"{kind}: {told}: called whole")
        _read(step, f"{kind}: {told}")
    finally:
        _put(step.folder, after, before)
    if not _fine(step):
        raise Unnoticed("an intact step is called damaged")
    return kind


def _fine(step: Step) -> bool:
    try:
        return verify(step.place, STEP).fine
    except CheckpointTooNew:  # the bit was one of the format's number
        return False


def _put(folder: Path, there: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    for name in there.keys() - wanted.keys():
        (folder / name).unlink()
    for name, content in wanted.items():
        if there.get(name) != content:
            (folder / name).write_bytes(content)


def _read(step: Step, told: str) -> None:
    """What a restore gets: what was written, or an error."""
    try:
        reader = StepReader(step.place, STEP)
        tensors = reader.tensors(reader.items)
        objects = {name: reader.object(name) for name in reader.objects}
    except (CoreError, OSError):
        return
    same = tensors.keys() == step.tensors.keys() and all(
        torch.equal(one, step.tensors[name]) for name, one in tensors.items()
    )
    if not same or objects != step.objects:
        raise Unnoticed(f"{told}: read without an error, and not what was written")


def _bit(dice: random.Random, _step: Step, files: dict[str, bytes]) -> str:
    name = dice.choice(sorted(files))
    at, bit = dice.randrange(len(files[name])), dice.randrange(8)
    files[name] = _flipped(files[name], at, bit)
    return f"{name}, byte {at}, bit {bit}"


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def _cut(dice: random.Random, _step: Step, files: dict[str, bytes]) -> str:
    name = dice.choice(sorted(files))
    size = dice.choice((0, dice.randrange(len(files[name])), len(files[name]) - 1))
    files[name] = files[name][:size]
    return f"{name}, cut to {size} bytes"


def _longer(dice: random.Random, _step: Step, files: dict[str, bytes]) -> str:
    name = dice.choice(sorted(files))
    files[name] += dice.randbytes(dice.randint(1, 100))
    return f"{name}, longer"


def _hole(dice: random.Random, _step: Step, files: dict[str, bytes]) -> str:
    name = dice.choice(sorted(files))
    size = dice.randint(1, min(4096, len(files[name])))
    at = dice.randrange(len(files[name]) - size + 1)
    files[name] = files[name][:at] + bytes(size) + files[name][at + size :]
    return f"{name}, zeros from byte {at} on, {size} of them"


def _lost(dice: random.Random, _step: Step, files: dict[str, bytes]) -> str:
    name = dice.choice(sorted(files))
    del files[name]
    return f"{name}, lost"


def _swapped(dice: random.Random, _step: Step, files: dict[str, bytes]) -> str:
    ending = dice.choice((".distcp", ".json"))
    names = [name for name in sorted(files) if name.endswith(ending) and name != SEAL]
    if len(names) < 2:
        return "nothing to exchange"
    one, other = dice.sample(names, 2)
    files[one], files[other] = files[other], files[one]
    return f"{one} and {other}, exchanged"


def _foreign(dice: random.Random, step: Step, files: dict[str, bytes]) -> str:
    name, other = dice.choice(sorted(files)), dice.choice(step.foreign)
    files[name] = (other / name).read_bytes()
    return f"{name}, from {other}"


def _part(dice: random.Random, step: Step, files: dict[str, bytes]) -> str:
    """A rank's whole part, manifest and bytes, from another step or life."""
    rank, other = dice.randrange(3), dice.choice(step.foreign)
    names = [name for name in files if name == f"part-{rank}.json" or name.startswith(f"__{rank}_")]
    for name in names:
        files[name] = (other / name).read_bytes()
    return f"part of rank {rank}, from {other}"


def _manifests(dice: random.Random, step: Step, files: dict[str, bytes]) -> str:
    """The seal and torch's metadata, both, from another step or life."""
    other = dice.choice(step.foreign)
    for name in (SEAL, METADATA):
        if name in files:
            files[name] = (other / name).read_bytes()
    return f"the seal, from {other}"


DAMAGES: dict[str, Callable[[random.Random, Step, dict[str, bytes]], str]] = {
    "bit": _bit, "cut": _cut, "longer": _longer, "hole": _hole, "lost": _lost, "swapped": _swapped,
    "foreign": _foreign, "part": _part, "manifests": _manifests,
}  # fmt: skip


# ---- in memory


@functools.cache
def slots(large: bool) -> tuple[Arena, dict[str, torch.Tensor]]:
    """An arena with a hashed state in it, of one block or several."""
    tensors = state(3, BLOCK_BYTES // 16 if large else 1000)
    return whole(tensors), tensors


def in_memory(dice: random.Random) -> str:
    """Flip a bit of a slot, look, and take it back. Returns what it was a bit of."""
    arena, tensors = slots(large=dice.randrange(FEW) == 0)
    sizes = arena.geometry
    spans = {
        "header": (_SLOT_AT, _WORDS * _WORD_BYTES),
        "digests": (sizes.digests_at(0), sizes.blocks * 8),
        "blob": (sizes.blob_at(0), arena.stamp.blob_bytes),
        "table": (PAGE, arena.control.table_used),
        "data": (sizes.data_at(0), sizes.data_bytes),
    }
    kind = dice.choice(sorted(spans))
    begin, size = spans[kind]
    at, bit = begin + dice.randrange(size), dice.randrange(8)
    arena.memory[at] ^= 1 << bit
    try:
        if _good(arena):
            raise Unnoticed(f"{kind}, byte {at - begin}, bit {bit}: called whole")
    finally:
        arena.memory[at] ^= 1 << bit
    if not _good(arena):
        raise Unnoticed("an intact slot is called damaged")
    view = arena.view()
    if not all(torch.equal(view.tensor(item), tensors[item.name]) for item in view.table.items[:1]):
        raise Unnoticed("an intact slot does not hold what was written")
    return f"slot_{kind}"


def _good(arena: Arena) -> bool:
    """Does a slot say of itself that every byte is as it was written?"""
    try:
        return arena.view().verify()
    except ArenaBroken:
        return False


def trial(seed: int) -> dict[str, Any]:
    """One damage. Raises `Unnoticed`."""
    dice = random.Random(f"corruption {seed}")
    kind = in_memory(dice) if dice.randrange(4) == 0 else on_storage(dice)
    return {"caught": 1, kind: 1}
