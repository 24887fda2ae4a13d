"""Torchrun's flags (torch 2.13), spelled as there, each with its ``PET_`` variable where torchrun has one.

Flags are told apart by where their value came from, because `--show-config` says so, and because what somebody *gave* and we
do not use deserves a word, while a default does not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.errors import SpecError

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Nodes(NamedTuple):
    """``--nnodes``: fewest and most."""

    fewest: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"


def nodes(text: str) -> Nodes:
    """``N`` or ``MIN:MAX``."""
    low, colon, high = text.partition(":")
    try:
        fewest = int(low)
        return Nodes(fewest, int(high) if colon else fewest)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or MIN:MAX") from error


def comma_list(text: str) -> tuple[str, ...]:
    """Torchrun's list of filters: separated by commas, a double comma stands for one."""
    return tuple(one.replace("\0", ",") for one in text.replace(",,", "\0").split(",") if one)


class Options(argparse.Namespace):
    """What was parsed, and where each value came from."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[str, str] = {}
        self.job_file: str | None = None
        self.role_groups: str | None = None
        self.groups: tuple[Any, ...] = ()
        self.job_durations: Mapping[str, float] = {}

    def note(self, dest: str, origin: str) -> None:
        """Remember an origin."""
        self._origins[dest] = origin

    def origin(self, dest: str) -> str:
        """The flag or variable that gave a value, or 'default'."""
        return self._origins.get(dest, "default")

    def given(self, dest: str) -> bool:
        """Did somebody give it?"""
        return dest in self._origins


class Given(argparse.Action):
    """Store a value, and that it was given. ``may_be_empty``: ``''`` is a value, too."""

    may_be_empty = False

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """As argparse's own ``store`` does, and ``store_const`` for a flag."""
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        if isinstance(namespace, Options):
            namespace.note(self.dest, option_string or self.dest)


class MayBeEmpty(Given):
    """One to which an empty value means something."""

    may_be_empty = True


class Env(MayBeEmpty):
    """One whose default is in ``PET_<FLAG>``, as torchrun's have it. An empty variable counts as none."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        self.variable = f"PET_{dest.upper()}"
        told = os.environ.get(self.variable, "")
        self.told, self.standard = bool(told), settings.get("default")
        if told:
            settings["default"] = _converted(self.variable, told, settings.get("type"), settings.get("choices"))
        super().__init__(option_strings, dest, **settings)


class EnvFlag(Given):
    """A flag without a value; its ``PET_<FLAG>`` is 1 or 0."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        self.variable = f"PET_{dest.upper()}"
        told = os.environ.get(self.variable, "")
        self.told, self.standard = bool(told), False
        if not all(one in "0123456789" for one in told):
            raise SpecError(self.variable, f"{told!r} is neither 1 nor 0")
        super().__init__(option_strings, dest, nargs=0, const=True, default=bool(told.strip("0")), **settings)


def _converted(variable: str, told: str, kind: Callable[[str], Any] | None, choices: Sequence[str] | None) -> Any:
    try:
        value = kind(told) if kind is not None else told
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SpecError(variable, str(error)) from error
    if choices is not None and value not in choices:
        raise SpecError(variable, f"{told!r} is none of {', '.join(choices)}")
    return value


def _flag(group: argparse._ArgumentGroup, name: str, **settings: Any) -> None:
    """Add an argument under its name with hyphens, and with underscores."""
    group.add_argument(*dict.fromkeys((name, "--" + name[2:].replace("-", "_"))), **settings)


def size(group: argparse._ArgumentGroup) -> None:
    """How large the job is, and how often it may fail."""
    _flag(
        group,
        "--nnodes",
        action=Env,
        type=nodes,
        default=None,
        metavar="N|MIN:MAX",
        help="nodes of the job: hosts, or with --local-nodes agents on this one (default 1)",
    )
    _flag(
        group,
        "--nproc-per-node",
        action=Env,
        default="1",
        metavar="N",
        help="workers per node: a number, or auto, cpu, gpu, xpu (default 1)",
    )
    _flag(
        group,
        "--max-restarts",
        action=Env,
        type=int,
        default=3,
        metavar="N",
        help="restarts of the processes before the job fails (default 3; torchrun: 0)",
    )


def names(group: argparse._ArgumentGroup) -> None:
    """How a rendezvous is called, and how patient it is."""
    _flag(group, "--rdzv-id", action=Env, default="none", metavar="NAME", help="the job's name, the same on all hosts")
    _flag(
        group,
        "--rdzv-conf",
        action=Env,
        default="",
        metavar="KEY=VALUE,...",
        help="join_timeout, last_call_timeout, is_host, keep_alive_interval, keep_alive_max_attempt; seconds",
    )


