"""The simulated master, agent and leveller go by the rules of the real ones, number for number."""

from __future__ import annotations

from dlrover_core.runtime import agent, levelling, master, masters, outbox, pipeline
from dlrover_core.sim import agents, leading, log
from dlrover_core.sim import levelling as simulated_levelling


def test_a_simulated_master_groups_and_retries_as_the_real_one() -> None:
    """Group commit, pauses between appends, the late loop, ticks and snapshots by size have the same bounds."""
    assert leading.GROUP_COMMANDS_MAX == pipeline.GROUP_COMMANDS_MAX
    assert leading.PAUSE_US == pipeline.PAUSE_US
    assert log.RETRY_S == pipeline.RETRY_S
    assert (leading.LATE_S, leading.TICK_S, leading.LEAVE_S) == (master.LATE_S, master.TICK_S, master.LEAVE_S)
    assert leading.SNAPSHOT_BYTES == master.SNAPSHOT_BYTES


def test_a_simulated_agent_waits_as_the_real_one() -> None:
    """The window of unanswered commands, the pauses between tries and the last word have the same bounds."""
    assert agents.UNANSWERED_MAX == outbox.UNANSWERED_MAX
    assert (agents.RETRY_FIRST_S, agents.RETRY_MAX_S) == (masters.RETRY_FIRST_S, masters.RETRY_MAX_S)
    assert agents.LAST_WORD_S == agent.LAST_WORD_S
    assert agents.NOTHING == agent.NOTHING


def test_pauses_have_the_same_jitter() -> None:
    """Two agents that are cut off at once come back at the same two moments, simulated or not."""
    for attempt in range(8):
        assert agents.pause_s("worker-3-0", attempt) == masters.pause_s(attempt, "worker-3-0")


def test_a_simulated_leveller_backs_off_as_the_real_one() -> None:
    """A call of the scheduler that failed is made again after the same times."""
    assert simulated_levelling.BACK_OFF_S == levelling.BACK_OFF_S
