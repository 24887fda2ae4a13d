"""What lies beside the bytes of a step, and says what they must be: one manifest per part, and one that seals the step.

JSON, so that people can look; the last field is the digest of all before it, so that no changed byte goes unnoticed. A folder of
a step is *complete* when its `SEAL` is there: it is written last and removed first.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_core.data.cut import Cut, Place, cut_of, pack
from dlrover_core.errors import CoreError

FORMAT = 3
"""1 and 2 are read, too: 1 does not say which ranks have objects of their own, nor which names a state has; neither has a cut.
What has no cut is written as `PLAIN`, which older versions read."""
PLAIN = 2
SEAL = "manifest.json"
METADATA = ".metadata"
BLOCK_BYTES = 16 * 1024 * 1024
"""Of a file, what one digest is of."""
DCP, TORCH = "dcp", "torch"
_STEP = re.compile(r"step-(\d{10,20})")
_PART = re.compile(r"part-(\d+)\.json")
_DATA = re.compile(r"__\d+_\d+\.(distcp|objects)|checkpoint\.pt")
_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.draft")
_NAMES_BYTES = 256 * 1024 * 1024
"""More than the names of any state take, unpacked."""
_TAIL = re.compile(rb',"digest":"([0-9a-f]{16})"\}$')


class CheckpointDamaged(CoreError):
    """Stored bytes are not as they were written. ``file`` and ``offset`` (bytes) say where."""

    def __init__(self, file: str, offset: int, message: str) -> None:
        super().__init__(f"{file}: at byte {offset:,}: {message}")
        self.file, self.offset = file, offset


class CheckpointTooNew(CoreError):
    """A newer version of ours wrote it. ``file`` says which manifest told so."""

    def __init__(self, file: str, found: object) -> None:
        super().__init__(f"{file} is of format {found}, this version reads {FORMAT}: install a newer dlrover-core")
        self.file = file


class CheckpointIncomplete(CoreError):
    """Parts of a step are not there, or do not fit together; nothing says that bytes are damaged."""


class StoredFile(NamedTuple):
    """A file of a part: bytes, and the digests of its blocks."""

    name: str
    size: int
    digests: tuple[int, ...]


class StoredItem(NamedTuple):
    """One chunk of one tensor on storage: as in the arena's table, and where it lies.

    ``offset`` and ``length``: of what ``torch.load`` opens, in bytes of ``file``, an index of the part's files. ``data``: where
    in the file its ``size`` raw bytes begin.
    """

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    offset: int
    length: int
    data: int
    size: int


class StoredObject(NamedTuple):
    """Something that is no tensor, as ``torch.save`` wrote it."""

    name: str
    file: int
    offset: int
    length: int


class Part(NamedTuple):
    """What one rank wrote of a step. ``kind``: `DCP`, or `TORCH`: all of it, in one file that ``torch.load`` opens.

    ``writers``: the ranks that have parts to write of such a state; empty: it is not said. ``own``: the ranks that have objects
    of their own in such a state; ``covers``: those of them whose objects are in this part, where it is not this rank alone.
    ``stands_in``, in parts of older versions: there is in it what others usually write, because some of them could not any more;
    there are fewer parts then. ``run`` is one submission of the job named ``job``; both are empty where no agent was there to say
    so. ``names``: packed, the names of all tensors and objects that this rank (or those it covers) has in such a state, whoever
    writes them; empty: it is not said. ``alike``: it has all names that rank 0's part says, too.
    ``cut``: how far each dataset is consumed in this state, the same in all parts; empty: the state has no position in any data.
    """

    kind: str
    run: str
    generation: int
    step: int
    world: int
    rank: int
    layout: int
    files: tuple[StoredFile, ...]
    items: tuple[StoredItem, ...]
    objects: tuple[StoredObject, ...]
    paths: tuple[tuple[str, tuple[Any, ...]], ...]
    writers: tuple[int, ...] = ()
    stands_in: bool = False
    job: str = ""
    own: tuple[int, ...] = ()
    covers: tuple[int, ...] = ()
    names: str = ""
    alike: bool = False
    cut: Cut = ()

    @property
    def packed_cut(self) -> bytes:
        """The cut as a slot's blob has it; empty: there is none."""
        return pack(self.cut) if self.cut else b""

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(one.size for one in self.files)

    def packed(self) -> bytes:
        """As it lies on storage."""
        told = self._asdict()
        told["files"] = [(one.name, one.size, [f"{each:016x}" for each in one.digests]) for one in self.files]
        if not self.cut:
            del told["cut"]
        return _sealed({"format": FORMAT if self.cut else PLAIN, "block_bytes": BLOCK_BYTES, **told})

    @classmethod
    def unpacked(cls, raw: bytes, name: str) -> Part:
        """From storage, where it is called ``name``. Raises `CheckpointDamaged` and `CheckpointTooNew`."""
        told = _opened(raw, name)
        try:
            block_bytes = told.pop("block_bytes")
            files = tuple(
                StoredFile(one[0], one[1], tuple(int(each, 16) for each in one[2])) for one in told.pop("files")
            )
            items = tuple(StoredItem(*map(_frozen, one)) for one in told.pop("items"))
            objects = tuple(StoredObject(*one) for one in told.pop("objects"))
            paths = tuple((one, tuple(path)) for one, path in told.pop("paths"))
            for ranks in ("writers", "own", "covers"):
                told[ranks] = tuple(map(int, told.get(ranks, ())))
            told["cut"] = cut_of(Place(*one) for one in told.get("cut", ()))
            part = cls(**told, files=files, items=items, objects=objects, paths=paths)
            _sensible(part, block_bytes)
            names_in(part.names)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointDamaged(name, 0, f"no manifest of a part: {error}") from error
        return part


