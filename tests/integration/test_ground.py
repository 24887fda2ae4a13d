"""Ground that goes away under a running job: training goes on, a worker that dies is replaced, and the job ends as it should."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rough import CURVE, Story, break_disk, fill, real_disk, small_disk
from running import processes

PACED = (CURVE, "--pause", "0.02")


def test_the_run_s_folder_and_the_state_directory_are_removed(tmp_path: Path) -> None:
    """A worker killed at once is back; a master killed later has a successor; the log is whole at the end."""
    with Story(tmp_path, "--nproc-per-node", "1", "--max-restarts", "100", *PACED) as job:
        job.recovers(1)
        run, worker = Path(job.settings["run_dir"]), job.one("worker-0")
        first = int(job.until(lambda _: True, "a status")["leader"].split("/")[1])
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(
            job.state, ignore_errors=True
        )  # a folder is not empty where somebody has made a file anew meanwhile
        worker.kill()
        job.recovers(2)
        job.until(lambda now: not now["degraded"], "the log is there again")
        job.alive((run / "nodes.sock").is_socket, "the socket of the node host, made anew")
        for one in job.processes("dlrover-master"):
            if one.pid == first:
                one.kill()
                one.ends()
        job.until(lambda now: f"/{first}/" not in now["leader"], "another leader")
        job.one("worker-0").kill()
        job.recovers(3)
        job.process.send_signal(signal.SIGTERM)
        assert job.ended() == 143
        said = job.said()
        assert f"{run} was removed while the job runs, and was made anew" in said
        assert "log.db was deleted while the job runs; it was made anew, whole" in said
        assert "in <module>" not in said, "a traceback of ours"
        assert [one["seq"] for one in job.events()] == list(range(1, len(job.events()) + 1))
        assert len(job.events("JobStopped")) == 1
        assert job.left() == []


@pytest.mark.nightly(reason="test_unrecorded.py has the rule; here 30 s are waited for")
def test_a_disk_that_takes_nothing_keeps_no_job_from_its_end(tmp_path: Path) -> None:
    """The state directory's, full for good: training goes on, people hear what waits and what to do, and a good end is one."""
    folder = tmp_path / "job"
    with contextlib.ExitStack() as stack:
        try:
            state = stack.enter_context(small_disk(folder / "state", 8))
        except PermissionError as error:
            pytest.skip(f"a small file system cannot be mounted here: {error}")
        job = stack.enter_context(Story(folder, "--nproc-per-node", "1", *PACED))
        job.recovers(1)
        fill(state, state / "jobs" / "e2e" / "control.log")
        job.steps(20)
        job.finish()
        assert job.ended() == 0
        said = job.said()
        assert "decisions wait for the log" in said
        assert "job e2e succeeded; its log does not say so" in said
        assert "Traceback" not in said
        assert job.left() == []


@pytest.mark.nightly(reason="test_log_pump.py and test_ground.py in tests/unit have the errors; here are real disks")
@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO], ids=errno.errorcode.__getitem__)
def test_a_temporary_folder_whose_disk_breaks(tmp_path: Path, number: int) -> None:
    """It becomes read-only, or gives nothing back: workers are restarted, a dead master has a successor, the job ends well."""
    with contextlib.ExitStack() as stack:
        try:
            # Short enough for sockets.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t", dir="/tmp")))
            disk = stack.enter_context(real_disk(folder / "t", tmp_path / "image"))
        except PermissionError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        line = ("--nproc-per-node", "1", "--max-restarts", "100", *PACED)
        job = stack.enter_context(Story(tmp_path, *line, env={"TMPDIR": str(disk)}))
        job.recovers(1)
        assert Path(job.settings["run_dir"]).is_relative_to(disk)
        break_disk(disk, number)
        job.one("worker-0").kill()
        job.recovers(2)
        first = job.until(lambda _: True, "a status")["leader"]
        os.kill(int(first.split("/")[1]), signal.SIGKILL)
        job.until(lambda now: now["leader"] != first, "another leader")
        job.one("worker-0").kill()
        job.recovers(3)
        job.finish()
        assert job.ended() == 0
        assert "takes no files" in job.said()
        assert "Traceback" not in job.said()
        assert "Traceback" not in job.control_log()
        assert processes(job.mark) == []


@pytest.mark.nightly(reason="test_unrecorded.py has the rule; here 30 s are waited for")
def test_a_log_whose_disk_becomes_read_only_keeps_no_job_from_its_end(tmp_path: Path) -> None:
    """Training goes on, people hear what waits, and a good end is one."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(real_disk(tmp_path / "state", tmp_path / "image"))
        except PermissionError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        job = stack.enter_context(Story(tmp_path, "--nproc-per-node", "1", *PACED))
        job.recovers(1)
        break_disk(disk, errno.EROFS)
        job.steps(20)
        job.finish()
        assert job.ended() == 0
        assert "decisions wait for the log" in job.said()
        assert "job e2e succeeded; its log does not say so" in job.said()
        assert "Traceback" not in job.said()
        assert job.left() == []


@pytest.mark.nightly(reason="test_unled.py has the rule; here 40 s are waited for")
@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO], ids=errno.errorcode.__getitem__)
def test_the_leader_dies_and_nobody_can_lead_again(tmp_path: Path, number: int) -> None:
    """The state directory's disk breaks for good: training goes on, people hear which folder it is, and a good end is one."""
    with broken_and_unled(tmp_path, number) as (job, mark):
        job.steps(20)
        job.finish()
        assert job.ended() == 0
        assert f"no master can lead job e2e: {job.state} takes no writes ({os.strerror(number)})" in job.said()
        assert "job e2e succeeded; its log does not say so" in job.said()
        assert "Traceback" not in job.said()
        assert processes(mark) == []


@pytest.mark.nightly(reason="test_unled.py has the rule; here it is waited until people are told")
@pytest.mark.parametrize("signalled", [False, True], ids=["failed", "stopped"])
def test_a_worker_dies_or_the_job_is_stopped_while_nobody_can_lead(tmp_path: Path, signalled: bool) -> None:
    """Neither waits for a master: the bound of the one is said, and the other ends what the launcher started."""
    with broken_and_unled(tmp_path, errno.EROFS) as (job, mark):
        if not signalled:
            job.one("worker-0").kill()
        job.alive(lambda: "no master can lead" in job.said(), "words about it")
        if signalled:
            job.process.send_signal(signal.SIGTERM)
        assert job.ended(30.0) == (143 if signalled else 1)
        assert ("and cannot be restarted: the job ends in 5 s" in job.said()) is not signalled
        assert "Traceback" not in job.said()
        assert processes(mark) == []


@contextlib.contextmanager
def broken_and_unled(folder: Path, number: int) -> Iterator[tuple[Story, str]]:
    """A running job, and its mark, whose log's disk is broken, and whose leader was killed then."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(real_disk(folder / "state", folder / "image"))
        except PermissionError as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        line = ("--nproc-per-node", "1", "--max-restarts", "100", "--set", "unreachable_s=5", *PACED)
        job = stack.enter_context(Story(folder, *line))
        job.recovers(1)
        leader, settings = job.until(lambda _: True, "a status")["leader"], job.settings
        mark = job.mark
        patch.setattr(Story, "settings", settings)  # they cannot be read later
        break_disk(disk, number)
        os.kill(int(leader.split("/")[1]), signal.SIGKILL)
        yield job, mark
