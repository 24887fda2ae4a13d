"""Leading a job from this host: the masters on a socket of ours, from the first look at the log to the last words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Union

from dlrover_adapters.cli import ending, settle, upkeep
from dlrover_adapters.cli.ahead_master import AheadMaster
from dlrover_adapters.cli.places import said_when_slow, shown
from dlrover_adapters.cli.settings import EX_AGAIN, EX_FATAL, Settings
from dlrover_adapters.cli.settle import LOOK_AGAIN_S
from dlrover_adapters.cli.standing import Standing, Unplaced
from dlrover_adapters.cli.supervisor import MastersFailed, Nodes, Supervisor, watch
from dlrover_adapters.http.token import kept
from dlrover_core.diagnosis.ladder import NO_PROGRESS
from dlrover_core.errors import CoreError, LogError, LogFull, LogUnavailable, NotLeading, SpecError, TokenRefused
from dlrover_core.job.state import fold
from dlrover_core.kernel.log import EventLog, LeaderInfo, Leadership
from dlrover_core.logs import open_log
from dlrover_core.runtime.within import within

EX_OK, EX_FAILED, EX_SOFTWARE, EX_NO_PROGRESS = 0, 1, 70, 93
PERIOD_S = 0.5
PROBE_S = 10.0
SUCCESSOR_S = 3.0
ANSWER_S = 2.0


class How(NamedTuple):
    """How a job is led: whether its progress is shown, the options that lead `dlrover` to its log, the command's name.

    One that ``leaves`` hands the job over at SIGTERM, and where its log is shared at any signal: its nodes are all elsewhere.
    ``pod``: whoever keeps us is told by our status that a log cannot be led. ``apart``: where another scheduler has no
    place for nodes, people are told. ``place``: what `dlrover` calls the job on other hosts, where our log is in a pod or an
    actor; empty: its name and ``where``. ``first``: a process that was started ahead to be the first master.
    """

    progress: bool = False
    where: str = ""
    command: str = "dlrover-run"
    leaves: bool = False
    pod: bool = False
    apart: bool = False
    place: str = ""
    first: Union[AheadMaster, None] = None


async def supervise(settings: Settings, token: str, port: socket.socket, nodes: Nodes, how: How) -> int:
    """Lead the job that ``settings`` tell masters about, until it is over; the exit status."""
    folder, link = Path(settings.run_dir or settings.directory), Path(settings.directory) / "token"
    with kept(token, folder, link):
        settings.write()
        print(f"{how.command}: job {settings.job.job}", file=sys.stderr)
        supervisor = Supervisor(
            settings, token, port, nodes, how.command, leaves=_leaves(settings, how), first=how.first
        )
        listen_to_signals(settings, supervisor)
        try:
            async with (
                upkeep.kept(settings, token, how.command, nodes.restore),
                _shown(settings, token, port, how),
            ):
                await supervisor.run()
        except MastersFailed as error:
            print(f"{how.command}: {error}", file=sys.stderr)
            return EX_FATAL if error.fatal and how.pod else EX_SOFTWARE
    if supervisor.unrecorded:
        name = settings.job.job
        owed = "its last state is not a checkpoint on storage" if supervisor.unstored else ""
        wrong = supervisor.failed or owed
        how_it_ended = f"failed: {wrong}" if wrong else "succeeded"
        print(
            f"{how.command}: job {name} {how_it_ended}; its log does not say so, and shows it as running until {name} is run "
            "again",
            file=sys.stderr,
        )
        return EX_FAILED if wrong else EX_OK
    if supervisor.left:
        return await _left(settings, how)
    return await _conclude(settings, supervisor.stopped_by, how)


def _leaves(settings: Settings, how: How) -> Collection[signal.Signals]:
    """The signals at which the job is handed over, and not stopped.

    On one host a person's Ctrl-C means the job; SIGTERM, as a scheduler or a service manager says it, means this process.
    """
    if not how.leaves:
        return ()
    return to_handle(settings) if settings.shared else (signal.SIGTERM,)


@contextlib.asynccontextmanager
async def _shown(settings: Settings, token: str, port: socket.socket, how: How) -> AsyncIterator[None]:
    """Meanwhile tell people what our master says: as a live line, and, with masters on other hosts, whatever changes."""
    if not (how.progress or settings.shared or how.apart):
        yield
        return
    from dlrover_adapters.cli.line import Line
    from dlrover_adapters.http.tls import pinned

    line, standing = Line(settings.job.job), Standing(settings.job.job, settings.masters[0])
    unplaced = Unplaced(settings.job.last_call_s)

    def show(status: Mapping[str, Any], now: float) -> None:
        news = [*standing.news(status, time.time_ns() // 1000)] if settings.shared else []
        news += unplaced.news(status, now) if how.apart else ()
        for words in news:
            line.end()
            print(f"{how.command}: {words}", file=sys.stderr)
        if how.progress:
            line.show(status, now)

    watching = asyncio.ensure_future(watch(local_address(port), token, pinned(settings.tls_cert), show, PERIOD_S))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        line.end()


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
    """Lead the job for a moment: what keeps masters from leading it is told before anything is started.

    Raises `SpecError`, and `LogUnavailable` where the servers of a log do not answer now.

    Returned are the settings, with the run to continue where one is alive in the log that is this job's: its owner's, or a
    joining job's of this very spec. In a shared log, that run has begun by then, whoever's it is (`settle`).
    """
    if settings.log.startswith("memory:"):
        raise SpecError(
            "log", "a log in memory ends with its process, and masters are processes of their own; say sqlite"
        )
    try:
        async with contextlib.AsyncExitStack() as stack:
            with said_when_slow(f"job {settings.job.job}", f"no answer yet from {shown(settings.log)}"):
                event_log = await stack.enter_async_context(open_log(settings.log))
            settings = replace(settings, shared=event_log.shared)
            if settings.shared and settings.nodes_elsewhere:
                return await settle.settled(settings, event_log)
            with said_when_slow(f"job {settings.job.job}", "somebody may still lead this job"):
                lead = await _led(settings, event_log)
            if settings.shared or settings.nodes_elsewhere or settings.owned:
                return await settle.taken_up(settings, event_log, lead) or _refuse(settings, "another launcher")
            await lead.resign()
            return settings
    except LogUnavailable as error:
        if not settings.log.startswith(
            "sqlite:"
        ):  # its servers, or the network to them: the same line may succeed later
            raise LogUnavailable(f"log: {error} ({shown(settings.log)})") from error
        raise _elsewhere(settings, error) from error
    except LogFull as error:
        raise _elsewhere(settings, error) from error


def _elsewhere(settings: Settings, error: LogError) -> SpecError:
    return SpecError("log", f"{error} ({shown(settings.log)}); name another place with --log or --state-dir")


async def check_token(settings: Settings, token: str, encryption: ssl.SSLContext | None) -> None:
    """Raises `SpecError` where the leader that `probed` has found has another token: once we led, agents would be refused."""
    if not settings.masters:
        return  # nobody leads: the client is not even loaded, which takes longer than all else here
    from dlrover_adapters.http.client import fetch_status

    for address in settings.masters:
        try:
            await fetch_status(address, token, timeout_s=ANSWER_S, tls=encryption)
        except TokenRefused as error:
            raise SpecError(
                "DLROVER_TOKEN",
                f"not that of the master at {address}, which leads job {settings.job.job!r}: all masters of a job, and its "
                "agents, need the same",
            ) from error
        except (CoreError, OSError):  # it may be going just now
            continue


async def _led(settings: Settings, event_log: EventLog) -> Leadership:
    """The leadership of a job that nobody leads. Raises `SpecError` where somebody does."""
    name = settings.job.job
    with contextlib.suppress(NotLeading):  # a full log says so at once where nobody waits for it
        return await event_log.lead(name, settings.holder(os.getpid()), PROBE_S, wait=False)
    try:
        return await within(PROBE_S, event_log.lead(name, settings.holder(os.getpid()), PROBE_S))
    except asyncio.TimeoutError:
        leader = await event_log.leader(name)
        if leader is None:  # it is not led: asked without patience, the log says what keeps us from leading it
            return await within(PROBE_S, event_log.lead(name, settings.holder(os.getpid()), wait=False))
        return _refuse(settings, f"{leader.holder}{f' at {leader.address}' if leader.address else ''}")


def _refuse(settings: Settings, leader: str) -> NoReturn:
    raise SpecError(
        "job-id",
        f"a job {settings.job.job!r} in {shown(settings.log)} is led by {leader}; give this one another --job-id or --log",
    )


async def _left(settings: Settings, how: How) -> int:
    """Say how the job fares now that we have handed it over. The status tells whoever keeps us to start another one."""
    name, say = settings.job.job, f"{how.command}: job {settings.job.job}"
    try:
        async with open_log(settings.log) as event_log:
            leader = await _successor(settings, event_log)
    except CoreError as error:
        print(f"{say} goes on; who leads it now is not known: {error}", file=sys.stderr)
        return EX_AGAIN
    if leader is not None:
        print(f"{say} goes on, led by {leader.address or leader.holder}", file=sys.stderr)
        return EX_AGAIN
    print(
        f"{say} trains on, but nobody stands by to lead it: start another dlrover master, and end the job, if that was meant, "
        f"with: dlrover stop {how.place or name + how.where}",
        file=sys.stderr,
    )
    return EX_AGAIN


async def _successor(settings: Settings, event_log: EventLog) -> LeaderInfo | None:
    """Who leads, once it is none of our masters and can be reached; None: nobody within a moment."""
    deadline = time.monotonic() + (SUCCESSOR_S if settings.shared else 0.0)
    while True:
        leader = await event_log.leader(settings.job.job)
        if leader is not None and leader.address and not settings.is_ours(leader.holder):
            return leader
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(LOOK_AGAIN_S)


async def _conclude(settings: Settings, stopped_by: signal.Signals | None, how: How) -> int:
    """Say how it ended, the root cause of a failure first."""
    interrupted = 128 + stopped_by if stopped_by is not None else None
    try:
        async with open_log(settings.log) as event_log:
            records = [record async for record in event_log.read(settings.job.job)]
    except LogUnavailable as error:
        print(f"{how.command}: job {settings.job.job}: how it ended is not known: {error}", file=sys.stderr)
        return interrupted or EX_SOFTWARE
    state = fold(records)
    for words in ending.words(records, state, how.where, ending.kept_by(settings), how.place):
        print(words, file=sys.stderr)
    if interrupted and state.job.state not in ("succeeded", "failed"):
        return interrupted
    if state.job.reason.startswith(NO_PROGRESS):
        return EX_NO_PROGRESS
    return EX_OK if state.job.state == "succeeded" else EX_FAILED
