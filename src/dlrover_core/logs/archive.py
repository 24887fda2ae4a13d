"""The archive: what was truncated from a log, for ever, in immutable files chained by their hashes.

One file holds whole batches of at least 10,000 events and is named by its first and last sequence number. Its header bears
the BLAKE2b hash of the file before it, so that a file that was changed, lost or exchanged breaks the chain; the hash of the
newest one is for the master to keep, in an event. A file is ``magic, length and crc of the header, header`` and then
entries as in a tail file.

The archive needs little of where it lies: a `Store` lists, reads, and writes whole files. `LocalStore` is a directory.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgpack

from dlrover_core.errors import LogCorrupt, LogError, LogUnavailable, SchemaTooNew
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch
from dlrover_core.kernel.log import Segment
from dlrover_core.logs import tail
from dlrover_core.logs.place import private_dir, private_file

SEGMENT_EVENTS = 10_000
DIGEST_BYTES = 32
FORMAT = 1
_MAGIC = b"DLRARCH1"
_HEAD = struct.Struct("<8sII")
_SUFFIX = ".seg"
_GENESIS = b"\0" * DIGEST_BYTES


class Store(Protocol):
    """Where the files of one job's archive lie. Calls block; they are made off the event loop."""

    def names(self) -> list[str]:
        """The names of all files; none where there is no archive yet."""
        ...

    def read(self, name: str) -> bytes:
        """A whole file. Raises `OSError`."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write a file durably, whole or not at all; never over another one. Raises `OSError`."""
        ...


