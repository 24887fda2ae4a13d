"""Leased datasets as a part of the state: what each rank was trained on, saved with its tensors and restored for all ranks.

A rank that draws leases knows its own positions alone, so each has an object of its own in every state. A restore reads the
objects of all ranks, wherever they are; rank 0 joins them (`dlrover_core.data.trained`) and tells everybody, and its agent. A
state of which one rank's object is nowhere is not restored: the next best one is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.data.ranges import Ranges
from dlrover_core.data.trained import Trained, counted, joined, pack, pack_counted, unpack

from .nested import Path

LEASED = "data.leased"
_NAME = re.compile(r"rank\.(\d{1,9})\.data\.leased")


def path_of(rank: int) -> Path:
    """The path of a rank's object."""
    return ("rank", str(rank), *LEASED.split("."))


def rank_in(name: str) -> int:
    """The rank that an object of this name says its positions of; -1: it is another object."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


class Words(NamedTuple):
    """What one rank has read of a state: how many ranks made it, and what they say, packed."""

    world: int = 0
    said: tuple[tuple[int, bytes], ...] = ()


def together(words: Iterable[Words]) -> bytes:
    """What the state was trained on, packed, by the words that all ranks have read; empty: the state says nothing of it.

    Raises `RanksMissing`, `SpecError`.
    """
    found: dict[int, bytes] = {}
    world = 0
    for one in words:
        world = max(world, one.world)
        found.update(one.said)
    return pack(joined(world, {rank: unpack(raw) for rank, raw in found.items()})) if found else b""


def is_joined(objects: Iterable[str]) -> bool:
    """Is a state with objects of these names only known where the objects of all ranks are read?"""
    return any(rank_in(name) >= 0 for name in objects)


def go_on(capture: Any, state: tuple[int, int], packed: bytes) -> None:
    """Leased datasets of a `Capture` go on from a state; empty: it has been trained on nothing."""
    data = getattr(capture, "data", None)
    if data is not None:
        data.leased.go_on(state, packed)


class ReadWords:
    """What one rank has read of what old ranks say. ``world``: how many there were."""

    def __init__(self, capture: Any) -> None:
        self.world = 0
        self._said: dict[int, bytes] = {}
        self._leased: LeasedData | None = getattr(getattr(capture, "data", None), "leased", None)

    def take(self, objects: dict[str, bytes], opened: Callable[[dict[str, bytes]], Mapping[str, Any]]) -> None:
        """Take them out of a piece's objects."""
        names = {name: rank for name in objects if (rank := rank_in(name)) >= 0}
        raw = {name: objects.pop(name) for name in names}
        self._said = {names[name]: said for name, said in opened(raw).items()}

    def accepted(self) -> tuple[str, ...]:
        """As `LeasedData.accept`."""
        return tuple(self._leased.accept(self._said)) if self._leased is not None else ()

    @property
    def words(self) -> Words:
        """For rank 0."""
        return Words(self.world, tuple(sorted(self._said.items())))


class LeasedData:
    """The leased datasets of a script, as `FlashCheckpoint` saves them: those of ``data=`` that have a ``leased``."""

    def __init__(self, datasets: Sequence[Any], rank: int) -> None:
        self._leased, self._rank = tuple(datasets), rank

    def __bool__(self) -> bool:
        return bool(self._leased)

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """What this rank was trained on."""
        if self._leased:
            yield path_of(self._rank), pack(one.trained for one in self._leased)

    def counted(self) -> bytes:
        """On how many positions this rank was trained, for the job's log; empty: there is no such dataset."""
        return pack_counted(1, 1, counted(one.trained for one in self._leased)) if self._leased else b""

    def forms(self) -> Iterator[tuple[str, str]]:
        """What has to be the same on all ranks."""
        yield from ((f"data.{one.work.terms.name}", str(one.work.terms)) for one in self._leased)

    def accept(self, packed: Mapping[int, bytes]) -> Iterator[str]:
        """Can all of them go on from what these ranks say? What is to be said of it. Raises `SpecError`."""
        there = {one.dataset: one for raw in packed.values() for one in unpack(raw)}
        for one in self._leased:
            one.accept(there.pop(one.work.terms.name, None))
        if there:
            yield f"the checkpoint was trained on leased {', '.join(map(repr, there))}, which no dataset of data= is"

    def go_on(self, state: tuple[int, int], packed: bytes) -> None:
        """Go on from a state; empty: it has been trained on nothing. Raises `SpecError` where no agent runs this process."""
        there: dict[str, Trained] = {one.dataset: one for one in unpack(packed)} if packed else {}
        for one in self._leased:
            found = there.get(one.work.terms.name)
            one.go_on(state, found.spans if found is not None else Ranges(), first=self._rank == 0)
