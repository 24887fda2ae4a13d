"""Lines of text files, and JSONL, as samples: each read by its offset, from an index made once."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from dlrover_adapters.data.index_file import IndexFile, Paths, Scan, Scanner, blocks_of_part, files_of
from dlrover_adapters.data.source import fingerprint
from dlrover_core.errors import SpecError

CHUNK = 1024
"""Lines that are read in a run, where the order is shuffled."""


class IndexedFiles:
    """Samples of several files, one file after the other; each file has an index. The base of all that is read by offset."""

    chunk = CHUNK
    kind = ""
    scanner: Scanner

    def __init__(self, paths: Paths, *, cache: str | os.PathLike[str] = "") -> None:
        """Raises: SpecError where a path names no file, no file has a sample, or an index cannot be written."""
        self.paths = files_of(paths)
        self.files = [IndexFile(path, self.scanner, os.fspath(cache)) for path in self.paths]
        self._ends = list(accumulate(one.count for one in self.files))
        if not self._ends[-1]:
            raise SpecError("size", f"0 samples in {', '.join(self.paths[:8])}: give files with at least one")

    def __len__(self) -> int:
        return self._ends[-1]

    def _at(self, index: int) -> tuple[IndexFile, int]:
        """The file of a sample, and the sample's number in it."""
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"sample {index}: there are 0 to {self._ends[-1] - 1}")
        number = bisect_right(self._ends, index)
        return self.files[number], index - (self._ends[number - 1] if number else 0)

    def place(self, index: int) -> str:
        """Where a sample is, for people: ``file:number of the sample``, the first is 1."""
        file, at = self._at(index)
        return f"{file.path}:{at + 1}"

    def fingerprint_at(self, size: int) -> str:
        """The contents of the files that hold the first ``size`` samples; of the last one up to where they end."""
        digests: list[bytes] = []
        for file, end in zip(self.files, self._ends, strict=True):
            start = end - file.count
            if start >= size:
                break
            digests.append(file.digest if end <= size else self._digest_up_to(file, size - start))
        return fingerprint(self.kind, size, digests)

    def _digest_up_to(self, file: IndexFile, count: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for block in blocks_of_part(file.path, self._bytes_up_to(file, count)):
            digest.update(block)
        return digest.digest()

    def _bytes_up_to(self, file: IndexFile, count: int) -> int:
        """How many bytes the file had when it had its first ``count`` samples alone."""
        return file.span(count - 1)[1]


def _scan_lines(_: str, blocks: Iterator[bytes]) -> Scan:
    """Where each line begins, and where the last one ends."""
    offsets, at, last = array("Q", [0]), 0, b"\n"
    for block in blocks:
        found = block.find(b"\n")
        while found >= 0:
            offsets.append(at + found + 1)
            found = block.find(b"\n", found + 1)
        at, last = at + len(block), block[-1:]
    if last != b"\n":
        offsets.append(at)
    return Scan(offsets)


def _scan_jsonl(_: str, blocks: Iterator[bytes]) -> Scan:
    """The same without blank lines: their bytes belong to the line before."""
    offsets, at, blank, line = array("Q"), 0, True, 0
    for block in blocks:
        begin = 0
        while begin < len(block):
            end = block.find(b"\n", begin)
            piece = block[begin : end if end >= 0 else len(block)]
            if blank and piece.strip():
                offsets.append(line)
                blank = False
            if end < 0:
                break
            begin = end + 1
            line, blank = at + begin, True
        at += len(block)
    offsets.append(at)
    return Scan(offsets)


class Lines(IndexedFiles):
    """Each line of text files is a sample: a str without its line end."""

    kind = "lines"
    scanner = Scanner("lines", _scan_lines)

    def __init__(self, paths: Paths, *, cache: str | os.PathLike[str] = "", encoding: str = "utf-8") -> None:
        """As `IndexedFiles`. ``encoding``: one in which a line ends with one byte, 10, as in UTF-8."""
        super().__init__(paths, cache=cache)
        self.encoding = encoding

    def __getitem__(self, index: int) -> str:
        file, at = self._at(index)
        data = file.read(*file.span(at)).removesuffix(b"\n").removesuffix(b"\r")
        try:
            return data.decode(self.encoding)
        except UnicodeDecodeError as error:
            message = f"{self.place(index)} is not {self.encoding}: {error.reason}; give encoding=, or mend the line"
            raise SpecError("encoding", message) from error


class JsonLines(IndexedFiles):
    """Each line of JSONL files that is not blank is a sample: what its JSON says."""

    kind = "jsonl"
    scanner = Scanner("jsonl", _scan_jsonl)

    def __getitem__(self, index: int) -> Any:
        file, at = self._at(index)
        try:
            return json.loads(file.read(*file.span(at)))
        except ValueError as error:
            raise SpecError("sample", f"{self.place(index)} is no JSON: {error}; mend the line") from error
