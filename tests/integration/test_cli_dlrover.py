"""`dlrover` on a real SQLite log: each exit code and each stream as people run it, a process of its own."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import structlog
from tests.unit.life import Life, three_deaths

from dlrover_adapters.cli.main import main
from dlrover_core.job import job
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended, Leadership
from dlrover_core.logs import open_log
from dlrover_core.spec import GroupSpec, JobSpec

ROOT = Path(__file__).parents[2]
SOURCES = os.pathsep.join(str(ROOT / part) for part in ("src", "src/adapters", "src/backends"))
COMMAND = [sys.executable, "-m", "dlrover_adapters.cli.main"]
PATIENCE_S = 60.0


def _spec(name: str) -> JobSpec:
    return JobSpec(name, (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),), max_restarts=0 if name == "broken" else 3)


def _environment() -> dict[str, str]:
    # TZ, so that local times are the same everywhere.
    return {**os.environ, "PYTHONPATH": SOURCES, "TZ": "UTC", "COLUMNS": "120"}


def dlrover(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, in this process: a new interpreter costs more than all that it does."""
    out, err, logging = io.StringIO(), io.StringIO(), structlog.get_config()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ, _environment()):
        time.tzset()
        try:
            code = main(words)
        except SystemExit as end:  # argparse's
            code = end.code if isinstance(end.code, int) else 1
    time.tzset()
    structlog.configure(**logging)
    assert code == expect, err.getvalue() or out.getvalue()
    assert "Traceback" not in err.getvalue()
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def typed(*words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, as people do."""
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, env=_environment(), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == expect, done.stderr or done.stdout
    assert "Traceback" not in done.stderr
    return done


async def _append(lead: Leadership, counter: int, records: list[Record]) -> None:
    batch = CODEC.batch(lead.token, counter, [record._replace(token=lead.token) for record in records])
    assert isinstance(await lead.append(batch), Appended)


async def _write(state: Path, lives: dict[str, Life]) -> None:
    async with open_log(f"sqlite://{state / 'log.db'}") as log:
        for name, life in lives.items():
            lead = await log.lead(name, "test")
            await _append(lead, 1, life.records)
            await lead.resign()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A state directory with the logs of two jobs: `digits` went well in the end, `broken` did not; `digits` is newer."""
    broken = Life(_spec("broken")).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    broken.die(10, "worker-0-0", 0, 1, error="ValueError: bad sample").tick(400)
    broken.records = [record._replace(at=record.at - 10**9) for record in broken.records]
    where = tmp_path_factory.mktemp("state")
    asyncio.run(_write(where, {"digits": three_deaths(_spec("digits")), "broken": broken}))
    return str(where)


def test_status(state: str) -> None:
    """`status` shows how the job stands; as JSON, every field has a name."""
    assert "succeeded" in typed("status", "digits", "--state-dir", state).stdout
    told = json.loads(dlrover("status", "digits", "--state-dir", state, "--json").stdout)
    assert (told["job"], told["state"], told["step"]) == ("digits", "succeeded", 113)


def test_status_of_a_failed_job(state: str) -> None:
    """`status` of a failed job ends with 1 and says first what the job failed over."""
    done = typed("status", "broken", "--state-dir", state, expect=1)
    assert done.stdout.startswith("FAILED: rank 0 on worker-0-0: ValueError: bad sample")


def test_newest_job_by_default(state: str) -> None:
    """Without a name the job with the newest event is meant."""
    assert dlrover("status", "--state-dir", state).stdout.startswith("job digits")


def test_events(state: str) -> None:
    """`events` prints one line per record; with --json one object per line, with --since only what came after."""
    url = f"sqlite://{state}/log.db"
    lines = dlrover("events", "digits", "--log", url).stdout.splitlines()
    assert lines[0].startswith("     1  2025-11-20 12:00:00.000      +0.000  JobCreated")
    objects = [json.loads(line) for line in dlrover("events", "digits", "--log", url, "--json").stdout.splitlines()]
    assert [one["seq"] for one in objects] == list(range(1, len(lines) + 1))
    assert objects[0]["fields"]["spec"]["job"] == "digits"
    exit_of = next(one for one in objects if one["event"] == "WorkerExited")
    assert exit_of["fields"]["exit_code"] == -9
    rest = dlrover("events", "digits", "--log", url, "--since", str(exit_of["seq"])).stdout.splitlines()
    assert len(rest) == len(lines) - exit_of["seq"]
    assert "+63.100" in rest[0]


def test_explain(state: str) -> None:
    """`explain` leads from an action to the first evidence; a lone number means an event of the newest job."""
    told = json.loads(dlrover("explain", "digits", "--state-dir", state, "--json").stdout)
    names = [one["event"] for one in told["before"]]
    assert names == ["NodeFailed", "IncidentOpened", "Diagnosed", "ActionChosen"]
    assert told["before"][-1]["fields"]["rule"].startswith("node.relaunch")
    text = dlrover("explain", str(told["target"]), "--state-dir", state).stdout
    assert text == dlrover("explain", "digits", f"#{told['target']}", "--state-dir", state).stdout
    assert "why #" in text
    assert "bad sample" in dlrover("explain", "broken", "--state-dir", state).stdout


def test_explain_an_incident(state: str) -> None:
    """`explain JOB` tells the newest incident as a story, `--incident N` another one; there is no story of one that is not."""
    assert told_of(dlrover("explain", "digits", "--state-dir", state).stdout) == "incident 2 of job digits"
    assert (
        told_of(dlrover("explain", "digits", "--incident", "1", "--state-dir", state).stdout)
        == "incident 1 of job digits"
    )
    assert "no incident 9" in dlrover("explain", "digits", "--incident", "9", "--state-dir", state, expect=3).stderr
    values = json.loads(dlrover("explain", "digits", "--incident", "1", "--state-dir", state, "--json").stdout)
    assert values["incident"]["story"]["signature"] == "exit.sigkill"
    assert [one["event"] for one in values["before"]][-1] == "ActionChosen"


def told_of(text: str) -> str:
    """What a story is about, by its first words."""
    return text.partition(",")[0]


def test_hosts(state: str) -> None:
    """`hosts` says who runs where and what failed there, for people and for programs."""
    text = dlrover("hosts", "digits", "--state-dir", state).stdout
    assert "host-worker-1-0  -     2 (PLAT 2; last node.sigkill)" in text
    told = json.loads(dlrover("hosts", "digits", "--state-dir", state, "--json").stdout)
    assert {one["host"]: one["failures_24h"] for one in told["hosts"]}["host-worker-0-0"] == 0
    assert "is no length of time" in dlrover("hosts", "digits", "--for", "soon", "--state-dir", state, expect=2).stderr
    assert "name the job" in dlrover("hosts", "--release", "x", "--state-dir", state, expect=3).stderr


def test_report(state: str) -> None:
    """`report` tells incidents and goodput; the classes sum to wall-clock time."""
    assert "goodput 88.90 % of wall-clock time" in dlrover("report", "digits", "--state-dir", state).stdout
    told = json.loads(dlrover("report", "digits", "--state-dir", state, "--json").stdout)
    assert sum(told["goodput"]["by_class"].values()) == told["goodput"]["wall_us"] == 140_500_000
    assert dlrover("report", "broken", "--state-dir", state).stdout.startswith("FAILED: ")


def test_no_such_job(state: str, tmp_path: Path) -> None:
    """An unknown job, an unknown event and an empty place end with 3 and name what there is."""
    assert "there are: broken, digits" in typed("status", "nope", "--state-dir", state, expect=3).stderr
    assert "its events are 1-" in dlrover("explain", "digits", "9999", "--state-dir", state, expect=3).stderr
    nothing = tmp_path / "nothing"
    assert "there are no jobs in" in dlrover("report", "--state-dir", str(nothing), expect=3).stderr
    assert not nothing.exists()


def test_wrong_usage(state: str) -> None:
    """Wrong usage ends with 2 and says what would be right."""
    assert "commands:" in typed(expect=2).stderr
    assert "is not the number of an event" in dlrover("explain", "digits", "x", "--state-dir", state, expect=2).stderr
    assert "there are: etcd, http, https, memory, sqlite" in dlrover("status", "--log", "what://ever", expect=2).stderr


def test_damaged_log(tmp_path: Path) -> None:
    """A log that cannot be read ends with 4 and a message, not with a traceback."""
    (tmp_path / "log.db").write_bytes(b"this is no database" * 1000)
    assert "log.db" in typed("status", "--state-dir", str(tmp_path), expect=4).stderr


@pytest.mark.parametrize(
    "command", ["status", "events", "explain", "report", "hosts", "scale", "drain", "stop", "suspend", "resume"]
)
def test_help(command: str) -> None:
    """Every command's help has examples and says what its exit codes mean."""
    text = dlrover(command, "--help").stdout
    assert f"  dlrover {command} digits" in text
    assert "exit codes:" in text


def test_closed_pipe(state: str) -> None:
    """A reader that has seen enough (`| head`) ends the command without a word."""
    with _running("events", "digits", "--state-dir", state, "--json", "--follow") as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["seq"] == 1
        running.stdout.close()
        asyncio.run(_go_on(state, 3))
        assert running.wait(PATIENCE_S) == 141
        assert running.stderr is not None
        assert running.stderr.read() == ""


def test_follow_and_interrupt(state: str) -> None:
    """`events --follow` shows what is appended as it comes, and Ctrl-C ends it with 130 and without a traceback."""
    with _running("events", "digits", "--state-dir", state, "--json", "--follow") as running:
        assert running.stdout is not None
        seen = [json.loads(running.stdout.readline())["event"]]
        while seen[-1] != "JobSucceeded":
            seen.append(json.loads(running.stdout.readline())["event"])
        asyncio.run(_go_on(state, 1))
        while seen[-1] != "LeaderStarted":
            seen.append(json.loads(running.stdout.readline())["event"])
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE_S) == 130
        assert running.stderr is not None
        assert running.stderr.read() == ""


@contextmanager
def _running(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
    ) as running:
        try:
            yield running
        finally:
            running.kill()


async def _go_on(state: str, batches: int) -> None:
    """Another leader writes a few batches to `digits`."""
    async with open_log(f"sqlite://{state}/log.db") as log:
        lead = await log.lead("digits", "another")
        for counter in range(1, batches + 1):
            seq = await log.head("digits") + 1
            await _append(lead, counter, [Record(seq, Life.EPOCH_US + 10**9, 1, 0, job.LeaderStarted("another", "0"))])
        await lead.resign()
