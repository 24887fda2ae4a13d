"""A scenario: the job and the world around it, before anything goes wrong. With a list of faults it is a plan, a whole run."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import zlib
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgpack

from dlrover_core.errors import CoreError, PlanError
from dlrover_core.sim.faults import LEVELS, Fault, checked
from dlrover_core.spec import GroupSpec, JobSpec

TOKEN_BEGINS = "chaos1-"  # noqa: S105  # a word, not a secret
TOKEN_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job, its hosts, and what everything takes. Durations in seconds, all virtual.

    A job has one group of ``nodes``, or the ``groups`` that are named. The first of these is that of the fields, but for its own
    settings, and its steps are the job's. ``spares`` are hosts beyond those that all groups need. ``checkpoint_steps`` is every
    how many steps a state is kept that a new generation can resume from; what was made since is made again. ``step_s`` holds for
    a world of all ``nodes``; with ``fixed_batch`` a smaller one takes proportionally longer.
    """

    nodes: int = field(default=4, metadata={"doc": "nodes of the job"})
    workers_per_node: int = field(default=1, metadata={"doc": "workers per node"})
    steps: int = field(default=200, metadata={"doc": "steps until the job is done"})
    spares: int = field(default=1, metadata={"doc": "hosts beyond those needed"})
    hosts_per_rack: int = field(default=16, metadata={"doc": "hosts that share a switch"})
    nodes_min: int = field(default=0, metadata={"doc": "fewest nodes to train with; 0: all of them"})
    unit: int = field(default=1, metadata={"doc": "the world size, in nodes, is a multiple of this"})
    max_restarts: int = field(default=1_000_000, metadata={"doc": "restarts of the processes, whole job"})
    relaunch_max: int = field(default=1_000_000, metadata={"doc": "relaunches of one node"})
    on_join: str = field(
        default="restart", metadata={"doc": "what a late node does to a smaller world: restart, planned or never"}
    )
    standbys: int = field(default=0, metadata={"doc": "masters that stand by while one leads"})
    hosted_masters: bool = field(
        default=False, metadata={"doc": "each master has an address of its own, and agents know several"}
    )
    step_s: float = field(default=1.0, metadata={"doc": "one step"})
    fixed_batch: bool = field(
        default=True, metadata={"doc": "a smaller world makes a step in proportionally more time"}
    )
    checkpoint_steps: int = field(default=1, metadata={"doc": "steps between states that can be resumed from"})
    checkpoint_s: float = field(default=0.0, metadata={"doc": "how long training stands still for each of them"})
    boot_s: float = field(default=2.0, metadata={"doc": "from a node's launch to its agent's first word"})
    start_s: float = field(default=0.2, metadata={"doc": "from the order to the worker process"})
    load_s: float = field(
        default=0.5, metadata={"doc": "from the process to its first step: collectives set up, state loaded"}
    )
    stop_s: float = field(default=0.05, metadata={"doc": "from the order to the last worker's death"})
    exit_s: float = field(default=0.005, metadata={"doc": "from a worker's death to its agent's report"})
    cascade_s: float = field(
        default=0.05, metadata={"doc": "from a worker's death to its peers' errors; below 0: they only wait"}
    )
    cascade_ranks: int = field(default=8, metadata={"doc": "how many peers say so before they are stopped"})
    finish_s: float = field(default=0.0, metadata={"doc": "how far apart nodes end well, simulated engine only"})
    network_s: float = field(default=0.0005, metadata={"doc": "one frame, one way"})
    append_s: float = field(default=0.002, metadata={"doc": "one append to the log"})
    failover_s: float = field(default=1.0, metadata={"doc": "from a master's death to its successor's lead"})
    notice_s: float = field(default=5.0, metadata={"doc": "from a node's end to the scheduler's word"})
    snapshot_events: int = field(default=10_000, metadata={"doc": "records between two snapshots of the state"})
    settings: tuple[tuple[str, Any], ...] = field(
        default=(), metadata={"doc": "further settings of the JobSpec, by name"}
    )
    groups: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = field(
        default=(),
        metadata={"doc": "the job's groups: name, and settings of the GroupSpec by name; (): one, of the fields above"},
    )
    quiet: tuple[str, ...] = field(default=(), metadata={"doc": "groups whose workers tell no steps"})
    short: int = field(default=0, metadata={"doc": "so many of the hosts are not there before `room_s`"})
    room_s: float = field(default=0.0, metadata={"doc": "when all hosts are there"})

    def __post_init__(self) -> None:
        """Refuse what could never run. Raises `PlanError`."""
        for spot in fields(self):
            value = getattr(self, spot.name)
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and value < 0
                and spot.name != "cascade_s"
            ):
                raise PlanError(f"{spot.name} cannot be negative, got {value}")
        if min(self.steps, self.hosts_per_rack, self.checkpoint_steps, self.snapshot_events) < 1 or self.step_s <= 0:
            raise PlanError("steps, step_s, hosts_per_rack, checkpoint_steps and snapshot_events must be more than 0")
        try:
            spec = self.spec()
        except (CoreError, TypeError) as error:
            raise PlanError(f"no such job: {error}") from error
        first, *_ = spec.groups
        if not first.ends:
            raise PlanError(f"the steps of the first group are the job's: {first.name!r} must end it")
        if self.short > self.hosts:
            raise PlanError(f"short {self.short}: there are {self.hosts} hosts")

    @classmethod
    def smoke(cls) -> Scenario:
        """Small enough for every index of its history to be tried."""
        return cls(nodes=2, workers_per_node=2, steps=12, step_s=0.1, boot_s=0.5)

    def spec(self, job: str = "sim") -> JobSpec:
        """The job's spec."""
        own: dict[str, Any] = {
            "nodes_min": self.nodes_min or self.nodes,
            "nodes_max": self.nodes,
            "nproc": self.workers_per_node,
            "unit": self.unit,
            "relaunch_max": self.relaunch_max,
        }
        groups = tuple(
            GroupSpec(name, **{**(own if not number else {}), **dict(settings)})
            for number, (name, settings) in enumerate(self.groups)
        )
        return JobSpec(
            job,
            groups or (GroupSpec(**own),),
            max_restarts=self.max_restarts,
            on_join=self.on_join,
            **dict(self.settings),
        )

    @property
    def wanted(self) -> int:
        """How many nodes the job wants, of all groups."""
        return sum(group.nodes_max for group in self.spec().groups) if self.groups else self.nodes

    @property
    def hosts(self) -> int:
        """How many hosts there are in the end."""
        return self.wanted + self.spares


