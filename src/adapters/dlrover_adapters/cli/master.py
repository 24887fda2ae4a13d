"""A master's process: ``python -m dlrover_adapters.cli.master --config FILE --fd N``.

It leads or stands by; the launcher of the job owns the listening socket, hands it to every master, asks each one now and again
whether it hangs (`asking`), and keeps one in reserve, here or, where the log is shared, on another host. SIGTERM means: hand
over to that one; where the launcher has written down that the job is to stop, as at Ctrl-C: stop it. Exit 0: the job is over.
Exit 75: another master leads, or this one lost the log: start it again. Exit 78: this log cannot be led by anybody like us
(corrupt, too new, at another run): starting again is pointless.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.telemetry import light  # noqa: F401  # first of all

# isort: split

import structlog

from dlrover_adapters.cli import ahead_master, asking, backends, platform_away, policies, told
from dlrover_adapters.cli.collector import settle
from dlrover_adapters.cli.settings import (
    EX_AGAIN,
    EX_FATAL,
    EX_OVER,
    EX_UNRECORDED,
    EX_UNRESTARTED,
    EX_UNSTORED,
    Settings,
)
from dlrover_adapters.http import tls
from dlrover_adapters.http.client import send_command
from dlrover_adapters.http.server import HttpListener
from dlrover_adapters.telemetry.logs import Uncaught, run_threaded, set_up
from dlrover_core.errors import (
    CoreError,
    LogCorrupt,
    LogFull,
    LogUnavailable,
    OtherRun,
    Refused,
    SchemaTooNew,
    SpecError,
)
from dlrover_core.host import threads
from dlrover_core.job.job import StopJob
from dlrover_core.kernel.log import EventLog
from dlrover_core.logs import open_log
from dlrover_core.rules.model import model
from dlrover_core.runtime.master import Master
from dlrover_core.words import plain

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
ASK_AGAIN_S = 0.5
TAKEN_OVER_S = 0.5
STOP_BYTES_MAX = 1000
LATER_S = 2.0
LOOK_S, UNRECORDED_S = 1.0, 30.0
"""How often it is looked whether decisions wait; how long a job whose work is done waits for its log."""

log = structlog.get_logger("dlrover.master")


class Ends(NamedTuple):
    """Descriptors that the launcher has passed on."""

    port: int
    """The listening socket."""
    asked: int
    """Where the launcher asks whether this process hangs."""
    stop: int
    """The file that says why the job is to stop; empty while it is not."""


def main() -> int:
    """Serve one job until it is over."""
    words = sys.argv[1:]
    if ahead_master.AHEAD in words:
        ahead = _ahead_parser().parse_args(words)
        _die_with(ahead.parent)
        words = ahead_master.told(ahead.ahead, ahead.load)
        if not words:
            return EX_AGAIN
    options = _parser().parse_args(words)
    _die_with(options.parent)
    settings = Settings.read(options.config)
    holder = settings.holder(os.getpid(), options.number)
    set_up(Path(settings.control_log), settings.log_level, role="master", holder=holder)
    # Ctrl-C reaches the whole foreground group; only the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle()
    ends = Ends(options.fd, options.asked, options.stop)
    return run_threaded(lambda: asyncio.run(_run(settings, ends, holder, options.dead, quiet=options.quiet)), EX_AGAIN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dlrover-master")
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--asked", type=int, required=True)
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--dead", action="append", default=[])
    parser.add_argument("--quiet", action="store_true", help="while it stands by, another master answers at this port")
    return parser


def _ahead_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dlrover-master")
    parser.add_argument(ahead_master.AHEAD, type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--job", required=True, help="for who looks at processes")
    parser.add_argument("--load", action="append", default=[])
    return parser


def _die_with(parent: int) -> None:
    """Let the kernel end this process with its launcher, SIGKILL included."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NAME, b"dlrover-master", 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EX_AGAIN)


