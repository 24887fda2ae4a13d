import contextlib
import errno
import gc
import io
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.breaking import NUMBERS, breaking
from tests.unit.stored import OBJECTS, Arena, pickled, sharded, state, whole

from dlrover_adapters.checkpoint import parts
from dlrover_adapters.checkpoint.listing import COMPLETE, INCOMPLETE, look, newest, retain, steps
from dlrover_adapters.checkpoint.manifests import (
    BLOCK_BYTES,
    FORMAT,
    PLAIN,
    CheckpointDamaged,
    CheckpointIncomplete,
    CheckpointTooNew,
)
from dlrover_adapters.checkpoint.parts import PartOutdated, PartTorn, write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.checkpoint.slotview import SlotDamaged
from dlrover_core.errors import CoreError

FOLDER = "step-0000000120"


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty folder on a file system and in an object store."""
    return Place(f"file://{tmp_path}/run" if request.param == "local" else f"memory://{tmp_path.name}/run")


def test_what_a_rank_holds_is_written_and_read_back_bit_for_bit(place: Place) -> None:
    """Every tensor and object of a slot comes back from storage as it was, also before the step is sealed."""
    tensors = state()
    report = write_part(whole(tensors).view(), place, run="r")
    assert (report.step, report.rank, report.files, report.again) == (120, 0, ("__0_0.distcp",), False)
    assert report.size == place.size(f"{FOLDER}/__0_0.distcp")
    reader = StepReader(place, 120)
    assert not reader.sealed
    reader.verify()
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor)
    assert {name: reader.object(name) for name in reader.objects} == {
        name: pickled(one) for name, one in OBJECTS.items()
    }


def test_each_item_is_what_torch_save_writes(place: Place) -> None:
    """At each item's place in the file there is a stream that torch.load opens, and its raw bytes where the manifest says."""
    tensors = state()
    write_part(whole(tensors).view(), place, run="r")
    raw, part = place.get(f"{FOLDER}/__0_0.distcp"), json.loads(place.get(f"{FOLDER}/part-0.json"))
    for name, _, _, _, _, _, offset, length, data, size in part["items"]:
        found = torch.load(io.BytesIO(raw[offset : offset + length]), weights_only=True)
        assert torch.equal(found, tensors[name])
        assert raw[data : data + size] == found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_only_what_this_rank_writes_is_written(place: Place) -> None:
    """Of a state that several ranks hold each writes its own share; together they are all of it."""
    tensors = state()
    names = sorted(tensors)
    for rank, share in enumerate((names[:3], names[3:])):
        objects = OBJECTS if rank == 0 else {}
        write_part(whole(tensors, rank=rank, world=2, writes=share, objects=objects).view(), place, run="r")
    seal(place, 120, [0, 1])
    reader = StepReader(place, 120)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())
    assert {chunks[0].rank for chunks in reader.items.values()} == {0, 1}


def test_the_same_part_again_is_recognised(place: Place) -> None:
    """Writing a part that is there already writes nothing, also after the step was sealed, which it stays."""
    arena = whole(state())
    first = write_part(arena.view(), place, run="r")
    seal(place, 120, [0])
    again = write_part(arena.view(), place, run="r")
    assert (again.again, again.size, again.files) == (True, first.size, first.files)
    assert look(place, 120).state == COMPLETE


def test_without_a_run_nothing_is_taken_for_the_same(place: Place) -> None:
    """Where nothing tells this job from one before it, a part is written anew, and its step is complete no more."""
    write_part(whole(state(1), generation=5).view(), place, run="")
    seal(place, 120, [0])
    for generation in (5, 1):
        assert not write_part(whole(state(2), generation=generation).view(), place, run="").again
        assert look(place, 120).state == INCOMPLETE
        assert torch.equal(StepReader(place, 120).tensor("model.weight"), state(2)["model.weight"])


