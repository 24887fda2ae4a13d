"""Ranks that hold different values under one name: what a layout would take for replicas is refused before anything is saved."""

from __future__ import annotations

import math
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.checkpoint import listing
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.torch.checkpoint import replicas
from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.chunks import Chunk
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_core.errors import SpecError

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("alone")


class World:
    """Ranks as threads that meet in one store. ``sent``: bytes that each rank posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.size, self.sent = HashStore(), 1, dict[int, int]()
        monkeypatch.setattr(Meeting, "of_environment", lambda **_: self.meeting())

    def meeting(self) -> Meeting:
        """That of this thread."""
        rank = int(threading.current_thread().name)
        meeting = Meeting(self.store, rank, self.size, limit_s=LIMIT_S)
        post = meeting.post

        def counted(name: str, value: bytes) -> None:
            self.sent[rank] = self.sent.get(rank, 0) + len(value)
            post(name, value)

        meeting.post = counted  # type: ignore[method-assign]
        return meeting

    def run(self, size: int, rank: Callable[[int], Any]) -> list[Any]:
        """What each rank returned or raised."""
        self.store, self.size, self.sent = HashStore(), size, {}

        def named(number: int) -> Any:
            threading.current_thread().name = str(number)
            try:
                return rank(number)
            except SpecError as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return [one.result(LIMIT_S) for one in [pool.submit(named, number) for number in range(size)]]

    def compared(self, captures: Sequence[Capture], *, full: bool = False) -> list[str]:
        """The error of each rank; empty: none."""

        def rank(number: int) -> None:
            mine = replicas.digests(captures[number], captures[number].chunks(), full=full)
            replicas.compare(mine, self.meeting())

        found = self.run(len(captures), rank)
        return [str(one) if one is not None else "" for one in found]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """That of this test."""
    return World(monkeypatch)


def of(tensors: dict[str, torch.Tensor], rank: int = 0, **more: Any) -> Capture:
    """The state of a rank."""
    return Capture(state=dict(tensors), rank=rank, **more)


# ---- through FlashCheckpoint


def test_shards_in_plain_tensors_are_refused_before_anything_is_saved(world: World, tmp_path: Path) -> None:
    """Two ranks with different weights under one name: the same error on both, which says what to write."""

    def rank(number: int) -> None:
        torch.manual_seed(number)
        with FlashCheckpoint(str(tmp_path), model=nn.Linear(8, 8), every=1, store_every=1) as ckpt:
            ckpt.step(1)

    first, second = world.run(2, rank)
    assert str(first) == str(second)
    assert str(first).startswith("model.weight: rank 0 and rank 1 have different values")
    assert 'model={"tp0": model} on rank 0, model={"tp1": model} on rank 1' in str(first)
    assert "So do 1 more (model.bias)" in str(first)
    assert listing.steps(Place(str(tmp_path))) == []


def test_keys_of_their_own_keep_all_of_it(world: World, tmp_path: Path) -> None:
    """What the error says to write saves and restores both shards, with the options of both optimizers."""

    def parts(number: int, seed: int) -> dict[str, Any]:
        model = nn.Linear(8, 8)
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + seed, momentum=0.9)
        return {"model": {f"tp{number}": model}, "optimizer": {f"tp{number}": optimizer}}

    def rank(number: int) -> list[float]:
        with FlashCheckpoint(str(tmp_path), **parts(number, number), every=1, store_every=1) as ckpt:
            ckpt.step(1)
        other = parts(number, 7)
        with FlashCheckpoint(str(tmp_path), **other, every=1, store_every=1) as ckpt:
            assert ckpt.restore() == 1
        model, optimizer = (one[f"tp{number}"] for one in other.values())
        return [float(model.weight.detach().sum()), optimizer.param_groups[0]["lr"]]

    assert world.run(2, rank) == [[0.0, 0.1], [64.0, 1.1]]


def test_one_optimizer_name_for_different_parameters_is_refused(world: World) -> None:
    """Stages of a pipeline: tensors have names of their own, but the optimizer's groups are one object, which rank 0 saves."""

    def rank(number: int) -> None:
        model = nn.ModuleDict({f"layer{number}": nn.Linear(2, 2)})
        with FlashCheckpoint("", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), every=1) as ckpt:
            ckpt.step(1)

    for error in world.run(2, rank):
        assert str(error).startswith("optimizer.param_groups: rank 0 and rank 1")


@pytest.mark.parametrize(
    ("value", "differs"),
    [
        (lambda rank: rank, True),
        (lambda rank: [1, {"position": (rank, "a")}], True),
        (lambda _rank: [1, {"position": (7, "a")}], False),
        (lambda rank: {f"{rank}", "set"}, False),
    ],
)
def test_numbers_in_state_that_differ_are_refused(world: World, value: Callable[[int], Any], *, differs: bool) -> None:
    """A sampler's position in state= is rank 0's for all after a restore; what does not look alike everywhere is not compared."""

    def rank(number: int) -> None:
        with FlashCheckpoint("", state={"data": {"sampler": value(number)}}, every=1) as ckpt:
            ckpt.step(1)

    for error in world.run(2, rank):
        if differs:
            assert str(error).startswith("state.data.sampler")
            assert "give what each rank has of its own as extra=" in str(error).lower()
        else:
            assert error is None


