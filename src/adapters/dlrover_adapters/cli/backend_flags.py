"""``--backend``: whose scheduler starts a job's nodes, and where these find the masters.

Without it the nodes are the launcher's own. Any other backend's nodes are *apart*: they do not end with the launcher.
"""

from __future__ import annotations

import argparse

from dlrover_adapters.cli import ray_flags
from dlrover_adapters.cli.torchrun_flags import Given, Options
from dlrover_core.errors import SpecError

LOCAL, KUBERNETES = "local", "k8s"

_ARGUMENTS = {
    "image": "is no image: write NAME:TAG, or NAME@sha256:DIGEST",
    "gang": "is no gang: write native, volcano or coscheduling",
    "queue": "is no queue: write the name of a LocalQueue",
}
"""Options that are arguments of the Kubernetes backend, and what to write where one cannot be."""


def arguments(group: argparse._ArgumentGroup) -> None:
    """Which backend, and where its nodes find the masters."""
    group.add_argument(
        "--backend",
        action=Given,
        default=None,
        metavar="NAME[:ARGS]",
        help="what starts the nodes: local (default: this command), an installed backend by its name, or one of your own by its "
        "path, mypackage.slurm:Slurm[:ARGS] or ./slurm.py:Slurm[:ARGS] (docs/backends.md)",
    )
    group.add_argument(
        "--image",
        action=Given,
        default=None,
        metavar="IMG",
        help="with --backend k8s: the image of the nodes' container, as --backend k8s:image=IMG says it (docs/kubernetes.md)",
    )
    ray_flags.arguments(group)
    group.add_argument(
        "--gang",
        action=Given,
        default=None,
        metavar="KIND",
        help="with --backend k8s: MIN nodes start together or none does, by a PodGroup that is native, volcano or coscheduling",
    )
    group.add_argument(
        "--queue",
        action=Given,
        default=None,
        metavar="NAME",
        help="with --backend k8s: the LocalQueue of Kueue that admits the job; with --gang volcano a Queue of Volcano",
    )
    group.add_argument(
        "--masters",
        action=Given,
        default=None,
        metavar="ADDR[,ADDR]",
        help="with --backend: where nodes find the masters of all hosts (default: those started here)",
    )


def bind(group: argparse._ArgumentGroup) -> None:
    """Where the masters of this command listen."""
    group.add_argument(
        "--bind",
        action=Given,
        default=None,
        metavar="ADDR[:PORT]",
        help="with --backend: where the masters listen (default: a free port of every address)",
    )


def named(options: Options) -> str | None:
    """The backend with its arguments, those of `_ARGUMENTS` and Ray's among them. Raises `SpecError`."""
    given = {key: value for key in _ARGUMENTS if (value := getattr(options, key)) is not None}
    if not given:
        return ray_flags.named(options) or (str(options.backend) if options.backend is not None else None)
    name, _, args = (options.backend or "").partition(":")
    for key, value in given.items():
        if name != KUBERNETES:
            raise SpecError(key, f"{value!r} is for --backend k8s, and the backend is {options.backend or LOCAL}")
        if not value or set(value) & set(", \t\n"):
            raise SpecError(key, f"{value!r} {_ARGUMENTS[key]}")
    return f"{KUBERNETES}:{','.join(filter(None, [args, *(f'{key}={value}' for key, value in given.items())]))}"


def here(options: Options) -> None:
    """``--backend local --nnodes N`` are N nodes on this host, as ``--local-nodes N`` are."""
    if options.backend == LOCAL and options.local_nodes is None and options.nnodes is not None:
        options.local_nodes = options.nnodes.most


def in_images(options: argparse.Namespace) -> bool:
    """Do nodes have files of their own, so that a program which is not here may be there?"""
    if ray_flags.has_files(options):
        return True
    return options.backend is not None and str(options.backend).partition(":")[0] == KUBERNETES


def apart(options: argparse.Namespace) -> bool:
    """Are the nodes another scheduler's?"""
    return options.backend is not None and str(options.backend).partition(":")[0] != LOCAL
