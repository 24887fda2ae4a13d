"""Which step all nodes copy: whatever each has seen and whenever, they come to the same one, and never have nothing in common."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.checkpoint.copies import NONE, PATIENCE, Tally, roundest


def test_the_roundest_stays_the_longest() -> None:
    """Of what is held the rounder one is kept, of two as round ones the newer; what is safe, and all before it, is done."""
    assert roundest([], 2) == NONE
    assert roundest([10, 12, 14], 2) == 12
    assert roundest([12, 14, 16, 18], 2) == 16
    assert roundest([12, 20], 2) == 20
    assert roundest([12, 14, 16, 18], 2, safe=16) == 18
    assert roundest([12, 16], 2, aim=12) == 12
    assert roundest([12, 16], 2, safe=12, aim=12) == 16
    assert roundest([16], 2, aim=12) == 16
    assert roundest([35, 40, 45], 5) == 40


class Node:
    """It saves one step after the other into few slots, of which it keeps what the rule says; beats tell that, late."""

    def __init__(self, slots: int) -> None:
        self.slots, self.held, self.keeps, self.safe, self.aim = slots, list[int](), NONE, NONE, NONE
        self.told: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.partner: list[int] = []
        self.given_up, self.beats, self.kept_since = NONE, 0, 0

    def save(self, step: int, every: int) -> None:
        """The oldest that is not kept goes."""
        if len(self.held) == self.slots:
            self.held.remove(next(one for one in self.held if one not in (self.keeps, self.safe)))
        self.held.append(step)
        self.look(every)

    def look(self, every: int) -> None:
        """Keep what is to be kept."""
        if self.keeps != self.aim and self.beats - self.kept_since >= PATIENCE:
            self.given_up = self.keeps
        keeps = roundest(self.held, every, max(self.safe, self.given_up), self.aim)
        if keeps != self.keeps:
            self.keeps, self.kept_since = keeps, self.beats

    def copy(self) -> None:
        """The partner has room for two, and never overwrites the safe one."""
        if self.keeps == self.aim != NONE and self.keeps not in self.partner:
            self.partner = sorted({*(one for one in self.partner if one == self.safe), self.keeps})

    def beat(self, tally: Tally, nodes: int, every: int) -> None:
        """Tell, and hear."""
        tally.change(*self.told, by=-1)
        copies = [one for one in (self.keeps, self.safe) if one in self.partner and one in self.held]
        self.told = (self.keeps,), tuple(copies)
        tally.change(*self.told, by=1)
        self.aim, self.beats = tally.aim(nodes), self.beats + 1
        if tally.safe(nodes) > self.safe and tally.safe(nodes) in self.partner:
            self.safe = tally.safe(nodes)
        self.look(every)


@pytest.mark.parametrize("every", [1, 2, 10])
@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 6), pace=st.integers(1, 12))
def test_there_is_always_a_step_that_all_have_twice(every: int, seed: int, nodes: int, pace: int) -> None:
    """Nodes save, copy and beat in any order, ``pace`` saves to a beat; some leave saves out. Once there is a step that all

    have at home and at their partners there always is one, and it moves on.
    """
    chance, tally = random.Random(seed), Tally()
    all_nodes = [Node(4) for _ in range(nodes)]
    common: list[int] = []
    for number in range(1, 120 * pace):
        for node in all_nodes:
            if chance.random() < 0.995:
                node.save(number * every, every)
            if chance.random() < 0.5:
                node.copy()
            if chance.random() < 1 / pace:
                node.beat(tally, nodes, every)
            whole = set.intersection(*({one for one in each.held if one in each.partner} for each in all_nodes))
            assert whole or not common
            if whole and (not common or max(whole) > common[-1]):
                common.append(max(whole))
    assert len(common) > 1


def test_who_is_gone_counts_no_more() -> None:
    """What only some keep is no aim; a node that is gone has neither copies nor a say."""
    tally = Tally()
    tally.change([8], [4], by=1)
    assert (tally.aim(2), tally.safe(2)) == (NONE, NONE)
    tally.change([8], [4, NONE], by=1)
    assert (tally.aim(2), tally.safe(2)) == (8, 4)
    tally.change([8], [4], by=-1)
    assert (tally.aim(2), tally.safe(2), tally.aim(1)) == (NONE, NONE, 8)