def test_only_the_first_save_is_compared_but_with_full_every_one_is(world: World) -> None:
    """And "off" compares nothing: rank 0's values count."""

    def rank(verify: str, differs_at: int) -> Callable[[int], int]:
        def run(number: int) -> int:
            tensor = torch.zeros(8)
            ckpt = FlashCheckpoint("", state={"a": tensor}, every=2, verify=verify)
            for step in range(1, 7):
                if step == differs_at:
                    tensor.fill_(number)
                ckpt.step(step)
            ckpt.close()
            return step

        return run

    assert world.run(2, rank("sample", 3)) == [6, 6]
    assert all("state.a: rank 0 and rank 1" in str(one) for one in world.run(2, rank("full", 3)))
    assert all(
        "give what each rank has of its own as extra=" in str(one).lower() for one in world.run(2, rank("sample", 1))
    )
    assert world.run(2, rank("off", 1)) == [6, 6]


def test_what_each_rank_has_of_its_own_is_not_compared(world: World) -> None:
    """``extra`` with large tensors, and random numbers."""

    class Own:
        def __init__(self, number: int) -> None:
            self.tensor = torch.full((100_000,), float(number))

        def state_dict(self) -> dict[str, Any]:
            return {"tensor": self.tensor}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tensor = state["tensor"]

    def rank(number: int) -> bool:
        with FlashCheckpoint("", extra=Own(number), state={"a": torch.ones(3)}, every=1) as ckpt:
            return ckpt.save(1)

    assert world.run(2, rank) == [True, True]


def test_ranks_that_do_not_wait_are_compared_by_the_later_one(world: World) -> None:
    """Not coupled: no rank waits for another; whichever saves second says so."""
    first_saved = threading.Event()

    def rank(number: int) -> str:
        ckpt = FlashCheckpoint("", state={"a": torch.full((8,), float(number))}, every=1, coupled=False)
        ckpt.restore()
        if number == 0:
            assert first_saved.wait(LIMIT_S)
        try:
            ckpt.step(1)
        except SpecError as error:
            return str(error)
        finally:
            first_saved.set()
        return ""

    later, earlier = world.run(2, rank)
    assert earlier == ""
    assert later.startswith("state.a: rank 0 and rank 1 have different values")


# ---- what is compared


def test_equal_ranks_say_one_small_thing(world: World) -> None:
    """However many tensors there are."""
    captures = [of({f"t{number}": torch.arange(100.0) for number in range(300)}, rank) for rank in range(4)]
    assert world.compared(captures) == ["", "", "", ""]
    assert max(world.sent.values()) < 100


def test_the_error_names_who_agrees_with_whom(world: World) -> None:
    """Rank 0 and 2 against 1 and 3, also where rank 0 does not have the tensor at all."""
    captures = [of({"w": torch.full((9,), float(rank % 2))}, rank) for rank in range(4)]
    assert all("ranks 0, 2; ranks 1, 3" in one for one in world.compared(captures))
    captures = [of({"w" if rank else "v": torch.full((9,), float(rank))}, rank) for rank in range(3)]
    errors = world.compared(captures)
    assert len(set(errors)) == 1
    assert errors[0].startswith("state.w: rank 1 and rank 2")


@pytest.mark.parametrize("at", [0, 1_234_567, 3_999_999])
def test_full_sees_a_single_bit(world: World, at: int) -> None:
    """Samples see both ends; all bytes are looked at when that is asked for."""
    tensors = [torch.zeros(1_000_000), torch.zeros(1_000_000)]
    tensors[1].view(torch.uint8)[at] = 1
    captures = [of({"w": one}, rank) for rank, one in enumerate(tensors)]
    assert all(world.compared(captures, full=True))
    assert any(world.compared(captures)) == (at != 1_234_567)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (7, 3), (300, 500)])
def test_strides_do_not_matter(world: World, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The same values in another order in memory are the same values; another dtype is not."""
    torch.manual_seed(0)
    one = torch.rand(shape).mul(9).to(dtype)
    other = one.mT.contiguous().mT if one.dim() == 2 else one.clone()
    for full in (False, True):
        assert not any(world.compared([of({"w": one}), of({"w": other}, 1)], full=full))
    if shape == (300, 500):
        changed = other.clone()
        changed[0, 0] = ~changed[0, 0] if dtype == torch.bool else changed[0, 0] + 1
        assert all(world.compared([of({"w": one}), of({"w": changed}, 1)]))
        assert all(world.compared([of({"w": torch.zeros(shape)}), of({"w": torch.zeros(shape, dtype=torch.int32)}, 1)]))


def test_samples_of_a_device_are_gathered_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to the host for all tensors, with the same digests as in the host's memory."""
    chunks = [
        Chunk(f"t{number}", (), torch.arange(float(size)), "float32", (size,), (0,), live=True)
        for number, size in enumerate((1, 5, 100_000))
    ]
    here = replicas._sampled(chunks)
    copies = []
    monkeypatch.setattr(replicas, "_device", lambda tensor: "cuda:0", raising=True)
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: copies.append(len(tensors)) or cat(tensors))  # type: ignore[func-returns-value]
    assert replicas._sampled(chunks) == here
    assert copies == [3]


