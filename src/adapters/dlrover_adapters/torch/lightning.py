"""Lightning's checkpoints, from memory: saved as fast as memory is copied, written to their files behind training's back.

    io = FlashCheckpointIO()
    trainer = Trainer(plugins=[io], callbacks=[ModelCheckpoint(every_n_train_steps=10, save_last=True)])
    trainer.fit(model, ckpt_path=io.newest())          # what was saved last, be its file there or not; None: nothing

The files are Lightning's own, at Lightning's own paths, and load without us. Under `dlrover-run` the memory is the agent's and
outlives the worker: a state that had not reached its file is written there by `newest`. Under other launchers it ends with the
process, and only saving is faster.

`FlashData` counts the samples of an `ElasticDataset`, and saves their position with the rest.

For strategies that hand the whole state to a `CheckpointIO`, on rank 0: one device, DDP. Made for Lightning 2.6.
"""

from __future__ import annotations

import copy
import io
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback

from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.torchfile import Leaf, save
from dlrover_core.checkpoint.arena import ArenaBroken
from dlrover_core.errors import CoreError, SpecError

from . import steps
from .checkpoint.meeting import Meeting
from .checkpoint.shelf import WAIT_S, Busy, NoSlot, Shelf, layout_of, whole
from .checkpoint.vault import MEMORY, Vault, VaultGone
from .data.dataset import ElasticDataset
from .data.loader import ElasticLoader

RESCUE_S = 3600.0
"""How long all ranks wait for rank 0 to write the file that was in memory only, and as long again."""
_REST, _PATH = "rest", "path"
_KIND = "lightning"

log = logging.getLogger("dlrover.torch")


class _Write(NamedTuple):
    """A file that is being written, or waits for that, and from where."""

    path: str
    busy: Busy


