"""What a pod says of its node: phase, how it ended, why it waits, and what the platform is about to do with it.

The platform's own word comes first, because an exit status says little: a container that was killed for memory, one that an
eviction ended and one that somebody killed all end with 137. Words are Kubernetes's (``OOMKilled``, ``EvictionByEvictionAPI``),
which diagnosis knows.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

from dlrover_backends.k8s import names
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.pods import CONTAINER_NOTE
from dlrover_backends.shared.last_words import exited
from dlrover_core.runtime.backend import AVOIDED, DELETED, Observation

ZONE = "topology.kubernetes.io/zone"
TEXT_MAX = 300
# What no waiting mends: the kubelet tries for ever, and the pod's own spec is wrong.
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"})
# How kubelets and runtimes say that they were too slow, or are away: what passes, and ends no job.
PASSING = (
    "context deadline exceeded",
    "code = DeadlineExceeded",
    "code = Unavailable",
    "failed to reserve container name",
    "failed to sync secret cache",
    "failed to sync configmap cache",
    "timed out waiting for the condition",
)
PULLING = frozenset({"ErrImagePull", "ImagePullBackOff"})
# How registries and runtimes say that there is no such image, rather than that it cannot be had now.
NO_IMAGE = ("code = NotFound", "manifest unknown", "not found: manifest", "repository does not exist", "name unknown")
STRANDED_S = 60.0
"""So long after a pod was to be gone, its silent host is believed to be."""
NOT_READY = "its host is not ready"
DEVICE = "DeviceUnhealthy"
"""Our own word, which the kubelet has none for."""
USUAL = frozenset({"", "ContainerCreating", "PodInitializing"})


def observation(pod: Json, wall_s: float | None = None) -> Observation:
    """What a pod shows of its node. ``wall_s``: the wall clock, where the age of an ending matters; None: it ended now."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    name = true_name(pod)
    host = str((pod.get("spec") or {}).get("nodeName") or "")
    domain = str((metadata.get("labels") or {}).get(ZONE) or "")
    main = _main(pod)
    state: Json = (main or {}).get("state") or {}
    phase = str(status.get("phase") or "Pending")
    if "terminated" in state or phase in {"Failed", "Succeeded"}:
        return _ended(pod, name, main, wall_s)._replace(host=host, domain=domain)
    notice, notice_us = _notice(pod, wall_s)
    if "running" in state or phase in {"Running", "Unknown"}:
        lost = phase == "Unknown" or _host_is_silent(status, main)
        reason = _worded(status.get("reason"), status.get("message")) if lost else ""
        return Observation(
            name,
            "lost" if lost else "running",
            reason=reason or (NOT_READY if lost else ""),
            host=host,
            domain=domain,
            notice=notice,
            notice_us=notice_us,
        )
    if host and _is_late(pod, wall_s):
        # Nothing of it runs that the kubelet would have to end: the host is away, and nobody knows for how long.
        return Observation(name, "lost", reason=disruption(pod) or NOT_READY, host=host, domain=domain)
    wrong = _hopeless(status)
    if wrong:
        return Observation(name, "failed", 1, wrong, host, domain)
    return Observation(name, "pending", host=host, domain=domain, notice=notice, notice_us=notice_us, waits=_waits(pod))


def true_name(pod: Json) -> str:
    """The node's own name; of a pod that has lost the annotation, the pod's."""
    metadata = pod["metadata"]
    return str((metadata.get("annotations") or {}).get(names.NOTE_NAME) or metadata["name"])


