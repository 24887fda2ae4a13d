"""What can be known to be wrong before anything is started: options that contradict, places, ports, files, too many workers."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from dlrover_adapters.cli import meeting as meetings
from dlrover_adapters.cli.kernel import lacking
from dlrover_core.errors import LaunchFailed, SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.torchrun_flags import Options

WORKERS_PER_CPU_MAX = 64
WORKERS_MIN = 256
"""So many workers are never refused for want of CPUs: worlds are tried out on small machines."""

WORKER_BYTES = 32 * 2**20
"""What a forked worker takes at the very least before it has done anything."""

AGENT_BYTES = 128 * 2**20
"""The same of an agent and the warm process that its workers are forked from."""

# Where a GPU's driver is, some of these are: NVIDIA's, Jetson's, AMD's, that of Windows' Linux; Intel's.
_DRIVERS = {
    "gpu": ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/nvgpu*", "/dev/kfd", "/dev/dxg"),
    "xpu": ("/dev/dri*", "/dev/dxg"),
}
_FILES = ("token_file", "tls_cert", "tls_key", "tls_ca", "policy", "signatures")
_TYPED = "--"


def check(options: Options) -> None:
    """Raises `SpecError` that names the option, its value, and what to type instead."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise SpecError("cwd", "the current folder was removed; cd to one that is there, and start again") from error
    _check_contradictions(options)
    _check_rendezvous(options)
    for name in _FILES:
        path = getattr(options, name)
        if path is not None:
            _check_file(name.replace("_", "-"), path)
    _check_log(options.log)
    if options.log_dir and options.log_dir != os.devnull:
        _check_folder("log-dir", options.log_dir)


def _check_contradictions(options: Options) -> None:
    met = [f"--{name.replace('_', '-')}" for name in ("rdzv_endpoint", "master_addr") if _typed(options, name)]
    wrong = (
        (options.run_path and options.no_python, "run-path", "--run-path and --no-python exclude one another"),
        (options.run_path and options.module, "run-path", "--run-path and -m exclude one another"),
        (
            options.no_python and options.preload not in ("", "none", "auto"),
            "preload",
            f"{options.preload!r}, but with --no-python nothing is imported for the program; leave one of them out",
        ),
        (
            options.master is not None and not options.master.strip(", "),
            "master",
            f"{options.master!r} names no master; say HOST or HOST:PORT",
        ),
        (
            options.master and options.standalone,
            "master",
            f"{options.master!r}, but --standalone is one host alone; leave one of them out",
        ),
        (
            options.master and options.local_nodes is not None,
            "local-nodes",
            f"{options.local_nodes} nodes on this host, but with --master each host is one node; leave one of them out",
        ),
        (
            bool(options.master and met),
            "master",
            f"{options.master!r} and {' and '.join(met)} both say where the masters are; leave one of them out",
        ),
    )
    for is_wrong, name, why in wrong:
        if is_wrong:
            raise SpecError(name, why)


def _typed(options: Options, name: str) -> bool:
    """On the command line: what a platform has put into the environment contradicts nobody."""
    return options.origin(name).startswith(_TYPED)


def _check_rendezvous(options: Options) -> None:
    """Also where one host alone needs none of it: a port that cannot be is a mistake."""
    if options.rdzv_endpoint:
        # Port 0 is torchrun's word for one host: any free port.
        meetings.parse_endpoint("rdzv-endpoint", options.rdzv_endpoint.strip().removesuffix(":0"))
    if options.given("master_port") and not 0 <= options.master_port < 2**16:
        raise SpecError("master-port", f"{options.master_port} is not a port from 1 to 65535")
    for name in ("master_addr", "local_addr"):
        text = getattr(options, name)
        if options.given(name) and text:
            meetings.parse_endpoint(name.replace("_", "-"), f"[{text.strip('[]')}]")


def _check_file(name: str, path: str) -> None:
    try:
        # What is no regular file, such as a pipe that a shell made, can be read once only.
        if os.path.isfile(path) or not os.path.exists(path):
            with open(path, "rb"):
                pass
    except OSError as error:
        raise SpecError(name, f"{path!r} cannot be read: {error.strerror}") from error
    if os.path.isdir(path):
        raise SpecError(name, f"{path!r} is a folder; name the file in it")


