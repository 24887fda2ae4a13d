"""The command line of `dlrover-run`: torchrun's spelling and meaning (`torchrun_flags`), and ours beside it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_adapters.cli import (
    backend_flags,
    before,
    check_flags,
    dlrover_flags,
    job_flags,
    policies,
    run_flags,
    torchrun_flags,
    usage,
    values,
)
from dlrover_adapters.cli import meeting as meetings
from dlrover_adapters.cli.examples import EPILOG
from dlrover_adapters.cli.places import shown
from dlrover_adapters.cli.torchrun_flags import Given, MayBeEmpty, Nodes, Options
from dlrover_core.errors import SpecError
from dlrover_core.spec import NAME_BYTES_MAX, NODES_MAX, ON_JOIN, GroupSpec, JobSpec

LOG_BYTES_MAX = 128 * 1024 * 1024
LOG_BYTES_MIN = 64 * 1024
LOG_ATTEMPTS_MAX = 10


def parser() -> argparse.ArgumentParser:
    """The parser. Building it imports nothing slow, so that --help is instant. Raises `SpecError` for a bad ``PET_``."""
    made = usage.Parser(
        prog="dlrover-run",
        usage="dlrover-run [options] SCRIPT [arguments of the script ...]\n       dlrover-run [options] --job FILE.toml",
        description="Run a distributed training script, in place of torchrun, and keep it running.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="store_true", help="print the distribution and its version")
    _show_config(made)
    known = made.add_argument_group("as under torchrun")
    torchrun_flags.size(known)
    torchrun_flags.program(known)
    torchrun_flags.output(known)
    torchrun_flags.ending(known)
    torchrun_flags.meeting(made.add_argument_group("several hosts, as under torchrun"))
    _hosts(made.add_argument_group("several hosts, ours"))
    scheduler = made.add_argument_group("nodes that a scheduler starts")
    backend_flags.arguments(scheduler)
    backend_flags.bind(scheduler)
    job_flags.add(made.add_argument_group("several groups of nodes"))
    ours = made.add_argument_group("of dlrover-core")
    _policy(ours)
    _ours(ours)
    run_flags.detached(ours)
    _places(ours)
    dlrover_flags.add(made.add_argument_group("as under DLRover"))
    torchrun_flags.unused(made.add_argument_group("accepted from torchrun, and not needed"))
    made.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    made.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def job_arguments(group: argparse._ArgumentGroup) -> None:
    """What describes a job without its script: for a command that runs only the masters."""
    torchrun_flags.size(group)
    torchrun_flags.names(group)
    _policy(group)
    _token(group)
    _tls(group)
    _places(group)


def parse(argv: Sequence[str] | None = None) -> Options:
    """What the command line and the environment say; wrong usage leaves through argparse, with 2."""
    made = parser()
    return noted(made, made.parse_args(argv, namespace=Options()))


def noted(made: argparse.ArgumentParser, options: Options) -> Options:
    """The options, with the variables that defaults came from among their origins."""
    for action in made._actions:
        variable = getattr(action, "variable", None)
        if variable is not None and getattr(action, "told", False) and not options.given(action.dest):
            options.note(action.dest, variable)
    dlrover_flags.taken_in(options)
    backend_flags.here(options)
    return options


def standard() -> Options:
    """What would be if nobody had said anything, not even the environment."""
    options = Options()
    for action in parser()._actions:
        setattr(options, action.dest, getattr(action, "standard", action.default))
    return options


def _show_config(made: argparse.ArgumentParser) -> None:
    # Spelled out, because as an option with an optional value it would take the script for it.
    for spelling, form in (
        ("--show-config", "table"),
        ("--show-config=json", "json"),
        ("--show-config=table", "table"),
    ):
        first = spelling == "--show-config"
        made.add_argument(
            spelling,
            dest="show_config",
            action="store_const",
            const=form,
            help="print every effective setting and its origin, as a table or with =json, and run nothing"
            if first
            else argparse.SUPPRESS,
        )


def _hosts(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--master",
        action=Given,
        default=None,
        metavar="ADDR[,ADDR]",
        help="only an agent here: the masters run there (dlrover master), port 29400 unless said",
    )
    _token(ours)
    _tls(ours)


def _tls(ours: argparse._ArgumentGroup) -> None:
    for name, text in (
        (
            "cert",
            "this host's certificate and its intermediate CAs (PEM). Masters show it to agents, which dial a name that it has; "  # noqa: ISC004
            "savers show it to each other. A host with --tls-ca alone keeps no copies for other hosts, and gets none kept",
        ),
        ("key", "its private key, if that is not in the same file"),
        (
            "ca",
            "CA (PEM) by which this host checks masters and other hosts' savers; hosts that have it encrypt what they send",
        ),
    ):
        ours.add_argument(f"--tls-{name}", action=Given, default=None, metavar="FILE", help=text)


def _token(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--token-file",
        action=Given,
        default=None,
        metavar="FILE",
        help="file with the secret that all hosts of a job share (or DLROVER_TOKEN); one host makes its own",
    )


def _policy(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--on-join",
        action=Given,
        choices=ON_JOIN,
        default="restart",
        help="a late node restarts a smaller world (default); planned: only at a step boundary; never: the next restart adds it",
    )
    ours.add_argument(
        "--relaunch-max",
        action=Given,
        type=int,
        default=3,
        metavar="N",
        help="relaunches of one node before it is given up (default 3)",
    )
    check_flags.policy(ours)
    ours.add_argument(
        "--hang-timeout",
        action=Given,
        type=values.seconds,
        default=None,
        metavar="SECONDS",
        help="time without a step, at least, until the rank that hangs is named and all restart; 0: never (default 60)",
    )
    ours.add_argument(
        "--hang-action",
        action=Given,
        choices=("restart", "report"),
        default="restart",
        help="a rank that hangs: restart the processes (default), or only report it",
    )
    ours.add_argument(
        "--slow-action",
        action=Given,
        choices=("report", "replace"),
        default="report",
        help="a rank that computes slower than it did: only report it (default), or replace its node once "
        "it has cost as much time as a replacement takes",
    )
    ours.add_argument(
        "--signatures",
        action=Given,
        default=None,
        metavar="FILE.toml",
        help="signatures of your own failures, beside those of 'dlrover signatures' (docs/diagnosis.md)",
    )
    ours.add_argument(
        "--policy",
        action=Given,
        default=None,
        metavar="FILE",
        help="TOML with your own numbers for what is done about failures, and a hook; an unknown name prints all names",
    )
    ours.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=SECONDS",
        help="a duration of the job's spec: stop_grace_s=60, or hung_s=5 (a process of ours that does not answer for so long is "
        "killed and replaced; 0: never); an unknown name prints all names",
    )


def _ours(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--preload",
        action=MayBeEmpty,
        default="auto",
        metavar="MODULES",
        help="modules to import once for all workers, comma separated; 'auto' (default): those that workers of this script "
        "imported by their first step in an earlier run; '': torch alone; 'none': do not fork from a warm process",
    )
    ours.add_argument(
        "--local-nodes",
        action=Given,
        type=int,
        default=None,
        metavar="N",
        help="nodes on this host, each with its own agent (default 1)",
    )
    ours.add_argument(
        "--standby",
        action=Given,
        type=int,
        default=0,
        metavar="N",
        help="agents kept warm to take a dead node's place: on this host, in pods, or in actors of Ray (default 0)",
    )
    ours.add_argument(
        "--log-bytes-max",
        action=Given,
        type=values.size_in_bytes,
        default=LOG_BYTES_MAX,
        metavar="SIZE",
        help="room of one log file, and of a detached job's output: beyond it the middle is left out; 512K, 1G, 0: no bound "
        "(default 128M)",
    )
    ours.add_argument(
        "--log-attempts-max",
        action=Given,
        type=int,
        default=LOG_ATTEMPTS_MAX,
        metavar="N",
        help="attempts whose logs are kept, the first and the newest; 0: all (default 10)",
    )
    ours.add_argument(
        "--watch-grads",
        action="store_true",
        help="check the norm of the gradients now and then: NaN or infinity is a failure (default off)",
    )
    ours.add_argument(
        "--detect",
        action=Given,
        choices=("on", "off"),
        default="on",
        help="look for signs of failures: in workers' output, costs and losses, the kernel's log, OOM counters (default on)",
    )
    check_flags.here(ours)
    ours.add_argument(
        "--progress",
        action=Given,
        choices=("auto", "on", "off"),
        default="auto",
        help="a live line about the job (auto: on a terminal)",
    )


def _places(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--job-id",
        action=Given,
        default=None,
        metavar="NAME",
        help="the job's name; a new run continues that name's history (default: --rdzv-id, or made from the script's)",
    )
    run_flags.owned(ours)
    ours.add_argument(
        "--log",
        action=Given,
        default=None,
        metavar="URL",
        help="the event log (default: sqlite in the state directory); etcd://HOST:2379,HOST:2379/PREFIX is shared by hosts",
    )
    ours.add_argument(
        "--state-dir",
        action=Given,
        default=None,
        metavar="DIR",
        help="where logs and sockets live (default: ~/.local/state/dlrover)",
    )
    ours.add_argument(
        "--log-level",
        action=Given,
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="detail of the control log (default info)",
    )


# ---- what the options mean


def workers(text: str) -> int:
    """``--nproc-per-node`` as a number. Raises `SpecError`."""
    number = values.whole(text)
    if number:
        return number
    if text not in ("auto", "cpu", "gpu", "xpu"):
        raise SpecError("nproc-per-node", f"{text!r} is not a number, nor one of auto, cpu, gpu, xpu")
    devices = _devices(text) if text == "auto" or (text != "cpu" and before.has_driver(text)) else 0
    if text in ("gpu", "xpu") and not devices:
        name = {"gpu": "CUDA", "xpu": "XPU"}[text]
        raise SpecError("nproc-per-node", f"{text}: no {name} device is visible; say cpu, or a number")
    return devices or len(os.sched_getaffinity(0)) or 1


def _devices(kind: str) -> int:
    from dlrover_adapters.torch import devices  # only here: it imports torch, and a number needs none of it

    return devices.count(kind)


def signals(text: str) -> tuple[signal.Signals, ...]:
    """``--signals-to-handle``. Raises `SpecError`."""
    found = []
    for name in (one.strip() for one in text.split(",") if one.strip()):
        known = signal.Signals.__members__.get(name)
        if known is None or known in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise SpecError(
                "signals-to-handle", f"{name!r} is not a signal that can be handled; say for example SIGTERM,SIGUSR1"
            )
        found.append(known)
    return tuple(dict.fromkeys(found))


def size(options: Options) -> Nodes:
    """Fewest and most nodes. Raises `SpecError`."""
    local: int | None = options.local_nodes
    asked: Nodes | None = options.nnodes
    if local is not None and local < 1:
        raise SpecError("local-nodes", f"at least one node is needed, got {local}")
    if asked is None:
        return Nodes(local or 1, local or 1)
    if not 1 <= asked.fewest <= asked.most <= NODES_MAX:
        raise SpecError("nnodes", f"need 1 <= MIN <= MAX <= {NODES_MAX}, got {asked}")
    if local is not None and asked.most != local:
        raise SpecError("nnodes", f"{asked.most} nodes, but --local-nodes {local}: on one host they must be as many")
    if options.standalone and asked.most > 1 and local is None:
        raise SpecError(
            "nnodes", f"--standalone is for one host; --local-nodes {asked.most} runs {asked.most} nodes on this one"
        )
    return asked


def meeting(options: Options) -> meetings.Meeting:
    """Where this host's nodes meet the others. Raises `SpecError`."""
    return meetings.read(options, size(options).most)


