"""The launcher of a job whose nodes a scheduler starts: ``dlrover-run --backend``. It keeps masters, and nothing else.

Nodes, and what trains on them, go on when this launcher is killed. Started again, it goes on with the run: its masters listen
where the last ones did, under the same token, and their backend finds the nodes that there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from dlrover_adapters.cli import backends, hosts, in_pod, ray_attached, scratch
from dlrover_adapters.cli import options as cli_options
from dlrover_adapters.cli.meeting import parse_endpoint
from dlrover_core.errors import LaunchRefused, SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.ahead_master import AheadMaster
    from dlrover_adapters.cli.settings import Settings
    from dlrover_adapters.cli.torchrun_flags import Options
    from dlrover_core.runtime.backends import Choice

CHECK_S, CLEAR_S, CLEAR_AGAIN_S = 10.0, 15.0, 1.0
LAST_LINES_S = 0.5
"""When the job is over, the last lines that its nodes printed are still on their way."""
UNFINISHED = (70, 75)
"""Exit statuses after which the job goes on, or nobody knows: its nodes stay."""
EVERYWHERE = "0.0.0.0"  # noqa: S104  # nodes are on other hosts, and show a token


def run(options: Options, settings: Settings, choice: Choice, first: AheadMaster | None = None) -> int:
    """Lead the job until it is over; the exit status. ``first``: a process to be the first master. Raises `SpecError`."""
    from dlrover_adapters.http.token import load_token, loopback_token

    directory = Path(settings.directory)
    token = load_token(os.environ, options.token_file) or loopback_token(directory)
    backends.say_counted(options, "dlrover-run")
    settings = replace(settings, **backends.settled(choice, backends.words(options))._asdict())
    with (
        scratch.claim(directory, settings.job.job) as claim,
        _listening(options.bind or EVERYWHERE, directory) as port,
        scratch.folder(settings.mark, claim) as folder,
    ):
        return asyncio.run(_lead(options, settings.placed(folder), token, port, first))


async def _lead(
    options: Options, settings: Settings, token: str, port: socket.socket, first: AheadMaster | None
) -> int:
    from dlrover_adapters.cli import lead
    from dlrover_adapters.cli.supervisor import NoNodes
    from dlrover_adapters.http.tls import dialled
    from dlrover_adapters.telemetry.logs import set_up

    set_up(Path(settings.control_log), settings.log_level, role="launcher")
    settings = await lead.probed(settings)
    await lead.check_token(settings, token, dialled(settings.tls_ca))
    host, number = port.getsockname()[:2]
    own = backends.masters(options, hosts.joined(hosts.outside(host), number))
    settings = replace(settings, masters=tuple(dict.fromkeys((*own, *settings.masters))))
    pod = in_pod.is_pod(options)
    if not (pod and (Path(settings.directory) / "settings.json").exists()):
        await _check(settings, token)  # a master that follows another one in its pod hurries: its rights are the same
    how = lead.How(cli_options.shows_progress(options), cli_options.where(options), leaves=pod, pod=pod, apart=not pod)
    how = how._replace(place=in_pod.place(options), first=first)
    showing = None if pod else asyncio.ensure_future(_show(settings, token))
    try:
        async with ray_attached.outlived(options, settings, token) as end:
            status = end.status = await lead.supervise(settings, token, port, NoNodes(), how)
    finally:
        if showing is not None:
            await asyncio.wait({showing}, timeout=LAST_LINES_S)
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
    if end.gone:
        remedy = getattr(backends.made(settings, token), "remedy", "")
        left = f"what is left of the job there stays; {remedy}" if remedy else "what is left of the job there stays"
        print(f"dlrover-run: job {settings.job.job}: {end.gone}: {left}", file=sys.stderr)
    elif status not in UNFINISHED:
        await cleared(settings, token)
    return status


async def _check(settings: Settings, token: str) -> None:
    """Ask the backend's platform before anything is started. Raises `SpecError`; one that is away now is waited for, and told."""
    from dlrover_core.runtime.backend import Checking
    from dlrover_core.runtime.within import within

    backend = backends.made(settings, token)
    if not isinstance(backend, Checking):
        return
    check_s = float(getattr(backend, "check_s", CHECK_S))
    try:
        await within(check_s, backend.check())
    except SpecError:
        raise
    except Exception as error:  # noqa: BLE001  # a backend may raise anything, and nodes of this job may run already
        why = str(error) or f"no answer within {check_s:g} s"
        print(
            f"dlrover-run: job {settings.job.job}: its backend cannot be used now, and is waited for: {why}",
            file=sys.stderr,
        )
    finally:
        await backends.closed(backend)