def is_deleted(pod: Json) -> bool:
    """Is the pod being deleted, by whomever?"""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_over(pod: Json) -> bool:
    """Has every container of the pod ended, sidecars too? Kubelets tell that first, and the pod's phase moments later."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if status.get("phase") in {"Failed", "Succeeded"}:
        return True
    sidecars = {one.get("name") for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"}
    wanted = sidecars | {
        one.get("name") for one in (*(spec.get("containers") or ()), *(status.get("containerStatuses") or ()))
    }
    ended = {one.get("name") for one in _statuses(status) if "terminated" in (one.get("state") or {})}
    return bool(wanted) and wanted <= ended


def removed(pod: Json, before: Observation, taken: str = "") -> Observation:
    """What the end of a pod that had not ended says of its node. ``taken``: the word of who took it away, if the pod has none."""
    word = disruption(pod) or taken
    if not word and is_deleted(pod) and before.phase != "lost":
        word = DELETED  # one whose host is lost is often removed by force, and the host is the cause
    return Observation(before.name, "gone", reason=word, host=before.host, domain=before.domain)


def is_stranded(pod: Json, now: str) -> bool:
    """Was the pod to be gone by now, and does its host not answer? Then only the host, or the end of its Node, takes it away.

    ``now``: as the API writes times.
    """
    now_s = _seconds(now)
    return _is_late(pod, now_s) and observation(pod, now_s).phase in {"lost", "pending"}


def disruption(pod: Json) -> str:
    """The word for why the platform takes the pod away; empty: it does not."""
    found = _condition(pod.get("status") or {}, "DisruptionTarget")
    return str(found.get("reason") or "DisruptionTarget") if found.get("status") == "True" else ""


def _ended(pod: Json, name: str, main: Json | None, wall_s: float | None) -> Observation:
    """How it ended. OOM is the container's; eviction, shutdown and refusal are the pod's; a disruption is a condition."""
    status = pod.get("status") or {}
    terminated: Json = ((main or {}).get("state") or {}).get("terminated") or {}
    first = {} if terminated else _failed_before(status)
    terminated = terminated or (first.get("state") or {}).get("terminated") or {}
    whose = f"init container {first['name']}" if first else ""
    code = int(terminated.get("exitCode", 0) or 0)
    signal = int(terminated.get("signal", 0) or 0)
    own, word = str(terminated.get("reason") or ""), str(status.get("reason") or "")
    # A runtime that was too slow says nothing of the configuration.
    if own == "StartError" and _passes(str(terminated.get("message") or "")):
        own = "Error"
    taken = disruption(pod)
    # A condition that an eviction from within the kubelet sets is less than the pod's own word (Evicted, Terminated).
    reason = "OOMKilled" if own == "OOMKilled" else _word(word, taken)
    detail = status.get("message") or _condition(status, "DisruptionTarget").get("message") if reason else ""
    if own not in {"", "Completed", "Error", reason}:
        reason, detail = (reason or own), detail or terminated.get("message")
    failed = status.get("phase") == "Failed" or code != 0 or bool(signal)
    if failed and is_deleted(pod) and not reason:
        # Somebody deleted the pod, and SIGTERM ended it: a wanted end, which no exit status makes a failure.
        return Observation(name, "gone", code, DELETED)
    devices = _unhealthy(main or {}) if failed and not reason else ""
    if devices:  # by itself, and on a device that is broken: that speaks against the host
        reason, detail = DEVICE, devices
    if failed and not terminated:
        code = code or 1  # refused at admission, or its host is gone: no container has a status
    if failed and not reason:
        reason, detail = own if own not in {"Error", "Completed"} else "", terminated.get("message")
    if reason:
        if whose and reason == own:
            detail = ": ".join(filter(None, (whose, str(detail or terminated.get("message") or ""))))
        told = _worded(reason, detail)
    else:  # the kubelet's message is then what the container left, or printed last
        told = exited(f"exit code {code}{whose and f' of {whose}'}", code, str(detail or ""))
    return Observation(
        name, "failed" if failed else "succeeded", -signal if signal else code, told, age_us=_age_us(terminated, wall_s)
    )


def _failed_before(status: Json) -> Json:
    """The init container that failed, so that the node's own one never ran; empty: none did."""
    for one in status.get("initContainerStatuses") or ():
        if ((one.get("state") or {}).get("terminated") or {}).get("exitCode", 0):
            return dict(one)
    return {}


def _unhealthy(main: Json) -> str:
    """Which devices of a container its host says are unhealthy, as the kubelet of 1.31 and newer tells it; empty: none is."""
    found = [
        f"{one.get('name') or 'device'} {each.get('resourceID') or ''}".strip()
        for one in main.get("allocatedResourcesStatus") or ()
        for each in one.get("resources") or ()
        if each.get("health") == "Unhealthy"
    ]
    return ", ".join(found)


def _word(word: str, taken: str) -> str:
    """The pod's own reason, where it says more than the condition does."""
    if word == "Terminated" and taken:
        return taken
    return word or taken


def _notice(pod: Json, wall_s: float | None) -> tuple[str, int]:
    """Why the pod will be taken away, and after how many microseconds; 0: not said."""
    taken = disruption(pod)
    if not taken and not is_deleted(pod):
        return "", 0
    message = _condition(pod.get("status") or {}, "DisruptionTarget").get("message") if taken else ""
    if not is_deleted(pod):
        return _worded(taken, message), 0
    grace_s = float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
    end_s = _seconds(pod["metadata"].get("deletionTimestamp"))
    # The timestamp is when the grace is over. A clock that differs from ours cannot make it longer than the grace.
    left_s = grace_s if wall_s is None or end_s is None else min(grace_s, max(0.0, end_s - wall_s))
    return _worded(taken or DELETED, message), max(1, int(left_s * 1e6))


