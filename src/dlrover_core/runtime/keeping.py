"""What agents keep of their ranks' states, told with their beats: levels, which a new leader hears again.

`KeptBeat` is one node's word. What the leader makes of all of them together is `Keeping`: which step is whole on every node, and
that every part of a step is on storage, which becomes one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.checkpoint.copies import Tally
from dlrover_core.job.checkpoints import CheckpointSlice, CommitCheckpoint, Kept
from dlrover_core.job.holdings import Holdings
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.job.world import World
from dlrover_core.kernel.wire import find, part
from dlrover_core.runtime.levels import Beat, Levels

HELD_MAX = 8  # a node's slots; a message's array has 64 places
WRITTEN_MAX = 4


class Written(NamedTuple):
    """A node's parts of ``step`` are on storage, durably: ``size`` bytes in ``took_us``.

    ``generation``: whose state that is, where it is not the beat's own. ``places``: of how many places the parts are, where that
    was ordered because the generation has ended (`Persist.places`); 0: its own, because it was due.
    """

    step: int
    size: int
    took_us: int
    generation: int = 0
    places: int = 0


@part(9)
class KeptBeat(NamedTuple):
    """What one node keeps of ``generation``: ``held`` steps whole in the memory of all its ranks, ascending.

    ``writes``: parts of checkpoints are this node's to write (of replicated states only one node's are). ``written``: steps of
    which all its parts are on storage, the newest last. ``copied``: the newest step that its partner holds a copy of; -1: none.
    Of states that no node has alone (`core.checkpoint.copies`): ``keeps``: the step that is kept to be copied, ``safe``: the one
    that all have copied, ``copied`` one that is kept here, too. ``before``: the newest generation before this one of which the
    node kept anything (0: none), and ``wrote``: its ``writes`` then: a leader that comes later hears of that one, too.
    """

    generation: int = 0
    writes: bool = False
    copied: int = -1
    held: tuple[int, ...] = ()
    written: tuple[Written, ...] = ()
    keeps: int = -1
    safe: int = -1
    before: int = 0
    wrote: bool = False


GENERATIONS_KEPT = 2  # the one that runs, and the one before, whose parts may still be on their way
NONE = -1


@dataclass(slots=True)
class _Group:
    """How many nodes hold which step of the newest generation that was heard of; ``news``: something was written."""

    generation: int = 0
    holding: Counter[int] = field(default_factory=Counter)
    copies: Tally = field(default_factory=Tally)
    news: bool = False

    def change(self, beat: KeptBeat, by: int) -> None:
        """A node says so (``by`` 1), or no longer (-1)."""
        (self.holding.update if by > 0 else self.holding.subtract)(set(beat.held))
        self.holding = +self.holding
        self.copies.change({beat.keeps}, {beat.copied, beat.safe}, by=by)


@part(10)
class Everywhere(NamedTuple):
    """What a node is told of all together. ``whole``: the newest step that all nodes of the group hold in memory; -1: none is.

    Of states that no node has alone: ``aim``: the step that all copy to their partners now, ``safe``: the one that all have.
    """

    whole: int = NONE
    aim: int = NONE
    safe: int = NONE


NOWHERE = Everywhere()


class Keeping(Levels):
    """What the beats say of states kept; steps that are whole on storage are said again until the log has them."""

    def __init__(self) -> None:
        self._beats: dict[str, dict[int, KeptBeat]] = {}
        # Of nodes that are gone: what they have written is on storage all the same.
        self._gone: dict[str, dict[int, KeptBeat]] = {}
        self._groups: dict[str, _Group] = {}

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """A node's beat. True: there may be something to commit that there was not before."""
        return self.take(node, find(beat.parts, KeptBeat), state.world.of(node).generation)

    def findings(self, state: JobState, now_us: int) -> Iterator[CommitCheckpoint]:
        """What is to be committed, also as the job ends."""
        return self.commits(state.checkpoints)

    def answer(self, state: JobState, node: str) -> Everywhere | None:
        """What all nodes hold together."""
        told = self.everywhere(state.world.worlds, node)
        return told if told != NOWHERE else None

    def take(self, node: str, beat: KeptBeat, newest: int) -> bool:
        """A node's beat; ``newest``: its group's generation, of later ones nobody can keep anything.

        True: there may be something to commit that there was not before.
        """
        beats = self._beats.get(node)
        if not 0 < beat.generation <= newest or (beats is not None and beats.get(beat.generation) == beat):
            return False
        beats = self._beats.setdefault(node, {})
        group = self._groups.setdefault(group_of(node), _Group())
        if beat.generation > group.generation:
            group.generation, group.holding, group.copies = beat.generation, Counter(), Tally()
            self._forget_gone(group_of(node), beat.generation - GENERATIONS_KEPT)
        first, before = beat.generation not in beats, beats.get(beat.generation, KeptBeat())
        beats[beat.generation] = beat
        for old in sorted(beats)[:-GENERATIONS_KEPT]:
            del beats[old]
        if beat.generation == group.generation:
            group.change(before, -1)
            group.change(beat, 1)
        # Its first one, too: whoever says that it writes nothing is not waited for any longer.
        news = first or (beat.written, beat.writes, beat.before) != (before.written, before.writes, before.before)
        group.news = group.news or news
        return news

    def forget(self, node: str) -> None:
        """It is gone, and its memory with it; what it has written is not, and it may have been the last to be waited for."""
        beats = self._beats.pop(node, {})
        group = self._groups.get(group_of(node))
        if group is None or not beats:
            return
        if group.generation in beats:
            group.change(beats[group.generation], -1)
        self._gone[node] = beats

    def _forget_gone(self, group: str, generation: int) -> None:
        """Whoever was gone by then is of no more use."""
        old = [node for node, beats in self._gone.items() if group_of(node) == group and max(beats) <= generation]
        for node in old:
            del self._gone[node]

    def _said(self, node: str) -> list[KeptBeat]:
        """All that is remembered of a node, gone or not."""
        return [*self._beats.get(node, {}).values(), *self._gone.get(node, {}).values()]

    def _writes(self, node: str, generation: int) -> bool | None:
        """Are parts of a generation's checkpoints a node's to write? None: it has not said."""
        said = {one.before: one.wrote for one in self._said(node)}
        said |= {one.generation: one.writes for one in self._said(node)}
        return said.get(generation)

    def holds(self, node: str) -> tuple[int, tuple[int, ...]]:
        """The newest generation of which a node keeps something in memory, and the steps; (0, ()): nothing is known."""
        beats = self._beats.get(node)
        newest = max(beats) if beats else 0
        return newest, beats[newest].held if beats else ()

    def whole(self, group: str, world: World) -> int:
        """The newest step of the world's generation that all its nodes hold in memory; -1: none is known."""
        known = self._groups.get(group)
        if known is None or known.generation != world.generation:
            return NONE
        nodes = len(world.members)
        return max((step for step, held in known.holding.items() if held == nodes), default=NONE)

    def copies(self, group: str, world: World) -> tuple[int, int]:
        """Of the world's generation, the step that all its nodes are to copy now, and the one that all have; -1: none."""
        known = self._groups.get(group)
        if known is None or known.generation != world.generation:
            return NONE, NONE
        nodes = len(world.members)
        return known.copies.aim(nodes), known.copies.safe(nodes)

    def everywhere(self, worlds: Mapping[str, World], node: str) -> Everywhere:
        """What a node is told with the answer to its beat."""
        group = group_of(node)
        world = worlds.get(group)
        if world is None or not world.active:
            return NOWHERE
        return Everywhere(self.whole(group, world), *self.copies(group, world))

    def commits(self, slice_: CheckpointSlice) -> Iterator[CommitCheckpoint]:
        """Steps that every node which writes has written, newer than the newest committed."""
        for name, group in self._groups.items():
            kept = slice_.groups.get(name)
            if kept is None or not (group.news or kept.order):
                continue
            found = [self._ordered(name, kept)] if kept.order is not None else []
            found += [self._written(one) for one in (kept.ended, kept.now) if one is not None]
            due = [one for one in found if one is not None and (one.generation, one.step) > kept.newest]
            # What was said may not have been heard: only when nothing is left to say it is no news any more.
            group.news = bool(due)
            yield from sorted(due, key=lambda one: (one.generation, one.step))

    def _parts(self, node: str, generation: int, places: int = 0) -> dict[int, Written]:
        """What a node has written of a generation, by step: what was due, or of at least so many ``places`` as ordered."""
        return {
            one.step: one
            for beat in self._said(node)
            for one in beat.written
            if (one.generation or beat.generation) == generation
            and (one.places >= places if places else not one.places)
        }

    def _ordered(self, group: str, kept: Kept) -> CommitCheckpoint | None:
        """The save that was ordered, once all those have written that were to."""
        order = kept.order
        if order is None:
            return None
        parts = [
            self._parts(node, order.generation, len(places)).get(order.step) for node, places in order.writers.items()
        ]
        return _committed(group, order.generation, order.step, [one for one in parts if one], len(order.writers))

    def _written(self, holdings: Holdings) -> CommitCheckpoint | None:
        """The newest step of a generation that all have written who write; who has not been heard of may write."""
        generation, writers = holdings.generation, []
        for node in holdings.places:
            writes = self._writes(node, generation)
            if writes is None:
                return None
            if writes:
                writers.append(self._parts(node, generation))
        steps = set.intersection(*(set(one) for one in writers)) if writers else set()
        if not steps:
            return None
        step = max(steps)
        return _committed(holdings.group, generation, step, [one[step] for one in writers], len(writers))


def _committed(group: str, generation: int, step: int, parts: list[Written], writers: int) -> CommitCheckpoint | None:
    if len(parts) < writers or not parts:
        return None
    size, took_us = sum(one.size for one in parts), max(one.took_us for one in parts)
    return CommitCheckpoint(group, generation, step, writers, size, took_us)
