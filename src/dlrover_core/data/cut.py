"""The cut: how far each dataset is consumed at one step. It is saved with the model's state, as one publication.

A place says it in two numbers, because the order of an epoch is total: every earlier epoch is consumed whole, and of ``epoch``
the positions before ``position``. So all ranks hold the same cut at a step, whatever the world size is, and ranks that hold
another one are named before anything is restored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgpack

from dlrover_core.data.ranges import POSITION_MAX
from dlrover_core.errors import SpecError

DATASETS_MAX = 112
"""So many places at most are in one cut: of datasets, of the partitions of streams, and of quarantined samples."""
NAME_CHARS_MAX = 128
"""The longest name of a dataset, and the longest fingerprint."""
EPOCH_MAX = 2**31
BYTES_MAX = 32_768
"""A packed cut has so many bytes at most. An ordinary one has less than 1 KiB."""
_FORMAT = 1


class Place(NamedTuple):
    """How far one dataset is consumed.

    dataset: its name.
    epoch: all epochs before this one are consumed whole; the first is 0.
    position: of this epoch, the positions [0, position) of its order are consumed.
    fingerprint: which data the positions are of, as the source says; empty: the source says nothing.
    """

    dataset: str
    epoch: int
    position: int
    fingerprint: str = ""


Cut = tuple[Place, ...]
"""The places of all datasets, sorted by name."""


def cut_of(places: Iterable[Place]) -> Cut:
    """The cut of ``places``, in order.

    Raises: SpecError where a dataset is there twice, or a field is out of bounds.
    """
    cut = tuple(sorted(places))
    if len(cut) > DATASETS_MAX:
        raise SpecError("datasets", f"{len(cut)} datasets: one job consumes {DATASETS_MAX} at most; mix some into one")
    for at, one in enumerate(cut):
        _check(one)
        if at and cut[at - 1].dataset == one.dataset:
            raise SpecError("dataset", f"{one.dataset!r} is there twice: give each dataset a name of its own")
    return cut


def pack(cut: Cut) -> bytes:
    """The cut as bytes (msgpack).

    Raises: SpecError where it is no cut, as `cut_of` says, or too large.
    """
    packed: bytes = msgpack.packb([_FORMAT, [list(one) for one in cut_of(cut)]])
    if len(packed) > BYTES_MAX:
        message = f"{len(packed)} bytes: a cut has {BYTES_MAX} at most; give datasets shorter names"
        raise SpecError("cut", message)
    return packed


def unpack(packed: bytes) -> Cut:
    """The cut that `pack` packed.

    Raises: SpecError where the bytes are damaged, too many, or of a newer version.
    """
    if len(packed) > BYTES_MAX:
        raise SpecError("cut", f"{len(packed)} bytes are no cut: it has {BYTES_MAX} at most")
    try:
        found = msgpack.unpackb(packed)
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(str(error) or type(error).__name__) from error
    if not isinstance(found, list) or not found or type(found[0]) is not int:
        raise _damaged("no version in front")
    if found[0] != _FORMAT:
        message = f"format {found[0]} is unknown here, {_FORMAT} is known: upgrade to the version that saved it"
        raise SpecError("cut", message)
    if len(found) != 2 or not isinstance(found[1], list) or len(found[1]) > DATASETS_MAX:
        raise _damaged("no list of datasets")
    places = []
    for one in found[1]:
        if not isinstance(one, list) or [type(field) for field in one] != [str, int, int, str]:
            raise _damaged("a dataset that is not name, epoch, position, fingerprint")
        places.append(Place(*one))
    cut = cut_of(places)
    if cut != tuple(places):
        raise _damaged("the datasets are not in order")
    return cut


def nests(earlier: Cut, later: Cut) -> bool:
    """All that is consumed at ``earlier`` is consumed at ``later``, too. Fingerprints are not compared: `differences` does."""
    after = {one.dataset: one for one in later}
    return all(
        one.dataset in after and (one.epoch, one.position) <= (after[one.dataset].epoch, after[one.dataset].position)
        for one in earlier
    )


def differences(mine: Cut, others: Cut) -> list[str]:
    """In which fields two cuts differ, with both values: ``dataset 'train': position is 512 here, 480 there``; empty: in none."""
    here, there = ({one.dataset: one for one in cut} for cut in (mine, others))
    found = []
    for name in sorted({*here, *there}):
        if name not in there:
            found.append(f"dataset {name!r}: here, not there")
        elif name not in here:
            found.append(f"dataset {name!r}: there, not here")
        else:
            pairs = zip(Place._fields, here[name], there[name], strict=True)
            found += [f"dataset {name!r}: {field} is {a!r} here, {b!r} there" for field, a, b in pairs if a != b]
    return found


def same_source(then: str, now: str) -> bool:
    """May positions of fingerprint ``then`` be of the data of fingerprint ``now``?

    They are equal, or ``then`` says nothing, or the source has got more samples: all words are the same but ``size``, which is
    larger, and ``source``.

    Whether the samples of then are the first ones of now is known to ranks alone, who refuse to resume where they are not.
    """
    if then in {"", now}:
        return True
    before, after = (dict(word.partition("=")[::2] for word in one.split(" ")) for one in (then, now))
    sizes = [one.pop("size", "") for one in (before, after)]
    if not all(one.isascii() and one.isdecimal() for one in sizes) or int(sizes[0]) >= int(sizes[1]):
        return False
    known = [one.pop("source", "") for one in (before, after)]
    return all(known) and before == after


def size_in(fingerprint: str) -> int:
    """The samples of the source that a fingerprint is of; 0: it does not say."""
    size = dict(word.partition("=")[::2] for word in fingerprint.split(" ")).get("size", "")
    return int(size) if size.isascii() and size.isdecimal() and len(size) < 20 else 0


def _check(one: Place) -> None:
    if not 1 <= len(one.dataset) <= NAME_CHARS_MAX or not one.dataset.isprintable():
        message = f"{one.dataset!r} is no name: give 1 to {NAME_CHARS_MAX} printable characters"
        raise SpecError("dataset", message)
    if not 0 <= one.epoch <= EPOCH_MAX:
        raise SpecError("epoch", f"{one.epoch} (dataset {one.dataset!r}): give 0 to {EPOCH_MAX}")
    if not 0 <= one.position <= POSITION_MAX:
        raise SpecError("position", f"{one.position} (dataset {one.dataset!r}): give 0 to 2^62")
    if len(one.fingerprint) > NAME_CHARS_MAX or not one.fingerprint.isprintable():
        message = f"{one.fingerprint!r} (dataset {one.dataset!r}): give at most {NAME_CHARS_MAX} printable characters"
        raise SpecError("fingerprint", message)


def _damaged(why: str) -> SpecError:
    return SpecError("cut", f"the bytes are damaged ({why}): take them from another copy of the state")
