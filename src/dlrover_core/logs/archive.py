"""The archive: what was truncated from a log, for ever, in immutable files chained by their hashes.

One file holds whole batches of at least 10,000 events and is named by its first and last sequence number. Its header bears
the BLAKE2b hash of the file before it, so that a file that was changed, lost or exchanged breaks the chain; the hash of the
newest one is for the master to keep, in an event. A file is ``magic, length and crc of the header, header`` and then
entries as in a tail file.

The archive needs little of where it lies: a `Store` lists, reads, and writes whole files (`stores`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgpack

from dlrover_core.errors import LogCorrupt, LogError, LogUnavailable, SchemaTooNew, SpecError
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch
from dlrover_core.kernel.log import Segment
from dlrover_core.logs import tail
from dlrover_core.logs.stores import LocalStore, Store, open_store

__all__ = ["DIGEST_BYTES", "SEGMENT_EVENTS", "Archive", "LocalStore", "Segment", "Store", "open_store"]

SEGMENT_EVENTS = 10_000
DIGEST_BYTES = 32
FORMAT = 1
_MAGIC = b"DLRARCH1"
_HEAD = struct.Struct("<8sII")
_SUFFIX = ".seg"
_GENESIS = b"\0" * DIGEST_BYTES
# Written by every leader under the same name with the same words: proof that the store takes and keeps files.
_MARK = (".archive", b"Events of one job, archived by dlrover-core: never to be changed.\n")

_logger = logging.getLogger(__name__)


class Archive:
    """The archive of one job. Calls block; one writer at a time, any number of readers."""

    def __init__(self, store: Store, job: str, codec: Codec, segment_events: int = SEGMENT_EVENTS) -> None:
        self.store, self.job, self.codec, self.segment_events = store, job, codec, segment_events
        self._link: tuple[int, bytes] = (0, _GENESIS)  # the last event of the file read last, and that file's hash

    def check(self) -> None:
        """Try to list and to write, for a job that is about to begin: one that has begun must not end for want of an archive.

        Raises `SpecError` for a store that refuses, or that holds another job's events under this job's name. One that does
        not answer may do so later: that is a warning.
        """
        try:
            found = [name for name in self.store.names() if _span(name) is not None]
            if found:
                raise SpecError(
                    "archive", f"it holds events of an earlier job {self.job!r}; take another name, or move them away"
                )
            self.store.write(*_MARK)
        except OSError as error:
            if not isinstance(error, (TimeoutError, ConnectionError)):
                raise SpecError("archive", f"job {self.job!r}: it cannot be listed and written: {error}") from error
            _logger.warning("job %r: the archive cannot be used now, events stay in the log: %s", self.job, error)

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

    def write(self, batches: Iterable[Batch], noted: int | None = None) -> list[Segment]:
        """Archive batches that follow the last archived one; what does not fill a file is left for the next time.

        Returns the files that were written. With ``noted``, the last event whose file stands in the log, it returns all files
        beyond, read back and checked: those come first that a writer left who died before it could tell.
        Raises `ValueError` for batches that leave a gap, `LogUnavailable` where the store cannot be written, `LogCorrupt`.
        """
        spans = self.spans()
        last = spans[-1][1] if spans else 0
        found = self.verify(noted) if noted is not None and last > noted else []
        written = self._extend(batches, spans)
        return found + (written if noted is None or not written else self.verify(max(last, noted)))

    def _extend(self, batches: Iterable[Batch], spans: list[tuple[int, int]]) -> list[Segment]:
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
        return [segment for segment, _ in self._walk(after)]

    def require(self, upto: int, batches: Iterable[Batch]) -> None:
        """Before ``batches``, in order and none beyond ``upto``, are deleted: the archive must hold the same bytes, chained.

        Raises `LogError` for what is not archived, `LogCorrupt` for what is archived otherwise.
        """
        archived = self.last()
        if archived < upto:
            raise LogError(
                f"job {self.job!r}: events {archived + 1}-{upto} are not archived; archive them before truncating"
            )
        rest = iter(batches)
        first = next(rest, None)
        if first is None:
            return
        files = self._walk(first.first_seq - 1)
        copies = (copy for _, held in files for copy in held if copy.first_seq >= first.first_seq)
        for batch in itertools.chain((first,), rest):
            copy = next(copies, None)
            if copy is None or copy.payload != batch.payload:
                raise LogCorrupt(self.job, batch.first_seq, "the archive holds something else in its place")

    def batches(self, after: int = 0) -> Iterator[Batch]:
        """Every archived batch whose last record is beyond ``after``, in order. Raises `LogCorrupt`."""
        while page := self.page(after):
            yield from page
            after = page[-1].last_seq

    def page(self, after: int) -> list[Batch]:
        """The batches beyond ``after`` of the one file that holds the next event; none where no file does.

        Page by page the chain is followed: a file that was exchanged for another whole one is found when the next is read.
        """
        for first, last in self.spans():
            if first <= after + 1 <= last:
                content = self._read(_name(first, last))
                end, digest = self._link
                if first == end + 1:
                    self._require_link(content, first, last, digest)
                batches = self._batches(content, first, last)
                self._link = (last, _digest(content))
                return [batch for batch in batches if batch.last_seq > after]
        return []

    def _walk(self, after: int) -> Iterator[tuple[Segment, tuple[Batch, ...]]]:
        spans = self.spans()
        old = [span for span in spans if span[1] <= after]
        previous, expected = _GENESIS, 1
        if old:
            previous, expected = _digest(self._read(_name(*old[-1]))), old[-1][1] + 1
        for first, last in spans[len(old) :]:
            content = self._read(_name(first, last))
            if first != expected:
                raise LogCorrupt(
                    self.job, expected, f"the archive goes on with {_name(first, last)}; restore the file between"
                )
            self._require_link(content, first, last, previous)
            batches = self._batches(content, first, last)
            previous, expected = _digest(content), last + 1
            yield Segment(first, last, previous.hex()), batches

    def _require_link(self, content: bytes, first: int, last: int, previous: bytes) -> None:
        if self._header(content, first).previous != previous:
            name = _name(first, last)
            raise LogCorrupt(self.job, first, f"{name} does not follow the file before it: one of them was changed")

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
