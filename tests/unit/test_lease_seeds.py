"""Leases under deaths of workers, nodes and masters, slow nodes, lost and late words: nothing is lost, repetitions are told."""

from __future__ import annotations

import pytest
from tests.chaos.lease_seeds import EPOCHS, TICK_S, ServerPlay, trial

from dlrover_core.job.leases import LeaseGranted, LeaseReturned

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


def test_a_seed_makes_one_history() -> None:
    """The same seed of the campaign gives the same log, byte for byte; this one kills, drains, and scales."""
    told = trial(SCALES)
    assert told == trial(SCALES)
    assert told["scale"] > 0
    assert told["generations"] > 2
