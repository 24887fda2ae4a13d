"""Which pod a node is, decided once: a book that all masters of a run share, so that no node ever has two pods.

A node's own pod has the node's name, and names are unique; a standby that becomes a node has a name of its own. So where there
are standbys, one ConfigMap says what each relaunched node is to be, a standby's pod or a pod of its own, and is written by
compare-and-swap before anything else is. Whoever comes later, the same master after a lost answer or the next one, does what the
book says, which is idempotent. It is decided anew only where that standby is another node's by now, or has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from dlrover_backends.k8s import names, owning
from dlrover_backends.k8s.api import Ask, Json
from dlrover_backends.k8s.errors import Conflict, NotFound
from dlrover_core.runtime.backends import BackendContext

OWN = "own"
"""In the book: the node gets a pod of its own."""


class Standby(NamedTuple):
    """A standby's pod, by name and uid."""

    pod: str
    uid: str

    @property
    def text(self) -> str:
        """As the book has it."""
        return f"{self.pod}/{self.uid}"


class Book:
    """What the ConfigMap said when it was read."""

    def __init__(self, thing: Json) -> None:
        self._thing = thing
        self._said: dict[str, str] = thing.get("data") or {}

    def says(self, node: str) -> Standby | str | None:
        """What a node is to be: a standby, `OWN`, or None: it was not decided."""
        text = self._said.get(node)
        if text is None or text == OWN:
            return text
        pod, _, uid = text.partition("/")
        return Standby(pod, uid)

    @property
    def taken(self) -> frozenset[str]:
        """The uids of standbys that nodes are to be."""
        return frozenset(text.partition("/")[2] for text in self._said.values() if text != OWN)

    def is_past(self, node: str) -> bool:
        """Was a later node of the same place decided?"""
        return any(_later(one, node) > 0 for one in self._said)

    def decision(self, node: str, what: str) -> Json:
        """The patch that writes it down, and forgets earlier nodes of the place. It fails where the book has changed."""
        metadata = self._thing["metadata"]
        older = {one: None for one in self._said if _later(node, one) > 0}
        version = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        return {"metadata": version, "data": {**older, node: what}}


def _later(one: str, other: str) -> int:
    """By how many incarnations a node is later than another one of its place; 0: they are of two places."""
    (place, _, number), (other_place, _, other_number) = one.rpartition("-"), other.rpartition("-")
    if place != other_place or not (number.isdecimal() and other_number.isdecimal()):
        return 0
    return int(number) - int(other_number)


class Claims:
    """The book of one run. ``ask``: sends a request, as `Api.ask`; ``where``: the namespace, once it is known."""

    def __init__(self, here: BackendContext, ask: Ask, where: Callable[[], str]) -> None:
        self._here, self._ask, self._where = here, ask, where

    async def read(self, owner: Json) -> Book:
        """The book, made if need be. Raises `ApiError`."""
        with contextlib.suppress(NotFound):
            return Book(await self._ask("GET", self._path()))
        with contextlib.suppress(Conflict):
            return Book(await self._ask("POST", self._path().rpartition("/")[0], self._made(owner)))
        return Book(await self._ask("GET", self._path()))

    async def write(self, book: Book, node: str, what: str) -> bool:
        """Decide what a node is to be; False: somebody else has decided meanwhile. Raises `ApiError`."""
        try:
            await self._ask("PATCH", self._path(), book.decision(node, what))
        except (Conflict, NotFound):
            return False
        return True

    def _made(self, owner: Json) -> Json:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": names.claims_name(self._here.job, self._here.run),
                "labels": names.labels(self._here.job, self._here.run),
                "annotations": {names.NOTE_JOB: self._here.job},
                "ownerReferences": [owning.reference(owner)],
            },
            "data": {},
        }

    def _path(self) -> str:
        name = names.claims_name(self._here.job, self._here.run)
        return f"/api/v1/namespaces/{self._where()}/configmaps/{name}"
