"""Packing: several samples in one row of at most so many tokens. A row has an index of its own.

Which samples are in which row is planned once, over their lengths, before training. So rows are counted, shuffled and resumed as
any other samples are. Where rows are packed while they are read, samples lie in a packer's memory that no position counts, and a
restart repeats or loses them.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from dlrover_adapters.data.index_file import Progress
from dlrover_adapters.data.source import Source, as_source, fingerprint
from dlrover_core.errors import SpecError

TOGETHER = 1000
"""Samples that follow one another and of which rows are made together: a row's samples lie near one another in the files."""
REFUSE, CUT, SPLIT = "refuse", "cut", "split"


class Packed:
    """Rows of whole samples. Row ``r`` is ``join`` of the list of its samples. Made by `packed`."""

    chunk = 1

    def __init__(
        self, source: Source, length: int, lengths: Iterable[int], join: Callable[[list[Any]], Any], long: str
    ) -> None:
        self.source, self.length, self.join, self.long = source, length, join, long
        self._begins, self._members, self.tokens = array("Q", [0]), array("Q"), 0
        for row, tokens in _rows(_checked(lengths, length, long), length):
            self._members.extend(row)
            self._begins.append(len(self._members))
            self.tokens += tokens
        _same_count(source, len(self._members))
        self._plan = _digest(self._begins, self._members)

    def __len__(self) -> int:
        return len(self._begins) - 1

    @property
    def filled(self) -> float:
        """Which share of all rows' room is filled, 0 to 1."""
        return self.tokens / (len(self) * self.length)

    def members(self, row: int) -> list[int]:
        """The indices, in the source, of a row's samples."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: there are 0 to {len(self) - 1}")
        return self._members[self._begins[row] : self._begins[row + 1]].tolist()

    def __getitem__(self, row: int) -> Any:
        samples = [self.source[index] for index in self.members(row)]
        if self.long == CUT:
            samples = [one[: self.length] if len(one) > self.length else one for one in samples]
        # What is no sequence of tokens yet, as a text is not, cannot be counted.
        if all(isinstance(one, (list, tuple)) or getattr(one, "ndim", 0) == 1 for one in samples):
            tokens = sum(map(len, samples))
            if tokens > self.length:
                message = f"row {row} has {tokens} tokens, of at most {self.length}: give each sample's own length"
                raise SpecError("lengths", message)
        return self.join(samples)

    def fingerprint_at(self, size: int) -> str:
        """The source's fingerprint, and the plan's. Rows of a source that grew are other rows."""
        return _fingerprint("packed", self, size, self.source, f"{self.length} {self.long}", self._plan)


class PackedSplit:
    """Rows of exactly ``length`` tokens of all samples, one after the other: a sample may end in one row and go on in the next.

    The last tokens that fill no row are left out. Made by `packed` with ``long="split"``.
    """

    chunk = 1
    filled = 1.0

    def __init__(self, source: Source, length: int, lengths: Iterable[int], join: Callable[[list[Any]], Any]) -> None:
        self.source, self.length, self.join = source, length, join
        self._begins = array("Q", [0])
        for one in _checked(lengths, length, SPLIT):
            self._begins.append(self._begins[-1] + one)
        _same_count(source, len(self._begins) - 1)
        if self._begins[-1] < length:
            message = f"{length} is more than the {self._begins[-1]} tokens of all samples: give a shorter one"
            raise SpecError("length", message)
        self._plan = _digest(self._begins)

    def __len__(self) -> int:
        return self._begins[-1] // self.length

    def __getitem__(self, row: int) -> Any:
        pieces = []
        for index, start, end in self.pieces(row):
            sample = self.source[index]
            if len(sample) != self._begins[index + 1] - self._begins[index]:
                message = f"sample {index} has {len(sample)} tokens, {self._begins[index + 1] - self._begins[index]} when planned"
                raise SpecError("lengths", f"{message}: give the lengths of this source")
            pieces.append(sample[start:end])
        return self.join(pieces)

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """What a row holds: the index of a sample in the source, and which of its tokens, [start, end)."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: there are 0 to {len(self) - 1}")
        at, stop = row * self.length, (row + 1) * self.length
        found, index = [], bisect_right(self._begins, at) - 1
        while at < stop:
            begin, end = self._begins[index], self._begins[index + 1]
            if end > at:
                found.append((index, at - begin, min(end, stop) - begin))
                at = min(end, stop)
            index += 1
        return found

    def fingerprint_at(self, size: int) -> str:
        """The source's fingerprint, and the plan's. Rows of a source that grew are other rows."""
        return _fingerprint("packed-split", self, size, self.source, f"{self.length}", self._plan)


