"""The seat: everything that turns a waiting process into one particular worker of one particular generation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dlrover_core.errors import MalformedMessage
from dlrover_core.runtime.launcher import WorkersLaunch

from .config import LaunchConfig, Mode, rank_overrides
from .import_list import path_of


class Seat(NamedTuple):
    """One worker's place. With it travel file descriptors: stdout, stderr and the step slot."""

    launch: WorkersLaunch
    local_rank: int
    argv: tuple[str, ...]
    mode: Mode
    role: str
    title: str
    agent_socket: str
    error_file: str
    env: dict[str, str]
    cpus: tuple[int, ...]
    imports: str = ""
    """Where this worker writes down what it has imported by its first step; empty: it does not."""

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.launch.first_rank + self.local_rank


def seat_for(
    config: LaunchConfig,
    launch: WorkersLaunch,
    local_rank: int,
    agent_socket: str,
    error_file: str,
    cpus: tuple[int, ...] = (),
    more: Mapping[str, str] = MappingProxyType({}),
) -> Seat:
    """The seat of ``local_rank`` in ``launch``; on ``cpus``, empty: on all; with ``more`` in its environment.

    Its store is where somebody named it, if one did, and its run's id is the one that somebody gave.
    """
    launch = launch._replace(store=config.store_at or launch.store, run=config.run_id or launch.run)
    rank = launch.first_rank + local_rank
    node = launch.node or config.node
    title = f"dlrover worker --job {config.job} --node {node} --rank {rank} {config.argv[0]}"
    env = {**rank_overrides(config, local_rank, node, os.environ), **more}
    imports = path_of(config) if local_rank == 0 else ""  # one of a node speaks for all
    return Seat(
        launch, local_rank, config.argv, config.mode, config.role, title, agent_socket, error_file, env, cpus, imports
    )


def to_wire(seat: Seat) -> dict[str, Any]:
    """As a frame's body."""
    return {**seat._asdict(), "launch": list(seat.launch), "mode": seat.mode.value}


def from_wire(body: dict[str, Any]) -> Seat:
    """The seat in a frame. Raises `MalformedMessage`."""
    try:
        fields = dict(body)
        fields["launch"] = WorkersLaunch(*fields["launch"])
        fields["mode"] = Mode(fields["mode"])
        fields["argv"] = tuple(fields["argv"])
        fields["cpus"] = tuple(fields["cpus"])
        return Seat(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedMessage(f"not a seat: {error}") from error
