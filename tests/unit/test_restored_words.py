"""What ranks were trained on by leases, restored: the words of all ranks are joined, or the state is not taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.restoring import Arena, FakeNode, Live, World, everything, replicated, store  # noqa: E402

from dlrover_adapters.torch.checkpoint.ladder import RestoreFailed  # noqa: E402
from dlrover_adapters.torch.checkpoint.trained import LeasedData, rank_in  # noqa: E402
from dlrover_core.data.ranges import Ranges  # noqa: E402
from dlrover_core.data.trained import Trained, pack  # noqa: E402
from dlrover_core.errors import SpecError  # noqa: E402

TERMS = SimpleNamespace(name="train")


class Dataset:
    """A leased dataset, as far as it is restored."""

    def __init__(self) -> None:
        self.work = SimpleNamespace(terms=TERMS)
        self.began: Any = None

    def accept(self, found: Trained | None) -> None:
        """As `Leased`."""
        if found is None:
            raise SpecError("data", "nothing is said")

    def go_on(self, state: tuple[int, int], spans: Ranges, *, first: bool) -> None:
        """As `Leased`."""
        self.began = state, tuple(spans), first


def life(rank: int) -> Any:
    """A rank with a leased dataset."""
    made: Any = Live(rank, everything())
    made.dataset = Dataset()
    made.data = SimpleNamespace(leased=LeasedData([made.dataset], rank))
    return made


def words(rank: int, start: int, step: int) -> bytes:
    """A rank was trained on two positions a step."""
    return pack([Trained("train", "f", Ranges([(start, start + 2 * step)]))])


def saved(nodes: list[FakeNode], *steps: int, kept: tuple[int, ...] = (0, 1, 2, 3)) -> list[Arena]:
    """Four replicas on two nodes, of which those that are ``kept`` are in memory yet."""
    holders = tuple(tuple(range(local, 4, 2)) for local in range(2))
    arenas = [Arena(rank, 4, 2, replicated(rank, 4, 2), holders, own=(0, 1, 2, 3), leased=True) for rank in range(4)]
    for rank, arena in enumerate(arenas):
        for slot, step in enumerate(steps):
            arena.save(step, slot=slot, trained=words(rank, 100 * rank, step))
        if rank in kept:
            nodes[rank // 2 % len(nodes)].has(arena)
    return arenas


def all_of(step: int) -> tuple[tuple[int, int], ...]:
    """What the ranks together were trained on."""
    return tuple((100 * rank, 100 * rank + 2 * step) for rank in range(4))


def test_the_words_of_all_ranks_are_joined() -> None:
    """Each node reads its own; rank 0 tells its agent."""
    cluster: dict[str, FakeNode] = {}
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    saved(nodes, 10, 12)
    world = World(nodes, [life(rank) for rank in range(4)])
    assert {one.step for one in world.restore()} == {12}
    assert [one.dataset.began for one in world.lives] == [((1, 12), all_of(12), rank == 0) for rank in range(4)]
    assert not any(rank_in(name) >= 0 for one in world.lives for name in one.objects)


def test_in_a_smaller_world_one_node_reads_those_of_all() -> None:
    """Its ranks need the tensors of two ranks only, and the words of four."""
    cluster: dict[str, FakeNode] = {}
    nodes = [FakeNode(cluster)]
    saved(nodes, 10)
    world = World(nodes, [life(0)])
    assert world.restore()[0].step == 10
    assert world.lives[0].dataset.began == ((1, 10), all_of(10), True)


def test_a_state_of_which_a_rank_s_words_are_lost_is_not_taken(tmp_path: Path) -> None:
    """Its tensors are all there; the older one on storage has all words, too. Without storage training begins anew."""
    cluster: dict[str, FakeNode] = {}
    nodes = [FakeNode(cluster)]
    store(str(tmp_path), saved([FakeNode({})], 10))
    saved(nodes, 12, kept=(0, 1, 2))
    world = World(nodes, [life(0)])
    assert [(one.step, one.tier) for one in world.restore(url=str(tmp_path))] == [(10, "storage")]
    (_, step), spans, first = world.lives[0].dataset.began
    assert (step, spans, first) == (10, all_of(10), True)
    alone = World(nodes, [life(0)])
    assert alone.restore()[0].step == 0
    assert alone.lives[0].dataset.began == ((0, 0), (), True)


def test_two_ranks_of_one_position_are_named() -> None:
    """Nothing is restored: the model was trained on it twice."""
    cluster: dict[str, FakeNode] = {}
    nodes = [FakeNode(cluster)]
    for rank, arena in enumerate(saved(nodes, 10)):
        arena.save(10, trained=words(rank, 5 * rank, 10))
    world = World(nodes, [life(rank) for rank in range(4)])
    with pytest.raises(
        RestoreFailed, match="step 10: data: dataset 'train': rank 1 and others were both trained on positions 5 to 19"
    ):
        world.restore()
    assert all(one.untouched() for one in world.lives)


def test_a_state_without_words_is_refused() -> None:
    """By the dataset, which says what to do."""
    cluster: dict[str, FakeNode] = {}
    nodes = [FakeNode(cluster)]
    arenas = [nodes[0].has(Arena(0, 1, 1, replicated(0, 1, 1), ((0,),), own=(0,)))]
    arenas[0].save(10)
    with pytest.raises(SpecError, match="nothing is said"):
        World(nodes, [life(0)]).restore()
