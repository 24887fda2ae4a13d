"""The agent of a node that a scheduler starts: ``dlrover-run ... SCRIPT`` with ``DLROVER_NODE`` in its environment.

With ``DLROVER_STANDBY`` in place of it the agent has no name yet: it prepares everything, and waits until a master gives it one.

The command line says how workers are started, as everywhere; what belongs to one node, and to the job, comes by the environment
(`VARIABLES`). What a launcher alone needs (log, rendezvous, sizes, policy) is left aside. It may be the first process of a
container, run as any user, and need no more than one directory that takes files.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dlrover_adapters.cli import ray_flags, usage
from dlrover_core.errors import SpecError
from dlrover_core.job.names import group_of
from dlrover_core.job.nodes import STANDBY_SEAT

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings
    from dlrover_adapters.cli.torchrun_flags import Options

NODE, STANDBY, SEAT = "DLROVER_NODE", "DLROVER_STANDBY", "DLROVER_SEAT"
TOKEN, TOKEN_FILE = "DLROVER_TOKEN", "DLROVER_TOKEN_FILE"  # names of variables
VARIABLES = {
    NODE: "the node's name in the job, as the backend was told it (worker-0-0); it makes the command an agent",
    STANDBY: "in place of a node's name: the group (worker) whose next node this agent becomes, once a master says which",
    SEAT: "of a standby: what its backend calls its place",
    "DLROVER_MASTERS": "HOST:PORT of each master, comma separated",
    TOKEN: "the job's token",
    TOKEN_FILE: "the file that it lies in, in place of the former",
    "DLROVER_JOB": "the job's name",
    "DLROVER_RUN": "the run that the node belongs to; masters of another one send it away (default: whichever is led)",
    "DLROVER_NPROC": "workers on this node (default: --nproc-per-node)",
    "DLROVER_HOST": "the host's name, as the platform has it (default: the host name that the kernel says)",
    "DLROVER_ADDRESS": "where other nodes reach this one (default: the address that packets to the master come from)",
}
OWN = (
    NODE,
    STANDBY,
    SEAT,
    "DLROVER_MASTERS",
    TOKEN_FILE,
    "DLROVER_JOB",
    "DLROVER_RUN",
    "DLROVER_NPROC",
    "DLROVER_ADDRESS",
)
"""Those that workers do not inherit: a `dlrover-run` in a script is a launcher again."""

DROPPED: dict[str, Any] = {
    "nnodes": None,
    "local_nodes": None,
    "standalone": False,
    "master": None,
    "backend": None,
    "image": None,
    "gang": None,
    "queue": None,
    **dict.fromkeys(ray_flags.FLAGS),
    "log": None,
    "policy": None,
    "token_file": None,
    "standby": 0,
    "progress": "off",
    "rdzv_endpoint": "",
    "master_addr": "127.0.0.1",
    "master_port": None,
}
"""Options of launchers, and what they are for an agent."""


def run(options: Options) -> int:
    """Be the agent that the environment names, until it is told to go; the exit status."""
    # A container's first process has no default action for signals: an early SIGTERM would be lost.
    signal.signal(signal.SIGTERM, _ended)
    try:
        told = _told(os.environ)
        _find_homes(os.environ)
        os.environ[TOKEN] = _token(told)
        return _serve(_settings(options, told), told[NODE])
    except SpecError as error:
        return usage.say("dlrover-run", error)


def _ended(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _told(environ: MutableMapping[str, str]) -> dict[str, str]:
    """What the scheduler says, taken out of the environment. Raises `SpecError`."""
    told = {name: environ.get(name, "").strip() for name in VARIABLES}
    for name in OWN:
        environ.pop(name, None)
    for name in ("DLROVER_MASTERS", "DLROVER_JOB"):
        if not told[name]:
            raise SpecError(name, f"missing, and with {_whose(told)}: {VARIABLES[name]}")
    if told[STANDBY] and told[NODE]:
        raise SpecError(STANDBY, f"{told[STANDBY]!r}, beside {NODE}={told[NODE]}: leave one of them out")
    if told[STANDBY] and not told[SEAT]:
        raise SpecError(SEAT, f"missing, and with {_whose(told)}: {VARIABLES[SEAT]}")
    nproc = told["DLROVER_NPROC"]
    if nproc and not (nproc.isascii() and nproc.isdecimal() and int(nproc)):
        raise SpecError("DLROVER_NPROC", f"{nproc!r} is not a number of workers")
    return told


def _whose(told: Mapping[str, str]) -> str:
    if told[STANDBY]:
        return f"{STANDBY}={told[STANDBY]} this command is a standby's agent"
    return f"{NODE}={told[NODE]} this command is that node's agent"


def _token(told: dict[str, str]) -> str:
    from dlrover_adapters.http.token import load_token

    token = load_token(told, told[TOKEN_FILE] or None)
    if not token:
        raise SpecError(TOKEN, f"missing, and with {_whose(told)}: {VARIABLES[TOKEN]}")
    return token


def _find_homes(environ: MutableMapping[str, str]) -> None:
    """Let libraries find a user's name and directories where the system knows none: any uid, a root that is read-only."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        for name in ("USER", "LOGNAME"):
            environ.setdefault(name, str(os.getuid()))
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        temporary = tempfile.tempdir = environ["TMPDIR"] = _roof(environ)
    home = environ.get("HOME", "")
    if not home or not os.access(home, os.W_OK | os.X_OK):
        environ["HOME"] = temporary


