"""`JobSpec`: everything about a job that a user may set, validated in one place.

Durations end in ``_s`` and are seconds; the state works in integer microseconds (`us`). The spec is written into the log's
first event as JSON with named fields, so that a later version may add settings and still read an old log.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

from dlrover_core.errors import SpecError

_NAME = re.compile(r"[a-z0-9]([a-z0-9_.]*[a-z0-9])?(-[a-z0-9_.]+)*")
NAME_BYTES_MAX = 63
NODES_MAX = 16_384
HUNG_MIN_S = 0.5
"""A process that is well may not be scheduled for some tenths of a second."""
ON_JOIN = ("restart", "planned", "never")
PRECHECK = ("off", "basic", "full")
REPORT_OR_REPLACE = ("report", "replace")
GROUP, EACH = COUPLING = ("group", "each")
_WORD = re.compile(r"[a-z][a-z0-9]*")


def us(seconds: float) -> int:
    """Seconds as integer microseconds."""
    return round(seconds * 1_000_000)


DEFAULT_GROUP = "worker"
"""The group of a job that names none."""


class Policy(NamedTuple):
    """What a group may have otherwise than its job: the settings of `JobSpec` with these names, as they are in force for it."""

    precheck: str
    on_join: str
    hang_s: float
    slow_action: str
    finish_s: float
    max_restarts: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Nodes of one role. A world of the group holds between ``nodes_min`` and ``nodes_max`` nodes, a multiple of ``unit``.

    Nodes of one *coupling set* train in one world and are restarted together. A set is a group (the default), several groups that
    name the same ``set``, or one node alone (``coupling`` is "each"). A change in one set restarts nobody in another.
    """

    name: str = DEFAULT_GROUP
    nodes_min: int = field(default=1, metadata={"doc": "fewest nodes to train with"})
    nodes_max: int = field(default=1, metadata={"doc": "nodes to run"})
    nproc: int = field(default=1, metadata={"doc": "workers per node"})
    unit: int = field(default=1, metadata={"doc": "the world size, in nodes, is a multiple of this"})
    relaunch_max: int = field(default=3, metadata={"doc": "relaunches of one node before it is given up"})
    memory_mib: int = field(default=0, metadata={"doc": "memory of a node, in MiB; 0: whatever its backend gives"})
    cpu_m: int = field(
        default=0, metadata={"doc": "CPU of a node, in thousandths of a CPU; 0: whatever its backend gives"}
    )
    gpus: int = field(default=0, metadata={"doc": "GPUs of a node; 0: whatever its backend gives"})
    set: str = field(
        default="", metadata={"doc": "coupling set that the group shares with others; empty: a set of its own"}
    )
    coupling: str = field(
        default=GROUP, metadata={"doc": "group: its nodes train in one world; each: every node in a world of its own"}
    )
    store: bool = field(default=True, metadata={"doc": "its worlds need a TCPStore; no: they form without one"})
    ends: bool = field(
        default=True, metadata={"doc": "the job is over when this group has finished; no: the job's end stops it"}
    )
    critical: bool = field(
        default=True, metadata={"doc": "the job fails with this group; no: the group is given up, the job goes on"}
    )
    uses: tuple[str, ...] = field(default=(), metadata={"doc": "groups whose addresses its workers need"})
    precheck: str | None = field(default=None, metadata={"doc": "precheck of this group; none: the job's"})
    on_join: str | None = field(default=None, metadata={"doc": "on_join of this group; none: the job's"})
    hang_s: float | None = field(default=None, metadata={"doc": "hang_s of this group; none: the job's"})
    slow_action: str | None = field(default=None, metadata={"doc": "slow_action of this group; none: the job's"})
    finish_s: float | None = field(default=None, metadata={"doc": "finish_s of this group; none: the job's"})
    max_restarts: int | None = field(
        default=None, metadata={"doc": "restarts of this group's set, counted by itself; none: the job's number"}
    )
    standby: int = field(
        default=0, metadata={"doc": "agents kept warm to take a dead node's place, where its backend can"}
    )

    def __post_init__(self) -> None:
        """Refuse what could never run."""
        if not _WORD.fullmatch(self.name):
            raise SpecError("group.name", f"{self.name!r} is not a lower-case word")
        if not 1 <= self.nodes_min <= self.nodes_max <= NODES_MAX:
            raise SpecError("nnodes", f"need 1 <= MIN <= MAX <= {NODES_MAX}, got {self.nodes_min}:{self.nodes_max}")
        if self.nproc < 1:
            raise SpecError("nproc-per-node", f"need at least 1 worker, got {self.nproc}")
        if self.unit < 1 or self.nodes_max % self.unit or self.nodes_max < self.unit:
            raise SpecError("unit", f"nodes_max {self.nodes_max} is not a multiple of {self.unit}")
        for name in ("relaunch_max", "memory_mib", "cpu_m", "gpus", "standby"):
            if getattr(self, name) < 0:
                raise SpecError(name, f"cannot be negative, got {getattr(self, name)}")
        self._check_coupling()
        self._check_policy()

    def _check_coupling(self) -> None:
        if self.set and not _WORD.fullmatch(self.set):
            raise SpecError("group.set", f"{self.set!r} of group {self.name!r} is not a lower-case word")
        if self.coupling not in COUPLING:
            raise SpecError("group.coupling", f"'group' or 'each', got {self.coupling!r} for group {self.name!r}")
        if self.coupling == EACH and self.set:
            raise SpecError(
                "group.set",
                f"group {self.name!r} is in set {self.set!r}, and coupling 'each' makes every node a set of its own: drop one",
            )
        if self.coupling == EACH and self.unit != 1:
            raise SpecError(
                "unit", f"every node of group {self.name!r} is a world of its own: unit must be 1, got {self.unit}"
            )

    def _check_policy(self) -> None:
        choices = {"precheck": PRECHECK, "on_join": ON_JOIN, "slow_action": REPORT_OR_REPLACE}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise SpecError(
                    f"group.{name}", f"{_listed(allowed)}, or none for the job's, got {value!r} for group {self.name!r}"
                )
        for name in ("hang_s", "finish_s"):
            value = getattr(self, name)
            if value is not None and not _seconds(value):
                raise SpecError(f"group.{name}", f"not a number of seconds: {value!r} for group {self.name!r}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise SpecError(
                "group.max_restarts", f"cannot be negative, got {self.max_restarts} for group {self.name!r}"
            )

    @property
    def coupled(self) -> str:
        """The coupling set of its nodes; empty: every node is a set of its own, named by its place."""
        return "" if self.coupling == EACH else self.set or self.name

    @property
    def floor(self) -> int:
        """The fewest nodes that form a world: ``nodes_min``, raised to a multiple of ``unit``. Never 0."""
        return -(-self.nodes_min // self.unit) * self.unit


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One training job. Every duration is in seconds."""

    job: str
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    max_restarts: int = field(default=3, metadata={"doc": "restarts of the processes, whole job, whatever rank failed"})
    on_join: str = field(
        default="restart",
        metadata={
            "doc": "what a late node does to a running smaller world: restart (at a step boundary where ranks can agree on one), "
            "planned (only there), never"
        },
    )
    joining: bool = field(
        default=False, metadata={"doc": "nodes come by themselves, one agent per host, instead of being launched"}
    )
    last_call_s: float = field(default=30.0, metadata={"doc": "wait for missing nodes once MIN are there"})
    grow_window_s: float = field(default=60.0, metadata={"doc": "late nodes are taken into a running world together"})
    plan_s: float = field(
        default=300.0,
        metadata={
            "doc": "a planned change has this long to come to a step boundary: then a drain is forced; 0: no plans"
        },
    )
    boundary_s: float = field(
        default=60.0,
        metadata={"doc": "ranks wait this long at the boundary of a planned change for those of other nodes"},
    )
    launch_s: float = field(default=900.0, metadata={"doc": "a node that has not joined by then is replaced"})
    gang_s: float = field(
        default=600.0,
        metadata={
            "doc": "how long a group may hold some of its nodes while its platform places the others. Then, up to a quarter "
            "later, it gives all of them back, and asks again after a pause of at most this long. Groups with "
            "`ends = false` give theirs back with it. 0: never"
        },
    )
    room_s: float = field(
        default=60.0, metadata={"doc": "how often a scheduler is asked how many more nodes would start; 0: never"}
    )
    silence_s: float = field(default=15.0, metadata={"doc": "an agent silent for this long is suspect"})
    unreachable_s: float = field(
        default=300.0, metadata={"doc": "a suspect whose backend says it runs is replaced after this"}
    )
    gone_s: float = field(
        default=0.25,
        metadata={"doc": "an agent whose connection was ended by its kernel is dead unless back within this"},
    )
    mass_silence_s: float = field(
        default=300.0, metadata={"doc": "more than half silent at once: no node is replaced for silence before this"}
    )
    evidence_s: float = field(
        default=300.0, metadata={"doc": "a verdict may be revised this long; final actions wait for it"}
    )
    linger_s: float = field(
        default=5.0,
        metadata={
            "doc": "a failing job's ranks may end by themselves this long: the rank that caused the failure may report late"
        },
    )
    quarantine_s: float = field(
        default=86_400.0, metadata={"doc": "a host that failed its check, or again and again, is avoided this long"}
    )
    quarantine_max_s: float = field(
        default=7 * 86_400.0,
        metadata={"doc": "each failure after a quarantine doubles the next one, up to this"},
    )
    broken_grace_s: float = field(
        default=0.0, metadata={"doc": "between SIGTERM and SIGKILL for workers of a broken world"}
    )
    finish_s: float = field(
        default=3600.0,
        metadata={"doc": "ranks may run on this long after the first one has ended well; 0: as long as they need"},
    )
    restart_pause_s: float = field(
        default=30.0,
        metadata={"doc": "longest pause before a program that fails at once, again and again, is restarted"},
    )
    stop_grace_s: float = field(default=30.0, metadata={"doc": "between SIGTERM and SIGKILL for a planned stop"})
    kill_wait_s: float = field(
        default=30.0, metadata={"doc": "a worker that survives SIGKILL this long makes its node faulty"}
    )
    signatures: str = field(default="", metadata={"doc": "the user's own signatures of failures, as JSON"})
    policy: str = field(default="", metadata={"doc": "the user's own numbers for what is done about failures, as JSON"})
    hang_s: float = field(
        default=60.0,
        metadata={"doc": "no rank has finished a step for this long, at least: it is looked for a hang; 0: never"},
    )
    hang_first_step_s: float = field(
        default=1800.0, metadata={"doc": "the same before the first two steps of a generation are made"}
    )
    hang_phase_s: float = field(
        default=1800.0,
        metadata={"doc": "the same in a phase that the script announces, or while a rank is seen to work"},
    )
    hang_collect_s: float = field(
        default=15.0, metadata={"doc": "ranks may take this long to show their stacks before one is named without"}
    )
    hang_action: str = field(
        default="restart", metadata={"doc": "what is done about a rank that hangs: restart or report"}
    )
    precheck: str = field(
        default="off", metadata={"doc": "check nodes before they train: off, basic (each alone), full (in pairs too)"}
    )
    check_s: float = field(default=120.0, metadata={"doc": "one round of a node check may take this long"})
    check_fresh_s: float = field(
        default=86_400.0, metadata={"doc": "a node that passed its check is not checked again for this long"}
    )
    check_slow: str = field(
        default="report", metadata={"doc": "what is done about a node whose check was slow: report or replace"}
    )
    slow_action: str = field(
        default="report",
        metadata={"doc": "what is done about a rank that computes slower than it did: report or replace"},
    )
    slow_replace_s: float = field(
        default=300.0, metadata={"doc": "what replacing a node is taken to cost before this job has done it once"}
    )
    progress_s: float = field(default=60.0, metadata={"doc": "how often the step reached goes into the log"})
    heartbeat_s: float = field(default=1.0, metadata={"doc": "how often an agent reports to the master"})
    ready_s: float = field(
        default=300.0, metadata={"doc": "importing the framework and all preloads on a node may take this long"}
    )
    probe_s: float = field(
        default=5.0,
        metadata={"doc": "a worker forked to try a preload out must compute within this; else the preload is left out"},
    )
    start_s: float = field(
        default=60.0, metadata={"doc": "a node's workers must exist this long after the order to start them"}
    )
    refill_s: float = field(
        default=10.0,
        metadata={"doc": "processes for the next start are forked at the first step, or this long after the start"},
    )
    hung_s: float = field(
        default=5.0,
        metadata={
            "doc": "a process of ours (master, zygote, keeper; a saver: 6 times as long) that has not answered its parent for "
            "this long is killed and replaced; one that computes gets 4 times as long; 0: never"
        },
    )

    def __post_init__(self) -> None:
        """Refuse what could never run."""
        if not _NAME.fullmatch(self.job) or len(self.job) > NAME_BYTES_MAX:
            raise SpecError(
                "job-id",
                f"{self.job!r} is not a name: lower-case letters, digits, '-', '_', '.', at most {NAME_BYTES_MAX}",
            )
        if len({group.name for group in self.groups}) != len(self.groups) or not self.groups:
            raise SpecError("groups", "need at least one group, each with its own name")
        if self.max_restarts < 0:
            raise SpecError("max-restarts", f"cannot be negative, got {self.max_restarts}")
        if self.on_join not in ON_JOIN:
            raise SpecError("on-join", f"'restart', 'planned' or 'never', got {self.on_join!r}")
        if self.hang_action not in ("restart", "report"):
            raise SpecError("hang-action", f"'restart' or 'report', got {self.hang_action!r}")
        if self.precheck not in PRECHECK:
            raise SpecError("precheck", f"'off', 'basic' or 'full', got {self.precheck!r}")
        if self.check_slow not in REPORT_OR_REPLACE:
            raise SpecError("check-slow", f"'report' or 'replace', got {self.check_slow!r}")
        if self.slow_action not in REPORT_OR_REPLACE:
            raise SpecError("slow-action", f"'report' or 'replace', got {self.slow_action!r}")
        for spot in fields(self):
            value = getattr(self, spot.name)
            if spot.name.endswith("_s") and not _seconds(value):
                raise SpecError(spot.name, f"not a number of seconds: {value!r}")
        for name in ("check_s", "heartbeat_s", "ready_s", "probe_s", "start_s"):
            if getattr(self, name) <= 0:
                raise SpecError(name, f"must be more than 0, got {getattr(self, name)}")
        if 0 < self.hung_s < HUNG_MIN_S:
            raise SpecError("hung_s", f"at least {HUNG_MIN_S:g} s, or 0 for never, got {self.hung_s}")
        if self.heartbeat_s * 3 > self.silence_s:
            raise SpecError("silence_s", f"must be at least 3 heartbeats of {self.heartbeat_s} s, got {self.silence_s}")
        _check_sets(self)

    @property
    def sets(self) -> Mapping[str, tuple[GroupSpec, ...]]:
        """The groups of each coupling set, in the order of the spec. Groups whose nodes are sets of their own are in none."""
        found: dict[str, tuple[GroupSpec, ...]] = {}
        for group in self.groups:
            if group.coupled:
                found[group.coupled] = (*found.get(group.coupled, ()), group)
        return found

    def in_force(self, name: str) -> Policy:
        """The policy that holds for the group of that name: its own where it has one, else the job's. Raises `SpecError`."""
        group = self.group(name)
        return Policy(*(_first(getattr(group, one), getattr(self, one)) for one in Policy._fields))

    def group(self, name: str) -> GroupSpec:
        """The group of that name. Raises `SpecError`."""
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError("group", f"no group {name!r} in job {self.job!r}")

    def to_json(self) -> str:
        """As the log's first event holds it."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """The spec in a log's first event. Fields this version does not know are left out."""
        raw = cast(dict[str, Any], json.loads(text))
        groups = tuple(_known(GroupSpec, _read(group)) for group in raw.pop("groups"))
        return cast(JobSpec, _known(cls, {**raw, "groups": groups}))


def _known(cls: Any, raw: Mapping[str, Any]) -> Any:
    names = {spot.name for spot in fields(cls)}
    return cls(**{name: value for name, value in raw.items() if name in names})


def _read(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """A group as JSON has it, its lists as tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}


def _first(own: Any, jobs: Any) -> Any:
    return jobs if own is None else own


def _seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 10**9


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


# What is a set's rather than a group's: groups that share one must agree in it.
_OF_THE_SET = ("store", "critical", *Policy._fields)


def _check_sets(spec: JobSpec) -> None:
    """Refuse groups that do not fit together."""
    names = {group.name for group in spec.groups}
    for group in spec.groups:
        for used in group.uses:
            if used not in names:
                raise SpecError(
                    "group.uses", f"group {group.name!r} uses {used!r}, and the groups are {_list_of(spec)}"
                )
    if not any(group.ends and group.critical for group in spec.groups):
        raise SpecError(
            "group.ends",
            f"no group of {_list_of(spec)} both ends the job and is critical: nobody could tell when it is over; "
            "set ends and critical of one group to true",
        )
    for name, groups in spec.sets.items():
        if name in names and all(group.name != name for group in groups):
            raise SpecError(
                "group.set", f"{name!r} of group {groups[0].name!r} is the name of a group outside that set"
            )
        for wrong in _disagreements(spec, name, groups):
            raise wrong
    for group in spec.groups:
        if spec.in_force(group.name).precheck == "full" and not group.store:
            raise SpecError(
                "group.precheck",
                f"'full' checks pairs of nodes over a store, and group {group.name!r} has none: 'basic' or 'off'",
            )


def _disagreements(spec: JobSpec, name: str, groups: tuple[GroupSpec, ...]) -> Iterator[SpecError]:
    first = groups[0]
    for other in groups[1:]:
        for one in _OF_THE_SET:
            ours, theirs = (
                getattr(spec.in_force(group.name) if one in Policy._fields else group, one) for group in (first, other)
            )
            if ours != theirs:
                yield SpecError(
                    f"group.{one}",
                    f"groups {first.name!r} ({ours!r}) and {other.name!r} ({theirs!r}) share the set {name!r} and must agree",
                )


def _list_of(spec: JobSpec) -> str:
    return ", ".join(group.name for group in spec.groups)
