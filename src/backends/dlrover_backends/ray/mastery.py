"""What the cluster keeps of a job's masters, in its key-value store: who leads which run, where, and how that ended.

A record is the claim of a job's name with the highest number, written before anything is started; what else is kept has the run
in its key. Pure: `private` holds the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from dlrover_backends.ray import names

SPACE = "dlrover-masters"
"""The Ray namespace of all masters' keepers: there a job's name is used once."""
PREFIX, CLAIM = "masters/", "claim/"
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
    backend:     ``ray:ARGS``, as masters in the cluster are told it, without the runtime environment
    env:         further variables of the masters
    cwd:         where the command was typed; empty: in the folder of the runtime environment
    log:         the URL of a log that hosts share; empty: SQLite in ``state_dir``
    state_dir:   the state directory; empty: the default of the keeper's host
    bind:        the address at which masters listen, without a port
    port:        where the driver's masters listened; 0: a free port
    driver:      the launcher whose death is waited for, as ``PID:START``; empty: masters are started at once
    pinned:      the resource of the host that they may run on alone; empty: any host
    keepers:     how many keepers there are, each on another host
    runtime_env: that of the nodes; its folders are addresses in the cluster, which keeps them as long as the masters
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
    runtime_env: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_map(self) -> dict[str, Any]:
        """As `of_map` takes it, of plain values alone."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def of_map(told: Mapping[str, Any]) -> Plan:
    """The plan that `Plan.to_map` has made a map of."""
    env = names.plain(told.get("runtime_env", {}))
    return Plan(**{**told, "argv": tuple(told["argv"]), "runtime_env": env})


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
    claim:     the number of the claim that this is
    since:     when it was claimed, in seconds of the claimant's wall clock
    claimant:  Ray's id of the driver that claimed it: the desk, or the command that was typed; empty: not known
    encrypts:  do the driver's masters show a certificate?
    """

    job: str
    run: str
    token: str = field(repr=False)
    driver: str = ""
    addresses: Mapping[int, str] = field(default_factory=dict)
    over: int | None = None
    words: str = ""
    claim: int = 0
    since: int = 0
    claimant: str = ""
    encrypts: bool = False

    @property
    def masters(self) -> list[str]:
        """Where to ask, the driver's masters first."""
        return list(dict.fromkeys(filter(None, (self.driver, *self.addresses.values()))))


def key(job: str, part: str = "") -> str:
    """What all keys of a job begin with, or the key of a part: `claimed`, `at` or `end`."""
    return f"{PREFIX}{quote(job, safe='')}/{part}"


def claimed(number: int) -> str:
    """The part that is a claim. No such key begins another one, so that one can be removed alone."""
    return f"{CLAIM}{number:012d}"


def at(run: str, number: int) -> str:
    """The part that says where a keeper's masters are."""
    return f"{of_run('at', run)}{number}"


def end(run: str) -> str:
    """The part that says how a run has ended."""
    return of_run("end", run)


def of_run(kind: str, run: str) -> str:
    """What parts of a kind, ``at`` or ``end``, begin with for one run, and for no other one."""
    return f"{kind}/{quote(run, safe='')}/"


def called(job: str, run: str, number: int) -> str:
    """The name of a keeper's actor."""
    return f"{quote(job, safe='')}#{quote(run, safe='')}#{number}"


def run_of(name: str) -> tuple[str, str]:
    """The job and the run of the keeper with this name."""
    job, _, run = name.rpartition("#")[0].partition("#")
    return unquote(job), unquote(run)


def claims(parts: Mapping[str, bytes]) -> dict[int, bytes]:
    """The claims among a job's parts, by their numbers. One that was removed while they were read is empty, and is none."""
    return {int(name.removeprefix(CLAIM)): value for name, value in parts.items() if name.startswith(CLAIM) and value}


def record_of(job: str, parts: Mapping[str, bytes]) -> Record | None:
    """The record that these parts are; None: there is none. ``parts``: values by the end of their keys."""
    found = claims(parts)
    if not found:
        return None
    number = max(found)
    told = json.loads(found[number])
    over, where = json.loads(parts.get(end(told["run"])) or b"{}"), of_run("at", told["run"])
    addresses = {
        int(name.removeprefix(where)): value.decode() for name, value in parts.items() if name.startswith(where)
    }
    return Record(
        job,
        told["run"],
        told["token"],
        told.get("driver", ""),
        dict(sorted(addresses.items())),
        over.get("status"),
        over.get("words", ""),
        number,
        int(told.get("since", 0)),
        told.get("claimant", ""),
        bool(told.get("encrypts")),
    )


def told(status: int) -> str:
    """What an exit status of masters means for the job, in words."""
    return ENDS.get(status, f"failed: its masters end with status {status}")