class TlsFiles(NamedTuple):
    """The files of TLS as masters and agents find them; empty: none."""

    cert: str = ""
    key: str = ""
    ca: str = ""


def tls_files(options: Options, *, shows: bool, dials: bool) -> TlsFiles:
    """What is given, looked into: by a host that may run masters, which ``shows``, and one that ``dials``. Raises `SpecError`.

    A host without masters needs no certificate, unless states are to go between its saver and others.
    """
    told = (options.tls_cert, options.tls_key, options.tls_ca)
    found = TlsFiles(*(str(Path(path).absolute()) if path else "" for path in told))
    if not found.cert and (found.key or (found.ca and not dials)):
        who = "the masters need" if shows else "this host's saver needs"
        raise SpecError("tls-cert", f"missing: {who} --tls-cert, and --tls-key, to encrypt")
    if dials and found.cert and not found.ca:
        raise SpecError(
            "tls-ca", "missing: this host's agent, too, checks masters by a CA; a self-signed one is its own"
        )
    before.check_tls(*found)
    return found


def job_name(options: Options) -> str:
    """The job's name: given, or the rendezvous' id cleaned, or made from the script's. Raises `SpecError`."""
    given = options.rdzv_id not in ("", "none") and not options.standalone
    cleaned = _clean(options.rdzv_id) if given else ""
    if options.job_id is not None:
        if cleaned and cleaned != options.job_id:
            raise SpecError(
                "job-id", f"{options.job_id!r}, but --rdzv-id {options.rdzv_id!r}: both name the job; give one of them"
            )
        return str(options.job_id)
    if given and not cleaned:
        raise SpecError("rdzv-id", f"{options.rdzv_id!r} has no letter or digit to name the job by")
    # Several hosts must arrive at the same name, and a host that comes back at its old one.
    return cleaned or (_stem(options.script) if meeting(options).joining else default_job(options.script))


