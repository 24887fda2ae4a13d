"""`FlashCheckpoint`: the state of training, saved every few steps for almost nothing.

    ckpt = FlashCheckpoint("file:///ckpts/run1", model=model, optimizer=optimizer, scheduler=sched, extra=sampler)
    step = ckpt.restore()
    for batch in data:
        ...; optimizer.step()
        step += 1
        ckpt.step(step)

Call `step` after everything that writes the state of this step: what the optimizers write is copied beside the next forward and
backward, all else within `step`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.torch import steps
from dlrover_core.checkpoint.cadence import Bounds, Cadence, Costs
from dlrover_core.checkpoint.slots import LAG, slots_for
from dlrover_core.errors import CoreError, SpecError

from .boundary import Boundary
from .capture import Capture, parameters
from .engine import Engine
from .hooks import Hooks, why_blocking
from .line import copied_elsewhere
from .meeting import Meeting
from .standalone import Standalone
from .stats import Options, Stats
from .vault import Keeping, Vault, VaultGone, VaultRefused

ASYNC, BLOCKING = "async", "blocking"
LOST_SHARE = 0.1
"""Of all failures, those that take a node and its partner at once, where partners have copies: a guess, on the safe side."""
CLOSE_S, CLOSING_S = 3600.0, 30.0
"""How long `FlashCheckpoint.close` waits for storage without an agent, and after how long it says so."""
PARTS_S = 3600.0
"""How much longer one rank may write its part of a step than another, without an agent."""
CUDA_LAG = 3
"""A host is ahead of its device by up to a step: what it has come through is known one call later."""
_log = logging.getLogger("dlrover.torch")


class NoMemory(CoreError):
    """There is no room for the states of this job in the memory of its nodes. The message says how much is needed."""


class AgentGone(CoreError):
    """The agent that keeps this rank's states in memory does not answer, or will not have it. The message says what it said."""


