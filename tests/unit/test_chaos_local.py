"""What `LocalJob` refuses before it starts anything, what it does to a log's file, and how it judges a curve."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_core.errors import LogCorrupt, PlanError
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.logs.tail import RepairKind
from dlrover_core.sim.faults import LOCAL, Fault, kinds
from dlrover_core.sim.scenario import Scenario, plan_of
from dlrover_core.testing import disk, inside, processes, strikes
from dlrover_core.testing.local import LocalJob, curve, same_curve
from dlrover_core.testing.log_conformance import CODEC, Pen, seqs

JOB = "j"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Any script."""
    made = tmp_path / "train.py"
    made.touch()
    return made


# ---- plans


def test_a_plan_is_data(script: Path) -> None:
    """What is said to a job makes a plan whose token another job can be given."""
    job = LocalJob(script=script, nodes=3, workers_per_node=2)
    job.at_step(20).kill_node(1).at("node worker-1 relaunched").crash_master(amount=2)
    plan = plan_of(job.plan.token())
    assert plan.faults == (Fault("step 20", "kill_node", 1), Fault("node worker-1 relaunched", "crash_master", 0, 2))
    assert (plan.level, plan.scenario.nodes, plan.scenario.workers_per_node) == (LOCAL, 3, 2)
    assert LocalJob(script=script, scenario=plan.scenario, faults=plan.faults).plan == plan


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda job: job.at("noon"), "is no moment"),
        (lambda job: job.at_step(1).unplug(), "no fault is called 'unplug'"),
        (lambda job: job.at_step(1).kill_rack(), "exists at the levels engine, not at 'local'"),
        (lambda job: job.at_step(1).kill_node(0, -1), "cannot be negative"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_said(
    script: Path, say: Callable[[LocalJob], object], words: str
) -> None:
    """A moment or a fault that there is not, or not for real processes, is an error at once."""
    with pytest.raises(PlanError, match=words):
        say(LocalJob(script=script))


def test_what_cannot_be_done_here_is_refused_before_anything_starts(script: Path, tmp_path: Path) -> None:
    """No script; a disk fault for a log that is not on our disk; a folder that has another job's log."""
    with pytest.raises(PlanError, match="there is no script"):
        LocalJob(script=tmp_path / "none.py")
    with pytest.raises(PlanError, match="log in a file of the job's folder"):
        LocalJob(script=script, log="etcd://127.0.0.1:1/x").at_step(1).torn_write().finish()
    (tmp_path / ".chaos" / "state").mkdir(parents=True)
    (tmp_path / ".chaos" / "state" / "log.db").touch()
    with pytest.raises(PlanError, match="give each its own folder"):
        LocalJob(script=script, folder=tmp_path).finish()


def test_a_disk_that_cannot_be_mounted_is_told(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`disk_full` needs a file system of its own; where there can be none, the error says why."""
    monkeypatch.setattr(strikes, "DISK_MIB", "no number of ")
    with pytest.raises(
        PlanError, match=r"cannot be mounted here: (Invalid argument|Operation not permitted); run as root"
    ):
        LocalJob(script=script, folder=tmp_path).at_step(1).disk_full().finish()


def test_a_moment_shows_what_can_be_done(script: Path) -> None:
    """``dir()`` of a moment lists the faults of this level, and each says what it does."""
    moment = LocalJob(script=script).at_step(1)
    assert sorted(kinds(LOCAL)) == dir(moment)
    assert all(getattr(moment, kind).__doc__ for kind in dir(moment))
    assert not hasattr(moment, "_private")


def test_the_command_says_what_the_scenario_says(script: Path, tmp_path: Path) -> None:
    """Sizes, spares and settings of a scenario are options of `dlrover-run`; settings of the job's own go before."""
    told = Scenario(nodes=4, nodes_min=2, workers_per_node=8, spares=1, settings=(("silence_s", 9.0),))
    job = LocalJob(
        script=script, scenario=told, args=["--lr", 1], settings={"progress_s": 5}, options=["--preload", "none"]
    )
    line = " ".join(job._command(tmp_path, "x"))
    for words in ("--local-nodes 4", "--nproc-per-node 8", "--nnodes 2:4", "--standby 1", "--set silence_s=9.0"):
        assert words in line
    assert "--set progress_s=5 " in line
    assert line.endswith(f"--preload none {script} --lr 1")


# ---- curves


def test_a_curve_is_the_same_or_the_first_difference_is_told(tmp_path: Path) -> None:
    """Steps may be made again with the same value; another value, a gap or a missing end is an error."""
    (tmp_path / "curve").write_text("1 a\n2 b extra\n2 b\n3 c\n4 d")
    found, whole = curve(tmp_path / "curve"), [(1, "a"), (2, "b"), (3, "c")]
    assert found == [(1, "a"), (2, "b"), (2, "b"), (3, "c")]
    same_curve(found, whole)
    for wrong, words in (
        ([(1, "a"), (2, "x"), (3, "c")], "step 2 made x, undisturbed it makes b"),
        ([(1, "a"), (3, "c")], "step 3 follows 1"),
        ([(1, "a"), (2, "b")], "the last step is 2, undisturbed it is 3"),
    ):
        with pytest.raises(AssertionError, match=words):
            same_curve(wrong, whole)


# ---- what disks do


async def killed(place: Path, *, events: int = 3, size: int = 64) -> Path:
    """What a kill leaves of a log of eight batches."""
    log = await SqliteLog.open(place / "live" / "log.db", CODEC, reserve_bytes=0)
    pen = Pen(await log.lead(JOB, "a"))
    for _ in range(8):
        await pen.write(events=events, size=size)
    copy = place / "killed"
    copy.mkdir()
    for file in log.path.parent.iterdir():
        if file.is_file() and not file.name.endswith("-shm"):
            shutil.copy(file, copy)
    await log.close()
    return copy / "log.db"


async def led_again(database: Path) -> tuple[list[int], set[RepairKind]]:
    """The events that the next leader finds, and what it mended."""
    log = await SqliteLog.open(database, CODEC, reserve_bytes=0)
    try:
        await log.lead(JOB, "b")
        return await seqs(log.read(JOB)), {one.kind for one in log.repairs}
    finally:
        await log.close()


def test_half_a_write_is_one(tmp_path: Path) -> None:
    """`disk.tear` cuts the last batch out of the database and leaves half of another behind it; nothing told is lost."""

    async def story() -> None:
        database = await killed(tmp_path)
        done = disk.tear(database, JOB)
        assert "inside its last frame" in done
        found, repairs = await led_again(database)
        assert found == list(range(1, 25))
        assert repairs == {RepairKind.RESTORED, RepairKind.TORN}

    asyncio.run(story())


def test_a_flipped_bit_is_one(tmp_path: Path) -> None:
    """`disk.flip` hits the batch that was named: mended from the second copy; without that the log names it and is not led."""

    async def story() -> None:
        database = await killed(tmp_path)
        assert disk.flip(database, JOB, 11) == "a bit of records 10 to 12 is flipped in log.db"
        assert await led_again(database) == (list(range(1, 25)), {RepairKind.REWRITTEN})
        database = await killed(tmp_path / "again")
        disk.flip(database, JOB, 11, copies=2)
        log = await SqliteLog.open(database, CODEC, reserve_bytes=0)
        with pytest.raises(LogCorrupt, match="event 10") as told:
            await seqs(log.read(JOB))
        assert told.value.seq == 10
        await log.close()
        with pytest.raises(PlanError, match="no older batch with record 24"):
            disk.flip(database, JOB, 24)

    asyncio.run(story())


def test_a_batch_of_one_short_event_is_hit(tmp_path: Path) -> None:
    """As a master writes them one by one on a slow host: no long run of bytes in them is any batch's alone."""

    async def story() -> None:
        for seq in range(1, 8):
            database = await killed(tmp_path / f"{seq}", events=1, size=4)
            where = disk.flip(database, JOB, seq, copies=2).partition(" is flipped in ")[2].split(", ")
            assert where[0] == "log.db"
            assert len(where) > 1
            log = await SqliteLog.open(database, CODEC, reserve_bytes=0)
            with pytest.raises(LogCorrupt, match=f"event {seq}"):
                await seqs(log.read(JOB))
            await log.close()

    asyncio.run(story())


def test_a_log_without_batches_has_nothing_to_tear(tmp_path: Path) -> None:
    """Nothing is touched where there is nothing."""
    assert disk.tear(tmp_path / "log.db", JOB) == "there was nothing to tear"
    assert disk.frames_bytes(tmp_path / "log.db-wal") == 0


# ---- processes


def test_processes_are_found_by_their_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever began with the mark is found, with its children after it; stopped, it goes on when that is closed."""
    monkeypatch.setenv("OF_THIS_TEST", "found")
    line = [
        sys.executable,
        "-c",
        "import os, sys; os.fork(); print(flush=True); sys.stdin.read()",
        "--node",
        "worker-1-0",
    ]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        assert [one.stdout.readline(), one.stdout.readline()] == [b"\n", b"\n"]
        found = processes.living("OF_THIS_TEST=found")
        assert [each.node for each in found] == ["worker-1-0"] * 2
        assert [each.parent for each in processes.family(found, one.pid)] == [os.getpid(), one.pid]
        assert processes.workers(found) == []
        stopped = processes.Stopped(one.pid)
        os.waitid(os.P_PID, one.pid, os.WSTOPPED)
        assert processes.state_of(one.pid) == "T"
        stopped.close()
        os.waitid(os.P_PID, one.pid, os.WCONTINUED)
        stopped.close()
        one.stdin.close()
    assert not processes.lives(one.pid)
    processes.Stopped(one.pid).close()


def test_an_agent_dials_the_proxy_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes name places; nodes of a place are led to its proxy, those of others are let be."""
    monkeypatch.setenv(inside.ROUTES, "worker-1=41001,worker-10=41010")
    assert [inside._port(node) for node in ("worker-1-0", "worker-1-3", "worker-10-0", "worker-2-0", "")] == [
        41001,
        41001,
        41010,
        0,
        0,
    ]
    assert inside._node() == "", "this is no agent"
    monkeypatch.setattr(inside, "_node", lambda: "worker-1-0")
    dialled: list[object] = []
    monkeypatch.setattr(inside, "_connect", lambda _, address: dialled.append(address))
    with socket.socket() as one:
        inside._routed(one, ("127.0.0.1", 9))
    with socket.socket(socket.AF_UNIX) as one:
        inside._routed(one, "/a/path")
    assert dialled == [("127.0.0.1", 41001), "/a/path"]


def test_a_worker_raises_what_it_is_told(tmp_path: Path) -> None:
    """An interpreter that has `inside` as its ``sitecustomize`` raises at the signal, and runs the one that it hides."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours" / "sitecustomize.py").write_text(Path(inside.__file__).read_text())
    (tmp_path / "theirs" / "sitecustomize.py").write_text("print('theirs ran', flush=True)")
    path = os.pathsep.join([str(tmp_path / "ours"), str(tmp_path / "theirs")])
    env = {**os.environ, "PYTHONPATH": path, inside.ERRORS: str(tmp_path), inside.ROUTES: ""}
    code = "import signal; print('ready', flush=True); signal.pause()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True) as one:
        assert one.stdout is not None
        assert [one.stdout.readline(), one.stdout.readline()] == ["theirs ran\n", "ready\n"]
        (tmp_path / f"raise-{one.pid}").write_text("the cable fell out")
        one.send_signal(inside.FAIL)
        _, said = one.communicate(timeout=30)
    assert said.endswith("RuntimeError: the cable fell out\n")
