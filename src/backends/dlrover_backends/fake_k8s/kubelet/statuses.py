"""The statuses that a kubelet writes, in the form of the recordings."""

from __future__ import annotations

import datetime as dt
from typing import Any

Object = dict[str, Any]

LOW_ON_MEMORY = "The node was low on resource: memory."
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
DEADLINE = "Pod was active on the node longer than the specified deadline"


def stamp() -> str:
    """The present time, as the API writes it."""
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def conditions(*, ready: bool, reason: str | None, disruption: tuple[str, str] | None = None) -> list[Object]:
    """A bound pod's conditions."""
    now = stamp()

    def one(kind: str, status: bool, why: str | None = None) -> Object:
        return {"type": kind, "status": str(status), "lastTransitionTime": now, "lastProbeTime": None, "reason": why}

    found = [
        one("PodReadyToStartContainers", True),
        one("Initialized", True),
        one("Ready", ready, reason),
        one("ContainersReady", ready, reason),
        one("PodScheduled", True),
    ]
    if disruption is not None:
        found.append({**one("DisruptionTarget", True, disruption[0]), "message": disruption[1]})
    return found


def container(spec: Object, state: Object, *, restarts: int = 0, last: Object | None = None) -> Object:
    """One container's status."""
    running = "running" in state
    return {
        "name": spec["name"],
        "image": spec.get("image", ""),
        "imageID": "sha256:0",
        "containerID": f"process://{spec['name']}{restarts}",
        "ready": running,
        "started": running,
        "restartCount": restarts,
        "state": state,
        "lastState": last or {},
    }


def terminated(code: int, began: str, *, reason: str = "", message: str = "") -> Object:
    """The state of a container that ended."""
    inside: Object = {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
    inside.update(startedAt=began, finishedAt=stamp(), containerID="process://0")
    if message:
        inside["message"] = message
    return {"terminated": inside}


def waiting(reason: str, message: str = "") -> Object:
    """The state of a container that does not run yet."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def pending(containers: list[Object], began: str) -> Object:
    """A pod whose containers do not run yet."""
    found = conditions(ready=False, reason="ContainersNotReady")
    return {"phase": "Pending", "startTime": began, "conditions": found, "containerStatuses": containers}


def running(containers: list[Object], address: str, began: str) -> Object:
    """A pod that runs."""
    ready = all(one["ready"] or "terminated" in one["state"] for one in containers)
    return {
        "phase": "Running",
        "hostIP": "127.0.0.1",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": began,
        "conditions": conditions(ready=ready, reason=None if ready else "ContainersNotReady"),
        "containerStatuses": containers,
    }


def ended(
    containers: list[Object], *, failed: bool, reason: str = "", message: str = "", platform: bool = False
) -> Object:
    """A pod that ended; `platform` for one that the kubelet ended for the node's sake."""
    told = "PodFailed" if failed else "PodCompleted"
    disruption = ("TerminationByKubelet", message) if platform else None
    status: Object = {
        "phase": "Failed" if failed else "Succeeded",
        "conditions": conditions(ready=False, reason=told, disruption=disruption),
        "containerStatuses": containers,
    }
    if reason:
        status.update(reason=reason, message=message)
    return status


def refused(reason: str, message: str) -> Object:
    """A pod that the kubelet did not admit."""
    return {"phase": "Failed", "reason": reason, "message": message, "startTime": stamp()}


def node_conditions() -> list[Object]:
    """A node's conditions when all is well."""
    now = stamp()

    def one(kind: str, status: str, reason: str, message: str) -> Object:
        times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
        return {"type": kind, "status": status, **times, "reason": reason, "message": message}

    return [
        one("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
        one("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
        one("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
        one("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ]
