"""The launcher of a joining job: one of several hosts, each with one kept agent; the host of the endpoint has the masters too."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.agent import looks
from dlrover_adapters.cli import ahead, hosts, scratch, upkeep
from dlrover_adapters.cli.agent_restarter import OVER, RELEASED, AgentRestarter, Ended
from dlrover_adapters.cli.hosts import Seat
from dlrover_adapters.cli.meeting import Meeting
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_adapters.http.tls import Untrusted, check, dialled
from dlrover_backends.local.blanks import Ahead
from dlrover_backends.shared.process import Started
from dlrover_core.diagnosis.ladder import NO_PROGRESS
from dlrover_core.errors import ConnectionLost, SpecError, TokenRefused
from dlrover_core.spec import JobSpec

EX_OK, EX_FAILED, EX_SOFTWARE, EX_REFUSED, EX_NO_PROGRESS = 0, 1, 70, 77, 93
ASK_S, AGAIN_S = 2.0, 0.2
SAY_FIRST_S, SAY_S = 2.0, 10.0


class Refused(Exception):
    """A master answered, and does not want us."""


class Met(NamedTuple):
    """Where the masters are: at ``addresses``, and here if there is a socket for them. ``job``: what they lead, if they said."""

    addresses: tuple[str, ...]
    port: socket.socket | None = None
    job: str = ""


def run(
    options: Options, settings: Settings, meeting: Meeting, token: str, first: Sequence[Started], where: str
) -> int:
    """Be one of the hosts of a job, with the agent that was started ``first``; the exit status."""
    named = not meeting.masters or bool(options.job_id) or options.rdzv_id not in ("", "none")
    with hosts.seat(Path(settings.directory)) as seat:
        try:
            met = asyncio.run(
                _meet(meeting, settings.job if named else None, token, settings.job.launch_s, settings.tls_ca)
            )
            host = _Host(settings, meeting, met, token, first, seat, where)
            return host.lead(options) if met.port is not None else host.follow()
        except Refused as refused:
            _tell(str(refused))
            return EX_REFUSED


# ---- finding the masters


async def _meet(meeting: Meeting, job: JobSpec | None, token: str, wait_s: float, ca: str = "") -> Met:
    """Be the host of the masters, or find those of ``job``; None: of any.

    Raises `SpecError`, `Refused`, and `ConnectionLost` when there are none within ``wait_s``.
    """
    addresses, tls = meeting.masters or (meeting.endpoint,), dialled(ca)
    ours = hosts.is_this_machine(meeting.host) if meeting.hosts is None else meeting.hosts
    loop = asyncio.get_running_loop()
    began, say_at = loop.time(), loop.time() + SAY_FIRST_S
    while True:
        if ours and not meeting.masters and (port := _bind(meeting)) is not None:
            return Met((_own(meeting, port),), port)
        reason = ""
        for address in addresses:
            try:
                return Met(addresses, job=await _ask(address, token, job.job if job else "", tls))
            except ConnectionLost as lost:
                reason = str(lost)
        waited = loop.time() - began
        if waited >= wait_s:
            raise ConnectionLost(
                f"no master at {', '.join(addresses)} within {wait_s:g} s: {reason}; is the launcher on that host running, "
                "and its port open? --rdzv-conf join_timeout=SECONDS waits longer"
            )
        if loop.time() >= say_at:
            say_at = loop.time() + SAY_S
            _tell(f"waiting for a master at {', '.join(addresses)} ... {waited:.0f} of {wait_s:g} s: {reason}")
        await asyncio.sleep(AGAIN_S)


def _bind(meeting: Meeting) -> socket.socket | None:
    """The socket of the masters; None where somebody listens already, perhaps a master. Raises `SpecError`."""
    try:
        return hosts.bind(meeting.host, meeting.port)
    except OSError as error:
        if hosts.is_taken(error):
            return None
        raise SpecError("rdzv-endpoint", f"cannot listen at {meeting.endpoint}: {error.strerror}") from error


def _own(meeting: Meeting, port: socket.socket) -> str:
    """Where all hosts, this one too, find the masters that are here."""
    from dlrover_adapters.cli.lead import local_address

    found = hosts.resolved(meeting.host)
    return meeting.endpoint if any(hosts.is_ours(one) for one in found) else local_address(port)


async def _ask(address: str, token: str, job: str, tls: ssl.SSLContext | None) -> str:
    """The job that a master leads there. Raises `ConnectionLost`, `Refused` and `SpecError`."""
    from dlrover_adapters.http.client import NotAMaster, fetch_status

    try:
        status = await fetch_status(address, token, timeout_s=ASK_S, tls=tls)
    except TokenRefused as error:
        raise Refused(str(error)) from error
    except Untrusted as error:
        raise SpecError("tls-ca", str(error)) from error
    except NotAMaster as error:
        raise SpecError("rdzv-endpoint", f"{error}; give the masters another port, the same on every host") from error
    told = str(status.get("job", ""))
    if job and told and told != job:
        raise Refused(
            f"the master at {address} leads job {told!r}, not {job!r}: say the same --rdzv-id on every host, "
            "or give this job another port"
        )
    return told


# ---- being a host


class _Host:
    """This host, once it is known where the masters are."""

    def __init__(
        self,
        settings: Settings,
        meeting: Meeting,
        met: Met,
        token: str,
        first: Sequence[Started],
        seat: Seat,
        where: str,
    ) -> None:
        self._settings, self._meeting, self._met, self._token = settings, meeting, met, token
        self._first, self._seat, self._where = first, seat, where
        if met.job and met.job != settings.job.job:
            self._settings = replace(settings, spec=replace(settings.job, job=met.job).to_json())
        self._place = hosts.place(meeting.endpoint if meeting.host else met.addresses[0], meeting.local_addr)

    def lead(self, options: Options) -> int:
        """With the masters. Raises `SpecError`."""
        self._check_tls()
        directory, job = Path(self._settings.directory), self._settings.job.job
        assert self._met.port is not None
        with (
            self._met.port,
            scratch.claim(directory, job) as claim,
            scratch.folder(self._settings.mark, claim, self._seat.lock) as folder,
        ):
            return asyncio.run(self._lead(self._met.port, self._settings.placed(folder), options))

    def _check_tls(self) -> None:
        """May agents trust what our masters will show?"""
        certificate, key, ca = self._settings.tls_cert, self._settings.tls_key, self._settings.tls_ca
        if ca and not certificate:
            raise SpecError(
                "tls-cert", f"missing: this host runs the masters, of {self._met.addresses[0]}; --tls-key belongs to it"
            )
        if certificate:
            check(certificate, key, ca, hosts.split(self._met.addresses[0])[0])

    async def _lead(self, port: socket.socket, settings: Settings, options: Options) -> int:
        from dlrover_adapters.cli import lead
        from dlrover_adapters.cli.options import shows_progress
        from dlrover_adapters.telemetry.logs import set_up

        set_up(Path(settings.control_log), settings.log_level, role="launcher")
        settings = await lead.probed(settings)
        await lead.check_token(settings, self._token, dialled(settings.tls_ca))
        settings = replace(settings, masters=self._met.addresses)
        kept = AgentRestarter(self._agents(settings), _tell)
        how = lead.How(shows_progress(options), self._where)
        watching = asyncio.ensure_future(_tell_release(kept))
        try:
            return await lead.supervise(settings, self._token, port, kept, how)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def follow(self) -> int:
        """Without masters."""
        with scratch.folder(self._settings.mark, self._seat.lock) as folder:
            return asyncio.run(self._follow(self._settings.placed(folder)))

    async def _follow(self, settings: Settings) -> int:
        from dlrover_adapters.agent import signals
        from dlrover_adapters.cli.lead import to_handle
        from dlrover_adapters.telemetry.logs import set_up

        set_up(Path(settings.control_log), settings.log_level, role="launcher")
        _tell(f"job {settings.job.job}, master at {', '.join(self._met.addresses)}")
        kept = AgentRestarter(self._agents(settings), _tell)
        asked: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            asked.append(number)
            if len(asked) > 1:
                kept.kill()
                return
            signals.tell(settings.run_dir or "", number)
            kept.leave(f"dlrover-run got {number.name}")

        loop = asyncio.get_running_loop()
        for number in to_handle(settings):
            loop.add_signal_handler(number, stop, number)
        async with upkeep.kept(settings, "", "dlrover-run"), kept:
            ended = await kept.ended()
        return _say(settings.job.job, self._met.addresses[0], ended, asked[0] if asked else None)

    def _agents(self, settings: Settings) -> Ahead:
        """How this host's agents are started; the first, which is there already, is told its settings."""
        told = replace(
            settings,
            run="",
            masters=self._met.addresses,
            address=self._place.address,
            store_bind=self._place.bind,
            seat=self._seat.name,
        )
        config = str(told.write(f"seat-{self._seat.number}.json"))
        for one in self._first:
            with contextlib.suppress(OSError):  # dead already: it will be noticed
                one.tell(settings=config)
        command, job = ahead.later_agents(told, self._token), settings.job
        return Ahead(command, self._first, hung_s=job.hung_s, see=looks.seen, ready_s=job.ready_s)


