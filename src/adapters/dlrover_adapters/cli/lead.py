"""Leading a job from this host: the masters on a socket of ours, from the first look at the log to the last words."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.cli import ending
from dlrover_adapters.cli.line import Line
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.supervisor import MastersFailed, Nodes, Supervisor, watch
from dlrover_adapters.http.token import kept
from dlrover_core.errors import LogUnavailable, SpecError
from dlrover_core.job.state import JobState, fold
from dlrover_core.kernel.log import EventLog
from dlrover_core.logs import open_log
from dlrover_core.runtime.within import within

EX_OK, EX_FAILED, EX_SOFTWARE = 0, 1, 70
PERIOD_S = 0.5
PROBE_S = 10.0


class How(NamedTuple):
    """How a job is led: whether its progress is shown, the options that lead `dlrover` to its log, the command's name."""

    progress: bool = False
    where: str = ""
    command: str = "dlrover-run"


async def supervise(settings: Settings, token: str, port: socket.socket, nodes: Nodes, how: How) -> int:
    """Lead the job that ``settings`` tell masters about, until it is over; the exit status."""
    folder, link = Path(settings.run_dir or settings.directory), Path(settings.directory) / "token"
    with kept(token, folder, link):
        settings.write()
        print(f"{how.command}: job {settings.job.job}", file=sys.stderr)
        line = Line(settings.job.job)
        supervisor = Supervisor(settings, token, port, nodes, how.command)
        listen_to_signals(settings, supervisor)
        # A certificate names what the others dial.
        at, ca = settings.masters[0] if settings.tls_ca else local_address(port), settings.tls_ca
        watching = asyncio.ensure_future(watch(at, token, ca, line.show, PERIOD_S)) if how.progress else None
        try:
            await supervisor.run()
        except MastersFailed as error:
            print(f"{how.command}: {error}", file=sys.stderr)
            return EX_SOFTWARE
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                line.end()
    return await _conclude(settings, supervisor.stopped_by, how)


def local_address(port: socket.socket) -> str:
    """Where this host itself reaches a listening socket of its own; those on all addresses listen at both families'."""
    host, number = port.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)  # noqa: S104  # recognised, not bound
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def listen_to_signals(settings: Settings, stopped: Supervisor) -> None:
    """What Ctrl-C and its like mean."""
    loop = asyncio.get_running_loop()
    for number in to_handle(settings):
        loop.add_signal_handler(number, stopped.stop, number)


def to_handle(settings: Settings) -> list[signal.Signals]:
    """The signals that stop a job. Under nohup a hangup is no reason to stop."""
    asked = dict.fromkeys((signal.SIGINT, signal.SIGTERM, *map(signal.Signals, settings.signals)))
    return [one for one in asked if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


async def probed(settings: Settings) -> Settings:
    """Lead the job for a moment: what keeps masters from leading it is told before anything is started. Raises `SpecError`.

    Returned are the settings, with the run to continue where a joining job of this very spec is alive in the log: its nodes
    are elsewhere, and have not ended with the launcher that led them.
    """
    if settings.log.startswith("memory:"):
        raise SpecError(
            "log", "a log in memory ends with its process, and masters are processes of their own; say sqlite"
        )
    name = settings.job.job
    try:
        async with open_log(settings.log) as event_log:
            try:
                lead = await within(PROBE_S, event_log.lead(name, "dlrover-run", PROBE_S))
            except asyncio.TimeoutError as error:
                raise SpecError(
                    "job-id",
                    f"a job {name!r} in {settings.log} is led by {await event_log.leader(name)}; "
                    "give this one another --job-id or --log",
                ) from error
            await lead.resign()
            return await _continued(settings, event_log) if settings.joining else settings
    except LogUnavailable as error:
        raise SpecError("log", f"{error} ({settings.log}); name another place with --log or --state-dir") from error


async def _continued(settings: Settings, event_log: EventLog) -> Settings:
    job = (await _state(settings, event_log)).job
    if not job.live or job.spec_json != settings.spec:
        return settings
    print(f"job {job.name} is alive in the log: its run goes on", file=sys.stderr)
    return replace(settings, run=job.run)


async def _state(settings: Settings, event_log: EventLog) -> JobState:
    return fold([record async for record in event_log.read(settings.job.job)])


async def _conclude(settings: Settings, stopped_by: signal.Signals | None, how: How) -> int:
    """Say how it ended, the root cause of a failure first."""
    async with open_log(settings.log) as event_log:
        records = [record async for record in event_log.read(settings.job.job)]
    state = fold(records)
    for words in ending.words(records, state, how.where, ending.kept_by(settings)):
        print(words, file=sys.stderr)
    if stopped_by is not None and state.job.state not in ("succeeded", "failed"):
        return 128 + stopped_by
    return EX_OK if state.job.state == "succeeded" else EX_FAILED
