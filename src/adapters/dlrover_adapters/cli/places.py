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
from dlrover_core.words import first_few

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
        help="the log: sqlite:///path/log.db, etcd://HOST:2379,HOST:2379/PREFIX, or what an installed log understands; "
        "http://HOST:29400/JOB reads it through the job's masters (default: the one that JOB was launched with on this "
        "host, else log.db in the state directory)",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        type=Path,
        help="the state directory that dlrover-run was given (default: $XDG_STATE_HOME/dlrover, else ~/.local/state/dlrover)",
    )


def through_masters(args: argparse.Namespace) -> None:
    """Let ``http://HOST:29400/JOB`` stand where a job's name or a log's URL is asked for. Raises `SpecError`.

    Afterwards ``log`` is the URL with the token and the CA that the options name, and ``job`` the name alone. Of a job that was
    launched on this host the launcher's own token is taken where none is named.
    """
    job, log = getattr(args, "job", None), getattr(args, "log", None)
    if not (job or log) or not hasattr(args, "log"):
        return
    if job and not log:
        args.log = log = kept_log(args.state_dir, job) or None
    from dlrover_adapters.http import log_address
    from dlrover_adapters.http.token import VARIABLE

    if job and log_address.is_url(job):
        if log and log != job:
            raise SpecError("log", f"{job} names the log already; leave --log out")
        args.log, job = job, None
        if not log_address.job_of(args.log):
            raise SpecError("job", f"{args.log} names no job; say http://HOST:29400/JOB")
    if not args.log or not log_address.is_url(args.log):
        return
    args.job = job or log_address.job_of(args.log) or None
    kept = kept_token(args.state_dir, args.job) if args.job and not os.environ.get(VARIABLE) else ""
    options = log_address.options_of(args.log)
    args.token_file = getattr(args, "token_file", None) or options.get("token_file") or kept or None
    args.tls_ca = getattr(args, "tls_ca", None) or options.get("cacert")
    secure = args.log.lower().startswith("https:")
    args.log = log_address.with_options(
        args.log, token_file=args.token_file or "", cacert=(args.tls_ca or "") if secure else ""
    )


def called(args: argparse.Namespace, job: str = "") -> str:
    """What a person calls the job that a command names: ``k8s:ml/train``, where its masters were reached so, else its name."""
    return str(getattr(args, "place", "") or job or args.job)


def kept_token(state_dir: Path | None, job: str) -> str:
    """The file of the token of a job that was launched on this host; empty where there is none."""
    from dlrover_core.logs.place import default_state_dir

    path = Path(state_dir or default_state_dir()).absolute() / "jobs" / job / "token"
    return str(path) if path.exists() else ""


def kept_log(state_dir: Path | None, job: str) -> str:
    """The URL of the log that a job was launched with on this host; empty: it is the state directory's own, or not known.

    The job's settings say it: whoever asks about a job on the host that launched it need not name its log again.
    """
    import json

    from dlrover_core.logs.place import default_state_dir

    path = Path(state_dir or default_state_dir()).absolute() / "jobs" / job / "settings.json"
    try:
        log = json.loads(path.read_text(encoding="utf-8"))["log"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return log if isinstance(log, str) and log != log_url(None, state_dir) else ""


def token_arguments(parser: argparse.ArgumentParser) -> None:
    """What masters are shown, and how they are checked."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the job's token (default: $DLROVER_TOKEN, else what the launcher keeps for a job on this host)",
    )
    parser.add_argument("--tls-ca", metavar="FILE", help="the CA of the masters' certificate")


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
    if url.startswith(("http:", "https:")):
        return url.partition("?")[0]
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
        raise NotFound(f"no job {name!r} in {url}; there are: {first_few(jobs, JOBS_SHOWN_MAX)}")
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
