"""The position in the data as a part of the state: one cut, the same on every rank, saved and restored with the tensors.

It is packed by `dlrover_core.data.cut` and lies in each rank's blob, and in the manifest of each part on storage: agents read it
without torch, and nobody unpickles it. Since it says of every dataset how far *all* ranks have come, a rank that is new takes
that of the others, at any world size, and is right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dlrover_adapters.checkpoint.table import CUT
from dlrover_core.data.cut import Cut, Place, cut_of, differences, pack, unpack
from dlrover_core.data.terms import Terms
from dlrover_core.errors import SpecError
from dlrover_core.words import first_few

from .nested import Path, name_of
from .sources import Found, Shapes
from .trained import LeasedData, path_of
from .vault import Vault, VaultRefused

CUTS_MAX, RANKS_MAX = 8, 8
"""Of cuts that should be one, so many are told, and so many ranks of each."""
SAVED_MAX, DUE_MAX = 16, 64
"""Of so many of the newest saves the position is remembered, and of so many that are on their way to storage."""
Seen = Mapping[bytes, Collection[int]]
"""Which old ranks' pieces had which cut, packed; empty bytes: none."""


@runtime_checkable
class Positioned(Protocol):
    """A dataset that knows how far it is consumed."""

    @property
    def place(self) -> Place:
        """Where it is: what all ranks together have consumed."""

    def accept(self, place: Place | None) -> str:
        """Can it go on from here? None: the checkpoint has no position of it. What is to be said of it; empty: nothing.

        Raises `SpecError`.
        """

    def go_on(self, place: Place | None) -> None:
        """Go on from here. None: from where it is."""


@runtime_checkable
class Partitioned(Protocol):
    """A dataset with several places in a cut, as a stream with partitions has."""

    @property
    def places(self) -> tuple[Place, ...]:
        """All of them."""

    def owns(self, name: str) -> bool:
        """Is a place of this name one of its own?"""

    def accept_places(self, places: Mapping[str, Place]) -> str:
        """As `Positioned.accept`."""

    def go_on_places(self, places: Mapping[str, Place]) -> None:
        """As `Positioned.go_on`."""


@runtime_checkable
class Committing(Protocol):
    """A dataset that tells others what is consumed, as a stream tells its broker. ``by_storage``: `stored` is called."""

    by_storage: bool

    def stored(self, places: Mapping[str, Place]) -> None:
        """A state on storage has consumed up to here."""


class DataSource:
    """The datasets of a script, by path. Its only object is the cut, and that goes ways of its own."""

    def __init__(self, given: Mapping[Path, Any], rank: int = 0) -> None:
        """Raises `SpecError` for what is no dataset of ours."""
        _check_names(given.values())
        self.leased = LeasedData([one for each in given.values() if (one := getattr(each, "leased", None))], rank)
        self._own_root = name_of(path_of(rank))
        given = {path: one for path, one in given.items() if not getattr(one, "leased", None)}
        for path, one in given.items():
            if not isinstance(one, Positioned):
                raise SpecError(
                    name_of(path),
                    f"an ElasticDataset, got {type(one).__name__}; give the position of other datasets with extra=",
                )
        self._datasets: tuple[Positioned, ...] = tuple(given.values())
        self._registered: set[tuple[Any, ...]] = set()
        self._saved: dict[int, Mapping[str, Place]] = {}
        self._due: dict[int, Mapping[str, Place]] = {}
        self._stored: int | None = None
        self.cut()

    def cut(self) -> bytes:
        """How far all datasets are consumed, packed; empty: there are none. Raises `SpecError` for two of one name."""
        return pack(cut_of(place for one in self._datasets for place in _places(one))) if self._datasets else b""

    def terms(self) -> Iterator[tuple[Any, ...]]:
        """What is registered of each dataset, as `dlrover_core.job.shards.Terms` has it; of one that does not say so, nothing."""
        for one in self._datasets:
            found = getattr(one, "terms", None)
            if isinstance(found, tuple):
                yield found

    def register(self, vault: Vault) -> None:
        """Name the datasets to the agent, whatever of their `terms` it has not heard: a loop says how large a batch is.

        Raises `SpecError`, which tells both, where the job has another one of that name.
        """
        for terms in self.terms():
            if terms not in self._registered:
                try:
                    vault.dataset(terms)
                except VaultRefused as refused:
                    raise SpecError("data", str(refused)) from refused
                self._registered.add(terms)

    def forms(self) -> Iterator[tuple[str, str]]:
        """What has to be the same on all ranks, in words."""
        yield from self.leased.forms()
        for one in self._datasets:
            yield from ((f"data.{place.dataset}", str(tuple(place))) for place in _places(one))

    def accept(self, cut: Cut | None) -> Iterator[str]:
        """Can every dataset go on from this cut? What is to be said of it. Raises `SpecError`."""
        there = {one.dataset: one for one in cut or ()}
        for one in self._datasets:
            if isinstance(one, Partitioned):
                told = one.accept_places(there)
                there = {name: place for name, place in there.items() if not one.owns(name)}
            else:
                told = one.accept(there.pop(one.place.dataset, None))
            if told:
                yield told
        if there and self._datasets:
            yield f"the checkpoint has a position in {', '.join(map(repr, there))}, which no dataset of data= has"

    # ---- what storage has

    def by_storage(self) -> None:
        """From now on `stored` says what is consumed for good."""
        for one in self._datasets:
            if isinstance(one, Committing):
                one.by_storage = True

    def saved(self, step: int, *, due: bool) -> None:
        """The present state, of this step, is in memory; ``due``: and on its way to storage."""
        if any(isinstance(one, Committing) and one.by_storage for one in self._datasets):
            self._saved[step] = {place.dataset: place for one in self._datasets for place in _places(one)}
            _forget_oldest(self._saved, SAVED_MAX)
            if due:
                self.sent(step)

    def sent(self, step: int) -> None:
        """What was saved of this step is on its way to storage."""
        if step in self._saved:
            self._due[step] = self._saved[step]
            _forget_oldest(self._due, DUE_MAX)

    def awaits(self) -> bool:
        """Is something on its way to storage, of which a dataset will tell others?"""
        return bool(self._due)

    def stored(self, step: int) -> None:
        """The newest step on storage; -1: none. What was there at the first call is of an earlier generation."""
        before, self._stored = self._stored, step
        if before is None or step <= before:
            return
        there = max((one for one in self._due if one <= step), default=None)
        if there is not None:
            for one in self._datasets:
                if isinstance(one, Committing):
                    one.stored(self._due[there])
            self._due = {one: places for one, places in self._due.items() if one > step}

    # ---- as `Source`

    def tensors(self) -> Iterator[Found]:
        """None."""
        return iter(())

    def sizes(self) -> tuple[int, ...]:
        """None."""
        return ()

    def objects(self) -> Iterator[tuple[Path, Any]]:
        """Of leased datasets; a cut is not pickled."""
        return self.leased.objects()

    def make_room(self, shapes: Shapes) -> None:
        """None is needed."""

    def load(self, objects: Mapping[str, Any]) -> None:
        """Go on from the cut."""
        if CUT not in objects:
            return
        there = {one.dataset: one for one in objects[CUT] or ()}
        for one in self._datasets:
            if isinstance(one, Partitioned):
                one.go_on_places(there)
            else:
                one.go_on(there.get(one.place.dataset))

    def asked(self) -> Iterator[tuple[str, ...]]:
        """`accept` says what is missing."""
        return iter(())

    def roots(self) -> tuple[str, ...]:
        """One for each kind of datasets that there is."""
        return (*([CUT] if self._datasets else []), *([self._own_root] if self.leased else []))


