"""The ladder of a restore: memory, a peer's, disk, storage; every byte verified, and every rank gets the same state."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.unit.restoring import (  # noqa: E402
    RUN,
    Arena,
    FakeNode,
    Live,
    World,
    ddp,
    everything,
    fsdp,
    newcomers,
    objects_of,
    sharded,
    store,
)
from tests.unit.restoring import cluster as cluster  # noqa: E402, PLC0414 - the fixture is taken over

from dlrover_adapters.checkpoint.hashing import digest, digests  # noqa: E402
from dlrover_adapters.checkpoint.parts import write_part  # noqa: E402
from dlrover_adapters.checkpoint.places import Place  # noqa: E402
from dlrover_adapters.checkpoint.seal import seal  # noqa: E402
from dlrover_adapters.checkpoint.slotview import SlotView  # noqa: E402
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob  # noqa: E402
from dlrover_adapters.torch.checkpoint import filling  # noqa: E402
from dlrover_adapters.torch.checkpoint.capture import Target  # noqa: E402
from dlrover_adapters.torch.checkpoint.ladder import RestoreFailed  # noqa: E402
from dlrover_adapters.torch.checkpoint.sources import Mismatch  # noqa: E402
from dlrover_adapters.torch.checkpoint.vault import (  # noqa: E402
    OBJECTS,
    REPLICA,
)
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, Control, Geometry, Stamp  # noqa: E402

# ---- own memory


@pytest.mark.parametrize("verify", ["full", "header"])
def test_own_memory(cluster: dict[str, FakeNode], verify: str) -> None:
    """Killed workers begin again from their own memory, each with its own, and nothing is fetched."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    fsdp(nodes, 4, 10, 12)
    world = World(nodes, [Live(rank, sharded(rank, 4)) for rank in range(4)])
    for found in world.restore(verify=verify):
        assert (found.generation, found.step, found.tier, found.fell) == (1, 12, "memory", ())
    for live in world.lives:
        assert live.is_at(12)
        assert live.objects == {f"rank.{live.rank}.rng": f"rng {live.rank} of 12", "extra": {"position": 12}}
    assert [node.fetched for node in nodes] == [[], []]
    assert [node.reports for node in nodes] == [[(12, "memory", ())] * 2] * 2


def test_replicas_of_a_node_are_shared_by_its_ranks(cluster: dict[str, FakeNode]) -> None:
    """Under DDP a node's ranks hold a share each, and every one gets everything."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    ddp(nodes, 4, 10)
    world = World(nodes, [Live(rank, everything()) for rank in range(4)])
    world.restore()
    assert all(live.is_at(10) for live in world.lives)
    assert world.lives[3].objects["rank.3.rng"] == "rng 3 of 10"


def test_nothing(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """Where there is nothing, nothing is touched: a first start."""
    nodes = [FakeNode(cluster)]
    world = World(nodes, [Live(rank, everything()) for rank in range(2)])
    for found in world.restore(url=str(tmp_path / "none")):
        assert (found.step, found.tier) == (0, "nothing")
    assert all(live.untouched() for live in world.lives)
    assert World([None], [Live(0, everything())]).restore()[0].step == 0


def test_a_step_that_one_rank_lacks(cluster: dict[str, FakeNode]) -> None:
    """A worker died in the middle of its save: all go back to the step before."""
    nodes = [FakeNode(cluster)]
    arenas = fsdp(nodes, 2, 10, 12)
    arenas[1].control.begin(1)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {one.step for one in world.restore()} == {10}
    assert all(live.is_at(10) for live in world.lives)


def test_not_hashed_yet(cluster: dict[str, FakeNode]) -> None:
    """The worker died before the saver hashed: the state is taken, its header and blob verified."""
    nodes = [FakeNode(cluster)]
    fsdp(nodes, 2, 10, hashed=False)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {one.step for one in world.restore()} == {10}
    assert all(live.is_at(10) for live in world.lives)


# ---- falling


def test_a_flipped_byte_is_told_and_the_step_before_taken(
    cluster: dict[str, FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    """One bit in one rank's memory: all ranks take the step before, and everybody is told why."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    fsdp(nodes, 4, 10, 12)[2].damage(slot=1)
    world = World(nodes, [Live(rank, sharded(rank, 4)) for rank in range(4)])
    for found in world.restore():
        assert (found.step, found.tier) == (10, "memory")
        assert "rank 2: the piece of old rank 2: step 12 of rank 2: block 0" in found.fell[0][1]
    assert all(live.is_at(10) for live in world.lives)
    assert "memory cannot be used" in caplog.text


