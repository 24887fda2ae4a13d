"""`dlrover-run` from end to end: the command line, exit statuses, what a failure looks like, and what scripts see."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from running import BIN, BOUND_S, SCRIPTS, Job, warmth

STEPS, WHERE, FAILS = (str(SCRIPTS / name) for name in ("steps.py", "where.py", "fails.py"))
COLD = ("--preload", "none")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``dlrover-run`` with these arguments, to its end."""
    line = [str(BIN / "dlrover-run"), *arguments]
    born = {**os.environ, **warmth(arguments, folder)}
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=BOUND_S, check=False, env=born)


# ---- the command line


def cpu_s() -> float:
    """What our children that have ended have used: unlike time it says nothing of whoever runs beside them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_has_examples_and_is_instant(tmp_path: Path) -> None:
    """`--help` shows examples and exit statuses, and imports nothing slow: it answers for the price of a few interpreters."""
    began = cpu_s()
    subprocess.run([sys.executable, "-c", "import argparse"], check=True)
    bare = cpu_s() - began
    took = math.inf
    for _ in range(3):
        began = cpu_s()
        helped = run(tmp_path, "--help")
        took = min(took, cpu_s() - began)
    assert helped.returncode == 0
    assert "examples:" in helped.stdout
    assert "exit status:" in helped.stdout
    assert took < 5 * bare + 0.3
    slow = "{'torch', 'asyncio', 'aiohttp', 'structlog'}"
    lean = f"import sys; from dlrover_adapters.cli import options; options.parser(); print({slow} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", lean], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_version_says_whose_it_is(tmp_path: Path) -> None:
    """`--version` names the distribution: another one has a command of the same name."""
    told = run(tmp_path, "--version")
    assert told.returncode == 0
    assert re.match(r"dlrover-core \S+ \(dlrover-run\)", told.stdout)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ((), "name the script to run, or --job FILE.toml; see --help"),
        (("nope.py",), "'nope.py' is not a file; for a module say -m, for a program --no-python"),
        (("--nproc-per-node", "0", "ok.py"), "not a number, nor one of auto, cpu, gpu"),
        (("--nproc-per-node", "many", "ok.py"), "not a number, nor one of auto, cpu, gpu"),
        (("-r", "5", "ok.py"), "none of 0 (none), 1 (stdout), 2 (stderr), 3 (both)"),
        (("-t", "0:1,3:1", "--nproc-per-node", "2", "ok.py"), "local rank 3 does not exist: this node runs 2 workers"),
        (("--nnodes", "2", "ok.py"), "--local-nodes 2 runs them all on this one"),
        (("--logs-specs", "mine", "ok.py"), "is a class of torch's agent"),
        (("--log-dir", "ok.py", "ok.py"), "log-dir: cannot be made or written to"),
        (("--nnodes", "x", "ok.py"), "'x' is not N or MIN:MAX"),
        (("--nnodes", "3:2", "--local-nodes", "2", "ok.py"), "MIN <= MAX"),
        (("--max-restarts", "-1", "ok.py"), "cannot be negative"),
        (("--job-id", "A B", "ok.py"), "lower-case letters, digits"),
        (("-m", "--no-python", "ok"), "exclude one another"),
        (("--set", "nothing_s=1", "ok.py"), "boundary_s=60, launch_s=900"),
        (("--set", "silence_s=soon", "ok.py"), "is not NAME=SECONDS"),
        (("--set", "silence_s=1", "ok.py"), "at least 3 heartbeats"),
        (("--state-dir", "/proc/dlrover", "ok.py"), "name a directory of yours with --state-dir"),
        (("--state-dir", "ok.py", "ok.py"), "name a directory of yours with --state-dir"),
        (("--log", "nolog://here", "ok.py"), "no log is installed for 'nolog'; there are:"),
        (("--log", "sqlite:///proc/dlrover/log.db", "ok.py"), "name another place with --log or --state-dir"),
        (("--log", "memory:", "ok.py"), "say sqlite"),
        (("--no-such-option", "ok.py"), "unrecognized arguments"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_to_do(tmp_path: Path, arguments: tuple[str, ...], advice: str) -> None:
    """Everything that can be known before a process is started is told before, with what to do next, and no traceback."""
    (tmp_path / "ok.py").write_text("print('it ran')\n")
    if "--state-dir" not in arguments:
        arguments = ("--state-dir", "state", *arguments)
    told = run(tmp_path, *arguments)
    assert told.returncode == 2
    assert advice in told.stderr
    assert "Traceback" not in told.stderr
    assert "it ran" not in told.stdout


def test_a_state_directory_on_a_network_file_system_is_refused_by_name(tmp_path: Path) -> None:
    """Locks there do not fence other hosts. Told from the mount table, so a table is told."""
    code = f"""
        import sys
        from unittest import mock
        from dlrover_core.logs import place
        from dlrover_adapters.cli import run
        with mock.patch.object(place, "file_system", lambda path, mountinfo=None: "nfs4"):
            sys.exit(run.main(["--state-dir", {str(tmp_path / "far")!r}, {STEPS!r}]))
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "nfs4 file system" in told.stderr
    assert not (tmp_path / "far").exists()


