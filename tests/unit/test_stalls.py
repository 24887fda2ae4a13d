"""What a leader makes of heartbeats: a standstill of all, in time, and of nobody who may be silent, done or pausing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from drive import SECOND, Drive

from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.job import job, world
from dlrover_core.job.hangs import NoteMoving, NotePauseLegal, NoteStall
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.stalls import Stalls
from dlrover_core.testing import virtual_loop

NODES = ("worker-0-0", "worker-1-0")


class Leader:
    """A master as far as this needs one."""

    def __init__(self, drive: Drive) -> None:
        self.drive, self.told = drive, list[Any]()
        self.leads = True

    @property
    def state(self) -> Any:
        """The job's."""
        return self.drive.state

    def now(self) -> int:
        """By the log's clock."""
        return self.drive.now

    def may_order(self) -> bool:
        """Does it lead?"""
        return self.leads

    def tell(self, command: Any) -> None:
        """To itself."""
        self.told.append(command)
        self.drive.do(command)


def trained(**settings: Any) -> Drive:
    """A job that has trained for an hour."""
    drive = Drive(**settings).up()
    drive.wait(3600)
    return drive


def told(leader: Leader, *beats: tuple[str, Beat], then_s: float = 5.0) -> list[Any]:
    """What it says of these heartbeats, and of none any more."""

    async def hear() -> None:
        stalls = Stalls(leader)  # type: ignore[arg-type]
        for node, beat in beats:
            stalls.heard(leader.state, node, beat)
        await asyncio.sleep(then_s)
        stalls.close()

    virtual_loop.run(hear())
    return leader.told


def beat(idle_s: float, **differs: Any) -> Beat:
    """A heartbeat of an agent whose workers made step 7."""
    generation = differs.pop("generation", 1)
    pulse = Pulse(7, round(idle_s * SECOND))._replace(**{"step_us": SECOND, **differs})
    return Beat(generation, pulse.step, 0, (pulse,))


def both(idle_s: float, **differs: Any) -> list[tuple[str, Beat]]:
    """Of all nodes alike."""
    return [(node, beat(idle_s, **differs)) for node in NODES]


def test_all_stand_still() -> None:
    """Once the last step of any is too long ago, it is said once, with the numbers."""
    stall = told(Leader(trained()), *both(61))
    assert len(stall) == 1
    assert isinstance(stall[0], NoteStall)
    assert (stall[0].step, stall[0].threshold_us, stall[0].budget) == (7, 60 * SECOND, "floor")
    assert 61 * SECOND <= stall[0].idle_us < 62 * SECOND


def test_the_next_heartbeat_is_not_waited_for() -> None:
    """Half a second before the threshold all stood still: when it is over, so they do."""
    stall = told(Leader(trained()), *both(59.5))
    assert [type(one) for one in stall] == [NoteStall]
    assert 60 * SECOND <= stall[0].idle_us <= 60.2 * SECOND


@pytest.mark.parametrize(
    "beats",
    [
        both(30),
        [(NODES[0], beat(61)), (NODES[1], beat(0.1))],
        [(NODES[0], beat(61))],
        both(61, idle_us=-1),
        both(61, generation=2),
        both(61, phase=1),
        both(61, pause_us=50 * SECOND),
        both(61, step_us=25 * SECOND),
        both(61, step_us=0),
    ],
    ids=["early", "one steps", "one unheard", "no signal", "other world", "phase", "pause", "slow", "first steps"],
)
def test_what_is_no_standstill(beats: list[tuple[str, Beat]]) -> None:
    """Legal, or not known of all."""
    assert not [one for one in told(Leader(trained()), *beats) if isinstance(one, NoteStall)]


def test_whoever_is_done_ends_the_looking() -> None:
    """A node whose ranks ended well: how long the others may take is `finish_s`."""
    drive = trained()
    drive.do(world.ReportFinished(NODES[1], 1))
    assert not told(Leader(drive), *both(500))


def test_a_job_without_steps_is_never_called_hung() -> None:
    """Nobody ever saw it make one."""
    drive = Drive()
    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.join(node)
    assert drive.state.world.worlds["worker"].active
    assert not told(Leader(drive), *both(9999, step=-1, step_us=0))


def test_a_master_that_may_not_order_suspects_nobody() -> None:
    """Nor does one whose job shall not be looked at."""
    leader = Leader(trained())
    leader.leads = False
    assert not told(leader, *both(61))
    assert not told(Leader(trained(hang_s=0)), *both(61))


def test_a_step_after_the_suspicion_is_said() -> None:
    """While ranks are looked at."""
    leader = Leader(trained())
    leader.tell(NoteStall("worker", 1, 7, 61 * SECOND, 60 * SECOND, "floor"))
    leader.drive.now += 2 * SECOND
    assert not [one for one in told(leader, *both(63)) if isinstance(one, NoteMoving)]
    assert NoteMoving("worker", 1) in told(leader, *both(0.5))


def test_a_pause_is_learnt_when_all_have_seen_it() -> None:
    """One of them announced it: then it is its phase's, and no pause of all."""
    pause = both(1, pause_us=90 * SECOND)
    assert told(Leader(trained()), *pause) == [NotePauseLegal("worker", 0, 90 * SECOND)]
    assert not told(Leader(trained()), pause[0], (NODES[1], beat(1, pause_us=SECOND)))


def test_a_job_that_was_stopped_as_a_whole_has_time_to_go_on() -> None:
    """Frozen for ten minutes with its master, or led by nobody: a standstill counts from when steps could be made again."""
    for resume in (lambda drive: drive.do(job.NotePause(600 * SECOND)), Drive.take_over):
        drive = trained()
        resume(drive)
        drive.wait(57)
        assert not told(Leader(drive), *both(657))
        drive.wait(4)
        stall = told(Leader(drive), *both(661))
        assert [(type(one), one.idle_us // SECOND) for one in stall] == [(NoteStall, 61)]


def test_nodes_that_were_not_heard_of_have_time_to_go_on() -> None:
    """Their containers were paused for two minutes, their master was not."""
    leader = Leader(trained())

    async def hear() -> None:
        stalls = Stalls(leader)  # type: ignore[arg-type]
        for pause, idle, beats in ((0, 1, 1), (120, 121, 55), (0, 176, 10)):
            await asyncio.sleep(pause)
            for second in range(beats):
                for node, one in both(idle + second):
                    stalls.heard(leader.state, node, one)
                await asyncio.sleep(1)
            counts.append(len(leader.told))
        stalls.close()

    counts: list[int] = []
    virtual_loop.run(hear())
    assert counts == [0, 0, 1]
    assert 60 * SECOND <= leader.told[0].idle_us < 62 * SECOND