class SealedPart(NamedTuple):
    """What the seal knows of one part: its manifest's size and digest, and the bytes of its files."""

    rank: int
    manifest_bytes: int
    manifest_digest: int
    size: int


class Seal(NamedTuple):
    """What makes a step complete. ``metadata``: size and digest of the file `METADATA`; nothing for `TORCH`."""

    kind: str
    run: str
    generation: int
    step: int
    world: int
    parts: tuple[SealedPart, ...]
    metadata: tuple[int, int] | None
    job: str = ""

    @property
    def size(self) -> int:
        """Bytes of all parts' files."""
        return sum(one.size for one in self.parts)

    def packed(self) -> bytes:
        """As it lies on storage."""
        told = self._asdict()
        told["parts"] = [one._replace(manifest_digest=cast(int, f"{one.manifest_digest:016x}")) for one in self.parts]
        if self.metadata is not None:
            told["metadata"] = (self.metadata[0], f"{self.metadata[1]:016x}")
        return _sealed({"format": PLAIN, **told})

    @classmethod
    def unpacked(cls, raw: bytes, name: str) -> Seal:
        """From storage, where it is called ``name``. Raises `CheckpointDamaged` and `CheckpointTooNew`."""
        told = _opened(raw, name)
        try:
            parts = tuple(SealedPart(one[0], one[1], int(one[2], 16), one[3]) for one in told.pop("parts"))
            found = told.pop("metadata")
            return cls(**told, parts=parts, metadata=None if found is None else (found[0], int(found[1], 16)))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointDamaged(name, 0, f"no manifest of a step: {error}") from error


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """The step whose folder this is; None: of none."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found is not None and step_name(int(found[1])) == name else None


def part_name(rank: int) -> str:
    """The manifest of a rank's part."""
    return f"part-{rank}.json"


def part_of(name: str) -> int | None:
    """The rank whose part's manifest this is; None: of none."""
    found = _PART.fullmatch(name)
    return int(found[1]) if found is not None and part_name(int(found[1])) == name else None


def packed_names(names: Iterable[str]) -> str:
    """Names as a manifest has them, several thousand in some ten KiB. Never empty."""
    return base64.b64encode(zlib.compress(msgpack.packb(sorted(set(names))))).decode()


@functools.lru_cache(maxsize=8)
def names_in(packed: str) -> frozenset[str]:
    """The names that `packed_names` has packed; of the empty string none. Raises `ValueError`."""
    if not packed:
        return frozenset()
    try:
        opened = zlib.decompressobj()
        found = msgpack.unpackb(opened.decompress(base64.b64decode(packed, validate=True), _NAMES_BYTES))
    except (ValueError, zlib.error, msgpack.UnpackException) as error:
        raise ValueError(f"its names cannot be read: {error}") from error
    if not opened.eof or not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("its names cannot be read")
    return frozenset(found)


def is_ours(name: str) -> bool:
    """Is this how we call a file in a step's folder, or one that is still being written?"""
    draft = _DRAFT.fullmatch(name)
    name = draft["name"] if draft is not None else name
    return name in {SEAL, METADATA} or part_of(name) is not None or _DATA.fullmatch(name) is not None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sensible(part: Part, block_bytes: int) -> None:
    if part.kind not in {DCP, TORCH} or block_bytes != BLOCK_BYTES:
        raise ValueError(f"of kind {part.kind!r}, in blocks of {block_bytes} bytes")
    for file in part.files:
        if "/" in file.name or len(file.digests) != -(-file.size // BLOCK_BYTES):
            raise ValueError(f"{file.name!r}: {file.size} bytes, {len(file.digests)} digests")
    for item in part.items:
        _inside(part, item.name, item.file, item.offset, item.length)
        if not item.offset <= item.data <= item.data + item.size <= item.offset + item.length:
            raise ValueError(f"{item.name!r}: its bytes lie elsewhere")
    for one in part.objects:
        _inside(part, one.name, one.file, one.offset, one.length)


def _inside(part: Part, name: str, file: int, offset: int, length: int) -> None:
    if not (0 <= file < len(part.files) and offset >= 0 <= length and offset + length <= part.files[file].size):
        raise ValueError(f"{name!r} lies outside of its file")


def _sealed(told: dict[str, Any]) -> bytes:
    body = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    return body[:-1] + f',"digest":"{digest(body):016x}"}}'.encode()


def _opened(raw: bytes, name: str) -> dict[str, Any]:
    try:
        told = json.loads(raw)
        found = told.pop("format")
        told.pop("digest", None)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(name, 0, f"no manifest: {error}") from error
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointTooNew(name, found)
    tail = _TAIL.search(raw)
    if found not in {1, PLAIN, FORMAT} or tail is None or int(tail[1], 16) != digest(raw[: tail.start()] + b"}"):
        raise CheckpointDamaged(name, 0, "a manifest whose bytes are not as they were written")
    return cast(dict[str, Any], told)