def test_a_rank_can_stand_in_for_another(place: Place) -> None:
    """From a copy of a dead rank's objects its part is written, with the tensors of a rank that holds them as well."""
    tensors = state()
    names = sorted(tensors)
    arenas = [
        whole(tensors, rank=rank, world=2, writes=share, objects=OBJECTS if rank == 0 else {})
        for rank, share in enumerate((names[:3], names[3:]))
    ]
    write_part(arenas[0].view(), place, run="r")
    with pytest.raises(CheckpointIncomplete, match=r"model.weight is in no part, though rank 0 had it .* and 2 more"):
        StepReader(place, 120)
    light = whole(tensors, rank=1, world=2, writes=names[3:], objects={"rank.1.rng": 1}, light=True)
    with pytest.raises(PartTorn, match=f"{names[3]} of rank 1 is not in this node's memory"):
        write_part(light.view(), place, run="r")
    write_part(light.view(), place, run="r", beside=[arenas[0].view()])
    seal(place, 120, [0, 1])
    reader = StepReader(place, 120)
    reader.verify()
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())
    assert sorted(reader.objects) == [*sorted(OBJECTS), "rank.1.rng"]
    assert write_part(arenas[0].view(), place, run="r").again
    write_part(arenas[1].view(), place, run="r")
    seal(place, 120, [0, 1])
    reader = StepReader(place, 120)
    reader.verify()
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())


def test_a_newer_generation_replaces_and_an_older_one_is_refused(place: Place) -> None:
    """A step written again by a later life of the job is not complete until all parts are new; the earlier life has no say."""
    old, new = sharded(state(1), 2), sharded(state(2), 2, generation=2)
    for arena in old:
        write_part(arena.view(), place, run="r")
    seal(place, 120, [0, 1])
    write_part(new[0].view(), place, run="r")
    assert look(place, 120).state == INCOMPLETE
    with pytest.raises(CheckpointIncomplete, match="different states"):
        seal(place, 120, [0, 1])
    with pytest.raises(PartOutdated):
        write_part(old[0].view(), place, run="r")
    write_part(new[1].view(), place, run="r")
    seal(place, 120, [0, 1])
    with pytest.raises(PartOutdated):
        write_part(old[1].view(), place, run="r")
    assert torch.equal(StepReader(place, 120).tensor("model.weight"), state(2)["model.weight"])
    # Another run begins to count its generations anew.
    write_part(old[0].view(), place, run="another")
    assert look(place, 120).state == INCOMPLETE


