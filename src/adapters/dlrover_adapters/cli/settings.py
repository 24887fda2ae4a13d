"""What the launcher of a job writes down for its masters and agents: one JSON file in the job's private directory."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover_adapters.agent.config import TORCH
from dlrover_core.spec import DEFAULT_GROUP, JobSpec
from dlrover_core.words import plain

EX_OVER, EX_AGAIN, EX_FATAL, EX_UNRECORDED, EX_UNSTORED, EX_UNRESTARTED = 0, 75, 78, 79, 80, 81
"""How a master ends: the job is over; start another one; nobody like it can lead this log; over, and well, but the log cannot
take that; the same, and the last state is not on storage; a worker failed, which the log cannot take."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One run of one job on this host. Paths are absolute. The token is in none of it: it travels in the environment.

    ``mark`` is what everything bears in its environment that this launcher starts. ``address`` is where other hosts reach this
    one's stores, which listen at ``store_bind``. ``joining``, ``seat`` and ``place``: as in `JobSpec` and `Agent`, ``store_at``
    as in `LaunchConfig`.
    ``owned``: ``run`` is the name that the run's owner gave it, and a live run of that name goes on.
    ``apart``: its nodes are no launcher's, and whoever leads levels them: masters of several hosts may share its log.
    ``tls_...``: what masters show, and what agents check it by. ``shared``: masters of other hosts may lead in this log, too, so
    its run has begun before any of them starts. ``detect``: do agents look for signs of failures? ``watch_grads``: do
    workers look at their gradients' norm? ``imports``, ``env``, ``framework`` and ``stores``: as in `LaunchConfig`. ``group``:
    whose nodes these settings are for. ``launches``: what the nodes of each group have otherwise (`of_group`); empty in a job of
    one group.
    ``backend``: who starts the nodes, as `runtime.backends` reads it; empty: this launcher. ``agent``: the words of the
    `dlrover-run` of each node that such a backend starts, in the folder ``cwd``.
    """

    spec: str
    run: str
    log: str
    directory: str
    argv: tuple[str, ...]
    nproc: int
    mode: str
    group: str = DEFAULT_GROUP
    env: Mapping[str, str] = field(default_factory=dict)
    framework: str = TORCH
    stores: bool = True
    launches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    node_host: str = ""
    masters: tuple[str, ...] = ()
    role: str = "default"
    preload: tuple[str, ...] | None = ()
    imports: str = ""
    log_dir: str | None = None
    redirects: tuple[int, ...] = ()
    tee: tuple[int, ...] = ()
    show: tuple[int, ...] | None = None
    duplicate_stdout: tuple[str, ...] = ()
    duplicate_stderr: tuple[str, ...] = ()
    log_bytes_max: int = 0
    log_attempts_max: int = 0
    run_id: str = ""
    numa: str = ""
    virtual_local_rank: bool = False
    signals: tuple[int, ...] = (1, 2, 3, 15)
    run_dir: str | None = None
    address: str = "127.0.0.1"
    store_bind: str = "127.0.0.1"
    store_at: str = ""
    joining: bool = False
    seat: str = ""
    place: int = -1
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    mark: str = ""
    backend: str = ""
    agent: tuple[str, ...] = ()
    cwd: str = ""
    owned: bool = False
    apart: bool = False
    shared: bool = False
    detect: bool = True
    watch_grads: bool = False
    check_scripts: tuple[str, ...] = ()
    log_level: str = "info"
    control_log: str = field(default="")

    def holder(self, pid: int, number: int = 0) -> str:
        """The name under which a process of this launcher leads, its ``number``-th; nobody else ever bears it."""
        return f"{plain(socket.gethostname())}/{pid}/{self.mark}-{number}"

    def is_ours(self, holder: str) -> bool:
        """Is it the name of a process of this launcher?"""
        return holder.rpartition("/")[2].rpartition("-")[0] == self.mark

    @property
    def job(self) -> JobSpec:
        """The job's spec."""
        return JobSpec.from_json(self.spec)

    @property
    def nodes_elsewhere(self) -> bool:
        """Do its nodes live on without this launcher: hosts that join, or those of another scheduler?"""
        return self.joining or self.apart

    def of_group(self, name: str) -> Settings:
        """The same for the nodes of one group. Raises `SpecError` where the job has no such group."""
        self.job.group(name)
        own: dict[str, Any] = {"group": name, "launches": {}}
        own |= {key: tuple(one) if isinstance(one, list) else one for key, one in self.launches.get(name, {}).items()}
        return dataclasses.replace(self, **own)

    def placed(self, folder: Path) -> Settings:
        """The same, with the run's sockets and streams in ``folder``."""
        return dataclasses.replace(self, node_host=str(folder / "nodes.sock"), run_dir=str(folder))

    def write(self, name: str = "settings.json") -> Path:
        """Write it down whole or not at all, readable by this user alone."""
        path = Path(self.directory) / name
        part = path.with_suffix(".part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
        part.replace(path)
        return path

    def in_memory(self) -> int:
        """Write it into a file that nobody can remove; the descriptor, for who inherits it."""
        fd = os.memfd_create("dlrover-settings")
        with open(fd, "w", encoding="utf-8", closefd=False) as file:
            json.dump(dataclasses.asdict(self), file)
        return fd

    @classmethod
    def read(cls, path: str) -> Settings:
        """Read what `write` wrote."""
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        for name, value in raw.items():
            if isinstance(value, list):
                raw[name] = tuple(value)
        return cls(**raw)
