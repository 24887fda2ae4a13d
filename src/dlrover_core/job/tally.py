"""Counts that follow from the state and are no part of it: kept beside it, so that thousands of arrivals cost a look each.

They lie in slots that are no fields of the state classes: neither packed nor compared nor hashed. What they hold is what a
count over the whole would give at any moment; whoever has none yet, after a snapshot for one, counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dlrover_core.job.node_lifecycle import ALIVE

if TYPE_CHECKING:
    from dlrover_core.job.nodes import Node, NodeSlice
    from dlrover_core.kernel.engine import Evolve

T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """Of the nodes: how many of each group are ``ready``, how many have a living agent, how many of those are silent.

    ``loose`` are those that do not simply run: only of them something may be due. ``given_up`` holds the indexes of each
    group's places that are not wanted any more. ``changes`` grows with every node that becomes ready or ceases to be;
    ``seats`` is who would sit where, as long as neither that nor the world changes.
    """

    ready: dict[str, int] = field(default_factory=dict)
    alive: int = 0
    suspects: int = 0
    shunned: int = 0
    loose: set[str] = field(default_factory=set)
    given_up: dict[str, set[int]] = field(default_factory=dict)
    changes: int = 0
    seats: dict[str, tuple[tuple[int, int, int], list[Node]]] = field(default_factory=dict)

    def count(self, node: Node, by: int) -> None:
        """Count a node in (1) or out (-1)."""
        if node.ready:
            self.ready[node.group] = self.ready.get(node.group, 0) + by
            self.changes += 1
        if node.joined and node.state in ALIVE:
            self.alive += by
            self.suspects += by * (node.state == "suspect")
        self.shunned += by * node.shunned
        if by > 0 and not (node.ready and node.state == "running"):
            self.loose.add(node.node)
        else:
            self.loose.discard(node.node)

    def note_place(self, group: str, index: int, *, given_up: bool) -> None:
        """A place is wanted, or is not."""
        places = self.given_up.setdefault(group, set())
        (places.add if given_up else places.discard)(index)


class Tallied:
    """What a `NodeSlice` is besides its fields."""

    __slots__ = ("_tally",)
    _tally: Tally | None

    @property
    def tally(self) -> Tally:
        """The counts of now."""
        found = getattr(self, "_tally", None)
        if found is None:
            found = self._tally = _counted(cast("NodeSlice", self))
        return found

    def recount(self) -> None:
        """Count anew when next asked."""
        self._tally = None


def _counted(slice_: NodeSlice) -> Tally:
    tally = Tally()
    for node in slice_.nodes.values():
        tally.count(node, 1)
    for slot in slice_.slots.values():
        tally.note_place(slot.group, slot.index, given_up=slot.given_up)
    return tally


def tallied(evolve: Mapping[type, Evolve]) -> dict[type, Evolve]:
    """The same functions, each of which keeps the tally right: event by event where it is about one node, else anew."""
    return {cls: (_one if "node" in cast(Any, cls)._fields else _all)(function) for cls, function in evolve.items()}


def _one(function: Evolve) -> Evolve:
    def evolve(slice_: NodeSlice, fact: Any, record: Any) -> None:
        tally = getattr(slice_, "_tally", None)
        if tally is None:
            function(slice_, fact, record)
            return
        name = fact.node
        before = slice_.nodes.get(name)
        if before is not None:
            tally.count(before, -1)
        function(slice_, fact, record)
        after = slice_.nodes.get(name)
        if after is not None:
            tally.count(after, 1)
        slot = slice_.slots.get(name.rsplit("-", 1)[0])
        if slot is not None:
            tally.note_place(slot.group, slot.index, given_up=slot.given_up)

    return evolve


def _all(function: Evolve) -> Evolve:
    def evolve(slice_: NodeSlice, fact: Any, record: Any) -> None:
        slice_.recount()
        function(slice_, fact, record)

    return evolve


class Remembering:
    """A part of the state that is made once and never replaced piecemeal: what follows from it is worked out once."""

    __slots__ = ("_memory",)
    _memory: dict[str, Any]

    def recall(self, what: str, work_out: Callable[[], T]) -> T:
        """What ``work_out`` gave when it was first asked."""
        try:
            return cast(T, self._memory[what])
        except AttributeError:
            self._memory = {}
        except KeyError:
            pass
        found = self._memory[what] = work_out()
        return found

    def listed(self, names: str, name: str) -> bool:
        """Is ``name`` in the list of that field, which only ever grows?"""
        known: set[str] = self.recall(names, set)
        listed: list[str] = getattr(self, names)
        if len(known) < len(listed):
            known.update(listed[len(known) :])
        return name in known
