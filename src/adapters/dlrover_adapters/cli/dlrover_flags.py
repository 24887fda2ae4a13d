"""The flags that DLRover's own `dlrover-run` has beside torchrun's, as its users write them. Light to import.

Each one sets what it means here, or is told as doing nothing, in one line. The spellings are DLRover's, its misspelling too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from dlrover_adapters.cli.torchrun_flags import Given, Nodes, Options
from dlrover_core.errors import SpecError

NODE_NUM = "NODE_NUM"
GPU = "nvidia.com/gpu"
PRECHECK = {"0": "off", "1": "full", "2": "full"}
"""DLRover's levels of ``--precheck``: 1 computes in pairs, 2 measures the network between all nodes as well."""
AUTO_CHECK_NODES = 4
"""``--auto_config`` checks nodes from so many on."""

UNUSED = {
    "auto_tunning": "nothing is tuned while a job runs",
    "save_at_breakpoint": "what FlashCheckpoint has staged is always stored when a process or its node fails",
    "accelerator": "devices are those that torch finds; in Kubernetes --backend k8s:gpu=RESOURCE names a pod's",
    "training_port": "every world's store has a free port of its own; on one host --master-port fixes it",
    "membind_policy": "--numa-binding binds CPUs, and memory follows where it is first touched",
    "ucp_device_type": "checkpoints are resharded while they are read, on no device",
}
"""Those without an effect, and why."""
DESTS = (*UNUSED, "network_check", "comm_perf_test", "exclude_straggler", "auto_config", "numa_affinity", "node_unit")
"""Names of all of them."""
_NOT_KEPT = "pend_timeout"
_CONF = {"lastcall_timeout": "last_call_timeout"}
"""DLRover's names of keys of ``--rdzv-conf`` that torchrun has, too."""


def precheck(text: str) -> str:
    """The value of ``--precheck``: ours, or one of DLRover's levels."""
    return PRECHECK.get(text, text)


def add(group: argparse._ArgumentGroup) -> None:
    """All of them."""
    _switch(group, "network-check", "check nodes before they train, in pairs: --precheck full")
    _switch(group, "comm-perf-test", "the same: --precheck full measures the pairs' network, too")
    _switch(group, "exclude-straggler", "replace a node whose check was slow: --check-slow replace")
    _switch(group, "auto_config", "nodes from $NODE_NUM, as many workers as devices, and with 4 nodes or more a check")
    _switch(group, "numa-affinity", "bind each worker to the CPUs near its GPU: --numa-binding node")
    _value(group, "node_unit", "N", "the number of nodes in a world is a multiple of this (default 1)", kind=int)
    _switch(group, "auto_tunning", f"accepted: {UNUSED['auto_tunning']}")
    _switch(group, "save_at_breakpoint", "accepted: staged checkpoints are always stored")
    _value(group, "accelerator", "NAME", "accepted: devices are those that torch finds")
    _value(group, "training_port", "PORT", "accepted: every world's store has a free port", kind=int)
    _value(group, "membind-policy", "NAME", "accepted, and not needed")
    _value(group, "ucp_device_type", "NAME", "accepted, and not needed")


def _spellings(name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}")))


def _switch(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(*_spellings(name), action=Given, nargs=0, const=True, default=False, help=text)


def _value(group: argparse._ArgumentGroup, name: str, metavar: str, text: str, *, kind: type = str) -> None:
    group.add_argument(*_spellings(name), action=Given, type=kind, default=None, metavar=metavar, help=text)


def taken_in(options: Options) -> None:
    """Set what DLRover's flags mean, where no flag of ours says otherwise. Raises `SpecError`."""
    _set(options, "network_check", "precheck", "full")
    _set(options, "comm_perf_test", "precheck", "full")
    _set(options, "exclude_straggler", "check_slow", "replace")
    _set(options, "numa_affinity", "numa_binding", "node")
    _conf(options)
    if options.auto_config:
        _configure(options)


def _set(options: Options, flag: str, name: str, value: object) -> None:
    if getattr(options, flag) and not options.given(name):
        setattr(options, name, value)
        options.note(name, options.origin(flag))


def _configure(options: Options) -> None:
    """``--auto_config``. Raises `SpecError`."""
    told = os.environ.get(NODE_NUM, "")
    if told and options.nnodes is None and options.local_nodes is None:
        if not (told.isascii() and told.isdecimal() and int(told)):
            raise SpecError(NODE_NUM, f"{told!r} is not a number of nodes, and --auto_config reads it; say --nnodes N")
        options.nnodes = Nodes(int(told), int(told))
        options.note("nnodes", NODE_NUM)
    if not options.given("nproc_per_node"):
        options.nproc_per_node = "auto"
        options.note("nproc_per_node", options.origin("auto_config"))
    if options.nnodes is not None and options.nnodes.fewest >= AUTO_CHECK_NODES:
        _set(options, "auto_config", "precheck", "full")


def _conf(options: Options) -> None:
    """Keys of ``--rdzv-conf`` that are DLRover's alone."""
    found = []
    for part in options.rdzv_conf.split(","):
        key, equals, value = part.partition("=")
        key = key.strip()
        if equals and key == "node_unit" and options.node_unit is None:
            options.node_unit = _unit(value)
            options.note("node_unit", options.origin("rdzv_conf"))
        elif equals and key in _CONF:
            found.append(f"{_CONF[key]}={value}")
        elif not equals or key not in {"node_unit", _NOT_KEPT}:
            found.append(part)
        else:
            options.note(key, options.origin("rdzv_conf"))
    options.rdzv_conf = ",".join(found)


def _unit(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise SpecError("rdzv-conf", f"node_unit={text}: not a number of nodes") from error


def notes(options: Options) -> Mapping[str, str]:
    """What was given and does nothing, with the reason."""
    found = {f"--{name}": why for name, why in UNUSED.items() if options.given(name)}
    if options.given(_NOT_KEPT):
        found[f"--rdzv-conf {_NOT_KEPT}"] = "a job that lacks nodes waits for them, and is told so in dlrover status"
    return found
