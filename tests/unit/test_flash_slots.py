"""The memory of `FlashCheckpoint`: which saves it takes, which are left out, and when another one is made."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashing import Training, plain, saved
from torch import nn

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.table import Table
from dlrover_adapters.torch.checkpoint import memory
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.line import slots_of
from dlrover_adapters.torch.checkpoint.memory import Mapped
from dlrover_core.checkpoint.arena import SLOTS_MAX, Geometry, Stamp

pytestmark = pytest.mark.usefixtures("alone")


def test_a_save_with_every_slot_in_use_is_left_out_and_counted() -> None:
    """Whoever reads the memory is not disturbed, and training goes on."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        list(run.train(1, 2, ckpt.step))
        ckpt.wait()
        assert ckpt._engine is not None
        control = ckpt._engine.control
        assert control is not None
        control.pin(0)
        control.pin(1)
        list(run.train(3, 4, ckpt.step))
        assert (ckpt.stats.skipped, control.skipped) == (2, 2)
        assert {stamp.step for _, stamp in control.stamps()} == {1, 2}
        control.unpin(0)
        control.unpin(1)
        list(run.train(5, 5, ckpt.step))
        ckpt.wait()
        assert {stamp.step for _, stamp in control.stamps()} == {2, 5}
        assert len(ckpt._costs.writes) == 1, "how long slots are read for says how often storage can keep up"


def test_a_save_that_an_ended_generation_leaves_no_room_for_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """What is in the way is what the generation before has left, and not a slow storage."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        list(run.train(1, 2, ckpt.step))
        ckpt.wait()
        engine = ckpt._engine
        assert engine is not None
        control = engine.control
        assert control is not None
        for slot, stamp in control.stamps():
            control.publish(slot, stamp._replace(generation=engine.generation - (stamp.step == 2)))
            control.pin(slot)
        list(run.train(3, 3, ckpt.step))
        assert (
            "step 3 was not saved (1 by now): step 2 of the generation that ended is kept until it is on" in caplog.text
        )
        control.unpin(0)
        control.unpin(1)


def test_replaced_tensors_of_the_same_form_keep_the_memory() -> None:
    """``optimizer.load_state_dict`` makes new tensors: the next save copies those."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        list(run.train(1, 2, ckpt.step))
        memory = ckpt._engine.memory if ckpt._engine is not None else None
        run.parts["optimizer"].load_state_dict(run.parts["optimizer"].state_dict())
        for left in run.train(3, 4, ckpt.step):
            ckpt.wait()
            _, tensors, _ = saved(ckpt)
            assert torch.equal(tensors["optimizer.state.0.weight.exp_avg"], left["optimizer"]["state"][0]["exp_avg"])
        assert ckpt._engine is not None
        assert ckpt._engine.memory is memory
        assert ckpt.stats.layouts == 1


