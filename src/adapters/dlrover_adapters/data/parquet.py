"""Rows of Parquet files as samples, read by row groups. Needs pyarrow: ``pip install dlrover-core[parquet]``.

A row group is the least that can be read. Some of them are kept, as many as the order mixes at a time.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from dlrover_adapters.data.index_file import Paths, files_of
from dlrover_adapters.data.source import fingerprint
from dlrover_core.errors import SpecError

WINDOW = 4
"""Row groups that are mixed at a time."""
FOOTER_MAX = 1 << 30


class _Group(NamedTuple):
    file: int
    number: int
    rows: int


class Parquet:
    """Each row of Parquet files is a sample: a dict of its columns.

    columns: which to read; all, where it is not given. window: row groups that are mixed at a time; the memory of a process is
    about twice as many.
    """

    def __init__(self, paths: Paths, *, columns: Sequence[str] | None = None, window: int = WINDOW) -> None:
        """Raises: SpecError where pyarrow is missing, a file is no Parquet file or lacks a column, or there is no row."""
        if window < 1:
            raise SpecError("window", f"{window}: give 1 or more row groups")
        self.paths, self.columns, self.window = files_of(paths), list(columns) if columns is not None else None, window
        self._groups: list[_Group] = []
        self._digests: list[tuple[int, bytes]] = []
        for file, path in enumerate(self.paths):
            self._take(file, path)
        self._ends = list(accumulate(one.rows for one in self._groups))
        if not self._ends or not self._ends[-1]:
            raise SpecError("size", f"0 rows in {', '.join(self.paths[:8])}: give files with at least one")
        self.chunk = self._groups[0].rows
        """Rows of the first row group. Writers make equal ones, and it stays the first when files are added."""
        self._forget()

    def _take(self, file: int, path: str) -> None:
        parquet = _parquet()
        try:
            metadata = parquet.read_metadata(path)
            names = set(metadata.schema.to_arrow_schema().names)
        except (OSError, ValueError) as error:
            raise SpecError("path", f"{path} is no Parquet file, or is damaged: {error}") from error
        for column in self.columns or ():
            if column not in names:
                raise SpecError("columns", f"{path} has no column {column!r}: it has {', '.join(sorted(names))}")
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            if rows:
                self._groups.append(_Group(file, number, rows))
        self._digests.append((metadata.num_rows, _footer_digest(path)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._ends[-1]:
            raise IndexError(f"sample {index}: there are 0 to {self._ends[-1] - 1}")
        number = bisect_right(self._ends, index)
        row = index - (self._ends[number - 1] if number else 0)
        table = self._table(number)
        return {name: table.column(at)[row].as_py() for at, name in enumerate(table.column_names)}

    def place(self, index: int) -> str:
        """Where a sample is, for people: ``file:row group:row in it``."""
        number = bisect_right(self._ends, index)
        group = self._groups[number]
        return f"{self.paths[group.file]}:{group.number}:{index - (self._ends[number - 1] if number else 0)}"

    def _table(self, number: int) -> Any:
        kept = self._kept
        if number in kept:
            kept.move_to_end(number)
            return kept[number]
        group = self._groups[number]
        file = self._files.get(group.file)
        if file is None:
            file = self._files[group.file] = _parquet().ParquetFile(self.paths[group.file])
        kept[number] = file.read_row_group(group.number, columns=self.columns).combine_chunks()
        # A chunk of the order may lie in two row groups.
        while len(kept) > 2 * self.window:
            kept.popitem(last=False)
        while len(self._files) > 2 * self.window:
            self._files.pop(next(iter(self._files))).close()
        return kept[number]

    def _forget(self) -> None:
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._files: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_kept", "_files"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def fingerprint_at(self, size: int) -> str:
        """The footers of the files that hold the first ``size`` rows: schema, row groups, places and statistics of columns."""
        parts, rows = [b"columns:" + "\0".join(self.columns or ()).encode()], 0
        for count, digest in self._digests:
            if rows >= size:
                break
            rows += count
            # A file is never added to: it is written again, and then it is another one.
            parts.append(digest if rows <= size else b"")
        return fingerprint("parquet", size, parts)


def _footer_digest(path: str) -> bytes:
    """Of the size, and of the footer, which names each column chunk's place, sizes and statistics."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(8)[:4], "little")
        file.seek(max(0, size - 8 - min(length, FOOTER_MAX)))
        return hashlib.blake2b(size.to_bytes(8, "little") + file.read(), digest_size=16).digest()


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        message = f"Parquet needs pyarrow, which cannot be imported ({error}): pip install 'dlrover-core[parquet]'"
        raise SpecError("source", message) from error
    return parquet