def _host_is_silent(status: Json, main: Json | None) -> bool:
    """The node controller takes Ready away from a host's pods; a probe that fails says so of its container as well."""
    ready = _condition(status, "Ready")
    if ready.get("status") != "False" or ready.get("reason") in {"ContainersNotReady", "PodCompleted", "PodFailed"}:
        return False
    return main is not None and "running" in (main.get("state") or {}) and main.get("ready") is not False


def _is_late(pod: Json, now_s: float | None) -> bool:
    """Should the pod have been gone a minute ago?"""
    end_s = _seconds(pod["metadata"].get("deletionTimestamp"))
    return end_s is not None and now_s is not None and now_s >= end_s + STRANDED_S


def late_in_s(pod: Json, now_s: float) -> float | None:
    """Seconds until a pod that is being deleted should have been gone for a minute; None: it is not, or has no host."""
    end_s = _seconds(pod["metadata"].get("deletionTimestamp"))
    return end_s + STRANDED_S - now_s if end_s is not None and (pod.get("spec") or {}).get("nodeName") else None


def _hopeless(status: Json) -> str:
    for one in _statuses(status):
        waiting = (one.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason in HOPELESS and not _passes(message):
            return _worded(reason, message)
        if reason in PULLING and any(words in message for words in NO_IMAGE):
            return _worded("ErrImagePull", message)
    return ""


def passing(pod: Json) -> str:
    """The kubelet's message about a container that it cannot start now, where it counts as passing; empty: nothing such.

    Its reason is left out: that is the word for a wrong configuration, too, which diagnosis would take it for.
    """
    for one in _statuses(pod.get("status") or {}):
        waiting = (one.get("state") or {}).get("waiting") or {}
        message = " ".join(str(waiting.get("message") or "").split())
        if str(waiting.get("reason") or "") in HOPELESS and _passes(message):
            return message
    return ""


def _passes(message: str) -> bool:
    return any(words in message for words in PASSING)


def _waits(pod: Json) -> str:
    """Why a pending pod is not there yet, in the platform's words; empty: nothing is in its way."""
    status = pod.get("status") or {}
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        message = str(scheduled.get("message") or "")
        told = _worded(scheduled.get("reason"), message)
        avoided = (pod["metadata"].get("annotations") or {}).get(names.NOTE_AVOID)
        # The scheduler has one sentence for our affinity, the template's and a node selector. Where avoided hosts are not what is
        # in the way, the node is launched once more, and waits as before; the other mistake would let it wait for ever.
        if avoided and "affinity" in message.lower():
            return f"{AVOIDED}: {avoided} ({told})"
        return told
    for one in _statuses(status):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if str(waiting.get("reason") or "") not in USUAL:
            return _worded(waiting["reason"], waiting.get("message"))
    # Schedulers that hold back a gang set no condition before they have tried to place it.
    _, colon, least = str((pod["metadata"].get("annotations") or {}).get(names.NOTE_GANG) or "").partition(":")
    if colon and not (pod.get("spec") or {}).get("nodeName"):
        return f"Gang: none starts before {least} can start together"
    return ""


def _main(pod: Json) -> Json | None:
    """The status of the container that runs the node."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    wanted = (pod["metadata"].get("annotations") or {}).get(CONTAINER_NOTE)
    found: Json | None = next((one for one in statuses if one.get("name") == wanted), None)
    return found or (statuses[0] if statuses else None)


def _statuses(status: Json) -> Iterator[Json]:
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _condition(status: Json, type_: str) -> Json:
    return next((one for one in status.get("conditions") or [] if one.get("type") == type_), {})


def _worded(reason: object, detail: object) -> str:
    """``REASON: detail``, on one line."""
    words = " ".join(str(detail or "").split())
    return f"{reason or ''}: {words}"[:TEXT_MAX].strip(": ") if words else str(reason or "")


def _age_us(terminated: Json, wall_s: float | None) -> int:
    end_s = _seconds(terminated.get("finishedAt"))
    return 0 if wall_s is None or end_s is None else max(0, int((wall_s - end_s) * 1e6))


def _seconds(text: Any) -> float | None:
    try:
        return dt.datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