def meeting(group: argparse._ArgumentGroup) -> None:
    """Where hosts meet."""
    _flag(
        group,
        "--rdzv-backend",
        action=Env,
        default="static",
        metavar="NAME",
        help="how hosts find each other: c10d, static (default), dlrover",
    )
    _flag(
        group,
        "--rdzv-endpoint",
        action=Env,
        default="",
        metavar="HOST[:PORT]",
        help="where the master listens: HOST is one of the hosts, PORT 29400 unless said",
    )
    names(group)
    _flag(group, "--standalone", action=EnvFlag, help="one host alone: other rendezvous flags are ignored")
    _flag(
        group,
        "--node-rank",
        action=Env,
        type=int,
        default=0,
        metavar="R",
        help="static: this host's place; that of rank 0 runs the master (default 0)",
    )
    _flag(
        group,
        "--master-addr",
        action=Env,
        default="127.0.0.1",
        metavar="HOST",
        help="static: the host of rank 0, where the master listens",
    )
    _flag(
        group,
        "--master-port",
        action=Env,
        type=int,
        default=None,
        metavar="PORT",
        help="static: its port (default 29500); on one host that of every generation's store (default: a free one)",
    )
    _flag(group, "--local-addr", action=Env, default=None, metavar="ADDR", help="where others reach this host")


def program(group: argparse._ArgumentGroup) -> None:
    """What is run, and as what."""
    _flag(group, "--role", action=Env, default="default", help="the workers' role name (default 'default')")
    group.add_argument("-m", "--module", action=EnvFlag, help="SCRIPT is a module, as for python -m")
    _flag(group, "--no-python", action=EnvFlag, help="SCRIPT is a program of its own, not Python")
    _flag(group, "--run-path", action=EnvFlag, help="run SCRIPT by runpy.run_path; neither -m nor --no-python")
    _flag(
        group,
        "--virtual-local-rank",
        action=EnvFlag,
        help="every worker has LOCAL_RANK 0 and sees one GPU, through CUDA_VISIBLE_DEVICES",
    )
    _flag(
        group,
        "--numa-binding",
        action=Given,
        choices=NUMA_MODES,
        default=None,
        metavar="MODE",
        help="bind each worker to the CPUs near its GPU: node, socket, exclusive, core-complex",
    )


def output(group: argparse._ArgumentGroup) -> None:
    """Where the workers' output goes."""
    _flag(group, "--log-dir", action=Env, default=None, metavar="DIR", help="where redirected and teed output goes")
    group.add_argument(
        "-r",
        "--redirects",
        action=Env,
        default="0",
        metavar="S",
        help="streams into files: 1 stdout, 2 stderr, 3 both; 0:1,1:3 by local rank (default 0)",
    )
    group.add_argument(
        "-t",
        "--tee",
        action=Env,
        default="0",
        metavar="S",
        help="streams into files and here, as for -r (default 0)",
    )
    _flag(
        group,
        "--local-ranks-filter",
        action=Env,
        default="",
        metavar="R,R",
        help="show only these local ranks here; files get all",
    )
    for stream in ("stdout", "stderr"):
        _flag(
            group,
            f"--duplicate-{stream}-filters",
            action=Env,
            type=comma_list,
            default=(),
            metavar="TEXT,TEXT",
            help=f"lines of teed {stream} with one of these texts also go into filtered_{stream}.log",
        )


def ending(group: argparse._ArgumentGroup) -> None:
    """How the job is stopped."""
    _flag(
        group,
        "--signals-to-handle",
        action=Env,
        default=SIGNALS,
        metavar="NAMES",
        help=f"signals that stop the job; workers get the same one (default {SIGNALS})",
    )
    _flag(
        group,
        "--shutdown-timeout",
        action=Env,
        type=int,
        default=None,
        metavar="SECONDS",
        help="between that signal and SIGKILL: stop_grace_s (default 30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
    )


UNUSED = {
    "monitor_interval": "deaths are seen at once, not looked for",
    "start_method": "workers are forked from a warm process; see --preload",
    "event_log_handler": "every event is in the job's log: dlrover events",
}
"""What torchrun needs and we do not, and why."""


def unused(group: argparse._ArgumentGroup) -> None:
    """Accepted, because scripts say them."""
    _flag(
        group,
        "--monitor-interval",
        action=Env,
        type=float,
        default=0.1,
        metavar="SECONDS",
        help=f"accepted: {UNUSED['monitor_interval']}",
    )
    _flag(
        group,
        "--start-method",
        action=Env,
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help=f"accepted: {UNUSED['start_method']}",
    )
    _flag(
        group,
        "--event-log-handler",
        action=Env,
        default="null",
        metavar="NAME",
        help="accepted: see dlrover events JOB",
    )
    _flag(
        group,
        "--logs-specs",
        action=Given,
        default=None,
        metavar="NAME",
        help="only 'default': a class of torch's agent has no place here; --log-dir, -r, -t do its work",
    )
