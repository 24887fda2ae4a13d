"""What scripts leave running: after a good end it may end by itself; before a restart, and for good, nothing of it stays."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path

import pytest
from running import SCRIPTS, Job, Process, eventually

from dlrover_core.host import cgroups

LEAVES = str(SCRIPTS / "leaves.py")
KINDS = ("plain", "session", "daemon", "bare", "adopted")


def pids(folder: Path) -> list[Process]:
    """What was left so far."""
    return [Process(int(line), "", "") for line in (folder / "pids").read_text().splitlines()]


def test_what_a_good_end_leaves_may_end_by_itself(tmp_path: Path) -> None:
    """An upload, a notifier: all are done before the launcher ends, and people are told what it waits for."""
    with Job(tmp_path, LEAVES, "1.5", "0") as job:
        assert job.ended() == 0
        assert [(tmp_path / f"left-{kind}").read_text() for kind in KINDS] == ["done"] * len(KINDS)
        assert "waiting up to 30 s (stop_grace_s) for what the script left running" in job.said()
        assert "stopped what still ran" not in job.said()
        assert job.left() == []


@pytest.mark.parametrize(
    "groups", ["on", pytest.param("off", marks=pytest.mark.nightly(reason="[on], where no control group can be made"))]
)
def test_what_does_not_end_is_named_and_stopped(tmp_path: Path, groups: str) -> None:
    """After ``stop_grace_s``; whatever its session, its environment and its parent."""
    with Job(tmp_path, "--set", "stop_grace_s=1", LEAVES, "600", "0", env={cgroups.SWITCH: groups}) as job:
        assert job.ended() == 0
        left = pids(tmp_path)
        assert len(left) == len(KINDS)
        assert not any(one.lives for one in left)
        said = next(line for line in job.said().splitlines() if "stopped what still ran" in line)
        assert all(f"pid {one.pid}" in said for one in left)


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    """Ctrl-C while leavings have their grace: they are stopped, and the job has ended well."""
    with Job(tmp_path, LEAVES, "600", "0") as job:
        eventually(lambda: "waiting up to 30 s" in job.said(), "the wait")
        job.process.send_signal(signal.SIGINT)
        assert job.ended(15) == 0
        assert "stopped what still ran as the job was to stop" in job.said()
        assert not any(one.lives for one in pids(tmp_path))


def test_before_a_restart_it_is_stopped_at_once(tmp_path: Path) -> None:
    """What a life that failed has left does not disturb the next one; a life that fails for good leaves nothing either."""
    with Job(tmp_path, "--max-restarts", "1", "--set", "stop_grace_s=1", LEAVES, "600", "3") as job:
        assert job.ended() == 0
        assert len(pids(tmp_path)) == 2 * len(KINDS)
        assert not any(one.lives for one in pids(tmp_path))
        said = next(line for line in job.said().splitlines() if "waiting up to" in line)
        assert not any(f"pid {one.pid}" in said for one in pids(tmp_path)[: len(KINDS)])


@pytest.mark.nightly(reason="test_before_a_restart_it_is_stopped_at_once")
def test_a_job_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """At once."""
    with Job(tmp_path, "--max-restarts", "0", LEAVES, "600", "3") as job:
        assert job.ended() == 1
        assert not any(one.lives for one in pids(tmp_path))
        assert "waiting up to" not in job.said()


@pytest.mark.parametrize(
    "groups", ["on", pytest.param("off", marks=pytest.mark.nightly(reason="[on], where no control group can be made"))]
)
def test_it_does_not_outlive_a_killed_agent(tmp_path: Path, groups: str) -> None:
    """Not even a daemon without environment: it becomes the launcher's child, which ends it before the node is replaced."""
    with Job(tmp_path, "--set", "stop_grace_s=1", LEAVES, "600", "-1", env={cgroups.SWITCH: groups}) as job:
        eventually(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == len(KINDS), "its children")
        job.one("dlrover-agent").kill()
        eventually(lambda: len(pids(tmp_path)) == 2 * len(KINDS), "as many more")
        assert not any(one.lives for one in pids(tmp_path)[: len(KINDS)])
        job.finish()
        assert job.ended() == 0
        assert not any(one.lives for one in pids(tmp_path))


def of_run(job: Job) -> list[str]:
    """The control groups that there are of a run."""
    base = cgroups.own()
    return [
        one.name
        for one in Path(base or "/").iterdir()
        if one.name.startswith(f"{cgroups.PREFIX}{job.settings['run']}-")
    ]


def test_it_does_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """Where workers have a control group: whatever it did to its session, its environment and its parent."""
    with Job(tmp_path, LEAVES, "600", "-1") as job:
        eventually(lambda: (tmp_path / "pids").exists() and len(pids(tmp_path)) == len(KINDS), "its children")
        found = of_run(job)
        if not found:
            for one in pids(tmp_path):
                one.kill()
            pytest.skip("no control group of version 2 can be made here")
        assert len(found) == 1
        job.process.kill()
        for one in pids(tmp_path):
            one.ends()
        assert job.left() == []
        eventually(lambda: of_run(job) == [], "the removal of the control group")


@pytest.mark.nightly(reason="test_bodies_of_orphans_are_taken_away, by an agent")
@pytest.mark.parametrize("groups", ["on", "off"])
def test_the_first_process_of_a_container_reaps_orphans(tmp_path: Path, groups: str) -> None:
    """Those of a killed agent are its children; they are killed with their control group, or end by themselves."""
    below = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*below, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process namespace can be made here")
    with Job(tmp_path, LEAVES, "5", "-1", env={cgroups.SWITCH: groups}, prefix=below) as job:
        lines = tmp_path / "pids"
        eventually(lambda: lines.exists() and len(pids(tmp_path)) == len(KINDS), "its children")
        launcher = children(job.process.pid)[0]
        assert Path(f"/proc/{launcher}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
        job.one("dlrover-agent").kill()
        eventually(lambda: len(pids(tmp_path)) == 2 * len(KINDS), "as many more")

        def bodies() -> list[int]:
            return [pid for pid in children(launcher) if not Process(pid, "", "").lives]

        eventually(lambda: not writers(tmp_path), "the end of all of them")
        eventually(lambda: not bodies(), "no zombies")
        job.finish()
        assert job.ended() == 0
        assert job.left() == []


def writers(folder: Path) -> list[int]:
    """What was left and lives, by its command line: numbers of another process namespace say nothing here."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/left-".encode() in one.read_bytes():
                found.append(int(one.parent.name))
    return found


def children(pid: int) -> list[int]:
    """Of a process, by all its threads."""
    return [
        int(one)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for one in (task / "children").read_text(encoding="ascii").split()
    ]


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
