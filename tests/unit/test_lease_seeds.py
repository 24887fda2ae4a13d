"""Leases under deaths of workers, nodes and masters, slow nodes, lost and late words: nothing is lost, repetitions are told.

Of models that are restored, those plays are here whose ranks agree on boundaries; test_restored_leases.py has the others.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from tests.chaos.lease_seeds import EPOCHS, TICK_S, PlannedPlay, ServerPlay, trial

from dlrover_core.job.leases import LeaseGranted, LeaseReturned
from dlrover_core.job.plans import Plan
from dlrover_core.testing.restored_leases import Rank

SCALES = 0
"""A seed of which the job is scaled."""


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_and_repetitions_are_told(seed: int) -> None:
    """Six deaths of workers, nodes and masters, with words that are lost, late or said twice."""
    ServerPlay(seed).play().check()


def test_without_deaths_each_position_is_used_once() -> None:
    """And nothing is told to be repeated."""
    play = ServerPlay(1, deaths=0).play()
    play.check()
    assert set(play.uses.times.values()) == {1}
    assert (play.leased.again, play.leased.repeated) == (0, ())


def test_a_slow_node_gives_back_what_it_cannot_use_in_time() -> None:
    """One of three nodes is three times slower: the epochs end within 1.15 times the ideal, and the log has few grants."""
    play = ServerPlay(3, deaths=0, size=3_000, recalls=0.0).play()
    play.check()
    ideal_s = 3_000 * EPOCHS / (2 * 30 + 10)
    assert play.ticks * TICK_S <= 1.15 * ideal_s
    assert len(play.drive.facts(LeaseGranted)) <= 3 * (ideal_s / 10 + 10)
    assert len(play.drive.facts(LeaseReturned)) <= 12


@pytest.mark.parametrize("seed", [0, 2])
def test_planned_changes_train_nothing_again(seed: int) -> None:
    """Nodes leave and come at step boundaries, between deaths; the next generation resumes from the boundary's own step."""
    assert PlannedPlay(seed).play().check().boundaries


def takes_one_more() -> Any:
    """A rank that waits at the boundary takes one batch more."""
    return mock.patch.object(Rank, "waits", property(lambda rank: 0 < rank.boundary <= rank.step and rank.span is None))


def resumes_one_step_before() -> Any:
    """The leader lets the next generation resume from the step before the boundary's."""
    boundary = Plan.boundary
    return mock.patch.object(Plan, "boundary", lambda plan, members: max(-1, boundary(plan, members) - 1))


@pytest.mark.parametrize("bug", [takes_one_more, resumes_one_step_before])
def test_a_planted_bug_of_planned_changes_is_found(bug: Any) -> None:
    """By the seed of the test above."""
    planted: AbstractContextManager[Any] = bug()
    with planted, pytest.raises(AssertionError, match="train samples again"):
        PlannedPlay(0).play().check()


def test_a_seed_makes_one_history() -> None:
    """The same seed of the campaign gives the same log, byte for byte; this one kills, drains, and scales."""
    told = trial(SCALES)
    assert told == trial(SCALES)
    assert told["scale"] > 0
    assert told["generations"] > 2
