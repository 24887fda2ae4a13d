"""What the launcher of one node is told, and the environment its workers are born with."""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Mapping
from typing import NamedTuple

from dlrover_core.errors import SpecError

from .framework import load

TORCH, PLAIN = "dlrover_adapters.torch.worker", "dlrover_adapters.plain.worker"
"""Frameworks: torch, and none at all (`framework.Framework`)."""

DEFAULT_GROUP = "worker"
"""As in dlrover_core/spec.py, which the agent of a node does not import."""

AUTO = "auto"
"""As a preload: what workers of this script imported until their first step."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Torchrun's default of those that stop a job."""

# The agent's own secrets: workers talk to their agent over a socket of its user, never to the master.
SECRETS = ("DLROVER_TOKEN", "DLROVER_ETCD_PASSWORD")
GROUP_VARIABLE, PLACE_VARIABLE = "DLROVER_GROUP", "DLROVER_PLACE"
"""Of which group a worker is, and its node's place in it, from 0 on."""
NODE_VARIABLES = ("NODE_RANK", "NODE_ID", "WORKER_RANK", "WORKER_ID")
"""DLRover's names for the place. A scheduler sets them, but where an agent waits for its name they are there and empty."""


class Mode(enum.Enum):
    """How the worker's program is named: as `python script`, `python -m module`, `runpy.run_path`, or any executable."""

    SCRIPT = "script"
    MODULE = "module"
    RUN_PATH = "run_path"
    COMMAND = "command"


class Streams(enum.IntFlag):
    """Output streams of a worker, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class LaunchConfig(NamedTuple):
    """How workers are started on one node; the same for all generations.

    ``argv`` is the script, module or command with its arguments. ``preload`` are modules that the zygote imports for all
    workers; None means no zygote: every worker is executed afresh. ``redirects`` and ``tee`` hold one value per local rank
    (`parse_streams`); empty means none. ``log_dir`` None: files that nobody asked for are temporary and die with the launcher,
    those asked for go to a folder of their own. ``run_dir`` None: the system's temporary folder. ``store_host`` is what
    peers are told to connect to, where ``store_bind`` is a wildcard.
    """

    argv: tuple[str, ...]
    nproc: int = 1
    mode: Mode = Mode.SCRIPT
    job: str = "job"
    node: str = "node"
    role: str = "default"
    group: str = DEFAULT_GROUP
    """The group of the node, which workers find in their environment."""
    by_place: bool = False
    """Output on the console is prefixed with the node's place, because the job has several groups."""
    preload: tuple[str, ...] | None = ()
    env: Mapping[str, str] = {}
    log_dir: str | None = None
    redirects: tuple[Streams, ...] = ()
    tee: tuple[Streams, ...] = ()
    show: tuple[int, ...] | None = None
    """Local ranks whose output reaches the console; None: all."""
    duplicate_stdout: tuple[str, ...] = ()
    """Lines of teed output that contain one of these go into a file of their own too; the same for stderr."""
    duplicate_stderr: tuple[str, ...] = ()
    log_bytes_max: int = 0
    """Room that one log file may take, beyond which its middle is left out; 0: no bound."""
    log_attempts_max: int = 0
    """Attempts whose logs are kept: the first and the newest; 0: all."""
    run_id: str = ""
    """What workers see as the run's id; empty: the run's own."""
    numa: str = ""
    """Torch's name for how workers are bound to CPUs near their GPUs; empty: not at all."""
    virtual_local_rank: bool = False
    finish_s: float = 0.0
    """Workers may run on this long after the first of their node has ended well; 0: as long as they need."""
    signals: tuple[int, ...] = SIGNALS
    store_bind: str = "127.0.0.1"
    store_host: str = ""
    store_at: str = ""
    """``host:port`` of this host where each generation's store listens, because somebody named it; empty: a free port each."""
    run_dir: str | None = None
    cgroup: str = ""
    """The control group (version 2) that workers are put into, below the agent's own, where one may be made; empty: none."""
    imports: str = ""
    """The folder with lists of what workers import, from which modules are preloaded; empty: only ``preload`` is."""
    framework: str = TORCH
    stores: bool = True
    probe_s: float = 5.0
    """A forked child that cannot multiply two matrices within this time condemns the preload before it."""
    ready_s: float = 300.0
    """Importing torch and all preloads may take this long."""
    start_s: float = 60.0
    """From the order to start a generation until its last worker exists."""
    refill_s: float = 10.0
    """Spares for the next generation are forked at this one's first step, or this long after its start."""

    hung_s: float = 5.0
    """A zygote or keeper that has not answered its agent for this long is killed and replaced; a saver has
    `checkpoints.saving.HUNG_TIMES` times as long; 0: never."""

    @property
    def warm(self) -> bool:
        """Whether workers are forked from a zygote. A command that is not Python has nothing to share."""
        return self.preload is not None and self.mode is not Mode.COMMAND

    def redirected(self, local_rank: int) -> Streams:
        """The streams of ``local_rank`` that go to files which stay; what is teed is among them, as under torchrun."""
        return _at(self.redirects, local_rank) | _at(self.tee, local_rank)

    def shown(self, local_rank: int) -> Streams:
        """The streams of ``local_rank`` that reach the console."""
        if self.show is not None and local_rank not in self.show:
            return Streams.NONE
        return (Streams.ALL & ~_at(self.redirects, local_rank)) | _at(self.tee, local_rank)

    def duplicated(self, local_rank: int, stream: Streams) -> tuple[bytes, ...]:
        """The filters for one stream of ``local_rank``: only what is teed and shown is looked through, as under torchrun."""
        if not (stream & _at(self.tee, local_rank) and stream & self.shown(local_rank)):
            return ()
        wanted = self.duplicate_stdout if stream is Streams.OUT else self.duplicate_stderr
        return tuple(os.fsencode(one) for one in wanted)

    def checked(self) -> LaunchConfig:
        """Itself. Raises `SpecError` where it cannot work."""
        if not self.argv:
            raise SpecError("argv", "name the script, module or command to run")
        if self.nproc < 1:
            raise SpecError("nproc", f"{self.nproc} workers per node: at least one is needed")
        for name in ("redirects", "tee"):
            if len(getattr(self, name)) not in {0, self.nproc}:
                raise SpecError(name, f"one value for each of the {self.nproc} local ranks, or none at all")
        if self.run_dir is not None and not os.path.isabs(self.run_dir):
            raise SpecError("run_dir", f"{self.run_dir!r} is not an absolute path")
        return self