class LocalStore:
    """A directory of this host, made when first written to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[str]:
        """The names of all files."""
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        """A whole file."""
        return (self.directory / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Temporary name, sync, link to the final name, sync the directory."""
        private_dir(self.directory)
        draft = self.directory / f".{name}.{os.getpid()}"
        fd = private_file(draft, os.O_WRONLY | os.O_TRUNC)
        try:
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            # A link, where rename would silently replace a file that must never change.
            os.link(draft, self.directory / name)
        except FileExistsError:
            if self.read(name) != content:
                raise
        finally:
            draft.unlink(missing_ok=True)
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class Archive:
    """The archive of one job. Calls block; one writer at a time."""

    def __init__(self, store: Store, job: str, codec: Codec, segment_events: int = SEGMENT_EVENTS) -> None:
        self.store, self.job, self.codec, self.segment_events = store, job, codec, segment_events
        self._recent: tuple[str, tuple[Batch, ...]] = ("", ())

    def spans(self) -> list[tuple[int, int]]:
        """First and last sequence number of every file, in order. Contents are not looked at."""
        try:
            names = self.store.names()
        except OSError as error:
            raise LogUnavailable(f"job {self.job!r}: the archive cannot be listed: {error}") from error
        return sorted(span for name in names if (span := _span(name)) is not None)

    def last(self) -> int:
        """The last archived sequence number; 0 for an empty archive."""
        spans = self.spans()
        return spans[-1][1] if spans else 0

    def write(self, batches: Iterable[Batch]) -> list[Segment]:
        """Archive batches that follow the last archived one; what does not fill a file is left for the next time.

        Raises `ValueError` for batches that leave a gap, `LogUnavailable` where the store cannot be written.
        """
        spans = self.spans()
        last = spans[-1][1] if spans else 0
        previous = _digest(self._read(_name(*spans[-1]))) if spans else _GENESIS
        written: list[Segment] = []
        held: list[Batch] = []
        for batch in batches:
            if batch.first_seq != last + 1:
                raise ValueError(
                    f"job {self.job!r}: batch {batch.first_seq} does not follow event {last} in the archive"
                )
            held.append(batch)
            last = batch.last_seq
            if last - held[0].first_seq + 1 >= self.segment_events:
                previous = self._write(held, previous)
                written.append(Segment(held[0].first_seq, last, previous.hex()))
                held = []
        return written

    def verify(self, after: int = 0) -> list[Segment]:
        """Read every file with events beyond ``after``; check its sums, the order and the chain.

        Raises `LogCorrupt` at the first fault.
        """
        spans = self.spans()
        old = [span for span in spans if span[1] <= after]
        previous, expected, found = _GENESIS, 1, []
        if old:
            previous, expected = _digest(self._read(_name(*old[-1]))), old[-1][1] + 1
        for first, last in spans[len(old) :]:
            name = _name(first, last)
            content = self._read(name)
            header = self._header(content, first)
            if first != expected:
                raise LogCorrupt(self.job, expected, f"the archive goes on with {name}; restore the file between")
            if header.previous != previous:
                raise LogCorrupt(self.job, first, f"{name} does not follow the file before it: one of them was changed")
            self._batches(content, first, last)
            previous, expected = _digest(content), last + 1
            found.append(Segment(first, last, previous.hex()))
        return found

    def batches(self, after: int = 0) -> Iterator[Batch]:
        """Every archived batch whose last record is beyond ``after``, in order. Raises `LogCorrupt`."""
        while page := self.page(after):
            yield from page
            after = page[-1].last_seq

    def page(self, after: int) -> list[Batch]:
        """The batches beyond ``after`` of the one file that holds the next event; none where no file does."""
        for first, last in self.spans():
            if first <= after + 1 <= last:
                return [batch for batch in self._segment(first, last) if batch.last_seq > after]
        return []

    def _segment(self, first: int, last: int) -> tuple[Batch, ...]:
        name, batches = self._recent
        if name != _name(first, last):
            batches = self._batches(self._read(_name(first, last)), first, last)
            self._recent = (_name(first, last), batches)
        return batches

    def _write(self, batches: list[Batch], previous: bytes) -> bytes:
        first, last = batches[0].first_seq, batches[-1].last_seq
        header = msgpack.packb((FORMAT, self.job, first, last, len(batches), previous))
        content = b"".join(
            [_HEAD.pack(_MAGIC, len(header), zlib.crc32(header)), header, *(tail.pack(b.payload) for b in batches)]
        )
        try:
            self.store.write(_name(first, last), content)
        except OSError as error:
            raise LogUnavailable(f"job {self.job!r}: events {first}-{last} could not be archived: {error}") from error
        return _digest(content)

    def _read(self, name: str) -> bytes:
        try:
            return self.store.read(name)
        except OSError as error:
            raise LogUnavailable(f"job {self.job!r}: archive file {name} could not be read: {error}") from error

    def _header(self, content: bytes, seq: int) -> _Header:
        if len(content) < _HEAD.size:
            raise LogCorrupt(self.job, seq, "its archive file is cut off")
        magic, length, crc = _HEAD.unpack_from(content)
        raw = content[_HEAD.size : _HEAD.size + length]
        if magic != _MAGIC or zlib.crc32(raw) != crc:
            raise LogCorrupt(self.job, seq, "the header of its archive file is damaged")
        form, *fields = msgpack.unpackb(raw)
        if form != FORMAT:
            raise SchemaTooNew(f"archive format {form} is newer than {FORMAT}; upgrade dlrover-core to read this log")
        return _Header(_HEAD.size + length, *fields)

    def _batches(self, content: bytes, first: int, last: int) -> tuple[Batch, ...]:
        header = self._header(content, first)
        if (header.job, header.first, header.last) != (self.job, first, last):
            raise LogCorrupt(self.job, first, f"its archive file holds {header.job!r} {header.first}-{header.last}")
        found = tail.scan(content[header.size :])
        batches: list[Batch] = []
        expected = first
        for payload in found.payloads:
            try:
                batch = self.codec.decode(payload)
            except SchemaTooNew:
                raise
            except LogError as error:
                raise LogCorrupt(self.job, expected, f"in the archive: {error}") from error
            if batch.first_seq != expected:
                break
            batches.append(batch)
            expected = batch.last_seq + 1
        if found.damages or expected != last + 1 or len(batches) != header.batches:
            raise LogCorrupt(self.job, expected, "its archive file is damaged from here on")
        return tuple(batches)


class _Header(NamedTuple):
    size: int
    job: str
    first: int
    last: int
    batches: int
    previous: bytes


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _name(first: int, last: int) -> str:
    return Segment(first, last, "").name


def _span(name: str) -> tuple[int, int] | None:
    if not name.endswith(_SUFFIX) or len(name) != 41 + len(_SUFFIX):
        return None
    first, _, last = name[: -len(_SUFFIX)].partition("-")
    return (int(first), int(last)) if first.isdigit() and last.isdigit() else None
