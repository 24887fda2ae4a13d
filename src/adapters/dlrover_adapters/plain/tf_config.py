"""``TF_CONFIG`` for the tasks of TensorFlow's parameter servers: no library as the framework, and this variable beside it.

A group says ``framework = "dlrover_adapters.plain.tf_config"``, ``store = false``, ``coupling = "each"``, names in ``uses`` all
groups that are tasks, its own among them, and has `CLUSTER` in its environment: how many tasks of each there are. Its program
starts once that many can be called.

A task is the first worker of a node. It listens at `BELOW` less than the port that its agent keeps for it, because TensorFlow's
server refuses ports that anybody has bound, whatever options both set. In a pod nobody else is there.

The variable is what was so when the program began. One whose peer has moved fails, or is started again; then it is told anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping

from dlrover_adapters.peers import Peers
from dlrover_adapters.plain.worker import (
    CHECK,
    CPUS,
    STEPS,
    birth,
    environment,
    excused,
    find,
    found,
    has_peers,
    import_core,
    import_rest,
    quietly,
    record_error,
    refusal_in_child,
    refusal_in_zygote,
    reseed,
    serve_store,
)
from dlrover_adapters.plain.worker import begin as begin_plainly
from dlrover_core.errors import SpecError
from dlrover_core.runtime.launcher import WorkersLaunch

__all__ = [
    "CHECK",
    "CPUS",
    "STEPS",
    "begin",
    "birth",
    "environment",
    "excused",
    "find",
    "found",
    "has_peers",
    "import_core",
    "import_rest",
    "quietly",
    "record_error",
    "refusal_in_child",
    "refusal_in_zygote",
    "reseed",
    "serve_store",
]

VARIABLE, CLUSTER = "TF_CONFIG", "DLROVER_TF_CLUSTER"
EVALUATOR, PS = "evaluator", "ps"
BELOW = 10_000
PATIENCE_S = 120.0
"""So long all tasks are waited for; then those that are there are enough, if all parameter servers are."""
_PART = re.compile(r"([a-z][a-z0-9]*)=([0-9]{1,5})")


def begin(launch: WorkersLaunch, rank: int, agent_socket: str, slot_fd: int, stepped: Callable[[], int]) -> None:
    """As without a library; then wait for the other tasks. A `VARIABLE` that somebody has set is left as it is."""
    begin_plainly(launch, rank, agent_socket, slot_fd, stepped)
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = waited(os.environ)


def waited(environ: Mapping[str, str], patience_s: float = PATIENCE_S) -> str:
    """The variable's text, once the tasks can be called. Raises `SpecError` for a `CLUSTER` that is none."""
    from dlrover_adapters import peers

    sizes = cluster(environ.get(CLUSTER, ""))
    until, told, said = time.monotonic() + patience_s, Peers(0, {}), ""
    while True:
        left_s = until - time.monotonic()
        text, missing = config(told, sizes, environ, partly=left_s <= 0)
        if text:
            return text
        if left_s <= 0 and missing != said:
            sys.stderr.write(f"dlrover: {VARIABLE} waits for {missing}\n")
            said = missing
        with contextlib.suppress(TimeoutError):
            told = peers.wait(newer_than=told.version, timeout_s=left_s if left_s > 0 else None)


def config(told: Peers, sizes: Mapping[str, int], environ: Mapping[str, str], *, partly: bool) -> tuple[str, str]:
    """The variable, empty while tasks are missing; and which are. ``partly``: one of each is enough, beside all of `PS`."""
    kind, place = environ.get("DLROVER_GROUP", ""), int(environ.get("DLROVER_PLACE", "0"))
    there = {group: dict(told.groups.get(group, {})) for group in sizes}
    wanted = {group: 1 if partly and group != PS else count for group, count in sizes.items()}
    missing = [f"{group}-{one}" for group, count in sizes.items() for one in range(count) if one not in there[group]]
    if any(len(there[group]) < count for group, count in wanted.items()) or (
        kind in there and place not in there[kind]
    ):
        return "", ", ".join(missing) or f"{kind}-{place}"
    if missing and not partly:
        return "", ", ".join(missing)
    tasks = {group: [_listens(those[0]) for _, those in sorted(places.items())] for group, places in there.items()}
    index = sorted(there[kind]).index(place) if kind in there else place
    return json.dumps({"cluster": tasks, "task": {"type": kind, "index": index}}), ""


def _listens(address: str) -> str:
    """Where a task listens, whose agent keeps the port of this address."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - BELOW}"


def cluster(text: str) -> dict[str, int]:
    """How many tasks of each kind there are: ``ps=2,worker=3``. An evaluator is in no cluster. Raises `SpecError`."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        told = _PART.fullmatch(part)
        if told is None:
            raise SpecError(CLUSTER, f"{part!r} is no GROUP=TASKS; write for example ps=2,worker=3")
        if told[1] != EVALUATOR:
            found[told[1]] = int(told[2])
    if not found:
        raise SpecError(CLUSTER, "missing: write how many tasks of each group there are, ps=2,worker=3")
    return found
