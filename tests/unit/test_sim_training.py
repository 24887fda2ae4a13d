"""Training without an event per step: where it is at any instant is what stepping through it would give."""

from __future__ import annotations

import random

import pytest

from dlrover_core.sim.clock import Clock
from dlrover_core.sim.training import Stretch


def stepped(stretch: Stretch, now: int) -> tuple[int, int]:
    """Steps made and kept by ``now``, one by one."""
    at, made, saved = stretch.since, stretch.base, stretch.base
    while at + stretch.step_us <= now:
        at, made = at + stretch.step_us, made + 1
        if made % stretch.every == 0:
            if at + stretch.checkpoint_us > now:
                break
            at, saved = at + stretch.checkpoint_us, made
    return made, saved


@pytest.mark.parametrize("seed", range(20))
def test_a_stretch_is_where_stepping_would_be(seed: int) -> None:
    """Steps and checkpoints at any instant, and the instant of any step, are those of a loop."""
    dice = random.Random(seed)
    every = dice.randrange(1, 6)
    stretch = Stretch(every * dice.randrange(4), dice.randrange(100), dice.randrange(1, 50), every, dice.randrange(30))
    for now in range(stretch.since, stretch.since + 900):
        here = stretch.at(now)
        assert (here.made, here.saved) == stepped(stretch, now)
        assert 0 <= here.part < 1
        spent = (here.made - stretch.base + here.part) * stretch.step_us + here.checkpoint_us
        assert spent == pytest.approx(now - stretch.since)
    for step in range(stretch.base + 1, stretch.base + 20):
        assert stretch.at(stretch.when(step)).made == step
        assert stretch.at(stretch.when(step) - 1).made == step - 1


def test_another_rate_begins_where_the_last_one_was() -> None:
    """A world that becomes slower keeps what it has made, in steps, in the one in the making, and in the checkpoint."""
    before = Stretch(0, 0, 20, 4, 13)
    for now in range(0, 400, 7):
        after = before.at_rate(60, now)
        here, there = before.at(now), after.at(now)
        assert (here.made, here.saved) == (there.made, there.saved), now
        assert there.part == pytest.approx(here.part, abs=0.05), now
        assert there.checkpoint_us % 13 == here.checkpoint_us % 13, now


def test_what_happens_at_one_instant_is_ordered_by_seed_and_entity() -> None:
    """Each entity's doings keep their order; others' order follows from the seed and the names, whoever else there is."""

    def order(seed: int, *names: int) -> list[tuple[int, int]]:
        clock, done = Clock(seed), list[tuple[int, int]]()
        for turn in range(2):
            for name in names:
                clock.later(5, name, lambda *what: done.append(what), name, turn)
        clock.run(lambda: False, 10)
        return done

    for seed in range(20):
        all_of_them = order(seed, *range(1, 9))
        for name in range(1, 9):
            assert [turn for who, turn in all_of_them if who == name] == [0, 1]
        assert order(seed, *range(1, 8)) == [one for one in all_of_them if one[0] != 8]
    assert len({tuple(order(seed, 1, 2, 3)) for seed in range(20)}) > 1


def test_what_follows_at_the_same_instant_comes_after_it() -> None:
    """A doing of now that is noted now is done now, after all that was due already."""
    clock, done = Clock(3), list[str]()
    clock.later(5, 1, lambda: (done.append("first"), clock.later(0, 0, done.append, "follows"))[0])
    clock.later(5, 2, done.append, "second")
    assert not clock.run(lambda: False, 10)
    assert sorted(done[:2]) == ["first", "second"]
    assert done[2] == "follows"
    assert clock.now == 5
