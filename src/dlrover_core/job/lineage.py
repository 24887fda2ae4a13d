"""Lineage: the states that the present state of a model descends from, and the cut of each: what it had consumed of each dataset.

A generation resumes from a state of an earlier one, its base; what was trained after that state is not in the lineage any
more. Along a lineage cuts only grow: a state has consumed all that the states before it had. A state whose cut says
otherwise has lost samples, or has some twice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

from dlrover_core.data.cut import Cut, Place, differences, nests, same_source, unpack
from dlrover_core.errors import SpecError

KNOWN_MAX = 64
"""So many states, and generations, of a lineage are remembered. A restore goes back further only where all these are lost."""
UNKNOWN = (0, 0)
"""The base of a generation that began anew."""


class Known(NamedTuple):
    """A state of a lineage and its packed cut. ``at``: when the leader heard of it, in microseconds."""

    generation: int
    step: int
    cut: bytes
    at: int

    @property
    def state(self) -> tuple[int, int]:
        """Generation and step."""
        return self[:2]


class Clash(NamedTuple):
    """Two states of a lineage whose cuts do not go together: the one that was told of last, and the one known before."""

    told: Known
    known: Known

    @property
    def why(self) -> str:
        """What is wrong, with both values."""
        told, known = cut_of(self.told.cut), cut_of(self.known.cut)
        state = "the same state" if self.told.state == self.known.state else f"step {self.known.step}"
        return f"beside {state} of generation {self.known.generation}: {'; '.join(differences(told, known))}"


@lru_cache(maxsize=256)
def cut_of(packed: bytes) -> Cut:
    """A cut, unpacked; an empty one of bytes that say nothing. Raises `SpecError`."""
    return unpack(packed) if packed else ()


@lru_cache(maxsize=256)
def readable(packed: bytes) -> bool:
    """Are these bytes a cut?"""
    try:
        cut_of(packed)
    except SpecError:
        return False
    return True


# Invariants of a lineage, after every event; `Lineage.check` yields the broken ones.
#
#   g      `generation`: the newest generation that was heard of
#   b(x)   `bases`: the state that generation x resumed from; the path goes from g to the generation of b(g), and so on
#   K      `known`: states with their cuts
#
#   path   K ascends by generation and step. Where b(g) is known, all of K is on the path: of an earlier generation x on it up
#          to the step that the next generation on the path resumed from. |K| and |b| are at most `KNOWN_MAX`
#   base   the generation of b(x) is earlier than x


@dataclass(slots=True)
class Lineage:
    """The lineage of one set's model.

    generation: the newest that was heard of; 0: none
    bases:      the state that a generation resumed from, by generation, the newest last
    known:      states with a cut, ascending
    """

    MOST: ClassVar[int] = KNOWN_MAX

    generation: int = 0
    bases: dict[int, tuple[int, int]] = field(default_factory=dict)
    known: list[Known] = field(default_factory=list)

    @property
    def newest(self) -> Cut:
        """The newest cut; empty: none is known."""
        return cut_of(self.known[-1].cut) if self.known else ()

    def includes(self, generation: int, step: int) -> bool:
        """Is this state in the lineage, as far as that is known?"""
        now, limit = self.generation, None
        while now > generation:
            base = self.bases.get(now)
            if base is None:
                return False
            now, limit = base
        return now == generation and (limit is None or step <= limit)

    def learn(self, generation: int, step: int, cut: bytes, at: int) -> None:
        """A state and its cut. One that is off the lineage, or known, or that a newer release has packed, changes nothing."""
        self.generation = max(self.generation, generation)
        if cut and readable(cut) and self.includes(generation, step) and self.find(generation, step) is None:
            insort(self.known, Known(generation, step, cut, at))
            del self.known[: -self.MOST]

    def resume(self, generation: int, base: tuple[int, int], cut: bytes, at: int) -> bool:
        """A generation resumed from the state ``base``, or began anew from `UNKNOWN`. False: that is known already."""
        if generation in self.bases or generation < self.generation:
            return False
        of, step = base
        if step and not of:
            # Older agents name the step alone: the newest generation that has it.
            of = next((one.generation for one in reversed(self.known) if one.step == step), 0)
        del self.known[self._at(of, step + 1) : self._at(generation, 0)]
        straight = of == self.generation
        self.generation, self.bases[generation] = generation, (of, step)
        for old in list(self.bases)[: -self.MOST]:
            del self.bases[old]
        if not straight:
            self.known = [one for one in self.known if self.includes(*one.state)]
        if step:
            # Of generation 0: a state of an earlier run, whose generations are not ours.
            self.learn(of, step, cut, at)
        return True

    def _at(self, generation: int, step: int) -> int:
        """Where a state stands in ``known``, or would."""
        return bisect_left(self.known, (generation, step), key=lambda one: one.state)

    def find(self, generation: int, step: int) -> Known | None:
        """The cut of a state; None: it is not known."""
        at = self._at(generation, step)
        return self.known[at] if at < len(self.known) and self.known[at].state == (generation, step) else None

    def clashes(self, generation: int, step: int, cut: bytes, at: int, *, resumed: bool = False) -> Iterator[Clash]:
        """The states of the lineage that a told cut of a state does not go together with. Ask after `learn` or `resume`.

        ``resumed``: the ranks that resumed from the state say so; else those that made it.
        """
        if not cut or not self.includes(generation, step):
            return
        told = Known(generation, step, cut, at)
        same = self.find(generation, step)
        if same is not None and not self._alike(same, told, resumed=resumed):
            yield Clash(told, same)
            return
        at = self._at(generation, step)
        before, after = self.known[max(0, at - 1) : at], self.known[at + (same is not None) :][:1]
        for one in before:
            if not nests(cut_of(one.cut), cut_of(cut)):
                yield Clash(told, one)
        for one in after:
            if not nests(cut_of(cut), cut_of(one.cut)):
                yield Clash(told, one)

    def _alike(self, known: Known, told: Known, *, resumed: bool) -> bool:
        """Two words of one state. What is known may be the word of ranks that resumed from it, and its makers' may come later."""
        before, now = cut_of(known.cut), cut_of(told.cut)
        if resumed:
            return consumed_alike(before, now)
        makers = told.generation >= self.generation
        return consumed_alike(now, before) and (not makers or consumed_alike(before, now))

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        states = [one.state for one in self.known]
        off = [state for state in states if not self.includes(*state)] if self.generation in self.bases else []
        if states != sorted(set(states)) or off or max(len(states), len(self.bases)) > KNOWN_MAX:
            yield f"path: K = {states}, of which {off} are off it, with {len(self.bases)} bases"
        late = [(one, base) for one, base in self.bases.items() if base[0] >= one]
        if late:
            yield f"base: {late}"


