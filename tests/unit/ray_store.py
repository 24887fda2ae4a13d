"""The key-value store of a Ray cluster, as a dictionary, and its table of actors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dlrover_backends.ray import masters, mastery, private
from dlrover_backends.ray.mastery import SPACE
from dlrover_backends.ray.records import Actor

JOB = "digits"


class Store(dict[str, bytes]):
    """The store. ``on_put`` is called once, before the next write."""

    def __init__(self) -> None:
        super().__init__()
        self.on_put: Callable[[], None] | None = None

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """As `private.put`: was there none before?"""
        before, self.on_put = self.on_put, None
        if before is not None:
            before()
        new = key not in self
        if new or overwrite:
            self[key] = value
        return new


class Tables(Store):
    """The cluster's key-value store, and its table of actors."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Actor] = []
        self.driver, self.ended = "d1", set[str]()

    def begin(self, prefix: str) -> list[str]:
        """As `private.keys`."""
        return [one for one in self if one.startswith(prefix)]

    def remove(self, prefix: str) -> None:
        """As `private.remove`."""
        for one in self.begin(prefix):
            del self[one]

    def age(self, by_s: float) -> None:
        """All claims are older."""
        for one in self.begin(mastery.key(JOB, mastery.CLAIM)):
            told = json.loads(self[one])
            self[one] = json.dumps({**told, "since": told["since"] - by_s}).encode()

    def keeper(self, run: str, number: int = 0, state: str = "ALIVE") -> None:
        """A run has a keeper."""
        name = mastery.called(JOB, run, number)
        self.actors.append(Actor(f"id-{name}", name, SPACE, state))


def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """An empty cluster, in the place of Ray's."""
    store = Tables()
    for name, answers in (
        ("get", store.get),
        ("put", store.put),
        ("keys", store.begin),
        ("remove", store.remove),
        ("own_driver", lambda: store.driver),
        ("has_ended", lambda driver: driver in store.ended),
        ("actors", lambda prefix: [one for one in store.actors if one.namespace.startswith(prefix)]),
    ):
        monkeypatch.setattr(private, name, answers)
    monkeypatch.setattr(masters, "_ask", lambda _: None)
    return store