def _clean(text: str) -> str:
    """As a job's name may be: other characters are hyphens."""
    return re.sub(r"-+", "-", re.sub(r"[^a-z0-9_.]+", "-", text.lower())).strip("-._")[:NAME_BYTES_MAX].rstrip("-._")


def _stem(script: str) -> str:
    return _clean(Path(script).stem)[:30].rstrip("-._") or "job"


def default_job(script: str) -> str:
    """A new name for a job without one: the script's, the time, and a little chance."""
    return f"{_stem(script)}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


_AS_GIVEN = ("max_restarts", "on_join", "precheck", "check_slow", "hang_action", "slow_action")  # as in the spec


class Setting(NamedTuple):
    """A field of the spec that somebody set: its value, and by what."""

    value: Any
    origin: str


def spec(options: Options, job: str, nproc: int) -> JobSpec:
    """The job that the options describe. Raises `SpecError`."""
    job_set, group_set = spec_settings(options, job, nproc)
    group = GroupSpec(**{name: one.value for name, one in group_set.items()})
    return JobSpec(**{name: one.value for name, one in job_set.items()}, groups=(group,))


def spec_settings(options: Options, job: str, nproc: int) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """The fields of the job's spec and of its group's that options set; what is not there has its default."""
    return job_settings(options, job), group_settings(options, nproc)