def _fingerprint(kind: str, rows: Sized, size: int, source: Source, words: str, plan: bytes) -> str:
    return fingerprint(kind, size, [source.fingerprint_at(len(source)), words, plan if size == len(rows) else b""])


def _digest(*numbers: array[int]) -> bytes:
    """Of a plan, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for one in numbers:
        digest.update(",".join(map(str, one)).encode() + b";")
    return digest.digest()


def packed(
    source: Any,
    length: int,
    *,
    lengths: Iterable[int] | None = None,
    join: Callable[[list[Any]], Any] = list,
    long: str = REFUSE,
) -> Packed | PackedSplit:
    """Rows of at most ``length`` tokens.

    lengths: each sample's number of tokens; where it is not given every sample is read once for its ``len``.
    join: makes a row of the list of its samples. long: what becomes of a sample of more than ``length`` tokens: ``"refuse"``,
    ``"cut"``, or ``"split"``: all rows are filled, and samples go on in the next row.
    Raises: SpecError where the length is below 1, a sample is too long, or the lengths are not those of the source.
    """
    if length < 1:
        raise SpecError("length", f"{length}: give 1 or more tokens")
    if long not in {REFUSE, CUT, SPLIT}:
        raise SpecError("long", f'{long!r}: give "{REFUSE}", "{CUT}" or "{SPLIT}"')
    found = as_source(source)
    if isinstance(lengths, Sequence) and len(lengths) != len(found):
        _same_count(found, len(lengths))
    given = _measured(found) if lengths is None else lengths
    return PackedSplit(found, length, given, join) if long == SPLIT else Packed(found, length, given, join, long)


def _measured(source: Source) -> Iterator[int]:
    told = Progress("lengths of samples", len(source))
    for index in range(len(source)):
        sample = source[index]
        if not hasattr(sample, "__len__"):
            message = f"sample {index} is {type(sample).__name__}, which has no length: give lengths="
            raise SpecError("lengths", message)
        yield len(sample)
        told.more(1)


def _checked(lengths: Iterable[int], length: int, long: str) -> Iterator[int]:
    for index, one in enumerate(lengths):
        if one < 1:
            raise SpecError("lengths", f"{one} of sample {index}: give 1 or more tokens, or leave the sample out")
        if one > length and long == REFUSE:
            message = (
                f'{one} tokens of sample {index} are more than {length}: give long="cut" or "split", or longer rows'
            )
            raise SpecError("length", message)
        yield int(one) if long == SPLIT else min(int(one), length)


def _same_count(source: Source, count: int) -> None:
    if count != len(source):
        raise SpecError("lengths", f"{count} for {len(source)} samples: give one for each")


def _rows(lengths: Iterator[int], length: int) -> Iterator[tuple[list[int], int]]:
    """Rows and their tokens. Of each `TOGETHER` samples the longest first, each into the fullest row that has room for it."""
    first, group = 0, list(_some(lengths))
    while group:
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []
        """Room and number of each row, sorted."""
        for tokens, at in sorted(((one, at) for at, one in enumerate(group)), key=lambda one: (-one[0], one[1])):
            best = bisect_left(room, (tokens, -1))
            left, number = room.pop(best) if best < len(room) else (length, len(rows))
            if number == len(rows):
                rows.append([])
            rows[number].append(first + at)
            insort(room, (left - tokens, number))
        tokens_in = {number: length - left for left, number in room}
        # In the order of their first samples, as they lie in the files.
        for number in sorted(range(len(rows)), key=lambda one: min(rows[one])):
            yield sorted(rows[number]), tokens_in[number]
        first, group = first + len(group), list(_some(lengths))


def _some(lengths: Iterator[int]) -> Iterator[int]:
    for _, one in zip(range(TOGETHER), lengths, strict=False):
        yield one