def _roof(environ: Mapping[str, str]) -> str:
    """A directory that takes files, where no usual one does. Raises `SpecError`."""
    for one in ("/dev/shm", environ.get("XDG_RUNTIME_DIR", "")):  # noqa: S108  # what is made in it is ours alone
        if one and os.access(one, os.W_OK | os.X_OK):
            return one
    raise SpecError(
        "TMPDIR",
        "no directory takes files: neither TMPDIR, nor /tmp, nor /dev/shm; mount one (in Kubernetes an emptyDir at /tmp), or set "
        "TMPDIR to one that is there",
    )


def _settings(options: Options, told: dict[str, str]) -> Settings:
    """How workers are started here. Raises `SpecError`."""
    from dlrover_adapters.cli import check_flags, groups
    from dlrover_adapters.cli import options as cli_options
    from dlrover_adapters.cli.settings import Settings

    vars(options).update(DROPPED, job_id=told["DLROVER_JOB"], rdzv_id="none")
    if told["DLROVER_NPROC"] and not groups.are_given(options):
        options.nproc_per_node = told["DLROVER_NPROC"]
    groups.taken_in(options)
    cli_options.check(options)
    group = told[STANDBY] or group_of(told[NODE])
    found = groups.plans(options, only=group)
    own = [one for one in found if one.name == group]
    if groups.are_given(options) and not own:
        known = ", ".join(one.name for one in found)
        name = STANDBY if told[STANDBY] else NODE
        raise SpecError(name, f"{told[name]!r} is of group {group!r}, and the job has: {known}")
    own = own or [found[0]]
    groups.make_log_dirs(own)
    tls = cli_options.tls_files(options, shows=False, dials=True)
    how = {**groups.launch(own, _imports(options.state_dir)), "group": group}
    return Settings(
        spec=groups.spec(options, told["DLROVER_JOB"], found).to_json(),
        run=told["DLROVER_RUN"],
        mark=secrets.token_hex(6),
        log="",
        directory="",
        seat=f"{STANDBY_SEAT}{told[SEAT]}" if told[STANDBY] else "",
        masters=_masters(told["DLROVER_MASTERS"]),
        address=told["DLROVER_ADDRESS"] or options.local_addr or "",
        **how,
        tls_cert=tls.cert,
        tls_key=tls.key,
        tls_ca=tls.ca,
        detect=options.detect == "on",
        watch_grads=options.watch_grads,
        check_scripts=check_flags.scripts(options),
        log_level=options.log_level,
    )


def _masters(text: str) -> tuple[str, ...]:
    from dlrover_adapters.cli import hosts
    from dlrover_adapters.cli.meeting import parse_endpoint

    named = (parse_endpoint("DLROVER_MASTERS", one) for one in text.split(",") if one.strip())
    return tuple(dict.fromkeys(hosts.joined(*one) for one in named))


def _imports(state_dir: str | None) -> str:
    """Where lists of what scripts import are kept from run to run; a directory that goes with this node, where none lasts."""
    from dlrover_core.logs.place import default_state_dir

    try:
        return str((Path(state_dir).absolute() if state_dir else default_state_dir()) / "imports")
    except (OSError, RuntimeError):
        return f"{tempfile.gettempdir()}/dlrover-imports-{os.getuid()}"


def _serve(settings: Settings, node: str) -> int:
    """From the zygote, which is started first of all, to the last word."""
    from dlrover_adapters.agent.spawn import spawn_zygote
    from dlrover_adapters.cli import hosts, scratch
    from dlrover_adapters.cli.agent import launch_config

    os.environ[scratch.MARK] = settings.mark
    place = hosts.place(settings.masters[0], settings.address)
    settings = dataclasses.replace(settings, address=place.address, store_bind=place.bind)
    config = launch_config(_raw(settings), settings.job.job, node)
    first = spawn_zygote(config) if config.warm else None
    with scratch.folder(settings.mark) as folder:
        from dlrover_adapters.cli.agent_process import serve

        settings = dataclasses.replace(settings.placed(folder), directory=str(folder), control_log="")
        code = serve(_raw(settings), config._replace(run_dir=str(folder)), first, None, node)
    return code


def _raw(settings: Settings) -> dict[str, Any]:
    return dataclasses.asdict(settings)
