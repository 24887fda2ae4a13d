"""Index files: where each sample of a file begins, so that any sample is read at once.

An index is made once, by one process, while others wait, and appears whole or not at all. It says of which file it is (size and
time of the last change) and has a checksum for each block: one that is of another file, cut off or damaged is made anew. Offsets
are read where they lie (mmap), so an index costs a process no memory.

Layout, little-endian: the header, ``count`` + 1 offsets of 8 bytes, the payload; a CRC-32 of each 64 KiB of these, and one of
the CRC-32s.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import sys
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Union

from dlrover_core.errors import SpecError

MAGIC = b"dlrindex"
VERSION = 1
BLOCK = 65_536
SUFFIX = ".dlrover-index"
PROGRESS_S = 2.0
"""Who makes an index says so on stderr, when it takes longer, and again after each such time."""
READ = 1 << 20
_HEADER = struct.Struct("<8sI12sQqQQ16s")
_PAIR = struct.Struct("<QQ")
_CRC = struct.Struct("<I")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
}


Paths = Union[str, "os.PathLike[str]", Sequence["str | os.PathLike[str]"]]
"""A file, a pattern of files, or several of either."""


class Scan(NamedTuple):
    """What a kind of files finds when it goes through one: offsets of the samples, one more for the end, and a payload."""

    offsets: array[int]
    payload: bytes = b""


class Scanner(NamedTuple):
    """One kind of files. ``scan(path, blocks)`` goes through all ``blocks`` of bytes of the file at ``path``.

    kind: what the index is called, at most 12 ASCII characters. Another kind, or another way to scan, has another name.
    """

    kind: str
    scan: Callable[[str, Iterator[bytes]], Scan]


class Damaged(Exception):
    """An index that is not to be used. It is made anew; nobody outside of this module sees this error."""


class IndexFile:
    """The index of one file. Made when it is not there, or not of the file as it is now.

    path: the file. cache: the folder for the index; empty: beside the file.
    """

    def __init__(self, path: str, scanner: Scanner, cache: str = "") -> None:
        """Raises: SpecError where there is no such file, or its index cannot be written."""
        self.path, self.scanner, self.cache = path, scanner, cache
        self._file = -1
        self._load()

    def _load(self) -> None:
        stamp = _stamp(self.path)
        where = index_path(self.path, self.scanner.kind, self.cache)
        try:
            self._open(where, stamp)
        except (Damaged, OSError, ValueError):
            _make(self.path, self.scanner, where, lambda: self._open(where, stamp))
            self._open(where, _stamp(self.path))

    def _open(self, where: str, stamp: tuple[int, int]) -> None:
        with open(where, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length < _HEADER.size:
                raise Damaged("cut off")
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, kind, size, changed, count, payload, digest = _HEADER.unpack_from(found)
        body = (count + 1) * 8 + payload
        crcs = -(-(_HEADER.size + body) // BLOCK)
        if (magic, version, kind.rstrip(b"\0").decode(errors="replace")) != (MAGIC, VERSION, self.scanner.kind):
            raise Damaged("of another version or kind")
        if (size, changed) != stamp:
            raise Damaged("of another file")
        if length != _HEADER.size + body + 4 * crcs + 4:
            raise Damaged("cut off")
        self._map, self._crcs_at, self._length = found, _HEADER.size + body, length
        if zlib.crc32(found[self._crcs_at : -4]) != _CRC.unpack_from(found, length - 4)[0]:
            raise Damaged("damaged")
        self._good = bytearray(crcs)
        self.count: int = count
        self.digest: bytes = digest
        self._payload_at = _HEADER.size + (count + 1) * 8
        self._check(0, _HEADER.size)

    def _check(self, start: int, end: int) -> None:
        """The blocks of these bytes are as they were written. Each is looked at once."""
        for block in range(start // BLOCK, -(-end // BLOCK)):
            if not self._good[block]:
                data = self._map[block * BLOCK : min((block + 1) * BLOCK, self._crcs_at)]
                if zlib.crc32(data) != _CRC.unpack_from(self._map, self._crcs_at + 4 * block)[0]:
                    raise Damaged("damaged")
                self._good[block] = 1

    def span(self, index: int) -> tuple[int, int]:
        """Where sample ``index`` begins and ends. An index whose bytes have gone bad is made anew first."""
        at = _HEADER.size + 8 * index
        self._whole(at, at + 16)
        start, end = _PAIR.unpack_from(self._map, at)
        return start, end

    def payload(self, start: int, end: int) -> bytes:
        """These bytes of the payload."""
        self._whole(self._payload_at + start, self._payload_at + end)
        return self._map[self._payload_at + start : self._payload_at + end]

    def _whole(self, start: int, end: int) -> None:
        try:
            self._check(start, end)
        except Damaged:
            with contextlib.suppress(OSError):
                os.unlink(index_path(self.path, self.scanner.kind, self.cache))
            self._load()
            self._check(start, end)

    def read(self, start: int, end: int) -> bytes:
        """These bytes of the file itself.

        Raises: SpecError where the file has become shorter.
        """
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        # pread: processes that were forked share the file's position.
        data = os.pread(self._file, end - start, start)
        while len(data) < end - start:
            more = os.pread(self._file, end - start - len(data), start + len(data))
            if not more:
                raise SpecError("path", f"{self.path} has become shorter while it was read: give the file as it was")
            data += more
        return data

    def close(self) -> None:
        """Close the file. Reading opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()

    def __reduce__(self) -> tuple[type[IndexFile], tuple[str, Scanner, str]]:
        return type(self), (self.path, self.scanner, self.cache)


