"""Objects of the fake API server, their versions, and the history that watches and old lists are served from.

One number counts every write, as in etcd. Stored objects are never changed in place: a write stores a new dict.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name

HISTORY_MAX = 20_000  # changes per kind that a watch may begin before


def encoded(obj: Any) -> bytes:
    """A value as compact JSON."""
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode()


class Stored:
    """One object at one version, and its bytes once somebody asked for them."""

    __slots__ = ("_raw", "obj", "version")

    def __init__(self, obj: Object, version: int) -> None:
        self.obj = obj
        self.version = version
        self._raw: bytes | None = None

    @property
    def raw(self) -> bytes:
        """The object as compact JSON."""
        if self._raw is None:
            self._raw = encoded(self.obj)
        return self._raw


@dataclass(slots=True)
class Change:
    """One write: `was` is None for a creation, `now` holds the last state of a deleted object.

    Attributes:
        version: the number of this write.
        key: namespace and name.
        was: the object before.
        now: the object after; for a deletion its last state with the deletion's version.
        deleted: whether the write removed the object.
    """

    version: int
    key: Key
    was: Stored | None
    now: Stored
    deleted: bool


@dataclass
class Shelf:
    """All objects of one kind, and what happened to them since `since`."""

    objects: dict[Key, Stored] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    since: int = 0
    waiting: set[Callable[[], None]] = field(default_factory=set)

    def after(self, version: int) -> list[Change]:
        """Changes later than `version`, oldest first."""
        return self.history[bisect.bisect_right(self.history, version, key=lambda one: one.version) :]


class Store:
    """Objects by kind, under one version counter.

    Args:
        first: the version before the first write.
    """

    def __init__(self, first: int = 100) -> None:
        self.version = first
        self.began = first
        self._shelves: dict[tuple[str, str], Shelf] = {}
        self.listeners: list[Callable[[tuple[str, str], Change], None]] = []

    def shelf(self, kind: tuple[str, str]) -> Shelf:
        """All objects of one kind."""
        if kind not in self._shelves:
            self._shelves[kind] = Shelf(since=self.began)
        return self._shelves[kind]

    def kinds(self) -> list[tuple[str, str]]:
        """The kinds that have a shelf."""
        return list(self._shelves)

    def get(self, kind: tuple[str, str], key: Key) -> Stored | None:
        """One object; None if it is not there."""
        return self.shelf(kind).objects.get(key)

    def put(self, kind: tuple[str, str], key: Key, obj: Object) -> Stored:
        """Store an object under the next version, which its metadata then names."""
        self.version += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        shelf = self.shelf(kind)
        stored = Stored(obj, self.version)
        was = shelf.objects.get(key)
        shelf.objects[key] = stored
        self._publish(kind, Change(self.version, key, was, stored, deleted=False))
        return stored

    def remove(self, kind: tuple[str, str], key: Key) -> Stored:
        """Remove an object; its last state gets the version of the removal."""
        self.version += 1
        shelf = self.shelf(kind)
        was = shelf.objects.pop(key)
        obj = {**was.obj, "metadata": {**was.obj["metadata"], "resourceVersion": str(self.version)}}
        stored = Stored(obj, self.version)
        self._publish(kind, Change(self.version, key, was, stored, deleted=True))
        return stored

    def _publish(self, kind: tuple[str, str], change: Change) -> None:
        shelf = self.shelf(kind)
        shelf.history.append(change)
        if len(shelf.history) > HISTORY_MAX:
            half = len(shelf.history) // 2
            shelf.since = shelf.history[half - 1].version
            del shelf.history[:half]
        for wake in tuple(shelf.waiting):
            wake()
        for listener in self.listeners:
            listener(kind, change)

    def at(self, kind: tuple[str, str], version: int) -> dict[Key, Stored]:
        """The objects as they were at an earlier version.

        Raises:
            LookupError: the history does not reach back to that version.
        """
        shelf = self.shelf(kind)
        if version < shelf.since:
            raise LookupError(version)
        objects = shelf.objects
        later = shelf.after(version)
        if later:
            objects = dict(objects)
            for change in reversed(later):
                if change.was is None:
                    objects.pop(change.key, None)
                else:
                    objects[change.key] = change.was
        return objects

    def compact(self) -> None:
        """Forget all history: watches from any earlier version are refused as expired, and so are old lists."""
        self.began = self.version
        for shelf in self._shelves.values():
            shelf.history.clear()
            shelf.since = self.version
