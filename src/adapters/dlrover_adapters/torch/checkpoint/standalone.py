"""Saving without an agent, under plain python or torchrun: memory of this process, and a thread of it that writes to storage.

The same engine, with the same slots; but memory ends with the process, so that only storage survives it. Each job is a run of its
own, which its ranks agree on when they begin: its steps are newer than what others left at the same URL.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_adapters.checkpoint import listing
from dlrover_adapters.checkpoint.manifests import METADATA, SEAL, part_name, step_name
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_core.checkpoint.arena import ArenaBroken, Control, Geometry
from dlrover_core.errors import CoreError

from .meeting import Meeting
from .vault import Arena, Fetched, Inventory, Keeping, Told, VaultRefused

_log = logging.getLogger(__name__)
_NO_PARTS = b"-"
JOB = "standalone"
"""The name of all such jobs: at one URL they are runs of the same one."""


class _Due(NamedTuple):
    """A slot to be written; none: this rank has left the step out."""

    step: int
    arena: int
    slot: int


class _Room:
    """An arena of this process: it goes once there is a newer one and nothing in it is to be written any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.memory: mmap.mmap | None = None
        self.queued = 0
        self.retired = False

    def close(self) -> None:
        """Let it go. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        if self.memory is not None:
            with contextlib.suppress(BufferError):
                self.memory.close()
        self.fd, self.memory = -1, None


class Standalone:
    """What a `Vault` is to the engine. ``meeting`` is the writer's own: it is used in its thread alone, once that is there.

    A collective: all ranks make theirs. Raises `MeetingFailed`.
    """

    def __init__(self, url: str, meeting: Meeting, *, rank: int, world: int, keep: int, form: str) -> None:
        self.rank, self.world = rank, world
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank if world > 1 else 0))
        self.nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._url, self._keep, self._form = url, keep, form
        node_rank = int(os.environ.get("GROUP_RANK", rank // max(1, self.nproc)))
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", -(-world // max(1, self.nproc))))
        self.told = Told(
            generation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1,
            node=socket.gethostname(),
            nodes=nodes,
            node_rank=node_rank,
            run=meeting.share("run", uuid.uuid4().hex.encode() if rank == 0 else None).decode(),
            replica="",
            committed=-1,
            plans=False,
            memory=0,
        )
        self._meeting = meeting
        self._arenas: dict[int, _Room] = {}
        self._made = 0
        self._lock = threading.Lock()
        self._parts: set[int] = set()
        self._queue: queue.Queue[_Due | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None
        """The newest error of the writer, until it succeeds again."""
        self.written: list[int] = []
        """Steps that this process knows to be complete on storage, oldest first, the newest few."""

    # ---- what the engine calls

    def arena(self, layout: int, geometry: Geometry) -> Arena:  # noqa: ARG002  # a vault would look for that layout's
        """Memory of this process."""
        fd = -1
        try:
            fd = os.memfd_create("dlrover-arena", os.MFD_CLOEXEC)
            os.ftruncate(fd, geometry.total_bytes)
            room = _Room(os.dup(fd))
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise VaultRefused(f"no memory for checkpoints ({geometry.total_bytes:,} bytes): {error}") from error
        self._made += 1
        self._arenas[self._made] = room
        return Arena(self._made, fresh=True, fd=fd)

    def ready(
        self,
        arena: int,
        holders: Sequence[Sequence[int]] | None = None,  # noqa: ARG002  # as a vault's
        own: Sequence[int] = (),  # noqa: ARG002
    ) -> None:
        """It can be read from now on; those before are not any more, once they are written."""
        room = self._arenas[arena]
        room.memory = mmap.mmap(room.fd, 0)
        os.close(room.fd)
        room.fd = -1
        with self._lock:
            for number, one in self._arenas.items():
                one.retired = number != arena
            self._release()

    def _release(self) -> None:
        """What nobody needs any more. Under the lock."""
        for number in [number for number, one in self._arenas.items() if one.retired and not one.queued]:
            self._arenas.pop(number).close()

    def saved(self, arena: int, slot: int, step: int, *, due: bool) -> None:
        """To be written, if due."""
        if due and self._url:
            self._begin_writing()
            control = self._control(arena)
            control.pin(slot)
            control.release()
            with self._lock:
                self._arenas[arena].queued += 1
            self._put(_Due(step, arena, slot))

    def missed(self, step: int) -> None:
        """This rank has no part of a step that was due: the others are not to wait for it."""
        if self._url:
            self._put(_Due(step, -1, -1))

    def keeping(self, keeping: Keeping) -> None:
        """Nobody asks."""

    def alarm(self, words: str) -> None:
        """The log of this process has them."""

    def lost(self, words: str) -> None:
        """The log of this process has them."""

    def acked(self, plan: int) -> None:
        """There are no plans."""

    def boundary(self, plan: int, step: int) -> None:
        """There are no boundaries."""

    def inventory(self) -> Inventory:
        """Memory holds nothing of processes before."""
        return Inventory((), "", -1)

    def borrow(self, holding: int) -> int:
        """There is nothing to borrow."""
        raise VaultRefused(f"no memory {holding} without an agent")

    def fetch(self, address: str, rank: int, generation: int, step: int, layout: int, timeout_s: float = 0) -> Fetched:  # noqa: ARG002
        """There are no peers."""
        raise VaultRefused(f"no peer at {address} without an agent")

    head = fetch

    def restored(
        self,
        step: int,
        tier: str,
        took_us: int,
        fell: Sequence[tuple[str, str]] = (),
        of: int = 0,  # noqa: ARG002  # nobody keeps a ledger here
        cut: bytes = b"",  # noqa: ARG002
    ) -> None:
        """For people."""
        for one, why in fell:
            _log.warning("not restored from %s: %s", one, why)
        _log.info("restored step %d from %s in %.2f s", step, tier, took_us / 1e6)

    def follows(self, generation: int) -> None:
        """States saved from now on are newer than all of this generation."""
        self.told = self.told._replace(generation=max(self.told.generation, generation + 1))

    # ---- the writer

    def _control(self, arena: int) -> Control:
        memory = self._arenas[arena].memory
        assert memory is not None, "saved before it was ready"
        return Control(memory)

    def _begin_writing(self) -> None:
        if self._thread is None:
            # Between two writes it knows the queue alone: if nobody has this object any more, it ends.
            thread = threading.Thread(
                target=_run, args=(self._queue, weakref.ref(self)), name="dlrover-checkpoint-write", daemon=True
            )
            thread.start()  # the system may have no thread for it now; the next save tries again
            self._thread = thread
            weakref.finalize(self, self._queue.put, None).atexit = False

    def _put(self, due: _Due) -> None:
        self._begin_writing()
        self._queue.put(due)

    def write(self, due: _Due) -> None:
        """By the writer: one step."""
        try:
            if self._write(due, self._meeting):
                self.failed = None
        except (CoreError, OSError, ArenaBroken) as error:
            self.failed = error
            _log.exception(
                "step %d was not written to %s; the next one that is due will be", due.step, Place(self._url).shown()
            )
        finally:
            with self._lock:
                if due.arena in self._arenas:
                    self._arenas[due.arena].queued -= 1
                    self._release()

    def _write(self, due: _Due, meeting: Meeting) -> bool:
        """Is it there now? A step that was left out says nothing about the storage."""
        place = Place(self._url)
        wrong: Exception | None = None
        told = _NO_PARTS
        if due.slot >= 0:
            try:
                told = self._part(due, place)
            except (CoreError, OSError, ArenaBroken) as error:
                wrong = error
        # All ranks come, with a part or without: rank 0 seals once every part is there.
        parts = meeting.all_gather(f"written/{due.step}", told)
        if wrong is not None:
            raise wrong
        if _NO_PARTS in parts:
            _log.warning("step %d is not complete on storage: some rank has no part of it", due.step)
            return False
        if meeting.rank == 0:
            seal(place, due.step, [rank for rank, one in enumerate(parts) if one == b"+"], run=self.told.run)
            if self._keep:
                listing.retain(place, self._keep, run=self.told.run, job=JOB)
        self.written = [*self.written, due.step][-8:]
        return True

    def _part(self, due: _Due, place: Place) -> bytes:
        memory = self._arenas[due.arena].memory
        view = SlotView(memory, due.slot)
        try:
            if view.stamp.step != due.step:
                raise ArenaBroken(f"slot {due.slot} holds step {view.stamp.step}, not {due.step}")
            if not view.table.objects and not any(one.write for one in view.table.items):
                return b"0"
            self._anew(place, due.step)
            write_part(view, place, run=self.told.run, format=self._form, verify=False, job=JOB)
            self._parts.add(due.step)
        finally:
            view.control.unpin(due.slot)
            view.release()
        return b"+"

    def _anew(self, place: Place, step: int) -> None:
        """A step that is saved twice is another state each time, which a part's manifest does not tell."""
        if step in self._parts:
            folder = step_name(step)
            for name in (SEAL, METADATA, part_name(self.rank)):
                place.rm(f"{folder}/{name}")
            place.sync(folder)

    def wait(self, limit_s: float | None = None) -> bool:
        """Until all that was due is written, or could not be; False: ``limit_s`` was not enough."""
        until = None if limit_s is None else time.monotonic() + limit_s
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._queue.all_tasks_done.wait(left)
        return True

    def close(self) -> None:
        """End; who wants to see what is due written waits for it first. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            if not self._queue.unfinished_tasks - 1:
                self._thread.join()
            self._thread = None
        with self._lock:
            for one in self._arenas.values():
                one.close()
            self._arenas = {}


def _run(dues: queue.Queue[_Due | None], writer: weakref.ref[Standalone]) -> None:
    while (due := dues.get()) is not None:
        found = writer()
        try:
            if found is not None:
                found.write(due)
        finally:
            del found
            dues.task_done()
    dues.task_done()
