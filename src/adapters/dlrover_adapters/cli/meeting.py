"""Where this host's nodes meet the others: torchrun's rendezvous flags, and ours, read into one small value."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrover_adapters.cli import usage, values
from dlrover_adapters.cli.backend_flags import apart
from dlrover_core.errors import SpecError

PORT = 29400  # torchrun's for c10d
STATIC_PORT = 29500  # torchrun's for static
JOINING = ("static", "c10d", "dlrover")
_QUOTES = ("'", '"')
_HOST = re.compile(r"[\w.:-]+")

_REFUSED = {
    "etcd": "its server is not needed: say c10d, and the master on HOST takes its place",
    "etcd-v2": "its server is not needed: say c10d, and the master on HOST takes its place",
}

# torchrun's keys of --rdzv-conf that set a duration of the job's spec.
_DURATIONS = {"join_timeout": "launch_s", "timeout": "launch_s", "last_call_timeout": "last_call_s"}
# Those that mean something only to torch's own stores and heartbeats.
_UNUSED = ("close_timeout", "heartbeat_timeout", "read_timeout", "rank")
# The same, and not numbers: of torch's etcd backends, and of its older versions.
UNUSED_WORDS = ("protocol", "cert", "key", "cacert", "ssl_cert", "ssl_cert_key", "ca_cert", "etcd_prefix", "use_libuv")
_USED = ("is_host", "store_type")
# Those whose product sets one, with torchrun's defaults.
_KEEP_ALIVE = {"keep_alive_interval": 5.0, "keep_alive_max_attempt": 3.0}


@dataclass(frozen=True, slots=True)
class Meeting:
    """One host's view of the rendezvous. Not ``joining``: one host, nothing is met, and the rest is empty.

    ``store`` is the host and port that somebody named for the store of a job on one host; None: a free port of loopback.
    ``host`` is without brackets, also an IPv6 one. ``hosts``: whether this host runs the masters; None means torchrun's rule,
    where ``host`` names this machine. ``place``: the node rank asked for, or -1. ``masters``: only an agent runs here.
    """

    joining: bool = False
    backend: str = ""
    host: str = ""
    port: int = 0
    hosts: bool | None = None
    place: int = -1
    masters: tuple[str, ...] = ()
    local_addr: str = ""
    durations: Mapping[str, float] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    store: tuple[str, int] | None = None

    @property
    def endpoint(self) -> str:
        """``host:port``, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_conf(text: str) -> dict[str, str]:
    """Torchrun's ``key=value,key=value``. Raises `SpecError`."""
    found = {}
    for part in text.split(",") if text.strip() else ():
        key, _, value = (one.strip() for one in part.partition("="))
        if key[:1] in _QUOTES:
            raise SpecError(
                "rdzv-conf", f"take off the quotation mark in {part!r}: no shell did, so it belongs to the key"
            )
        if not key or not value:
            raise SpecError("rdzv-conf", f"{part!r} is not KEY=VALUE; say for example join_timeout=600,is_host=true")
        found[key] = value
    return found


def parse_endpoint(field_: str, text: str, port: int = PORT) -> tuple[str, int]:
    """``HOST[:PORT]`` as torchrun reads it; IPv6 in brackets, which are taken off. Raises `SpecError`."""
    text = text.strip()
    host, _, number = (text, "", "") if text.startswith("[") and text.endswith("]") else text.rpartition(":")
    if not host:
        host, number = text, ""
    host = host.removeprefix("[").removesuffix("]")
    if number and not 0 < (values.whole(number) or 0) < 2**16:
        raise SpecError(
            field_, f"the port of {text!r} is not a number from 1 to 65535: every host must find the same one"
        )
    if not _HOST.fullmatch(host):
        raise SpecError(field_, f"{text!r} is not HOST:PORT; HOST is a name or an address, IPv6 as [::1]")
    return host, int(number or port)


def read(options: argparse.Namespace, nodes_max: int) -> Meeting:
    """The meeting that the options describe, of a job with at most ``nodes_max`` nodes. Raises `SpecError`."""
    _check_backend(options.rdzv_backend)
    conf = parse_conf(options.rdzv_conf)
    if "is_host" in conf:
        _bool("is_host", conf["is_host"])
    durations, unused = _durations(conf, options.rdzv_backend if nodes_max > 1 else "")
    masters = tuple(_master(one) for one in (options.master or "").split(",") if one.strip())
    if masters:
        return Meeting(
            joining=True,
            backend="masters",
            hosts=False,
            place=options.node_rank if options.given("node_rank") else -1,
            masters=masters,
            local_addr=options.local_addr or "",
            durations=durations,
            unused=tuple(unused),
        )
    if options.standalone or nodes_max == 1 or options.local_nodes is not None or apart(options):
        store, by = (None, ()) if apart(options) else _store(options)
        alone = [one for one in _unused_alone(options) if one not in by]
        return Meeting(unused=tuple(alone + unused), durations=durations, store=store)
    return _joining(options, conf, durations, unused)


def _store(options: argparse.Namespace) -> tuple[tuple[str, int] | None, tuple[str, ...]]:
    """Where torchrun's static backend would have the store of a single host, if that is said; and by which flags.

    Raises `SpecError`.
    """
    if options.standalone or options.rdzv_backend != "static":
        return None, ()
    flags = ("--rdzv-backend", "--master-addr", "--master-port")
    if options.rdzv_endpoint:
        host, port = parse_endpoint("rdzv-endpoint", options.rdzv_endpoint, 0)
        return ((host, port), ("--rdzv-backend", "--rdzv-endpoint")) if port else (None, ())
    return (_static(options), flags) if options.master_port is not None else (None, ())


