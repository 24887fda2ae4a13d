"""For scripts that save by torch.distributed.checkpoint and want to keep their calls: a stager, a writer and a reader of ours.

    writer, stager = FlashStorageWriter("file:///ckpts/run1"), FlashStager()
    dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, async_stager=stager)
    dcp.load(state, storage_reader=FlashStorageReader("file:///ckpts/run1"))        # the newest, or checkpoint_id="step-120"

The last number in ``checkpoint_id`` is the step. What lies under the URL are ordinary checkpoints of torch's.
Under an agent of ours a save is done when all ranks have the state in the agent's memory; the saver writes it, and the job's log
says when it is committed. Where saves come faster than storage takes them, newer ones go there in place of older ones, and a save
waits if every slot is being read. Elsewhere a save is done when it is on storage. Planning and resharding are torch's planner's.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dlrover_adapters.checkpoint.manifests import step_of
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader, buffer_of, read_seal
from dlrover_adapters.checkpoint.seal import metadata_of, seal
from dlrover_core.errors import CoreError, SpecError

from .remembered import Remembered, recalled
from .shelf import Piece, Shelf, layout_of
from .vault import Vault, VaultGone

log = logging.getLogger("dlrover.torch")

WAIT_S = 600.0
"""How long a save waits for memory that storage or a partner node is reading: as long as DCP's own would wait for storage."""
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def step_in(checkpoint_id: object) -> int | None:
    """The last number of the last component; None: there is none. Raises `SpecError` for an id without a number."""
    if checkpoint_id is None or not str(checkpoint_id):
        return None
    found = _NUMBER.search(str(checkpoint_id).rstrip("/").rpartition("/")[2])
    if found is None:
        raise SpecError(
            "checkpoint_id", f"{str(checkpoint_id)!r} has no number in it: end it with the step, as in 'step-120'"
        )
    return int(found[1])


def _vault() -> Vault | None:
    if not Vault.here():
        return None
    try:
        return Vault.connect()
    except VaultGone as error:
        log.warning("states are not kept in memory: %s", error)
        return None


