"""The last words of `dlrover-run`, from histories told to a real engine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest
from tests.unit.life import Life

from dlrover_adapters.cli import read
from dlrover_adapters.cli.ending import OTHERS_MAX, TAIL_LINES_MAX, OutputFolder, words
from dlrover_core.job import job
from dlrover_core.job.incidents import ReportExit
from dlrover_core.kernel.events import Record
from dlrover_core.spec import GroupSpec, JobSpec

NASTY = "\x1b[2Jlast\x07 words\n"
TRACE = "Traceback (most recent call last):\n  File 'train.py'\nValueError: bad sample"


def life(restarts: int = 0, nproc: int = 2) -> Life:
    """Two nodes that train."""
    spec = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=nproc),), max_restarts=restarts)
    return Life(spec).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")


def said(told: Life, kept: OutputFolder | None = None) -> list[str]:
    """What is printed."""
    return list(words(told.records, told.state, " --state-dir s", kept))


def test_the_root_cause_comes_first() -> None:
    """Then who it was, with its host, time, exit code, step and files; its last lines; what to do next; the outcome last."""
    told = life().die(10, "worker-1-0", 3, 1, step=8, error=TRACE, tail=f"reading\n{TRACE}\n").tick(500)
    lines = said(told, OutputFolder("/logs", "digits"))
    assert lines[0] == "dlrover-run: root cause: rank 3 on worker-1-0: ValueError: bad sample (exception.ValueError)"
    rows = dict((one.strip() for one in line.split(":", 1)) for line in lines[1:9])
    assert rows["time"].startswith("20")
    assert rows["host"] == "host-worker-1-0"
    assert rows["rank"] == "3 (local rank 1, node worker-1-0)"
    assert rows["exitcode"] == "1"
    assert rows["error"] == "ValueError: bad sample"
    assert rows["step"] == "8"
    assert rows["attempt"] == "0 (generation 1)"
    assert rows["logs"] == "/logs/digits_run1_worker-1-0/attempt_0/1"
    assert lines[9] == "dlrover-run: the last lines of rank 3 on worker-1-0 (generation 1):"
    assert lines[10:14] == ["  | reading", *(f"  | {line}" for line in TRACE.splitlines())]
    assert lines[-2] == "dlrover-run: next: dlrover explain digits --state-dir s"
    assert lines[-1].startswith("dlrover-run: job digits failed (")
    assert lines[-1].endswith("; 1 incident, see: dlrover report digits --state-dir s")


def test_a_job_in_pods_is_called_what_other_hosts_call_it() -> None:
    """What is to be typed next names the job's address, and no path inside of the masters' pod."""
    told = life().die(10, "worker-1-0", 3, 1).tick(500)
    lines = list(words(told.records, told.state, " --state-dir /var/lib/dlrover", None, "k8s:ml/digits"))
    assert lines[-2] == "dlrover-run: next: dlrover explain k8s:ml/digits"
    assert lines[-1].endswith("see: dlrover report k8s:ml/digits")
    assert not any("/var/lib" in line for line in lines)


def test_a_signal_is_named_and_missing_logs_are_explained() -> None:
    """A killed rank tells nothing: its signal does; and how output can be kept is said where it was not."""
    lines = said(life().die(10, "worker-0-0", 1, -11).tick(500))
    assert "  exitcode : -11 (killed by SIGSEGV)" in lines
    assert any(line.startswith("  logs     : not kept; -r 3 --log-dir DIR") for line in lines)
    assert not any("last lines" in line for line in lines)


def test_others_are_told_after_it() -> None:
    """Who died of it is listed below, in the order of ranks, each with its last line, up to a bound."""
    told = life(nproc=8).die(10, "worker-1-0", 12, 1, error=TRACE)
    for rank in range(12):
        node = f"worker-{rank // 8}-0"
        told.do(10.1, ReportExit(node, 1, rank, 1, error="RuntimeError: Connection closed by peer"))
    lines = said(told.tick(500))
    assert lines[0].startswith("dlrover-run: root cause: rank 12 on worker-1-0: ValueError")
    began = lines.index("dlrover-run: other failures of the same attempt:")
    assert lines[began + 1] == "  rank 0 on worker-0-0: exit code 1: RuntimeError: Connection closed by peer"
    assert lines[began + 1 + OTHERS_MAX] == f"  and {12 - OTHERS_MAX} more ranks"


def test_what_was_tried_is_told() -> None:
    """Earlier incidents with what they were taken for; only those of this run."""
    told = life(restarts=2)
    for generation in range(2):
        told.die(10 + generation, "worker-0-0", 0, -9)
    lines = said(told.die(20, "worker-0-0", 0, 1, error=TRACE).tick(500))
    assert "dlrover-run: tried: restart of the processes 2 times" in lines
    assert "  incident 1, generation 1: rank 0 on worker-0-0: exit.sigkill" in lines
    assert "  attempt  : 2 (generation 3)" in lines


def test_an_earlier_run_is_not_this_ones_doing() -> None:
    """A name may be used again: generations go on counting, attempts begin at 0, and old failures are not told."""
    told = life().die(10, "worker-0-0", 0, 1, error="OldError: x").tick(500)
    spec = told.state.job.spec
    told.do(600, job.CreateJob("run2", spec.to_json()))
    told.join(601, *sorted(told.state.nodes.nodes)[-2:]).step(602, 1, sorted(told.state.nodes.nodes)[-2])
    name = told.state.world.worlds["worker"].members[0].node
    lines = said(told.die(610, name, 0, 1, error=TRACE).tick(1200), OutputFolder("/logs", "digits"))
    assert not any("OldError" in line for line in lines)
    assert any(line.startswith("  attempt  : 0 (generation 2)") for line in lines)
    assert any("digits_run2_" in line for line in lines)


def test_output_cannot_steer_the_terminal() -> None:
    """Escape sequences in what a worker said are left out, and of many lines the last are shown."""
    tail = "".join(f"line {number}\n" for number in range(100)) + NASTY
    lines = said(life().die(10, "worker-0-0", 0, 1, tail=tail).tick(500))
    assert not any("\x1b" in line or "\x07" in line for line in lines)
    shown = [line for line in lines if line.startswith("  | ")]
    assert len(shown) == TAIL_LINES_MAX + 1
    assert (shown[0], shown[-1]) == ("  | ...", "  | last? words")


def test_success_and_stops_are_one_line() -> None:
    """Nothing to explain."""
    done = life().start(2, "worker-0-0", "worker-1-0").finish(9, "worker-0-0", "worker-1-0")
    assert said(done) == ["dlrover-run: job digits succeeded"]
    stopped = said(life().do(9, job.StopJob("dlrover-run got SIGTERM")))
    assert len(stopped) == 1
    assert "(dlrover-run got SIGTERM)" in stopped[0]


def test_a_reader_that_goes_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dlrover events JOB | head`: what reads the log is closed before the loop ends, which would print its tracebacks."""
    closed = list[bool]()

    class Log:
        """Two records, and whether their reader was closed."""

        async def read(self, _job: str) -> AsyncGenerator[Record, None]:
            """All of them."""
            try:
                for record in life().records[:2]:
                    yield record
            finally:
                closed.append(True)

    @contextlib.asynccontextmanager
    async def opened(_args: object) -> AsyncGenerator[SimpleNamespace, None]:
        yield SimpleNamespace(log=Log(), job="digits")

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(read, "opened", opened)
    monkeypatch.setattr("builtins.print", gone)

    async def story() -> None:
        with pytest.raises(BrokenPipeError):
            await read.events(argparse.Namespace(follow=False, json=False, since=0))
        assert closed == [True]

    asyncio.run(story())
