"""A restore with another number of ranks or nodes: every rank finds its pieces, in memory or on storage."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import msgpack
import pytest

torch = pytest.importorskip("torch")

from tests.unit.restoring import (  # noqa: E402
    FakeNode,
    Live,
    World,
    ddp,
    everything,
    fsdp,
    sharded,
    store,
)
from tests.unit.restoring import cluster as cluster  # noqa: E402, PLC0414 - the fixture is taken over

from dlrover_adapters.torch.checkpoint.meeting import Meeting  # noqa: E402
from dlrover_adapters.torch.checkpoint.vault import (  # noqa: E402
    REPLICA,
)


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that ranks put into the store."""
    found: list[bytes] = []
    post = Meeting.post

    def one(self: Meeting, name: str, value: bytes) -> None:
        found.append(value)
        post(self, name, value)

    monkeypatch.setattr(Meeting, "post", one)
    return found


def pickled(value: object) -> bool:
    """Is there an object as torch.save makes it somewhere in what was posted, packed or compressed however often?"""
    if isinstance(value, (list, tuple)):
        return any(map(pickled, value))
    if isinstance(value, dict):
        return any(map(pickled, value.values()))
    if not isinstance(value, bytes):
        return False
    if b"PK\x03\x04" in value:
        return True
    with contextlib.suppress(zlib.error):
        return pickled(zlib.decompress(value))
    with contextlib.suppress(ValueError):
        return pickled(msgpack.unpackb(value, strict_map_key=False))
    return False


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (4, 1), (1, 3), (3, 4), (5, 2)])
def test_reshard_from_memory(cluster: dict[str, FakeNode], old: int, new: int) -> None:
    """Another number of ranks: shards are cut anew from the old ones in memory, bit for bit."""
    nodes = [FakeNode(cluster)]
    fsdp(nodes, old, 10)
    world = World(nodes, [Live(rank, sharded(rank, new)) for rank in range(new)])
    assert {(one.step, one.tier) for one in world.restore()} == {(10, "memory")}
    assert all(live.is_at(10) for live in world.lives)
    assert all(live.objects["extra"] == {"position": 10} for live in world.lives)


def test_objects_do_not_come_through_the_store(cluster: dict[str, FakeNode], posted: list[bytes]) -> None:
    """The store takes what anybody writes: other nodes' tables and objects come from their savers."""
    nodes = [FakeNode(cluster) for _ in range(3)]
    fsdp(nodes[:2], 2, 10)
    world = World(nodes, [Live(rank, sharded(rank, 3)) for rank in range(3)])
    assert {one.step for one in world.restore()} == {10}
    assert all(live.is_at(10) for live in world.lives)
    assert all(live.objects["extra"] == {"position": 10} for live in world.lives)
    assert [sorted(node.heads) for node in nodes] == [[1], [0], [0, 1]]
    assert posted
    assert not [one for one in posted if pickled(one)]


@pytest.mark.parametrize(("old", "new"), [(2, 4), (4, 2), (4, 1), (3, 4)])
def test_reshard_from_storage(cluster: dict[str, FakeNode], tmp_path: Path, old: int, new: int) -> None:
    """The same from storage."""
    arenas = fsdp([FakeNode({})], old, 10)
    store(str(tmp_path), arenas)
    world = World([FakeNode(cluster)], [Live(rank, sharded(rank, new)) for rank in range(new)])
    assert {(one.step, one.tier) for one in world.restore(url=str(tmp_path))} == {(10, "storage")}
    assert all(live.is_at(10) for live in world.lives)


def test_grow_by_a_node(cluster: dict[str, FakeNode]) -> None:
    """Shards of one node become those of two: newcomers fetch only the pieces that they need."""
    nodes = [FakeNode(cluster)]
    fsdp(nodes, 2, 10)
    nodes.append(FakeNode(cluster))
    world = World(nodes, [Live(rank, sharded(rank, 4)) for rank in range(4)])
    assert [one.tier for one in world.restore()] == ["memory", "memory", "peer", "peer"]
    assert all(live.is_at(10) for live in world.lives)
    assert set(nodes[1].fetched) <= {0, 1}
    assert nodes[0].fetched == []


def test_shrink_to_one_node(cluster: dict[str, FakeNode]) -> None:
    """A drained node's shards come from its agent, or from copies."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    arenas = fsdp(nodes, 4, 10)
    for arena in arenas[2:]:
        nodes[0].has(arena, REPLICA)
    nodes[1].arenas.clear()
    world = World(nodes[:1], [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {(one.step, one.tier) for one in world.restore()} == {(10, "memory")}
    assert all(live.is_at(10) for live in world.lives)


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_drained_node_lends(cluster: dict[str, FakeNode], leaves: int) -> None:
    """A node that left by plan still serves what only it has: shards of two nodes become those of one."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    fsdp(nodes, 4, 10)
    stays = nodes[1 - leaves]
    stays.lenders = ((nodes[leaves].address, 2 * leaves, 2),)
    world = World([stays], [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {one.step for one in world.restore()} == {10}
    assert all(live.is_at(10) for live in world.lives)


def test_a_whole_world_moves(cluster: dict[str, FakeNode]) -> None:
    """No node of the new world has anything: what the old ones lend is enough."""
    nodes = [FakeNode(cluster) for _ in range(4)]
    fsdp(nodes[:2], 4, 10)
    for node in nodes[2:]:
        node.lenders = tuple((nodes[place].address, 2 * place, 2) for place in range(2))
    for new in (4, 2):
        world = World(nodes[2:], [Live(rank, sharded(rank, new)) for rank in range(new)])
        assert {(one.step, one.tier) for one in world.restore()} == {(10, "peer")}
        assert all(live.is_at(10) for live in world.lives)


def test_ddp_grows_and_shrinks(cluster: dict[str, FakeNode]) -> None:
    """Replicas: newcomers fetch everything from a peer; who stays needs nobody."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    ddp(nodes[:1], 2, 10)
    world = World(nodes, [Live(rank, everything()) for rank in range(4)])
    assert [one.tier for one in world.restore()] == ["memory", "memory", "peer", "peer"]
    assert all(live.is_at(10) for live in world.lives)

    other: dict[str, FakeNode] = {}
    nodes = [FakeNode(other), FakeNode(other)]
    ddp(nodes, 4, 10)
    world = World(nodes[:1], [Live(rank, everything()) for rank in range(2)])
    assert {one.tier for one in world.restore()} == {"memory"}
    assert all(live.is_at(10) for live in world.lives)


def test_a_piece_of_the_tables_is_lost(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """A damaged blob found while tables are told to newcomers is a fall too."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    arenas = ddp(nodes[:1], 1, 10)
    store(str(tmp_path), arenas)
    arenas[0].map[arenas[0].sizes.blob_at(0) + 9] ^= 1
    world = World(nodes, [Live(rank, everything()) for rank in range(2)])
    assert {one.tier for one in world.restore(url=str(tmp_path))} == {"storage"}
    assert all(live.is_at(10) for live in world.lives)