def index_path(path: str, kind: str, cache: str) -> str:
    """Where the index of ``path`` is: hidden, beside it; in ``cache`` with a part of the full path's digest in its name."""
    folder, name = os.path.split(os.path.abspath(path))
    if not cache:
        return os.path.join(folder, f".{name}.{kind}{SUFFIX}")
    digest = hashlib.blake2b(os.fsencode(folder), digest_size=6).hexdigest()
    return os.path.join(cache, f"{name[:150]}.{digest}.{kind}{SUFFIX}")


def blocks_of(path: str, told: Progress) -> Iterator[bytes]:
    """All bytes of a file, in blocks, each followed by its progress."""
    with open(path, "rb", buffering=0) as file:
        first = True
        while block := file.read(READ):
            if first:
                _plain(path, block)
            first = False
            yield block
            told.more(len(block))


def blocks_of_part(path: str, size: int) -> Iterator[bytes]:
    """The first ``size`` bytes of a file, in blocks."""
    with open(path, "rb", buffering=0) as file:
        while size > 0 and (block := file.read(min(READ, size))):
            size -= len(block)
            yield block


def say(text: str) -> None:
    """Tell whoever watches the terminal."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Progress:
    """Says on stderr how far a long work is."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, max(1, total), 0
        self.due = time.monotonic() + PROGRESS_S

    def more(self, count: int) -> None:
        """So much more is done."""
        self.done += count
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + PROGRESS_S
            say(f"{self.what}: {100 * self.done // self.total} %")


def files_of(paths: Paths) -> list[str]:
    """The files that ``paths`` name: each a file, or a pattern whose files are taken in the order of their names.

    Raises: SpecError where a path names no file, or none of this machine's.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[str] = []
    for path in given:
        one = os.fspath(path)
        if one.startswith("file://"):
            one = one.removeprefix("file://")
        if "://" in one:
            raise SpecError(
                "path", f"{one!r} is not on this machine: copy it here, or mount its storage, and give that path"
            )
        if os.path.isfile(one):
            found.append(one)
            continue
        parent = Path(one)
        matches = sorted(map(str, parent.parent.glob(parent.name))) if any(sign in one for sign in "*?[") else []
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            raise SpecError(
                "path", f"{one!r} names no file: give paths of files, or a pattern such as {str(parent / '*')!r}"
            )
        found += matches
    if not found:
        raise SpecError("path", "there are none: give at least one file")
    return found


def _make(path: str, scanner: Scanner, where: str, there: Callable[[], None]) -> None:
    """Write the index, unless another process has done so meanwhile."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The file itself is locked: a lock of its own would be left behind.
        part = f"{where}.part" if _locked(file, path) else f"{where}.{os.uname().nodename}-{os.getpid()}.part"
        try:
            there()
        except (Damaged, OSError, ValueError):
            _write(path, scanner, where, part)
    finally:
        os.close(file)


def _locked(file: int, path: str) -> bool:
    """Wait until no other process makes an index of the file. False: its file system has no locks, and two may do one work."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"index of {path}: another process makes it; waiting")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _write(path: str, scanner: Scanner, where: str, part: str) -> None:
    _writable(os.path.dirname(where), path)
    size, changed = stamp = _stamp(path)
    digest = hashlib.blake2b(digest_size=16)
    told = Progress(f"index of {path}", size)

    def seen() -> Iterator[bytes]:
        for block in blocks_of(path, told):
            digest.update(block)
            yield block

    offsets, payload = scanner.scan(path, seen())
    if _stamp(path) != stamp:
        raise SpecError("path", f"{path} changed while it was indexed: wait until nothing writes to it")
    if sys.byteorder == "big":
        offsets.byteswap()
    header = _HEADER.pack(
        MAGIC, VERSION, scanner.kind.encode(), size, changed, len(offsets) - 1, len(payload), digest.digest()
    )
    try:
        with open(part, "wb") as file:
            crcs = _written(file.write, (memoryview(header), memoryview(offsets).cast("B"), memoryview(payload)))
            file.write(crcs + _CRC.pack(zlib.crc32(crcs)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, where)
    except OSError as error:
        message = f"{where} cannot be written ({error.strerror}): make room, or give cache= another folder"
        raise SpecError("cache", message) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def _writable(folder: str, path: str) -> None:
    """Before anything is read: an index that cannot be written would be known only after the whole file."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"{folder} cannot be written to ({error.strerror}): give cache= a folder for the index of {path}"
        raise SpecError("cache", message) from error


def _written(write: Callable[[memoryview], object], parts: tuple[memoryview, ...]) -> bytes:
    """Write all parts, and return the checksums of their blocks."""
    crcs, crc, room = bytearray(), 0, BLOCK
    for part in parts:
        write(part)
        while len(part):
            piece, part = part[:room], part[room:]
            crc, room = zlib.crc32(piece, crc), room - len(piece)
            if not room:
                crcs += _CRC.pack(crc)
                crc, room = 0, BLOCK
    return bytes(crcs + _CRC.pack(crc)) if room < BLOCK else bytes(crcs)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise SpecError("path", f"{path}: {error.strerror}; give a file that can be read") from error
    return found.st_size, found.st_mtime_ns


def _plain(path: str, block: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if block.startswith(magic):
            raise SpecError("path", f"{path} is compressed ({name}), and has no samples by offset: unpack it first")
