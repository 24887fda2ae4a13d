"""Saves that a script asks for itself, and states in memory that are marked as due on storage.

A save by hand is not left out because memory is in use: all ranks wait together until each has a slot. What `FlashCheckpoint`
has just saved by itself is not copied again: it is compared with the present state, and marked.

Agents know a state by its generation and step alone. A state that is due on storage may be written already, so under an agent it
is never replaced by other values of the same step: that save is refused on all ranks, with an error that says what to do instead.
"""

from __future__ import annotations

import contextlib
import re
import time

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.table import pack_blob, unpack_blob
from dlrover_adapters.torch import steps
from dlrover_core.checkpoint.arena import Control, Stamp
from dlrover_core.checkpoint.slots import NOTHING
from dlrover_core.errors import CoreError

from .capture import Signature
from .engine import LOOK_MAX_S, Engine
from .line import copied_elsewhere
from .meeting import Meeting, MeetingFailed
from .standalone import Standalone

BY_HAND_S = 1200.0
"""How long a save by hand waits for a slot; well below what an announced phase may take (``hang_phase_s``, 1,800 s)."""
WORD_S = 15.0
"""How long a script that ends waits for the agents' word that its last state is whole on all ranks."""
FAILED, KEPT, NEW, SAME, DUE = b"", b"/", b"0", b"1", b"2"
"""A rank's answer about a step, in order; the least answer of all ranks counts. FAILED: this rank cannot save the step. KEPT: the
state in memory differs from the present one, and is due on storage already, so it stays. NEW: the state is not in memory, or has
changed since. SAME: the state in memory is the present one. DUE: the same, and due on storage."""
OTHERS = "another rank could not save it; its log says why"
KEPT_WORDS = (
    "it was saved before, for storage or for another node's memory too, and stays as it was saved then: {}. Save the present "
    "state under another step number, or call ckpt.save({step}) alone for this step, instead of ckpt.step({step})"
)
KEPT_OTHERS = "the state of another rank differs now; its log names what differs"
_RANDOM = re.compile(r"rank\.\d+\.rng")


class StepKept(CoreError):
    """A step was to be saved a second time with other values, after the first ones were given to storage or to another node."""


def save(engine: Engine, step: int, call: int, *, due: bool) -> bool:
    """Save this very state, even if that takes time: a slot is waited for, `BY_HAND_S` seconds at most. False: left out.

    All ranks begin it together, so that what was saved before is known to be whole on all, and none goes on before the
    slowest has its slot: they wait here, and not in a collective of the script's with a time limit of its own. So it is left
    out by all or by none. What is in memory of this step, and is the same still, is not copied again. Not ``coupled``, each
    rank is on its own. Raises as `Engine.save`.
    """
    began = time.perf_counter()
    with steps.phase("checkpoint"):
        engine.settle()
        engine._stall_s = 0.0
        before = engine._newest if engine._newest is not None and engine._newest[0] == step else None
        # Agents know a step by its number: its first values may be on storage, or at another node.
        fixed = before is not None and _given_away(engine, due=before[1])
        held = NEW
        if fixed:
            least, held = _fixed(engine, step)
            if least in {KEPT, DUE}:
                engine._stalled(began)
                return least == DUE
            if least == FAILED:
                return _leave_out(engine, step, began, due=due)
        try:
            objects = engine._laid_out(call)
            engine._newest = (step, due or (before is not None and before[1]))
            mine = held if held == DUE or before is None else _unchanged(engine, step, objects, due=due)
        except BaseException:
            decline(engine.meeting, step, coupled=engine._coupled)
            raise
        least = _least(engine, f"begin/{step}", mine)
        if least == FAILED:
            return _leave_out(engine, step, began, due=due)
        engine.replicas.compare(engine._chunks or (), step)
        if least == NEW:
            if before is not None:
                engine.missed.anew(step)
                engine._again = step
            saved = _save_together(engine, step, call, objects, due=due, there=mine != NEW)
        else:
            _mark(engine, step, due=due and least == SAME)
            saved = True
    engine._stalled(began)
    return saved