async def _show(settings: Settings, token: str) -> None:
    """Print what nodes print, where the backend can bring it here."""
    from dlrover_core.runtime.backend import Printing

    backend = backends.made(settings, token)
    if not isinstance(backend, Printing):
        return
    try:
        await backend.show(_print)
    except Exception as error:  # noqa: BLE001  # a backend may raise anything, and training needs none of it
        structlog.get_logger("dlrover.launcher").warning(
            "nodes' output is not shown", error=f"{type(error).__name__}: {error}"
        )
    finally:
        await backends.closed(backend)


def _print(line: bytes) -> None:
    with suppress(OSError):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


async def cleared(settings: Settings, token: str) -> None:
    """Have the backend remove what it leaves behind beside nodes, now that the job is over. Ctrl-C gives up waiting for it."""
    from dlrover_adapters.cli.places import said_when_slow
    from dlrover_core.runtime.backend import Clearing
    from dlrover_core.runtime.within import within

    backend = backends.made(settings, token)
    if not isinstance(backend, Clearing):
        return
    say, loop = f"dlrover-run: job {settings.job.job}", asyncio.get_running_loop()
    failed = list[Exception]()

    async def clear() -> None:
        while True:  # the platform may be away for a moment
            try:
                await backend.clear()
            except LaunchRefused:  # what is there is not ours
                raise
            except Exception as error:  # noqa: BLE001  # a backend may raise anything
                failed[:] = [error]
                await asyncio.sleep(CLEAR_AGAIN_S)
            else:
                return

    clearing = asyncio.ensure_future(within(CLEAR_S, clear()))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, clearing.cancel)
    try:
        with said_when_slow(say, f"what its backend has made is removed, within {CLEAR_S:g} s; Ctrl-C leaves it"):
            await asyncio.wait({clearing})
        why = "interrupted" if clearing.cancelled() else _why(clearing.exception(), failed)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        clearing.cancel()
    if why:  # a backend may raise anything, and the job is over all the same
        remedy = getattr(backend, "remedy", "")
        print(
            f"{say}: what its backend has made may be left behind: {why}{f'; {remedy}' if remedy else ''}",
            file=sys.stderr,
        )


def _why(error: BaseException | None, failed: list[Exception]) -> str:
    """What went wrong, for people; empty: nothing did. ``failed``: what the last try has met, if one has."""
    if isinstance(error, asyncio.TimeoutError):
        return f"{type(failed[0]).__name__}: {failed[0]}" if failed else f"it has not answered within {CLEAR_S:g} s"
    return f"{type(error).__name__}: {error}" if error is not None else ""


def _listening(text: str, directory: Path) -> socket.socket:
    """The masters' socket: where it is told, else at the port that the nodes of this job know already. Raises `SpecError`."""
    host, number = parse_endpoint("bind", text, 0)
    for port in dict.fromkeys((number or _last_port(directory), number)):
        with suppress(OSError):
            return hosts.listen(host, port)
    raise SpecError("bind", f"cannot listen at {text}: name another address of this host, or another port")


def _last_port(directory: Path) -> int:
    """The port at which the last masters of this job listened; 0: not known."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        raw = json.loads((directory / "settings.json").read_bytes())
        return hosts.split(raw["masters"][0])[1] if raw["apart"] else 0
    return 0
