"""The smoke size of the campaign `queue_seeds`: fixed seeds, both jobs end well, every promise kept, the same logs twice."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from tests.chaos import queue_seeds
from tests.chaos.planted import nothing, reacts
from tests.chaos.queue_seeds import trial

from dlrover_core.job import notices
from dlrover_core.rules import freeing, queueing
from dlrover_core.rules import notices as notice_rules
from dlrover_core.sim.run import Broken

SMOKE = (*range(14), 43)
TWICE = (11, 43)
HOUR_S = 3600.0


def _notice_unheard() -> AbstractContextManager[Any]:
    """That a notice is withdrawn changes no plan, and releases no successor."""
    return reacts(notices.NoticeWithdrawn, notice_rules._withdrawn, nothing)


def _released_at_once() -> AbstractContextManager[Any]:
    """Nodes that are given back are released before their workers have stopped, and have said what they hold."""
    return mock.patch.object(freeing, "awaits", return_value=None)


def _those_beside_stay() -> AbstractContextManager[Any]:
    """Sets beside a set that waits keep the room that it waits for."""
    return mock.patch.object(queueing, "_beside", return_value=queueing._Beside())


PLANTED = [
    (_notice_unheard, 142, Broken, "stays: "),
    (_released_at_once, 21, Broken, "freed: "),
    (_those_beside_stay, 296, asyncio.TimeoutError, ""),
]
"""A bug, a seed that finds it (the first ones, or the one that takes least time), and as what it is found."""


@pytest.mark.slow_loop(reason="the test itself reads and folds both histories in one callback")
@pytest.mark.parametrize("block", range(0, len(SMOKE), 5))
def test_two_jobs_on_too_few_hosts_both_end_well(block: int) -> None:
    """Neither job holds what the other one waits for for ever, whatever befalls them."""
    for seed in SMOKE[block : block + 5]:
        try:
            assert trial(seed)["events"] > 0
        except Exception as error:
            raise AssertionError(f"python -m tests.chaos.queue_seeds {seed}") from error


@pytest.mark.slow_loop(reason="the test itself reads and folds both histories in one callback")
@pytest.mark.parametrize("seed", TWICE)
def test_a_seed_of_two_jobs_makes_one_history(seed: int) -> None:
    """The same seed gives the same two logs, byte for byte; nodes were given back in both runs."""
    told = trial(seed)
    assert told["given_back"] > 0
    assert trial(seed) == told


@pytest.mark.parametrize(("bug", "seed", "error", "words"), PLANTED)
def test_a_planted_bug_is_found(bug: Any, seed: int, error: type[Exception], words: str) -> None:
    """With the bug the seed breaks a promise, or a job never ends; without it the seed does not."""
    with bug(), mock.patch.object(queue_seeds, "LIMIT_S", HOUR_S), pytest.raises(error, match=f"^{words}"):
        trial(seed)
    trial(seed)
