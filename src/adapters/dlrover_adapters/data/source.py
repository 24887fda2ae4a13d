"""A source of samples: it has a length, gives a sample by index, and says by a fingerprint which data it is.

The fingerprint is saved in the cut. A restored position is of the data of then: in other data it would mean other samples. So
data that changed are refused by name. Samples that were only added at the end may be taken with ``grown="append"``: the epoch in
flight keeps the size that it began with, and later ones have all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from dlrover_core.data.cut import Place
from dlrover_core.errors import SpecError

REFUSE, APPEND = "refuse", "append"


@runtime_checkable
class Source(Protocol):
    """Samples 0 .. ``len`` - 1. A source may be copied to other processes, by fork or pickle, and read there.

    It may have more attributes: ``chunk``, ``window``: how the order best goes through it (`dlrover_core.data.permutation`);
    ``fixed_order``: True where the order is its own, as a mixture's; ``waits``: True where a sample may have to come first;
    ``of_epoch(epoch)``: the samples of that epoch, where epochs have different ones.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def fingerprint_at(self, size: int, /) -> str:
        """Which data the first ``size`` samples are; empty: there is no knowing."""
        ...


class Items:
    """Anything that has a length and gives items by index, as a source.

    items: a list, an array, a dataset of torch or of Hugging Face. name: what to call its data; another name is other data.
    """

    chunk = 1

    def __init__(self, items: Any, *, name: str = "") -> None:
        """Raises: SpecError where ``items`` has no length or no items by index, or is empty."""
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
            message = (
                f"{type(items).__name__} has no length or no items by index: give a list, or a dataset of a known size"
            )
            raise SpecError("source", message)
        if not len(items):
            raise SpecError("size", f"0 samples in {type(items).__name__}: give a dataset of 1 or more")
        self.items = items
        # Of Hugging Face's datasets: it changes with everything that was done to them.
        self.name = name or str(getattr(items, "_fingerprint", "") or "")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def fingerprint_at(self, size: int) -> str:
        """The size, and the name if there is one."""
        return fingerprint("items", size, [self.name] if self.name else [])


def as_source(items: Any) -> Source:
    """``items`` itself, if it is a source, else a source of its items.

    Raises: SpecError as `Items`.
    """
    return items if isinstance(items, Source) else Items(items)


def fingerprint_of(source: Source) -> str:
    """Which data all samples of ``source`` are."""
    return source.fingerprint_at(len(source))


def fingerprint(kind: str, size: int, parts: Iterable[str | bytes]) -> str:
    """``kind:size:16 hex digits of all parts``; without the digits where there are no parts."""
    digest, some = hashlib.blake2b(digest_size=8), False
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
        some = True
    return f"{kind}:{size}" + (f":{digest.hexdigest()}" if some else "")


def size_of(print_of: str) -> int:
    """How many samples a fingerprint is of; 0: it does not say."""
    fields = print_of.split(":")
    return int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() and fields[1].isascii() else 0


def resumed_size(place: Place, source: Source, *, grown: str = REFUSE) -> int:
    """How many samples the epoch of ``place`` has, in ``source`` as it is now.

    Raises: SpecError where the data are others than those that ``place`` was saved of.
    """
    if grown not in {REFUSE, APPEND}:
        raise SpecError("grown", f'{grown!r}: give "{REFUSE}" or "{APPEND}"')
    size = len(source)
    now, then = source.fingerprint_at(size), place.fingerprint
    if now == then or not then:
        return _bounded(place, size)
    before = size_of(then)
    prefix = 0 < before < size and source.fingerprint_at(before) == then
    if prefix and grown == APPEND:
        # At the beginning of an epoch there is nothing in flight: it has all.
        return _bounded(place, before) if place.position else size
    if prefix:
        remedy = f'{size - before} samples were added at the end: give grown="append" to take them, or the data of then'
    elif 0 < size < before:
        remedy = f"{before - size} samples are missing: give the data of then"
    else:
        remedy = "give the data of then, or begin anew under another name"
    raise SpecError(
        "fingerprint", f"dataset {place.dataset!r} is {now!r} now, and was {then!r} at the checkpoint: {remedy}"
    )


def _bounded(place: Place, size: int) -> int:
    if place.position > size:
        message = f"{place.position} (dataset {place.dataset!r}): the epoch has {size} samples; give the data of the checkpoint"
        raise SpecError("position", message)
    return size