# ---- buffers


class Wrapped(DistributedDataParallel):
    """A DDP model without a process group."""

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool) -> None:
        nn.Module.__init__(self)
        self.module, self.broadcast_buffers, self.parameters_to_ignore = module, broadcast_buffers, set()


def norms() -> list[nn.Module]:
    """BatchNorm that has seen other data on each rank."""
    found = [nn.BatchNorm1d(4) for _ in range(2)]
    for rank, one in enumerate(found):
        one.running_mean.fill_(rank)  # type: ignore[union-attr,operator]
    return found


@pytest.mark.parametrize("bare", [False, True])
def test_buffers_that_ddp_broadcasts_may_differ(world: World, bare: bool) -> None:
    """Between two forwards they do, and rank 0's count; also where the script gives the bare model."""
    wrapped = [Wrapped(one, broadcast_buffers=True) for one in norms()]
    given = [one.module if bare else one for one in wrapped]
    assert world.compared([Capture(model=one, rank=rank) for rank, one in enumerate(given)]) == ["", ""]


def test_buffers_that_nobody_broadcasts_may_not(world: World) -> None:
    """The error says what to do about buffers."""
    wrapped = [Wrapped(one, broadcast_buffers=False) for one in norms()]
    for given in (wrapped, norms()):
        errors = world.compared([Capture(model=one, rank=rank) for rank, one in enumerate(given)])
        assert all(one.startswith("model.running_mean: rank 0 and rank 1") and "SyncBatchNorm" in one for one in errors)


# ---- DTensors


def in_world(size: int, build: Callable[[int], torch.Tensor]) -> list[replicas.Digests]:
    """By rank the digests of a DTensor and of a plain step counter. Each rank is a process: torch remembers its mesh."""
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()

    def become(rank: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        capture = of({"w": build(rank), "step": torch.tensor(3.0)}, rank)
        told.put((rank, dict(replicas.digests(capture, capture.chunks(), full=False))))

    found = {}
    for rank in range(size):
        process = context.Process(target=become, args=(rank,))
        process.start()
        process.join(LIMIT_S)
        assert process.exitcode == 0
        number, digests = told.get()
        found[number] = digests
    return [found[rank] for rank in range(size)]


def sharded(shape: tuple[int, ...], placed: Sequence[Any], value: Callable[[int], float]) -> list[replicas.Digests]:
    """A tensor of 8 x 4, laid over a mesh of this shape."""

    def build(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", shape)
        cut = math.prod(1 if one.is_replicate() else shape[number] for number, one in enumerate(placed))
        local = torch.full((8 // cut, 4), float(value(rank)))
        return DTensor.from_local(local, mesh, placed, run_check=False, shape=torch.Size((8, 4)), stride=(4, 1))

    return in_world(math.prod(shape), build)


def verdicts(world: World, found: list[replicas.Digests]) -> list[Any]:
    """What the ranks say to that."""
    return world.run(len(found), lambda rank: replicas.compare(found[rank], world.meeting()))


def test_shards_of_fsdp_are_nobody_elses(world: World) -> None:
    """They differ, and that is right; the step counters are replicas, and compared."""
    found = sharded((4,), [Shard(0)], float)
    assert [[one.name for its in each.values() for one in its] for each in found] == [["state.step"]] * 4
    assert verdicts(world, found) == [None] * 4


def test_replicas_of_shards_are_compared(world: World) -> None:
    """HSDP: ranks 0 and 2 hold the first half, 1 and 3 the second; and tensor parallel weights over replicated data."""
    placed = [Replicate(), Shard(0)]
    assert verdicts(world, sharded((2, 2), placed, lambda rank: rank % 2)) == [None] * 4
    errors = verdicts(world, sharded((2, 2), placed, lambda rank: 9.0 if rank == 3 else rank % 2))
    assert all(str(one).startswith("state.w: rank 1 and rank 3 have different values") for one in errors)
    assert verdicts(world, sharded((2, 2), [Replicate(), Replicate()], lambda _rank: 1.0)) == [None] * 4
    assert all(map(str, verdicts(world, sharded((2, 2), [Replicate(), Replicate()], float))))


def test_two_meshes_with_one_name_are_compared(world: World) -> None:
    """Two stages, each sharded over a mesh of its own: without keys of their own one would take the other's place."""

    def build(rank: int) -> torch.Tensor:
        mesh = DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])
        local = torch.full((4, 4), float(rank))
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1))

    errors = verdicts(world, in_world(4, build))
    assert len(set(map(str, errors))) == 1
    assert str(errors[0]).startswith("state.w: rank 0 and rank 2 have different values")