def test_a_slot_that_is_overwritten_meanwhile_is_not_published(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker overwrites the slot while it is written, no file and no manifest appears."""
    arena = whole(state())
    view = arena.view()
    real = torch.save

    def save(*args: Any, **options: Any) -> Any:
        arena.control.begin(0)
        real(*args, **options)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(PartTorn):
        write_part(view, place, run="r")
    assert place.ls(FOLDER) == []
    with pytest.raises(PartTorn):
        write_part(whole(state()).view(), place, run="r", generation=7)


def test_a_damaged_slot_is_not_written(place: Place) -> None:
    """Bytes that changed in memory after they were hashed do not reach storage."""
    arena = whole(state())
    arena.memory[arena.geometry.data_at(0)] ^= 1
    with pytest.raises(SlotDamaged):
        write_part(arena.view(), place, run="r")
    assert place.ls(FOLDER) == []


def test_nothing_is_held_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written comes straight from the arena: no buffer between is larger than a mebibyte."""
    big = torch.arange(BLOCK_BYTES // 4 + 1000, dtype=torch.float32)
    arena = Arena([("a", big, [0], big.shape), ("b", big[:3000], [0], [3000])], {})
    data = arena.geometry.data_at(0)
    begin = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
    foreign, real = [], os.write

    def write(fd: Any, content: Any) -> Any:
        view = memoryview(content)
        import numpy as np

        at = np.frombuffer(view, np.uint8).__array_interface__["data"][0] - begin
        if not data <= at < data + arena.geometry.data_bytes:
            foreign.append(len(view))
        return real(fd, content)

    monkeypatch.setattr(os, "write", write)
    write_part(arena.view(), Place(str(tmp_path)), run="r")
    assert max(foreign) <= 1024 * 1024
    assert len(StepReader(Place(str(tmp_path)), 120).parts[0].files[0].digests) == 2


def test_the_pace_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pace, writing waits so that no more than so many bytes a second have gone out."""
    clock = [0.0]
    monkeypatch.setattr(parts.time, "monotonic", lambda: clock[0])

    def sleep(seconds: Any) -> Any:
        clock[0] += seconds

    monkeypatch.setattr(parts.time, "sleep", sleep)
    big = torch.zeros(5_000_000)
    report = write_part(Arena([("a", big, [0], big.shape)], {}).view(), Place(str(tmp_path)), run="r", bytes_per_s=4e6)
    assert 4.9 < clock[0] < 5.2
    assert report.took_us == int(clock[0] * 1e6)


@pytest.mark.parametrize("number", NUMBERS)
def test_storage_that_fails_publishes_nothing_and_names_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any
) -> None:
    """A disk that is full, or fails, raises `OSError` with the URL; the step has no part, and a later try succeeds."""
    place, arena, real = Place(f"file://{tmp_path}/run"), whole(state()), os.write

    def refuse(fd: Any, content: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match=f"file://{tmp_path}/run/{FOLDER}") as found:
        write_part(arena.view(), place, run="r")
    assert found.value.errno == number
    assert place.ls(FOLDER) == []
    assert list((tmp_path / "run" / FOLDER).iterdir()) == []
    monkeypatch.setattr(os, "write", real)
    assert not write_part(arena.view(), place, run="r").again


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.__getitem__)
def test_a_disk_that_breaks_at_any_call_of_a_part_or_a_seal(tmp_path: Path, number: int) -> None:
    """`OSError` rises and nothing else; the step is complete only if all was written, and a later try completes it."""
    for at in range(0, 1000, 1 if number == errno.EIO else 5):
        folder, arena = tmp_path / str(at), whole(state())
        place = Place(f"file://{folder}/run")
        with breaking(folder, number) as disk:
            disk.at = at
            with contextlib.suppress(OSError):
                write_part(arena.view(), place, run="r")
                seal(place, 120, [0])
                assert look(place, 120).state == COMPLETE
            disk.at = -1
        write_part(arena.view(), place, run="r")
        seal(place, 120, [0])
        StepReader(place, 120).verify()
        if disk.calls <= at:
            return
    raise AssertionError("it makes more calls than were broken")


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_a_disk_that_fills_up_within_a_tensor_does_not_end_the_process(tmp_path: Path, form: str) -> None:
    """Whatever is raised while torch writes comes out as it is: torch's own writer would end the process for it."""
    place, before = Place(str(tmp_path)), resource.getrlimit(resource.RLIMIT_FSIZE)
    big = torch.zeros(1_000_000)
    arena = Arena([(name, big, [0], big.shape) for name in "abc"], {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, before[1]))
    try:
        with pytest.raises(OSError, match=FOLDER) as found:
            write_part(arena.view(), place, run="r", format=form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.value.errno == errno.EFBIG
    assert list((tmp_path / FOLDER).iterdir()) == []
    gc.collect()
    assert not write_part(arena.view(), place, run="r", format=form).again


# ---- one file that torch.load opens


class Odd:
    """Of a kind that weights_only does not open."""


def test_a_state_that_every_node_holds_becomes_one_file_that_torch_load_opens(place: Place, tmp_path: Path) -> None:
    """Format torch: one file with the nested state, which torch.load(weights_only=True) opens, from all of the node's ranks."""
    tensors = state()
    first, second = sharded(tensors, 2)
    report = write_part(first.view(), place, run="r", format="torch", beside=[second.view()])
    assert report.files == ("checkpoint.pt", "__0_0.objects")
    seal(place, 120, [0])
    found = torch.load(io.BytesIO(place.get(f"{FOLDER}/checkpoint.pt")), weights_only=True)
    assert torch.equal(found["model"]["weight"], tensors["model.weight"])
    assert torch.equal(found["optimizer"]["state"]["weight"]["exp_avg"], tensors["optimizer.state.weight.exp_avg"])
    assert found["optimizer"]["param_groups"] == OBJECTS["optimizer.param_groups"]
    assert found["extra"] == {"epoch": 3}
    reader = StepReader(place, 120)
    reader.verify()
    for name, tensor in tensors.items():
        assert torch.equal(reader.tensor(name), tensor)
    assert reader.object("rank.1.rng") == pickled({"seed": 1})
    with pytest.raises(CoreError, match="elements are nowhere"):
        write_part(second.view(), Place(str(tmp_path / "other")), run="r", format="torch")


def test_the_values_of_the_rank_that_writes_a_tensor_count(place: Place) -> None:
    """Buffers under DDP: a node that writes for one that is lost has both ranks' values, and rank 0's are the state."""
    chunk = [("buffer", torch.full((4,), float(rank)), [0], [4]) for rank in range(2)]
    copy, mine = (Arena([chunk[rank]], {}, rank=rank, world=2, writes=None if rank == 0 else ()) for rank in range(2))
    write_part(mine.view(), place, run="r", format="torch", beside=[copy.view()])
    found = torch.load(io.BytesIO(place.get(f"{FOLDER}/checkpoint.pt")), weights_only=True)
    assert found["buffer"].tolist() == [0.0] * 4


def test_what_weights_only_refuses_is_kept_beside(place: Place) -> None:
    """An object of a class of its own is not in the file that torch.load opens, and comes back whole from beside it."""
    arena = whole({"a": torch.ones(2), "f8": torch.ones(3).to(torch.float8_e4m3fn), "u16": torch.ones(3).to(torch.uint16)},
                  objects={"odd": {"x": Odd()}, "small": {"t": torch.arange(3)}})  # fmt: skip
    write_part(arena.view(), place, run="r", format="torch")
    found = torch.load(io.BytesIO(place.get(f"{FOLDER}/checkpoint.pt")), weights_only=True)
    assert sorted(found) == ["a", "f8", "small", "u16"]
    assert found["small"]["t"].tolist() == [0, 1, 2]
    assert (found["f8"].dtype, found["u16"].dtype) == (torch.float8_e4m3fn, torch.uint16)
    assert StepReader(place, 120).object("odd") == pickled({"x": Odd()})


# ---- what lies there


def test_steps_are_listed_and_only_the_newest_kept(place: Place) -> None:
    """The listing tells complete from incomplete, with sizes; retention removes by what lies there, each time anew."""
    for number in (1, 2, 3, 4):
        write_part(whole(state(), step=number).view(), place, run="r")
        if number != 2:
            seal(place, number, [0])
    write_part(sharded(state(), 2, step=5)[0].view(), place, run="r")
    found = steps(place)
    assert [(one.step, one.state, one.parts) for one in found] == [
        (1, COMPLETE, 1), (2, INCOMPLETE, 1), (3, COMPLETE, 1), (4, COMPLETE, 1), (5, INCOMPLETE, 1),
    ]  # fmt: skip
    last = newest(found)
    assert last is not None
    assert last.step == 4
    assert all(one.size > 1000 for one in found)
    assert retain(place, 2, run="r") == [1, 2]
    assert retain(place, 2, run="r") == []
    assert [one.step for one in steps(place)] == [3, 4, 5]


def test_a_manifest_of_a_newer_format_is_refused_by_name(place: Place) -> None:
    """What a newer version wrote is neither read nor removed, and the error says which file told so, and what to do."""
    write_part(whole(state()).view(), place, run="r")
    seal(place, 120, [0])
    for name in ("manifest.json", "part-0.json"):
        raw = place.get(f"{FOLDER}/{name}")
        place.put(f"{FOLDER}/{name}", raw.replace(b'"format":%d' % PLAIN, b'"format":%d' % (FORMAT + 1)))
        with pytest.raises(CheckpointTooNew, match=rf"{name} is of format {FORMAT + 1}.*newer dlrover-core"):
            StepReader(place, 120)
        place.put(f"{FOLDER}/{name}", raw)
    place.put(f"{FOLDER}/manifest.json", b'{"format":99}')
    write_part(whole(state(), step=130).view(), place, run="r")
    seal(place, 130, [0])
    assert retain(place, 1) == []
    assert [one.state for one in steps(place)] == ["newer", COMPLETE]


def test_damage_names_file_and_offset(tmp_path: Path) -> None:
    """A flipped byte, a file cut short, and one that is missing are each told by file and by the byte where it begins."""
    big = torch.zeros(BLOCK_BYTES // 4 + 1000)
    place = Place(str(tmp_path))
    write_part(Arena([("a", big, [0], big.shape)], {}).view(), place, run="r")
    seal(place, 120, [0])
    file = tmp_path / FOLDER / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[BLOCK_BYTES + 100] ^= 1
    file.write_bytes(raw)
    for look_at in (lambda: StepReader(place, 120).verify(), lambda: StepReader(place, 120).tensor("a")):
        with pytest.raises(CheckpointDamaged) as found:
            look_at()
        assert (found.value.offset, found.value.file.endswith("__0_0.distcp")) == (BLOCK_BYTES, True)
    file.write_bytes(raw[:1000])
    with pytest.raises(CheckpointDamaged, match="1,000 bytes") as found:
        StepReader(place, 120).tensor("a")
    assert found.value.offset == 1000
    file.unlink()
    with pytest.raises(CheckpointDamaged, match="not there"):
        StepReader(place, 120).verify()