class FlashCheckpointIO(CheckpointIO):
    """Saves into memory at once, and into files later. One per Trainer; nothing is started before the first save."""

    def __init__(self) -> None:
        self._files = TorchCheckpointIO()
        self._shelf: Shelf | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._writing: dict[Future[None], _Write] = {}

    # ---- Lightning asks for

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy the state, and have it written to ``path``. A write that failed is raised by the next save, or by `teardown`."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options; fsspec reads keys from its environment")
        place, step = str(path), int(checkpoint.get("global_step", 0))
        with steps.phase("checkpoint"):
            tensors: list[torch.Tensor] = []
            rest = io.BytesIO()
            torch.save(_apart(checkpoint, tensors), rest)
            shelf = self._opened()
            pieces = [whole(f"t{number}", one) for number, one in enumerate(tensors)]
            objects = {_REST: rest.getvalue(), _PATH: os.fsencode(place)}
            how: Any = {
                "layout": layout_of((_KIND, [(str(one.dtype), tuple(one.shape)) for one in tensors])),
                "holders": ((shelf.rank,),),
            }
            busy = self._put(lambda wait_s: shelf.put_busy(step, pieces, objects, wait_s=wait_s, **how))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="dlrover-lightning")
        self._writing[self._pool.submit(_written, busy.view, place)] = _Write(place, busy)

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """From memory, where this host has it whole; else from its file."""
        self._finish(str(path))
        found = self._remembered(str(path))
        if found is not None:
            try:
                return dict(_together(found))
            except ArenaBroken as error:
                log.warning("%s: what memory holds of it is damaged, its file is read: %s", path, error)
            finally:
                found.release()
        return self._files.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the file; memory forgets it by itself."""
        self._finish(str(path))
        self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        """All files are written. Raises what went wrong with the last ones."""
        try:
            self._wait(self._writing)
            self._gather()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
            if self._shelf is not None:
                self._shelf.close()
                if self._shelf.vault is not None:
                    self._shelf.vault.close()
                self._shelf = None

    # ---- what Lightning does not ask for

    def newest(self) -> str | None:
        """The path of what was saved last, of all that memory holds; its file is there afterwards. None: memory holds nothing.

        On all ranks alike, before ``fit``: what rank 0 finds counts.
        """
        meeting = Meeting.of_environment()
        with steps.phase("checkpoint"):
            found = meeting.decide("lightning", b"", lambda _: os.fsencode(self._rescued()), limit_s=RESCUE_S)
        return os.fsdecode(found) or None

    def _rescued(self) -> str:
        for view in self._views():
            try:
                view.verify()
                place = os.fsdecode(view.objects()[_PATH])
                if not _exists(place):
                    _write_file(view, place)
                    log.warning("%s was in memory only: written now", place)
                return place
            except ArenaBroken as error:
                log.warning("a state in memory is damaged, an older one is looked for: %s", error)
            finally:
                view.release()
        return ""

    # ---- files

    def _put(self, put: Callable[[float], Busy]) -> Busy:
        """Into a slot that is not being written to its file; wait for the first such, if all are."""
        while True:
            self._gather()
            try:
                return put(0.0 if self._writing else WAIT_S)
            except NoSlot:
                if not self._writing:
                    raise
                if not self._first(list(self._writing), WAIT_S):
                    raise NoSlot(f"no file was written within {WAIT_S:g} s, and all memory is in use") from None

    def _first(self, those: list[Future[None]], limit_s: float | None = None) -> bool:
        """Wait until one of those is done. Each that is, is a sign of life: the pause of training begins anew."""
        with steps.phase("checkpoint"):
            return bool(wait(those, timeout=limit_s, return_when=FIRST_COMPLETED).done)

    def _wait(self, those: Iterable[Future[None]]) -> None:
        """Until they are done, however slow storage is: Lightning's own files are waited for, too."""
        left = list(those)
        while left := [one for one in left if not one.done()]:
            self._first(left)

    def _gather(self) -> None:
        """Raise what went wrong with files that are done."""
        done = [one for one in self._writing if one.done()]
        for one in done:
            written = self._writing.pop(one)
            if self._shelf is not None:
                self._shelf.free(written.busy)
        for one in done:
            one.result()

    def _finish(self, path: str) -> None:
        self._wait(one for one, there in self._writing.items() if there.path == path)

    # ---- memory

    def _opened(self) -> Shelf:
        if self._shelf is None:
            vault = None
            if Vault.here():
                try:
                    vault = Vault.connect()
                except VaultGone as error:
                    log.warning("checkpoints do not outlive this process: %s", error)
            rank, world = (vault.rank, vault.world) if vault is not None else (0, 1)
            self._shelf = Shelf("", rank=rank, world=world, kind="torch", vault=vault)
        return self._shelf

    def _views(self) -> Iterator[SlotView]:
        """What of ours this host's agent holds, newest first."""
        vault = self._opened().vault
        if vault is None:
            return
        try:
            holdings = [one for one in vault.inventory().holdings if one.kind == MEMORY]
            for one in sorted(holdings, key=lambda one: (one.generation, one.step), reverse=True):
                view = _view(vault.borrow(one.id), one.slot)
                if view is not None:
                    yield view
        except VaultGone as error:
            log.warning("memory is not looked at: %s", error)

    def _remembered(self, path: str) -> SlotView | None:
        for view in self._views():
            try:
                if os.fsdecode(view.objects()[_PATH]) == path:
                    view.verify()  # all of it, unless its worker was killed before it was hashed: then as `newest` does
                    return view
            except ArenaBroken:
                pass
            view.release()
        return None


def _view(fd: int, slot: int) -> SlotView | None:
    """A slot in memory that was lent to us; None: it holds nothing of ours."""
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    try:
        view = SlotView(memory, slot)
    except ArenaBroken:
        return None
    if not {_REST, _PATH} <= set(view.table.objects):
        view.release()
        return None
    return view


class _At:
    """Where a tensor was taken out."""

    def __init__(self, number: int) -> None:
        self.number = number


def _apart(state: Any, tensors: list[torch.Tensor]) -> Any:
    """The same nested state with marks in place of its tensors, which are appended to ``tensors``."""
    if isinstance(state, torch.Tensor) and state.layout == torch.strided and not state.is_quantized:
        tensors.append(state)
        return _At(len(tensors) - 1)
    if type(state) is dict:
        return {key: _apart(value, tensors) for key, value in state.items()}
    if type(state) in {list, tuple}:
        return type(state)(_apart(one, tensors) for one in state)
    if isinstance(state, dict):
        copied = copy.copy(state)  # an OrderedDict has attributes of its own
        for key, value in state.items():
            copied[key] = _apart(value, tensors)
        return copied
    return state


def _filled(state: Any, fill: Any) -> Any:
    if isinstance(state, _At):
        return fill(state.number)
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _filled(value, fill)
        return state
    if type(state) in {list, tuple}:
        return type(state)(_filled(one, fill) for one in state)
    return state


def _rest(view: SlotView) -> Any:
    # Our own worker's bytes, verified: they never left this host's memory.
    return torch.load(io.BytesIO(view.objects()[_REST]), weights_only=False)


