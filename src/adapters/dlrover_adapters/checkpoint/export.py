"""A step, converted: to safetensors, to one file that ``torch.load`` opens, to a checkpoint of torch's own without our manifests.

Every byte is verified on the way. A few tensors are in memory at a time, never all.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dlrover_adapters.checkpoint.geometry import nested
from dlrover_adapters.checkpoint.manifests import METADATA, StoredItem
from dlrover_adapters.checkpoint.places import Place, Sink
from dlrover_adapters.checkpoint.reader import Progress, StepReader, buffer_of
from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    import torch

SAFETENSORS, TORCH, DCP = "safetensors", "torch", "dcp"
KINDS = (SAFETENSORS, TORCH, DCP)
AHEAD_BYTES = 256 * 1024 * 1024
"""Of tensors that are read at once: those of one block of a file are then read once."""

# As the format has them: https://github.com/huggingface/safetensors, `Dtype`.
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


class Exported(NamedTuple):
    """What came of it: tensors, objects and bytes written, and the objects that this format cannot take."""

    tensors: int
    objects: int
    size: int
    left_out: tuple[str, ...]


def export(reader: StepReader, target: str, kind: str, *, only: str = "", progress: Progress | None = None) -> Exported:
    """Write the step to ``target``: a file, for `DCP` a folder; path or URL. ``only``: what lies below this key, as ``model``.

    With ``only``, names begin below it, except in `DCP`. Raises `SpecError` for what the step does not hold, `CheckpointDamaged`,
    `OSError` with the URL. What is there appears whole or not at all.
    """
    chosen = _chosen(reader, only)
    if kind == DCP:
        return _dcp(reader, Place(target), chosen, progress)
    folder, _, name = target.rpartition("/")
    if not name:
        raise SpecError("target", f"{target!r} is a folder; a file is written")
    place = Place(folder or ("/" if target.startswith("/") else "."))
    with place.writer(name) as out:
        return (_safetensors if kind == SAFETENSORS else _torch)(reader, out, chosen, progress)


def _chosen(reader: StepReader, only: str) -> dict[str, tuple[Any, ...]]:
    """The names of what is wanted, in the order in which it lies there, and the keys below ``only`` that lead to each."""
    prefix = tuple(only.split(".")) if only else ()
    found = {}
    order = {name: (chunks[0].rank, chunks[0].item.file, chunks[0].item.data) for name, chunks in reader.items.items()}
    for name in (*sorted(order, key=lambda one: order[one]), *reader.objects):
        path = reader.paths.get(name, (name,))
        if tuple(map(str, path[: len(prefix)])) == prefix:
            found[name] = path[len(prefix) :] or path[-1:]
    if not found:
        keys = sorted({str(path[0]) for path in reader.paths.values()})
        raise SpecError("only", f"nothing lies below {only!r}; there is {', '.join(keys)}")
    return found


class _Ahead:
    """Tensors, read some at a time in the order in which they will be asked for, each once."""

    def __init__(self, reader: StepReader, order: Sequence[str], progress: Progress | None) -> None:
        self._reader, self._order, self._progress = reader, list(reversed(order)), progress
        self._there: dict[str, torch.Tensor] = {}

    def take(self, name: str) -> torch.Tensor:
        """The next one."""
        if name not in self._there:
            batch: list[str] = []
            size = 0
            while self._order and (not batch or size < AHEAD_BYTES):
                batch.append(self._order.pop())
                size += sum(chunk.item.size for chunk in self._reader.items[batch[-1]])
            self._there.update(self._reader.tensors(batch, self._progress))
        return self._there.pop(name)


class _Counting:
    def __init__(self, out: Sink) -> None:
        self._out, self._at = out, 0

    def tell(self) -> int:
        return self._at

    def write(self, content: Any) -> int:
        size = self._out.write(content)
        self._at += size
        return size

    def flush(self) -> None:
        """As files have it."""


def _split(reader: StepReader, chosen: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    return [one for one in chosen if one in reader.items], [one for one in chosen if one not in reader.items]


def _safetensors(
    reader: StepReader, out: Sink, chosen: dict[str, tuple[Any, ...]], progress: Progress | None
) -> Exported:
    tensors, objects = _split(reader, chosen)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in tensors:
        first = reader.items[name][0].item
        if first.dtype not in _DTYPES:
            raise CoreError(
                f"{name}: safetensors has no {first.dtype}; export to another format, or leave it out by --only"
            )
        size = prod(first.full_shape) * _item_bytes(first.dtype)
        told = {"dtype": _DTYPES[first.dtype], "shape": first.full_shape, "data_offsets": (at, at + size)}
        header[".".join(map(str, chosen[name]))] = told
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    out.write(len(raw).to_bytes(8, "little") + raw)
    ahead = _Ahead(reader, tensors, progress)
    for name in tensors:
        out.write(buffer_of(ahead.take(name)))
    return Exported(len(tensors), 0, 8 + len(raw) + at, tuple(objects))


def _item_bytes(dtype: str) -> int:
    import torch

    return cast("torch.dtype", getattr(torch, dtype)).itemsize


def _torch(reader: StepReader, out: Sink, chosen: dict[str, tuple[Any, ...]], progress: Progress | None) -> Exported:
    import torch

    from dlrover_adapters.checkpoint.torchfile import Leaf, save

    tensors, objects = _split(reader, chosen)
    values: dict[str, Any] = {}
    for name in tensors:
        first = reader.items[name][0].item
        values[name] = Leaf(name, getattr(torch, first.dtype), first.full_shape)
    left_out = []
    for name in objects:
        try:
            values[name] = torch.load(io.BytesIO(reader.object(name)), weights_only=True, map_location="cpu")
        except pickle.UnpicklingError:  # of a kind that could run code
            left_out.append(name)
    tree = nested((chosen[name], value) for name, value in values.items())
    ahead = _Ahead(reader, _order(tree), progress)
    counting = _Counting(out)
    save(counting, tree, lambda leaf: ahead.take(leaf.name))
    return Exported(len(tensors), len(objects) - len(left_out), counting.tell(), tuple(left_out))


def _order(tree: Any) -> list[str]:
    """The names of the leaves, as pickling meets them."""
    from dlrover_adapters.checkpoint.torchfile import Leaf

    if isinstance(tree, Leaf):
        return [tree.name]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [name for one in below for name in _order(one)]


def _dcp(reader: StepReader, place: Place, chosen: dict[str, tuple[Any, ...]], progress: Progress | None) -> Exported:
    import torch

    from dlrover_adapters.checkpoint.seal import Placed, metadata
    from dlrover_adapters.checkpoint.torchfile import Watched

    tensors, objects = _split(reader, chosen)
    name = "__0_0.distcp"
    place.rm(METADATA)
    placed: list[tuple[StoredItem, Placed]] = []
    told: dict[str, Placed] = {}
    with place.writer(name) as out:
        counting = _Counting(out)
        for one in objects:
            at = counting.tell()
            told[one] = Placed(name, at, counting.write(reader.object(one)))
        ahead, watched = _Ahead(reader, tensors, progress), Watched(counting)
        for one in tensors:
            first, at = reader.items[one][0].item, counting.tell()
            torch.save(ahead.take(one), cast(Any, watched))
            watched.check()
            whole = first._replace(offsets=(0,) * len(first.full_shape), shape=first.full_shape)
            placed.append((whole, Placed(name, at, counting.tell() - at)))
    place.put(METADATA, pickle.dumps(metadata(placed, told, {one: reader.paths.get(one, (one,)) for one in chosen})))
    return Exported(len(tensors), len(objects), counting.tell(), ())
