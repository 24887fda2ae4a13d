"""A program that fails at once is not restarted as fast as it can fail; and ranks that end late may, up to a bound."""

from __future__ import annotations

from drive import SECOND, Drive

from dlrover_core.job.nodes import NodeFailed
from dlrover_core.job.world import ReportFinished, WithdrawStore


def job_of(**settings: float) -> Drive:
    """One node, joined, in its first world; no step made."""
    job = Drive(nodes_max=1, nproc=1, max_restarts=100, **settings)
    job.observe("worker-0-0", "running")
    job.join("worker-0-0")
    return job


def pause(job: Drive, code: int = 1, after_s: float = 0.1) -> float:
    """Seconds between a failure, ``after_s`` into the newest world, and the next world."""
    job.now += round(after_s * SECOND)
    generation, failed = job.world.generation, job.now
    job.offer("worker-0-0")
    job.exit("worker-0-0", 0, code)
    if not job.world.active:
        job.wait(4)
    assert job.world.generation == generation + 1
    paused = (job.world.formed_at - failed) / SECOND
    job.now = max(job.now, job.world.formed_at)
    return paused


def test_pauses_grow_from_the_third_failure_on() -> None:
    """The first two restarts come at once; then half a second, doubled each time, up to ``restart_pause_s``."""
    job = job_of(restart_pause_s=3)
    assert [pause(job) for _ in range(7)] == [0, 0, 0.5, 1, 2, 3, 3]


def test_a_step_ends_the_haste() -> None:
    """Training that has begun and fails is restarted at once, and counted anew."""
    job = job_of()
    assert [pause(job) for _ in range(3)] == [0, 0, 0.5]
    job.run(1)
    assert [pause(job) for _ in range(3)] == [0, 0, 0]
    assert pause(job) == 0.5


def test_late_failures_and_the_platforms_are_not_hasty() -> None:
    """Who lived for a while before failing wastes nothing, and who was killed did nothing wrong."""
    job = job_of()
    assert [pause(job, after_s=11.0) for _ in range(5)] == [0] * 5
    assert [pause(job, code=-9) for _ in range(5)] == [0] * 5


def test_no_pause_where_none_is_wanted() -> None:
    """``restart_pause_s=0``."""
    job = job_of(restart_pause_s=0)
    assert [pause(job) for _ in range(5)] == [0] * 5


def test_a_pause_survives_the_master_and_waits_for_what_is_missing() -> None:
    """The next master waits as long; and at the end of a pause without a store the world forms when one comes."""
    job = job_of()
    for _ in range(2):
        pause(job)
    job.now += SECOND // 10
    failed = job.now
    for member in list(job.state.world.offers.get("worker-0-0", ())):
        job.do(WithdrawStore("worker-0-0", member))
    job.exit("worker-0-0", 0, 1)
    job.take_over()
    job.wait(2)
    assert not job.world.active
    job.offer("worker-0-0")
    assert job.world.active
    assert job.world.formed_at >= failed + SECOND // 2


def test_an_offer_within_the_pause_does_not_end_it() -> None:
    """Whatever arrives meanwhile waits with the rest."""
    job = job_of()
    for _ in range(2):
        pause(job)
    job.now += SECOND // 10
    job.exit("worker-0-0", 0, 1)
    job.offer("worker-0-0")
    assert not job.world.active
    job.wait(0.6)
    assert job.world.active


# ---- laggards: nodes that still run when others have ended well


def uneven(**settings: float) -> Drive:
    """Two nodes that train, of which the first is done."""
    job = Drive(nodes_max=2, nproc=1, max_restarts=100, **settings).up()
    job.do(ReportFinished("worker-0-0", 1))
    return job


def test_the_last_may_take_as_long_as_they_need() -> None:
    """Without a bound nothing happens, for days; then the job succeeds."""
    job = uneven(finish_s=0)
    job.wait(200_000)
    assert job.facts(NodeFailed) == []
    job.do(ReportFinished("worker-1-0", 1))
    assert job.state.job.state == "succeeded"


def test_a_bound_for_the_last_is_kept() -> None:
    """``finish_s`` after the first is done the other counts as failed, with the reason, and is replaced; a master's loss

    does not move the bound.
    """
    job = uneven(finish_s=60)
    job.wait(59)
    job.take_over()
    assert job.facts(NodeFailed) == []
    job.wait(2)
    (failed,) = job.facts(NodeFailed)
    assert (failed.node, failed.reason) == (
        "worker-1-0",
        "still running 60 s after worker-0-0 had ended well (finish_s)",
    )
    assert "worker-1-1" in job.state.nodes.nodes


def test_whoever_is_in_time_is_left_alone() -> None:
    """Both are done within the bound: success."""
    job = uneven(finish_s=60)
    job.wait(59)
    job.do(ReportFinished("worker-1-0", 1))
    job.wait(60)
    assert job.state.job.state == "succeeded"
    assert job.facts(NodeFailed) == []
