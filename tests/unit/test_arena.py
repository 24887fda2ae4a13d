"""The arena's words: a slot is whole by one store, and no bit of a header changes without being found."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.checkpoint import arena
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken, Control, Geometry, Stamp
from dlrover_core.fence import fence

GEOMETRY = Geometry(3, 100, 5000, BLOCK_BYTES + 1)
STAMP = Stamp(generation=4, step=120, sequence=7, blob_bytes=4321, blob_digest=2**64 - 5, due=True)
# What a slot's header consists of, beside the word about its digests.
HEADER_WORDS = 8


def made() -> tuple[bytearray, Control]:
    """An arena's control page."""
    memory = bytearray(PAGE)
    control = Control(memory, GEOMETRY)
    control.make(layout=11, rank=2, world=4, local_rank=0, table_bytes=90, table_digest=77)
    return memory, control


def slot_at(slot: int) -> int:
    """Where a slot's header begins."""
    return arena._SLOT_AT + slot * arena._SLOT_BYTES


# ---- geometry


@given(
    st.integers(1, arena.SLOTS_MAX),
    st.integers(0, 3 * PAGE),
    st.integers(0, 3 * PAGE),
    st.integers(0, 3 * BLOCK_BYTES),
)
def test_areas_follow_one_another(slots: int, table: int, blob: int, data: int) -> None:
    """Control page, table, and each slot's digests, blob and data lie on pages, in order, without overlap, within the whole."""
    sizes = Geometry(slots, table, blob, data)
    end = PAGE + table
    for slot in range(slots):
        for begin, size in (
            (sizes.digests_at(slot), sizes.blocks * 8), (sizes.blob_at(slot), blob), (sizes.data_at(slot), data)
        ):  # fmt: skip
            assert begin % PAGE == 0
            assert end <= begin
            end = begin + size
    assert end <= sizes.total_bytes
    assert sizes.total_bytes % PAGE == 0
    assert sizes.blocks * BLOCK_BYTES >= data


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (9, 1, 1, 1), (2, -1, 1, 1), (2, 1, -1, 1), (2, 1, 1, -1)])
def test_impossible_geometry(sizes: tuple[int, int, int, int]) -> None:
    """What no arena can be is refused when it is said."""
    with pytest.raises(ArenaBroken, match="no arena is like this"):
        Geometry(*sizes)


def test_slots_fit_into_the_control_page() -> None:
    """As many slots as there may be have their headers in the page."""
    assert slot_at(arena.SLOTS_MAX) <= PAGE


# ---- publication


def test_a_slot_is_whole_by_one_store() -> None:
    """Until the very last store nobody sees a state; after it, everybody the whole of it."""
    memory, control = made()
    seen: list[Stamp | None] = []
    stores: list[int] = []
    writes = control._set

    def watched(at: int, value: int) -> None:
        seen.append(Control(memory).stamp(1))
        stores.append(at)
        writes(at, value)

    control._set = watched  # type: ignore[method-assign]
    control.publish(1, STAMP)
    assert seen == [None] * HEADER_WORDS
    assert Control(memory).stamp(1) == STAMP
    assert stores[-1] == slot_at(1) + arena._STATE
    assert stores.count(stores[-1]) == 1


def test_overwriting_takes_the_old_state_away_first() -> None:
    """From its beginning to its publication a slot that is overwritten holds nothing, whatever is in its header by then."""
    memory, control = made()
    control.publish(0, STAMP)
    control.begin(0)
    assert Control(memory).stamp(0) is None
    newer = STAMP._replace(step=122, sequence=8)
    writes = control._set

    def dies_late(at: int, value: int) -> None:
        if at == slot_at(0) + arena._STATE:
            raise KeyboardInterrupt
        writes(at, value)

    control._set = dies_late  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        control.publish(0, newer)
    assert Control(memory).stamp(0) is None


def stops(memory: bytearray, between: Callable[[], object], *, loads: bool = False) -> Control:
    """A control whose every store, or load, has ``between`` around it: what another process does at that very moment."""
    control = Control(memory)
    writes, reads = control._set, control._get

    def stored(at: int, value: int) -> None:
        between()
        writes(at, value)
        between()

    def loaded(at: int) -> int:
        between()
        return reads(at)

    if loads:
        control._get = loaded  # type: ignore[method-assign]
    else:
        control._set = stored  # type: ignore[method-assign]
    return control