def _check_names(given: Iterable[Any]) -> None:
    """Raises `SpecError` where a dataset is called as a partition of a stream is."""
    named = [Terms(*found) for one in given if isinstance(found := getattr(one, "terms", None), tuple)]
    for at, one in enumerate(named):
        if why := one.clash(named[:at]):
            raise SpecError("name", why)


def _forget_oldest(places: dict[int, Mapping[str, Place]], most: int) -> None:
    while len(places) > most:
        del places[next(iter(places))]


def _places(of: Positioned) -> tuple[Place, ...]:
    return of.places if isinstance(of, Partitioned) else (of.place,)


def consumed(capture: Any) -> bytes:
    """The position that this rank has, packed; empty: it has no data."""
    cut: dict[str, bytes] = getattr(capture, "cut", dict)()
    return cut.get(CUT, b"")


class Gathered:
    """The cuts of the pieces that a rank has read of one state."""

    def __init__(self) -> None:
        self.seen: dict[bytes, list[int]] = {}

    def add(self, rank: int, packed: bytes) -> None:
        """What the piece of old rank ``rank`` has; empty: nothing."""
        self.seen.setdefault(packed, []).append(rank)

    @property
    def any(self) -> bool:
        """Has any piece a position?"""
        return any(self.seen)

    @property
    def differ(self) -> bool:
        """Have two pieces different ones?"""
        return len(self.seen) > 1

    @property
    def cut(self) -> Cut | None:
        """The one that all have; None: none has one. Who restores has compared them. Raises `SpecError` for a damaged one."""
        packed = next(filter(None, self.seen), b"")
        return unpack(packed) if packed else None

    def told(self) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
        """For the rank that compares; bounded."""
        found = sorted(self.seen.items())[:CUTS_MAX]
        return tuple((packed, tuple(sorted(ranks)[:RANKS_MAX])) for packed, ranks in found)


def conflict(step: int, told: Iterable[Sequence[tuple[bytes, Sequence[int]]]]) -> str:
    """Why ranks cannot restore ``step`` together: their pieces have different positions. Empty: all have the same."""
    seen: dict[bytes, set[int]] = {}
    for one in told:
        for packed, ranks in one:
            seen.setdefault(packed, set()).update(ranks)
    if len(seen) < 2:
        return ""
    (first, many), *others = sorted(seen.items(), key=lambda pair: (-len(pair[1]), min(pair[1])))
    lines = [f"rank {first_few(sorted(ranks))}: {_differ(packed, first)}" for packed, ranks in others[:CUTS_MAX]]
    return (
        f"the ranks' positions in the data differ in step {step}: {'; '.join(lines)} ('there': rank {first_few(sorted(many))}). "
        "Nothing was restored, since some samples would be trained twice or never. Every rank gives the same data= and counts "
        "each step; restore an earlier step with restore(step)"
    )


def _differ(mine: bytes, others: bytes) -> str:
    try:
        return ", ".join(differences(unpack(mine) if mine else (), unpack(others) if others else ()))
    except SpecError as error:
        return str(error)