class Plan(NamedTuple):
    """A run, wholly decided before it begins. ``seed`` orders what happens at one instant, and nothing else."""

    level: str
    scenario: Scenario
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def check(self) -> Plan:
        """The plan, if it can be run. Raises `PlanError`."""
        if self.level not in LEVELS:
            raise PlanError(f"no level is called {self.level!r}; there are {', '.join(LEVELS)}")
        for fault in self.faults:
            checked(fault, self.level)
        return self

    def token(self) -> str:
        """The plan as one word, which `plan_of` reads: what a failure prints, and ``--chaos-replay`` takes."""
        defaults = Scenario()
        changed = {
            spot.name: getattr(self.scenario, spot.name)
            for spot in fields(Scenario)
            if getattr(self.scenario, spot.name) != getattr(defaults, spot.name)
        }
        packed = zlib.compress(
            msgpack.packb([self.level, changed, [list(fault) for fault in self.faults], self.seed]), 9
        )
        checksum = zlib.crc32(packed).to_bytes(4, "big")
        return TOKEN_BEGINS + base64.urlsafe_b64encode(checksum + packed).decode().rstrip("=")


def plan_of(token: str) -> Plan:
    """The plan that a token holds. Raises `PlanError`."""
    body = token.strip()
    if not body.startswith(TOKEN_BEGINS):
        raise PlanError(f"a replay token begins with {TOKEN_BEGINS!r}, this is {body[:40]!r}: copy it whole")
    body = body[len(TOKEN_BEGINS) :]
    try:
        raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        if zlib.crc32(raw[4:]).to_bytes(4, "big") != raw[:4]:
            raise PlanError("the replay token is damaged: copy it whole, in one line")
        unpacker = zlib.decompressobj()
        level, changed, faults, seed = msgpack.unpackb(unpacker.decompress(raw[4:], TOKEN_BYTES_MAX), use_list=False)
    except (binascii.Error, zlib.error, ValueError, TypeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"the replay token is damaged ({error}): copy it whole, in one line") from error
    known = {spot.name for spot in dataclasses.fields(Scenario)}
    if not set(changed) <= known:
        raise PlanError(
            f"the replay token sets {sorted(set(changed) - known)}: it was made by another version of dlrover-core"
        )
    return Plan(level, Scenario(**changed), tuple(Fault(*fault) for fault in faults), seed).check()
