"""The end of a script: its last state goes to storage, or the script hears that it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.torch import steps
from dlrover_core.checkpoint.cadence import Cadence
from dlrover_core.checkpoint.slots import NOTHING
from dlrover_core.errors import CoreError

from . import by_hand
from .alarms import about_truth
from .engine import LOOK_MAX_S, Engine
from .standalone import Standalone
from .vault import Vault

CLOSE_S, CLOSING_S = 3600.0, 30.0
"""Without an agent: the longest wait of `FlashCheckpoint.close` for storage, and the time after which it says that it waits."""
CHANGED = (
    "this rank did not save it when it was due ({why}), and its weights {have} changed since, while other ranks may hold them as "
    "they were; call ckpt.save() before anything changes the weights"
)
_log = logging.getLogger("dlrover.torch")


class Closing(Protocol):
    """What of a `FlashCheckpoint` takes part in its end."""

    url: str
    _cadence: Cadence
    _line: Vault | Standalone | None
    _engine: Engine | None
    _step: int | None

    def _engine_now(self) -> Engine: ...

    def _save(self, step: int, *, due: bool, populated: bool, waits: Callable[[float], bool] | None = None) -> bool: ...

    def _miss(self, step: int, *, due: bool, error: Exception) -> None: ...


class NotStored(CoreError):
    """A script ends, and its last state is not on storage. The message says which step, why, what is there and what to do."""


def store_last(ckpt: Closing) -> None:
    """Have the newest state written to storage. Raises `NotStored` where that fails."""
    engine, stored, wrong = ckpt._engine, NOTHING, None
    if engine is not None:
        engine.settle()
        tell_stored(engine)
    if ckpt.url and ckpt._cadence.plan.store_every and (engine is not None or ckpt._step is not None):
        try:
            stored = _store_newest(ckpt, engine)
        except NotStored as error:  # what else is on its way to storage gets there first
            wrong = error
    if ckpt._engine is not None:
        if stored != NOTHING:
            ckpt._engine.capture.data.sent(stored)
        _tell_last_stored(ckpt._engine)
    line = ckpt._line
    if isinstance(line, Standalone):
        in_time = _wait_for_storage(ckpt, line)
        newest = engine._newest if engine is not None else None
        if stored == NOTHING and wrong is None and newest is not None and newest[1] and line.failed is not None:
            stored = newest[0]  # by `FlashCheckpoint.save` alone
        if stored != NOTHING and stored not in line.written:
            why = line.failed or ("some rank has no part of it" if in_time else f"it took longer than {CLOSE_S:g} s")
            raise _not_stored(ckpt, stored, str(why)) from line.failed
    if wrong is not None:
        raise wrong


def tell_stored(engine: Engine) -> None:
    """Let datasets that tell others what is consumed know what is on storage now."""
    if engine.control is not None:
        engine.capture.data.stored(engine.control.committed - 1)


def _tell_last_stored(engine: Engine) -> None:
    """The same of the last state, under an agent: nobody but this process can tell them. It waits, `by_hand.WORD_S` at most."""
    tell_stored(engine)
    if engine.meeting.rank != 0 or not engine.capture.data.awaits():
        return
    until = engine.clock() + by_hand.WORD_S
    with steps.phase("checkpoint"):
        while engine.capture.data.awaits() and engine.clock() < until:
            engine.pause(LOOK_MAX_S)
            tell_stored(engine)


def _store_newest(ckpt: Closing, engine: Engine | None) -> int:
    """The step that goes to storage as the script ends; `NOTHING`: nothing has been saved, nor should have been."""
    if engine is not None and _can_make_up(ckpt, engine):
        assert engine._newest is not None
        step = engine._newest[0]
        if by_hand.mark_due(engine, step):
            return step
        if engine.meeting.world > 1 and engine.has_changed(step):
            unknown = engine.skipped is not None and engine.skipped[1] is None
            why = CHANGED.format(why=engine.why_left_out, have="may have" if unknown else "have")
            raise _not_stored(ckpt, step, why)
        return _save_at_last(ckpt, step)
    stored = by_hand.store_newest(engine) if engine is not None else NOTHING
    if stored == NOTHING and ckpt._step is not None and (engine is None or engine._newest is not None):
        # All saves were left out: a short run, whose memory was not populated in time. What it has learnt is not to be lost.
        stored = _save_at_last(ckpt, ckpt._step)
    newest = engine._newest if engine is not None else None
    if newest is not None and newest[1] and newest[0] > stored:
        raise _not_stored(ckpt, newest[0], engine.why_left_out if engine is not None else "", stored)
    return stored


def _can_make_up(ckpt: Closing, engine: Engine) -> bool:
    """Is the present state the last one that was due, in memory or on storage? Then each rank that has left it out saves it now.

    Nobody has to ask the others: what they have of this step stays in their memory, and an agent, unlike ranks that meet without
    one, takes the step once the last rank has it.
    """
    newest = engine._newest
    alone = isinstance(engine.line, Standalone) and engine.meeting.world > 1
    return newest is not None and newest[0] == ckpt._step and not alone


def _save_at_last(ckpt: Closing, step: int) -> int:
    """Wait for a slot, `by_hand.BY_HAND_S` at most. In the call of the last `step`: no collective has come after it."""
    try:
        engine = ckpt._engine_now()
        engine.replicas.closing = True
        saved = ckpt._save(step, due=True, populated=False, waits=lambda waited_s: waited_s < by_hand.BY_HAND_S)
        engine.settle(raises=True)
    except Exception as error:
        if about_truth(error):
            raise
        ckpt._miss(step, due=True, error=error)
        raise _not_stored(ckpt, step, f"{type(error).__name__}: {error}") from error
    if not saved:
        raise _not_stored(ckpt, step, engine.why_left_out)
    return step


def _not_stored(ckpt: Closing, step: int, why: str, instead: int = NOTHING) -> NotStored:
    there = f"step {instead} goes there instead" if instead != NOTHING else "what `dlrover ckpt ls` shows is there"
    return NotStored(
        f"step {step}, the last state of this script, is not on storage ({Place(ckpt.url).shown()}): {why}; {there}. See to "
        "that, then start the script again: it goes on from the newest state that is there"
    )


def _wait_for_storage(ckpt: Closing, line: Standalone) -> bool:
    shown = Place(ckpt.url).shown() if ckpt.url else ""
    if line.wait(CLOSING_S):
        return True
    _log.warning("%s: states are still being written; this process ends when they are, or in %g s", shown, CLOSE_S)
    if line.wait(CLOSE_S):
        return True
    _log.error("%s: not everything is written after %g s, and not waited for any more", shown, CLOSE_S)
    return False