async def _run(settings: Settings, ends: Ends, holder: str, dead: list[str], *, quiet: bool) -> int:
    threads.install()
    led = list[asyncio.Event]()
    asyncio.get_running_loop().set_exception_handler(Uncaught())
    asking.answer(ends.asked, lambda: any(one.is_set() for one in led))
    try:
        async with open_log(settings.log) as event_log:
            await _check_there(settings, event_log, dead)
            if quiet and not settings.shared:
                _follow_only(event_log)
            teller = told.on_stderr(settings.job.job)
            backend = None if settings.joining else backends.made(settings, os.environ["DLROVER_TOKEN"])
            master = Master(
                settings.job,
                event_log=event_log,
                listener=_listener(settings, ends.port),
                backend=backend,
                wall=lambda: time.time_ns() // 1000,
                holder=holder,
                run_id=settings.run,
                begins=not settings.shared,
                answers=settings.shared and not quiet,
                dead=dead,
                watch=teller.committed,
                model=model(policies.hook(settings.job.policy)),
            )
            led.append(master.led)
            loop = asyncio.get_running_loop()
            # After another one's death the first failure may be there already.
            warm_s = TAKEN_OVER_S if dead else told.WARM_S
            loop.call_later(warm_s, loop.run_in_executor, None, told.warm, settings.job.signatures)
            asked = asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, asked.set)
            if _why_stop(ends.stop):
                asked.set()
            stopper = asyncio.ensure_future(_end_when(asked, ends.stop, master, event_log, settings))
            leading, stuck = asyncio.ensure_future(master.run()), asyncio.ensure_future(_watch_log(settings, master))
            gone = asyncio.ensure_future(_watch_platform(backend, master))
            try:
                await asyncio.wait({leading, stuck, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not leading.done():
                    return (stuck if stuck.done() else gone).result()
                outcome = leading.result()
            finally:
                for task in (stopper, stuck, gone, leading):
                    task.cancel()
                await asyncio.gather(stopper, stuck, gone, leading, return_exceptions=True)
                await backends.closed(backend)
            log.info("job is over", state=outcome.state, reason=outcome.reason)
            return EX_OVER
    except tls.BadFile as error:
        # They were good when the job began: somebody is about to put new ones there.
        log.error("master cannot encrypt", error=str(error))
        return EX_AGAIN
    except (SchemaTooNew, LogCorrupt, OtherRun, SpecError) as error:
        if (dead or quiet) and settings.shared and isinstance(error, SpecError) and error.field == "log":
            # A master before or beside us led in this very log: a password was changed since, or a member. Training goes on.
            log.error("master cannot lead now", error=str(error))
            return EX_AGAIN
        print(f"dlrover master: {error}", file=sys.stderr)
        log.error("master cannot lead", error=f"{type(error).__name__}: {error}")
        return EX_FATAL
    except CoreError as error:
        log.error("master ends", error=f"{type(error).__name__}: {error}")
        if isinstance(error, (LogUnavailable, LogFull)):
            await asyncio.sleep(LATER_S)  # so many that cannot lead would end the job; training needs none
        return EX_AGAIN


def _listener(settings: Settings, fd: int) -> HttpListener:
    advertise = settings.masters[0] if settings.nodes_elsewhere else ""
    shown = tls.shown(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    return HttpListener(
        socket.socket(fileno=fd), os.environ["DLROVER_TOKEN"], job=settings.job.job, advertise=advertise, tls=shown
    )


async def _watch_platform(backend: object, master: Master) -> int:
    """Return when a job that is to stop must end though nobody can say that its nodes have ended."""
    log.error("the platform of a job that is to stop has gone", reason=await platform_away.until_gone(backend, master))
    return EX_OVER


async def _watch_log(settings: Settings, master: Master) -> int:
    """Say when decisions wait for the log, and when no longer; return when a job must end that the log cannot record.

    All has ended well, or what failed could not be restarted for as long as a silent node is waited for.
    """
    loop, name, since, ended, failed = asyncio.get_running_loop(), settings.job.job, 0.0, 0.0, 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        (wrong, over, owed, failure), now = master.stuck(), loop.time()
        if bool(wrong) != bool(since):
            since = now if wrong else 0.0
            say = (
                f"decisions wait for the log: {plain(wrong)}; training goes on, but who fails is not restarted: free room "
                "there, or make the disk writable, and all goes on by itself"
                if wrong
                else "the log is back: decisions are made again"
            )
            print(f"[{name}] {say}", file=sys.stderr, flush=True)
        ended = (ended or now) if wrong and over else 0.0
        if ended and now - ended >= UNRECORDED_S and not settings.shared:
            say = f"all workers ended well, which the log cannot take: {plain(wrong)}"
            missing = f"; {plain(owed)}" if owed else ""
            print(f"[{name}] {say}{missing}", file=sys.stderr, flush=True)
            return EX_UNSTORED if owed else EX_UNRECORDED
        if not (wrong and failure) or settings.shared:
            failed = 0.0
            continue
        bound_s = settings.job.unreachable_s
        if not failed:
            failed, say = now, f"the job ends in {bound_s:g} s unless the log can be written to until then"
            more = "--set unreachable_s=SECONDS waits longer"
            print(f"[{name}] {failure}, and cannot be restarted: {say} ({more})", file=sys.stderr, flush=True)
        if now - failed >= bound_s:
            print(f"[{name}] {failure}, which the log cannot take: {plain(wrong)}", file=sys.stderr, flush=True)
            return EX_UNRESTARTED


async def _check_there(settings: Settings, event_log: EventLog, dead: list[str]) -> None:
    """Raises `LogCorrupt` where nothing is left of a log in which ``dead`` masters led: agents know what it does not."""
    name = settings.job.job
    if dead and settings.log.startswith("sqlite:") and name not in await event_log.jobs():
        raise LogCorrupt(name, 1, f"{settings.log} was deleted, and its leader died before it could put it back")


def _follow_only(event_log: EventLog) -> None:
    """A master that another one has gone before begins no log of its own where the job's has just been deleted."""
    from dlrover_core.logs.sqlite import SqliteLog

    if isinstance(event_log, SqliteLog):
        event_log.begins = False


def _why_stop(stop: int) -> str:
    """Why the launcher has the job stop, as it wrote into the file ``stop``; empty: it has not."""
    return os.pread(stop, STOP_BYTES_MAX, 0).decode()


async def _end_when(told: asyncio.Event, stop: int, master: Master, event_log: EventLog, settings: Settings) -> None:
    await told.wait()
    reason = _why_stop(stop)
    if not reason:
        master.hand_over("it got SIGTERM")
        return
    led = asyncio.ensure_future(master.led.wait())
    try:
        while not led.done():
            if settings.shared and await _leader_stops(event_log, settings, reason):
                return
            await asyncio.wait({led}, timeout=ASK_AGAIN_S)
        master.tell(StopJob(reason))
    finally:
        led.cancel()


async def _leader_stops(event_log: EventLog, settings: Settings, reason: str) -> bool:
    """Has the master of another host been told to stop the job?"""
    try:
        leader = await event_log.leader(settings.job.job)
        if leader is None or not leader.address or leader.address in settings.masters[:1]:
            return False
        asked = {"command": "stop", "job": settings.job.job, "reason": reason}
        seq = await send_command(leader.address, os.environ["DLROVER_TOKEN"], asked, tls=tls.dialled(settings.tls_ca))
    except Refused as refused:
        log.info("the leader need not stop the job", reason=str(refused))
        return True
    except CoreError as error:
        log.warning("the leader cannot be told to stop the job", error=str(error))
        return False
    log.info("the leader stops the job", leader=leader.address, seq=seq)
    return True


if __name__ == "__main__":
    sys.exit(main())
