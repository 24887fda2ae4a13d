"""What the nodes of a generation hold in memory when it ends, and who of them writes it to storage.

Every node has a part of its own in each state. With plain data parallelism all nodes hold the same tensors, and yet each rank
has random numbers and a position in the data that no other rank has. So a step is whole where the nodes that are still there can
write the part of every place: a node its own part, or that of another place of which it keeps a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dlrover_core.job.memo import Remembering
from dlrover_core.job.ranges import Ranges, from_ranges

Copies = tuple[tuple[int, int], ...]
"""Whose parts are kept beside one's own: the place in that world, and the step."""
NO_STEP = -1


# What holds of holdings after every event; `check` says what does not.
#
#   M        `members`: the nodes of the generation; |M| is the number of its parts too
#   H, C     `held`: the nodes that have told which steps they hold; `copies`: whose parts beside their own
#   X        `gone`: the nodes that hold nothing any more
#   e, t     `ended_at`: when the generation ended, 0: it runs; `heard_at`: when the first node told, 0: none has
#   p        `parts`: the number of parts that an order needs; W(n) of them are node n's to write, able(n) it could write
#
#   members  H and X are subsets of M without a node in common; C is of nodes of H
#   heard    t is set if H is not empty
#   parts    the W(n) have no part in common and are all p parts; W(n) is a subset of able(n)


@dataclass(slots=True)
class Holdings(Remembering):
    """One generation's. ``ended_at``: 0 while it runs; ``planned``: its end was. ``gone``: members that hold nothing any more.

    ``heard_at``: when the first node told what it holds; ``saved``: that was decided upon.
    """

    group: str
    generation: int
    members: Ranges
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
        """Each member's place in rank order."""
        return self.recall(
            "places", lambda: {one.node: place for place, one in enumerate(from_ranges(self.group, self.members))}
        )

    @property
    def waiting(self) -> int:
        """How many members have not told what they hold."""
        return len(self.places) - len(self.held) - len(self.gone)

    @property
    def whole(self) -> int:
        """The newest step of which every part is there; -1: there is none."""
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
        """Who can write which places' parts of a step: its own first."""
        places, able = self.places, {}
        for node, steps in self.held.items():
            own = (places[node],) if step in steps else ()
            copied = tuple(sorted(place for place, of in self.copies.get(node, ()) if of == step))
            if own or copied:
                able[node] = (*own, *copied)
        return able

    def check(self) -> Iterator[str]:
        """What of the formula above does not hold."""
        held, gone = self.held.keys(), set(self.gone)
        if held & gone or len(gone) < len(self.gone) or not held | gone <= self.places.keys():
            yield f"members: H = {list(held)}, X = {self.gone}, M = {list(self.places)}"
        if not self.copies.keys() <= held:
            yield f"members: C = {list(self.copies)}, H = {list(held)}"
        if held and not self.heard_at:
            yield f"heard: t = 0, H = {list(held)}"

    def lose(self, node: str) -> None:
        """It holds nothing any more, whatever it has told."""
        if node in self.places and node not in self.gone:
            self.gone.append(node)
            self.held.pop(node, None)
            self.copies.pop(node, None)


@dataclass(slots=True)
class SaveOrder:
    """A step of a generation that has ended is to be written: by whom, of which places the parts.

    ``able``: who could, in rank order; ``places``: the place of each of them itself.
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
        """From what the nodes have told."""
        able, places = holdings.able(step), holdings.places
        ordered = dict(sorted(able.items(), key=lambda one: places[one[0]]))
        order = cls(holdings.generation, step, why, len(places), ordered, {node: places[node] for node in ordered})
        order.share_out()
        return order

    def share_out(self) -> bool:
        """Each part is written once: by the first that holds it as its own, else by the first with a copy. False: none can."""
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
        """What of the formula above `Holdings` does not hold."""
        shared = [part for parts in self.writers.values() for part in parts]
        if sorted(shared) != list(range(self.parts)):
            yield f"parts: W = {self.writers}, p = {self.parts}"
        if not all(set(parts) <= set(self.able.get(node, ())) for node, parts in self.writers.items()):
            yield f"parts: W = {self.writers}, able = {self.able}"

    def lose(self, node: str) -> bool:
        """A node is gone: others take over what was its to write. False: nobody can."""
        if self.able.pop(node, None) is None:
            return True
        return self.share_out() if node in self.writers else True
