"""Bugs planted in how data are consumed and told of: the seeds of `data_seeds` have to find every one of them.

The first ones are in what ranks do, as a script or an adapter could get it wrong; the others in what agents and the leader make
of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from dlrover_core.data.cut import pack
from dlrover_core.job import checkpoints
from dlrover_core.job.lineage import Lineage
from dlrover_core.testing import consuming
from dlrover_core.testing.consuming import Consuming, Dataset, Part, Rank, Running, State
from dlrover_core.testing.saving import Saving

Patch = AbstractContextManager[Any]
BUGS: dict[str, Callable[[], Patch]] = {}


def bug(patch: Callable[[], Patch]) -> Callable[[], Patch]:
    """A bug, which its docstring describes."""
    BUGS[patch.__name__] = patch
    return patch


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Our code with one bug more."""
    with BUGS[name]():
        yield


# ---- in what ranks do


@bug
def one_batch_ahead() -> Patch:
    """A prefetcher has drawn the next batch when a state is saved, and what it drew counts."""

    def published(self: Consuming, rank: Rank, state: State) -> bytes:
        ahead = Rank(rank.rank, rank.world, rank.epoch, rank.position)
        ahead.draw(self.dataset)
        return pack(ahead.cut)

    return mock.patch.object(Consuming, "published", published)


@bug
def one_batch_behind() -> Patch:
    """A batch counts when the next one is drawn."""
    true = Rank.draw

    def draw(self: Rank, dataset: Dataset) -> Any:
        before[id(self)] = pack(self.cut)
        return true(self, dataset)

    before: dict[int, bytes] = {}
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Rank, "draw", draw))
    stack.enter_context(
        mock.patch.object(Consuming, "published", lambda _self, rank, _state: before.get(id(rank), pack(rank.cut)))
    )
    return stack


@bug
def position_of_the_wrong_step() -> Patch:
    """A slot keeps the cut of the state that lay in it before."""
    true = Consuming.save

    def save(self: Consuming, generation: int, step: int) -> None:
        true(self, generation, step)
        older = [state for state in self.models if state[0] == generation and state[1] < step]
        for node in self.running[generation].nodes if older else ():
            self.parts[node, (generation, step)] = self.parts[node, max(older)]

    return mock.patch.object(Consuming, "save", save)


@bug
def rank_0s_position_for_a_lost_rank() -> Patch:
    """A newcomer takes the position of rank 0 as it is in its newest slot, whatever step is restored."""
    true = Consuming.read

    def read(self: Consuming, node: str, state: State, tier: str, place: int) -> Part:
        if node in self.places[state[0]]:
            return true(self, node, state, tier, place)
        first = self.places[state[0]][0]
        return self.parts[first, max(of for owner, of in self.parts if owner == first)]

    return mock.patch.object(Consuming, "read", read)


def _ignored_on(tier: str) -> Patch:
    true = Consuming.resume

    def resume(self: Consuming, rank: Rank, cut: bytes, read_from: str) -> None:
        if read_from != tier:
            true(self, rank, cut, read_from)

    return mock.patch.object(Consuming, "resume", resume)


@bug
def ignored_from_storage() -> Patch:
    """A position that was read from storage is not given to the dataset."""
    return _ignored_on(checkpoints.STORAGE)


@bug
def ignored_from_peers() -> Patch:
    """A position that came from a peer is not given to the dataset."""
    return _ignored_on(checkpoints.PEER)


@bug
def ignored_from_memory() -> Patch:
    """A position that lay in the node's own memory is not given to the dataset."""
    return _ignored_on(checkpoints.MEMORY)


@bug
def scaled_with_the_world() -> Patch:
    """A position is kept per rank, and multiplied by the world size that there is now."""

    def began(self: Consuming, run: Running) -> None:
        for ranks in run.ranks.values():
            for one in ranks:
                before = len(run.model) // self.dataset.batch
                worlds = {len(other.ranks) for other in self.running.values()}
                if before and len(worlds) > 1:
                    one.position = one.position * one.world // max(worlds) % self.dataset.size

    return mock.patch.object(Consuming, "compare", began)


@bug
def epoch_forgotten() -> Patch:
    """The epoch is not restored, the position is."""

    def resume(self: Rank, cut: Any) -> None:
        (place,) = cut
        self.position = place.position

    return mock.patch.object(Rank, "resume", resume)


@bug
def shares_of_the_old_world() -> Patch:
    """Ranks share a batch as the world before did."""
    true, first = consuming.quotas, dict[int, Any]()

    def quotas(batch: int, world: int) -> Any:
        known = first.setdefault(batch, true(batch, world))
        return known if len(known) >= world else true(batch, world)

    def begin(self: Consuming, *args: Any) -> None:
        if not self.running:
            first.clear()
        start(self, *args)

    start = Consuming.begin
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(consuming, "quotas", quotas))
    stack.enter_context(mock.patch.object(Consuming, "begin", begin))
    return stack


@bug
def quotas_a_step_late() -> Patch:
    """One rank divides the first batch after a change of the quotas as they were before."""
    true = Rank.quota

    def quota(self: Rank, dataset: Dataset) -> Any:
        late = self.rank == self.world - 1 and self.made == consuming.EQUAL_STEPS
        return true(Rank(self.rank, self.world) if late else self, dataset)

    return mock.patch.object(Rank, "quota", quota)


@bug
def short_batch_dropped() -> Patch:
    """An epoch's remainder is left out, though it should be a short batch."""
    true = Rank.draw

    def draw(self: Rank, dataset: Dataset) -> Any:
        if dataset.size - self.position < dataset.batch < dataset.size:
            self.epoch, self.position = self.epoch + 1, 0
        return true(self, dataset)

    return mock.patch.object(Rank, "draw", draw)


# ---- in what agents and the leader make of it


@bug
def a_commit_tells_the_newest_cut() -> Patch:
    """What is told of a state that was written is the position of the newest state in memory."""
    true = Saving.cut

    def cut(self: Saving, node: str, state: State) -> bytes:
        held = self.held.get(node)
        return true(self, node, held[-1]) if held else true(self, node, state)

    return mock.patch.object(Saving, "cut", cut)


@bug
def a_restore_tells_no_generation() -> Patch:
    """A restore names a later step's generation: the leader looks for the state in the wrong one."""
    true = Lineage.resume

    def resume(self: Lineage, generation: int, base: State, cut: bytes, at: int) -> bool:
        return true(self, generation, (generation - 1 if base[0] else 0, base[1]), cut, at)

    return mock.patch.object(Lineage, "resume", resume)


@bug
def the_ledger_does_not_begin_anew() -> Patch:
    """After a restore, states that were rolled back stay in the lineage."""
    true = Lineage.resume

    def resume(self: Lineage, generation: int, base: State, cut: bytes, at: int) -> bool:
        before = list(self.known)
        done = true(self, generation, base, cut, at)
        self.known = sorted({*before, *self.known})
        return done

    return mock.patch.object(Lineage, "resume", resume)