def _check_folder(name: str, path: str) -> None:
    """Can files be made in ``path``, once the folder is made?"""
    there = _existing(Path(path).absolute())
    if not there.is_dir():
        raise SpecError(
            name, f"cannot be made or written to: {path!r}, as {str(there)!r} is not a folder; name another"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise SpecError(name, f"cannot be made or written to: {path!r}, in a folder of another user; name one of yours")


def _existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    return next(one for one in (path, *path.parents) if one.exists() or one == one.parent)


def _check_log(url: str | None) -> None:
    if url is None:
        return
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise SpecError("log", f"{url!r} is no URL; say sqlite:///absolute/path/log.db, or etcd://HOST:2379/PREFIX")
    if scheme == "memory":
        raise SpecError(
            "log", "a log in memory ends with its process, and masters are processes of their own; say sqlite"
        )
    if scheme in ("http", "https"):
        raise SpecError("log", f"{url!r} only reads the log of a job that runs; say sqlite or etcd")
    if scheme == "sqlite":
        _check_sqlite(url)
    elif scheme == "etcd":
        from dlrover_adapters.etcd import address

        address.parse(url)
    else:
        from dlrover_core.logs import find_opener

        find_opener(scheme)


def _check_sqlite(url: str) -> None:
    path = _sqlite_path(url)
    if path is None:
        return
    if path.is_dir():
        raise SpecError("log", f"{str(path)!r} is a folder; name a file in it: sqlite://{path}/log.db")
    there = _existing(path)
    if not os.access(there, os.W_OK if there == path else os.W_OK | os.X_OK):
        raise SpecError("log", f"{str(path)!r} cannot be written to; name another place with --log or --state-dir")


def _sqlite_path(url: str) -> Path | None:
    """The file of a log; None: the default one."""
    try:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
    except ValueError as error:
        raise SpecError("log", f"{url!r} is no URL: {error}") from error
    if parts.netloc or set(options) - {"archive"}:
        known = "sqlite:///absolute/path, sqlite:relative/path or sqlite:, with ?archive=URL if need be"
        raise SpecError("log", f"{url!r} is not {known}")
    return Path(unquote(parts.path)).absolute() if parts.path else None


def make_log_folder(url: str) -> None:
    """Make the folder of a log in SQLite as its first leader would. Raises `SpecError`."""
    path = _sqlite_path(url) if url.startswith("sqlite:") else None
    if path is None:
        return
    from dlrover_core.logs.place import make_dirs

    try:
        make_dirs(path.parent)
    except OSError as error:
        raise SpecError(
            "log", f"{str(path)!r} cannot be made: {error.strerror}; name another place with --log or --state-dir"
        ) from error


def check_tls(cert: str, key: str, ca: str) -> None:
    """Look into the files of TLS. Raises `SpecError`."""
    if not (cert or key or ca):
        return
    from dlrover_adapters.http import tls  # only where it is asked for

    if cert and ca:
        tls.check(cert, key, ca)
    elif cert:
        tls.shown(cert, key)
    else:
        tls.trusting(ca)


# ---- the kernel


def check_kernel() -> None:
    """Raises `LaunchFailed` where nothing could be started, whatever the command line."""
    lacks = lacking()
    if lacks:
        raise LaunchFailed(f"no process can be kept here: {lacks}; dlrover doctor looks at the rest")


# ---- sizes


def check_size(options: Options, nproc: int) -> None:
    """Raises `SpecError` for more workers or agents on this host than could ever run."""
    nodes, cpus = options.local_nodes or 1, _cpus()
    workers, agents = nodes * nproc, nodes + options.standby
    given = {"nproc-per-node": nproc, "local-nodes": nodes, "standby": options.standby}
    name = max(given, key=lambda one: given[one])
    asked = f"{given[name]} is too many: {workers} workers and {agents} agents"
    fit = max(WORKERS_MIN, WORKERS_PER_CPU_MAX * cpus)
    if max(workers, agents) > fit:
        raise SpecError(name, f"{asked} on this host's {cpus} CPUs, at most {fit}; --nproc-per-node auto suits it")
    if max(workers, agents) <= cpus:
        return
    needed, there = workers * WORKER_BYTES + agents * AGENT_BYTES, _memory_bytes()
    if needed > there:
        raise SpecError(
            name,
            f"{asked} take at least {needed / 2**30:.1f} GiB, and this host has {there / 2**30:.1f} GiB; say fewer",
        )


def check_total(workers: int, agents: int) -> None:
    """The same for all groups of a job together. Raises `SpecError`."""
    cpus = _cpus()
    fit = max(WORKERS_MIN, WORKERS_PER_CPU_MAX * cpus)
    if max(workers, agents) > fit:
        raise SpecError(
            "groups",
            f"{workers} workers and {agents} agents are too many for this host's {cpus} CPUs, at most {fit}; say fewer",
        )
    needed, there = workers * WORKER_BYTES + agents * AGENT_BYTES, _memory_bytes()
    if max(workers, agents) > cpus and needed > there:
        raise SpecError(
            "groups",
            f"{workers} workers and {agents} agents take at least {needed / 2**30:.1f} GiB, and this host has "
            f"{there / 2**30:.1f} GiB; say fewer",
        )


def warnings(workers: int) -> Iterator[str]:
    """What may be meant so, and mostly is a mistake."""
    cpus = _cpus()
    if workers > cpus:
        yield f"{workers} workers share {cpus} CPUs: they will wait for one another"


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) or 1


def _memory_bytes() -> int:
    """This host's memory, or as much of it as its control group may use."""
    from dlrover_adapters.cli import doctor_machine

    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(host, doctor_machine.cgroup().memory_bytes or host)


def has_driver(kind: str) -> bool:
    """May there be a device of this kind (``gpu``, ``xpu``)? Without a driver torch, which takes seconds, need not be asked."""
    return any(glob.glob(one) for one in _DRIVERS[kind])