# ---- failures


@pytest.mark.parametrize(
    "restarts",
    [pytest.param(0, marks=pytest.mark.nightly(reason="the one with a restart stands for it in make test")), 1],
)
def test_a_failure_is_told_by_its_root_cause(tmp_path: Path, restarts: int) -> None:
    """Rank 1 raises, rank 0 dies of it. After the last restart the exit status is 1, and the last words are rank 1's own lines

    and its exception: not the cascade.
    """
    patience = ("--set", "broken_grace_s=60")  # rank 0 is left the time to notice
    with Job(tmp_path, "--nproc-per-node", "2", "--max-restarts", str(restarts), *patience, FAILS) as job:
        assert job.ended() == 1
        said = job.said()
        told = re.findall(r"^dlrover-run: rank \d on worker-0-0 failed: .* \(generation (\d)\)", said, re.MULTILINE)
        assert told == [str(one) for one in range(1, restarts + 2)]  # as it happens, once each time
        summary = said[said.rindex("dlrover-run: root cause") :]
        assert f"the last lines of rank 1 on worker-0-0 (generation {restarts + 1}):" in summary
        assert "| about to read batch 17" in summary
        assert "raise ValueError" in summary
        assert (
            "dlrover-run: root cause: rank 1 on worker-0-0: ValueError: bad batch 17 (exception.ValueError)\n"
            in summary
        )
        assert "job e2e failed (" in summary
        assert f"dlrover report e2e --state-dir {job.state}" in summary
        cause, _, others = summary.partition("other failures of the same attempt:")
        assert "closed by peer" not in cause
        assert re.search(r"rank 0 on worker-0-0: (exit code 1|stopped after it): .*Connection closed by peer", others)
        assert ("tried: restart of the processes once" in summary) == bool(restarts)
        assert len(job.events("IncidentOpened")) == restarts + 1
        assert job.left() == []


# ---- what a script sees


def seen(folder: Path, count: int) -> list[dict[str, Any]]:
    """What `where.py` wrote, by rank."""
    return [json.loads((folder / f"where-{rank}").read_text()) for rank in range(count)]


