"""Where a command finds its log and its job, and with what code it ends."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from dlrover_core.errors import CoreError, SpecError

if TYPE_CHECKING:
    from dlrover_core.kernel.events import Record
    from dlrover_core.kernel.log import EventLog

OK, FAILED, USAGE, NOT_FOUND, UNREADABLE, REFUSED, NO_MASTER, LATE, INTERRUPTED, PIPE_CLOSED = (
    0, 1, 2, 3, 4, 5, 6, 7, 130, 141,
)  # fmt: skip

JOBS_SHOWN_MAX = 20
QUIET_S = 2.0
"""How long a command may say nothing: then it says what it waits for."""
_PASSWORD = re.compile(r"^([a-z][\w+.-]*://[^/@:]*):[^/]*@")


class NotFound(CoreError):
    """There is no such job or event; the message names those there are."""


def log_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the log is."""
    parser.add_argument(
        "--log",
        metavar="URL",
        help="the log: sqlite:///path/log.db, etcd://HOST:2379,HOST:2379/PREFIX, or what an installed log understands "
        "(default: log.db in the state directory)",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        type=Path,
        help="the state directory that dlrover-run was given (default: $XDG_STATE_HOME/dlrover, else ~/.local/state/dlrover)",
    )


def log_url(log: str | None, state_dir: Path | None) -> str:
    """The URL of the log that the options name."""
    if log:
        return log
    if state_dir is None:
        from dlrover_core.logs.place import default_state_dir

        state_dir = default_state_dir()
    return "sqlite://" + quote(os.fsencode(state_dir.absolute() / "log.db"))


def show_any_text() -> None:
    """Let any text be printed to stdout: what its encoding does not have is escaped, as it is on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def shown(url: str) -> str:
    """A log's URL for people: without a password, which whoever runs the line that it stands in has in the environment."""
    return _PASSWORD.sub(r"\1@", url)


@contextlib.contextmanager
def said_when_slow(command: str, what: str, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Say once, in the name of ``command``, what it waits for, if this takes longer than ``quiet_s``."""
    import asyncio  # a launcher's start is in a hurry

    words = f"{command}: waiting: {what}"
    timer = asyncio.get_running_loop().call_later(quiet_s, lambda: print(words, file=sys.stderr, flush=True))
    try:
        yield
    finally:
        timer.cancel()


async def find_job(log: EventLog, url: str, name: str | None) -> str:
    """The job of that name; without one the job whose log has the newest event. Raises `NotFound`."""
    jobs, url = await log.jobs(), shown(url)
    if name is not None and name in jobs:
        return name
    if not jobs:
        raise NotFound(
            f"there are no jobs in {url}; start one with dlrover-run, or say where the log is with --log or --state-dir"
        )
    if name is not None:
        more = f" and {len(jobs) - JOBS_SHOWN_MAX} more" if len(jobs) > JOBS_SHOWN_MAX else ""
        raise NotFound(f"no job {name!r} in {url}; there are: {', '.join(jobs[:JOBS_SHOWN_MAX])}{more}")
    return await _newest(log, jobs) if len(jobs) > 1 else jobs[0]


async def _newest(log: EventLog, jobs: list[str]) -> str:
    ages: list[tuple[int, str]] = []
    for job in jobs:
        last = await last_record(log, job)
        ages.append((last.at if last is not None else 0, job))
    return max(ages)[1]


async def last_record(log: EventLog, job: str) -> Record | None:
    """The newest record of a job's log."""
    last = None
    async for record in log.read(job, await log.head(job) - 1):
        last = record
    return last


def directories(stated: str | None, job: str) -> tuple[Path, Path]:
    """The state directory and the job's own in it, made if need be. Raises `SpecError`."""
    from dlrover_core.logs.place import default_state_dir, private_dir, refuse_remote

    try:
        if stated:
            refuse_remote(Path(stated).absolute())
        state = private_dir(Path(stated).absolute()) if stated else default_state_dir()
        return state, private_dir(private_dir(state / "jobs") / job)
    except OSError as error:
        raise SpecError(
            "state-dir", f"cannot be made or written to: {error}; name a directory of yours with --state-dir"
        ) from error
