import pytest
import torch
from tests.unit.stored import OBJECTS, Arena, pickled, state, whole

from dlrover_adapters.checkpoint.slotview import SlotDamaged, SlotGone, SlotView
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken


def test_a_slot_shows_its_tensors_without_a_copy_and_its_objects() -> None:
    """Every tensor of a slot, of whatever shape and dtype, is there bit for bit, and shares the arena's memory."""
    tensors = state()
    arena = whole(tensors)
    view = arena.view()
    for item in view.table.items:
        assert torch.equal(view.tensor(item), tensors[item.name])
    first = view.tensor(view.table.items[0])
    arena.memory[arena.geometry.data_at(0)] ^= 1
    assert not torch.equal(first, tensors["model.weight"])
    assert view.objects() == {name: pickled(value) for name, value in OBJECTS.items()}


def test_the_memory_can_be_closed_after_a_view_is_released() -> None:
    """A view that is released holds nothing; the arena's mapping can go."""
    arena = whole(state())
    view = arena.view()
    view.release()
    arena.control.release()
    arena.memory.close()


def test_an_empty_slot_and_an_overwritten_one_are_told() -> None:
    """A slot that holds nothing has no view, and a view knows when the slot holds something else than it did."""
    arena = whole(state())
    with pytest.raises(SlotGone):
        SlotView(arena.memory, 1)
    view = arena.view()
    assert view.unchanged()
    arena.control.begin(0)
    assert not view.unchanged()
    with pytest.raises(SlotGone):
        view.verify()
    arena.control.publish(0, arena.stamp._replace(step=121, sequence=2))
    assert not view.unchanged()


def test_a_state_that_becomes_due_while_it_is_read_is_the_same_state() -> None:
    """A rank that closes marks its newest state as due; whoever reads or writes it at that moment goes on."""
    arena = whole(state())
    view = arena.view()
    assert not view.stamp.due
    assert arena.control.mark_due(0, view.stamp)
    assert view.unchanged()
    assert view.verify()
    assert arena.view().stamp.due


def test_a_changed_byte_anywhere_is_found_and_named() -> None:
    """Of a slot with digests no byte of data, blob, table or header can change unnoticed; the block and its tensors are named."""
    big = torch.zeros(BLOCK_BYTES // 4 + 100)
    arena = Arena([("a", big, [0], big.shape), ("b", big, [0], big.shape)], {})
    assert arena.view().verify()
    places = {
        arena.geometry.data_at(0) + 5: "a",
        arena.geometry.data_at(0) + BLOCK_BYTES + 500: "a, b",
        arena.geometry.data_at(0) + 2 * BLOCK_BYTES + 700: "b",
        arena.geometry.blob_at(0): "blob",
        PAGE + 3: "table",
        1024 + 8: "header",
    }
    for at, told in places.items():
        arena.memory[at] ^= 16
        with pytest.raises(ArenaBroken, match=told):
            arena.view().verify()
        arena.memory[at] ^= 16
    assert arena.view().verify()


def test_what_was_not_hashed_is_not_said_to_be_verified() -> None:
    """Without digests, or by choice, the data are not compared, and verify says so; header and blob always are."""
    arena = whole(state(), hashed=False)
    assert not arena.view().verify()
    arena.hash()
    assert not arena.view().verify(full=False)
    assert arena.view().verify()
    arena.control.publish(0, arena.stamp._replace(sequence=2))
    assert not arena.view().verify()


def test_memory_that_is_no_arena_is_refused() -> None:
    """Foreign bytes, and an arena that was cut short, are refused in words."""
    arena = whole(state())
    with pytest.raises(ArenaBroken):
        SlotView(bytearray(PAGE), 0)
    with pytest.raises(ArenaBroken, match="bytes of memory"):
        SlotView(bytearray(arena.memory[: -2 * PAGE]), 0)
    with pytest.raises(SlotDamaged, match="outside"):
        arena.view().raw(arena.view().table.items[0]._replace(at=1 << 40))