@pytest.mark.parametrize(
    "module",
    [False, pytest.param(True, marks=pytest.mark.nightly(reason="the script stands for the module in make test"))],
)
def test_a_cold_script_sees_what_it_sees_under_torchrun(tmp_path: Path, module: bool) -> None:
    """The same environment of each rank, arguments, directory, ``__main__`` and first path, script and module.

    What warm ones see, and more of it, is compared in `test_parity.py`.
    """
    cold, theirs = (tmp_path / name for name in ("cold", "theirs"))
    for folder in cold, theirs:
        folder.mkdir()
    env = {"PYTHONPATH": str(SCRIPTS)} if module else {}
    program = ("-m", "where", "--lr", "0.1", "x") if module else (WHERE, "--lr", "0.1", "x")
    born = {**os.environ, **env, "FOLDER": str(theirs)}
    # In the folder that the test ends in, so that all have one working directory.
    torchrun = subprocess.Popen(
        [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", *program],
        env=born,
        cwd=tmp_path,
    )
    with Job(tmp_path, *COLD, "--nproc-per-node", "2", *program, env={**env, "FOLDER": str(cold)}) as job:
        assert job.ended() == 0
    assert torchrun.wait(BOUND_S) == 0
    expected = seen(theirs, 2)
    assert [one["environment"]["RANK"] for one in expected] == ["0", "1"]
    assert [trim(one) for one in seen(cold, 2)] == [trim(one) for one in expected]


def trim(told: dict[str, Any]) -> dict[str, Any]:
    """What must be equal. Whose host name or loopback leads is the launcher's affair: it must only be there."""
    environment = {**told["environment"]}
    environment["MASTER_ADDR"] = bool(environment["MASTER_ADDR"])
    return {**told, "environment": environment}


def test_a_path_to_run_and_a_preload_that_is_left_out(tmp_path: Path) -> None:
    """``--run-path`` runs a script by runpy. A module that cannot be imported once for all workers is told, with the reason,

    and the job runs without it.
    """
    with Job(tmp_path, "--preload", "asyncio.windows_events", "--run-path", WHERE) as job:
        assert job.ended() == 0
        assert seen(tmp_path, 1)[0]["name"] == "__main__"
        told = "dlrover-run: --preload asyncio.windows_events is left out: cannot be imported: ImportError: win32 only"
        assert told in job.said()


BY_NUMBER = """
import os, sys, torch, torch.distributed as dist
rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=size)
assert os.environ["MASTER_PORT"] == port, os.environ["MASTER_PORT"]
total = torch.ones(1)
dist.all_reduce(total)
assert total == size
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 1:
    os.kill(os.getpid(), 9)
print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {rank} met at {port}")
"""


def test_a_named_port_is_where_every_generations_store_listens(tmp_path: Path) -> None:
    """A script that connects to ``--master-port`` by number meets there, after a restart too; one that is taken is refused."""
    (tmp_path / "x.py").write_text(BY_NUMBER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
        refused = run(tmp_path, "--master-port", port, "x.py", port)
    assert refused.returncode == 2
    assert f"the store cannot listen at 127.0.0.1:{port}: Address already in use" in refused.stderr
    told = run(tmp_path, "--nproc-per-node", "2", "--master-addr", "localhost", "--master-port", port, "x.py", port)
    assert told.returncode == 0, told.stderr
    assert "does nothing" not in told.stderr
    assert {line for line in told.stdout.splitlines() if line.startswith("attempt 1")} == {
        f"attempt 1 of rank {rank} met at {port}" for rank in (0, 1)
    }


def test_streams_go_where_they_are_told(tmp_path: Path) -> None:
    """``-r`` sends streams into files, ``-t`` into files and to the console, all under ``--log-dir`` in the rank's folder.

    The program is any one, by ``--no-python``: it runs once per rank, with its environment.
    """
    says = 'echo "out $RANK of $WORLD_SIZE"; echo "err $RANK" >&2'
    with Job(
        tmp_path,
        "--nproc-per-node",
        "2",
        "-r",
        "1:3",
        "-t",
        "0:1",
        "--log-dir",
        "logs",
        "--no-python",
        "sh",
        "-c",
        says,
    ) as job:
        assert job.ended() == 0
        assert job.out.read_text() == "[default0]:out 0 of 2\n"  # as torchrun marks them
        assert "err 0" in job.said()
        assert "err 1" not in job.said()
        files = {path.relative_to(tmp_path / "logs"): path.read_text() for path in (tmp_path / "logs").rglob("*.log")}
        kept = {(path.parent.name, path.name): text for path, text in files.items() if text}
        assert kept[("0", "stdout.log")] == "out 0 of 2\n"
        assert kept[("1", "stdout.log")] == "out 1 of 2\n"
        assert kept[("1", "stderr.log")] == "err 1\n"


# ---- runs and logs


def test_a_second_run_of_a_name_begins_a_new_run_in_the_same_log(tmp_path: Path) -> None:
    """A finished name may be used again: its log goes on with a run of another id. Two at once are refused, with whom to stop."""
    with Job(tmp_path, STEPS) as job:
        job.trains(1)
        second = run(tmp_path, "--state-dir", "state", "--job-id", "e2e", STEPS)
        assert second.returncode == 2
        assert f"runs already, under the dlrover-run with pid {job.process.pid}" in second.stderr
        job.trains(1, beyond=job.trains(1)["step"])
        job.finish()
        assert job.ended() == 0
    with Job(tmp_path, "--no-python", "true") as job:
        assert job.ended() == 0
        runs = [one["fields"]["run"] for one in job.events("JobCreated")]
        assert len(set(runs)) == 2
        assert [one["event"] for one in job.events("JobSucceeded", "JobAbandoned")] == ["JobSucceeded"] * 2


def test_a_log_elsewhere(tmp_path: Path) -> None:
    """``--log URL`` keeps the log where it says, `dlrover` finds it there, and the hint at the end says how."""
    url = f"sqlite://{tmp_path}/far/away.db"
    with Job(tmp_path, "--log", url, "--max-restarts", "0", "--no-python", "false") as job:
        assert job.ended() == 1
        assert f"dlrover report e2e --log {url}" in job.said()
        assert "JobFailed" in job.dlrover("events", "--log", url)
        assert not (job.state / "log.db").exists()


# ---- what is told afterwards


def test_the_log_tells_what_was_done(tmp_path: Path) -> None:
    """After a killed worker the run says so in a line, `explain` leads from the exit to the action by its rule and to what that
    cost, `report` adds up, and `status` agrees.
    """
    with Job(tmp_path, "--nproc-per-node", "2", "--progress", "on", STEPS) as job:
        job.trains(1, beyond=10)
        job.one("worker-1").kill()
        job.trains(2, beyond=1000)
        live = json.loads(job.dlrover("status", "--json"))
        assert live["state"] == "running"
        job.finish()
        assert job.ended() == 0
        assert job.left() == []

        explained = job.dlrover("explain")
        exited = next(one["seq"] for one in job.events("WorkerExited"))
        lines = [line for line in explained.splitlines() if re.search(r"#\d+ +\+", line)]
        assert f"#{exited} " in lines[0]
        assert "killed by SIGKILL" in lines[0]
        assert "RESTART_PROCESSES" in explained
        assert "budget restarts: 3 before, 2 after" in explained
        said = re.findall(r"\] incident 1: (.*)", job.said())
        assert re.fullmatch(r"worker-0, rank 1: .*\(signature exit.sigkill\) -> restart the processes", said[0])
        assert re.fullmatch(re.escape(said[0]) + r"; back in \d.*", said[1])
        assert len(said) == 2
        assert "workers.restart" in explained

        report = json.loads(job.dlrover("report", "--json"))
        goodput = report["goodput"]
        assert sum(goodput["by_class"].values()) == goodput["wall_us"]
        assert len(report["incidents"]) == 1
        assert json.loads(job.dlrover("status", "--json"))["state"] == "succeeded"
        assert "exit.sigkill" in job.said()  # the progress line's last incident
