"""For scripts that save by torch.distributed.checkpoint and want to keep their calls: a stager, a writer and a reader of ours.

    writer, stager = FlashStorageWriter("file:///ckpts/run1"), FlashStager()
    dcp.async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer, async_stager=stager)
    dcp.load(state, storage_reader=FlashStorageReader("file:///ckpts/run1"))        # the newest, or checkpoint_id="step-120"

The last number in ``checkpoint_id`` is the step. What lies under the URL are ordinary checkpoints of torch's.
Under an agent of ours a save is done when all ranks have the state in the agent's memory; the saver writes it, and the job's log
says when it is committed. Where saves come faster than storage takes them, newer ones go there in place of older ones, and a save
waits if every slot is being read. Elsewhere a save is done when it is on storage. Planning and resharding are torch's planner's.

Wait for the future of one `async_save` before the next. Torch makes a thread for each, and their collectives on one group would
be taken for each other's; so here a save waits for the one before it, and a stager does not touch what a save still reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import re
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgpack
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dlrover_adapters.checkpoint.manifests import step_of
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import StepReader, buffer_of, read_seal
from dlrover_adapters.checkpoint.seal import metadata_of, seal
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.torch import steps
from dlrover_core.errors import CoreError, SpecError

from .flash import AgentGone
from .meeting import Meeting
from .opening import rewritten
from .remembered import Remembered, recalled
from .shelf import WAIT_S, Piece, Shelf, layout_of
from .staging import FlashStager
from .turns import Turns
from .vault import Vault, VaultGone

__all__ = ["FlashStager", "FlashStorageReader", "FlashStorageWriter", "step_in"]
log = logging.getLogger("dlrover.torch")

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
    """The line to the agent; None: there is none, as for all ranks. Raises `AgentGone`."""
    if not Vault.here():
        return None
    try:
        return Vault.connect()
    except VaultGone as error:
        # The others may have their lines: states of which they keep all parts but ours would never be whole.
        raise AgentGone(
            f"the agent of this node does not answer: {error}; nothing is saved on any rank. Save again; if it stays so, "
            "look at the load of this host, and at its agent's log"
        ) from error


def _line() -> Vault | None:
    """The same for loading, which all ranks do without memory where one has no line."""
    try:
        return _vault()
    except AgentGone as error:
        log.warning("memory is not read: %s", error.__cause__)
        return None


class _Told(NamedTuple):
    """What the coordinator tells every rank with its plan."""

    layout: int
    world: int


class _Save(threading.local):
    """What one save is about. Torch calls all hooks of one in one thread, and each asynchronous one in a thread of its own."""

    step: int | None = None
    written = -1


class FlashStorageWriter(StorageWriter):
    """Writes states under ``url``, the newest ``keep`` of them (0: all). One for many saves; `close` it after the last one."""

    def __init__(self, url: str, *, keep: int = 0) -> None:
        super().__init__()
        self.url, self.keep = url, keep
        self._save, self._turns = _Save(), Turns()
        self._rank, self._told = 0, _Told(0, 1)
        self._shelf: Shelf | None = None
        self._known: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which saves by itself (torch's ``AsyncCheckpointerType.PROCESS``)."""
        return {"url": self.url, "keep": self.keep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As made anew there."""
        self.__init__(**state)  # type: ignore[misc]  # what `__getstate__` says

    # ---- torch asks for, in this order

    def reset(self, checkpoint_id: Any = None) -> None:
        """A new save begins; ``checkpoint_id`` ends with its step. One that another thread began is waited for."""
        self._save.step = None
        step = step_in(checkpoint_id)
        if step is None:
            raise _missing()
        self._turns.wait(step)
        self._save.step = step

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: ARG002  # torch's name
        """Who we are."""
        if self._save.step is None:
            raise _missing()  # without an id torch does not call `reset`
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
        step, self._save.step = self._save.step, None
        assert step is not None, "reset comes first"
        self._save.written = step
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
            results.append(WriteResult(one.index, size, step))
        mappings = getattr(planner, "mappings", {})
        names = (*(one.name for one in pieces), *objects)
        paths = tuple((name, tuple(mappings[name])) for name in dict.fromkeys(names) if name in mappings)
        shelf = self._opened()
        holders = tuple((rank,) for rank in range(self._told.world))
        how: Any = {"layout": self._told.layout, "holders": holders, "paths": paths, "wait_s": WAIT_S}
        if shelf.vault is not None:
            shelf.put(step, pieces, objects, **how)
        else:
            with _kept(shelf, step, pieces, objects, how) as view, steps.phase("checkpoint"):
                write_part(view, Place(self.url), run="")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002  # torch's names
        """Everybody has it. Without an agent: make it a checkpoint. With one the agents do, once all parts are on storage."""
        saved = {one.storage_data: rank for rank, its in enumerate(results) for one in its}
        if len(saved) > 1:
            told = ", ".join(f"rank {rank} step {step}" for step, rank in saved.items())
            raise CoreError(
                f"ranks saved different steps: {told}; wait for the future of each save before the next one"
            )
        if self._shelf is not None and self._shelf.vault is None:
            place = Place(self.url)
            seal(place, self._save.written, range(len(results)))
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
        if self._shelf is not None and self._shelf.vault is not None and self._shelf.vault.gone:
            self.close()  # a line that failed once is of no use any more, and the agent may only have been slow
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


def _chunk_of(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    """By name and offsets; what is no tensor has none."""
    index = item.storage_index
    return index.fqn, tuple(index.offset or ()) if item.type != LoadItemType.BYTE_IO else ()


@contextlib.contextmanager
def _kept(shelf: Shelf, step: int, pieces: list[Piece], objects: dict[str, bytes], how: Any) -> Iterator[SlotView]:
    """A state in memory until it is written."""
    busy = shelf.put_busy(step, pieces, objects, **how)
    try:
        yield busy.view
    finally:
        busy.view.release()
        shelf.free(busy)


def _missing() -> SpecError:
    return SpecError("checkpoint_id", "is missing: end it with the step, as in 'step-120'")


def _with(plan: Any, told: Any) -> Any:
    return dataclasses.replace(plan, storage_data=told)


class _Found(NamedTuple):
    """What a rank says with its plan: what it is to read, and ``why`` it could not get all of it; and what all are told then.

    ``why`` in what they are told: they are to read this instead.
    """

    step: int
    tier: str
    why: str = ""


class FlashStorageReader(StorageReader):
    """Reads what was saved under ``url``: from memory if the agents of this job hold it, else from storage; always verified.

    ``memory=False``: storage only; name the step, since each rank looks for the newest by itself then, and one that is committed
    meanwhile would be another's (which is refused). With memory every rank of the job must load, at the same time. Afterwards
    `tier` and `step` say what was read. ``trusted``: objects on storage may be of any kind, as whoever can write there is trusted
    to run code here: torch's planner unpickles what it gets. Without, they are plain Python, tensors and numpy arrays, or loading
    fails.
    """

    def __init__(self, url: str, *, memory: bool = True, trusted: bool = False) -> None:
        super().__init__()
        self.url, self._memory, self._trusted = url, memory, trusted
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
        with steps.phase("checkpoint"):
            newest, meeting = None, Meeting.of_environment() if self._memory else None
            if self._wanted is None:
                newest = self._newest_stored() if meeting is None else self._newest_of(meeting)
            if meeting is not None:
                self._remembered = recalled(_line(), self._wanted, newest, meeting)
            if self._remembered is not None:
                self.step, self.tier = self._remembered.step, "memory"
                stored = self._remembered.metadata()
            else:
                self._open(self._wanted if self._wanted is not None else newest[1] if newest is not None else -1)
                assert self._reader is not None
                stored = pickle.loads(metadata_of(self._reader.parts))  # noqa: S301  # made by us, a line before
        assert isinstance(stored, Metadata)
        return stored

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is. What it needs of other nodes' memory is brought now, while all can still go on from storage."""
        why = ""
        if self._remembered is not None:
            with steps.phase("checkpoint"):
                why = self._remembered.bring(map(_chunk_of, plan.items))
        return cast(LoadPlan, _with(plan, _Found(self.step if self.step is not None else -1, self.tier, why)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are, of one step; from storage, where some rank could not get what it needs. Raises `CoreError`."""
        told = {rank: one.storage_data for rank, one in enumerate(plans) if isinstance(one.storage_data, _Found)}
        if len({one.step for one in told.values()}) > 1:
            found = ", ".join(f"rank {rank} step {one.step}" for rank, one in told.items())
            raise CoreError(
                f"ranks found different newest checkpoints, one was committed meanwhile: {found}; load again, and name the "
                'step: checkpoint_id="step-120"'
            )
        lost = "; ".join(f"rank {rank} says: {one.why}" for rank, one in told.items() if one.why)
        if not lost:
            return plans
        newest = self._newest_stored() if self._wanted is None else (0, self._wanted)
        if newest is None:
            raise CoreError(f"step {self.step} in memory cannot be read, {lost}; and no checkpoint is on storage")
        log.warning("step %s in memory is passed over for step %d on storage, %s", self.step, newest[1], lost)
        return [cast(LoadPlan, _with(one, _Found(newest[1], "storage", lost))) for one in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the planner asks for. Raises `CheckpointDamaged` where bytes on storage are not as they were written."""
        with steps.phase("checkpoint"):
            if isinstance(plan.storage_data, _Found) and plan.storage_data.why:
                self._fall(plan, plan.storage_data)
            self._fill(plan, planner)
        self._release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Does it end with a step?"""
        return FlashStorageWriter.validate_checkpoint_id(checkpoint_id)

    # ---- tiers

    def _open(self, step: int) -> None:
        if step < 0:
            raise CoreError(f"{Place(self.url).shown()}: no complete checkpoint is there")
        self._reader = StepReader(Place(self.url), step)
        self.step, self.tier = step, "storage"

    def _fall(self, plan: LoadPlan, told: _Found) -> None:
        """Read by a plan that was made for what is in memory what lies on storage, where the same ranks saved the same."""
        shapes = {}
        if self._remembered is not None:
            shapes = {one: self._remembered.shape(one) for one in map(_chunk_of, plan.items)}
        before = self.step
        self._release()
        self._open(told.step)
        assert self._reader is not None
        there = {(name, one.item.offsets): one.item.shape for name, its in self._reader.items.items() for one in its}
        there |= {(name, ()): () for name in self._reader.objects}
        if any(there.get(one) != shape for one, shape in shapes.items()):
            raise CoreError(
                f"step {before} in memory cannot be read, {told.why}; and step {told.step} on storage was saved by other ranks "
                "or is another state, so that what is planned does not fit it: load with FlashStorageReader(url, memory=False)"
            )

    def _fill(self, plan: LoadPlan, planner: LoadPlanner) -> None:
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

    def _object(self, name: str) -> bytes:
        if self._remembered is not None:
            return self._remembered.object(name)
        assert self._reader is not None
        raw = self._reader.object(name)
        return raw if self._trusted else rewritten(name, raw, where="FlashStorageReader")

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

    def _newest_of(self, meeting: Meeting) -> tuple[int, int] | None:
        """What rank 0 finds on storage, for all: a checkpoint may be committed while they look."""
        found = msgpack.unpackb(meeting.decide("dcp/stored", b"", lambda _: msgpack.packb(self._newest_stored())))
        return tuple(found) if found is not None else None

    def _newest_stored(self) -> tuple[int, int] | None:
        """Generation and step of the newest complete checkpoint on storage."""
        place = Place(self.url)
        there = (step for step in (step_of(one.name) for one in place.ls("")) if step is not None)
        for step in sorted(there, reverse=True):
            found = read_seal(place, step)
            if found is not None:
                return found.generation, step
        return None

    def _release(self) -> None:
        if self._remembered is not None:
            self._remembered.close()
        self._remembered = self._reader = None
