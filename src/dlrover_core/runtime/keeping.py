"""The states that nodes hold in memory, reported with every heartbeat, so that a new leader hears them again.

`KeptBeat` is one node's report. `Keeping` puts all reports together: which step every node holds, and which step has all
its parts on storage. The latter becomes one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.checkpoint.copies import Tally
from dlrover_core.job.checkpoints import CheckpointSlice, CommitCheckpoint, GroupCheckpoints
from dlrover_core.job.holdings import Holdings
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.job.world import World
from dlrover_core.kernel.wire import find, part
from dlrover_core.runtime.levels import Beat, Levels

HELD_MAX = 8  # a node's slots; a message's array has 64 places
WRITTEN_MAX = 4


class Written(NamedTuple):
    """A node's parts of a step are on storage, durably.

    size:       bytes
    took_us:    time to write them
    generation: of the state; 0: the heartbeat's own
    places:     number of places whose parts were written by order, because their generation had ended (`Persist.places`);
                0: the node's own part, because its interval was over
    cut:        what the step has consumed of each dataset (`data.cut`), packed; empty: it says nothing
    trained:    on how many positions of leased datasets the ranks of these parts were trained (`data.trained.pack_counted`);
                empty: they do not say it
    """

    step: int
    size: int
    took_us: int
    generation: int = 0
    places: int = 0
    cut: bytes = b""
    trained: bytes = b""


@part(9)
class KeptBeat(NamedTuple):
    """What one node holds in memory and has written.

    generation: of its workers
    writes:     the node writes parts of checkpoints (of replicated states, one node does)
    copied:     newest step whose replica its partner holds, and that the node holds too if the state is spread over nodes;
                -1: none
    held:       steps complete in the memory of all its ranks, ascending
    written:    steps whose parts of this node are on storage, newest last
    keeps:      step that the node protects until it is replicated, of a state spread over nodes (`core.checkpoint.copies`);
                -1: none
    safe:       step that all nodes have replicated, of such a state; -1: none
    before:     an earlier generation of which the node still holds states; 0: none. A new leader needs it to know what may
                still be written of that generation
    wrote:      the node wrote parts of checkpoints in that generation
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


GENERATIONS_KEPT = 2  # the running one, and the one before, whose parts may still be on their way
NONE = -1


@dataclass(slots=True)
class _Group:
    """How many nodes hold which step of the newest generation that was heard of. ``news``: something was written."""

    generation: int = 0
    holding: Counter[int] = field(default_factory=Counter)
    copies: Tally = field(default_factory=Tally)
    news: bool = False

    def change(self, beat: KeptBeat, by: int) -> None:
        """Count a node's report in (``by`` 1) or out (-1)."""
        (self.holding.update if by > 0 else self.holding.subtract)(set(beat.held))
        self.holding = +self.holding
        self.copies.change({beat.keeps}, {beat.copied, beat.safe}, by=by)


@part(10)
class Everywhere(NamedTuple):
    """To a node: what all nodes of the group hold together. A step of -1: none.

    whole: newest step that every node holds in memory
    aim:   step that every node replicates now, of a state that is spread over nodes
    safe:  step that every node has replicated, of such a state
    """

    whole: int = NONE
    aim: int = NONE
    safe: int = NONE


NOWHERE = Everywhere()


