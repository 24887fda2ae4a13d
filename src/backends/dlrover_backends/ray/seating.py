"""Which actor a node is, decided once: its own, or a standby's. All of it blocks.

Actors cannot be renamed, so a standby that becomes a node keeps its own name, and the cluster's key-value store says which node
it is. Two keys decide, and neither is ever overwritten: ``seated`` of the node, which says what it is to be, and ``taken`` of the
standby, which says whose it is; empty: nobody's, for it was removed. Whoever comes later, the same master after a lost answer or
the next one, reads the same. So no node has two actors, and no standby is two nodes.

A node whose standby went to another one, or was removed first, is decided anew, under the next number.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover_backends.ray import names, private
from dlrover_backends.ray.names import Run
from dlrover_core.errors import LaunchRefused

OWN, RETIRED = "own", ""
GRACE_S = 5.0
"""The time that a standby which is removed has to end."""
TRIES_MAX = 1000


class Seating:
    """The seats of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._takers: dict[str, str] = {}  # final ones alone

    def taker(self, standby: str) -> str | None:
        """The node that a standby is; `RETIRED`: it is removed; None: it is free."""
        if standby not in self._takers:
            raw = private.get(self._run.key(names.TAKEN, standby))
            if raw is None:
                return None
            self._takers[standby] = raw.decode()
        return self._takers[standby]

    def retire(self, standby: str) -> bool:
        """Let no node have a free standby; False: one has it."""
        return self._give(standby, RETIRED)

    def decide(self, node: str, fitting: Sequence[str]) -> str:
        """The standby that the node is from now on; empty: it is to have an actor of its own.

        ``fitting``: standbys that it may be, the best first. Raises `LaunchRefused` where others take them all the time.
        """
        left = iter(fitting)
        for number in range(TRIES_MAX):
            key = self._key(node, number)
            said = private.get(key)
            if said is None:
                private.put(key, next(left, OWN).encode(), overwrite=False)
                said = private.get(key)
            if said == OWN.encode():
                return ""
            if said and self._give(said.decode(), node):
                return said.decode()
        raise LaunchRefused(f"{node}: its standbys are taken by others one after another", permanent=False)

    def seat_of(self, node: str) -> str:
        """The standby that the node was decided to be; empty: it has an actor of its own, or nothing is decided."""
        for number in range(TRIES_MAX):
            said = private.get(self._key(node, number))
            if said is None or said == OWN.encode():
                return ""
            if self.taker(said.decode()) == node:
                return said.decode()
        return ""

    def _give(self, standby: str, to: str) -> bool:
        if self.taker(standby) is None:
            private.put(self._run.key(names.TAKEN, standby), to.encode(), overwrite=False)
        return self.taker(standby) == to

    def _key(self, node: str, number: int) -> str:
        return self._run.key(names.SEATED, f"{node}/{number:03d}")
