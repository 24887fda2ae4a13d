"""Ctrl-C, SIGTERM and the others: workers get the same signal and their grace, the log says why, the status which."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from running import SCRIPTS, Job, eventually

STEPS = str(SCRIPTS / "steps.py")
TWO = ("--nproc-per-node", "2")
OTHERS = pytest.mark.nightly(
    reason="SIGINT, SIGUSR1 (to the launcher alone: test_the_signals_to_handle_are_chosen) and SIGTERM (test_grace_has_an_end)"
    " stand for it in make test"
)


@pytest.mark.parametrize(
    ("number", "code", "group"),
    [
        (signal.SIGINT, 130, True),
        pytest.param(signal.SIGTERM, 143, False, marks=OTHERS),
        pytest.param(signal.SIGHUP, 129, False, marks=OTHERS),
    ],
)
def test_a_signal_stops_the_job_in_order(tmp_path: Path, number: signal.Signals, code: int, group: bool) -> None:
    """Every worker gets the same signal and may end by itself; the log ends with JobStopped and says which it was.

    Ctrl-C goes to the whole foreground group, `kill` to the launcher alone: both mean the same.
    """
    with Job(tmp_path, *TWO, STEPS, "--term", "--child") as job:
        job.trains(1)
        (os.killpg if group else os.kill)(job.process.pid, number)
        assert job.ended() == code
        assert all(["terminated", number.name] in job.told(rank) for rank in (0, 1))
        assert job.left() == []
        assert f"job e2e stopped (dlrover-run got {number.name})" in job.said()
        assert "Traceback" not in job.said()
        assert [one["fields"]["reason"] for one in job.events("JobStopping")] == [f"dlrover-run got {number.name}"]
        assert len(job.events("JobStopped")) == 1
        assert job.events("IncidentOpened") == []


def test_ctrl_c_shows_the_scripts_own_frames(tmp_path: Path) -> None:
    """A script without a handler ends by KeyboardInterrupt, with the traceback of a launch by hand, through its own hook."""
    (tmp_path / "deep.py").write_text(
        "import sys, time\nhook = sys.excepthook\nsys.excepthook = lambda *what: (hook(*what), print('hooked'))\n"
        "def wait():\n    print('waiting', flush=True)\n    time.sleep(600)\nwait()\n"
    )
    with Job(tmp_path, str(tmp_path / "deep.py")) as job:
        eventually(lambda: "waiting" in job.out.read_text(), "the script")
        job.process.send_signal(signal.SIGINT)
        assert job.ended() == 130
        assert re.findall(r'File ".*/(\S+)", line (\d+)', job.said()) == [("deep.py", "7"), ("deep.py", "6")]
        assert "KeyboardInterrupt" in job.said()
        assert "hooked" in job.out.read_text()
        assert job.left() == []


def test_the_signals_to_handle_are_chosen(tmp_path: Path) -> None:
    """``--signals-to-handle SIGUSR1``, as batch systems send it before the end: workers get it, and may save."""
    with Job(tmp_path, *TWO, "--signals-to-handle", "SIGTERM,SIGUSR1", STEPS, "--term") as job:
        job.trains(1)
        job.process.send_signal(signal.SIGUSR1)
        assert job.ended() == 128 + signal.SIGUSR1
        assert all(["terminated", "SIGUSR1"] in job.told(rank) for rank in (0, 1))
        assert job.left() == []


def test_ctrl_c_twice_does_not_wait(tmp_path: Path) -> None:
    """Workers deaf to SIGTERM are killed at the second Ctrl-C, and still the log gets its end."""
    with Job(tmp_path, *TWO, STEPS, "--deaf") as job:
        job.trains(1)
        job.process.send_signal(signal.SIGINT)
        eventually(lambda: (status := job.status()) and status["state"] == "stopping", "the first one")
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        assert job.ended(10.0) == 130
        assert job.left() == []
        assert "job e2e stopped" in job.said()
        assert len(job.events("JobStopped")) == 1


def test_grace_has_an_end(tmp_path: Path) -> None:
    """Workers that ignore SIGTERM get SIGKILL after ``stop_grace_s``."""
    with Job(tmp_path, "--set", "stop_grace_s=0.5", *TWO, STEPS, "--deaf") as job:
        job.trains(1)
        job.process.terminate()
        assert job.ended(15.0) == 143
        assert job.left() == []
        assert "job e2e stopped (dlrover-run got SIGTERM)" in job.said()


def test_signals_that_stop_nothing(tmp_path: Path) -> None:
    """A SIGHUP that the launcher was born to ignore, as under nohup, is ignored: the job goes on.

    Not the launcher but the leading master is asked to go, by a person or a batch system: the reserve leads, nothing stops.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit it
    try:
        job = Job(tmp_path, *TWO, STEPS)
    finally:
        signal.signal(signal.SIGHUP, before)
    with job:
        step = job.trains(1)["step"]
        job.process.send_signal(signal.SIGHUP)
        job.trains(1, beyond=step + 20)
        eventually(lambda: len(job.processes("dlrover-master")) == 2, "the reserve")
        first = job.until(lambda status: status["role"] == "leader", "a leader")
        leader = next(one for one in job.processes("dlrover-master") if f"/{one.pid}/" in first["leader"])
        leader.kill(signal.SIGTERM)
        leader.ends()
        then = job.until(lambda status: status["leader"] != first["leader"], "another leader")
        job.trains(1, beyond=then["step"] + 20)
        eventually(lambda: len(job.processes("dlrover-master")) == 2, "another reserve")
        job.finish()
        assert job.ended() == 0
        assert "handing over" in job.control_log()
        assert (job.events("JobStopping"), job.events("IncidentOpened")) == ([], [])
        assert job.left() == []


def test_a_signal_before_masters_listen_is_not_lost(tmp_path: Path) -> None:
    """Ctrl-C in the first moments ends the job as any other does, without a traceback."""
    with Job(tmp_path, *TWO, STEPS, "--term") as job:
        eventually(lambda: "job e2e" in job.said(), "the first word")
        job.process.send_signal(signal.SIGINT)
        assert job.ended(20.0) == 130
        assert job.left() == []
        assert "Traceback" not in job.said()
