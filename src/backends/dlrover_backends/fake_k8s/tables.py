"""What kubectl asks for: tables, and objects reduced to their metadata."""

from __future__ import annotations

import datetime as dt
from typing import Any

from dlrover_backends.fake_k8s import schemas
from dlrover_backends.fake_k8s.kinds import Kind

Object = dict[str, Any]

_POD_COLUMNS = (
    ("Name", "name", 0),
    ("Ready", "", 0),
    ("Status", "", 0),
    ("Restarts", "", 0),
    ("Age", "", 0),
    ("IP", "", 1),
    ("Node", "", 1),
    ("Nominated Node", "", 1),
    ("Readiness Gates", "", 1),
)


def partial(obj: Object) -> Object:
    """An object's metadata alone."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def table(kind: Kind, items: list[Object], metadata: Object, now: dt.datetime) -> Object:
    """A table of objects, with the columns of their kind."""
    if kind.key == ("", "pods"):
        columns = [_column(name, "string", form, priority) for name, form, priority in _POD_COLUMNS]
        rows = [_pod_cells(one, now) for one in items]
    elif kind.columns:
        columns = [_column("Name", "string", "name", 0)]
        columns += [_column(one["name"], one["type"], "", one.get("priority", 0)) for one in kind.columns]
        rows = [[one["metadata"]["name"], *(_cell(one, column, now) for column in kind.columns)] for one in items]
    else:
        columns = [_column("Name", "string", "name", 0), _column("Created At", "date", "", 0)]
        rows = [[one["metadata"]["name"], one["metadata"]["creationTimestamp"]] for one in items]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": columns,
        "rows": [_row(cells, one) for cells, one in zip(rows, items, strict=True)],
    }


_ENDS = {"Succeeded": "The pod has completed successfully.", "Failed": "The pod failed."}


def _row(cells: list[Any], obj: Object) -> Object:
    row: Object = {"cells": cells, "object": partial(obj)}
    phase = (obj.get("status") or {}).get("phase")
    if obj.get("kind") == "Pod" and phase in _ENDS:
        row["conditions"] = [{"type": "Completed", "status": "True", "reason": phase, "message": _ENDS[phase]}]
    return row


def _column(name: str, kind: str, form: str, priority: int) -> Object:
    return {"name": name, "type": kind, "format": form, "description": name, "priority": priority}


def _cell(obj: Object, column: Object, now: dt.datetime) -> Any:
    value = schemas.at(obj, column["jsonPath"])
    if column["type"] == "date" and value:
        return age(value, now)
    return value


def age(since: str, now: dt.datetime) -> str:
    """How long ago, in kubectl's short form."""
    seconds = int((now - dt.datetime.strptime(since, "%Y-%m-%dT%H:%M:%S%z")).total_seconds())
    if seconds < 120:
        return f"{max(0, seconds)}s"
    if seconds < 3 * 3600:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h" if seconds < 48 * 3600 else f"{seconds // 86400}d"


def _pod_cells(pod: Object, now: dt.datetime) -> list[Any]:
    statuses = pod["status"].get("containerStatuses") or []
    ready = sum(bool(one.get("ready") and "running" in (one.get("state") or {})) for one in statuses)
    restarts = sum(one.get("restartCount", 0) for one in statuses)
    last = max(
        (
            one["lastState"]["terminated"]["finishedAt"]
            for one in statuses
            if ((one.get("lastState") or {}).get("terminated") or {}).get("finishedAt")
        ),
        default=None,
    )
    told = f"{restarts} ({age(last, now)} ago)" if restarts and last else str(restarts)
    status = pod["status"]
    return [
        pod["metadata"]["name"],
        f"{ready}/{len(pod['spec']['containers'])}",
        word(pod),
        told,
        age(pod["metadata"]["creationTimestamp"], now),
        status.get("podIP") or "<none>",
        pod["spec"].get("nodeName") or "<none>",
        status.get("nominatedNodeName") or "<none>",
        "<none>",
    ]


def word(pod: Object) -> str:
    """The word that kubectl prints as a pod's status."""
    status = pod["status"]
    found = str(status.get("reason") or status.get("phase") or "")
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            found = "SchedulingGated"
    running = False
    for one in reversed(status.get("containerStatuses") or []):
        state = one.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated")
        if waiting.get("reason"):
            found = waiting["reason"]
        elif ended is not None and ended.get("reason"):
            found = ended["reason"]
        elif ended is not None:
            signal = ended.get("signal")
            found = f"Signal:{signal}" if signal else f"ExitCode:{ended['exitCode']}"
        elif one.get("ready") and "running" in state:
            running = True
    if found == "Completed" and running:
        found = "Running"
    if pod["metadata"].get("deletionTimestamp"):
        found = "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
        if status.get("phase") in {"Succeeded", "Failed"}:
            found = str(status.get("reason") or found)
    return found