class Keeping(Levels):
    """All nodes' reports. It repeats a step that is complete on storage until the log has it."""

    def __init__(self) -> None:
        self._beats: dict[str, dict[int, KeptBeat]] = {}
        # Reports of nodes that are gone: what they have written is on storage all the same.
        self._gone: dict[str, dict[int, KeptBeat]] = {}
        self._groups: dict[str, _Group] = {}
        self._sets: dict[str, str] = {}

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """Take in a heartbeat. True: there may be something new to commit."""
        self._sets[node] = state.set_of(node)
        return self.take(node, find(beat.parts, KeptBeat), state.world.of(node).generation)

    def findings(self, state: JobState, now_us: int) -> Iterator[CommitCheckpoint]:
        """The steps to commit, also while the job ends."""
        return self.commits(state.checkpoints)

    def answer(self, state: JobState, node: str) -> Everywhere | None:
        """What all nodes hold together."""
        told = self.everywhere(state.world.worlds, node)
        return told if told != NOWHERE else None

    def _set_of(self, node: str) -> str:
        """The coupling set of a node that was heard."""
        return self._sets.get(node) or group_of(node)

    def take(self, node: str, beat: KeptBeat, newest: int) -> bool:
        """Take in a node's report. ``newest``: its group's generation; reports of later ones are ignored.

        True: there may be something new to commit.
        """
        beats = self._beats.get(node)
        if not 0 < beat.generation <= newest or (beats is not None and beats.get(beat.generation) == beat):
            return False
        beats = self._beats.setdefault(node, {})
        group = self._groups.setdefault(self._set_of(node), _Group())
        if beat.generation > group.generation:
            group.generation, group.holding, group.copies = beat.generation, Counter(), Tally()
            self._forget_gone(self._set_of(node), beat.generation - GENERATIONS_KEPT)
        first, before = beat.generation not in beats, beats.get(beat.generation, KeptBeat())
        beats[beat.generation] = beat
        for old in sorted(beats)[:-GENERATIONS_KEPT]:
            del beats[old]
        if beat.generation == group.generation:
            group.change(before, -1)
            group.change(beat, 1)
        # The first report counts too: a node that writes nothing is no longer waited for.
        news = first or (beat.written, beat.writes, beat.before) != (before.written, before.writes, before.before)
        group.news = group.news or news
        return news

    def forget(self, node: str) -> None:
        """The node is gone, and its memory with it. What it has written stays, and may complete a step."""
        beats = self._beats.pop(node, {})
        group = self._groups.get(self._set_of(node))
        if group is None or not beats:
            return
        if group.generation in beats:
            group.change(beats[group.generation], -1)
        self._gone[node] = beats

    def _forget_gone(self, group: str, generation: int) -> None:
        """Forget nodes that were gone by then."""
        old = [node for node, beats in self._gone.items() if self._set_of(node) == group and max(beats) <= generation]
        for node in old:
            del self._gone[node]
            self._sets.pop(node, None)

    def _said(self, node: str) -> list[KeptBeat]:
        """All that is remembered of a node, gone or not."""
        return [*self._beats.get(node, {}).values(), *self._gone.get(node, {}).values()]

    def _writes(self, node: str, generation: int) -> bool | None:
        """Does a node write parts of a generation's checkpoints? None: it has not said."""
        said = {one.before: one.wrote for one in self._said(node)}
        said |= {one.generation: one.writes for one in self._said(node)}
        return said.get(generation)

    def holds(self, node: str) -> tuple[int, tuple[int, ...]]:
        """The newest generation that a node holds something of, and the steps; (0, ()): unknown."""
        beats = self._beats.get(node)
        newest = max(beats) if beats else 0
        return newest, beats[newest].held if beats else ()

    def whole(self, group: str, world: World) -> int:
        """The newest step of the world's generation that all its nodes hold in memory; -1: unknown."""
        known = self._groups.get(group)
        if known is None or known.generation != world.generation:
            return NONE
        nodes = len(world.members)
        return max((step for step, held in known.holding.items() if held == nodes), default=NONE)

    def copies(self, group: str, world: World) -> tuple[int, int]:
        """The step that all nodes of the world's generation replicate now, and the step that all have replicated; -1: none."""
        known = self._groups.get(group)
        if known is None or known.generation != world.generation:
            return NONE, NONE
        nodes = len(world.members)
        return known.copies.aim(nodes), known.copies.safe(nodes)

    def everywhere(self, worlds: Mapping[str, World], node: str) -> Everywhere:
        """The answer to a node's heartbeat."""
        group = self._set_of(node)
        world = worlds.get(group)
        if world is None or not world.active:
            return NOWHERE
        return Everywhere(self.whole(group, world), *self.copies(group, world))

    def commits(self, slice_: CheckpointSlice) -> Iterator[CommitCheckpoint]:
        """Steps that every writing node has written, newer than the newest checkpoint."""
        for name, group in self._groups.items():
            kept = slice_.groups.get(name)
            if kept is None or not (group.news or kept.order):
                continue
            found = [self._ordered(name, kept)] if kept.order is not None else []
            found += [self._written(one) for one in (kept.ended, kept.now) if one is not None]
            due = [one for one in found if one is not None and (one.generation, one.step) > kept.newest]
            # A commit may have been lost on its way: it remains news until nothing is left to commit.
            group.news = bool(due)
            yield from sorted(due, key=lambda one: (one.generation, one.step))

    def _parts(self, node: str, generation: int, places: int = 0) -> dict[int, Written]:
        """What a node has written of a generation, by step: its own part, or at least so many ``places`` by order."""
        return {
            one.step: one
            for beat in self._said(node)
            for one in beat.written
            if (one.generation or beat.generation) == generation
            and (one.places >= places if places else not one.places)
        }

    def _ordered(self, group: str, kept: GroupCheckpoints) -> CommitCheckpoint | None:
        """The ordered save, once all its writers have written."""
        order = kept.order
        if order is None:
            return None
        parts = [
            self._parts(node, order.generation, len(places)).get(order.step) for node, places in order.writers.items()
        ]
        return _committed(group, order.generation, order.step, [one for one in parts if one], len(order.writers))

    def _written(self, holdings: Holdings) -> CommitCheckpoint | None:
        """The newest step of a generation that all writing nodes have written. A node without a report may write too."""
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
    cuts = tuple(dict.fromkeys(one.cut for one in parts if one.cut))
    return CommitCheckpoint(
        group, generation, step, writers, size, took_us, cuts, tuple(one.trained for one in parts if one.trained)
    )
