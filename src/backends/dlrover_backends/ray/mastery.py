"""What the cluster keeps of a job's masters, in its key-value store: who leads which run, where, and how that ended.

A record is written once by whoever claims the job's name, before anything is started. Pure but for the store that it is given:
`cluster` and `private` hold the real one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, unquote

SPACE = "dlrover-masters"
"""The Ray namespace of all masters' keepers: there a job's name is used once."""
PREFIX = "masters/"
HEAD = "node:__internal_head__"
"""The resource that Ray gives to the host of the head, and to no other one."""

EVERYWHERE = "0.0.0.0"  # noqa: S104  # nodes are on other hosts, and show a token

ENDS = {0: "ended well", 1: "failed", 78: "failed: its log cannot be led", 93: "failed: it made no progress"}
"""Exit statuses of masters after which no other one is started, and what they mean for the job."""


@dataclass(frozen=True)
class Plan:
    """One job's masters, and how a keeper starts them.

    job:         the job's name
    run:         the id of this life of it
    argv:        the words after ``dlrover-run``, as they were typed
    token:       the job's secret
    backend:     ``ray:ARGS``, as masters in the cluster are told it
    env:         further variables of the masters
    cwd:         where the command was typed; empty: in the folder of the runtime environment
    log:         the URL of a log that hosts share; empty: SQLite in ``state_dir``
    state_dir:   the state directory; empty: the default of the keeper's host
    bind:        the address at which masters listen, without a port
    port:        where the driver's masters listened; 0: a free port
    driver:      the launcher whose death is waited for, as ``PID:START``; empty: masters are started at once
    pinned:      the resource of the host that they may run on alone; empty: any host
    keepers:     how many keepers there are, each on another host
    runtime_env: folders that are kept in the cluster as long as the masters are: addresses alone
    """

    job: str
    run: str
    argv: tuple[str, ...]
    token: str = field(repr=False)
    backend: str = "ray"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    log: str = field(default="", repr=False)
    state_dir: str = ""
    bind: str = EVERYWHERE
    port: int = 0
    driver: str = ""
    pinned: str = ""
    keepers: int = 1
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def to_map(self) -> dict[str, Any]:
        """As `of_map` takes it, of plain values alone."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def of_map(told: Mapping[str, Any]) -> Plan:
    """The plan that `Plan.to_map` has made a map of."""
    return Plan(**{**told, "argv": tuple(told["argv"])})


@dataclass(frozen=True)
class Record:
    """What the store says of one job.

    job:       its name
    run:       the id of this life of it
    token:     its secret
    driver:    ``host:port`` of the masters beside the command that was typed; empty: it was detached
    addresses: ``host:port`` of masters in the cluster, by the number of their keeper
    over:      the exit status of the masters that came last; None: they are not over
    words:     what these said last
    """

    job: str
    run: str
    token: str = field(repr=False)
    driver: str = ""
    addresses: Mapping[int, str] = field(default_factory=dict)
    over: int | None = None
    words: str = ""

    @property
    def masters(self) -> list[str]:
        """Where to ask, the driver's masters first."""
        return list(dict.fromkeys(filter(None, (self.driver, *self.addresses.values()))))


def key(job: str, part: str = "") -> str:
    """The key of a job's record, or of a part of it: ``at/NUMBER``, ``end``."""
    return f"{PREFIX}{quote(job, safe='')}/{part}"


def called(job: str, number: int) -> str:
    """The name of a keeper's actor."""
    return f"{quote(job, safe='')}#{number}"


def job_of(name: str) -> str:
    """The job of the keeper with this name."""
    return unquote(name.rpartition("#")[0])


def record_of(job: str, parts: Mapping[str, bytes]) -> Record | None:
    """The record that these parts are; None: there is none. ``parts``: values by the end of their keys, the record's empty."""
    if not parts.get(""):
        return None
    told, end = json.loads(parts[""]), json.loads(parts.get("end") or b"{}")
    if end.get("run") != told["run"]:
        end = {}
    addresses = {
        int(name.removeprefix("at/")): value.decode() for name, value in parts.items() if name.startswith("at/")
    }
    return Record(
        job,
        told["run"],
        told["token"],
        told.get("driver", ""),
        dict(sorted(addresses.items())),
        end.get("status"),
        end.get("words", ""),
    )


def told(status: int) -> str:
    """What an exit status of masters means for the job, in words."""
    return ENDS.get(status, f"failed: its masters end with status {status}")
