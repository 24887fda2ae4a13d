"""Nodes with states in memory, without agents, and ranks that restore from them together: what tests of restores are made of."""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from dlrover_adapters.checkpoint.hashing import digest, digests
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import CUT, Item, Table, pack_blob
from dlrover_adapters.checkpoint.table import light as lightened
from dlrover_adapters.torch.checkpoint.capture import Target
from dlrover_adapters.torch.checkpoint.ladder import RestoreFailed
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.restore import Restored, restore
from dlrover_adapters.torch.checkpoint.sources import Mismatch
from dlrover_adapters.torch.checkpoint.trained import LEASED
from dlrover_adapters.torch.checkpoint.vault import (
    MEMORY,
    Fetched,
    Holding,
    Inventory,
    VaultRefused,
)
from dlrover_core.checkpoint.arena import PAGE, Control, Geometry, Stamp

LIMIT_S = 30.0
ROWS = 12
RUN = "run-1"
_T = TypeVar("_T")


def state(step: int) -> dict[str, Any]:
    """The whole state after a step: its tensors differ in every byte from those of other steps."""
    make = torch.Generator().manual_seed(step)
    return {
        "model.w": torch.randn(ROWS, 5, generator=make),
        "model.half": torch.randn(ROWS, 3, generator=make).to(torch.bfloat16),
        "model.scalar": torch.tensor(float(step)),
        "model.empty": torch.empty(0, 4),
        "optimizer.m": torch.randn(ROWS, 7, 2, generator=make).double(),
        "optimizer.step": torch.tensor(step),
    }


class Share(NamedTuple):
    """What one rank has of a tensor."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    write: bool = True


def sharded(rank: int, world: int) -> list[Share]:
    """As FSDP2 does: rows of everything that has some, uneven where they do not divide; the rest everywhere."""
    found = []
    rows = -(-ROWS // world)
    begin, end = min(ROWS, rank * rows), min(ROWS, (rank + 1) * rows)
    for name, tensor in state(0).items():
        if tensor.dim() and tensor.shape[0] == ROWS:
            if end > begin:
                found.append(Share(name, (begin, *[0] * (tensor.dim() - 1)), (end - begin, *tensor.shape[1:])))
        else:
            found.append(Share(name, (0,) * tensor.dim(), tuple(tensor.shape), rank == 0))
    return found


def replicated(rank: int, world: int, nproc: int) -> list[Share]:
    """As DDP: everything is everywhere; a node's ranks keep a share each."""
    local = rank % nproc
    return [
        Share(name, (0,) * tensor.dim(), tuple(tensor.shape), rank < nproc)
        for number, (name, tensor) in enumerate(state(0).items())
        if number % nproc == local
    ]


def box(share: Share) -> tuple[slice, ...]:
    """Of a tensor."""
    return tuple(slice(at, at + length) for at, length in zip(share.offsets, share.shape, strict=True))


