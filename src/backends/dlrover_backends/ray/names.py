"""Names in the cluster: a run's Ray namespace, its placement groups, and its keys in the key-value store.

Every one begins with `PREFIX`, by which ``dlrover ray ls`` finds what a killed launcher has left; but a removed run's mark begins
with `REMOVED`, for nothing of that run is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

PREFIX, REMOVED = "dlrover:", "dlrover-removed:"
TOKEN, PLACE, DELETED, ENV = "token", "place", "deleted", "env"  # kinds of keys; the token is a number
SEATED, TAKEN = "seated", "taken"  # what a node is to be, and whose a standby is
_STANDBY = "-standby"


class Run(NamedTuple):
    """A run in the cluster.

    job: the job's name
    run: the id of this life of it
    """

    job: str
    run: str

    @property
    def space(self) -> str:
        """The run's Ray namespace, and what its keys begin with."""
        return f"{PREFIX}{quote(self.job, safe='')}:{quote(self.run, safe='')}"

    @property
    def mark(self) -> str:
        """The key that says that the run was removed, as ``dlrover ray rm`` does it."""
        return f"{REMOVED}{self.space.removeprefix(PREFIX)}/"

    def group(self, node: str) -> str:
        """The name of a node's placement group, which no namespace keeps apart from others'."""
        return f"{self.space}/{node}"

    def key(self, kind: str, node: str = "") -> str:
        """A key in the cluster's key-value store."""
        return f"{self.space}/{kind}/{node}"


def run_of(space: str) -> Run | None:
    """The run whose namespace this is; None: it is somebody else's."""
    words = space.partition("/")[0].split(":")
    if len(words) != 3 or f"{words[0]}:" != PREFIX:
        return None
    return Run(unquote(words[1]), unquote(words[2]))


def standby(job: str, group: str, number: int) -> str:
    """The name of a standby's actor. Nodes' names end with two numbers."""
    return f"{job}-{group}{_STANDBY}-{number}"


def is_standby(actor: str) -> bool:
    """Was the actor of this name made as a standby? It may be a node by now."""
    head, _, number = actor.rpartition("-")
    return head.endswith(_STANDBY) and number.isascii() and number.isdecimal()


def number_of(actor: str) -> int:
    """The number of a standby."""
    return int(actor.rpartition("-")[2])


def folders(env: Mapping[str, Any]) -> list[str]:
    """The folders and files of this host that a runtime environment names."""
    return [one for one in _parts(env) if "://" not in one]


def packages(env: Mapping[str, Any]) -> list[str]:
    """What a runtime environment names of the cluster's own store."""
    return [one for one in _parts(env) if one.startswith("gcs://")]


def plain(env: Mapping[str, Any]) -> dict[str, Any]:
    """The same runtime environment with lists as lists. The desk's socket makes tuples of them, which Ray refuses."""
    return dict(json.loads(json.dumps(env)))


def digest(env: Mapping[str, Any]) -> str:
    """A short name of a runtime environment."""
    return hashlib.sha256(json.dumps(env, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _parts(env: Mapping[str, Any]) -> list[str]:
    modules = env.get("py_modules")
    parts = [env.get("working_dir"), *(modules if isinstance(modules, list) else ())]
    return [one for one in parts if isinstance(one, str)]
