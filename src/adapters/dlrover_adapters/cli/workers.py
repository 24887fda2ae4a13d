"""How workers are started, from the command line to the agent: what `Settings` holds of it, and `LaunchConfig` takes from it."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dlrover_adapters.agent.config import AUTO, Mode, parse_streams
from dlrover_core.diagnosis.slots import DETECT_VARIABLE, GRADS_VARIABLE
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_adapters.cli.torchrun_flags import Options

LAUNCH_DURATIONS = ("finish_s", "ready_s", "probe_s", "start_s", "refill_s", "hung_s")
"""Durations of the job's spec that a node's launcher keeps."""


def settings(options: Options) -> dict[str, Any]:
    """The fields of `Settings` that say how workers are started. Raises `SpecError`."""
    from dlrover_adapters.cli import before, programs
    from dlrover_adapters.cli import options as cli_options
    from dlrover_adapters.cli.backend_flags import apart, in_images

    mode, argv = program(options)
    warm = preload(options.preload)
    if not in_images(options):
        programs.check(mode, argv, warm)
    nproc = cli_options.workers(options.nproc_per_node)
    if not apart(options):
        before.check_size(options, nproc)
    quiet = options.log_dir == os.devnull  # torchrun's word for: keep nothing
    streams = {
        name: tuple(int(one) for one in parse_streams(name, "0" if quiet else getattr(options, name), nproc))
        for name in ("redirects", "tee")
    }
    _check_warmth()
    if options.virtual_local_rank:
        _check_devices(nproc)
    return {
        "argv": argv,
        "nproc": nproc,
        "mode": mode.value,
        "role": options.role,
        "preload": warm,
        "log_dir": os.path.abspath(options.log_dir) if options.log_dir and not quiet else None,
        **streams,
        "show": _shown(options.local_ranks_filter, nproc),
        "duplicate_stdout": options.duplicate_stdout_filters,
        "duplicate_stderr": options.duplicate_stderr_filters,
        "log_bytes_max": options.log_bytes_max,
        "log_attempts_max": options.log_attempts_max,
        "run_id": run_id(options),
        "numa": options.numa_binding or "",
        "virtual_local_rank": options.virtual_local_rank,
        "signals": tuple(int(one) for one in cli_options.signals(options.signals_to_handle)),
    }


def _shown(text: str, nproc: int) -> tuple[int, ...] | None:
    from dlrover_adapters.cli import values

    ranks = values.ranks_filter(text)
    if ranks and min(ranks) >= nproc:
        raise SpecError("local-ranks-filter", f"{text!r}: local ranks go from 0 to {nproc - 1}; nothing would be shown")
    return ranks


def log_dir(how: Mapping[str, Any]) -> str | None:
    """The folder for output that is kept, made if need be; one of its own where none is named. Raises `SpecError`."""
    named: str | None = how["log_dir"]
    if named is None:
        asked = any((*how["redirects"], *how["tee"]))
        return tempfile.mkdtemp(prefix="torchelastic_") if asked else None
    try:
        os.makedirs(named, exist_ok=True)
    except OSError as error:
        # A full disk is no reason not to train: output is then only shown.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise SpecError("log-dir", f"cannot be made or written to: {error}") from error
    return named


def store_at(named: tuple[str, int] | None, *, typed: bool = True) -> str:
    """Where every generation's store is to listen: the ``named`` host and port, which is free. Raises `SpecError`.

    Empty where none is named, or where the environment, and nobody who ``typed`` it, names a host that is not this one (a
    service in front of it, say): then each has a free port, which is said.
    """
    if named is None:
        return ""
    from dlrover_adapters.cli import hosts

    host, port = named
    # A script that dials localhost tries all of its addresses, one that dials 127.0.0.1 just that.
    found = sorted((one for one in hosts.resolved(host) if hosts.is_ours(one)), key=lambda one: ":" in one)
    if not found and typed:
        raise SpecError(
            "master-addr",
            f"{host!r} is no address of this host, so a script that connects to {hosts.joined(host, port)} would wait for ever; "
            "name localhost, or leave --master-addr and --master-port out and have the script read them from its environment",
        )
    if not found:
        print(
            f"dlrover-run: {host} (PET_MASTER_ADDR) is no address of this host: the store has a free port of 127.0.0.1, and a "
            f"script that connects to {hosts.joined(host, port)} waits for ever. It must read MASTER_ADDR and MASTER_PORT",
            file=sys.stderr,
        )
        return ""
    try:
        hosts.listen(found[0], port).close()
    except OSError as error:
        raise SpecError(
            "master-port",
            f"the store cannot listen at {hosts.joined(found[0], port)}: {os.strerror(error.errno or 0)}; name another port, "
            "or none: then each attempt has a free one, and MASTER_PORT says which",
        ) from error
    return hosts.joined(found[0], port)


def launch_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `LaunchConfig` in what `Settings` wrote down, beyond those that the agent reads one by one."""
    names = ("duplicate_stdout", "duplicate_stderr", "signals")
    plain = ("imports", "log_bytes_max", "log_attempts_max", "run_id", "numa", "virtual_local_rank", "store_at")
    found = {name: raw[name] for name in (*plain, "group", "env", "framework", "stores") if name in raw}
    found.update({name: tuple(raw[name]) for name in names if name in raw})
    if raw.get("show") is not None:
        found["show"] = tuple(raw["show"])
    if raw.get("watch_grads"):
        found["env"] = {**found.get("env", {}), GRADS_VARIABLE: "1"}
    if not raw.get("detect", True):
        found["env"] = {**found.get("env", {}), DETECT_VARIABLE: "off"}
    spec = json.loads(raw["spec"])
    found["by_place"] = len(spec.get("groups", ())) > 1
    own: dict[str, Any] = next((one for one in spec.get("groups", ()) if one.get("name") == raw.get("group")), {})
    told = {**spec, **{name: one for name, one in own.items() if one is not None}}
    return {**found, **{name: told[name] for name in LAUNCH_DURATIONS if name in told}}


