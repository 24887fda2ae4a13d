import base64
import io
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.stored import OBJECTS, Arena, sharded, state, whole
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dlrover_adapters.checkpoint.export import export
from dlrover_adapters.checkpoint.geometry import fault, nested
from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.listing import INCOMPLETE, look
from dlrover_adapters.checkpoint.manifests import (
    CheckpointDamaged,
    CheckpointIncomplete,
    Part,
    Seal,
    SealedPart,
    packed_names,
    part_of,
)
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader, buffer_of
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.checkpoint.verify import verify
from dlrover_core.errors import SpecError

FOLDER = "step-0000000120"
ALONE = "ignore:torch.distributed is disabled:UserWarning"


def written(folder: Path, world: int = 3) -> Place:
    """A complete step, in so many ranks' parts."""
    place = Place(str(folder))
    for arena in sharded(state(), world):
        write_part(arena.view(), place, run="r")
    seal(place, 120, range(world))
    return place


@pytest.mark.filterwarnings(ALONE)
def test_a_step_loads_with_plain_torch_into_nested_states(tmp_path: Path) -> None:
    """What is sealed is an ordinary checkpoint: torch's own reader fills nested states, tensors and objects, of any shape."""
    written(tmp_path)
    tensors = state()
    target = {
        "model": {
            "weight": torch.zeros(10, 4),
            "bias": torch.zeros(10, dtype=torch.bfloat16),
            "steps": torch.tensor(0),
        },
        "optimizer": {
            "state": {"weight": {"exp_avg": torch.zeros(10, 4, dtype=torch.float64)}},
            "param_groups": [{"lr": 0.0, "params": ["x"]}],
        },
        "extra": {"epoch": 0},
    }
    dcp.load(target, checkpoint_id=tmp_path / FOLDER)
    assert torch.equal(target["model"]["weight"], tensors["model.weight"])
    assert torch.equal(target["model"]["bias"], tensors["model.bias"])
    assert target["model"]["steps"].item() == 17
    found = target["optimizer"]["state"]["weight"]["exp_avg"]
    assert torch.equal(found, tensors["optimizer.state.weight.exp_avg"])
    assert target["optimizer"]["param_groups"] == OBJECTS["optimizer.param_groups"]
    assert target["extra"] == {"epoch": 3}


def test_torchs_own_conversion_makes_one_file_of_it(tmp_path: Path) -> None:
    """dcp_to_torch_save gives back the whole nested state."""
    written(tmp_path)
    dcp_to_torch_save(tmp_path / FOLDER, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], state()["model.weight"])
    assert found["model"]["empty"].shape == (0, 3)
    assert found["optimizer"]["param_groups"] == OBJECTS["optimizer.param_groups"]
    assert found["rank"]["2"]["rng"] == {"seed": 2}


def test_metadata_is_as_torch_writes_it(tmp_path: Path) -> None:
    """Our `.metadata` has, for the same state, the fields and kinds of the one that torch's own writer makes."""
    tensors = state()
    place = Place(str(tmp_path / "ours"))
    write_part(whole(tensors, objects={"extra": {"epoch": 3}}).view(), place, run="r")
    seal(place, 120, [0])
    nest = nested((tuple(name.split(".")), one) for name, one in tensors.items())
    with pytest.warns(UserWarning, match=r"torch\.distributed"):
        dcp.save({**nest, "extra": {"epoch": 3}}, checkpoint_id=tmp_path / "theirs")
    ours = pickle.loads(place.get(f"{FOLDER}/.metadata"))  # noqa: S301  # just written
    theirs = pickle.loads((tmp_path / "theirs" / ".metadata").read_bytes())  # noqa: S301  # as above
    for name in tensors:
        assert ours.state_dict_metadata[name].size == theirs.state_dict_metadata[name].size
        assert ours.state_dict_metadata[name].chunks == theirs.state_dict_metadata[name].chunks
        assert ours.state_dict_metadata[name].properties.dtype == theirs.state_dict_metadata[name].properties.dtype
        assert ours.planner_data[name] == theirs.planner_data[name]
    assert {one.fqn for one in ours.storage_data} == {*tensors, "extra"}
    keys = {one for one in theirs.storage_data if one.fqn in tensors}
    assert keys <= set(ours.storage_data)
    assert ours.version == theirs.version


