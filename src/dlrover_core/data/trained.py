"""What the ranks of one state were trained on, where ranks draw leases: each rank says its own positions.

Ranks that keep their own pace do not meet, so none of them knows the positions of all. Each one puts its own into its part of a
state. The state has consumed what all of them say, so it is restored only where the words of all ranks are there. What a
generation resumed from, rank 0 says again.
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