def _leave_out(engine: Engine, step: int, began: float, *, due: bool) -> bool:
    """Another rank cannot save the step. False, as `save` returns."""
    engine.why_left_out = OTHERS
    engine._left_out(step, due=due)
    engine._stalled(began)
    return False


def _given_away(engine: Engine, *, due: bool) -> bool:
    """Whether a state that was saved may be on storage (``due``) or at another node, where only its step's number is known."""
    return not isinstance(engine.line, Standalone) and (due or copied_elsewhere(engine.line))


def _fixed(engine: Engine, step: int) -> tuple[bytes, bytes]:
    """Compare a step that was given away with the present state. The least answer of all ranks, and this rank's.

    An answer `KEPT` is an alarm on every rank: nothing is saved, and nothing that was saved before changes.
    """
    try:
        differs = _differs(engine, step)
    except BaseException:
        decline(engine.meeting, step, coupled=engine._coupled)
        raise
    held = _held(engine, step)
    mine = NEW if differs is None or held is None else KEPT if differs else DUE if held[1].due else SAME
    least = _least(engine, f"begin/{step}", mine)
    if least == KEPT:
        engine.why_left_out = KEPT_WORDS.format(differs or KEPT_OTHERS, step=step)
        engine.alarms.ring(f"step {step} was not saved a second time", StepKept(engine.why_left_out))
    return least, mine


def _differs(engine: Engine, step: int) -> str | None:
    """What is not now as it was saved for this step, for people; empty: nothing is. None: no state of it was given away.

    Random numbers do not count: an evaluation between the two calls draws some. No collective: the layout stays what it is.
    """
    held, before = _held(engine, step), engine._signature
    if held is None or before is None or engine.memory is None:
        return None
    if not _given_away(engine, due=held[1].due):
        return None
    slot, stamp = held
    chunks = engine.capture.chunks()
    objects, _ = engine.capture.objects()
    if chunks is not engine._chunks or objects.keys() != set(before.objects):
        now = engine.capture.signature(chunks, objects)
        if now != before:
            return f"{_other_form(before, now)} has another form now, or is there only in one of the two"
        if chunks is not engine._chunks:
            engine._pair(chunks)
    at = engine.memory.geometry.blob_at(slot)
    saved = unpack_blob(bytes(engine.memory.memory[at : at + stamp.blob_bytes]))
    objects |= engine.capture.cut()
    for name in sorted(saved.keys() | objects.keys()):
        if saved.get(name) != objects.get(name) and not _RANDOM.fullmatch(name):
            return f"object {name!r} differs now"
    found = next(filter(None, (moves.differs() for moves in engine._moves_to(slot))), "")
    return f"tensor {found!r} differs now" if found else ""


def _other_form(before: Signature, now: Signature) -> str:
    """The first name in which two signatures differ."""
    chunks = {one[0] for one in set(before.chunks) ^ set(now.chunks)}
    if chunks:
        return f"tensor {min(chunks)!r}"
    objects = set(before.objects) ^ set(now.objects)
    return f"object {min(objects)!r}" if objects else "the order of tensors"


def decline(meeting: Meeting, step: int, *, coupled: bool) -> None:
    """Tell the ranks that wait in `save` that an error keeps this rank from it, so that they leave the step out too."""
    if meeting.world > 1 and coupled:
        with contextlib.suppress(MeetingFailed):  # then nobody can be told anything
            meeting.decide(f"begin/{step}", FAILED, min, limit_s=BY_HAND_S + meeting.limit_s)


def _save_together(engine: Engine, step: int, call: int, objects: dict[str, bytes], *, due: bool, there: bool) -> bool:
    """Save the step on all ranks, or on none. ``there``: this rank has the step in memory. False: the step is left out."""
    # Nobody tells ranks that neither meet nor have an agent what is whole everywhere.
    in_vain = not engine._coupled and isinstance(engine.line, Standalone)
    waits = None if in_vain else lambda waited_s: waited_s < BY_HAND_S
    try:
        claimed = None if there else engine._claim(step, call, objects, lag=0, waits=waits)
    except BaseException:
        _least(engine, f"save/{step}", NEW)
        raise
    ready = there or claimed is not None
    if _least(engine, f"save/{step}", SAME if ready else NEW) == NEW:
        engine._left_out(step, due=due)
        return False
    if claimed is not None:
        engine._copy(step, call, claimed, due=due)
    else:
        _mark(engine, step, due=due)
    return True


