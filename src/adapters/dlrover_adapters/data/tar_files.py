"""Members of tar files as samples, each read by its offset, from an index made once. Nothing is unpacked."""

from __future__ import annotations

import os
import tarfile
from array import array
from collections.abc import Iterator
from typing import Any

import msgpack

from dlrover_adapters.data.index_file import IndexFile, Paths, Scan, Scanner
from dlrover_adapters.data.text import IndexedFiles
from dlrover_core.errors import SpecError

CHUNK = 64
"""Members that are read in a run, where the order is shuffled."""


def _members(path: str, blocks: Iterator[bytes]) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file in the archive."""
    for _ in blocks:
        pass  # the digest is of all bytes; tarfile reads the headers alone
    try:
        with tarfile.open(path, "r:") as archive:
            for one in archive:
                if one.issparse():
                    message = f"{path}: member {one.name!r} is sparse; pack it without holes (tar without --sparse)"
                    raise SpecError("path", message)
                if one.isreg():
                    yield one.name, one.offset_data, one.size
                archive.members = []  # type: ignore[attr-defined] # tarfile keeps all that it has seen
    except tarfile.TarError as error:
        raise SpecError("path", f"{path} is no tar file, or is damaged: {error}; give an uncompressed tar") from error


def _scan_members(path: str, blocks: Iterator[bytes]) -> Scan:
    return _entries([one] for one in _members(path, blocks))


def _scan_groups(path: str, blocks: Iterator[bytes]) -> Scan:
    return _entries(_grouped(_members(path, blocks)))


def _grouped(members: Iterator[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """Neighbours whose names are the same up to the first dot of the last part."""
    group: list[tuple[str, int, int]] = []
    for one in members:
        if group and stem(group[0][0])[0] != stem(one[0])[0]:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _entries(samples: Iterator[list[tuple[str, int, int]]]) -> Scan:
    offsets, payload = array("Q", [0]), bytearray()
    for one in samples:
        payload += msgpack.packb(one)
        offsets.append(len(payload))
    return Scan(offsets, bytes(payload))


def stem(name: str) -> tuple[str, str]:
    """``a/b.c.jpg`` as ``a/b`` and ``c.jpg``."""
    folder, _, last = name.rpartition("/")
    first, _, extension = last.partition(".")
    return (f"{folder}/{first}" if folder else first), extension


class TarMembers(IndexedFiles):
    """Each regular file in tar files is a sample: ``(name, bytes)``."""

    kind = "tar"
    chunk = CHUNK
    scanner = Scanner("tar", _scan_members)

    def _entry(self, index: int) -> tuple[IndexFile, list[tuple[str, int, int]]]:
        file, at = self._at(index)
        return file, msgpack.unpackb(file.payload(*file.span(at)))

    def __getitem__(self, index: int) -> Any:
        file, members = self._entry(index)
        name, offset, size = members[0]
        return name, file.read(offset, offset + size)

    def _digest_up_to(self, file: IndexFile, count: int) -> bytes:  # noqa: ARG002
        """A tar file that got more members is another file, because its end was overwritten: only new files are additions."""
        return b""


class TarGroups(TarMembers):
    """Neighbouring members with one stem are a sample: ``{"__key__": stem, extension: bytes, ...}``, as WebDataset writes it."""

    kind = "tar-groups"
    scanner = Scanner("tar-groups", _scan_groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, members = self._entry(index)
        found: dict[str, Any] = {"__key__": stem(members[0][0])[0]}
        for name, offset, size in members:
            found[stem(name)[1]] = file.read(offset, offset + size)
        return found


def tar(paths: Paths, *, cache: str | os.PathLike[str] = "", grouped: bool = False) -> TarMembers:
    """The members of tar files; ``grouped``: WebDataset's samples.

    Raises: SpecError as `IndexedFiles`.
    """
    return (TarGroups if grouped else TarMembers)(paths, cache=cache)
