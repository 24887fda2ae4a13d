"""The pod that a node is: made from a template of the user's, or from none, and from what the job asks of the node.

What must hold for a node to be one holds whatever the template says: nothing restarts a container behind the master's back, a
pod that is ended gets its grace, ``/dev/shm`` is real memory, and agents get no credentials for the API. All else that a template
has is kept: sidecars, tolerations, resource claims, priority, volumes. What we add passes the Pod Security Standard *restricted*.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from dlrover_backends.k8s import names, owning, quantities
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.settings import TEMPLATE, Settings
from dlrover_core.errors import LaunchRefused, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backends import ADDRESS, HOST, TOKEN, BackendContext

CONTAINER = "node"
CONTAINER_NOTE = "kubectl.kubernetes.io/default-container"
TOKEN_KEY = "token"  # noqa: S105  # the key of a Secret, no secret
SHM, SHM_PATH = "dlrover-shm", "/dev/shm"  # noqa: S108  # a mount in a container of ours
CLOSING_S = 10.0
"""An agent's own time to end beyond its workers' grace."""
GRACE_MIN_S = 1
"""Kubernetes takes a grace of 0 as force: the name is free at once, while the old processes may live on."""


def grace(seconds: float) -> int:
    """A grace as Kubernetes takes it: whole seconds, never 0."""
    return max(GRACE_MIN_S, math.ceil(seconds))


def template_of(raw: Any, path: str) -> Json:
    """``metadata`` and ``spec`` of a Pod, a PodTemplate or a pod template alone. Raises `LaunchRefused` for anything else."""
    found = raw.get("template", raw) if isinstance(raw, dict) else None
    spec = found.get("spec") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(spec, dict):
        raise LaunchRefused(
            f"template={path!r} holds no pod: write kind: Pod with metadata and spec, or a template: with them",
            permanent=True,
        )
    containers = spec.get("containers", [])
    if not isinstance(containers, list) or not all(isinstance(one, dict) for one in containers):
        raise LaunchRefused(f"template={path!r}: spec.containers is no list of containers", permanent=True)
    return {"metadata": found.get("metadata") or {}, "spec": spec}


def manifest(
    here: BackendContext, told: Settings, node: NodeLaunch, owner: Json, template: Json | None = None, token: int = 0
) -> Json:
    """The pod of a node. ``owner``: the object that owns all pods of the run. Raises `LaunchRefused` where there is no image."""
    given = copy.deepcopy(template) if template else {}
    spec: Json = dict(given.get("spec") or {})
    spec["containers"] = [dict(one) for one in spec.get("containers") or [{}]]
    main = main_of(spec["containers"], given.get("metadata") or {})
    main.setdefault("name", CONTAINER)
    _filled(main, here, told, node, told.secret or owner["metadata"]["name"])
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = grace(told.grace_s or here.stop_grace_s + CLOSING_S)
    spec["automountServiceAccountToken"] = False
    spec.setdefault("enableServiceLinks", False)
    if told.account:
        spec["serviceAccountName"] = told.account
    _with_shm(spec, main)
    _secured(spec, told.user)
    if node.avoid:
        spec["affinity"] = _avoiding(spec.get("affinity") or {}, node.avoid)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(here, node, owner, given.get("metadata") or {}, main["name"], token),
        "spec": spec,
    }


def owner_object(here: BackendContext) -> Json:
    """The Secret of a run: it holds the job's token, and owns the pods, so that they go when it does."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": names.owner_name(here.job, here.run),
            "labels": names.labels(here.job, here.run),
            "annotations": {names.NOTE_JOB: here.job},
        },
        "stringData": {TOKEN_KEY: here.token},
    }


def main_of(containers: list[Json], metadata: Json) -> Json:
    """The container that runs the node: the one that the template names, or its first."""
    wanted = (metadata.get("annotations") or {}).get(CONTAINER_NOTE, CONTAINER)
    return next((one for one in containers if one.get("name") == wanted), containers[0])


