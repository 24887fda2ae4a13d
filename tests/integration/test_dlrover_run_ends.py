"""How jobs end, or go on: ranks of different length, scripts that fail at once, disks that run full."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from running import BIN, BOUND_S, SCRIPTS, Job, eventually, warmth

UNEVEN, CHATTY = str(SCRIPTS / "uneven.py"), str(SCRIPTS / "chatty.py")


ONE_NODE = pytest.mark.nightly(reason="the one with two nodes stands for it in make test")


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(("--nproc-per-node", "2"), marks=ONE_NODE, id="one node"),
        pytest.param(("--nnodes", "1:2", "--local-nodes", "2"), id="two nodes"),
    ],
)
def test_who_is_done_waits_for_the_others(tmp_path: Path, where: tuple[str, ...]) -> None:
    """Rank 0 is done; rank 1 may take as long as it needs, on the same node or on another one. Nobody restarts, nobody fails.

    Of ``--nnodes 1:2`` both nodes train, although one would be enough.
    """
    with Job(tmp_path, *where, UNEVEN) as job:
        eventually(lambda: bool(job.told(0) and job.told(1)), "both ranks")
        first = int(job.told(0)[0][1])
        eventually(lambda: not Path(f"/proc/{first}").exists(), "the end of rank 0")
        if "--local-nodes" in where:
            eventually(lambda: bool(job.events("WorkersFinished")), "the word that one node is done")
        status = job.until(lambda _: True, "a status")
        assert (status["state"], status["world_size"]) == ("running", 2)
        job.finish()
        assert job.ended() == 0
        assert "rank 1 wrote the last checkpoint" in job.out.read_text()
        assert job.events("IncidentOpened") == []
        assert [one["fields"]["generation"] for one in job.events("WorldFormed")] == [1]
        assert job.left() == []


def test_a_script_that_fails_at_once_does_not_spin(tmp_path: Path) -> None:
    """Two restarts at once, then pauses that double; the budget ends it, and the root cause is told first.

    So it is under a policy that takes no error for final; `test_a_typo_ends_the_job_at_once` is without one.
    """
    (tmp_path / "typo.py").write_text("import os\nprnt(os.environ['RANK'])\n")
    (tmp_path / "policy.toml").write_text("user_repeats = 0\nfail_at_once = []\n")
    options = ("--max-restarts", "4", "--set", "restart_pause_s=0.6", "--policy", str(tmp_path / "policy.toml"))
    with Job(tmp_path, *options, str(tmp_path / "typo.py")) as job:
        assert job.ended() == 1
        formed = [one["at_us"] for one in job.events("WorldFormed")]
        failed = [one["at_us"] for one in job.events("WorkerExited")]
        assert len(formed) == 5
        pauses = [(after - before) / 1e6 for before, after in zip(failed, formed[1:], strict=False)]
        assert min(pauses[:2]) < 0.5
        assert pauses[2] >= 0.5
        assert pauses[3] >= 0.6
        summary = job.said()[job.said().index("dlrover-run: root cause") :]
        assert "NameError: name 'prnt' is not defined" in summary.splitlines()[0]
        assert "  attempt  : 4 (generation 5)" in summary
        assert "tried: restart of the processes 4 times" in summary


def test_a_mistake_in_data_whose_names_are_no_text(tmp_path: Path) -> None:
    """Errors with half characters, NUL, escape sequences and 100 kB end the job as those errors: no node is blamed or relaunched.

    All paths, an argument and the environment hold a byte that is not UTF-8; the script gets them as they are.
    """
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    (folder / "train\udce9.py").write_text(
        "import os, sys\n"
        "assert os.fsencode(sys.argv[1]) == b'caf\\xe9.jpg' and os.environb[b'ODD'] == b'\\xe9\\x01', sys.argv\n"
        "name = os.fsdecode(b'caf\\xe9.jpg')\n"
        "raise ValueError(f'no label for {name}\\0\\x1b]0;owned\\x07\\ud800' + ' x' * 50_000 * int(os.environ['RANK']))\n"
    )
    line = ("--nproc-per-node", "2", "--max-restarts", "0", str(folder / "train\udce9.py"), "caf\udce9.jpg")
    with Job(folder, *line, env={"ODD": "\udce9\x01"}) as job:
        assert job.ended() == 1
        assert [one["fields"]["generation"] for one in job.events("WorldFormed")] == [1]
        assert job.events("NodeFailed") == []
        exits = job.events("WorkerExited")
        assert {one["fields"]["signature"] for one in exits} == {"exception.ValueError"}
        assert any(r"no label for caf\xe9.jpg\x00\ud800" in one["fields"]["error"] for one in exits)
        ours = [one for one in job.said().splitlines() if one.startswith(("dlrover", "[e2e]", "  "))]
        assert any(r"ValueError: no label for caf\xe9.jpg\x00\ud800" in one for one in ours if "root cause" in one)
        assert "UnicodeEncodeError" not in job.said() + job.control_log()
        assert "the last lines of rank" in job.said()
        for command in ("report", "explain"):
            told = job.dlrover(command)
            assert "ValueError: no label for" in told
            assert "\x1b" not in told
        assert job.left() == []


def test_a_typo_ends_the_job_at_once(tmp_path: Path) -> None:
    """What cannot run is not started again: the job fails at the first NameError before any step, and says by which rule."""
    (tmp_path / "typo.py").write_text("import os\nprnt(os.environ['RANK'])\n")
    with Job(tmp_path, "--max-restarts", "4", str(tmp_path / "typo.py")) as job:
        assert job.ended() == 1
        assert len(job.events("WorldFormed")) == 1
        assert "NameError: name 'prnt' is not defined" in job.said()
        assert "user.at_once: NameError before the first step ever" in job.said()


def test_a_job_without_progress_ends_with_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """Cycles that reach no new step end the job with 93, so that whoever starts jobs again can leave this one alone."""
    (tmp_path / "stuck.py").write_text(
        "import sys\nfrom dlrover_adapters.torch import step\n"
        "step(5)\nstep(6)\nprint('OSError: [Errno 98] Address already in use', file=sys.stderr)\nsys.exit(1)\n"
    )
    (tmp_path / "policy.toml").write_text("no_progress_cycles = 2\n")
    with Job(tmp_path, "--policy", str(tmp_path / "policy.toml"), str(tmp_path / "stuck.py")) as job:
        assert job.ended() == 93
        assert len(job.events("WorldFormed")) == 3
        assert "2 cycles in a row have reached no new step" in job.said()


def test_a_full_log_directory_does_not_stop_training(tmp_path: Path) -> None:
    """The disk under ``--log-dir`` is full from the first second: workers print, train and are restarted all the same.

    The disk is a tmpfs of 256 KiB in a mount namespace of the job's own, so that nothing stays mounted.
    """
    (tmp_path / "logs").mkdir()
    inside = f"mount -t tmpfs -o size=256k,nr_inodes=32 none {tmp_path}/logs"
    own = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*own, "sh", "-c", inside], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    state = tmp_path / "state"
    line = [str(BIN / "dlrover-run"), "--state-dir", str(state), "--job-id", "full", "--nproc-per-node", "2"]
    line += ["-r", "1", "-t", "2", "--log-dir", str(tmp_path / "logs"), "--set", "restart_pause_s=0", CHATTY]
    script = f'{inside} && exec "$0" "$@"'
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        job = subprocess.Popen(
            [*own, "sh", "-c", script, *line],
            stdout=out,
            stderr=err,
            env={**os.environ, **warmth(line), "FOLDER": str(tmp_path)},
            start_new_session=True,
        )
    try:
        files = Path(f"/proc/{job.pid}/root{tmp_path}/logs")
        eventually(lambda: all(reached(tmp_path, rank, 0) > 300 for rank in (0, 1)), "training beyond the full disk")
        assert os.statvfs(files).f_bavail == 0
        pid = next(pid for pid in workers(tmp_path) if pid)
        os.kill(pid, 9)
        eventually(lambda: all(reached(tmp_path, rank, 1) > 50 for rank in (0, 1)), "the same after a restart")
        (tmp_path / "finish").touch()
        assert job.wait(BOUND_S) == 0, (tmp_path / "err").read_text()[-3000:]
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()
    assert "Traceback" not in (tmp_path / "err").read_text()


def reached(folder: Path, rank: int, attempt: int) -> int:
    """The step of a rank in an attempt; 0 before it has made one, and while it writes."""
    try:
        _, number, restarts = (folder / f"told-{rank}").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(number) if int(restarts) == attempt else 0


def workers(folder: Path) -> list[int]:
    """The workers that train in a folder."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            mine = f"FOLDER={folder}".encode() in (comm.parent / "environ").read_bytes().split(b"\0")
            if mine and comm.read_text().startswith("worker-"):
                found.append(int(comm.parent.name))
        except OSError:
            continue
    return found


