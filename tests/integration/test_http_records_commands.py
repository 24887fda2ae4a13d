"""Commands that read a log through its master say what they say of the log itself."""

from __future__ import annotations

import asyncio
import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import structlog
from leading_records import TOKEN, leading, run
from leading_records import served as served  # noqa: PLC0414 - the fixture is taken over
from leading_records import token as token  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.cli.main import main
from dlrover_adapters.http.log import HttpLog
from dlrover_core.errors import LogUnavailable, SpecError
from dlrover_core.logs import open_log


def dlrover(*words: str) -> tuple[int, str, str]:
    """One command to its end, in this process."""
    out, err, logging = io.StringIO(), io.StringIO(), structlog.get_config()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ, {"COLUMNS": "120"}):
        try:
            code = main(words)
        except SystemExit as end:  # argparse's
            code = end.code if isinstance(end.code, int) else 1
    structlog.configure(**logging)
    assert "Traceback" not in err.getvalue()
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        ("status", "JOB"),
        ("status", "JOB", "--json"),
        ("events", "JOB", "--since", "9"),
        ("explain", "JOB"),
        ("explain", "JOB", "12"),
        ("report", "JOB", "--json"),
        ("replay", "JOB"),
        ("hosts", "JOB"),
    ],
)
def test_commands_say_the_same_through_a_master(
    served: tuple[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """What reads a log reads it through a master: with the URL as the job, and with the URL as the log."""
    url, at = served
    there = dlrover(*(one.replace("JOB", "digits") for one in words), "--log", url)
    assert there[0] == 0, there
    where = f"http://{at}/digits"
    assert dlrover(*(one.replace("JOB", where) for one in words), "--state-dir", str(tmp_path)) == there
    assert dlrover(*(one.replace("JOB", "digits") for one in words), "--log", where) == there


def test_commands_say_what_is_wrong(served: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such job, nobody there, a wrong token, a URL of nothing, the exit code, one line, no token."""
    _, at = served
    code, _, err = dlrover("events", f"http://{at}/nope")
    assert (code, "no job 'nope' in http://" in err, "there are: digits" in err) == (3, True, True)
    assert dlrover("report", "--log", f"http://{at}")[0] == 0
    code, _, err = dlrover("events", "http://127.0.0.1:1/digits", "--follow")
    assert (code, "the master at 127.0.0.1:1 cannot be asked: Connection refused" in err) == (4, True)
    code, _, err = dlrover("status", "http://127.0.0.1:1/digits", "--state-dir", str(tmp_path))
    assert (code, "Connection refused" in err) == (4, True)
    code, _, err = dlrover("events", f"http://{at}")
    assert (code, "names no job; say http://HOST:29400/JOB" in err) == (2, True)
    wrong = tmp_path / "token"
    wrong.write_text("of-another-job")
    monkeypatch.delenv("DLROVER_TOKEN")
    code, _, err = dlrover("explain", f"http://{at}/digits", "--token-file", str(wrong))
    assert (code, "the job token is not this job's" in err, "of-another-job" in err) == (6, True, False)
    wrong.write_text(TOKEN)
    assert dlrover("explain", f"http://{at}/digits", "--token-file", str(wrong))[0] == 0


def test_what_asks_the_leader_finds_it_through_a_master(tmp_path: Path) -> None:
    """`dlrover suspend http://...` and `--wait` need no access to the log either."""

    async def story() -> None:
        async with leading() as one:
            words = ("--state-dir", str(tmp_path), "--wait", "--timeout", "20")
            url = f"http://{one.at}/j"
            code, out, err = await asyncio.to_thread(dlrover, "suspend", url, "--keep-nodes", *words)
            assert (code, "job j: suspended" in out) == (0, True), err
            code, out, err = await asyncio.to_thread(dlrover, "resume", "j", "--log", url, *words[:2], "--no-wait")
            assert (code, "resume is done" in out) == (0, True), err
            assert one.master.state.job.state != "suspended"

    run(story)


def test_nobody_leads_there() -> None:
    """Whoever opens such a log by hand gets the class that reads it, and an error for anything else."""

    async def story() -> None:
        async with open_log("http://127.0.0.1:1/j") as log:
            assert isinstance(log, HttpLog)
            with pytest.raises(SpecError, match="for reading"):
                await log.lead("j", "me", wait=False)
            with pytest.raises(LogUnavailable, match="Connection refused"):
                await log.head("j")

    run(story)
