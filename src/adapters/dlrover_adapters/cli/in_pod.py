"""Masters in a cluster: the command line is the one that was typed elsewhere, and the environment places it.

That is a pod of Kubernetes, or an actor of Ray that keeps masters.

`dlrover-run` and `dlrover master` look here before they do anything. What the environment says takes the place of options of the
same meaning: these named places of the host where they were typed.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from dlrover_adapters.cli.torchrun_flags import Options
from dlrover_core.errors import SpecError

BACKEND, BIND, MASTERS = "DLROVER_MASTER_BACKEND", "DLROVER_MASTER_BIND", "DLROVER_MASTER_AT"
JOB, LOG, STATE_DIR, RUN = "DLROVER_MASTER_JOB", "DLROVER_MASTER_LOG", "DLROVER_MASTER_STATE", "DLROVER_RUN"
"""As `dlrover_backends.k8s.masters` and `dlrover_backends.ray.masters_keeper` write them."""
_NEEDED = {BACKEND: "backend", BIND: "bind", MASTERS: "masters", JOB: "job_id", STATE_DIR: "state_dir", RUN: "owner"}


def taken_in(options: Options, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Is this a pod of masters? Then these options are its own from now on. Raises `SpecError` where one is missing."""
    if not environ.get(BACKEND):
        return False
    for variable, dest in _NEEDED.items():
        value = environ.pop(variable, "")
        if not value:
            raise SpecError(variable, f"missing, and {BACKEND} makes this command the masters of a job in a cluster")
        setattr(options, dest, value)
        options.note(dest, variable)
    options.bind = _bracketed(options.bind)
    options.log = environ.pop(LOG, "") or None
    options.image = options.token_file = options.resume = None
    options.ray_address = options.resources = options.label = options.runtime_env = None
    options.detach, options.progress, options.pod = False, "off", True
    return True


def _bracketed(endpoint: str) -> str:
    """``ADDR:PORT`` of a pod whose address may be of IPv6, as people write it."""
    host, _, port = endpoint.rpartition(":")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else endpoint


def place(options: Options) -> str:
    """What `dlrover` calls this pod's job on any other host; empty: this is no pod of masters."""
    if not is_pod(options):
        return ""
    scheme, _, arguments = str(options.backend).partition(":")
    told = dict(one.partition("=")[::2] for one in arguments.split(","))
    return f"k8s:{told.get('namespace', '')}/{options.job_id}" if scheme == "k8s" else f"{scheme}:{options.job_id}"


def is_pod(options: Options) -> bool:
    """Do masters run in a pod here, so that SIGTERM means this pod and not the job?"""
    return bool(getattr(options, "pod", False))