@pytest.mark.parametrize("where", ["header", "table", "blob"])
def test_damaged_words(cluster: dict[str, FakeNode], tmp_path: Path, where: str) -> None:
    """Header, table and blob are verified too, with ``verify="header"`` as well."""
    nodes = [FakeNode(cluster)]
    arenas = fsdp(nodes, 2, 10)
    store(str(tmp_path), arenas)
    sizes = arenas[1].sizes
    at = {"header": 1024 + 16, "table": PAGE + 40, "blob": sizes.blob_at(0) + 20}[where]
    arenas[1].map[at] ^= 1
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {(one.step, one.tier) for one in world.restore(url=str(tmp_path), verify="header")} == {(10, "storage")}
    assert all(live.is_at(10) for live in world.lives)


def test_memory_then_peer_then_storage(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """Damaged in own memory: the partner's copy; damaged there: storage; and each fall is told."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    arenas = fsdp(nodes, 4, 10)
    copy = nodes[0].has(Arena(2, 4, 2, sharded(2, 4), tuple((rank,) for rank in range(4))), REPLICA)
    copy.save(10)
    store(str(tmp_path), arenas)
    arenas[2].damage()
    world = World(nodes, [Live(rank, sharded(rank, 4)) for rank in range(4)])
    found = world.restore(url=str(tmp_path))
    assert [one.tier for one in found] == ["memory", "memory", "peer", "memory"]
    assert [tier for tier, _ in found[0].fell] == ["memory"]
    assert nodes[1].fetched == [2]
    assert all(live.is_at(10) for live in world.lives)

    copy.damage()
    world = World(nodes, [Live(rank, sharded(rank, 4)) for rank in range(4)])
    found = world.restore(url=str(tmp_path))
    assert {one.tier for one in found} == {"storage"}
    assert [tier for tier, _ in found[0].fell] == ["memory", "peer"]
    assert all(live.is_at(10) for live in world.lives)


def test_a_peer_that_does_not_answer(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """A partner that is gone is one more tier that fell."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    store(str(tmp_path), ddp(nodes, 2, 10))
    nodes[1].arenas.clear()
    nodes[0].down = True
    world = World(nodes, [Live(rank, everything()) for rank in range(2)])
    found = world.restore(url=str(tmp_path))
    assert {one.tier for one in found} == {"storage"}
    assert "nobody answers" in found[0].fell[0][1]


def test_a_lost_node(cluster: dict[str, FakeNode]) -> None:
    """A relaunched node is served from the others' memory."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    ddp(nodes, 4, 10, own=True)
    nodes[1].arenas.clear()
    for rank in (2, 3):
        nodes[0].has(objects_of(rank, 4, 2, 10), OBJECTS)
    world = World(nodes, [Live(rank, everything()) for rank in range(4)])
    assert [one.tier for one in world.restore()] == ["memory", "memory", "peer", "peer"]
    assert all(live.is_at(10) for live in world.lives)


@pytest.mark.parametrize("light_first", [True, False])
def test_a_node_with_two_copies_of_a_rank_reads_the_whole_one(cluster: dict[str, FakeNode], light_first: bool) -> None:
    """The nodes changed places: each has copies of its ranks' objects from before, and the whole pieces that it fetched since."""
    nodes, world = newcomers(cluster)
    before = ddp(nodes[::-1], 4, 10, own=True)
    for rank, arena in enumerate(before):
        copies = [(objects_of(rank, 4, 2, 10), OBJECTS), (arena, REPLICA)]
        for one, kind in copies if light_first else reversed(copies):
            nodes[rank // 2].has(one, kind)
    for found in world.restore():
        assert (found.step, found.tier, found.fell) == (10, "memory", ())
    assert all(live.is_at(10) for live in world.lives)


def test_a_lost_node_s_ranks_get_their_own_objects(cluster: dict[str, FakeNode]) -> None:
    """The survivor is a save ahead of its copies of the dead node: the older step is taken, of which each rank has its own."""
    nodes, world = newcomers(cluster)
    ddp([nodes[0], FakeNode({})], 4, 10, 12, own=True)
    for rank in (2, 3):
        nodes[0].has(objects_of(rank, 4, 2, 8, 10), OBJECTS)
    for rank, found in enumerate(world.restore()):
        assert (found.step, found.tier) == (10, "memory" if rank < 2 else "peer")
        ((tier, why),) = found.fell
        assert tier == "memory"
        assert "step 12 of generation 1: nobody has the objects that only rank 2, 3 had" in why
        assert f"looked for in the memory of {nodes[0].address}, {nodes[1].address}" in why
    for live in world.lives:
        assert live.is_at(10)
        assert live.objects[f"rank.{live.rank}.rng"] == f"rng {live.rank} of 10"


def test_without_a_copy_of_objects_memory_is_of_no_use(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """The survivor has all tensors of a newer step, and nobody has what only the dead node's ranks had: storage has."""
    nodes, world = newcomers(cluster)
    arenas = ddp([nodes[0], FakeNode({})], 4, 10, own=True)
    for arena in arenas:
        arena.save(5, slot=1)
    store(str(tmp_path), arenas, slot=1)
    for live, found in zip(world.lives, world.restore(url=str(tmp_path)), strict=True):
        assert (found.step, found.tier) == (5, "storage")
        assert "nobody has the objects that only rank 2, 3 had" in found.fell[0][1]
        assert live.objects[f"rank.{live.rank}.rng"] == f"rng {live.rank} of 5"


@pytest.mark.parametrize("kind", ["replicas", "shares"])
def test_training_that_begins_anew_beside_states_is_told_to_people(cluster: dict[str, FakeNode], kind: str) -> None:
    """A node is lost before its copies came, with nothing on storage: one rank says what is lost, why and what to do; so does the
    report.
    """
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    build = ddp if kind == "replicas" else fsdp
    build([nodes[0], FakeNode({})], 4, 8, 10, **({"own": True} if kind == "replicas" else {}))
    world = World(nodes, [Live(rank, everything() if kind == "replicas" else sharded(rank, 4)) for rank in range(4)])
    assert {(one.step, one.tier) for one in world.restore()} == {(0, "nothing")}
    (words,) = nodes[0].losses
    missing = "the objects that only rank 2, 3 had" if kind == "replicas" else "the parts of rank 2, 3"
    assert words.startswith(
        "training begins anew, and all steps to step 10 are lost: step 10 of generation 1: nobody has"
    )
    assert missing in words
    assert "no storage is given" in words
    assert "call ckpt.save() early" in words
    assert nodes[1].losses == []
    for node in nodes:
        for step, tier, fell in node.reports:
            assert (step, tier) == (0, "nothing")
            assert missing in fell[0][1]


def test_a_first_start_has_lost_nothing(cluster: dict[str, FakeNode]) -> None:
    """Nobody is told anything."""
    nodes = [FakeNode(cluster)]
    World(nodes, [Live(rank, everything()) for rank in range(2)]).restore()
    assert nodes[0].losses == []


def test_storage_that_lacks_a_rank_s_own_objects(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """As older versions wrote it, one node's part and a seal: it is passed over in a world of the same shape, loudly."""
    _nodes, world = newcomers(cluster)
    arenas = ddp([FakeNode({}), FakeNode({})], 4, 5)
    store(str(tmp_path), arenas)
    for arena in arenas:
        arena.save(7)
    store(str(tmp_path), arenas[:2])
    for found in world.restore(url=str(tmp_path)):
        assert found.step == 5
        assert any("step 7: rank.2.rng of rank 2 is not in it" in why for _tier, why in found.fell), found.fell
    # In another one it is used, and rank 0's node says who has nothing of its own.
    for found in World([FakeNode(cluster)], [Live(rank, everything()) for rank in range(3)]).restore(url=str(tmp_path)):
        assert found.step == 7
        assert any(
            "rank 2 in a world of another shape: it begins with fresh random numbers" in one for one in found.notes
        )


def test_all_is_damaged(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """Damaged memory alone: training begins anew, untouched, and all is told. With damaged storage: an error, and no start."""
    nodes = [FakeNode(cluster)]
    arenas = fsdp(nodes, 2, 10)
    store(str(tmp_path), arenas)
    arenas[0].damage()
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    found = world.restore()
    assert {(one.step, one.tier) for one in found} == {(0, "nothing")}
    assert found[0].fell
    assert all(live.untouched() for live in world.lives)
    for part in tmp_path.glob("step-*/*.distcp"):
        raw = bytearray(part.read_bytes())
        raw[len(raw) // 2] ^= 1
        part.write_bytes(raw)
    with pytest.raises(RestoreFailed, match="there are checkpoints, and none can be used"):
        World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)]).restore(url=str(tmp_path))


def test_storage_that_cannot_be_listed(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """A storage that does not answer is no empty storage: no training from nothing beside a checkpoint that is there."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RestoreFailed, match="cannot be listed"):
        World([FakeNode(cluster)], [Live(0, everything())]).restore(url=str(tmp_path / "file"))


def test_another_model(cluster: dict[str, FakeNode]) -> None:
    """Whose model is not what was saved gets its own error, the others learn of it at once, and nothing is written."""
    nodes = [FakeNode(cluster)]
    fsdp(nodes, 2, 10)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    world.lives[1].wrong = "model.w was saved as float32[12, 5], and is float32[12, 6] now"
    with pytest.raises(Mismatch, match=r"model\.w was saved"):
        world.restore()
    assert all(live.untouched() for live in world.lives)


# ---- which state


def test_newer_on_storage(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """What was committed later than what memory has whole is taken from storage; without such news storage is not listed."""
    nodes = [FakeNode(cluster, committed=12)]
    arenas = fsdp(nodes, 2, 10, 12)
    store(str(tmp_path), arenas, slot=1)
    for arena in arenas:
        arena.control.begin(1)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {(one.step, one.tier) for one in world.restore(url=str(tmp_path))} == {(12, "storage")}
    assert all(live.is_at(12) for live in world.lives)
    nodes[0].committed = 10
    assert {(one.step, one.tier) for one in world.restore(url=str(tmp_path / "not" / "there"))} == {(10, "memory")}


def test_committed_and_not_sealed(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """A step that the log says is complete is taken although the agent that was to seal it died; others are not."""
    nodes = [FakeNode(cluster, committed=10)]
    arenas = fsdp(nodes, 2, 10, 12)
    for arena in arenas:
        for slot in (0, 1):
            write_part(SlotView(arena.map, slot), Place(str(tmp_path)), run=RUN)
            arena.control.begin(slot)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {(one.step, one.tier) for one in world.restore(url=str(tmp_path))} == {(10, "storage")}
    assert all(live.is_at(10) for live in world.lives)


def test_what_another_run_left_is_older(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """Generations of another run are not compared with ours: what memory has is this run's, and newer."""
    nodes = [FakeNode(cluster, committed=999)]
    arenas = fsdp(nodes, 2, 10)
    old = [Arena(rank, 2, 2, sharded(rank, 2), ((0,), (1,))) for rank in range(2)]
    for arena in old:
        arena.save(500, generation=30)
        write_part(SlotView(arena.map, 0), Place(str(tmp_path)), run="another run")
    seal(Place(str(tmp_path)), 500, [0, 1])
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {one.step for one in world.restore(url=str(tmp_path))} == {10}
    for arena in arenas:
        arena.control.begin(0)
    assert {(one.generation, one.step) for one in world.restore(url=str(tmp_path))} == {(0, 500)}


def test_a_chosen_step(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """``step`` is restored from storage whatever memory has; one that is not there is an error."""
    nodes = [FakeNode(cluster)]
    arenas = fsdp(nodes, 2, 10, 12)
    store(str(tmp_path), arenas)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {(one.step, one.tier) for one in world.restore(url=str(tmp_path), step=10)} == {(10, "storage")}
    assert all(live.is_at(10) for live in world.lives)
    with pytest.raises(RestoreFailed, match="step 11 cannot be restored"):
        world.restore(url=str(tmp_path), step=11)


def test_no_way_back_within_a_generation(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """What it has saved itself would be the newest again after the next failure: all ranks are told how to do it instead."""
    nodes = [FakeNode(cluster)]
    arenas = fsdp(nodes, 2, 10)
    store(str(tmp_path), arenas)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {one.step for one in world.restore(url=str(tmp_path), step=10)} == {10}
    for arena in arenas:
        arena.save(12, generation=nodes[0].told.generation, slot=1)
    with pytest.raises(RestoreFailed, match=r"holds step 12.*dlrover ckpt rm"):
        world.restore(url=str(tmp_path), step=10)


def test_the_local_disk(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """What storage did not take and a disk of this host has is read from there."""
    nodes = [FakeNode(cluster)]
    arenas = fsdp(nodes, 2, 10)
    store(str(tmp_path / "local"), arenas)
    for arena in arenas:
        arena.control.begin(0)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    found = world.restore(url=str(tmp_path / "far"), local=str(tmp_path / "local"))
    assert {(one.step, one.tier) for one in found} == {(10, "disk")}
    assert all(live.is_at(10) for live in world.lives)


# ---- filling


def test_blocks_are_compared_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has its own digest: a flipped byte is found in the first, the middle and the last one."""
    monkeypatch.setattr(filling, "BLOCK_BYTES", BLOCK_BYTES)
    size = 2 * BLOCK_BYTES + 4099
    item = Item("w", "uint8", (size,), (0,), (size,), 0, size)
    table = Table(7, 1, 0, ((0,),), (item,)).packed()
    sizes = Geometry(1, len(table), 4096, size)
    fd = os.memfd_create("arena")
    os.ftruncate(fd, sizes.total_bytes)
    memory = mmap.mmap(fd, 0)
    memory[PAGE : PAGE + len(table)] = table
    control = Control(memory, sizes)
    control.make(layout=7, rank=0, world=1, local_rank=0, table_bytes=len(table), table_digest=digest(table))
    blob = pack_blob({})
    memory[sizes.blob_at(0) : sizes.blob_at(0) + len(blob)] = blob
    control.publish(0, Stamp(1, 5, 1, len(blob), digest(blob)))
    for number, one in enumerate(digests(memoryview(memory)[sizes.data_at(0) : sizes.data_at(0) + size])):
        memory[sizes.digests_at(0) + 8 * number : sizes.digests_at(0) + 8 * number + 8] = one.to_bytes(8, "little")
    control.note_hashed(0, 1)
    with contextlib.closing(filling.Held(fd, 0)) as held:
        for threads in (1, 3):
            assert filling.verify(held, threads)
        for at, block in ((0, 0), (BLOCK_BYTES, 1), (2 * BLOCK_BYTES - 1, 1), (size - 1, 2)):
            memory[sizes.data_at(0) + at] ^= 1
            with pytest.raises(ValueError, match=f"block {block}"):
                filling.verify(held, 2)
            memory[sizes.data_at(0) + at] ^= 1


def test_a_hole_is_found() -> None:
    """Chunks that leave a part of a target uncovered do not restore it."""
    target = Target("w", torch.zeros(4, 3), (8, 3), (2, 0))
    rows = [Item("w", "float32", (8, 3), (at, 0), (2, 3), 0, 24) for at in (0, 2, 4, 6)]
    assert [need.number for need in filling.needs(target, rows)] == [1, 2]
    assert [need.number for need in filling.needs(target, [rows[1], rows[1], rows[2]])] == [0, 2]
    with pytest.raises(filling.Uncovered, match="6 of 12 elements are nowhere"):
        filling.needs(target, rows[2:])


def test_columns() -> None:
    """Shards of columns are no runs of bytes; they are copied all the same."""
    whole = torch.arange(48.0).reshape(4, 12)
    for parts in (2, 3):
        width = 12 // parts
        chunks = [Item("w", "float32", (4, 12), (0, at), (4, width), 0, 0) for at in range(0, 12, width)]
        local = torch.zeros(4, 4)
        for need in filling.needs(Target("w", local, (4, 12), (0, 4)), chunks):
            begin = chunks[need.number].offsets[1]
            local[need.there] = whole[:, begin : begin + width][need.here]
        assert torch.equal(local, whole[:, 4:8])