def _at(streams: tuple[Streams, ...], local_rank: int) -> Streams:
    return streams[local_rank] if streams else Streams.NONE


def parse_streams(field: str, text: str, nproc: int) -> tuple[Streams, ...]:
    """Torchrun's ``-r``/``-t`` value as one `Streams` per local rank.

    ``"3"`` means all ranks; ``"0:1,1:3"`` names local ranks, the others have none. Raises `SpecError` naming ``field``.
    """
    if ":" not in text:
        return (_stream(field, text),) * nproc
    streams = [Streams.NONE] * nproc
    for part in text.split(","):
        rank, colon, value = part.partition(":")
        rank = rank.strip()
        if not colon or not (rank.isascii() and rank.isdecimal()):
            raise SpecError(field, f"{part!r} is not LOCAL_RANK:VALUE; say for example 0:1,1:3")
        if len(rank.lstrip("0")) > len(str(nproc)) or int(rank) >= nproc:
            raise SpecError(field, f"local rank {rank} does not exist: this node runs {nproc} workers")
        streams[int(rank)] = _stream(field, value)
    return tuple(streams)


def _stream(field: str, text: str) -> Streams:
    if text.strip() not in {"0", "1", "2", "3"}:
        raise SpecError(field, f"{text!r} is none of 0 (none), 1 (stdout), 2 (stderr), 3 (both)")
    return Streams(int(text))


def birth_environment(config: LaunchConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that workers are born with: everything except what differs by rank.

    It must be complete when the zygote is *executed*: some variables are read when libraries load, and have no effect after a
    fork.
    """
    env = {key: value for key, value in inherited.items() if key not in SECRETS}
    env.update(config.env)
    env[GROUP_VARIABLE] = config.group
    load(config.framework).birth(env, config.nproc, config.signals)
    return env


def rank_overrides(config: LaunchConfig, local_rank: int, node: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables of one rank of ``node`` that go before those its framework sets."""
    place = node.rsplit("-", 2)[1:2]  # a node's name is <group>-<place>-<incarnation>
    found = {PLACE_VARIABLE: place[0]} if place else {}
    found |= {name: place[0] for name in NODE_VARIABLES if place and inherited.get(name) == ""}
    if config.virtual_local_rank:
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible is not None else [str(one) for one in range(config.nproc)]
        found["LOCAL_RANK"] = "0"
        found["CUDA_VISIBLE_DEVICES"] = devices[local_rank].strip() if local_rank < len(devices) else ""
    return found
