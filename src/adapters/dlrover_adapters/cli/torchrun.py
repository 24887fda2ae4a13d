"""``torchrun --rdzv-backend dlrover``: what the rendezvous in torchrun's process is put together from.

Torch loads `creator` with every torchrun on a host where we are installed, whatever its backend: so nothing is imported here
before a rendezvous of ours is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dlrover_adapters.cli.torchrun_masters import Masters
    from dlrover_adapters.torch.torchrun_launcher import Words
    from dlrover_core.spec import JobSpec

DEFAULT_ID = "none"  # torchrun's own
WITHOUT_END = 1_000_000_000
JOIN_S = 600.0  # torchrun's own for c10d

# Keys of --rdzv-conf that mean something to torch's own backends only.
UNUSED = {
    "timeout", "close_timeout", "read_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt",
    "store_type", "rank",
}  # fmt: skip
OURS = {
    "join_timeout", "last_call_timeout", "is_host", "state_dir", "log", "token_file", "on_join", "log_level", "reserve",
    "tls_cert", "tls_key", "tls_ca",
}  # fmt: skip


def creator() -> Callable[[Any], Any]:
    """The entry point ``torchrun.handlers``: what makes a rendezvous of `RendezvousParameters`."""
    return create


class Place(NamedTuple):
    """Where this host keeps what belongs to the job."""

    job: str
    directory: Path
    log: str


class Tls(NamedTuple):
    """Files in PEM form; without ``ca`` nothing is encrypted."""

    cert: str = ""
    """What this host's masters show, if it runs them."""
    key: str = ""
    """Its private key; empty: in ``cert``."""
    ca: str = ""
    """What this host checks masters by."""


def create(params: Any) -> Any:
    """The rendezvous for this torchrun; on HOST with its masters. Raises `ValueError` for what cannot be right."""
    from dlrover_adapters.agent.config import TORCH
    from dlrover_adapters.agent.framework import load
    from dlrover_adapters.agent.keeper import open_store
    from dlrover_adapters.cli import hosts
    from dlrover_adapters.cli.torchrun_asking import Asking
    from dlrover_adapters.http.client import HttpDialer
    from dlrover_adapters.http.tls import dialled
    from dlrover_adapters.torch.rendezvous import DlroverRendezvous
    from dlrover_adapters.torch.torchrun_line import Parts

    host, port = _endpoint(params)
    job = _name(params.run_id, port)
    free = None if port else hosts.bind(host, 0)
    port = port if free is None else int(free.getsockname()[1])
    spec, place = _spec(params, job), _place(params, job)
    _log_to(place, params.get("log_level", "info"))
    token, tls = _token(params, place, host), _tls(params)
    encryption = dialled(tls.ca)
    master = hosts.joined(host, port)
    where = hosts.place(master, params.local_addr or "")
    seat = contextlib.ExitStack()
    name = seat.enter_context(hosts.seat(place.directory)).name
    port_socket = free or _port(params, host, port)
    masters = _masters(params, spec, place, token, port_socket, master, tls) if port_socket is not None else None

    def ended() -> bool:
        return masters is not None and masters.over

    asking = Asking(master, token, encryption, ended)

    def close(seconds: float | None) -> None:
        if masters is not None:
            masters.close(seconds)
        seat.close()

    parts = Parts(
        job=place.job,
        masters=(master,),
        dialer=lambda: HttpDialer(token, job=place.job, tls=encryption),
        host=os.environ.get("DLROVER_HOST") or socket.gethostname(),
        bind=where.bind,
        address=where.address,
        seat=name,
        join_s=spec.launch_s,
        # The masters end with HOST's torchrun, and the job needs them.
        reserve=masters is not None or bool(params.get_as_bool("reserve")),
        open_store=functools.partial(open_store, serve=load(TORCH).serve_store),
        words=_words,
        trouble=lambda: masters.trouble if masters is not None else "",
        ended=ended,
        close=close,
        over=asking.over,
        stop=asking.stop,
        say=lambda words: print(f"torchrun: {words}", file=sys.stderr, flush=True),
    )
    return DlroverRendezvous(params.run_id, parts)


def _words(error_file: str) -> Words:
    """What a dead worker left where torch has its workers leave it: streams too, where they go into files."""
    from dlrover_adapters.agent.last_words import read_error, read_tail
    from dlrover_adapters.torch.torchrun_launcher import Words

    folder = Path(error_file).parent
    tail = read_tail(str(folder / "stderr.log")) or read_tail(str(folder / "stdout.log"))
    return Words(tail, *read_error(error_file))


def _endpoint(params: Any) -> tuple[str, int]:
    """Where the master listens. Port 0: at a free one, as the only node of its job may ask, or say nothing at all."""
    from dlrover_adapters.cli.meeting import parse_endpoint

    text = (params.endpoint or "").strip()
    if params.max_nodes == 1 and (not text or text.endswith(":0")):
        host, _ = parse_endpoint("rdzv-endpoint", text[: -len(":0")] or "127.0.0.1")
        return host, 0
    if not text:
        raise ValueError(
            "--rdzv-backend dlrover needs --rdzv-endpoint HOST:PORT, the same on every host; HOST runs the master"
        )
    return parse_endpoint("rdzv-endpoint", text)