def consumed_alike(made: Cut, later: Cut) -> bool:
    """Have two cuts of one state consumed the same samples? ``made``: as its makers say. ``later``: as those say that resumed it.

    The bytes of such cuts may differ, because a generation that resumes from the state writes its cut anew. A dataset that it
    adds is where its script says that it begins; no state of the lineage has consumed anything of it before. A dataset that
    it lacks was at its very beginning, or samples are lost. A dataset whose source has grown since has another fingerprint
    at the beginning of an epoch: nobody will ask for positions of the epochs before.
    """
    here, there = ({place.dataset: place for place in cut} for cut in (made, later))
    gone = [place for place in made if place.dataset not in there]
    return all((place.epoch, place.position) == (0, 0) for place in gone) and all(
        _same_samples(here[name], there[name]) for name in here.keys() & there.keys()
    )


def _same_samples(one: Place, other: Place) -> bool:
    if one == other:
        return True
    if one[:3] != other[:3] or one.position:
        return False
    # Either may be the older: a heartbeat of the generation before may come late.
    return same_source(one.fingerprint, other.fingerprint) or same_source(other.fingerprint, one.fingerprint)


def samples(size: int, earlier: Place | None, later: Place | None) -> int:
    """How many samples of a dataset of ``size`` lie between two places; None: its beginning. 0: ``later`` is not later."""
    begin, end = ((one.epoch, one.position) if one is not None else (0, 0) for one in (earlier, later))
    return max(0, (end[0] - begin[0]) * size + end[1] - begin[1])


def place_of(cut: Cut, dataset: str) -> Place | None:
    """How far a dataset is consumed in a cut; None: the cut says nothing of it."""
    return next((one for one in cut if one.dataset == dataset), None)
