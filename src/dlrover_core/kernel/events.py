"""Events, records and batches: what the log is made of.

An *event* is a fact in the past tense, a `NamedTuple` of plain values, declared with `event(kind)`: the kind is its number
in an append-only registry (a test pins it) and the version counts changes of its shape. A *record* is an event with its
place in the log. A *batch* is what is appended whole or not at all.

NamedTuples, because they are immutable, slotted, typed, and both built and packed at C speed: replay lives on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

# Every event is a NamedTuple of plain values; what makes it an event is its entry in a `Registry`.
Event = tuple[object, ...]
Upcaster = Callable[[tuple[object, ...]], tuple[object, ...]]

E = TypeVar("E", bound=type)

BATCH_BYTES_MAX = 1024 * 1024
GROUP_BYTES_MAX = 64 * 1024


class Origin(NamedTuple):
    """Who asked: a sender, its boot (drawn once per process) and the contiguous number of its command."""

    sender: str
    boot: int
    number: int


class Record(NamedTuple):
    """An event in its place. ``at`` is microseconds by the leader's clock; ``cause`` the seq it follows from, 0 for none."""

    seq: int
    at: int
    token: int
    cause: int
    event: Event
    origin: Origin | None = None


class Batch(NamedTuple):
    """Records that are appended together.

    ``(token, counter)`` is its identity: a retry after a lost acknowledgement bears the same.
    """

    token: int
    counter: int
    at: int
    records: tuple[Record, ...]
    payload: bytes

    @property
    def first_seq(self) -> int:
        """Sequence number of the first record."""
        return self.records[0].seq

    @property
    def last_seq(self) -> int:
        """Sequence number of the last record."""
        return self.records[-1].seq


class Kind(NamedTuple):
    """One event kind: its number, its current version, its class, and how older versions become the current one."""

    kind: int
    version: int
    cls: type
    upcasters: Mapping[int, Upcaster]

    @property
    def name(self) -> str:
        """The class's name, as people read it."""
        return self.cls.__name__


def event(kind: int, version: int = 1, upcast: Mapping[int, Upcaster] | None = None) -> Callable[[E], E]:
    """Declare a NamedTuple as event ``kind``. ``upcast[v]`` turns the fields of version v into those of version v + 1."""

    def mark(cls: E) -> E:
        setattr(cls, "__event__", Kind(kind, version, cls, MappingProxyType(dict(upcast or {}))))
        return cls

    return mark


def kind_of(cls: type) -> Kind:
    """The declaration of an event class. Raises TypeError for a class that is none."""
    declared = getattr(cls, "__event__", None)
    if not isinstance(declared, Kind):
        raise TypeError(f"{cls.__name__} is not declared with @event(kind)")
    return declared


class Registry:
    """The kinds one log may hold. Numbers are unique and every version step has its upcaster; otherwise ValueError."""

    def __init__(self, classes: Iterable[type]) -> None:
        self.by_kind: dict[int, Kind] = {}
        self.by_class: dict[type, Kind] = {}
        self.by_name: dict[str, Kind] = {}
        for cls in classes:
            self._add(kind_of(cls))

    def _add(self, kind: Kind) -> None:
        if kind.kind in self.by_kind:
            raise ValueError(f"event kind {kind.kind} is both {self.by_kind[kind.kind].name} and {kind.name}")
        missing = [v for v in range(1, kind.version) if v not in kind.upcasters]
        if missing:
            raise ValueError(f"{kind.name} is version {kind.version} but has no upcaster from {missing}")
        self.by_kind[kind.kind] = self.by_class[kind.cls] = self.by_name[kind.name] = kind
