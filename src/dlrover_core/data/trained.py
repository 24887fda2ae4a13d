"""What the ranks of one state were trained on, where ranks draw leases: each rank says its own positions.

Ranks that keep their own pace do not meet, so none of them knows the positions of all. Each one puts its own into its part of a
state. The state has consumed what all of them say, so it is restored only where the words of all ranks are there. What a
generation resumed from, rank 0 says again.

The job's log is a witness: of a state that is written to storage it keeps how many positions all ranks together have said, and a
checksum of them. Both add up over ranks, so they are as short for ten thousand ranges as for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgpack

from dlrover_core.data.cut import DATASETS_MAX, NAME_CHARS_MAX
from dlrover_core.data.ranges import Ranges
from dlrover_core.errors import SpecError
from dlrover_core.words import first_few

_FORMAT = 1
CHECKSUM_MODULUS = 2**62


class Counted(NamedTuple):
    """How many positions of a dataset some ranks were trained on, told apart by a checksum that adds up.

    dataset:  its name
    samples:  positions
    checksum: their sum, modulo 2^62
    """

    dataset: str
    samples: int
    checksum: int


class Trained(NamedTuple):
    """Of one dataset.

    dataset:     its name
    fingerprint: which data the positions are of
    spans:       the positions, over all epochs
    """

    dataset: str
    fingerprint: str
    spans: Ranges


class RanksMissing(SpecError):
    """Of some ranks nobody knows what they were trained on. ``ranks``: these."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__("data", f"nobody has what rank {first_few(ranks)} was trained on")
        self.ranks = ranks


def pack(said: Iterable[Trained]) -> bytes:
    """As bytes (msgpack). Raises: SpecError where there are more than 10,000 ranges of a dataset, or more than 64 KiB."""
    rows = []
    for one in sorted(said, key=lambda each: each.dataset):
        try:
            rows.append([one.dataset, one.fingerprint, one.spans.pack()])
        except SpecError as error:
            raise SpecError(
                "shard",
                f"dataset {one.dataset!r}: what this rank was trained on is {len(one.spans)} ranges, too many to be saved; give "
                "a larger shard=",
            ) from error
    packed: bytes = msgpack.packb([_FORMAT, rows])
    return packed


def unpack(packed: bytes) -> tuple[Trained, ...]:
    """What `pack` packed. Raises: SpecError where the bytes are damaged, or of a newer version."""
    try:
        found = msgpack.unpackb(packed)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(str(error) or type(error).__name__) from error
    if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], list):
        raise _damaged("no version, or no datasets")
    if found[0] != _FORMAT:
        raise SpecError("trained", f"format {found[0]!r} is unknown here, {_FORMAT} is known: upgrade to what saved it")
    if len(found[1]) > DATASETS_MAX:
        raise _damaged("too many datasets")
    rows = []
    for one in found[1]:
        if not isinstance(one, list) or [type(field) for field in one] != [str, str, bytes]:
            raise _damaged("a dataset that is not name, fingerprint, ranges")
        if not 1 <= len(one[0]) <= NAME_CHARS_MAX or len(one[1]) > NAME_CHARS_MAX:
            raise _damaged("a name, or a fingerprint, of a length that none has")
        rows.append(Trained(one[0], one[1], Ranges.unpack(one[2])))
    return tuple(rows)


def counted(said: Iterable[Trained]) -> tuple[Counted, ...]:
    """What these words add up to, by dataset."""
    return tuple(Counted(one.dataset, one.spans.count, checksum(one.spans)) for one in said)


def checksum(spans: Ranges) -> int:
    """The sum of the positions, modulo 2^62; by ranges, never by positions."""
    return sum((end - start) * (start + end - 1) // 2 for start, end in spans) % CHECKSUM_MODULUS


def added(every: Iterable[Iterable[Counted]]) -> tuple[Counted, ...]:
    """The sums of what several ranks say, by dataset."""
    sums: dict[str, Counted] = {}
    for one in (one for each in every for one in each):
        known = sums.get(one.dataset, Counted(one.dataset, 0, 0))
        total = (known.checksum + one.checksum) % CHECKSUM_MODULUS
        sums[one.dataset] = Counted(one.dataset, known.samples + one.samples, total)
    return tuple(sums[name] for name in sorted(sums))


def pack_counted(world: int, ranks: int, of: Iterable[Counted]) -> bytes:
    """What ``ranks`` ranks of a ``world`` say together, as bytes (msgpack)."""
    packed: bytes = msgpack.packb([_FORMAT, world, ranks, [list(one) for one in of]])
    return packed


def unpack_counted(packed: bytes) -> tuple[int, int, tuple[Counted, ...]]:
    """What `pack_counted` packed: the world, the ranks, and what they say. Raises: SpecError for other bytes."""
    try:
        form, world, ranks, rows = msgpack.unpackb(packed)
        found = tuple(Counted(*row) for row in rows)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _damaged(str(error) or type(error).__name__) from error
    if form != _FORMAT or not _numbers(world, ranks) or not 1 <= ranks <= world or len(found) > DATASETS_MAX:
        raise _damaged("no version, no ranks, or too many datasets")
    for one in found:
        if type(one.dataset) is not str or not 1 <= len(one.dataset) <= NAME_CHARS_MAX or not _numbers(*one[1:]):
            raise _damaged("a dataset that is not name, number, checksum")
    return world, ranks, found


def _numbers(*said: object) -> bool:
    return all(type(one) is int and 0 <= one < 2**63 for one in said)


def all_counted(said: Iterable[bytes]) -> tuple[Counted, ...]:
    """What all ranks of a state say together, by what several nodes have packed; empty: some rank's words are not among them."""
    worlds, ranks, found = set(), 0, []
    for packed in said:
        try:
            world, of, rows = unpack_counted(packed)
        except SpecError:
            return ()
        worlds.add(world)
        ranks += of
        found.append(rows)
    return added(found) if worlds == {ranks} else ()


def joined(world: int, said: Mapping[int, Iterable[Trained]]) -> tuple[Trained, ...]:
    """What a state of ``world`` ranks was trained on, by the words of each rank.

    Raises: `RanksMissing` where a rank's words are not there; SpecError where two ranks were trained on one position, or on
    different data of one name.
    """
    missing = tuple(rank for rank in range(world) if rank not in said)
    if missing:
        raise RanksMissing(missing)
    found: dict[str, Trained] = {}
    for rank in sorted(said):
        for one in said[rank]:
            known = found.setdefault(one.dataset, one._replace(spans=Ranges()))
            if known.fingerprint != one.fingerprint:
                raise SpecError(
                    "data",
                    f"dataset {one.dataset!r}: rank {rank} has {one.fingerprint!r}, others have {known.fingerprint!r}: all "
                    "ranks give the same data=",
                )
            if both := known.spans & one.spans:
                raise SpecError(
                    "data",
                    f"dataset {one.dataset!r}: rank {rank} and others were both trained on {first_few(_told(both))}",
                )
            found[one.dataset] = known._replace(spans=known.spans | one.spans)
    return tuple(found[name] for name in sorted(found))


def _told(spans: Ranges) -> list[str]:
    return [f"positions {start} to {end - 1}" for start, end in spans]


def _damaged(why: str) -> SpecError:
    return SpecError("trained", f"the bytes are damaged ({why}): take them from another copy")