def test_a_state_becomes_due_by_one_store_that_leaves_it_the_same() -> None:
    """Before and after every store a reader finds the state whole: not due, then due; never damaged, never gone."""
    memory, control = made()
    state = STAMP._replace(due=False)
    control.publish(1, state)
    seen: list[Stamp | None] = []
    marks = stops(memory, lambda: seen.append(Control(memory).stamp(1)))
    assert marks.mark_due(1, state)
    assert seen == [state, state._replace(due=True)]
    assert state.same(Control(memory).stamp(1))
    assert Control(memory).stamp(1) != state
    assert marks.mark_due(1, state), "again it changes nothing"
    assert seen[2:] == [state._replace(due=True)] * 2
    assert not control.mark_due(1, state._replace(sequence=9)), "another state is not marked"
    control.begin(1)
    assert not control.mark_due(1, state), "nor one that is there no more"
    assert control.stamp(1) is None


@pytest.mark.parametrize("load", range(14))
def test_a_state_that_becomes_due_while_its_header_is_read_is_not_damaged(load: int) -> None:
    """Whichever word a reader has come to when another process marks the state."""
    memory, control = made()
    state = STAMP._replace(due=False)
    control.publish(1, state)
    loads = itertools.count()
    reader = stops(memory, lambda: next(loads) == load and control.mark_due(1, state), loads=True)
    assert state.same(reader.stamp(1))
    assert next(loads) > load, "the reader came so far"


@pytest.mark.parametrize("load", range(14))
def test_a_step_that_is_published_anew_while_its_header_is_read_is_not_damaged(load: int) -> None:
    """Saved once more a step has the same number: a reader finds the old state, the new one, or none."""
    memory, control = made()
    newer = STAMP._replace(sequence=8, blob_digest=1, due=False)

    def anew() -> None:
        if next(loads) == load:
            control.begin(1)
            control.publish(1, newer)

    control.publish(1, STAMP)
    loads = itertools.count()
    found = stops(memory, anew, loads=True).stamp(1)
    assert found is None or found.same(STAMP) or found == newer


def test_a_slot_that_is_published_without_being_begun_shows_no_mixture() -> None:
    """Between any two stores there is the state before, none, or the new one."""
    memory, control = made()
    control.publish(1, STAMP)
    newer = STAMP._replace(step=122, sequence=8)
    seen: set[Stamp | None] = set()
    stops(memory, lambda: seen.add(Control(memory).stamp(1))).publish(1, newer)
    assert seen == {STAMP, None, newer}


def test_slots_are_independent() -> None:
    """What happens to one slot leaves the others as they were."""
    memory, control = made()
    control.publish(0, STAMP)
    control.publish(2, STAMP._replace(step=122))
    control.begin(2)
    assert dict(Control(memory).stamps()) == {0: STAMP}


# ---- damage


@pytest.mark.parametrize("word", range(HEADER_WORDS))
def test_a_flipped_bit_of_a_header_is_found(word: int) -> None:
    """Any bit of any word of a slot's header: the slot is damaged, or empty; never another state than was saved."""
    memory, control = made()
    control.publish(0, STAMP)
    control.publish(1, STAMP._replace(step=118))
    for bit in range(64):
        at = slot_at(0) + 8 * word + bit // 8
        memory[at] ^= 1 << bit % 8
        with contextlib.suppress(ArenaBroken):
            assert Control(memory).stamp(0) is None
        # A damaged slot keeps nobody from the others.
        assert dict(Control(memory).stamps()) == {1: STAMP._replace(step=118)}
        memory[at] ^= 1 << bit % 8
    assert Control(memory).stamp(0) == STAMP


@pytest.mark.parametrize("word", ["layout", "rank", "world", "table_used", "table_digest"])
def test_a_flipped_bit_of_what_a_state_belongs_to_is_found(word: str) -> None:
    """A state is of one layout, rank and world: where one of these words changes, its slots are damaged."""
    memory, control = made()
    control.publish(0, STAMP)
    for bit in range(64):
        setattr(control, word, getattr(control, word) ^ 1 << bit)
        with pytest.raises(ArenaBroken, match="damaged"):
            Control(memory).stamp(0)
        setattr(control, word, getattr(control, word) ^ 1 << bit)
    assert Control(memory).stamp(0) == STAMP


