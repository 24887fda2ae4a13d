"""The options that say whose a run is: its owner names it (``--run``, ``DLROVER_RUN``).

A name is a Kubernetes object's uid, a batch system's number, a person's word. Whoever starts masters of that job under the same
name goes on with the run (`continuing`).
"""

from __future__ import annotations

import argparse
import os
import re

from dlrover_adapters.cli.torchrun_flags import Given
from dlrover_core.errors import SpecError

VARIABLE = "DLROVER_RUN"
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def owned(group: argparse._ArgumentGroup) -> None:
    """The run's name."""
    group.add_argument(
        "--run",
        dest="owner",
        action=Given,
        default=None,
        metavar="NAME",
        help="the run's name, which its owner gives: masters that are started again with that name go on with the run (default: "
        "$DLROVER_RUN, else a new run)",
    )


def detached(group: argparse._ArgumentGroup) -> None:
    """A job that outlives its terminal."""
    group.add_argument(
        "--detach",
        action=Given,
        nargs=0,
        const=True,
        default=False,
        help="the job belongs to no terminal and outlives this command; 'dlrover attach|status|stop JOB' finds it; its output "
        "goes to jobs/JOB/output.log in the state directory, within --log-bytes-max; with --backend k8s its masters are pods, "
        "with --backend ray actors",
    )
    group.add_argument(
        "--resume",
        action=Given,
        default=None,
        metavar="JOB",
        help="go on with a detached job of which nothing runs any more, as after a reboot, from its newest checkpoint",
    )


def owner(given: str | None) -> str:
    """The run's name: ``--run``, else ``DLROVER_RUN``; empty: nobody names it. Raises `SpecError`."""
    told = given if given is not None else os.environ.get(VARIABLE, "")
    if told and not _OWNER.fullmatch(told):
        raise SpecError(
            "run" if given is not None else VARIABLE,
            f"{told!r} is not a run's name: up to 128 letters, digits, dots, hyphens and underscores, the first a letter or "
            "digit; the uid of whoever owns the job is one",
        )
    if given == "":
        raise SpecError("run", "it is empty; leave --run out where nobody owns the run")
    return told