class Arena:
    """One rank's memory with states, one per slot."""

    def __init__(
        self,
        rank: int,
        world: int,
        nproc: int,
        shares: list[Share],
        holders: tuple[tuple[int, ...], ...],
        *,
        layout: int = 7,
        own: tuple[int, ...] = (),
        light: bool = False,
        leased: bool = False,
    ) -> None:
        self.rank, self.world, self.layout, self.shares = rank, world, layout, shares
        items, at = [], 0
        for share in shares:
            whole = state(0)[share.name]
            size = whole[box(share)].nbytes
            dtype = str(whole.dtype).removeprefix("torch.")
            items.append(
                Item(share.name, dtype, tuple(whole.shape), share.offsets, share.shape, at, size, write=share.write)
            )
            at += -(-size // 64) * 64
        objects = ("extra", "rank.0.rng") if rank == 0 else (f"rank.{rank}.rng",)
        objects += (f"rank.{rank}.{LEASED}",) if leased else ()
        whole_table = Table(layout, world, rank, holders, tuple(items), objects, own=own)
        if light:
            whole_table, _ = lightened(whole_table)
            self.shares, items, at = [], [], 0
        table = whole_table.packed()
        self.items = items
        self.sizes = Geometry(3, len(table), 65536, at)
        self.fd = os.memfd_create("arena")
        os.ftruncate(self.fd, self.sizes.total_bytes)
        self.map = mmap.mmap(self.fd, 0)
        self.map[PAGE : PAGE + len(table)] = table
        self.control = Control(self.map, self.sizes)
        self.control.make(
            layout=layout,
            rank=rank,
            world=world,
            local_rank=rank % nproc,
            table_bytes=len(table),
            table_digest=digest(table),
        )
        self.sequence = 0

    def save(
        self,
        step: int,
        *,
        generation: int = 1,
        slot: int = 0,
        hashed: bool = True,
        cut: bytes = b"",
        trained: bytes = b"",
    ) -> None:
        """The state after a step; ``cut``: with this position in the data; ``trained``: with these words of its rank."""
        self.sequence += 1
        whole, begin = state(step), self.sizes.data_at(slot)
        for share, item in zip(self.shares, self.items, strict=True):
            raw = whole[share.name][box(share)].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self.map[begin + item.at : begin + item.at + len(raw)] = raw
        mine = {f"rank.{self.rank}.rng": saved(f"rng {self.rank} of {step}"), "extra": saved({"position": step})}
        mine |= {f"rank.{self.rank}.{LEASED}": saved(trained)} if trained else {}
        blob = pack_blob({**mine, CUT: cut} if cut else mine)
        at = self.sizes.blob_at(slot)
        self.map[at : at + len(blob)] = blob
        self.control.publish(slot, Stamp(generation, step, self.sequence, len(blob), digest(blob)))
        if hashed:
            self.hash(slot)

    def hash(self, slot: int) -> None:
        """As the saver does."""
        view = SlotView(self.map, slot)
        for number, one in enumerate(digests(view.data)):
            at = self.sizes.digests_at(slot) + 8 * number
            self.map[at : at + 8] = one.to_bytes(8, "little")
        self.control.note_hashed(slot, view.stamp.sequence)
        view.release()

    def damage(self, slot: int = 0, at: int = 1) -> None:
        """One bit of the data."""
        self.map[self.sizes.data_at(slot) + at] ^= 0x40


def saved(value: Any) -> bytes:
    """By torch.save."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Told(NamedTuple):
    """What of the agent's first word is needed."""

    node: str
    run: str = RUN
    generation: int = 2
    resume_step: int = -1
    lenders: tuple[tuple[str, int, int], ...] = ()


class FakeNode:
    """A node's agent: arenas by number, and what its ranks told. ``others``: all nodes by their address."""

    def __init__(self, others: dict[str, FakeNode], committed: int = -1) -> None:
        self.address = f"node-{len(others)}:1"
        others[self.address] = self
        self.others, self.committed = others, committed
        self.arenas: dict[int, tuple[str, Arena]] = {}
        self.reports: list[tuple[int, str, tuple[tuple[str, str], ...]]] = []
        self.losses: list[str] = []
        self.fetched: list[int] = []
        self.heads: list[int] = []
        self.down = False
        self.lenders: tuple[tuple[str, int, int], ...] = ()

    @property
    def told(self) -> Told:
        """As `Vault`."""
        return Told(self.address, resume_step=10, lenders=self.lenders)

    def has(self, arena: Arena, kind: str = MEMORY) -> Arena:
        """From now on."""
        self.arenas[len(self.arenas) + 1] = (kind, arena)
        return arena

    def inventory(self) -> Inventory:
        """As `Vault`."""
        return Inventory(
            tuple(
                Holding(number, kind, one.rank, one.world, stamp.generation, stamp.step, one.layout, slot)
                for number, (kind, one) in self.arenas.items()
                for slot, stamp in one.control.stamps()
            ),
            self.address,
            self.committed,
        )

    def borrow(self, holding: int) -> int:
        """As `Vault`."""
        return os.dup(self.arenas[holding][1].fd)

    def fetch(self, address: str, rank: int, generation: int, step: int, layout: int) -> Fetched:
        """As `Vault`; verified, as peers do."""
        found = self._brought(address, rank, generation, step, layout)
        self.fetched.append(rank)
        return found

    def _brought(
        self, address: str, rank: int, generation: int, step: int, layout: int, *, full: bool = True
    ) -> Fetched:
        peer = self.others[address]
        if peer.down:
            raise VaultRefused(f"nobody answers at {address}")
        for _kind, one in peer.arenas.values():
            for slot, stamp in one.control.stamps():
                if (one.rank, *stamp[:2], one.layout) == (rank, generation, step, layout or one.layout):
                    view = SlotView(one.map, slot)
                    try:
                        view.verify(full=full)
                    except ValueError as error:
                        raise VaultRefused(str(error)) from error
                    finally:
                        view.release()
                    return Fetched(0, 1, alone(one, slot))
        raise VaultRefused(f"{address} has no step {step} of rank {rank}")

    def head(self, address: str, rank: int, generation: int, step: int, layout: int) -> Fetched:
        """As `Vault`: without the data."""
        found = self._brought(address, rank, generation, step, layout, full=False)
        self.heads.append(rank)
        memory = mmap.mmap(found.fd, 0)
        view = SlotView(memory, 0)
        at = view.control.geometry.data_at(0)
        memory[at : at + len(view.data)] = bytes(len(view.data))
        view.release()
        memory.close()
        return found

    def restored(self, step: int, tier: str, took_us: int, fell: Any = (), of: int = 0, cut: bytes = b"") -> None:
        """As `Vault`."""
        self.reports.append((step, tier, tuple(fell)))

    def lost(self, words: str) -> None:
        """As `Vault`."""
        self.losses.append(words)


def alone(arena: Arena, slot: int) -> int:
    """One slot as an arena of its own, as it comes from a peer."""
    sizes = dataclasses.replace(arena.sizes, slots=1)
    fd = os.memfd_create("fetched")
    os.ftruncate(fd, sizes.total_bytes)
    memory = mmap.mmap(fd, 0)
    table = arena.map[PAGE : PAGE + arena.sizes.table_bytes]
    memory[PAGE : PAGE + len(table)] = table
    begin, end = arena.sizes.digests_at(slot), arena.sizes.data_at(slot) + arena.sizes.data_bytes
    memory[sizes.digests_at(0) : sizes.digests_at(0) + end - begin] = arena.map[begin:end]
    control, stamp = Control(memory, sizes), arena.control.stamp(slot)
    assert stamp is not None
    words = arena.control
    control.make(
        layout=words.layout, rank=words.rank, world=words.world, local_rank=words.local_rank, table_bytes=len(table),
        table_digest=words.table_digest,
    )  # fmt: skip
    control.publish(0, stamp)
    control.note_hashed(0, stamp.sequence)
    control.release()
    memory.close()
    return fd


class Live:
    """A worker's tensors: garbage until they are filled."""

    def __init__(self, rank: int, shares: list[Share]) -> None:
        self.rank, self.shares = rank, shares
        self.tensors = {
            share.name: torch.full_like(state(0)[share.name][box(share)].contiguous(), 77) for share in shares
        }
        self.objects: dict[str, Any] = {}
        self.wrong = ""

    def targets(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[Target]:
        """As `Capture`."""
        if self.wrong:
            raise Mismatch(self.wrong)
        whole = state(0)
        assert all(shapes[share.name][1] == tuple(whole[share.name].shape) for share in self.shares)
        return [
            Target(share.name, self.tensors[share.name], tuple(whole[share.name].shape), share.offsets)
            for share in self.shares
        ]

    def wants(self, name: str) -> bool:
        """As `Capture`."""
        return not name.startswith("rank.") or name.startswith(f"rank.{self.rank}.")

    def lacks(self, objects: Collection[str]) -> str:
        """As `Capture`."""
        name = f"rank.{self.rank}.rng"
        return "" if name in objects else name

    def load(self, objects: Mapping[str, Any]) -> None:
        """As `Capture`."""
        self.objects = dict(objects)

    def is_at(self, step: int) -> bool:
        """Bit for bit."""
        whole = state(step)
        return all(
            torch.equal(bits(self.tensors[share.name]), bits(whole[share.name][box(share)].contiguous()))
            for share in self.shares
        )

    def untouched(self) -> bool:
        """Nothing was written."""
        return all(bool((one == 77).all()) for one in self.tensors.values())


def bits(tensor: Any) -> Any:
    """Its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


class World:
    """Ranks that restore together, in threads; ``nodes[i // nproc]`` is the agent of rank i."""

    def __init__(self, nodes: list[Any], lives: list[Live]) -> None:
        self.nodes, self.lives = nodes, lives
        self.nproc = len(lives) // len(nodes)

    def restore(self, **more: Any) -> list[Restored]:
        """What each rank got; the first error is raised."""
        return self.together(
            lambda rank, meeting: restore(self.lives[rank], self.nodes[rank // self.nproc], meeting, **more)
        )

    def together(self, do: Callable[[int, Meeting], _T]) -> list[_T]:
        """What each rank gets who does something in a meeting of all; the first error is raised."""
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def one(rank: int) -> _T | Exception:
            store = TCPStore(
                "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
            )
            try:
                return do(rank, Meeting(store, rank, len(self.lives), rank % self.nproc, limit_s=LIMIT_S))
            except Exception as error:  # noqa: BLE001  # all ranks are to end
                return error

        with ThreadPoolExecutor(len(self.lives)) as pool:
            found = list(pool.map(one, range(len(self.lives))))
        errors = [one for one in found if isinstance(one, Exception)]
        if errors:
            raise next((one for one in errors if not isinstance(one, RestoreFailed)), errors[0])
        return [one for one in found if not isinstance(one, Exception)]


def fsdp(nodes: list[FakeNode], world: int, *steps: int, hashed: bool = True) -> list[Arena]:
    """What ``world`` sharded ranks left in the memory of nodes."""
    nproc = world // len(nodes)
    holders = tuple((rank,) for rank in range(world))
    arenas = [
        nodes[rank // nproc].has(Arena(rank, world, nproc, sharded(rank, world), holders)) for rank in range(world)
    ]
    for arena in arenas:
        for slot, step in enumerate(steps):
            arena.save(step, slot=slot, hashed=hashed)
    return arenas


def ddp(nodes: list[FakeNode], world: int, *steps: int, own: bool = False) -> list[Arena]:
    """The same for replicas: each node has all of it; ``own``: beside what its ranks alone have."""
    nproc = world // len(nodes)
    holders = tuple(tuple(range(local, world, nproc)) for local in range(nproc))
    arenas = [
        nodes[rank // nproc].has(
            Arena(rank, world, nproc, replicated(rank, world, nproc), holders, own=tuple(range(world)) if own else ())
        )
        for rank in range(world)
    ]
    for arena in arenas:
        for slot, step in enumerate(steps):
            arena.save(step, slot=slot)
    return arenas


def objects_of(rank: int, world: int, nproc: int, *steps: int) -> Arena:
    """A copy of what only one of these replicas has."""
    holders = tuple(tuple(range(local, world, nproc)) for local in range(nproc))
    shares, own = replicated(rank, world, nproc), tuple(range(world))
    found = Arena(rank, world, nproc, shares, holders, own=own, light=True)
    for slot, step in enumerate(steps):
        found.save(step, slot=slot)
    return found


def everything() -> list[Share]:
    """What a rank of DDP needs: all."""
    return [Share(name, (0,) * tensor.dim(), tuple(tensor.shape)) for name, tensor in state(0).items()]


def store(place: str, arenas: list[Arena], slot: int = 0) -> None:
    """Write a step to storage, complete."""
    for arena in arenas:
        view = SlotView(arena.map, slot)
        write_part(view, Place(place), run=RUN)
        step = view.stamp.step
        view.release()
    seal(Place(place), step, [arena.rank for arena in arenas])


@pytest.fixture
def cluster() -> dict[str, FakeNode]:
    """Nodes by address."""
    return {}


def newcomers(cluster: dict[str, FakeNode]) -> tuple[list[FakeNode], World]:
    """Two nodes of two replicas; all ranks run again."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    return nodes, World(nodes, [Live(rank, everything()) for rank in range(4)])
