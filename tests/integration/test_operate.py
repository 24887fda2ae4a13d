"""`dlrover scale|drain|suspend|resume|stop` against a real `dlrover-run`, as a person on its host types them."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from commands import dlrover
from running import SCRIPTS, TOKEN, Job, eventually

STEPS = str(SCRIPTS / "steps.py")


def tell(job: Job, verb: str, *words: str, code: int = 0, token: str | None = None) -> str:
    """One command about a job, to its end; what it printed, both streams. Without a ``token``: as a new shell, that has none."""
    env = {name: value for name, value in os.environ.items() if name != "DLROVER_TOKEN"}
    line = [verb, job.name, "--state-dir", str(job.state), *words]
    done = dlrover(line, {**env, **({"DLROVER_TOKEN": token} if token else {})})
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(240)
def test_a_whole_life_by_hand(tmp_path: Path) -> None:
    """1 -> 2 nodes, one drained, a pause, and the end: each as it is told, workers asked politely, no failure, nothing left."""
    with Job(tmp_path, "--set", "stop_grace_s=10", STEPS, "--term") as job:
        job.trains(1, beyond=5)
        token = job.state / "jobs" / job.name / "token"
        assert token.read_text().strip() == TOKEN
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert "--token-file" in tell(job, "stop", code=6, token="of-another-job")  # what to do; and nothing is done

        said = tell(job, "scale", "worker=2", "--wait", "--reason", "a second node")
        assert "generation 2, 2 nodes, 2 ranks" in said
        eventually(lambda: ["terminated", "SIGTERM"] in job.told(0), "the politeness of a growth")
        job.trains(2, beyond=1000)
        assert "group worker has 1 to 2 nodes already" in tell(job, "scale", "2", code=5)

        assert "there are: worker-0-0, worker-1-0" in tell(job, "drain", "worker-7", code=5)
        assert "quarantine is done as event" in tell(job, "hosts", "--quarantine", "gpu-17", "--for", "2h")
        kept_off = r"gpu-17  -     -                 quarantine for (2 h 00|1 h 5\d) min more, as asked"
        assert re.search(kept_off, tell(job, "hosts"))
        assert "release is done as event" in tell(job, "hosts", "--release", "gpu-17", "--reason", "mended")
        assert "nothing is known against a host" in tell(job, "hosts", "--release", "gpu-17", code=5)

        said = tell(job, "drain", "worker-1-0", "--wait")
        assert "2 nodes" in said
        job.trains(3, beyond=2000)
        assert [one["fields"]["node"] for one in job.events("NodeDrained")] == ["worker-1-0"]
        assert "worker-1-1" in job.status()["nodes"]  # type: ignore[index]  # on this very host: there is no other

        (tmp_path / "given").write_text(TOKEN)
        given = ("--token-file", str(tmp_path / "given"), "--master", job.settings["masters"][0])
        refused = tell(job, "suspend", code=5)
        assert "worker saves nothing with FlashCheckpoint, and the" in refused
        assert "--yes accepts that, --keep-nodes stops the workers and keeps the nodes" in refused
        assert "suspended (lunch)" in tell(job, "suspend", "--keep-nodes", *given, "--wait", "--reason", "lunch")
        assert eventually(job.status, "a status")["state"] == "suspended"
        assert job.processes("worker-0") == job.processes("worker-1") == []
        assert "the job is suspended already" in tell(job, "suspend", code=5)
        assert "the job is running" not in tell(job, "status")

        assert "generation 4, 2 nodes" in tell(job, "resume", "--wait")
        job.trains(4, beyond=3000)
        assert "only a suspended one" in tell(job, "resume", code=5)

        assert "generation 5, 1 node, 1 rank" in tell(job, "scale", "worker=1", "--wait")
        job.trains(5, beyond=4000)

        assert "stopped (enough)" in tell(job, "stop", "--reason", "enough")
        assert job.ended() == 1
        assert job.left() == []
        assert not token.is_symlink()
        assert job.events("IncidentOpened", "CommandFailed") == []
        assert "the job has ended: it is stopped" in tell(job, "suspend", code=5)


def test_waiting_has_its_bound_and_outlives_a_master(tmp_path: Path) -> None:
    """Workers that do not heed SIGTERM are waited for as long as was said; the order holds under the next master too."""
    with Job(tmp_path, "--set", "stop_grace_s=600", STEPS, "--deaf") as job:
        job.trains(1)
        said = tell(job, "suspend", "--keep-nodes", "--wait", "--timeout", "3", code=7)
        assert "not so within 3 s: workers of 1 node have not stopped yet" in said
        leader = eventually(job.status, "a status")["leader"]
        next(one for one in job.processes("dlrover-master") if f"/{one.pid}/" in leader).kill()
        assert "the job is suspended already" in tell(job, "suspend", code=5)
        assert tell(job, "resume").startswith("job e2e: resume is done as event")
        job.one("worker-0").kill()
        job.trains(2)
        tell(job, "stop", "--no-wait")
        job.one("worker-0").kill()
        assert job.ended() == 1


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("suspended", marks=pytest.mark.nightly(reason="the one that trains stands for it in make test")),
        "training",
    ],
)
def test_the_command_of_a_job_without_masters_says_so(tmp_path: Path, at: str) -> None:
    """A job whose launcher was killed has nobody to ask, and that is said at once; what it leaves is no secret."""
    with Job(tmp_path, STEPS) as job:
        job.trains(1)
        if at == "suspended":
            tell(job, "suspend", "--keep-nodes", "--wait")
        sweeper = job.sweeper
        job.process.kill()
        job.ended()
        sweeper.ends()
        assert job.left() == []
        assert not (job.state / "jobs" / job.name / "token").exists()
        assert "nothing of job e2e runs any more" in tell(job, "stop", code=6)
