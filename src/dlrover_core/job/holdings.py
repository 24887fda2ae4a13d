"""Holdings: the steps that the nodes of an ended generation hold in memory, and which node writes which part to storage.

Every node has a part of its own in each state. With plain data parallelism all nodes hold the same tensors, yet each rank
has random numbers and a position in the data of its own. So a step is complete if the nodes that are left can write the
part of every place. A node can write its own part, and the parts that it holds replicas of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dlrover_core.job.memo import Remembering
from dlrover_core.job.ranges import Brief, from_ranges

Copies = tuple[tuple[int, int], ...]
"""The replicas that a node holds, as (place of the owner in the world, step)."""
NO_STEP = -1


# Invariants of holdings, after every event; `check` yields the broken ones.
#
#   M        `members`: the nodes of the generation; |M| is also the number of parts
#   H, C     `held`: the nodes that have reported their steps; `copies`: the nodes that have reported replicas
#   X        `gone`: the nodes whose memory is lost
#   e, t     `ended_at`: when the generation ended, 0: it runs; `heard_at`: when the first node reported, 0: none has
#   p        `parts`: the number of parts of an order; node n must write the parts W(n), and could write able(n)
#
#   members  H and X are subsets of M without a node in common; C is of nodes of H
#   heard    t is set if H is not empty
#   parts    the W(n) have no part in common and are all p parts; W(n) is a subset of able(n)


@dataclass(slots=True)
class Holdings(Remembering):
    """What the nodes of one generation hold in memory.

    members:  the nodes in rank order
    ended_at: when the generation ended; 0: it runs
    planned:  it ended by plan
    why:      the reason of its end
    heard_at: when the first node reported its steps; 0: none has
    saved:    the leader has decided what is written of it
    held:     complete steps, by node that has reported
    copies:   replicas, by node
    gone:     members whose memory is lost
    """

    group: str
    generation: int
    members: Brief
    ended_at: int = 0
    planned: bool = False
    why: str = ""
    heard_at: int = 0
    saved: bool = False
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    @property
    def places(self) -> Mapping[str, int]:
        """The place of each member in rank order."""
        return self.recall(
            "places", lambda: {one.node: place for place, one in enumerate(from_ranges(self.group, self.members))}
        )

    @property
    def waiting(self) -> int:
        """How many members have not reported."""
        return len(self.places) - len(self.held) - len(self.gone)

    @property
    def whole(self) -> int:
        """The newest step of which every part is held; -1: there is none."""
        key = f"whole {len(self.held)} {len(self.gone)}"
        return self.recall(key, self._whole)

    def _whole(self) -> int:
        places = self.places
        found: dict[int, set[int]] = {}
        for node, steps in self.held.items():
            told = [(places[node], step) for step in steps]
            for place, step in (*told, *self.copies.get(node, ())):
                found.setdefault(step, set()).add(place)
        return max((step for step, have in found.items() if have >= set(places.values())), default=NO_STEP)

    def able(self, step: int) -> dict[str, tuple[int, ...]]:
        """The parts of a step that each node can write, by place: its own first."""
        places, able = self.places, {}
        for node, steps in self.held.items():
            own = (places[node],) if step in steps else ()
            copied = tuple(sorted(place for place, of in self.copies.get(node, ()) if of == step))
            if own or copied:
                able[node] = (*own, *copied)
        return able

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        held, gone = self.held.keys(), set(self.gone)
        if held & gone or len(gone) < len(self.gone) or not held | gone <= self.places.keys():
            yield f"members: H = {list(held)}, X = {self.gone}, M = {list(self.places)}"
        if not self.copies.keys() <= held:
            yield f"members: C = {list(self.copies)}, H = {list(held)}"
        if held and not self.heard_at:
            yield f"heard: t = 0, H = {list(held)}"

    def lose(self, node: str) -> None:
        """A node's memory is lost, whatever the node has reported."""
        if node in self.places and node not in self.gone:
            self.gone.append(node)
            self.held.pop(node, None)
            self.copies.pop(node, None)


@dataclass(slots=True)
class SaveOrder:
    """A step of an ended generation that is to be written to storage.

    why:     why it is saved
    parts:   number of parts
    able:    the places whose part a node can write, by node in rank order
    places:  each node's own place
    writers: the places whose part a node must write, by node
    """

    generation: int
    step: int
    why: str
    parts: int
    able: dict[str, tuple[int, ...]]
    places: dict[str, int]
    writers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, holdings: Holdings, step: int, why: str) -> SaveOrder:
        """The order that follows from what the nodes have reported."""
        able, places = holdings.able(step), holdings.places
        ordered = dict(sorted(able.items(), key=lambda one: places[one[0]]))
        order = cls(holdings.generation, step, why, len(places), ordered, {node: places[node] for node in ordered})
        order.share_out()
        return order

    def share_out(self) -> bool:
        """Assign each part to its owner if that holds the step, else to the first node with a replica. False: a part has none."""
        offers = sorted(
            (place != self.places[node], self.places[node], place, node)
            for node, places in self.able.items()
            for place in places
        )
        writers: dict[str, tuple[int, ...]] = {}
        taken: set[int] = set()
        for _, _, place, node in offers:
            if place not in taken:
                taken.add(place)
                writers[node] = (*writers.get(node, ()), place)
        self.writers = writers
        return len(taken) == self.parts

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above `Holdings`."""
        shared = [part for parts in self.writers.values() for part in parts]
        if sorted(shared) != list(range(self.parts)):
            yield f"parts: W = {self.writers}, p = {self.parts}"
        if not all(set(parts) <= set(self.able.get(node, ())) for node, parts in self.writers.items()):
            yield f"parts: W = {self.writers}, able = {self.able}"

    def lose(self, node: str) -> bool:
        """A node is gone: other nodes write its parts. False: no other node can."""
        if self.able.pop(node, None) is None:
            return True
        return self.share_out() if node in self.writers else True