def test_shells_and_what_they_run_hear_the_signal(tmp_path: Path) -> None:
    """A ``--no-python`` program is often a shell: what it runs gets the signal too, as under torchrun, and may save."""
    inner = "trap 'echo saved > $FOLDER/saved; exit 0' TERM; echo up > $FOLDER/up; while :; do sleep 0.05; done"
    (tmp_path / "inner.sh").write_text(inner)
    with Job(tmp_path, "--no-python", "sh", "-c", "sh $FOLDER/inner.sh; true") as job:
        eventually((tmp_path / "up").exists, "the program")
        job.process.terminate()
        assert job.ended() == 143
        assert (tmp_path / "saved").exists()
        assert job.left() == []


def test_the_configuration_is_shown_and_nothing_runs(tmp_path: Path) -> None:
    """``--show-config`` prints settings with their origins as a table or JSON; no state, no job, and the script is not run."""
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')\n")
    line = [str(BIN / "dlrover-run"), "--state-dir", "state", "--show-config=json", "train.py", "--lr=1"]
    env = {**os.environ, "PET_MAX_RESTARTS": "7"}
    told = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=BOUND_S, check=True)
    found = {f"{row['section']}.{row['name']}": row for row in json.loads(told.stdout)}
    assert (found["job.max_restarts"]["value"], found["job.max_restarts"]["origin"]) == (7, "PET_MAX_RESTARTS")
    assert not (tmp_path / "state").exists()


def test_a_command_line_near_the_limit_reaches_a_worker(tmp_path: Path) -> None:
    """All that Linux lets a program be started with, to the last word; one of them is no UTF-8. So it does after a restart."""
    (tmp_path / "told.py").write_text(
        "import hashlib, os, sys\n"
        "told = hashlib.sha256(b'\\0'.join(map(os.fsencode, sys.argv[1:]))).hexdigest()\n"
        "open(os.environ['FOLDER'] + '/told-' + os.environ['TORCHELASTIC_RESTART_COUNT'], 'w').write(told)\n"
        "sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    room = os.sysconf("SC_ARG_MAX") - sum(len(os.fsencode(f"{name}={value}")) + 9 for name, value in os.environ.items())
    words = [os.fsdecode(b"\xe9"), *(f"{number:06}" + "x" * 100_000 for number in range((room - 50_000) // 100_016))]
    with Job(tmp_path, "--max-restarts", "1", str(tmp_path / "told.py"), *words) as job:
        assert job.ended() == 0
    told = hashlib.sha256(b"\0".join(map(os.fsencode, words))).hexdigest()
    assert [(tmp_path / f"told-{life}").read_text() for life in range(2)] == [told, told]
