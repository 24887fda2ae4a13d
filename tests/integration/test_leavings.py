"""What scripts leave running: after a good end it may end by itself; before a restart, and for good, nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import SCRIPTS, Job, Process, eventually

LEAVES = str(SCRIPTS / "leaves.py")
KINDS = ("plain", "session", "daemon", "bare")


def pids(folder: Path) -> list[Process]:
    """What was left so far."""
    return [Process(int(line), "", "") for line in (folder / "pids").read_text().splitlines()]


def test_what_a_good_end_leaves_may_end_by_itself(tmp_path: Path) -> None:
    """An upload, a notifier: all are done before the launcher ends, and people are told what it waits for."""
    with Job(tmp_path, LEAVES, "1.5", "0") as job:
        assert job.ended() == 0
        assert [(tmp_path / f"left-{kind}").read_text() for kind in KINDS] == ["done"] * 4
        assert "waiting up to 30 s (stop_grace_s) for what the script left running" in job.said()
        assert "stopped what still ran" not in job.said()
        assert job.left() == []


def test_what_does_not_end_is_named_and_stopped(tmp_path: Path) -> None:
    """After ``stop_grace_s``; whatever its session and its environment."""
    with Job(tmp_path, "--set", "stop_grace_s=1", LEAVES, "600", "0") as job:
        assert job.ended() == 0
        left = pids(tmp_path)
        assert len(left) == 4
        assert not any(one.lives for one in left)
        said = next(line for line in job.said().splitlines() if "stopped what still ran" in line)
        assert all(f"pid {one.pid}" in said for one in left)


def test_before_a_restart_it_is_stopped_at_once(tmp_path: Path) -> None:
    """What a life that failed has left does not disturb the next one; a life that fails for good leaves nothing either."""
    with Job(tmp_path, "--max-restarts", "1", "--set", "stop_grace_s=1", LEAVES, "600", "3") as job:
        assert job.ended() == 0
        assert len(pids(tmp_path)) == 8
        assert not any(one.lives for one in pids(tmp_path))
        said = next(line for line in job.said().splitlines() if "waiting up to" in line)
        assert not any(f"pid {one.pid}" in said for one in pids(tmp_path)[:4])


@pytest.mark.nightly(reason="test_before_a_restart_it_is_stopped_at_once")
def test_a_job_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """At once."""
    with Job(tmp_path, "--max-restarts", "0", LEAVES, "600", "3") as job:
        assert job.ended() == 1
        assert not any(one.lives for one in pids(tmp_path))
        assert "waiting up to" not in job.said()


def test_it_does_not_outlive_a_killed_agent(tmp_path: Path) -> None:
    """Not even a daemon without environment: it becomes the launcher's child, which ends it before the node is replaced."""
    with Job(tmp_path, "--set", "stop_grace_s=1", LEAVES, "600", "-1") as job:
        eventually(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == 4, "four children")
        job.one("dlrover-agent").kill()
        eventually(lambda: len(pids(tmp_path)) == 8, "four more")
        assert not any(one.lives for one in pids(tmp_path)[:4])
        job.finish()
        assert job.ended() == 0
        assert not any(one.lives for one in pids(tmp_path))


def test_bodies_of_orphans_are_taken_away(tmp_path: Path) -> None:
    """Daemons of a script that end while it trains leave no zombies with the agent."""
    script = tmp_path / "daemons.py"
    script.write_text(
        "import os, time\n"
        "for _ in range(20):\n"
        "    if not os.fork():\n"
        "        os.setsid()\n"
        "        if os.fork():\n"
        "            os._exit(0)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "open(os.environ['FOLDER'] + '/made', 'w').close()\n"
        "while not os.path.exists(os.environ['FOLDER'] + '/finish'):\n"
        "    time.sleep(0.05)\n"
    )
    with Job(tmp_path, str(script)) as job:
        eventually((tmp_path / "made").exists, "the daemons")
        agent = job.one("dlrover-agent")

        def zombies() -> int:
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
            return sum(not Process(int(pid), "", "").lives for pid in children)

        eventually(lambda: zombies() == 0, "no zombies")
        job.finish()
        assert job.ended() == 0