def test_a_step_with_a_part_missing_is_not_sealed(tmp_path: Path) -> None:
    """Without the part of every rank, or with one of another size than was written, a step does not become complete."""
    place = Place(str(tmp_path))
    arenas = sharded(state(), 3)
    for arena in arenas[:2]:
        write_part(arena.view(), place, run="r")
    with pytest.raises(CheckpointIncomplete, match="no part of rank 2"):
        seal(place, 120, range(3))
    with pytest.raises(CheckpointIncomplete, match="elements are nowhere"):
        seal(place, 120, range(2))
    with pytest.raises(CheckpointIncomplete, match="no part at all"):
        seal(place, 130, [])
    write_part(arenas[2].view(), place, run="r")
    file = tmp_path / FOLDER / "__1_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(CheckpointDamaged, match="__1_0"):
        seal(place, 120, range(3))
    file.unlink()
    with pytest.raises(CheckpointIncomplete, match="__1_0"):
        seal(place, 120, range(3))
    assert look(place, 120).state == INCOMPLETE
    file.write_bytes(raw)
    assert not seal(place, 120, range(3)).again
    before = (tmp_path / FOLDER / "manifest.json").stat()
    assert seal(place, 120, range(3)).again
    assert (tmp_path / FOLDER / "manifest.json").stat().st_mtime_ns == before.st_mtime_ns


def test_a_part_that_is_replaced_while_sealing_leaves_no_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a later life of the job replaces a part under the hands of whoever seals, the step does not stay complete."""
    place = Place(str(tmp_path))
    for arena in sharded(state(), 2):
        write_part(arena.view(), place, run="r")
    real = Place.put

    def put(self: Place, name: Any, content: Any) -> Any:
        if name.endswith("manifest.json"):
            monkeypatch.setattr(Place, "put", real)
            write_part(sharded(state(), 2, generation=2)[1].view(), place, run="r")
        return real(self, name, content)

    monkeypatch.setattr(Place, "put", put)
    with pytest.raises(CheckpointIncomplete, match="rank 1 was replaced"):
        seal(place, 120, [0, 1])
    assert look(place, 120).state == INCOMPLETE


def test_parts_that_belong_together_only_by_name_are_found_out(tmp_path: Path) -> None:
    """Parts that were exchanged, and a seal that comes from another step, are not read as if nothing were."""
    place = written(tmp_path)
    for arena in sharded(state(5), 3, step=130):
        write_part(arena.view(), place, run="r")
    seal(place, 130, range(3))
    names = ("__1_0.distcp", "part-1.json", "manifest.json")
    for name in names:
        ours, theirs = (place.get(f"step-0000000{step}/{name}") for step in (120, 130))
        place.put(f"{FOLDER}/{name}", theirs)
        assert not verify(place, 120).fine
        place.put(f"{FOLDER}/{name}", ours)
    assert verify(place, 120).fine


def test_every_damage_is_told(tmp_path: Path) -> None:
    """Verify tells each damaged file and goes on; metadata count too; a step that was not sealed is not fine."""
    place = written(tmp_path)
    for name in ("__0_0.distcp", "__2_0.distcp", ".metadata"):
        raw = bytearray((tmp_path / FOLDER / name).read_bytes())
        raw[50] ^= 4
        (tmp_path / FOLDER / name).write_bytes(raw)
    found = verify(place, 120)
    assert not found.fine
    assert [any(name in line for line in found.damages) for name in (".metadata", "__0_0", "__2_0")] == [True] * 3
    assert len(found.damages) == 3
    place.rm(f"{FOLDER}/manifest.json")
    assert not verify(place, 120).sealed


def test_what_was_wanted_twice_or_by_halves_is_read(tmp_path: Path) -> None:
    """Buffers of the same chunk may be asked for more than once, in any order; a buffer of another size is refused."""
    place = written(tmp_path)
    reader = StepReader(place, 120)
    chunks = [chunk for found in reader.items.values() for chunk in found]
    wanted = [(chunk, bytearray(chunk.item.size)) for chunk in [*reversed(chunks), *chunks, chunks[1]]]
    reader.read(wanted)
    for chunk, found in wanted:
        expected = reader.tensor(chunk.item.name)
        box = zip(chunk.item.offsets, chunk.item.shape, strict=True)
        piece = expected[tuple(slice(at, at + length) for at, length in box)].contiguous()
        assert bytes(found) == bytes(buffer_of(piece))
    with pytest.raises(ValueError, match="do not go into"):
        reader.read([(chunks[0], bytearray(3))])


@pytest.mark.parametrize(
    ("full", "boxes", "wrong"),
    [
        ((4, 4), [((0, 0), (4, 4))], ""),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))], ""),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 4))], ""),
        ((4, 4), [((0, 0), (2, 4)), ((3, 0), (1, 4))], "nowhere"),
        ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 4))], "overlap"),
        ((4, 4), [((0, 0), (4, 4)), ((0, 0), (4, 4))], "overlap"),
        ((4, 4), [((0, 0), (2, 4)), ((3, 0), (2, 4))], "in a tensor"),
        ((4,), [((0, 0), (2, 4))], "dimensions"),
        ((), [((), ())], ""),
        ((0, 3), [((0, 0), (0, 3))], ""),
        ((0, 3), [], "no chunk"),
    ],
)
def test_chunks_must_cover_a_tensor_once(full: Any, boxes: Any, wrong: Any) -> None:
    """Holes, overlaps and chunks that stick out are found, in any number of dimensions."""
    found = fault(full, boxes)
    assert wrong in found
    assert bool(found) == bool(wrong)


# ---- converted


def test_a_step_becomes_safetensors(tmp_path: Path) -> None:
    """The exported file is what the safetensors library reads: the weights alone, under their own names."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    reader = StepReader(written(tmp_path), 120)
    done = export(reader, str(tmp_path / "model.safetensors"), "safetensors", only="model")
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["bias", "empty", "steps", "weight"]
    for name, tensor in found.items():
        assert torch.equal(tensor, state()[f"model.{name}"])
    assert (done.tensors, done.left_out) == (4, ())
    with pytest.raises(SpecError, match="there is extra, model, optimizer, rank"):
        export(reader, str(tmp_path / "x"), "safetensors", only="nothing")