def _check_backend(backend: str) -> None:
    if backend in _REFUSED:
        raise SpecError("rdzv-backend", f"{backend} is not supported: {_REFUSED[backend]}")
    if backend not in JOINING:
        raise SpecError(
            "rdzv-backend", f"{backend!r} is not known; there are: c10d, static (torchrun's default), dlrover"
        )


def _joining(
    options: argparse.Namespace, conf: Mapping[str, str], durations: dict[str, float], unused: list[str]
) -> Meeting:
    backend = options.rdzv_backend
    if conf.get("store_type", "tcp") != "tcp":
        raise SpecError(
            "rdzv-conf", "store_type: nodes meet over TCP here; say --rdzv-endpoint HOST:PORT instead of a file"
        )
    static = backend == "static"
    host, port = _address(options, static)
    if static:
        if options.node_rank < 0:
            raise SpecError("node-rank", f"cannot be negative, got {options.node_rank}")
        hosts: bool | None = options.node_rank == 0
    else:
        hosts = _bool("is_host", conf["is_host"]) if "is_host" in conf else None
        unused += _given(options, "node_rank", "master_addr", "master_port")
    return Meeting(
        joining=True,
        backend=backend,
        host=host,
        port=port,
        hosts=hosts,
        place=options.node_rank if static else -1,
        local_addr=options.local_addr or "",
        durations=durations,
        unused=tuple(unused),
    )


def _address(options: argparse.Namespace, static: bool) -> tuple[str, int]:
    """Where the master listens. Raises `SpecError`."""
    if options.rdzv_endpoint:
        return parse_endpoint("rdzv-endpoint", options.rdzv_endpoint, STATIC_PORT if static else PORT)
    if static and options.given("master_addr"):
        return _static(options)
    raise SpecError(
        "nnodes",
        "more than one node needs a place to meet, the same on every host: --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
        f"(HOST one of them), or --master-addr and --node-rank; --local-nodes {options.nnodes.most} runs them all on this one",
    )


def _static(options: argparse.Namespace) -> tuple[str, int]:
    """``--master-addr`` and ``--master-port``. Raises `SpecError`."""
    host, _ = parse_endpoint("master-addr", f"[{options.master_addr.strip('[]')}]")
    port = STATIC_PORT if options.master_port is None else options.master_port
    if not 0 < port < 2**16:
        raise SpecError("master-port", f"{port} is not a port from 1 to 65535")
    return host, port


def _master(text: str) -> str:
    host, port = parse_endpoint("master", text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _durations(conf: Mapping[str, str], backend: str) -> tuple[dict[str, float], list[str]]:
    """What the configuration sets in the job's spec, and the keys that have no meaning here.

    A value that is no number is refused where torch's own ``backend`` reads that key, and on one host (``backend`` empty).
    Elsewhere the key does nothing, as under torchrun.
    """
    found: dict[str, float] = {}
    kept_alive: dict[str, float] = {}
    unused = []
    for key, value in conf.items():
        if key in _USED:
            continue
        if key in UNUSED_WORDS:
            unused.append(f"--rdzv-conf {key}")
        elif key in _UNUSED:
            _seconds(key, value, least=-1.0 if key == "rank" else 0.0)
            unused.append(f"--rdzv-conf {key}")
        elif not (key in _DURATIONS or key in _KEEP_ALIVE):
            known = (*_DURATIONS, *_KEEP_ALIVE, *_USED, *_UNUSED)
            raise SpecError("rdzv-conf", f"there is no {key!r}{usage.meant(key, known)}; there are: {', '.join(known)}")
        elif (key == "timeout" and backend not in ("", "static")) or not _taken(key, value, backend):
            unused.append(f"--rdzv-conf {key}")
        elif key in _DURATIONS:
            found[_DURATIONS[key]] = _seconds(key, value)
        else:
            kept_alive[key] = _seconds(key, value)
    if kept_alive:
        found["silence_s"] = math.prod({**_KEEP_ALIVE, **kept_alive}.values())
    return found, unused


def _taken(key: str, value: str, backend: str) -> bool:
    """Is it a number? Raises `SpecError` where it is none, and torch's backend of that name would not start with it either."""
    try:
        _seconds(key, value)
    except SpecError:
        if not backend or (key == "timeout") == (backend == "static"):
            raise
        return False
    return True


def _seconds(key: str, value: str, least: float = 0.0) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = least
    if not least < seconds < 10**9:
        raise SpecError("rdzv-conf", f"{key}={value}: not a number above {least:g}")
    return seconds


def _bool(key: str, value: str) -> bool:
    if value.lower() in ("1", "true", "t", "yes", "y"):
        return True
    if value.lower() in ("0", "false", "f", "no", "n"):
        return False
    raise SpecError("rdzv-conf", f"{key}={value}: neither true nor false")


def _unused_alone(options: argparse.Namespace) -> list[str]:
    met = ("rdzv_backend", "rdzv_endpoint", "node_rank", "master_addr", "master_port", "local_addr")
    return _given(options, *met, *(() if apart(options) else ("tls_cert", "tls_key", "tls_ca")))


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    """Those that somebody gave, as flags."""
    return ["--" + name.replace("_", "-") for name in names if options.given(name)]
