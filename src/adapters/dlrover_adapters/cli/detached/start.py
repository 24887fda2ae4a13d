"""``dlrover-run --detach`` and ``--resume``: everything is checked here, at the terminal; then two processes have the job."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import socket
import sys
import time
from pathlib import Path

from dlrover_adapters.cli import lead, scratch
from dlrover_adapters.cli.detached import record
from dlrover_adapters.cli.detached.estate import HOST, Estate
from dlrover_adapters.cli.places import said_when_slow
from dlrover_adapters.cli.settings import Settings
from dlrover_core.errors import CoreError, SpecError

UP_S, LOOK_S = 120.0, 0.05


def resumed(job: str, state_dir: str | None) -> tuple[Settings, record.Record]:
    """What a detached job was started with, for a start anew. Raises `SpecError`."""
    from dlrover_core.logs.place import default_state_dir

    directory = (Path(state_dir).absolute() if state_dir else default_state_dir()) / "jobs" / job
    known = record.read(directory)
    missing = SpecError(
        "resume", f"there is no detached job {job!r} in {directory.parent}; --state-dir names another place"
    )
    if known is None:
        raise missing
    try:
        settings = Settings.read(str(directory / "settings.json"))
    except (OSError, ValueError, TypeError) as error:
        raise missing from error
    status = record.ended(directory, known.mark)
    if status is not None:
        raise SpecError(
            "resume",
            f"job {job!r} has ended with status {status}, and dlrover status {job}{known.where} says how; to run it again, say "
            "its dlrover-run --detach again",
        )
    if not os.path.isdir(known.cwd):
        raise SpecError("resume", f"{known.cwd}, which job {job!r} was started in, is no more")
    os.chdir(known.cwd)
    mark = secrets.token_hex(6)
    fresh = dataclasses.replace(settings, mark=mark, owned=True, masters=(), directory=str(directory))
    return fresh, dataclasses.replace(known, mark=mark)


def run(settings: Settings, known: record.Record, token: str) -> int:
    """Start the job, wait until a master leads it, and say how to come back to it; the exit status."""
    directory = Path(settings.directory)
    with scratch.claim(directory, settings.job.job) as claim:
        settings = asyncio.run(lead.probed(settings))
        left = scratch.leave(settings.mark, claim)
        port = socket.create_server(("127.0.0.1", 0), backlog=1024)
        settings = dataclasses.replace(settings.placed(left.path), masters=(lead.local_address(port),))
        settings.write()
        known.write(directory)
        output = os.open(directory / record.OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        estate = Estate(port.fileno(), settings.in_memory(), claim, left.lock, left.pipe)
        host = estate.start(HOST, settings.job.job, token, settings.mark, 0, output)
        name, where = settings.job.job, known.where
        try:
            status = asyncio.run(_up(settings, token, host.pid))
        except KeyboardInterrupt:
            print(f"dlrover-run: job {name} has begun already; dlrover stop {name}{where} ends it", file=sys.stderr)
            raise
        finally:
            host.returncode = 0  # it is not ours to wait for
    if status is not None:
        print(f"dlrover-run: job {name} has ended already; see {directory / record.OUTPUT}", file=sys.stderr)
        return status
    print(f"dlrover-run: job {name} runs detached; its output goes to {directory / record.OUTPUT}", file=sys.stderr)
    print(
        f"dlrover-run: dlrover attach {name}{where} shows it again, dlrover stop {name}{where} ends it", file=sys.stderr
    )
    return 0


async def _up(settings: Settings, token: str, pid: int) -> int | None:
    """Wait until a master leads; the status of a job that has ended by then. Raises `CoreError`."""
    from dlrover_adapters.http.client import fetch_status

    directory, deadline = Path(settings.directory), time.monotonic() + UP_S
    with said_when_slow(f"job {settings.job.job}", "its masters start"):
        while time.monotonic() < deadline:
            status = record.ended(directory, settings.mark)
            if status is not None:
                return status
            try:
                said = await fetch_status(settings.masters[0], token, timeout_s=1.0)
            except (CoreError, OSError):
                said = {}
            if said.get("role") == "leader":
                return None
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            await asyncio.sleep(LOOK_S)
    raise CoreError(f"job {settings.job.job} has no master; see {directory / record.OUTPUT} and {settings.control_log}")