def _by_size(options: Options) -> str:
    return options.origin("nnodes" if options.given("nnodes") else "local_nodes")


def job_settings(options: Options, job: str) -> dict[str, Setting]:
    """The fields of the job's spec that options set. Files are read here, once: one may be a pipe. Raises `SpecError`."""
    met = meeting(options)
    named = "job_id" if options.given("job_id") else "rdzv_id"
    return {
        "job": Setting(job, options.origin(named)),
        **{name: Setting(getattr(options, name), options.origin(name)) for name in _AS_GIVEN},
        **_signatures(options),
        "joining": Setting(met.joining, _by_size(options) if not met.masters else "--master"),
        **_policy_of(options),
        **_durations(options, met),
    }


def group_settings(options: Options, nproc: int) -> dict[str, Setting]:
    """The fields of the group's spec that options set. Raises `SpecError`."""
    count, unit = size(options), vars(options).get("node_unit")
    return {
        "nodes_min": Setting(count.fewest, _by_size(options)),
        "nodes_max": Setting(count.most, _by_size(options)),
        "nproc": Setting(nproc, options.origin("nproc_per_node")),
        "relaunch_max": Setting(options.relaunch_max, options.origin("relaunch_max")),
        **({"unit": Setting(unit, options.origin("node_unit"))} if unit is not None else {}),
    }


def _signatures(options: Options) -> dict[str, Setting]:
    """The user's own, read and checked here, where they lie."""
    if options.signatures is None:
        return {}
    from dlrover_adapters.cli.signatures import own

    return {"signatures": Setting(own(options.signatures), options.origin("signatures"))}