class FlashCheckpoint:
    """Saves, and restores, the state of one rank's training. Every rank makes one, with the same arguments.

    ``url``: where checkpoints are stored (a path or any URL of fsspec); empty: in memory only. ``model``, ``optimizer``,
    ``scheduler``, ``extra``: one or several (a sequence, or a dict with names): modules, optimizers, things with ``state_dict``
    and ``load_state_dict``. ``extra`` is each rank's own, such as a sampler's position. ``state``: a nested dict of tensors,
    DTensors and plain objects, updated in place. ``every``: steps between saves into memory; ``store_every``: to storage (None:
    ten times as many; 0: only by `save` and on failure); "auto" by cost and failure rate. ``keep``: checkpoints on storage.

    ``slots``: states in memory (None: as many as are needed). ``frozen``, ``live``: names or tensors that nothing, or something
    else than the optimizers, writes. ``mode`` "blocking": training stands while all is copied. ``verify``: of each copy "sample"
    compares random blocks, "full" everything. ``format`` "dcp": torch.distributed.checkpoint; "torch": one file for
    ``torch.load``, where every node has all of the state. ``coupled`` False: no collective between two steps. ``local``: a
    folder of this host, written while ``url`` fails. ``trusted``: objects on storage may be of any kind, as whoever can write
    there is trusted to run code here; else they are plain Python, tensors and numpy arrays, or restoring refuses them.

    Without an agent an interpreter that ends, by Ctrl-C too, closes what is open; a signal that kills it (SIGTERM, unless the
    script handles it) does not. Raises `SpecError` for what cannot be saved so.
    """

    def __init__(
        self,
        url: str,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        extra: Any = None,
        state: MutableMapping[str, Any] | None = None,
        every: int | str = "auto",
        store_every: int | str | None = None,
        keep: int = 3,
        slots: int | None = None,
        frozen: Iterable[Any] = (),
        live: Iterable[Any] = (),
        mode: str = ASYNC,
        verify: str = "sample",
        format: str = "dcp",  # noqa: A002  # what users call it
        coupled: bool = True,
        local: str | None = None,
        trusted: bool = False,
    ) -> None:
        _check(mode=mode, verify=verify, format=format, keep=keep, slots=slots)
        _check_places(url, local)
        self._trusted = trusted
        self.url, self._keep, self._format, self._local = str(url), keep, format, local and str(local)
        self._mode, self._verify, self._coupled, self._slots = mode, verify, coupled, slots
        steps.expect()
        self._meeting = Meeting.of_environment()
        self.rank, self.world = self._meeting.rank, self._meeting.world
        self._capture = Capture(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            extra=extra,
            state=state,
            frozen=frozen,
            live=live,
            rank=self.rank,
        )
        self._cuda = any(one.is_cuda for one in parameters(self._capture.optimizers.values()))
        lag = CUDA_LAG if self._cuda else LAG
        fixed = max(1, every) if isinstance(every, int) else lag
        least = slots_for(fixed, self.world, lag)
        self._options = Options(
            beside=mode == ASYNC,
            verify=verify,
            coupled=coupled,
            slots=slots or least + (not coupled and self.world > 1),
            lag=lag,
        )
        if self._options.slots < least:
            raise SpecError("slots", f"every={every} needs {least} slots in a world of {self.world}, got {slots}")
        try:
            self._cadence = Cadence(every, store_every if url else 0, bounds=Bounds(least=lag if self.world > 1 else 1))
        except ValueError as error:
            raise SpecError("every", str(error)) from error
        self._costs = Costs()
        self._line: Vault | Standalone | None = None
        self._engine: Engine | None = None
        self._hooks: Hooks | None = None
        self._boundary: Boundary | None = None
        self._call = 0
        self._step: int | None = None
        self.tier = ""
        """What `restore` read from: "memory", "peer", "disk", "storage"; "nothing" where there was nothing."""
        self._returned = 0.0
        self._stall_seen = 0.0
        self._fences: list[Any] = []
        self._closed = False

    # ---- use

    def restore(self, step: int | None = None) -> int:
        """Fill everything with the newest state that all ranks can have, or that of ``step``; its step, 0: there is none.

        From this node's memory, from other nodes', from storage; verified. A collective. Raises `Mismatch` where the saved state
        is of another model, and `RestoreFailed` where ``step`` is not there, or this generation has saved newer ones: training
        that goes back does so in a new start of the job.
        """
        self._open_still()
        if self._engine is not None:
            self._engine.settle()
        from . import restore as restoring

        line = self._opened()
        verify = "full" if self._verify != "off" else "header"
        try:
            with _asking():
                found = restoring.restore(
                    self._capture,
                    line,
                    self._meeting,
                    url=self.url,
                    step=step,
                    verify=verify,
                    local=self._local,
                    trusted=self._trusted,
                )
        except BaseException:
            self._capture.forget()  # the room that was made for it
            raise
        if isinstance(line, Standalone):
            line.follows(found.generation)
        if not found.step:
            self._capture.forget()
        self._step, self.tier = found.step, found.tier
        self._cadence.restored(found.step)
        engine = self._engine_now()
        engine.begins_from(found.generation, found.step)
        self._prepare(engine)
        return int(found.step)

    def step(self, step: int) -> None:
        """Step ``step`` is done: its state goes to memory, and to storage, when it is due. Never waits for storage.

        On every rank, after everything that writes the state. Raises `CoreError` once it is closed.
        """
        self._open_still()
        began = time.perf_counter()
        steps.tell(step)
        engine = self._engine_now()
        self._prepare(engine)
        self._call += 1
        flying = engine.copier.flight is not None
        control = engine.control
        writing = control is not None and sum(map(control.pinned, range(control.geometry.slots))) > engine.spare
        if self._returned:
            self._costs.step(began - self._returned, copying=flying or self._saved_last, writing=writing)
        if writing:
            self._writing_since = self._writing_since or began
        elif self._writing_since:
            self._costs.written(began - self._writing_since)
            self._writing_since = 0.0
        self._fence()
        due = self._cadence.due(step)
        plan = self._boundary.reached(control, self._call) if control is not None and self._boundary is not None else 0
        if plan:
            self._stand_at(plan, step, engine)
            self._saved_last = due.memory
        elif due.memory:
            self._saved_last = self._save(step, due=due.storage, populated=True)
        else:
            self._saved_last = False
            engine.settle()
        if self._saved_last:
            self._costs.saved(engine.stats.stall_s)
        self._replan(step, engine)
        self._step = step
        self._returned = time.perf_counter()

    def save(self, step: int, *, to_storage: bool = True) -> bool:
        """Save the state after ``step`` now, whatever is due. On every rank: they wait for each other, unless not ``coupled``.

        While every slot is in use, because storage is slow, it waits, for twenty minutes at most; False: that was not enough, and
        no rank has saved it. What `step` has just saved is not copied again, but goes to storage, unless it has changed since.
        """
        self._open_still()
        engine = self._engine_now()
        self._prepare(engine)
        self._call += 1
        self._fence()
        with _asking():
            saved = engine.save_by_hand(step, self._call, due=to_storage and bool(self.url))
        if not saved:
            _log.error("step %d was not saved, though that was asked for: %s", step, engine.why_left_out)
        self._tell_layout(engine)
        return saved

    def wait(self) -> None:
        """Until what was saved is published in memory; and, without an agent, written to storage. Raises what failed there."""
        if self._engine is not None:
            self._engine.settle()
        if isinstance(self._line, Standalone):
            self._line.wait()
            if self._line.failed is not None:
                raise self._line.failed

    def close(self) -> None:
        """Finish what is under way, and let everything go. Idempotent; every rank calls it, or leaves its ``with``.

        Of the newest state that was saved, storage gets a copy too, unless ``store_every`` is 0; of the present one, as that of
        the last `step`, where all saves were left out. Without an agent that is waited for, for `CLOSE_S` at most; else the agent
        sees to it. What fails on storage is logged and not raised: the script's exit code is its own. Who wants to know calls
        `wait` before.
        """
        self._finish(wait=True)

    def _open_still(self) -> None:
        if self._closed:
            raise CoreError("this FlashCheckpoint is closed: nothing is saved any more; make another one")

    def _finish(self, *, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        if self._hooks is not None:
            self._hooks.remove()
        try:
            if self._engine is not None and wait:
                self._engine.settle()
                if self.url and self._cadence.plan.store_every:
                    self._store_newest(self._engine)
            if isinstance(self._line, Standalone) and wait:
                self._wait_for_storage(self._line)
        finally:
            if self._line is not None:
                self._line.close()
            if self._engine is not None:
                self._engine.close()

    def _wait_for_storage(self, line: Standalone) -> None:
        shown = Place(self.url).shown() if self.url else ""
        if line.wait(CLOSING_S):
            return
        _log.warning("%s: states are still being written; this process ends when they are, or in %g s", shown, CLOSE_S)
        if not line.wait(CLOSE_S):
            _log.error("%s: not everything is written after %g s, and not waited for any more", shown, CLOSE_S)

    def _store_newest(self, engine: Engine) -> None:
        if engine.store_newest() or self._step is None:
            return
        # All saves were left out: a short run, whose memory was not populated in time. What it has learnt is not to be lost.
        engine.replicas.closing = True
        self._call += 1
        if self._save(self._step, due=True, populated=False):
            engine.settle()

    def __enter__(self) -> FlashCheckpoint:  # noqa: PYI034  # Self needs 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(wait=kind is None or issubclass(kind, KeyboardInterrupt))

    @property
    def stats(self) -> Stats:
        """What saving has done and cost so far."""
        engine = self._engine
        if engine is None:
            return Stats()
        engine.stats.populated = engine.memory is not None and engine.memory.populated.is_set()
        return engine.stats

    # ---- parts

    _saved_last = False
    _writing_since = 0.0

    def _opened(self) -> Vault | Standalone:
        self._open_still()
        if self._line is None:
            if Vault.here():
                with _asking():
                    self._line = Vault.connect()
            else:
                if self._format == "torch" and self.world > 1:
                    raise SpecError(
                        "format", '"torch" without an agent of ours is for one rank; use "dcp", or dlrover-run'
                    )
                if self.rank == 0:
                    _log.warning(
                        "no agent of ours: states in memory end with this process, and what survives it is on storage (%s); "
                        "start the job with dlrover-run",
                        Place(self.url).shown() if self.url else "none",
                    )
                atexit.register(_at_exit, weakref.ref(self))
                self._line = Standalone(
                    self.url,
                    Meeting.of_environment(limit_s=PARTS_S),
                    rank=self.rank,
                    world=self.world,
                    keep=self._keep,
                    form=self._format,
                )
        return self._line

    def _engine_now(self) -> Engine:
        if self._engine is None:
            line = self._opened()
            why = why_blocking(self._capture.optimizers.values()) if self._options.beside else ""
            if why:
                _log.warning("training stands while states are copied: %s", why)
                self._options = self._options._replace(beside=False)
            engine = self._engine = Engine(self._capture, line, self._meeting, self._options)
            if self._options.beside:
                self._hooks = Hooks(engine, self._capture.optimizers.values(), self._capture.models.values())
            if self._coupled:
                self._boundary = Boundary(line, self._meeting, self._options.lag)
        return self._engine

    def _prepare(self, engine: Engine) -> None:
        """Once, before the first save."""
        if engine.prepared:
            return
        with _asking():
            engine.prepare()
        if copied_elsewhere(engine.line):
            self._cadence.bounds = replace(self._cadence.bounds, lost_share=LOST_SHARE)
        self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        memory, line = engine.memory, self._line
        if memory is None or line is None:
            return
        plan = self._cadence.plan
        memory.control.every, memory.control.store_every = plan.every, plan.store_every
        table = memory.table
        line.keeping(
            Keeping(
                url=self.url,
                every=plan.every,
                store_every=plan.store_every,
                keep=self._keep,
                format=self._format,
                planned=self._coupled,
                node_bytes=memory.geometry.total_bytes * line.nproc,
                writes=bool(table.objects) or any(one.write for one in table.items),
                local=self._local or "",
            )
        )
        self._told_layouts = engine.stats.layouts

    _told_layouts = -1

    def _save(self, step: int, *, due: bool, populated: bool) -> bool:
        engine = self._engine_now()
        with _asking():
            saved = engine.save(step, self._call, due=due, populated=populated)
        left_out = engine.stats.skipped + engine.stats.early
        if not saved and left_out & (left_out - 1) == 0:  # the first, the second, the fourth ...
            _log.warning("step %d was not saved (%d by now): %s", step, left_out, engine.why_left_out)
        self._tell_layout(engine)
        return saved

    def _tell_layout(self, engine: Engine) -> None:
        if engine.stats.layouts != self._told_layouts:
            self._tell(engine)

    def _stand_at(self, plan: int, step: int, engine: Engine) -> None:
        """The boundary of a planned change: save, however long another slot is read, unless it is dropped meanwhile; and wait."""
        boundary = self._boundary
        assert boundary is not None

        def armed(_waited_s: float = 0.0) -> bool:
            return engine.control is not None and engine.control.armed == plan

        with _asking():
            saved = engine.save(step, self._call, due=False, blocking=True, waits=armed)
        if saved and engine.control is not None:
            boundary.wait(engine.control, plan, step, lambda: self._closed)

    def _fence(self) -> None:
        """On CUDA: wait until the device has done what was asked of it before the call before this one."""
        if not self._cuda:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._fences.append(event)
        if len(self._fences) > 1:
            self._fences.pop(0).synchronize()

    def _replan(self, step: int, engine: Engine) -> None:
        control = engine.control
        decides = self.rank == 0
        mtbf_s = float(control.mtbf_s) if control is not None else 0.0
        taken = self._cadence.replan(
            step,
            lambda mine: self._meeting.share("cadence", mine),
            decides=decides,
            measured=self._costs.measured(mtbf_s) if decides else None,
        )
        if taken is not None:
            self._tell(engine)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """What an agent does not give is told as an error of ours."""
    try:
        yield
    except VaultRefused as error:
        raise NoMemory(f"states cannot be kept in memory: {error}") from error
    except VaultGone as error:
        raise AgentGone(
            f"this node's agent, which keeps the states, is not to be had: {error}; its log says why, and `dlrover status` "
            "whether it lives. Start the script again with dlrover-run; what is on storage is still there"
        ) from error


def _at_exit(ckpt: weakref.ref[FlashCheckpoint]) -> None:
    """What is due is written, unless the script has failed: then other ranks may be gone."""
    found = ckpt()
    if found is not None:
        found._finish(wait=isinstance(getattr(sys, "last_value", None), (KeyboardInterrupt, type(None))))


def _check(*, mode: str, verify: str, format: str, keep: object, slots: object) -> None:  # noqa: A002  # as above
    """Raises `SpecError`."""
    if mode not in {ASYNC, BLOCKING}:
        raise SpecError("mode", f"'async' or 'blocking', got {mode!r}")
    if verify not in {"sample", "full", "off"}:
        raise SpecError("verify", f"'sample', 'full' or 'off', got {verify!r}")
    if format not in {"dcp", "torch"}:
        raise SpecError("format", f"'dcp' or 'torch', got {format!r}")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise SpecError("keep", f"a number of checkpoints, 0 for all, got {keep!r}")
    if slots is not None and not (isinstance(slots, int) and 2 <= slots <= 8):
        raise SpecError("slots", f"2 to 8, got {slots!r}")


def _check_places(url: object, local: object) -> None:
    """Raises `SpecError`."""
    if not isinstance(url, (str, os.PathLike)):
        raise SpecError("url", f'where checkpoints are stored, a path or a URL; "" for memory alone, got {url!r}')
    if local is not None and not isinstance(local, (str, os.PathLike)):
        raise SpecError("local", f"a folder of this host, got {local!r}")