def _filled(main: Json, here: BackendContext, told: Settings, node: NodeLaunch, secret: str) -> None:
    if told.image:
        main["image"] = told.image
    if not main.get("image"):
        raise LaunchRefused("no image: say --image IMG, or name one in the template's container", permanent=True)
    if told.pull:
        main["imagePullPolicy"] = told.pull
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # the last words of an agent that dies
    if here.arguments and told.command != TEMPLATE:
        main["command"], main["args"] = ["dlrover-run"], list(here.arguments)
    ours: list[Json] = [{"name": name, "value": value} for name, value in here.environment(node).items()]
    ours += [
        {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": secret, "key": TOKEN_KEY}}},
        {"name": HOST, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    known = {one["name"] for one in ours}
    main["env"] = [one for one in main.get("env") or [] if one.get("name") not in known] + ours
    _with_resources(main, node, told.gpu)
    security = main["securityContext"] = dict(main.get("securityContext") or {})
    security.setdefault("allowPrivilegeEscalation", False)
    security.setdefault("capabilities", {"drop": ["ALL"]})


def _with_resources(main: Json, node: NodeLaunch, gpu: str) -> None:
    """What the job asks for replaces what the template asks for of that kind, unless that is the same: pods keep their class.

    More memory, as after an end for want of it, is both promised and the limit.
    """
    resources = dict(main.get("resources") or {})
    requests, limits = dict(resources.get("requests") or {}), dict(resources.get("limits") or {})
    memory = limits.get("memory", requests.get("memory"))
    if node.memory_mib and _measured(quantities.mib, memory) != node.memory_mib:
        requests["memory"] = limits["memory"] = f"{node.memory_mib}Mi"
    if node.cpu_m and _measured(quantities.thousandths, requests.get("cpu", limits.get("cpu"))) != node.cpu_m:
        requests["cpu"] = f"{node.cpu_m}m"
        limit = _measured(quantities.thousandths, limits.get("cpu"))
        if limit is not None and limit < node.cpu_m:  # refused; and without one a quota may refuse the pod
            limits["cpu"] = requests["cpu"]
    if node.gpus:
        requests.pop(gpu, None)
        limits[gpu] = str(node.gpus)
    found = {"requests": requests, "limits": limits}
    main["resources"] = {**resources, **{key: value for key, value in found.items() if value}}
    if not main["resources"]:
        del main["resources"]


def _measured(unit: Callable[[object, str], int], told: object) -> int | None:
    """A quantity of a template; None: it has none, or one that the API server will refuse."""
    try:
        return None if told is None else unit(told, "resources")
    except SpecError:
        return None


def _with_shm(spec: Json, main: Json) -> None:
    """Containers get 64 MiB at ``/dev/shm``, and staged checkpoints and data loaders need more; what is used counts as memory."""
    mounts = list(main.get("volumeMounts") or [])
    if any(str(one.get("mountPath", "")).rstrip("/") == SHM_PATH for one in mounts):
        return
    main["volumeMounts"] = [*mounts, {"name": SHM, "mountPath": SHM_PATH}]
    volumes = [one for one in spec.get("volumes") or [] if one.get("name") != SHM]
    spec["volumes"] = [*volumes, {"name": SHM, "emptyDir": {"medium": "Memory"}}]


def _secured(spec: Json, user: int) -> None:
    security = spec["securityContext"] = dict(spec.get("securityContext") or {})
    security.setdefault("runAsNonRoot", True)
    security.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if security["runAsNonRoot"] and user:
        # An image without a numeric user is refused by the kubelet.
        security.setdefault("runAsUser", user)


def _avoiding(affinity: Mapping[str, Any], hosts: tuple[str, ...]) -> Json:
    """Affinity to other hosts than these, by their names as objects: the label with the host name may be another one."""
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    nodes = dict(affinity.get("nodeAffinity") or {})
    terms = [dict(one) for one in (nodes.get(key) or {}).get("nodeSelectorTerms") or [{}]]
    for term in terms:  # one of the terms must hold, with all its expressions: the hosts are left out of each
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
        term["matchFields"] = [*(term.get("matchFields") or []), *fields]
    nodes[key] = {"nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": nodes}


def _metadata(here: BackendContext, node: NodeLaunch, owner: Json, given: Json, main: str, token: int) -> Json:
    ours = {
        names.NOTE_NAME: node.name,
        names.NOTE_NODE: node.node,
        names.NOTE_JOB: here.job,
        names.NOTE_TOKEN: str(token),
        CONTAINER_NOTE: main,
    }
    if node.avoid:
        ours[names.NOTE_AVOID] = ",".join(node.avoid)
    kept = {key: given[key] for key in ("finalizers",) if given.get(key)}
    return {
        **kept,
        "name": names.pod_name(node.name, here.run),
        "labels": {
            **(given.get("labels") or {}),
            **names.labels(here.job, here.run),
            names.LABEL_NODE: names.label_value(node.node),
            names.LABEL_INDEX: str(node.index),
        },
        "annotations": {**(given.get("annotations") or {}), **ours},
        "ownerReferences": [owning.reference(owner)],
    }