def _policy_of(options: Options) -> dict[str, Setting]:
    if options.policy is None:
        return {}
    return {"policy": Setting(policies.read(options.policy), options.origin("policy"))}


def _durations(options: Options, met: meetings.Meeting) -> dict[str, Setting]:
    """Durations, the more particular way to set one after the less particular."""
    conf = options.origin("rdzv_conf")
    found = {name: Setting(seconds, conf) for name, seconds in met.durations.items()}
    found |= {name: Setting(seconds, str(options.job_file)) for name, seconds in options.job_durations.items()}
    grace = _shutdown_timeout(options)
    if grace is not None:
        found["stop_grace_s"] = grace
    if options.hang_timeout is not None:
        found["hang_s"] = Setting(options.hang_timeout, options.origin("hang_timeout"))
    for text in options.set:
        name, seconds = _duration(text)
        found[name] = Setting(seconds, "--set")
    return found


def _shutdown_timeout(options: Options) -> Setting | None:
    if options.shutdown_timeout is not None:
        if options.shutdown_timeout < 0:
            raise SpecError("shutdown-timeout", f"cannot be negative, got {options.shutdown_timeout}")
        return Setting(float(options.shutdown_timeout), options.origin("shutdown_timeout"))
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    told = os.environ.get(variable)
    if not told:
        return None
    if values.whole(told) is None:
        raise SpecError(variable, f"{told!r} is not a number of seconds")
    return Setting(float(told), variable)


def _duration(text: str) -> tuple[str, float]:
    known = {one.name: one for one in dataclasses.fields(JobSpec) if one.name.endswith("_s")}
    name, _, value = text.partition("=")
    if name not in known:
        listed = ", ".join(f"{one.name}={one.default:g}" for one in known.values())
        near = usage.meant(name, known)
        raise SpecError(
            "set", f"there is no duration {name!r}{near}; there are, with their defaults in seconds: {listed}"
        )
    try:
        return name, float(value)
    except ValueError as error:
        raise SpecError("set", f"{text!r} is not NAME=SECONDS, as in {name}={known[name].default:g}") from error


def where(options: Options) -> str:
    """The options that lead `dlrover` to this log and this job, for people: without a password."""
    log = f" --log {shlex.quote(shown(options.log))}" if options.log else ""
    return log + (f" --state-dir {shlex.quote(options.state_dir)}" if options.state_dir else "")


def check(options: Options) -> None:
    """Refuse what has no place here, with what to do instead. Raises `SpecError`."""
    before.check(options)
    if options.logs_specs not in (None, "default"):
        raise SpecError(
            "logs-specs",
            f"{options.logs_specs!r} is a class of torch's agent, which does not run here; "
            "--log-dir, -r, -t, --local-ranks-filter and --duplicate-stdout-filters say where output goes",
        )
    for name in ("standby", "log_attempts_max"):
        if getattr(options, name) < 0:
            raise SpecError(name.replace("_", "-"), f"cannot be negative, got {getattr(options, name)}")
    if 0 < options.log_bytes_max < LOG_BYTES_MIN:
        raise SpecError("log-bytes-max", f"at least {LOG_BYTES_MIN // 1024}K, or 0 for no bound")
    if options.standby and meeting(options).joining:
        raise SpecError("standby", "hosts that join are each other's standbys; start more of them than --nnodes MAX")


_DIALLED = ("--rdzv-endpoint", "--master-port")  # some scripts connect there by number


def notes(options: Options) -> Mapping[str, str]:
    """Flags that were given and do nothing here, with the reason."""
    found = {f"--{dest.replace('_', '-')}": why for dest, why in torchrun_flags.UNUSED.items() if options.given(dest)}
    met = meeting(options)
    why = "several hosts only" if not met.joining else f"not with {met.backend}"
    unused = dict.fromkeys(met.unused, why)
    if not met.joining:
        dialled = {
            one: f"{why}; the store is where MASTER_ADDR and MASTER_PORT say" for one in unused if one in _DIALLED
        }
        unused.update(dialled)
    return {**found, **check_flags.notes(options), **dlrover_flags.notes(options), **unused}


def shows_progress(options: Options) -> bool:
    """Is there to be a live line?"""
    return bool(options.progress == "on" or (options.progress == "auto" and sys.stderr.isatty()))
