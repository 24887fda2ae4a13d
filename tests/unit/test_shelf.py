"""Memory for states that come whole: which slot the next one takes, and what waits for what."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.unit.shelving import Agent, Line, phases, running

from dlrover_adapters.torch.checkpoint.shelf import SLOTS, TOLD_S, Lasting, NoSlot, Shelf, layout_of, whole

BESIDE_S = 0.3
"""For this long it is seen that something does not happen."""


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """This process runs under it."""
    with running(monkeypatch) as one:
        yield one


def shelf_of(line: Line, *, world: int = 1, **how: Any) -> Any:
    """One whose states nobody writes to storage."""
    return Shelf("", rank=0, world=world, kind="dcp", vault=line, **how)  # type: ignore[arg-type]  # as good as a vault


def test_slots_that_are_read_are_not_overwritten(agent: Agent) -> None:
    """With every other slot pinned a save takes none of them; with none left it fails, is counted, and what was there stays."""
    shelf = shelf_of(Line(agent))
    pieces = [whole("w", torch.ones(4))]
    layout = layout_of("one")
    slots = [shelf.put(step, pieces, {}, layout=layout, holders=((0,),)) for step in range(1, SLOTS + 1)]
    assert sorted(slots) == list(range(SLOTS))
    control = shelf._control
    for slot in slots[1:]:
        control.pin(slot)
    assert shelf.put(9, pieces, {}, layout=layout, holders=((0,),)) == slots[0]
    control.pin(slots[0])
    with pytest.raises(NoSlot, match="faster than storage or the partner"):
        shelf.put(10, pieces, {}, layout=layout, holders=((0,),))
    assert control.skipped == 1
    assert sorted(stamp.step for _, stamp in control.stamps()) == [2, 3, 9]
    shelf.close()


def test_saves_of_one_step_do_not_use_the_slots_up(agent: Agent) -> None:
    """As a trainer's that saves a step under several names, or makes it again after a restart: the newest save stays."""
    shelf = shelf_of(Line(agent))
    how: Any = {"layout": layout_of("one"), "holders": ((0,),)}
    pieces = [whole("w", torch.ones(4))]
    slots = [shelf.put(6, pieces, {}, **how) for _ in range(2 * SLOTS + 1)]
    assert all(slot != after for slot, after in itertools.pairwise(slots))
    shelf.generation += 1
    shelf._begun = {}  # a process of the next generation knows of no save yet
    again = [shelf.put(3, pieces, {}, **how) for _ in range(SLOTS + 1)]
    assert all(slot != after for slot, after in itertools.pairwise(again))
    assert again[0] != slots[-1]
    shelf.close()


