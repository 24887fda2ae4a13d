"""What the commands say where the system starts no more processes or threads: a line and what to look at, no traceback."""

from __future__ import annotations

import argparse
import errno

import pytest

from dlrover_adapters.cli import main, run, usage
from dlrover_core.errors import LogUnavailable

NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
NO_THREAD = RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NO_PROCESS, "no process can be started: a limit of processes is reached; see ulimit -u"),
        (NO_THREAD, "no thread can be started: a limit of processes is reached; see ulimit -u"),
    ],
)
def test_a_limit_of_processes_is_told_in_a_line(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by `dlrover` and by `dlrover-run`."""

    def _execute_child(_: object) -> int:  # as in subprocess
        raise error

    assert main.guarded(argparse.Namespace(command="master", run=_execute_child)) == usage.EX_LATER
    assert capsys.readouterr().err.startswith(f"dlrover master: {said}")
    monkeypatch.setattr(run, "_run", _execute_child)
    assert run.main(["train.py"]) == usage.EX_LATER
    assert f"dlrover-run: {said}" in capsys.readouterr().err


def test_other_errors_stay_what_they_are() -> None:
    """They are mistakes of ours: a traceback is what helps."""

    def fail(_: object) -> int:
        raise RuntimeError("a loop that is closed")

    def write() -> None:
        raise BlockingIOError(errno.EAGAIN, "write could not complete without blocking")

    assert not usage.limit(BlockingIOError(errno.EINPROGRESS, "in progress"))
    with pytest.raises(BlockingIOError) as caught:
        write()  # to a terminal that somebody has made non-blocking
    assert not usage.limit(caught.value)
    with pytest.raises(RuntimeError, match="a loop"):
        main.guarded(argparse.Namespace(command="master", run=fail))


def test_a_master_whose_log_does_not_answer_may_be_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    """75 tells a service manager so; a command that only reads says that it could not."""

    def silent(_: object) -> int:
        raise LogUnavailable("etcd does not answer")

    named = {"run": silent, "log": "etcd://127.0.0.1:1/t", "state_dir": None}
    assert main.guarded(argparse.Namespace(command="master", **named)) == usage.EX_LATER
    assert capsys.readouterr().err == "dlrover master: etcd does not answer\n"
    assert main.guarded(argparse.Namespace(command="status", **named)) == main.UNREADABLE
