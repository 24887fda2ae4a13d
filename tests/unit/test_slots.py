"""Which slot is overwritten: all that two ranks can do, one action at a time, and a kill between any two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from dlrover_core.checkpoint.slots import NOTHING, SlotContent, choose, slots_for

COLLECTIVE, SETTLE, LOOK, SAVE = range(4)


class Slot(NamedTuple):
    """``first`` and ``second``: of which optimizer step each half of what lies there is; ``step``: what it was published as."""

    step: int = NOTHING
    first: int = NOTHING
    second: int = NOTHING
    pinned: bool = False


class Rank(NamedTuple):
    """One rank between two actions: in ``call``, about to do ``at``. ``flying``: the slot that its copier writes, and which."""

    call: int
    at: int
    slots: tuple[Slot, ...]
    flying: tuple[int, int] | None = None  # slot, step
    torn: int = NOTHING
    seen: frozenset[int] = frozenset()
    whole: int = NOTHING


class World(NamedTuple):
    """Both, what is posted, and how many pins and tears there have been."""

    ranks: tuple[Rank, Rank]
    missed: frozenset[int] = frozenset()
    pins: int = 0
    tears: int = 0


class Rules(NamedTuple):
    """The job, what may happen to it, and which of the rules are kept."""

    every: int
    slots: int
    calls: int = 6
    coupled: bool = True
    lag: int = 2
    pins: int = 0
    tears: int = 0
    told: bool = True  # who leaves a save out says so
    awaited: bool = True  # the optimizer waits for the copy


def common(world: World) -> set[int]:
    """Steps that both have whole."""
    a, b = ({slot.step for slot in rank.slots if slot.step != NOTHING} for rank in world.ranks)
    return a & b


def of_rank(world: World, number: int, rules: Rules) -> Iterator[World]:
    """What the rank, its copier, its saver and its agent may do next."""
    rank, other = world.ranks[number], world.ranks[1 - number]

    def became(changed: Rank, **more: object) -> World:
        ranks = (changed, other) if number == 0 else (other, changed)
        return world._replace(ranks=ranks, **more)  # type: ignore[arg-type]

    def with_slot(at: int, slot: Slot, **more: object) -> Rank:
        slots = (*rank.slots[:at], slot, *rank.slots[at + 1 :])
        return rank._replace(slots=slots, **more)  # type: ignore[arg-type]

    # The rank itself.
    if rank.call <= rules.calls:
        if rank.at == COLLECTIVE:
            if not rules.coupled or (other.call, other.at) >= (rank.call, COLLECTIVE):
                yield became(rank._replace(at=SETTLE))
        elif rank.at == SETTLE:
            if rank.flying is None or not rules.awaited:
                missed = world.missed | {rank.torn} if rank.torn != NOTHING and rules.told else world.missed
                yield became(rank._replace(at=LOOK, torn=NOTHING), missed=missed)
        elif rank.at == LOOK:
            yield became(rank._replace(at=SAVE, seen=world.missed))
        else:
            yield saved(world, rank, rules, became)
    # Its copier: one half, the other, then the publication, or none.
    if rank.flying is not None:
        at, step = rank.flying
        slot, now = rank.slots[at], rank.call - (rank.at <= SETTLE)
        if slot.first == NOTHING:
            yield became(with_slot(at, slot._replace(first=now)))
        elif slot.second == NOTHING:
            yield became(with_slot(at, slot._replace(second=now)))
        else:
            yield became(with_slot(at, slot._replace(step=step), flying=None))
            if world.tears < rules.tears:
                yield became(rank._replace(flying=None, torn=step), tears=world.tears + 1)
    # Its saver reads a slot for as long as it likes.
    for at, slot in enumerate(rank.slots):
        if slot.pinned:
            yield became(with_slot(at, slot._replace(pinned=False)))
        elif slot.step != NOTHING and world.pins < rules.pins:
            yield became(with_slot(at, slot._replace(pinned=True)), pins=world.pins + 1)
    # Its agent hears, late or never, what is whole everywhere.
    newest = max(common(world), default=NOTHING)
    if not rules.coupled and newest > rank.whole:
        yield became(rank._replace(whole=newest))


def saved(world: World, rank: Rank, rules: Rules, became: object) -> World:
    """The end of a call: a copy is begun if one is due, or left out."""
    after = rank._replace(call=rank.call + 1, at=COLLECTIVE, seen=frozenset())
    if rank.call % rules.every:
        return became(after)  # type: ignore[operator, no-any-return]
    kept = [SlotContent(slot.step, slot.step, pinned=slot.pinned) for slot in rank.slots]
    at = choose(kept, call=rank.call, missed=rank.seen, whole=rank.whole, coupled=rules.coupled, lag=rules.lag)
    if at is None or rank.flying is not None:
        missed = world.missed | {rank.call} if rules.told else world.missed
        return became(after, missed=missed)  # type: ignore[operator, no-any-return]
    slots = (*rank.slots[:at], Slot(), *rank.slots[at + 1 :])
    return became(after._replace(slots=slots, flying=(at, rank.call)))  # type: ignore[operator, no-any-return]


def explore(rules: Rules) -> tuple[int, str]:
    """Everything that can happen: how many states there are, and what is wrong with the first bad one."""
    rank = Rank(1, COLLECTIVE, (Slot(),) * rules.slots)
    start = (World((rank, rank)), False)
    seen, todo = {start}, [start]
    newest = NOTHING
    while todo:
        world, begun = todo.pop()
        steps = common(world)
        newest = max(newest, *steps, NOTHING)
        if begun and not steps:
            return len(seen), f"a kill here leaves nothing: {world}"
        for one in world.ranks:
            for slot in one.slots:
                if slot.step != NOTHING and not slot.step == slot.first == slot.second:
                    return len(seen), f"mixed: {slot}"
        for number in (0, 1):
            for after in of_rank(world, number, rules):
                state = (after, begun or bool(steps))
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
    return len(seen), "" if newest >= rules.calls - rules.every else f"nothing newer than {newest} is ever whole"


@pytest.mark.parametrize(
    "rules",
    [
        Rules(every=1, slots=3, calls=5),
        Rules(every=1, slots=3, calls=4, pins=1),
        Rules(every=1, slots=3, calls=4, tears=1),
        Rules(every=2, slots=2, calls=8),
        Rules(every=2, slots=2, calls=8, pins=1),
        Rules(every=2, slots=2, calls=8, tears=2),
        Rules(every=2, slots=2, calls=6, pins=1, tears=1),
        Rules(every=3, slots=2, calls=9, pins=1),
        Rules(every=1, slots=2, calls=5),
        Rules(every=1, slots=2, calls=4, coupled=False),
        Rules(every=2, slots=2, calls=6, coupled=False),
        Rules(every=2, slots=2, calls=5, pins=1, coupled=False),
        Rules(every=2, slots=2, calls=5, tears=1, coupled=False),
        Rules(every=3, slots=2, calls=7, coupled=False),
    ],
    ids=str,
)
def test_wherever_two_ranks_are_killed_something_is_whole_on_both_and_nothing_is_mixed(rules: Rules) -> None:
    """After the first state that both have, there is always one that both have, and saves get on."""
    states, wrong = explore(rules)
    assert not wrong
    assert states > 100


@pytest.mark.parametrize(
    ("rules", "how"),
    [
        (Rules(every=1, slots=2, calls=5, lag=1), "nothing"),
        (Rules(every=2, slots=2, calls=5, lag=1, coupled=False, awaited=False), "mixed"),
        (Rules(every=2, slots=2, calls=8, pins=1, told=False), "nothing"),
        (Rules(every=2, slots=2, calls=8, tears=1, told=False), "nothing"),
    ],
    ids=str,
)
def test_each_of_the_rules_is_needed(rules: Rules, how: str) -> None:
    """Two slots for saves in every call, copies that nobody awaits, saves left out in silence: each loses everything once."""
    assert how in explore(rules)[1]


def test_jobs_without_a_collective_per_step_lose_everything_by_the_rule_for_those_with_one() -> None:
    """A rank that runs ahead overwrites what the other has, unless it waits for the word that something newer is whole."""
    slots = [SlotContent(2, 2), SlotContent(4, 4)]
    assert choose(slots, call=6) == 0
    assert choose(slots, call=6, coupled=False) is None
    assert choose(slots, call=6, coupled=False, whole=4) == 0


def test_free_slots_come_first_then_what_is_of_no_use_then_the_oldest() -> None:
    """A state that some rank has not saved helps nobody, however new it is."""
    assert choose([SlotContent(2, 2), SlotContent()], call=4) == 1
    assert choose([SlotContent(6, 6), SlotContent(2, 2), SlotContent(4, 4)], call=8, missed={6}) == 0
    assert choose([SlotContent(6, 6), SlotContent(2, 2), SlotContent(4, 4)], call=8) == 1


def test_what_is_read_or_needed_is_not_overwritten() -> None:
    """A pinned slot, the newest proven one, and newer ones that may still be proven; then the save is left out."""
    assert choose([SlotContent(2, 2, pinned=True), SlotContent(4, 4)], call=6) is None
    assert choose([SlotContent(2, 2), SlotContent(3, 3)], call=4) is None
    assert choose([SlotContent(2, 2), SlotContent(3, 3)], call=5) == 0
    assert choose([SlotContent(2, 2, pinned=True), SlotContent(4, 4), SlotContent(6, 6)], call=8) == 1


def test_what_a_generation_began_from_is_kept_until_something_newer_is_proven() -> None:
    """The restored state is whole by the ranks' agreement, however old the slot is."""
    assert choose([SlotContent(40, 0, base=True), SlotContent(42, 1)], call=2) is None
    assert choose([SlotContent(40, 0, base=True), SlotContent(42, 1)], call=3) == 0


def test_one_rank_alone_needs_no_proof() -> None:
    """What it has published is whole."""
    assert choose([SlotContent(1, 1), SlotContent(2, 2)], call=3, alone=True) == 0
    assert (slots_for(1, 1), slots_for(1, 2), slots_for(2, 2)) == (2, 3, 2)