def _held(engine: Engine, step: int) -> tuple[int, Stamp] | None:
    """The slot and stamp in which this generation's state of a step is whole; None: no slot."""
    control = engine.control
    for slot, stamp in control.stamps() if control is not None else ():
        if (stamp.generation, stamp.step) == (engine.generation, step) and not engine._kept[slot].base:
            return slot, stamp
    return None


def _unchanged(engine: Engine, step: int, objects: dict[str, bytes], *, due: bool) -> bytes:
    """`SAME` or `DUE` where the state of this step in memory equals the present one, else `NEW`. Every byte is compared, because
    scripts swap weights for a save.
    """
    held = _held(engine, step)
    if held is None:
        return NEW
    slot, stamp = held
    blob = pack_blob(objects)
    if (len(blob), digest(blob)) != (stamp.blob_bytes, stamp.blob_digest):
        return NEW
    if any(moves.differs() for moves in engine._moves_to(slot)):
        return NEW
    if isinstance(engine.line, Standalone) and (engine.line.failed is not None or not engine._coupled):
        return SAME  # written again; and ranks that do not ask each other must have as much to write
    return DUE if stamp.due or not due else SAME


def _least(engine: Engine, name: str, mine: bytes) -> bytes:
    """The least answer of all ranks; where ranks do not meet, this rank's own answer."""
    if engine.meeting.world == 1 or not engine._coupled:
        return mine
    return engine.meeting.decide(name, mine, min, limit_s=BY_HAND_S + engine.meeting.limit_s)


def mark_due(engine: Engine, step: int) -> bool:
    """This rank's state of a step goes to storage, if it is whole in memory here. False: it is not."""
    held = _held(engine, step)
    if held is not None and not held[1].due:
        _publish_due(engine, step, *held)
    return held is not None


def _mark(engine: Engine, step: int, *, due: bool) -> None:
    """Mark the state of this step in memory as due on storage."""
    held = _held(engine, step)
    if held is not None and due:
        _publish_due(engine, step, *held)


def _publish_due(engine: Engine, step: int, slot: int, stamp: Stamp) -> None:
    control = engine.control
    assert control is not None
    control.mark_due(slot, stamp)
    engine.line.saved(engine.arena_id, slot, step, due=True)


def store_newest(engine: Engine) -> int:
    """The newest state that all ranks saved goes to storage, if it was not to anyway; its step. `NOTHING`: there is none.

    All ranks, at their end: what some rank left out all have heard of by then, and the newest of the others nobody has
    overwritten. Where the ranks' store has gone nobody has heard: then the agents' word is waited for, `WORD_S` at most.
    """
    control, newest = engine.control, engine._newest
    if control is None or newest is None:
        return NOTHING
    missed = engine._heard_missed()
    held = [(stamp.step, slot, stamp) for slot, stamp in control.stamps() if stamp.generation == engine.generation]
    whole = [one for one in held if one[0] not in missed]
    if newest[0] not in {one[0] for one in whole} and isinstance(engine.line, Standalone) and not newest[1]:
        engine.line.missed(newest[0])
    if not whole:
        return NOTHING
    if engine.missed.unknown is not None and not isinstance(engine.line, Standalone):
        known = _known_whole(engine, control, max(whole)[0])
        whole = [one for one in whole if one[0] <= known] or whole
    step, slot, stamp = max(whole)
    if not stamp.due:
        _publish_due(engine, step, slot, stamp)
    engine._newest = (newest[0], newest[1] or newest[0] == step)
    return step


def _known_whole(engine: Engine, control: Control, step: int) -> int:
    """The newest step that the agents know to be whole on all ranks, once that is ``step``, or after `WORD_S`."""
    until = engine.clock() + WORD_S
    with steps.phase("checkpoint"):
        while control.whole - 1 < step and engine.clock() < until:
            engine.pause(LOOK_MAX_S)
    return control.whole - 1
