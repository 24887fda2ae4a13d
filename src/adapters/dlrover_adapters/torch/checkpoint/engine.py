"""One rank's saves into memory: which slot, what is copied when, and what is told of it.

A save begins in `save`, on the training thread: what is live is copied there, the rest beside what comes next. It ends in the
copier's thread, which publishes the slot; the training thread *settles* it before the next one at the latest. A save that was
left out, or thrown away because it was torn, is posted to all ranks before the training thread goes on: `core.checkpoint.slots`
says why. What somebody asks for himself (`by_hand.save`) is not left out: a slot is waited for, by all ranks together.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Mapping

import torch

from dlrover_adapters.checkpoint.table import Table, pack_blob
from dlrover_adapters.torch import steps
from dlrover_core.checkpoint.arena import Control, Geometry, Stamp
from dlrover_core.checkpoint.slots import NOTHING, SlotContent, choose

from . import devices
from .alarms import Alarms
from .capture import Capture, Signature
from .chunks import Chunk
from .copier import Aside, Copier, Flight, Moves, Pair
from .layout import agreed, data_bytes, with_own
from .line import Line, old_tables, slots_of, spare_slots
from .meeting import Meeting, MeetingFailed
from .memory import Mapped, blob_room
from .omissions import Missed, Unstored, why_full
from .replicas import Replicas, fingerprint
from .sources import Path
from .standalone import Standalone
from .stats import Options, Stats

TORN_MAX = 3
"""Copies in a row that were thrown away; from then on training stands while they are made."""
OWN_LAYOUTS_MAX = 8
"""How often this rank alone gets other memory because tensors that only it has are others; from then on they are objects."""
EARLY = "the memory for states is still being populated; saves begin when it is there"
UNPROVEN = (
    "the ranks' store does not answer, so a state in memory is only overwritten once the agents say that a newer one is whole on "
    "all ranks"
)
STORE_LOST = (
    "the store of this generation does not answer (its keeper has ended): until the next generation saves go on by the agents' "
    "word of what is whole on all ranks, and are left out while that is not known"
)
TORN = "its copy was thrown away, because something but the optimizers wrote the state meanwhile"
TOLD_S = 2.0
"""Who waits for so long says for what."""
LOOK_S, LOOK_MAX_S = 0.01, 0.1
"""Between two looks whether a slot is free, the first and the longest: nobody tells us."""
_log = logging.getLogger(__name__)


class Engine:
    """Made once per generation and rank; `prepare` gets the memory. All calls but `landed` from the training thread."""

    def __init__(
        self, capture: Capture, line: Line, meeting: Meeting, options: Options, alarms: Alarms | None = None
    ) -> None:
        self.capture, self.line, self.meeting, self.options = capture, line, meeting, options
        self.alarms = alarms or Alarms()
        self.stats = Stats()
        self.copier, self._aside = Copier(), Aside(options.device_bytes)
        self.prepared = False
        self.memory: Mapped | None = None
        self.arena_id = -1
        self.base: tuple[int, int] | None = None
        """Generation and step of what this generation began from; None: nobody has asked."""
        self.beside = options.beside
        self._kept: list[SlotContent] = []
        self.missed, self.unstored = Missed(meeting), Unstored(tells=meeting.rank == 0)
        self._again = NOTHING
        """The newest step that was saved once more, by hand; what agents tell of it may be of the time before."""
        self._unknown_told = False
        self._chunks: list[Chunk] | None = None
        self._layout: tuple[Table, int] | None = None
        """The newest table that all ranks agreed on, and the room for objects: memory that was refused is asked for again."""
        self._signature: Signature | None = None
        self._own_layouts = 0
        self._newest: tuple[int, bool] | None = None
        """The newest step that was to be saved, and whether for storage: alike on all ranks."""
        self._pairs: tuple[list[Pair], list[Pair]] = ([], [])
        self._moves: dict[int, tuple[Moves, Moves]] = {}
        self._torn_in_a_row = 0
        self._stall_s = 0.0
        self.replicas = Replicas(capture, meeting, options.verify, coupled=options.coupled)
        self.skipped: tuple[int, int | None] | None = None
        """The newest step that this rank has no state of, and the fingerprint of its state then; None: not known."""
        self.why_left_out = ""
        """Of the newest save that was left out, for people."""
        self.spare = 0
        """Slots that are pinned for copies on other nodes, whatever else is read."""
        self.clock: Callable[[], float] = time.monotonic
        self.pause: Callable[[float], object] = time.sleep

    @property
    def control(self) -> Control | None:
        """The arena's words; None until there is one."""
        return self.memory.control if self.memory is not None else None

    @property
    def generation(self) -> int:
        """That of the states which are saved now."""
        return int(self.line.told.generation)

    # ---- layout and memory

    def prepare(self) -> None:
        """Get the memory for what can be foreseen, and populate it in the background. A collective. Raises `VaultRefused`."""
        if self.prepared:
            return
        self.prepared = True
        try:
            chunks = self.capture.foreseen()
            objects, paths = self.capture.objects() if chunks is not None else ({}, {})
        except BaseException as error:
            absent(self.meeting, error)
            raise
        told = self.meeting.all_gather("foreseen", self.replicas.word(objects, foreseen=chunks is not None))
        # All ranks foresee or none: what one cannot, nobody waits for.
        if any(raw[:1] != b"1" for raw in told):
            return
        assert chunks is not None
        self._lay_out(chunks, objects, paths, "layout", alike=len(set(told)) == 1)

    def _lay_out(
        self,
        chunks: list[Chunk],
        objects: Mapping[str, bytes],
        paths: Mapping[str, Path],
        name: str,
        *,
        alike: bool = False,
    ) -> None:
        """Agree on a layout with all ranks, in collectives of this ``name``, and get the memory for it.

        ``alike``: all ranks are known to have objects of the same names.
        """
        own = self.replicas.begin(objects, alike=alike, name=f"{name}/objects")
        with self.meeting.refusing(name):
            signature = self.capture.signature(chunks, objects)
            own |= frozenset(one.name for one in chunks if self.capture.own(one.name))
            before = old_tables(self.line) if self.base is not None else ()
        node, spread = int(self.line.told.node_rank), self.options.spread
        table = agreed(chunks, signature, paths, own, self.meeting, node, before=before, spread=spread, name=name)
        # Agreed on, whether or not there is memory for it here.
        self._signature, self._chunks = signature, None
        self._open(table, blob_room(len(pack_blob({**objects, **self.capture.cut()}))))
        self.stats.layouts += 1

    def _open(self, table: Table, blob_bytes: int) -> None:
        if self.memory is not None:
            self.settle()  # a copy that is in flight goes into the memory that is closed here
            self.memory.close()
            self.memory = None
        self._moves, self._layout = {}, (table, blob_bytes)
        self.spare = spare_slots(self.line, table.holders)
        size = data_bytes(table)
        slots = slots_of(self.line, table.holders, self.options.slots, size)
        geometry = Geometry(slots, len(table.packed()), blob_bytes, size)
        arena = self.line.arena(table.layout, geometry)
        self.memory = Mapped(arena.fd, table, geometry, local_rank=self.line.local_rank, fresh=arena.fresh)
        self.arena_id = arena.id
        self._kept = [SlotContent()] * geometry.slots
        for slot, stamp in self.memory.control.stamps():
            if (stamp.generation, stamp.step) == self._base_of(self.memory.control):
                self._kept[slot] = SlotContent(stamp.step, base=True)
        try:
            self.line.ready(arena.id, table.holders, table.own)
        except BaseException:  # nobody reads what would be saved there
            self.memory.close()
            self.memory = None
            raise
        used = devices.used_by(one.tensor for one in self.capture.chunks())
        self.memory.populate(pin=used[0] if used else None)

    def _base_of(self, control: Control) -> tuple[int, int] | None:
        """What the ranks began from; where nobody has asked, the newest that is there."""
        if self.base is not None:
            return self.base
        return max(((stamp.generation, stamp.step) for _slot, stamp in control.stamps()), default=None)

    def begins_from(self, generation: int, step: int) -> None:
        """All ranks have restored this state: newer ones in memory are of a line that has ended."""
        self.base = (generation, step)
        control = self.control
        for slot, stamp in control.stamps() if control is not None else ():
            if (stamp.generation, stamp.step) > self.base:
                assert control is not None
                control.begin(slot)
                self._kept[slot] = SlotContent()
            elif (stamp.generation, stamp.step) == self.base:
                self._kept[slot] = SlotContent(step, base=True)
        self._newest, self._again = None, NOTHING
        self.unstored.forget()

    def _laid_out(self, call: int) -> dict[str, bytes]:
        """The objects to be saved now, with the layout as it must be.

        A collective where what all ranks have alike is of another form; what one rank has alone is its own matter.
        """
        if self.memory is None and self._layout is not None:
            self._open(*self._layout)
        before = self._signature
        first, name = self.memory is None or before is None, f"layout/{call}"
        # The others may come to a new layout in this very call, also where it is not the first.
        with self.meeting.refusing(f"{name}/objects"):
            chunks = self.capture.chunks()
            objects, paths = self.capture.objects()
        if first or before is None:
            self._lay_out(chunks, objects, paths, name)
        elif chunks is not self._chunks or objects.keys() != set(before.objects):
            now = self.capture.signature(chunks, objects)
            if self._common(now) != self._common(before):
                self._lay_out(chunks, objects, paths, name)
            elif now != before:
                chunks, objects = self._lay_out_own(before, now)
        if chunks is not self._chunks:
            self._pair(chunks)
        return objects | self.capture.cut()

    def _common(self, signature: Signature) -> Signature:
        own = self.capture.own
        return Signature(
            tuple(one for one in signature.chunks if not own(one[0])),
            tuple(one for one in signature.objects if not own(one)),
        )

    def _lay_out_own(self, before: Signature, now: Signature) -> tuple[list[Chunk], dict[str, bytes]]:
        """Memory for other tensors that only this rank has. One that changes its form lies among the objects from then on."""
        own = self.capture.own
        old, new = ({one[0]: one for one in each.chunks if own(one[0])} for each in (before, now))
        unsteady = {name for name in old if new.get(name) != old[name]}
        if self._own_layouts >= OWN_LAYOUTS_MAX:
            unsteady |= new.keys() - old.keys()
        self.capture.keep_among_objects(unsteady)
        chunks = self.capture.chunks()
        objects, paths = self.capture.objects()
        signature = self.capture.signature(chunks, objects)
        if signature != before:
            assert self.memory is not None
            table = with_own(self.memory.table, chunks, objects, paths, own)
            room = max(self.memory.geometry.blob_bytes, blob_room(len(pack_blob(objects | self.capture.cut()))))
            self._open(table, room)
            self._own_layouts += 1
            self.stats.layouts += 1
        self._signature, self._chunks = signature, None
        return chunks, objects

    def _pair(self, chunks: list[Chunk]) -> None:
        assert self.memory is not None
        by_name = {one.name: one for one in chunks}
        pairs = [Pair(item, by_name[item.name]) for item in self.memory.table.items if not by_name[item.name].same_as]
        beside = [one for one in pairs if not one.item.live]
        live = [one for one in pairs if one.item.live]
        self._pairs, self._moves, self._chunks = (beside, live), {}, chunks

    def _moves_to(self, slot: int) -> tuple[Moves, Moves]:
        assert self.memory is not None
        found = self._moves.get(slot)
        if found is None:
            found = self._moves[slot] = (
                Moves(self.memory, slot, self._pairs[0]),
                Moves(self.memory, slot, self._pairs[1]),
            )
        return found

    @property
    def _coupled(self) -> bool:
        """Do all ranks come to the same calls soon, and can they say so to each other?"""
        meets = self.options.coupled and self.missed.unknown is None and not self.meeting.gone
        return meets or self.meeting.world == 1

    # ---- saving

    def save(
        self,
        step: int,
        call: int,
        *,
        due: bool,
        blocking: bool = False,
        populated: bool = False,
        waits: Callable[[float], bool] | None = None,
    ) -> bool:
        """Save the state after ``step``, in the ``call``-th call; ``due``: for storage too. False: left out.

        ``populated``: only into memory that is there, as training would stand for seconds while pages are found. ``waits``: does
        it wait for a slot any longer, after so many seconds? A collective only where the layout is a new one. Raises
        `MeetingFailed`, `VaultGone`, `SpecError`.
        """
        began = time.perf_counter()
        self.settle()
        self._stall_s = 0.0
        self._newest = (step, due)
        with self.replicas.refusing():
            objects = self._laid_out(call)
        self.replicas.compare(self._chunks or (), step)
        claimed = self._claim(step, call, objects, lag=self.options.lag, populated=populated, waits=waits)
        if claimed is None:
            self._left_out(step, due=due)
        else:
            self._copy(step, call, claimed, due=due, blocking=blocking)
        self._stalled(began)
        return claimed is not None

    def _claim(
        self,
        step: int,
        call: int,
        objects: dict[str, bytes],
        *,
        lag: int,
        populated: bool = False,
        waits: Callable[[float], bool] | None = None,
    ) -> tuple[int, tuple[int, int]] | None:
        """A slot that is begun, with the objects in it, their size and digest; None: there is none. ``lag`` as in `choose`."""
        memory = self.memory
        assert memory is not None
        early = frozenset(slot for slot in range(memory.geometry.slots) if populated and memory.costs(slot))
        self.why_left_out = EARLY if early else why_full(memory.control, self.generation)
        slot = self._begin(step, call, lag, early)
        if slot is None and waits is not None:
            slot = self._begin_later(step, call, lag, waits)
        if slot is None:
            if self.missed.unknown is not None and not early:
                self.why_left_out = UNPROVEN
            return None
        written = memory.write_blob(slot, objects)
        if written is not None:
            return slot, written
        _log.info("objects have outgrown their room: new memory")
        self._open(memory.table, blob_room(len(pack_blob(objects))))
        return self._claim(step, call, objects, lag=lag, populated=populated, waits=waits)

    def _begin_later(self, step: int, call: int, lag: int, waits: Callable[[float], bool]) -> int | None:
        """A slot, once there is one: whoever reads comes to an end."""
        began, pause_s, told = self.clock(), LOOK_S, False
        with steps.phase("checkpoint"):
            while waits(waited_s := self.clock() - began):
                if waited_s >= TOLD_S and not told:
                    told = True
                    _log.warning("step %d waits for memory: %s", step, self.why_left_out)
                self.pause(pause_s)
                pause_s = min(LOOK_MAX_S, 2 * pause_s)
                slot = self._begin(step, call, lag)
                if slot is not None:
                    return slot
        return None

    def _left_out(self, step: int, *, due: bool) -> None:
        """Count it, and let all others know."""
        control, early = self.control, self.why_left_out == EARLY
        self.stats.early += early
        self.stats.skipped += not early
        self._missed(step, due=due, present=True)
        if control is not None:
            control.skipped = self.stats.skipped + self.stats.early

    def has_changed(self, step: int) -> bool:
        """Whether the state may be another one now than when this rank left out ``step``; False: the same, or not left out."""
        if self.skipped is None or self.skipped[0] != step:
            return False
        before = self.skipped[1]
        return before is None or before != self._fingerprint()

    def _fingerprint(self) -> int | None:
        """Of the present state; None: it cannot be read."""
        try:
            return fingerprint(self.capture.chunks())
        except Exception:  # noqa: BLE001  # whatever a `state_dict` raises: this is what an error of a save asks for
            return None

    def failed(self, step: int, *, due: bool, why: str) -> None:
        """Tell the other ranks that an error has left out this step here, unless the state is in memory all the same."""
        control, flight = self.control, self.copier.flight
        here = {one.step for _, one in control.stamps() if one.generation == self.generation} if control else set()
        if step in here or (flight is not None and flight.step == step):
            return
        self.why_left_out = why
        if self._newest is None or self._newest[0] < step:  # the error came before the save
            self._newest = (step, due)
        self._kept = [SlotContent() if one.step == step and not one.base else one for one in self._kept]
        self._missed(step, due=due, present=True)

    def _copy(
        self, step: int, call: int, claimed: tuple[int, tuple[int, int]], *, due: bool, blocking: bool = False
    ) -> None:
        """Into a slot that is begun."""
        slot, written = claimed
        beside, live = self._moves_to(slot)
        at_live = time.perf_counter()
        stands = blocking or not self.beside
        looks = [] if stands else beside.looks(self.options.verify)
        stands = stands or looks is None
        aside = live.all_now(None if stands else self._aside)
        self.stats.live_s, self.stats.live_bytes = time.perf_counter() - at_live, live.size
        self.stats.blob_bytes, self.stats.copied_bytes = written[0], beside.size + live.size
        self._kept[slot] = SlotContent(step, call)

        def landed(flight: Flight) -> None:
            self._landed(flight, slot, written)

        samples = [] if stands else beside.samples(self.options.verify)
        flight = Flight(step, beside, samples, landed, due=due, aside=aside, looks=looks or [])
        if stands:
            beside.all_now()
            flight.samples = []
            self._landed(flight, slot, written)
            self._after(flight)
        else:
            self.copier.start(flight)

    def _begin(self, step: int, call: int, lag: int, without: frozenset[int] = frozenset()) -> int | None:
        """A slot that may be overwritten, begun; ``without`` some; None: there is none."""
        assert self.memory is not None
        control = self.memory.control
        whole = control.whole - 1
        if self.options.coupled and whole == self._again:
            whole = NOTHING
        # Saved once more it takes its own place: where two slots hold one step, who reads might take either.
        own = [slot for slot, one in enumerate(self._kept) if one.step == step and not one.base]
        for _ in self._kept:
            kept = [one._replace(pinned=slot in without or control.pinned(slot)) for slot, one in enumerate(self._kept)]
            missed = self._heard_missed()
            if own and step == self._again and self._coupled:
                slot = next((one for one in own if not kept[one].pinned), None)
            else:
                slot = choose(
                    kept,
                    call=call,
                    missed=missed,
                    whole=whole,
                    coupled=self.options.coupled and self.missed.unknown is None,
                    alone=self.meeting.world == 1,
                    lag=lag,
                )
            if slot is None:
                return None
            self._look_at_storage(control, slot)
            control.begin(slot)
            self._kept[slot] = SlotContent()
            if not control.pinned(slot):
                return slot
            # Somebody has come to read it just now, and finds it empty.
        return None

    def _look_at_storage(self, control: Control, slot: int) -> None:
        """This slot is about to be overwritten."""
        if isinstance(self.line, Standalone):
            return  # what is due there is pinned until it is written
        last = next((stamp for at, stamp in control.stamps() if at == slot), None)
        due = last is not None and last.due and last.generation == self.generation and last.step != self._again
        self.unstored.look(control.committed - 1, last.step if due and last is not None else NOTHING)
        self.stats.unstored = self.unstored.count

    def _heard_missed(self) -> set[int]:
        found = self.missed.heard(one.step for one in self._kept if one.step != NOTHING and not one.base)
        if self.missed.unknown is not None and not self._unknown_told:
            self._unknown_told = True
            self.alarms.ring(STORE_LOST, self.missed.unknown)
        return found

    def _missed(self, step: int, *, due: bool, present: bool) -> None:
        """This rank has no state of this step: all are told before we go on. ``present``: the tensors are still those of it."""
        now = self._fingerprint() if present else None
        if self.skipped is not None and self.skipped[0] == step and self.skipped[1] != now:
            now = None  # two attempts found two states: nobody knows which of them other ranks hold
        self.skipped = (step, now)
        self.missed.tell(step)
        if due and isinstance(self.line, Standalone):
            self.line.missed(step)

    def _landed(self, flight: Flight, slot: int, written: tuple[int, int]) -> None:
        """Everything is in the slot: publish it, unless it is torn. By the copier's thread, or while training stands."""
        memory = self.memory
        assert memory is not None
        control = memory.control
        self.stats.copy_s = time.perf_counter() - flight.began
        if flight.torn or flight.error is not None:
            return
        memory.sequence += 1
        control.copy_us = int(self.stats.copy_s * 1e6)
        control.saves += 1
        control.publish(slot, Stamp(self.generation, flight.step, memory.sequence, *written, due=flight.due))
        self.stats.saves += 1
        self.line.saved(self.arena_id, slot, flight.step, due=flight.due)

    def _after(self, flight: Flight) -> None:
        """By the training thread, once a flight has landed: what became of it."""
        control = self.control
        assert control is not None
        if flight.torn or flight.error is not None:
            self._kept = [SlotContent() if one.step == flight.step and not one.base else one for one in self._kept]
            # What it was copied from has been trained on, or written to, by now.
            self._missed(flight.step, due=flight.due, present=False)
            self.why_left_out = TORN if flight.torn else f"its copy failed: {flight.error}"
        if flight.torn:
            self._tell_torn(flight, control)
        else:
            self._torn_in_a_row = 0

    def _tell_torn(self, flight: Flight, control: Control) -> None:
        self.stats.torn += 1
        self._torn_in_a_row += 1
        control.torn = self.stats.torn
        told = (
            f"step {flight.step}: the state was written while it was copied, by something other than the optimizers given; the "
            "copy is thrown away. Call ckpt.step() after everything that writes it (weight clipping, averaging), or name those "
            "tensors in live=[...]"
        )
        _log.error(told)
        if self.stats.torn == 1:
            warnings.warn(told, RuntimeWarning, stacklevel=4)
        if self._torn_in_a_row >= TORN_MAX and self.beside:
            self.beside = False
            _log.error("%d copies in a row were thrown away: from now on training stands while they are made", TORN_MAX)

    def settle(self, *, raises: bool = False) -> None:
        """The flight has landed, and everybody who must know what became of it does. What went wrong in it is an alarm."""
        flight = self.copier.flight
        if flight is None:
            return
        began = time.perf_counter()
        try:
            self.copier.settle()
        except Exception as error:
            if raises:
                raise
            self.alarms.ring(f"step {flight.step} was not saved", error)
        finally:
            self._after(flight)
            self._stalled(began)

    def _stalled(self, began: float) -> None:
        took_s = time.perf_counter() - began
        self._stall_s += took_s
        self.stats.stall_s = self._stall_s
        self.stats.stall_total_s += took_s
        control = self.control
        if control is not None:
            control.stall_us, control.live_us = int(self._stall_s * 1e6), int(self.stats.live_s * 1e6)

    # ---- hooks

    def before_optimizer(self, optimizer: object) -> None:
        """An optimizer is about to write what may be in flight."""
        flight = self.copier.flight
        if flight is None:
            return
        if self.beside and torch._C._current_graph_task_id() != -1:
            _log.warning(
                "%s steps within backward: from now on training stands while copies are made", type(optimizer).__name__
            )
            self.beside = False
        began = time.perf_counter()
        if self.copier.before_overwriting() > 0:
            self._stalled(began)
        if flight.done.is_set():
            self.settle()

    def before_load(self) -> None:
        """A state is about to be loaded over what may be in flight."""
        self.settle()

    def close(self) -> None:
        """What is in flight lands; then nothing is saved any more. Idempotent."""
        try:
            self.settle()
        finally:
            self.copier.close()
            if self.memory is not None:
                self.memory.close()
                self.memory = None


def absent(meeting: Meeting, why: BaseException, call: int = 0) -> None:
    """Tell the other ranks that an error keeps this one from a collective, so that they do not wait for it in vain.

    ``call`` 0: the one of `Engine.prepare`; else the one for the first layout, in this call.
    """
    with contextlib.suppress(MeetingFailed):  # then nobody can be told anything
        if call:
            meeting.refuse(f"layout/{call}/objects", why)
        else:
            meeting.all_gather("foreseen", b"0")