def test_other_tensors_are_another_layout_in_new_memory() -> None:
    """A parameter more: what was saved before is another state."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        list(run.train(1, 2, ckpt.step))
        assert ckpt._engine is not None
        assert ckpt._engine.memory is not None
        layout = ckpt._engine.memory.table.layout
        more = nn.Linear(2, 2)
        run.parts["model"].append(nn.Dropout(0.0))
        run.parts["model"].more = nn.Identity()
        run.parts["model"][0].register_parameter("more", more.weight)
        run.parts["optimizer"].add_param_group({"params": [more.weight]})
        list(run.train(3, 4, ckpt.step))
        ckpt.wait()
        assert ckpt._engine.memory.table.layout != layout
        step, tensors, _ = saved(ckpt)
        assert step == 4
        assert torch.equal(tensors["model.0.more"], more.weight)


def test_memory_is_made_before_the_first_step_as_it_will_be_needed() -> None:
    """What Adam keeps is foreseen, so that the first save finds its pages."""
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=2) as ckpt:
        list(run.train(1, 1, ckpt.step))
        assert ckpt._engine is not None
        memory = ckpt._engine.memory
        assert memory is not None
        assert memory.populated.wait(30)
        assert ckpt.stats.saves == 0
        list(run.train(2, 4, ckpt.step))
        ckpt.wait()
        assert (ckpt._engine.memory, ckpt.stats.layouts, ckpt.stats.saves) == (memory, 1, 2)


def test_saves_that_come_before_their_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training does not stand while pages are found, unless somebody asks for a save himself."""
    found, populate = threading.Event(), Mapped._populate
    monkeypatch.setattr(memory, "WORTH_WAITING_BYTES", 0)
    monkeypatch.setattr(Mapped, "_populate", lambda mapped, pin: (found.wait(30), populate(mapped, pin)))
    run = Training(plain)
    with FlashCheckpoint("", **run.parts, every=1) as ckpt:
        list(run.train(1, 2, ckpt.step))
        assert (ckpt.stats.saves, ckpt.stats.early, ckpt.stats.skipped, ckpt.stats.populated) == (0, 2, 0, False)
        assert ckpt.save(2)
        found.set()
        assert ckpt._engine is not None
        assert ckpt._engine.memory is not None
        assert ckpt._engine.memory.populated.wait(30)
        list(run.train(3, 4, ckpt.step))
        ckpt.wait()
        assert (ckpt.stats.saves, ckpt.stats.early, ckpt.stats.populated) == (3, 2, True)
        assert saved(ckpt)[0] == 4


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_over_before_its_memory_is_there_is_on_storage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int
) -> None:
    """All saves were left out: its last state is saved when it closes, and what they cost is not taken for what saves cost."""
    found, populate = threading.Event(), Mapped._populate
    monkeypatch.setattr(memory, "WORTH_WAITING_BYTES", 0)
    monkeypatch.setattr(Mapped, "_populate", lambda mapped, pin: (found.wait(30), populate(mapped, pin)))
    run = Training(plain)
    with FlashCheckpoint(str(tmp_path), **run.parts, every=every) as ckpt:
        list(run.train(1, 5, ckpt.step))
        assert (ckpt.stats.saves, ckpt.stats.early) == (0, 5 // every)
        assert not ckpt._costs.stalls
        found.set()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-0000000005"]
    again = Training(plain)
    with FlashCheckpoint(str(tmp_path), **again.parts) as ckpt:
        assert ckpt.restore() == 5
    assert all(map(torch.equal, again.parts["model"].parameters(), run.parts["model"].parameters()))


def test_objects_that_outgrow_their_room_get_more(tmp_path: Path) -> None:
    """A history that grows with each step is saved all the same."""
    run = Training(plain)
    state: dict[str, Any] = {"history": ""}
    with FlashCheckpoint("", **run.parts, state=state, every=1) as ckpt:
        for step in range(1, 4):
            state["history"] += "x" * 1_500_000
            list(run.train(step, step, ckpt.step))
        ckpt.wait()
        step, _, objects = saved(ckpt)
        assert (step, len(objects["state.history"]) > 4_500_000) == (3, True)


def test_no_number_of_a_publication_is_used_again() -> None:
    """A killed worker left a slot begun, whose digests are there yet: its successor's state is not taken for what they are of."""
    table = Table(7, 1, 0, ((0,),), ())
    geometry = Geometry(2, len(table.packed()), 100, 64)
    fd = os.memfd_create("test")
    os.ftruncate(fd, geometry.total_bytes)

    def mapped(table: Table, *, fresh: bool = False) -> Mapped:
        return Mapped(os.dup(fd), table, geometry, local_rank=0, fresh=fresh)

    first = mapped(table, fresh=True)
    assert first.sequence == 0
    for sequence in (1, 2):
        first.control.publish(sequence % 2, Stamp(1, 5 * sequence, sequence, 0, digest(b"")))
        first.control.note_hashed(sequence % 2, sequence)
    first.control.begin(0)  # for a third
    second = mapped(table)
    assert [stamp.step for _slot, stamp in second.control.stamps()] == [5]
    assert second.sequence > 2
    third = mapped(table._replace(layout=8))
    assert list(third.control.stamps()) == []
    assert third.sequence > 2
    for one in (first, second, third):
        one.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("nodes", "size", "wanted"),
    [(1, 1000, 2), (2, 1000, SLOTS_MAX), (2, 4 * 2**20, SLOTS_MAX), (2, 4 * 2**20 + 1, 2)],
    ids=["one node", "small", "as large as may be", "large"],
)
def test_small_states_that_other_nodes_copy_have_every_slot(nodes: int, size: int, wanted: int) -> None:
    """They are saved faster than copies travel, and a lost node is to leave a step that all others still have."""
    told = SimpleNamespace(nodes=nodes, copies=nodes > 1)
    line: Any = SimpleNamespace(told=told, nproc=1)
    assert slots_of(line, ((0, 1),) if nodes > 1 else ((0,),), 2, size) == wanted
