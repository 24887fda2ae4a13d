"""Lightning's checkpoints, from memory: saved as fast as memory is copied, written to their files behind training's back.

    io = FlashCheckpointIO()
    trainer = Trainer(plugins=[io], callbacks=[ModelCheckpoint(every_n_train_steps=10, save_last=True)])
    trainer.fit(model, ckpt_path=io.newest())          # what was saved last, be its file there or not; None: nothing

The files are Lightning's own, at Lightning's own paths, and load without us. Under `dlrover-run` the memory is the agent's and
outlives the worker: a state that had not reached its file is written there by `newest`. Under other launchers it ends with the
process, and only saving is faster.

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

from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.torchfile import Leaf, save
from dlrover_core.checkpoint.arena import ArenaBroken
from dlrover_core.errors import CoreError

from . import steps
from .checkpoint.meeting import Meeting
from .checkpoint.shelf import WAIT_S, Busy, NoSlot, Shelf, layout_of, whole
from .checkpoint.vault import MEMORY, Vault, VaultGone

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
                if os.fsdecode(view.objects()[_PATH]) == path and view.verify():
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