def test_a_save_waits_for_whoever_reads(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """While all slots are read, a save that may wait does, and says why; it takes what is let go."""
    now, paused = 0.0, 0

    def pause(seconds: float) -> None:
        nonlocal now, paused
        now, paused = now + seconds, paused + 1
        if now > TOLD_S + 1:
            shelf._control.unpin(slots[1])

    shelf = shelf_of(Line(agent), clock=lambda: now, pause=pause)
    how: Any = {"layout": layout_of("one"), "holders": ((0,),)}
    pieces = [whole("w", torch.ones(4))]
    slots = [shelf.put(step, pieces, {}, **how) for step in range(1, SLOTS + 1)]
    for slot in slots:
        shelf._control.pin(slot)
    assert shelf.put(9, pieces, {}, wait_s=60, **how) == slots[1]
    assert now > TOLD_S + 1
    assert paused < 100
    assert [one.message for one in caplog.records].count(
        "step 9 waits for memory: states come faster than storage or the partner node takes them"
    ) == 1
    assert sorted(stamp.step for _, stamp in shelf._control.stamps()) == [1, 3, 9]
    assert shelf._control.skipped == 0
    shelf._control.pin(slots[1])
    shelf._control.pin(slots[0])
    now = 0.0
    with pytest.raises(NoSlot, match=r"for 2 s: .*save less often"):
        shelf.put(10, pieces, {}, wait_s=2, **how)
    shelf.close()


@pytest.mark.parametrize(
    ("nodes", "copies", "holders", "more"),
    [(1, True, ((0,), (1,)), 0), (2, False, ((0,), (1,)), 0), (2, True, ((0,), (1,)), 2), (2, True, ((0, 1),), 0)],
)
def test_room_for_what_is_copied_to_other_nodes(
    agent: Agent, nodes: int, copies: bool, holders: Any, more: int
) -> None:
    """Two slots more where parts of a state are copied to a partner: these stay pinned from copy to copy."""
    line = Line(agent)
    line.world, line.told = 2, line.told._replace(nodes=nodes, copies=copies)
    line.ready = lambda *_: None  # type: ignore[method-assign]
    shelf = shelf_of(line, world=2)
    shelf.put(1, [whole("w", torch.ones(4))], {}, layout=layout_of("one"), holders=holders)
    assert shelf._control.geometry.slots == SLOTS + more
    shelf.close()


@pytest.mark.parametrize("wait", ["a slot", "a copy"])
def test_a_long_save_is_no_hang(agent: Agent, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    """A save that training may be standing for is announced once it takes long, to its end; a short one is not."""
    now, told = 0.0, phases(monkeypatch)
    inside: list[list[str]] = []

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        inside.append(list(told))
        if now > TOLD_S + 1:
            shelf._control.unpin(0)

    shelf = shelf_of(Line(agent), clock=lambda: now, pause=pause)
    how: Any = {"layout": layout_of("one"), "holders": ((0,),)}
    pieces = [whole("w", torch.ones(4)), whole("v", torch.ones(4))]
    for step in range(1, SLOTS + 1):
        shelf.put(step, pieces, {}, **how)
    assert told == []
    if wait == "a slot":
        for slot in range(SLOTS):
            shelf._control.pin(slot)
    else:
        copied = Lasting.look

        def copying(self: Lasting, *words: Any) -> bool:
            nonlocal now
            now += TOLD_S
            return copied(self, *words)

        monkeypatch.setattr(Lasting, "look", copying)
    shelf.put(9, pieces, {}, wait_s=60, **how)
    assert told == ["checkpoint", ""]
    assert all(one in ([], ["checkpoint"]) for one in inside)
    shelf.close()


@pytest.mark.parametrize("shelves", [1, 2])
def test_two_states_at_once_go_into_two_slots(agent: Agent, monkeypatch: pytest.MonkeyPatch, shelves: int) -> None:
    """While a state is copied by one thread, another's waits, though it is of another shelf: both are whole in the end."""
    both = [shelf_of(Line(agent)) for _ in range(shelves)]
    beside, copies, copy = threading.Event(), [0], Shelf._copy
    later: list[Any] = []

    def copying(shelf: Any, slot: int, *what: Any) -> None:
        copies[0] += 1
        if copies[0] == 1:
            later.append(pool.submit(put, 2))
            assert not beside.wait(BESIDE_S)
            copy(shelf, slot, *what)
        else:
            beside.set()
            copy(shelf, slot, *what)

    def put(step: int) -> Any:
        pieces = [whole("w", torch.full((1000,), float(step)))]
        return both[step % shelves].put(step, pieces, {}, layout=layout_of("one"), holders=((0,),))

    monkeypatch.setattr(Shelf, "_copy", copying)
    with ThreadPoolExecutor(2) as pool:
        slots = [pool.submit(put, 1).result(), later[0].result()]
    assert len(set(slots)) == 2
    found = {view.stamp.step: view.tensor(view.table.items[0]).unique().tolist() for _, _, view in agent.views()}
    assert found == {1: [1.0], 2: [2.0]}
    for one in both:
        one.close()


def test_a_slot_that_is_written_by_us_stays_though_another_layout_comes_between(agent: Agent) -> None:
    """Slots that are kept are those of their own arena: neither forgotten at the next layout, nor taken for its slots."""
    shelf = shelf_of(Line(agent))
    layouts = {name: {"layout": layout_of(name), "holders": ((0,),)} for name in ("full", "weights")}
    pieces = {name: [whole("w", torch.ones(size))] for name, size in (("full", 400), ("weights", 40))}

    def put(step: int, name: str) -> Any:
        return shelf.put_busy(step, pieces[name], {}, **layouts[name])

    kept = [put(step, "full") for step in range(SLOTS)]
    assert len({put(10 + step, "weights").slot for step in range(SLOTS)}) == SLOTS
    with pytest.raises(NoSlot):
        put(20, "full")
    assert [one.view.unchanged() for one in kept] == [True] * SLOTS
    shelf.free(kept[1])
    assert put(21, "full").slot == kept[1].slot
    shelf.close()


def test_without_an_agent_memory_of_another_layout_is_all_free() -> None:
    """What is kept of the memory before is no slot of the new one."""
    shelf = Shelf("", rank=0, world=1, kind="torch")
    kept = []
    for number, name in enumerate(("full", "weights", "full")):
        pieces = [whole("w", torch.full((len(name),), float(number)))]
        how: Any = {"layout": layout_of(name), "holders": ((0,),)}
        kept += [shelf.put_busy(step, pieces, {}, **how) for step in range(SLOTS)]
    assert [one.view.tensor(one.view.table.items[0])[0].item() for one in kept] == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    for one in kept:
        one.view.release()
        shelf.free(one)
    shelf.close()
