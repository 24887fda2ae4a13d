"""Level "local": the vocabulary of faults on real processes, real links and a real disk, and nothing left of any of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from paced import undisturbed
from rough import CURVE, Curve, flaws, points
from running import SCRIPTS, eventually, processes, warmth

from dlrover_core.errors import LogCorrupt
from dlrover_core.job import incidents, nodes, silence
from dlrover_core.runtime.departures import RETURN_S
from dlrover_core.sim.run import Run, Stalled
from dlrover_core.testing import local
from dlrover_core.testing.invariants import check_history
from dlrover_core.testing.local import LocalJob

# Whoever looks on reads the log and /proc in one go; the loop is its own, and no job waits for it.
pytestmark = [
    pytest.mark.slow_loop(reason="the loop is the onlooker's alone"),
    pytest.mark.timeout(150),  # `finish` gives up before, and says with what the log ends
]

PACED = SCRIPTS / "paced.py"
WARM = warmth([str(PACED)])
EXAMPLE = Path(__file__).parents[2] / "examples" / "chaos" / "real_processes.py"


def events(run: Run) -> list[str]:
    """The names of what happened."""
    return [type(record.event).__name__ for record in run.records]


@pytest.mark.nightly(reason="test_links_and_deaths, whose curve is made without a model, stands for it in make test")
@pytest.mark.timeout(180)
def test_the_curve_outlives_workers_nodes_and_masters(tmp_path: Path) -> None:
    """A worker, the leading master and a node are killed, an agent is silent: every loss is the undisturbed run's, bit for bit,

    and each death of a worker costs one step at most.
    """
    folder = tmp_path / "job"
    job = LocalJob(script=CURVE, args=("--steps", "140", "--pause", "0.02"), folder=folder, env={"FOLDER": str(folder)})
    job.at_step(15).kill_worker(1)
    job.at("incident closed").crash_master()
    job.at_step(50).silence_node("worker-0", amount=0.5)
    job.at_step(80).kill_node(1)
    run = job.finish()
    assert run.outcome == "succeeded"
    assert [fault.kind for fault, _ in run.struck] == ["kill_worker", "crash_master", "silence_node", "kill_node"]
    assert run.lost_steps <= 2
    found, expected = points(folder), Curve(tmp_path / "undisturbed").losses(run.steps)
    assert flaws(found, expected) == []
    local.same_curve(local.curve(folder / "curve"), list(expected.items())[: run.steps])
    actions = [one.event.action for one in run.records if isinstance(one.event, incidents.ActionChosen)]
    assert actions == ["RESTART_PROCESSES", "RELAUNCH_NODE"]
    check_history(run.records)


def test_links_and_deaths(tmp_path: Path) -> None:
    """A worker raises, a link is cut, masters, a worker and an agent are stopped for a while or killed, and so is a node.

    Only what the worker raised and the node's death cost a restart. What was raised is what the log says; the cut is felt, and
    healed; steps since the last checkpoint are made again.
    """
    job = LocalJob(script=PACED, args=("0", "40"), folder=tmp_path, settings={"silence_s": 0.7}, env=WARM)
    job.at_step(10).fail_worker(1, cause="the cable fell out")
    job.at("incident closed").partition(1, amount=1.5)
    job.at("NodeSuspected worker-1").slow_worker(0, amount=1.5)
    job.at_step(60).hang_worker(0, amount=0.3)
    job.at_step(70).pause_master(amount=0.3)
    job.at_step(90).kill_node(0)
    job.at("incident closed").silence_node("worker-1", amount=0.3)
    job.at_step(150).crash_master(amount=0.5)
    run = job.finish()
    assert (run.outcome, run.missed) == ("succeeded", [])
    made = local.curve(tmp_path / "curve")
    local.same_curve(made, undisturbed(run.steps, 2))
    again = len(made) - len(dict(made))
    assert 0 < again <= run.lost_steps + 2 <= again + 4, "twice rank 0 may have written a line before it told the step"
    errors = [one.event.error for one in run.records if isinstance(one.event, incidents.WorkerExited)]
    assert "RuntimeError: the cable fell out" in errors
    assert events(run).count("WorldFormed") == 3
    actions = [one.event.action for one in run.records if isinstance(one.event, incidents.ActionChosen)]
    assert actions == ["RESTART_PROCESSES", "RELAUNCH_NODE"]
    suspected = next(one for one in run.records if isinstance(one.event, silence.NodeSuspected))
    assert "NodeHeard" in events(run)[suspected.seq :]
    assert "exit code 1" in job.said
    check_history(run.records)


@pytest.mark.nightly(reason="the stories of tests/chaos/test_silence.py stand for it by day")
def test_the_successor_of_a_node_whose_link_stays_cut_joins_once_it_is_healed(tmp_path: Path) -> None:
    """The link is cut for longer than an agent has to be back: the node is replaced during the cut.

    Its successor in the same place, whose link is cut too, tries until it is healed, and joins; the script goes on.
    """
    job = LocalJob(script=PACED, args=("0", "40"), folder=tmp_path, env=WARM)
    job.at_step(10).partition(1, amount=RETURN_S + 4)
    run = job.finish()
    assert (run.outcome, run.missed) == ("succeeded", [])
    joined = [one.event.node for one in run.records if isinstance(one.event, nodes.NodeJoined)]
    assert joined[2:] == ["worker-1-1"]
    assert set(local.curve(tmp_path / "curve")) <= set(undisturbed(run.steps, 2))
    check_history(run.records)


def test_what_disks_do(tmp_path: Path) -> None:
    """A flipped bit and half a write are mended from the second copy, on a full disk decisions wait; nothing told is lost."""
    job = LocalJob(script=PACED, nodes=1, workers_per_node=2, folder=tmp_path, env=WARM)
    job.at_step(10).bit_flip()
    job.at("LeaderStarted").torn_write()
    job.at("LeaderStarted").kill_worker(0)
    if can_mount(tmp_path / "disk"):
        job.at("incident closed").disk_full(amount=1.0)
        job.at_step(60).kill_worker(1)
    run = job.finish()
    assert run.outcome == "succeeded"
    assert "is flipped in log.db" in job.notes[0]
    assert "inside its last frame" in job.notes[1]
    local.same_curve(local.curve(tmp_path / "curve"), undisturbed(run.steps, 2))
    check_history(run.records)


def can_mount(path: Path) -> bool:
    """May this user mount a file system?"""
    from rough import small_disk

    try:
        with small_disk(path, 1):
            return True
    except PermissionError:
        return False


def test_a_log_that_cannot_be_mended_is_refused(tmp_path: Path) -> None:
    """Where the second copy has the flipped bit too, nobody leads: the record is named, and nobody goes on as if all were well.

    A fault whose moment never came is told.
    """
    job = LocalJob(script=PACED, nodes=1, workers_per_node=2, folder=tmp_path, env=WARM)
    job.at_step(10).bit_flip(5, amount=2)
    job.at_step(5000).kill_worker()
    run = job.finish(strict=False)
    assert run.outcome == "corrupt"
    assert [fault.kind for fault in run.missed] == ["kill_worker"]
    first = job.notes[0].partition("a bit of records ")[2].split()[0]
    assert f"event {first}: its checksum is wrong" in run.root
    assert f"event {first}: its checksum is wrong" in job.said
    assert LogCorrupt.__name__ in (tmp_path / ".chaos/state/jobs/chaos/control.log").read_text()


def test_a_job_that_does_not_end_is_told(tmp_path: Path) -> None:
    """The job is ended when its time is over, and what it said last is in the error."""
    with pytest.raises(Stalled, match=r"not ended within 0\.5 s; its log ends with nothing"):
        LocalJob(script=PACED, nodes=1, folder=tmp_path, env=WARM).finish(0.5)


@pytest.mark.timeout(180)
def test_a_killed_test_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL for whoever runs a job, while its agent is stopped and its disk is full: processes, mounts and files are gone."""
    lines = f"""
        import sys
        from dlrover_core.testing.local import LocalJob
        job = LocalJob(script={str(PACED)!r}, nodes=1, workers_per_node=1)
        job.at_step(1).silence_node(0, amount=100)
        {'job.at("step 1").disk_full(amount=100)' if can_mount(tmp_path / "disk") else ""}
        job.finish()
    """
    mark = f"DLROVER_MARK_OF_THIS_TEST={tmp_path}"
    env = {**os.environ, **WARM, "TMPDIR": str(tmp_path), mark.partition("=")[0]: str(tmp_path)}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "disk")  # a cache is meant to stay
    test = subprocess.Popen([sys.executable, "-c", textwrap.dedent(lines)], env=env)
    try:
        eventually(lambda: stopped_agent(mark), "the agent is stopped", 100.0)
    finally:
        test.send_signal(signal.SIGKILL)
        test.wait()
    eventually(lambda: not processes(mark), "the end of all its processes")
    assert [one.name for one in tmp_path.iterdir() if one.name != "disk"] == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.nightly(
    reason="test_links_and_deaths has the faults of the example, and test_the_example_is_a_test itself"
)
@pytest.mark.timeout(180)
def test_the_example_runs_as_a_test(tmp_path: Path) -> None:
    """The example is a test file that can be copied: real training, and a curve from which nobody can tell."""
    assert "1 passed" in example(tmp_path)


def test_the_example_is_a_test(tmp_path: Path) -> None:
    """Pytest finds it, with nothing but the plugin."""
    assert "::test_nobody_can_tell_from_the_curve\n" in example(tmp_path, "--collect-only")


def example(folder: Path, *words: str) -> str:
    """What pytest says of the example."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "dlrover_core.testing.plugin", *words]
    line += ["-c", "/dev/null", "--rootdir", str(EXAMPLE.parent), "--basetemp", str(folder / "base"), str(EXAMPLE)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=170, check=False).stdout


def stopped_agent(mark: str) -> bool:
    """Is an agent of this run under SIGSTOP?"""
    agents = [one for one in processes(mark) if one.name == "dlrover-agent"]
    return any("State:\tT" in Path(f"/proc/{one.pid}/status").read_text() for one in agents)