def _together(view: SlotView) -> Any:
    state = _filled(_rest(view), lambda number: view.tensor(view.table.items[number]).clone())
    if not view.unchanged():
        raise ArenaBroken("it was overwritten while it was read")
    return state


def _written(view: SlotView, path: str) -> None:
    try:
        _write_file(view, path)
    finally:
        view.release()


def _write_file(view: SlotView, path: str) -> None:
    """The state as Lightning would have written it: whole, or not at all."""

    def leaf(number: int) -> Leaf:
        item = view.table.items[number]
        return Leaf(str(number), getattr(torch, item.dtype), item.shape)

    folder, _, name = path.rpartition("/")
    tree = _filled(_rest(view), leaf)
    with Place(folder or ".").writer(name, len(view.data)) as out:
        save(_Counted(out), tree, lambda one: view.tensor(view.table.items[int(one.name)]))
        if not view.unchanged():
            raise CoreError(f"{path}: the state was overwritten while it was written")


class _Counted:
    """What is written to knows where it is."""

    def __init__(self, out: Any) -> None:
        self._out, self._at = out, 0

    def write(self, content: Any) -> int:
        """All of a buffer."""
        written = int(self._out.write(content))
        self._at += written
        return written

    def tell(self) -> int:
        """Bytes so far."""
        return self._at


def _exists(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    try:
        Place(folder or ".").size(name)
    except FileNotFoundError:
        return False
    return True


class FlashData(Callback):
    """Counts the samples of an `ElasticDataset` in Lightning, and saves the position in Lightning's checkpoints.

        trainer = Trainer(callbacks=[FlashData(data), ModelCheckpoint(...)], plugins=[io], use_distributed_sampler=False)
        trainer.fit(model, ElasticLoader(data, num_workers=4), ckpt_path=io.newest())

    Lightning's fetcher draws batches before their step; a batch counts when its step is made. ``data``: with ``global_batch``,
    which decides how many batches a step accumulates.
    """

    def __init__(self, data: ElasticDataset) -> None:
        """Raises `SpecError` for what is no dataset of ours, or does not know how large a step is."""
        if not isinstance(data, ElasticDataset):
            raise SpecError("data", f"an ElasticDataset, got {type(data).__name__}")
        if not data.asked:
            raise SpecError(
                "global_batch",
                f"None of dataset {data.name!r}: give ElasticDataset(..., global_batch=512, micro_batch=16)",
            )
        self.data, self._entered, self._made, self._scale = data, 0, 0, 0.0
        self.skipped = 0
        """Steps that a GradScaler has skipped in this process; their samples count as consumed."""

    @property
    def state_key(self) -> str:
        """What a checkpoint's position is found by."""
        return f"FlashData.{self.data.name}"

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # their names
        """The ranks are there: a step accumulates what its global batch has. Raises `SpecError` where steps would differ."""
        trainer.accumulate_grad_batches = self._rounds

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # their names
        """Training begins, or goes on after a restored step."""
        self._entered, self._made, self._scale = 0, trainer.global_step, self._scale_of(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_more: Any) -> None:  # noqa: ARG002  # their names
        """A batch has entered a step; the last one of a global batch has made it. Raises `CoreError` where it has not."""
        self._entered += 1
        made, rounds = trainer.global_step > self._made, self._rounds
        if made != (self._entered == rounds):
            raise CoreError(
                f"{self._entered} batches entered {'a' if made else 'no'} step of Lightning's, and a global batch of dataset "
                f"{self.data.name!r} has {rounds}: let FlashData set accumulate_grad_batches, and give fit() an ElasticLoader"
            )
        if not made:
            return
        scale = self._scale_of(trainer)
        if scale < self._scale:
            self.skipped += 1
            self.data.say_skipped()
        self._entered, self._made, self._scale = 0, trainer.global_step, scale
        self.data.step()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # their names
        """No more batches are drawn."""
        if isinstance(trainer.train_dataloader, ElasticLoader):
            trainer.train_dataloader.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # as above
        """Neither are any after an error."""
        self.on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it."""
        self.data.load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002  # as above
        """Raises `SpecError` for a checkpoint that was made without the dataset, unless ``data.begin`` says where it is."""
        if self.state_key not in checkpoint.get("callbacks", {}):
            told = self.data.accept(None)
            log.warning("%s", told)

    @property
    def _rounds(self) -> int:
        of = self.data.division
        return -(-max(of.quota) // of.micro_batch)

    @staticmethod
    def _scale_of(trainer: Any) -> float:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None else 0.0