@pytest.mark.parametrize("at", [0, 8, 16, 24, 32])
def test_a_flipped_bit_of_the_geometry_is_found(at: int) -> None:
    """Whoever opens an arena whose magic or sizes have changed finds no state in it."""
    memory, control = made()
    control.publish(0, STAMP)
    for bit in range(64):
        memory[at + bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ArenaBroken):
            assert dict(Control(memory).stamps()) == {}
        memory[at + bit // 8] ^= 1 << bit % 8
    assert dict(Control(memory).stamps()) == {0: STAMP}


def test_memory_that_is_no_arena() -> None:
    """Memory without the magic is refused: also one whose maker died before it was done."""
    with pytest.raises(ArenaBroken, match="no arena"):
        Control(bytearray(PAGE))


def test_a_slot_that_is_not_there() -> None:
    """A slot beyond the arena's is refused, not read from somewhere."""
    _, control = made()
    with pytest.raises(ArenaBroken, match="slot 3 of 3"):
        control.stamp(3)


# ---- levels


def test_pins() -> None:
    """Each slot is pinned by itself, twice is once, and another process sees it."""
    memory, control = made()
    control.pin(0)
    control.pin(2)
    control.pin(2)
    assert [Control(memory).pinned(slot) for slot in range(3)] == [True, False, True]
    control.unpin(2)
    assert [Control(memory).pinned(slot) for slot in range(3)] == [True, False, False]


def test_digests_are_of_one_publication() -> None:
    """Digests name the publication that they are of: after the next one they are nobody's."""
    memory, control = made()
    control.publish(1, STAMP)
    control.note_hashed(1, STAMP.sequence)
    assert Control(memory).hashed(1) == STAMP.sequence
    control.begin(1)
    control.publish(1, STAMP._replace(sequence=8))
    assert Control(memory).hashed(1) != 8


class Watched(Control):
    """Tells what is loaded, stored and fenced, in order; words without a name here are told once in a row."""

    told: ClassVar[list[str]] = []
    NAMES: ClassVar = {
        arena._MAGIC: "magic",
        arena._PINNED: "pinned",
        slot_at(1) + arena._STATE: "state",
        slot_at(1) + arena._HASHED: "hashed",
    }

    @classmethod
    def tell(cls, what: str) -> None:
        """It happened."""
        if " " in what or cls.told[-1:] != [what]:
            cls.told.append(what)

    @classmethod
    def since(cls) -> list[str]:
        """What happened since the last call."""
        found, cls.told = cls.told, []
        return found

    def _get(self, at: int) -> int:
        self.tell(f"load {self.NAMES.get(at, '')}".strip())
        return super()._get(at)

    def _set(self, at: int, value: int) -> None:
        self.tell(f"store {self.NAMES.get(at, '')}".strip())
        super()._set(at, value)


def test_what_is_stored_in_order_is_seen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain stores and loads order nothing on some CPUs: a fence lies wherever the other side relies on an order."""
    monkeypatch.setattr(arena, "fence", lambda: Watched.told.append("fence"))
    memory = bytearray(PAGE)
    Watched.since()
    control = Watched(memory, GEOMETRY)
    control.make(layout=11, rank=2, world=4, local_rank=0, table_bytes=90, table_digest=77)
    assert Watched.since() == ["store", "fence", "store magic"]
    Watched(memory).release()
    assert Watched.since() == ["load magic", "fence", "load"]
    control.begin(1)
    assert Watched.since() == ["store state", "fence"]
    control.publish(1, STAMP)
    assert Watched.since() == ["load state", "load", "store", "fence", "store state", "fence"]
    assert control.stamp(1) == STAMP
    assert Watched.since() == ["fence", "load state", "fence", "load", "fence", "load state", "load"]
    control.pin(1)
    assert Watched.since() == ["load pinned", "store pinned", "fence"]
    control.unpin(1)
    assert Watched.since() == ["fence", "load pinned", "store pinned"]
    control.note_hashed(1, 7)
    assert Watched.since() == ["fence", "store hashed"]
    control.hashed(1)
    assert Watched.since() == ["load hashed", "fence"]


def test_a_fence_takes_no_lock_that_a_fork_could_find_taken() -> None:
    """It waits for nobody, in as many threads as like, and raises nothing."""
    threads = [threading.Thread(target=lambda: [fence() for _ in range(1000)], daemon=True) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not any(one.is_alive() for one in threads)


def test_every_word_has_its_own_place() -> None:
    """No two levels share a word, and none lies where slots do."""
    places = [value._at for value in vars(Control).values() if isinstance(value, arena.Word)]
    assert len(places) == len(set(places))
    assert all(place % 8 == 0 and place < arena._SLOT_AT and place != arena._PINNED for place in places)
