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
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.torch import steps
from dlrover_core.checkpoint.cadence import Bounds, Cadence, Costs, Due
from dlrover_core.checkpoint.slots import LAG
from dlrover_core.errors import CoreError, SpecError

from . import asked, by_hand, closing, devices
from .alarms import Alarms, about_truth
from .asked import ASYNC
from .boundary import Boundary
from .capture import Capture, parameters
from .closing import NotStored
from .engine import Engine, absent
from .hooks import Hooks, why_blocking
from .line import copied_elsewhere
from .meeting import Meeting
from .omissions import Missed
from .standalone import Standalone
from .stats import Options, Stats
from .vault import Keeping, Vault, VaultGone, VaultRefused

LOST_SHARE = 0.1
"""Of all failures, those that take a node and its partner at once, where partners have copies: a guess, on the safe side."""
PARTS_S = 3600.0
"""How much longer one rank may write its part of a step than another, without an agent."""
DEVICE_BYTES = 256 * 2**20
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
    and ``load_state_dict``. ``extra`` is each rank's own. ``state``: a nested dict of tensors, DTensors and plain objects,
    updated in place. ``data``: one or several `ElasticDataset`, of which the position is saved, the same on all ranks. ``every``:
    steps between saves into memory; ``store_every``: to storage (None: ten times as many; 0: only by `save` and on failure);
    "auto" by cost and failure rate. ``keep``: checkpoints on storage. ``slots``: states in memory (None: as many as are needed).

    ``frozen``, ``live``: names or tensors that nothing, or something else than the optimizers, writes. ``mode`` "blocking":
    training stands while all is copied. ``verify``: of each copy "sample" compares random blocks, "full" everything. ``format``
    "dcp": torch.distributed.checkpoint; "torch": one file for ``torch.load``, where every node has all of the state. ``coupled``
    False: no collective between two steps. ``local``: a folder of this host, written while ``url`` fails. ``trusted``: objects on
    storage may be of any kind, as whoever can write there is trusted to run code here; else they are plain Python, tensors and
    numpy arrays, or restoring refuses them. ``device_bytes``: of each GPU's memory, what a save may take for a moment to put
    tensors aside that others than the optimizers write; those beyond it are copied while training stands.

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
        data: Any = None,
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
        device_bytes: int = DEVICE_BYTES,
    ) -> None:
        asked.check(mode=mode, verify=verify, format=format, keep=keep, slots=slots)
        asked.check_places(url, local)
        self._trusted = trusted
        self.url, self._keep, self._format, self._local = str(url), keep, format, local and str(local)
        self._mode, self._verify, self._coupled, self._slots = mode, verify, coupled, slots
        steps.expect()
        self._meeting = Meeting.of_environment()
        self.rank, self.world = self._meeting.rank, self._meeting.world
        self._capture = Capture(
            model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, state=state, frozen=frozen, live=live,
            data=data, rank=self.rank,
        )  # fmt: skip
        trained = _trained(self._capture)
        self._devices = devices.used_by(trained)
        self._why_stands = devices.why_blocking(trained)
        lag = CUDA_LAG if self._devices else LAG
        self._options = Options(
            beside=mode == ASYNC,
            verify=verify,
            coupled=coupled,
            slots=asked.slots(slots, every, self.world, lag, coupled=coupled),
            lag=lag,
            device_bytes=device_bytes,
            spread=format != "torch",
        )
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
        self._fences: list[list[devices.Mark]] = []
        self._alarms = Alarms()
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

        with self._meeting.refusing("restore"):
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
        self._meeting.together("memory for states", lambda: self._prepare(engine))
        return int(found.step)

    def step(self, step: int) -> None:
        """Step ``step`` is done: its state goes to memory, and to storage, when it is due. Never waits for storage.

        On every rank, after everything that writes the state. Raises `SpecError` and `Mismatch` for a state that cannot be saved
        as it was given (`alarms.about_truth`), and `CoreError` once it is closed. Any other error leaves this save out: it is
        logged, told to the agent and counted in ``stats.failed``, and training goes on.
        """
        self._open_still()
        began = time.perf_counter()
        steps.tell(step)
        self._call += 1
        due = self._cadence.due(step)
        try:
            engine = self._engine_now()
            self._prepare_or_go_on(engine, saves=due.memory)
            self._observe(engine, began)
            self._saved_last = self._step_saved(step, due, engine)
        except Exception as error:
            if about_truth(error):
                raise
            self._saved_last = False
            self._alarms.ring(f"step {step} was not saved", error)
            if due.memory:
                self._miss(step, due=due.storage, error=error)
        # Also where an error left this save out: all others wait for rank 0's word.
        with self._going_on("the intervals between saves stay as they are"):
            self._replan(step)
        self._step = step
        self._returned = time.perf_counter()

    def _observe(self, engine: Engine, began: float) -> None:
        """Measure the cost of the step before this call."""
        flying = engine.copier.flight is not None
        control = engine.control
        closing.tell_stored(engine)
        writing = control is not None and sum(map(control.pinned, range(control.geometry.slots))) > engine.spare
        if self._returned:
            self._costs.step(began - self._returned, copying=flying or self._saved_last, writing=writing)
        if writing:
            self._writing_since = self._writing_since or began
        elif self._writing_since:
            self._costs.written(began - self._writing_since)
            self._writing_since = 0.0

    def _step_saved(self, step: int, due: Due, engine: Engine) -> bool:
        self._fence()
        plan, control = 0, engine.control
        if control is not None and self._boundary is not None:
            with self._going_on("the boundary of a planned change was not looked for"):
                plan = self._boundary.reached(control, self._call)
        if plan:
            self._stand_at(plan, step, engine)
            saved = due.memory
        elif due.memory:
            saved = self._save(step, due=due.storage, populated=True)
        else:
            engine.settle()
            saved = False
        if saved:
            self._costs.saved(engine.stats.stall_s)
        return saved

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Errors in here are alarms, unless they are about the truth of the state."""
        try:
            yield
        except Exception as error:
            if about_truth(error):
                raise
            self._alarms.ring(what, error)

    def _miss(self, step: int, *, due: bool, error: Exception) -> None:
        """Let the other ranks know that this one has no state of a step."""
        with self._going_on(f"other ranks could not be told that step {step} is missing here"):
            if self._engine is not None:
                self._engine.failed(step, due=due, why=f"{type(error).__name__}: {error}")
            else:
                # They have no memory either: without this rank there was no layout to agree on.
                absent(self._meeting, error, self._call)
                Missed(self._meeting).tell(step)

    def save(self, step: int, *, to_storage: bool = True) -> bool:
        """Save the state after ``step`` now, whatever is due. On every rank: they wait for each other, unless not ``coupled``.

        While every slot is in use, because storage is slow, it waits, for twenty minutes at most; False: that was not enough, or
        an error kept some rank from saving it, which is logged: no rank has saved it. What `step` has just saved is not copied
        again, but goes to storage, unless it has changed since. Raises as `step`.
        """
        self._open_still()
        self._call += 1
        due = to_storage and bool(self.url)
        try:
            engine = self._engine_now()
            self._prepare_or_go_on(engine, saves=True)
            closing.tell_stored(engine)
            self._fence()
            with _asking():
                saved = by_hand.save(engine, step, self._call, due=due)
            if saved:
                self._capture.data.saved(step, due=due)
        except Exception as error:
            if about_truth(error):
                raise
            self._alarms.ring(f"step {step} was not saved, though that was asked for", error)
            self._miss(step, due=due, error=error)
            if self._engine is None:
                by_hand.decline(self._meeting, step, coupled=self._coupled)
            return False
        if not saved:
            _log.error("step %d was not saved, though that was asked for: %s", step, engine.why_left_out)
        self._tell_layout(engine)
        return saved

    def wait(self) -> None:
        """Until what was saved is published in memory; and, without an agent, written to storage. Raises what failed there."""
        if self._engine is not None:
            self._engine.settle(raises=True)
        if isinstance(self._line, Standalone):
            self._line.wait()
            if self._line.failed is not None:
                raise self._line.failed

    def close(self) -> None:
        """Finish what is under way, and let all go, the model too. Idempotent; every rank calls it, or leaves its ``with``.

        Of the newest state that was saved, storage gets a copy too, unless ``store_every`` is 0; of the present one, as that of
        the last `step`, where all saves were left out, or where that one was due and found no slot: then a slot is
        waited for. Without an agent storage is waited for, for `CLOSE_S` at most; else the agent sees to it, and fails the job
        where it cannot. Raises `NotStored` where it is known here that the last state does not get to storage: a script that
        ends well has its last state there.
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
            if wait:
                closing.store_last(self)
        finally:
            if self._line is not None:
                self._line.close()
            if self._engine is not None:
                self._engine.close()
            self._ended = self.stats
            # Scripts delete their DDP model before its gloo group, which may hang otherwise (torch 2.13): none lives on here.
            self._engine = self._hooks = self._boundary = None
            self._capture.release()

    def __enter__(self) -> FlashCheckpoint:  # noqa: PYI034  # Self needs 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish(wait=True)
            return
        try:
            self._finish(wait=issubclass(kind, KeyboardInterrupt))
        except NotStored as unstored:  # what the script raises goes on
            _log.error("%s", unstored)  # it is the sentence that counts

    @property
    def stats(self) -> Stats:
        """What saving has done and cost so far."""
        engine = self._engine
        if engine is None:
            return self._ended or Stats(failed=self._alarms.count)
        engine.stats.failed = self._alarms.count
        engine.stats.populated = engine.memory is not None and engine.memory.populated.is_set()
        engine.stats.pinned = engine.memory is not None and engine.memory.pinned
        return engine.stats

    # ---- parts

    _absent: Exception | None = None
    """Why this rank has no engine, for the rest of the generation."""
    _ended: Stats | None = None
    _saved_last = False
    _writing_since = 0.0

    def _opened(self) -> Vault | Standalone:
        self._open_still()
        if self._line is None:
            if Vault.here():
                with _asking():
                    self._line = self._capture.registered(Vault.connect())
                if self.url:
                    self._capture.data.by_storage()
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
        if self._absent is not None:
            raise CoreError(f"nothing is saved in this generation: {self._absent}") from self._absent
        if self._engine is None:
            try:
                line = self._opened()
            except Exception as error:
                if not about_truth(error):
                    self._absent = error
                    absent(self._meeting, error)
                raise
            self._alarms.tell = line.alarm
            why = ""
            if self._options.beside:
                why = self._why_stands or why_blocking(self._capture.optimizers.values())
            if why:
                _log.warning("training stands while states are copied: %s", why)
                self._options = self._options._replace(beside=False)
            engine = self._engine = Engine(self._capture, line, self._meeting, self._options, self._alarms)
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

    def _prepare_or_go_on(self, engine: Engine, *, saves: bool) -> None:
        """As `_prepare`. After an error this rank still comes to the collectives of the save that follows: others wait there.

        ``saves``: one follows in this call. It tries again, and is the alarm where that is in vain.
        """
        if isinstance(engine.line, Vault):
            with self._going_on("the job's log does not know how many samples a step has"):
                self._capture.registered(engine.line)
        try:
            self._prepare(engine)
        except Exception as error:
            if about_truth(error):
                raise
            if saves:
                _log.warning("memory for states could not be prepared, and is asked for again: %s", error)
            else:
                self._alarms.ring("memory for states was not prepared", error)

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

    def _save(self, step: int, *, due: bool, populated: bool, waits: Callable[[float], bool] | None = None) -> bool:
        engine = self._engine_now()
        with _asking():
            saved = engine.save(step, self._call, due=due, populated=populated, waits=waits)
        if saved:
            self._capture.data.saved(step, due=due)
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
        """On CUDA: wait until each training device has done the work that was queued before the previous call."""
        if not self._devices:
            return
        self._fences.append([devices.mark(one) for one in self._devices])
        if len(self._fences) > 1:
            for one in self._fences.pop(0):
                one.wait()

    def _replan(self, step: int) -> None:
        engine = self._engine
        control = engine.control if engine is not None else None
        decides = self.rank == 0
        mtbf_s = float(control.mtbf_s) if control is not None else 0.0
        taken = self._cadence.replan(
            step,
            lambda mine: self._meeting.share("cadence", mine),
            decides=decides,
            measured=self._costs.measured(mtbf_s) if decides else None,
        )
        if taken is not None and engine is not None:
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
    if found is None:
        return
    try:
        found._finish(wait=isinstance(getattr(sys, "last_value", None), (KeyboardInterrupt, type(None))))
    except NotStored as error:
        _log.error("%s", error)  # it is the sentence that counts
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # The interpreter would end with 0, whatever is raised here; `close`, or ``with``, has it raised in the script.
        os._exit(1)


def _trained(capture: Capture) -> list[torch.Tensor]:
    """The parameters of all optimizers and models."""
    models = capture.models.values()
    return [*parameters(capture.optimizers.values()), *(one for model in models for one in model.parameters())]