def _spec(params: Any, job: str) -> JobSpec:
    """What the master is told. Torch counts restarts, and a torchrun may be started again as often as somebody likes."""
    from dataclasses import fields

    from dlrover_adapters.cli.meeting import UNUSED_WORDS
    from dlrover_core.diagnosis.policy import Policy
    from dlrover_core.spec import GroupSpec, JobSpec

    durations = {spot.name for spot in fields(JobSpec) if spot.name.endswith("_s")}
    unknown = sorted(set(params.config) - UNUSED - OURS - durations - set(UNUSED_WORDS))
    if unknown:
        known = ", ".join(sorted(OURS))
        raise ValueError(
            f"--rdzv-conf: the backend dlrover has no {', '.join(unknown)}; it has {known}, and the job's durations"
        )
    given: dict[str, Any] = {name: _seconds(name, params.get(name)) for name in durations & set(params.config)}
    given.setdefault("launch_s", _seconds("join_timeout", params.get("join_timeout", JOIN_S)))
    given.setdefault("last_call_s", _seconds("last_call_timeout", params.get("last_call_timeout", 30)))
    group = GroupSpec(nodes_min=params.min_nodes, nodes_max=params.max_nodes, nproc=1, relaunch_max=WITHOUT_END)
    return JobSpec(
        job=job,
        groups=(group,),
        max_restarts=WITHOUT_END,
        on_join=str(params.get("on_join", "restart")),
        joining=True,
        # Torch's own agent counts its restarts, and says when it has none left: errors of the program end nothing before that.
        policy=Policy(user_repeats=0, fail_at_once=(), fail_signatures=()).to_json(),
        **given,
    )


def _seconds(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--rdzv-conf {name}={value}: not a number of seconds") from error


def _name(run_id: str, port: int) -> str:
    """``--rdzv-id`` as a job's name. Torchrun's default is everybody's: the port is added, or the time where it is any."""
    cleaned = re.sub(r"[^a-z0-9_.]+", "-", run_id.lower()).strip("-._")[:63].strip("-._")
    if cleaned and run_id != DEFAULT_ID:
        return cleaned
    return f"torchrun-{port}" if port else f"torchrun-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _place(params: Any, job: str) -> Place:
    from dlrover_adapters.cli.places import log_url
    from dlrover_core.logs.place import default_state_dir, private_dir, refuse_remote

    stated = params.get("state_dir")
    if stated:
        refuse_remote(Path(stated).absolute())
    state = private_dir(Path(stated).absolute()) if stated else default_state_dir()
    return Place(job, private_dir(private_dir(state / "jobs") / job), log_url(params.get("log"), state))


def _token(params: Any, place: Place, host: str) -> str:
    """The job token. Where nobody can come from another host, one that lies in the job's private directory will do."""
    from dlrover_adapters.cli.hosts import literally_loops
    from dlrover_adapters.http.token import load_token, loopback_token, require_token

    given = params.get("token_file")
    if params.max_nodes > 1 and not literally_loops(host):
        return require_token(os.environ, given)
    return load_token(os.environ, given) or loopback_token(place.directory)


def _tls(params: Any) -> Tls:
    """The files that are named, looked into. Raises `ValueError`."""
    from dlrover_adapters.http import tls as encryption

    told = (params.get(name) for name in ("tls_cert", "tls_key", "tls_ca"))
    found = Tls(*(str(Path(one).absolute()) if one else "" for one in told))
    if found.key and not found.cert:
        raise ValueError("--rdzv-conf: tls_key belongs to a tls_cert, and there is none")
    if found.cert and not found.ca:
        raise ValueError(
            "--rdzv-conf: tls_ca is missing: this host, too, checks masters by a CA; a self-signed tls_cert is its own"
        )
    if found.cert:
        encryption.check(*found)
    else:
        encryption.dialled(found.ca)
    return found


def _log_to(place: Place, level: str) -> None:
    import structlog

    from dlrover_adapters.telemetry.logs import LEVELS, set_up

    if level not in LEVELS:
        raise ValueError(f"--rdzv-conf log_level={level}: one of {', '.join(LEVELS)}")
    # A program that launches through torch's API may have set up its own.
    if not structlog.is_configured():
        set_up(place.directory / "control.log", level, role="torchrun", pid=os.getpid())


def _port(params: Any, host: str, port: int) -> socket.socket | None:
    """Where HOST's masters will listen, if this is HOST and nobody has started them yet. Raises `ValueError`."""
    from dlrover_adapters.cli import hosts

    stated = params.get_as_bool("is_host")
    if stated is False or (stated is None and not hosts.is_this_machine(host)):
        return None
    try:
        return hosts.bind(host, port)
    except OSError as error:
        if hosts.is_taken(error):
            return None  # by another torchrun on this machine, or its masters: then we dial as everybody does
        raise ValueError(f"the master cannot listen at {hosts.joined(host, port)}: {error.strerror}") from error


def _masters(
    params: Any, spec: JobSpec, place: Place, token: str, port: socket.socket, address: str, tls: Tls
) -> Masters:
    """HOST's masters, which take the port over. Raises `ValueError`."""
    from dlrover_adapters.cli import hosts
    from dlrover_adapters.cli.torchrun_masters import Masters
    from dlrover_adapters.http import tls as encryption

    with port:
        host, _ = hosts.split(address)
        if tls.ca and not tls.cert:
            raise ValueError(
                f"--rdzv-conf: tls_cert is missing, and tls_key if it is a file of its own: this host runs the masters, of {host}"
            )
        if tls.cert:
            encryption.check(*tls, host)
        return Masters(spec, place.directory, place.log, token, port, address, params.get("log_level", "info"), tls)