def test_a_step_becomes_one_file_and_a_plain_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exports to torch's own formats hold the same state, however few tensors are in memory at a time."""
    monkeypatch.setattr("dlrover_adapters.checkpoint.export.AHEAD_BYTES", 100)
    reader = StepReader(written(tmp_path), 120)
    export(reader, str(tmp_path / "all.pt"), "torch")
    export(reader, f"file://{tmp_path}/plain", "dcp")
    assert sorted(one.name for one in (tmp_path / "plain").iterdir()) == [".metadata", "__0_0.distcp"]
    dcp_to_torch_save(tmp_path / "plain", tmp_path / "plain.pt")
    for name in ("all.pt", "plain.pt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(found["model"]["bias"], state()["model.bias"])
        mask = found["optimizer"]["state"]["weight"]["mask"]
        assert torch.equal(mask, state()["optimizer.state.weight.mask"])
        assert found["extra"] == {"epoch": 3}
    export(reader, str(tmp_path / "some.pt"), "torch", only="optimizer.state")
    found = torch.load(tmp_path / "some.pt", weights_only=True)
    assert sorted(found) == ["weight"]


def test_an_export_of_damaged_bytes_writes_nothing(tmp_path: Path) -> None:
    """Every byte is verified on the way; where one is wrong no file appears."""
    place = written(tmp_path)
    raw = bytearray((tmp_path / FOLDER / "__0_0.distcp").read_bytes())
    raw[-2000] ^= 1
    (tmp_path / FOLDER / "__0_0.distcp").write_bytes(raw)
    for kind in ("safetensors", "torch", "dcp"):
        with pytest.raises(CheckpointDamaged):
            export(StepReader(place, 120), str(tmp_path / "out" / kind), kind)
    assert not [one for one in (tmp_path / "out").rglob("*") if one.is_file()]


def test_manifests_can_be_read_by_people(tmp_path: Path) -> None:
    """Manifests are JSON: what, of which run and step, by whom, and the digest of each block."""
    written(tmp_path)
    part = json.loads((tmp_path / FOLDER / "part-1.json").read_text())
    assert (part["format"], part["run"], part["step"], part["rank"], part["world"]) == (2, "r", 120, 1, 3)
    told = json.loads((tmp_path / FOLDER / "manifest.json").read_text())
    assert [one[0] for one in told["parts"]] == [0, 1, 2]


def test_tensors_that_share_their_memory_are_each_whole(tmp_path: Path) -> None:
    """Tied weights: two names of the same bytes are two tensors on storage, equal."""
    one = torch.randn(5, 3)
    arena = Arena([("a", one, [0, 0], one.shape), ("b", one, [0, 0], one.shape)], {})
    place = Place(str(tmp_path))
    write_part(arena.view(), place, run="r")
    seal(place, 120, [0])
    export(StepReader(place, 120), str(tmp_path / "x.pt"), "torch")
    found: Any = torch.load(io.BytesIO((tmp_path / "x.pt").read_bytes()), weights_only=True)
    assert torch.equal(found["a"], found["b"])


def rows(world: int) -> list[Arena]:
    """Ranks of which rank 0 has the tensors, and each of the others one object of its own."""
    writers = tuple(range(world))
    found = [Arena([("w", torch.arange(4.0), (0,), (4,))], {"rank.0.rng": 0}, world=world, writers=writers)]
    return found + [
        Arena([], {f"rank.{rank}.rng": rank}, rank=rank, world=world, writers=writers) for rank in range(1, world)
    ]


def test_a_part_with_nothing_but_objects_is_missed(tmp_path: Path) -> None:
    """No tensor has a hole without it; parts say who writes, so that it is not sealed, nor read, before all of them are there."""
    place = Place(str(tmp_path))
    first, second, third = rows(3)
    for arena in (first, third):
        write_part(arena.view(), place, run="r")
    for look_at in (lambda: seal(place, 120, [0, 2]), lambda: StepReader(place, 120)):
        with pytest.raises(CheckpointIncomplete, match="there is no part of rank 1"):
            look_at()
    write_part(second.view(), place, run="r")
    seal(place, 120, [0, 1, 2])
    assert set(StepReader(place, 120).objects) == {"rank.0.rng", "rank.1.rng", "rank.2.rng"}


def owners(world: int = 2, **more: Any) -> list[Arena]:
    """Replicas: rank 0 writes the tensors, and each rank the objects that only it has."""
    return [
        Arena([("w", torch.arange(4.0), (0,), (4,))], {"groups": 1, f"rank.{rank}.rng": rank}, rank=rank, world=world,
              writes=None if rank == 0 else (), told=(*(("groups",) if rank == 0 else ()), f"rank.{rank}.rng"),
              own=tuple(range(world)), **more)
        for rank in range(world)
    ]  # fmt: skip


def test_a_step_without_a_rank_s_own_objects_is_none(tmp_path: Path) -> None:
    """All tensors are there, and what only rank 1 has is not: it is not sealed, not read, and ``verify`` names the rank."""
    place, (first, second) = Place(str(tmp_path)), owners()
    write_part(first.view(), place, run="r")
    for look_at in (lambda: seal(place, 120), lambda: seal(place, 120, [0]), lambda: StepReader(place, 120)):
        with pytest.raises(CheckpointIncomplete, match=r"objects that only rank 1 has .* are missing"):
            look_at()
    assert "only rank 1 has" in verify(place, 120).missing
    # Sealed by somebody who did not look.
    raw = place.get(f"{FOLDER}/part-0.json")
    sealed = SealedPart(0, len(raw), digest(raw), Part.unpacked(raw, "").size)
    place.put(f"{FOLDER}/manifest.json", Seal("dcp", "r", 1, 120, 2, (sealed,), None).packed())
    assert "only rank 1 has" in verify(place, 120).missing
    place.rm(f"{FOLDER}/manifest.json")
    write_part(second.view(), place, run="r")
    seal(place, 120)
    assert verify(place, 120).fine


def test_what_older_versions_sealed_is_read(tmp_path: Path) -> None:
    """Their manifests do not say who has objects of its own; one rank may have stood in for others."""
    place, (first, _) = Place(str(tmp_path)), owners()
    write_part(first.view(), place, run="r")
    raw = place.get(f"{FOLDER}/part-0.json")
    told = json.loads(raw)
    told = {**told, "format": 1, "stands_in": True, "writers": [0, 1]}
    for name in ("own", "covers", "names", "alike", "digest"):
        del told[name]
    body = json.dumps(told, separators=(",", ":")).encode()
    place.put(f"{FOLDER}/part-0.json", body[:-1] + f',"digest":"{digest(body):016x}"}}'.encode())
    seal(place, 120)
    assert verify(place, 120).fine


def test_torch_files_of_two_nodes(tmp_path: Path) -> None:
    """The node of rank 0 writes the file; the other one what only its ranks have, without which the step is none."""
    place, (a, b, c, d) = Place(str(tmp_path)), owners(4)
    write_part(c.view(), place, run="r", format="torch", beside=[d.view()])
    write_part(a.view(), place, run="r", format="torch", beside=[b.view()])
    assert sorted(one.name for one in place.ls(FOLDER)) == [
        "__0_0.objects", "__2_0.objects", "checkpoint.pt", "part-0.json", "part-2.json",
    ]  # fmt: skip
    seal(place, 120)
    assert verify(place, 120).fine
    assert set(StepReader(place, 120).objects) == {"groups", *(f"rank.{rank}.rng" for rank in range(4))}
    assert torch.load(tmp_path / FOLDER / "checkpoint.pt")["w"].tolist() == [0, 1, 2, 3]
    place.rm(f"{FOLDER}/manifest.json")
    place.rm(f"{FOLDER}/part-2.json")
    with pytest.raises(CheckpointIncomplete, match="objects that only rank 2, 3 has"):
        seal(place, 120)


def part_less(place: Place, rank: int, **without: int) -> None:
    """Rewrite a part's manifest without the nth of its ``items`` or ``objects``, as if its rank had never written it."""
    name = f"{FOLDER}/part-{rank}.json"
    part = Part.unpacked(place.get(name), name)
    for field, number in without.items():
        kept = tuple(one for at, one in enumerate(getattr(part, field)) if at != number)
        part = part._replace(**{field: kept})
    place.put(name, part.packed())


def ranks_there(place: Place) -> list[int]:
    """Of which there are parts."""
    return sorted(rank for rank in (part_of(one.name) for one in place.ls(FOLDER)) if rank is not None)


def seal_blindly(place: Place) -> None:
    """As a version that does not look at what is missing."""
    raws = {rank: place.get(f"{FOLDER}/part-{rank}.json") for rank in ranks_there(place)}
    parts = {rank: Part.unpacked(raw, "") for rank, raw in raws.items()}
    head = next(iter(parts.values()))
    sealed = tuple(SealedPart(rank, len(raw), digest(raw), parts[rank].size) for rank, raw in raws.items())
    place.put(f"{FOLDER}/manifest.json", Seal(head.kind, "r", 1, 120, head.world, sealed, None).packed())


def replicas(world: int, *, light: int | None = None, **more: Any) -> list[Arena]:
    """Ranks of DDP with the same tensors, each of which writes some of them; rank 0 writes the objects that all have."""
    tensors, found = state(), []
    for rank in range(world):
        shared = {**OBJECTS, "classes": {"model": "Net"}}
        own = {f"rank.{rank}.rng": rank}
        found.append(
            whole(tensors, rank=rank, world=world, objects={**shared, **own}, writes=sorted(tensors)[rank::world],
                  told=(*(shared if rank == 0 else ()), *own), own=tuple(range(world)), writers=tuple(range(world)),
                  light=rank == light, alike=True, **more)
        )  # fmt: skip
    return found


def write_layout(place: Place, layout: str) -> None:
    """The parts of a complete step."""
    if layout == "fsdp":
        for arena in sharded(state(), 3):
            write_part(arena.view(), place, run="r")
    elif layout == "torch":
        a, b, c, d = replicas(4)
        write_part(a.view(), place, run="r", format="torch", beside=[b.view()])
        write_part(c.view(), place, run="r", format="torch", beside=[d.view()])
    else:
        arenas = replicas(3, light=2 if layout == "light" else None)
        for arena in arenas:
            write_part(arena.view(), place, run="r", beside=[arenas[0].view()] if arena is arenas[2] else [])


@pytest.mark.parametrize("layout", ["ddp", "light", "fsdp", "torch"])
def test_a_step_that_lacks_any_one_thing_is_refused(tmp_path: Path, layout: str) -> None:
    """Of every chunk and object of every part: without it the step is not sealed, not read, and not fine, though sealed."""
    place = Place(str(tmp_path))
    write_layout(place, layout)
    seal(place, 120)
    assert verify(place, 120).fine
    place.rm(f"{FOLDER}/manifest.json")
    tried = 0
    for rank in ranks_there(place):
        name = f"{FOLDER}/part-{rank}.json"
        before = place.get(name)
        part = Part.unpacked(before, name)
        for field in ("items", "objects"):
            for number, one in enumerate(getattr(part, field)):
                part_less(place, rank, **{field: number})
                for look_at in (lambda: seal(place, 120), lambda: StepReader(place, 120)):
                    with pytest.raises(CheckpointIncomplete, match=re.escape(one.name)):
                        look_at()
                seal_blindly(place)
                found = verify(place, 120)
                assert one.name in found.missing
                assert not found.fine
                place.rm(f"{FOLDER}/manifest.json")
                place.put(name, before)
                tried += 1
    assert tried >= 9


def test_what_nobody_writes_is_named_with_the_ranks_that_have_it(tmp_path: Path) -> None:
    """All ranks keep a tensor, and each takes it that another one writes it: such a step is none."""
    place = Place(str(tmp_path))
    for rank in range(2):
        share = ["model.bias", "model.empty", "model.steps"] if rank else ["optimizer.state.weight.mask"]
        objects: dict[str, Any] = {"groups": 1} if rank == 0 else {}
        arena = whole(state(), rank=rank, world=2, writes=share, objects=objects)
        write_part(arena.view(), place, run="r")
    wrong = r"model.weight is in no part, though rank 0, 1 had it in this state, and 1 more are missing"
    with pytest.raises(CheckpointIncomplete, match=wrong):
        seal(place, 120)
    assert re.search(wrong, verify(place, 120).missing)


def test_a_rank_s_names_are_short_where_rank_0_has_the_same(tmp_path: Path) -> None:
    """Thousands of names are on storage once, not once for each rank; without rank 0's part nobody can say them."""
    place = Place(str(tmp_path))
    one = torch.zeros(1)
    chunks: list[Any] = [(f"model.layers.{number}.weight", one, [0], one.shape) for number in range(1_000)]
    for rank in range(2):
        arena = Arena(chunks, {}, rank=rank, world=2, writes=None if rank == 0 else [], alike=True)
        write_part(arena.view(), place, run="r")
    parts = [Part.unpacked(place.get(f"{FOLDER}/part-{rank}.json"), "") for rank in range(2)]
    assert len(parts[0].names) < 12_000
    assert len(parts[1].names) < 50
    seal(place, 120)
    place.rm(f"{FOLDER}/manifest.json")
    with pytest.raises(CheckpointIncomplete, match="no part of rank 0, which says what rank 1 has"):
        seal(place, 120, [1])


def test_names_that_cannot_be_read_are_damage() -> None:
    """Whatever lies in the place of a part's names, what is told is that the manifest is damaged."""
    for wrong in ("?", "AAAA", packed_names(["a"])[:-4], base64.b64encode(zlib.compress(b"\x01")).decode()):
        part = Part("dcp", "r", 1, 120, 1, 0, 7, (), (), (), (), names=wrong)
        with pytest.raises(CheckpointDamaged, match="its names cannot be read"):
            Part.unpacked(part.packed(), "x")
