"""A folder that grows, as a stream: whoever writes to it (Flink, Spark, a cron job) adds files, and never changes one.

In which order the files came is written down in the folder, in `LIST`, as they are found: by one process at a time, under a lock.
So every reader sees the same offsets, whatever the files are called, and after old files were removed.

Files whose names begin with ``.`` or ``_`` or end in one of `UNFINISHED` are not complete yet. Of the others those are read that
match the pattern; that there are others is said once. Shared file systems tell nobody of
new files, so a reader that waits looks every `LOOK_S` seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_adapters.data.index_file import say
from dlrover_adapters.data.parquet import Parquet
from dlrover_adapters.data.source import Source, fingerprint_of
from dlrover_adapters.data.text import JsonLines, Lines
from dlrover_core.data.streams import (
    AccessRefused,
    Extent,
    Message,
    OffsetAhead,
    OffsetGone,
    SegmentChanged,
    StreamError,
    StreamGone,
    StreamUnavailable,
    UnknownPartition,
)
from dlrover_core.errors import SpecError

LIST = ".dlrover-segments"
PARTITION = "0"
LOOK_S = 0.5
UNFINISHED = (".tmp", ".part", ".inprogress", ".crc", ".lock")
OPEN_MAX = 4
"""So many files are kept open by a reader."""
KINDS = {"jsonl": JsonLines, "lines": Lines, "parquet": Parquet}
PATTERNS = {
    "jsonl": ("*.jsonl", "*.ndjson", "*.json"),
    "lines": ("*.txt", "*.log", "*.csv", "*.tsv"),
    "parquet": ("*.parquet",),
}
"""Which files of a folder are read, by their kind; and those of `PARTS`, which Flink and Spark write without an ending."""
PARTS = "part-*"
DEEP_MAX = 8
"""So many folders within one another are looked into."""


class _Segment(NamedTuple):
    """One file. ``first``: the offset of its first message. ``messages``: how many there are."""

    name: str
    first: int
    messages: int
    fingerprint: str


class FolderStream:
    """The messages of a growing folder, in one partition, ``"0"``.

    kind: what the files are: ``"jsonl"``, ``"lines"`` or ``"parquet"``.
    pattern: which files are read, by their names, such as ``"clicks-*"``; empty: those of `PATTERNS`, and of Flink's ``part-*``
    those without an ending. The same for all readers.

    Folders in the folder are looked into: Flink begins one each hour, Spark has one for each value of a column.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str = "jsonl", *, pattern: str = "") -> None:
        """Raises: SpecError for an unknown kind; `StreamGone` where there is no such folder, `AccessRefused`."""
        if kind not in KINDS:
            raise SpecError("kind", f"{kind!r}: give {', '.join(KINDS)}")
        self.folder, self.kind = Path(folder).absolute(), kind
        self.pattern = pattern
        self.patterns = (pattern,) if pattern else (*PATTERNS[kind], PARTS)
        self._left_out_told = False
        self.name = str(self.folder)
        self._segments: list[_Segment] = []
        self._read_up_to = 0
        self._id = ""
        self._sources: dict[str, Source] = {}
        self._present: set[str] = set()
        self._look()

    @property
    def fingerprint(self) -> str:
        """Of the list of files: one that was lost and begun anew may have another order."""
        return f"folder:{self._id}"

    def extents(self) -> Mapping[str, Extent]:
        """What can be read now; it looks for new files first."""
        self._look()
        return {PARTITION: self._extent()}

    def _extent(self) -> Extent:
        first = next((one.first for one in self._segments if one.messages and self._there(one)), self._end)
        return Extent(first, self._end)

    def holes(self) -> Mapping[str, Sequence[Extent]]:
        """Files that were removed while older ones are still there."""
        first, found = self._extent().first, list[Extent]()
        for name, start, messages, _ in self._segments:
            if not messages or start < first or name in self._present:
                continue
            joined = found.pop() if found and found[-1].end == start else Extent(start, start)
            found.append(Extent(joined.first, start + messages))
        return {PARTITION: found} if found else {}

    def _there(self, segment: _Segment) -> bool:
        return (self.folder / segment.name).exists()

    def _read_it(self, path: str) -> bool:
        """Is this file one of the stream's?"""
        name = path.rpartition("/")[2]
        if self.pattern:
            return fnmatchcase(name, self.pattern)
        ended = any(fnmatchcase(name, each) for each in PATTERNS[self.kind])
        return ended or ("." not in name and fnmatchcase(name, PARTS))

    @property
    def _end(self) -> int:
        return self._segments[-1].first + self._segments[-1].messages if self._segments else 0

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> list[Message]:
        """Messages from ``offset`` on, of one file at most."""
        if partition != PARTITION:
            raise UnknownPartition(f"{self.name} has no partition {partition!r}: a folder has one, {PARTITION!r}")
        until = time.monotonic() + wait_s
        while offset >= self._end:
            self._look()
            if offset > self._end:
                raise OffsetAhead(self.name, partition, offset, self._end)
            left = until - time.monotonic()
            if offset == self._end and left <= 0:
                return []
            if offset == self._end:
                time.sleep(min(LOOK_S, left))
        segment = self._segments[bisect_right(self._segments, offset, key=lambda one: one.first) - 1]
        if not (self.folder / segment.name).exists():
            raise OffsetGone(self.name, PARTITION, offset, self._first_left(offset))
        source = self._source(segment)
        at = offset - segment.first
        return [Message(segment.first + one, source[one]) for one in range(at, min(at + most, segment.messages))]

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Nobody to tell: a folder has no place for it."""

    def close(self) -> None:
        """Let go of files."""
        self._sources = {}

    def _source(self, segment: _Segment) -> Source:
        found = self._sources.pop(segment.name, None)
        if found is None:
            found = self._opened(segment)
        # The one that was read last is the last.
        self._sources[segment.name] = found
        while len(self._sources) > OPEN_MAX:
            del self._sources[next(iter(self._sources))]
        return found

    def _opened(self, segment: _Segment) -> Source:
        path = self.folder / segment.name
        source = self._made(path)
        if fingerprint_of(source) != segment.fingerprint:
            message = f"{path} is {fingerprint_of(source)}, and was {segment.fingerprint} when it came"
            raise SegmentChanged(f"{message}: write new files, and never change one")
        return source

    def _made(self, path: Path) -> Source:
        try:
            source: Source = KINDS[self.kind](path)
        except SpecError as error:
            if error.field != "path":
                raise
            remedy = f"mend it, or take it out of {self.name}, or give a pattern= that it does not match"
            raise StreamError(f"a file cannot be read as {self.kind}: {error}; {remedy}") from error
        except PermissionError as error:
            raise AccessRefused(f"{path} may not be read by this user: change its mode (chmod a+r {path})") from error
        except OSError as error:
            raise StreamUnavailable(f"{path} cannot be read now: {error.strerror}; look at its file system") from error
        return source

    def _first_left(self, offset: int) -> int:
        later = (one for one in self._segments if one.first > offset and one.messages)
        return next((one.first for one in later if (self.folder / one.name).exists()), self._end)

    def _look(self) -> None:
        """Read what was written down, and write down which files are new."""
        try:
            complete = self._present = _complete(self.folder)
            names = {one for one in complete if self._read_it(one)}
            self._tell_left_out(complete - names)
            self._read_list()
            if self._id and not names - {one.name for one in self._segments}:
                return
            file = os.open(self.folder / LIST, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            raise StreamGone(f"{self.name} is not there: give a folder that exists") from error
        except NotADirectoryError as error:
            raise StreamGone(f"{self.name} is no folder: give the folder that files are added to") from error
        except PermissionError as error:
            if self._id:
                return  # readers that may write say what is new
            message = (
                f"{self.name} may not be read and written to by this user: {LIST} in it says in which order files came"
            )
            raise AccessRefused(message) from error
        except OSError as error:
            raise StreamUnavailable(f"{self.name} cannot be read now: {error.strerror}") from error
        try:
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: let one reader begin, and the others follow
                fcntl.flock(file, fcntl.LOCK_EX)
            self._read_list()
            self._write_down(file, names)
        finally:
            os.close(file)
        self._read_list()

    def _tell_left_out(self, names: set[str]) -> None:
        if names and not self._left_out_told:
            self._left_out_told = True
            patterns = ", ".join(self.patterns)
            say(
                f"{self.name}: {min(names)!r} is not read, as it does not match {patterns}; give pattern= to read such files"
            )

    def _write_down(self, file: int, names: set[str]) -> None:
        size = os.fstat(file).st_size
        if size > self._read_up_to:
            # What a writer that died has left of a line.
            os.ftruncate(file, self._read_up_to)
        if not self._id:
            _append(file, {"id": os.urandom(8).hex(), "kind": self.kind})
        end = self._end
        for name in sorted(names - {one.name for one in self._segments}):
            try:
                source = self._made(self.folder / name)
            except SpecError as error:
                if error.field != "size":
                    raise
                continue  # an empty file: writers leave such, and it may yet be filled
            _append(file, {"name": name, "first": end, "count": len(source), "fingerprint": fingerprint_of(source)})
            end += len(source)

    def _read_list(self) -> None:
        """What was added to the list since it was read last; a line that is not whole is left for later."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / LIST, "rb") as file:
            file.seek(self._read_up_to)
            for line in file:
                told = _line(line)
                if told is None:
                    return
                self._read_up_to += len(line)
                if "id" not in told:
                    self._segments.append(_Segment(told["name"], told["first"], told["count"], told["fingerprint"]))
                    continue
                self._id = told["id"]
                if told["kind"] != self.kind:
                    raise SpecError("kind", f"{self.kind!r}, and {self.name} was begun as {told['kind']!r}: give that")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}


def _complete(folder: Path, deep: int = DEEP_MAX) -> set[str]:
    """The files of a folder, and of those in it, that are complete: their paths within it."""
    found: set[str] = set()
    with os.scandir(folder) as entries:
        for one in entries:
            if one.name.startswith((".", "_")) or one.name.endswith(UNFINISHED):
                continue
            if not one.is_dir():
                found |= {one.name} if one.is_file() else set()
            elif deep > 1:
                with contextlib.suppress(FileNotFoundError):  # writers remove folders, too
                    found |= {f"{one.name}/{each}" for each in _complete(folder / one.name, deep - 1)}
    return found


def _append(file: int, told: dict[str, Any]) -> None:
    """One line with its checksum; it is on the disk before anybody reads an offset of it."""
    text = json.dumps(told).encode()
    os.write(file, b"%08x %s\n" % (zlib.crc32(text), text))
    os.fsync(file)


def _line(line: bytes) -> dict[str, Any] | None:
    """What a line says; None: it is not whole."""
    crc, _, text = line.partition(b" ")
    if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text[:-1]):
        return None
    found: dict[str, Any] = json.loads(text)
    return found