def program(options: Options) -> tuple[Mode, tuple[str, ...]]:
    """How the program is named, and its arguments. Raises `SpecError`."""
    argv = (options.script, *options.arguments)
    mode = _mode(options)
    python = os.environ.get("PYTHON_EXEC")
    if python and mode in (Mode.SCRIPT, Mode.MODULE) and python != sys.executable:
        # Another interpreter, as torchrun lets it be named: it shares nothing with the one that we run on.
        return Mode.COMMAND, (python, "-u", *(("-m",) if mode is Mode.MODULE else ()), *argv)
    return mode, argv


def _mode(options: Options) -> Mode:
    if options.run_path:
        return Mode.RUN_PATH
    if options.module and options.no_python:
        raise SpecError("script", "-m and --no-python exclude one another")
    return Mode.MODULE if options.module else Mode.COMMAND if options.no_python else Mode.SCRIPT


def preload(text: str) -> tuple[str, ...] | None:
    """The modules that ``--preload`` names; None: no warm process."""
    return None if text == "none" else tuple(one for one in _words(text) if one != AUTO)


def ahead(text: str) -> bool:
    """Does ``--preload`` ask for what workers of this script were seen to import?"""
    return AUTO in _words(text)


def imports(text: str, folder: str) -> str:
    """``folder``, where ``--preload`` asks for lists of imports; empty, with a line on stderr, where they cannot be learnt."""
    from dlrover_adapters.agent import import_watch

    if not ahead(text):
        return ""
    if fault := import_watch.unwatchable():
        print(
            f"dlrover-run: --preload auto does nothing in this interpreter: {fault}. Name modules: --preload A,B",
            file=sys.stderr,
        )
        return ""
    return folder


def _words(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def run_id(options: Options) -> str:
    """What workers see as TORCHELASTIC_RUN_ID, if somebody named it; else the run's own id."""
    return "" if options.standalone or options.rdzv_id == "none" else str(options.rdzv_id)


def _check_warmth() -> None:
    # The zygote would say so too, to whom nobody listens yet.
    if (warm := os.environ.get("DLROVER_WARM", "all")) not in {"all", "core"}:
        raise SpecError("DLROVER_WARM", f"is 'all' or 'core', got {warm!r}")


def _check_devices(nproc: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < nproc:
        raise SpecError(
            "virtual-local-rank", f"{nproc} workers, but CUDA_VISIBLE_DEVICES={visible} names fewer devices than that"
        )