def _tell(words: str) -> None:
    print(f"dlrover-run: {words}", file=sys.stderr)


async def _tell_release(kept: AgentRestarter) -> None:
    """The masters stay though this host's node has gone: say so."""
    ended = await kept.ended()
    if ended.outcome and ended.outcome not in OVER:
        _tell(f"no node runs here any more ({ended.outcome}: {ended.reason}); the masters do, until the job is over")


def _say(job: str, master: str, ended: Ended, asked: signal.Signals | None) -> int:
    """How it ended for this host, the root cause of a failure first; the exit status. The log is where the masters are."""
    why = f" ({ended.reason})" if ended.reason else ""
    if ended.outcome == "succeeded":
        _tell(f"job {job} succeeded")
        return EX_OK
    if ended.outcome == "failed":
        _tell(f"root cause: {ended.root or ended.reason}")
        _tell(f"next, on the host of {master}, which said the rest and has the log: dlrover explain {job}")
        _tell(f"job {job} failed")
        return EX_NO_PROGRESS if NO_PROGRESS in ended.reason else EX_FAILED
    if ended.outcome == "stopped":
        _tell(f"job {job} stopped ({ended.root or ended.reason})")
        return EX_FAILED if asked is None else 128 + asked
    if asked is not None:
        _tell(f"this host has left job {job}")
        return 128 + asked
    if ended.outcome in RELEASED:
        _tell(f"this host's node is {ended.outcome}{why}: job {job} goes on without it")
        return EX_FAILED if ended.outcome == "given up" else EX_OK
    if ended.outcome == "refused":
        _tell(f"turned away{why}")
        return EX_REFUSED
    _tell(f"job {job}: no agent can be kept here{why}")
    return EX_SOFTWARE