class FlashStager(AsyncStager):
    """Copies a state dict into memory that is used again and again, so that only the first copy touches fresh pages.

    Keyed by where a tensor is in the state dict, not by its storage: dicts that are made anew for every save hit too. Two sets
    take turns: training may go on, and the save before may still be read. Wait for a save before the second one after it begins.
    """

    _synchronize_after_execute = False  # staged when `stage` returns

    def __init__(self) -> None:
        self._sets: tuple[dict[tuple[Any, ...], torch.Tensor], ...] = ({}, {})
        self._turn = 0

    def stage(self, state_dict: Any) -> Any:
        """The same state dict with copies of its tensors on the CPU."""
        self._turn ^= 1
        with torch.no_grad():
            copied = self._copied(state_dict, (), self._sets[self._turn])
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return copied

    def synchronize_staging(self) -> None:
        """It is staged."""

    def close(self) -> None:
        """Let the memory go."""
        self._sets = ({}, {})

    def _copied(self, value: Any, path: tuple[Any, ...], room: dict[tuple[Any, ...], torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            shard = getattr(value, "_local_tensor", None)
            if shard is None:
                return self._copy(value, path, room)
            from torch.distributed.tensor import DTensor

            assert isinstance(value, DTensor)
            return DTensor.from_local(
                self._copy(shard, path, room),
                _on_cpu(value.device_mesh),
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        if isinstance(value, dict):
            return {key: self._copied(one, (*path, key), room) for key, one in value.items()}
        if type(value) in {list, tuple}:
            return type(value)(self._copied(one, (*path, number), room) for number, one in enumerate(value))
        return value

    def _copy(
        self, tensor: torch.Tensor, path: tuple[Any, ...], room: dict[tuple[Any, ...], torch.Tensor]
    ) -> torch.Tensor:
        there = room.get(path)
        if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
            there = room[path] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and torch.cuda.is_available()
            )
        return there.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def _on_cpu(mesh: Any) -> Any:
    if mesh.device_type == "cpu":
        return mesh
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)


class _Told(NamedTuple):
    """What the coordinator tells every rank with its plan."""

    layout: int
    world: int


class FlashStorageWriter(StorageWriter):
    """Writes states under ``url``, the newest ``keep`` of them (0: all). One for many saves; `close` it after the last one."""

    def __init__(self, url: str, *, keep: int = 0) -> None:
        super().__init__()
        self.url, self.keep = url, keep
        self._step: int | None = None
        self._rank, self._told = 0, _Told(0, 1)
        self._shelf: Shelf | None = None
        self._known: dict[int, Any] = {}

    # ---- torch asks for, in this order

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new save begins; ``checkpoint_id`` ends with its step."""
        self._step = step_in(checkpoint_id)
        if self._step is None:
            raise SpecError("checkpoint_id", "is missing: end it with the step, as in 'step-120'")

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002  # torch's name
        """Who we are."""
        rank = kwargs.get("rank")
        initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if initialized else 0
        if not kwargs.get("use_collectives", True):
            raise SpecError("use_collectives", "must be True: ranks that do not meet have no state in common")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the layout that the plans of all ranks make together; an unchanged one (plan caching) is the one of before."""
        for rank, plan in enumerate(plans):
            if getattr(plan, "usable", True):
                self._known[rank] = [
                    (
                        one.index.fqn,
                        one.index.offset,
                        one.tensor_data.chunk.sizes,
                        str(one.tensor_data.properties.dtype),
                    )
                    if one.tensor_data is not None
                    else one.index.fqn
                    for one in plan.items
                ]
        told = _Told(layout_of(sorted(self._known.items())), len(plans))
        return [_with(plan, told) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what is planned for this rank into memory; without an agent, write it."""
        assert self._step is not None, "reset comes first"
        self._told = plan.storage_data
        pieces, objects, results = [], {}, []
        for one in plan.items:
            found = planner.resolve_data(one)
            if one.type == WriteItemType.BYTE_IO:
                objects[one.index.fqn] = found.getvalue()  # type: ignore[union-attr]  # by its type it is a BytesIO
                size = len(objects[one.index.fqn])
            else:
                assert isinstance(found, torch.Tensor)
                assert one.tensor_data is not None
                offsets = tuple(one.tensor_data.chunk.offsets)
                pieces.append(Piece(one.index.fqn, found, tuple(one.tensor_data.size), offsets))
                size = found.nbytes
            results.append(WriteResult(one.index, size, None))
        mappings = getattr(planner, "mappings", {})
        names = (*(one.name for one in pieces), *objects)
        paths = tuple((name, tuple(mappings[name])) for name in dict.fromkeys(names) if name in mappings)
        shelf = self._opened()
        holders = tuple((rank,) for rank in range(self._told.world))
        slot = shelf.put(
            self._step, pieces, objects, layout=self._told.layout, holders=holders, paths=paths, wait_s=WAIT_S
        )
        if shelf.vault is None:
            view = shelf.view(slot)
            try:
                write_part(view, Place(self.url), run="")
            finally:
                view.release()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002  # torch's names
        """Everybody has it. Without an agent: make it a checkpoint. With one the agents do, once all parts are on storage."""
        assert self._step is not None, "reset comes first"
        if self._opened().vault is None:
            place = Place(self.url)
            seal(place, self._step, range(len(results)))
            if self.keep:
                from dlrover_adapters.checkpoint.listing import retain

                retain(place, self.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Does it end with a step?"""
        try:
            return step_in(checkpoint_id) is not None
        except SpecError:
            return False

    def close(self) -> None:
        """No more saves. Idempotent."""
        if self._shelf is not None:
            self._shelf.close()
            if self._shelf.vault is not None:
                self._shelf.vault.close()
            self._shelf = None

    def _opened(self) -> Shelf:
        if self._shelf is None:
            vault = _vault()
            if vault is not None and (vault.rank, vault.world) != (self._rank, self._told.world):
                log.warning(
                    "states of a part of the world are written to storage at once: the agent keeps those of all ranks"
                )
                vault.close()
                vault = None
            self._shelf = Shelf(
                self.url, rank=self._rank, world=self._told.world, kind="dcp", keep=self.keep, vault=vault
            )
        return self._shelf


def _with(plan: SavePlan, told: _Told) -> SavePlan:
    import dataclasses

    return dataclasses.replace(plan, storage_data=told)


class FlashStorageReader(StorageReader):
    """Reads what was saved under ``url``: from memory if the agents of this job hold it, else from storage; always verified.

    ``memory=False``: storage only. With memory every rank of the job must load, at the same time. Afterwards `tier` and `step`
    say what was read.
    """

    def __init__(self, url: str, *, memory: bool = True) -> None:
        super().__init__()
        self.url, self._memory = url, memory
        self.step: int | None = None
        self.tier = ""
        self._wanted: int | None = None
        self._remembered: Remembered | None = None
        self._reader: StepReader | None = None
        self._metadata: Metadata | None = None

    # ---- torch asks for, in this order

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new load begins; ``checkpoint_id`` ends with its step, None: the newest."""
        self._wanted = step_in(checkpoint_id)
        self._release()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What there is to read. On all ranks alike. Raises what storage raises, if there is nothing anywhere."""
        stored = None
        if self._memory:
            newest = self._newest_stored() if self._wanted is None else None
            self._remembered = recalled(_vault(), self._wanted, newest)
        if self._remembered is not None:
            self.step, self.tier = self._remembered.step, "memory"
            stored = self._remembered.metadata()
        else:
            step = self._wanted if self._wanted is not None else (self._newest_stored() or (-1, -1))[1]
            if step < 0:
                raise CoreError(f"{Place(self.url).shown()}: no complete checkpoint is there")
            self._reader = StepReader(Place(self.url), step)
            self.step, self.tier = step, "storage"
            stored = pickle.loads(metadata_of(self._reader.parts))  # noqa: S301  # made by us, a line before
        assert isinstance(stored, Metadata)
        return stored

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner asks for. Raises `CheckpointDamaged` where bytes on storage are not as they were written."""
        import io

        tensors: dict[MetadataIndex, list[Any]] = {}
        for one in plan.items:
            if one.type == LoadItemType.BYTE_IO:
                planner.load_bytes(one, io.BytesIO(self._object(one.storage_index.fqn)))
            else:
                tensors.setdefault(one.storage_index, []).append(one)
        for index, chunk in self._chunks(list(tensors)):
            for one in tensors[index]:
                box = tuple(slice(at, at + length) for at, length in zip(one.storage_offsets, one.lengths, strict=True))
                target = planner.resolve_tensor(one).detach()
                target.copy_(chunk[box])
                planner.commit_tensor(one, target)
        self._release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Does it end with a step?"""
        return FlashStorageWriter.validate_checkpoint_id(checkpoint_id)

    # ---- tiers

    def _object(self, name: str) -> bytes:
        if self._remembered is not None:
            return self._remembered.object(name)
        assert self._reader is not None
        return self._reader.object(name)

    def _chunks(self, wanted: list[MetadataIndex]) -> Iterator[tuple[MetadataIndex, torch.Tensor]]:
        if self._remembered is not None:
            for index in wanted:
                yield index, self._remembered.chunk(index.fqn, tuple(index.offset or ()))
            self._remembered.check()
            return
        assert self._reader is not None
        found, reads = [], []
        for index in wanted:
            offsets = tuple(index.offset or ())
            chunk = next(one for one in self._reader.items[index.fqn] if one.item.offsets == offsets)
            room = torch.empty(chunk.item.shape, dtype=getattr(torch, chunk.item.dtype))
            reads.append((chunk, buffer_of(room)))
            found.append((index, room))
        self._reader.read(reads)
        yield from found

    def _newest_stored(self) -> tuple[int, int] | None:
        """Generation and step of the newest complete checkpoint on storage."""
        place = Place(self.url)
        steps = sorted((step for step in (step_of(one.name) for one in place.ls("")) if step is not None), reverse=True)
        for step in steps:
            found = read_seal(place, step)
            if found is not None:
                return found.generation, step
        return None

    def _release(self) -> None:
        if self._remembered is not None:
            self._remembered.close()
        self._remembered = self._reader = None
