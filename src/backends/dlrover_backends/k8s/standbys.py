"""The pod that a standby is: as the pod of a node of its group, without a name. Pure.

A standby's pod has a label of its own (`names.LABEL_STANDBY`) while it is free, and becomes a node by a patch that gives it the
node's labels and annotations: pods cannot be renamed. What it runs cannot change any more, so it fits only nodes whose pod would
be the same but for their name: its *shape* says so.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dlrover_backends.k8s import endings, names, pods
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.settings import Settings
from dlrover_core.job.nodes import STANDBY_SEAT
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import GroupSize
from dlrover_core.runtime.backends import NODE, SEAT, STANDBY, BackendContext

SHAPE = 16


def node_of(size: GroupSize) -> NodeLaunch:
    """What a standby of a group needs: as a node of it, which has no name."""
    return NodeLaunch(size.name, size.name, size.name, 0, 0, size.nproc, (), size.memory_mib, size.cpu_m, size.gpus)


def manifest(
    here: BackendContext,
    told: Settings,
    node: NodeLaunch,
    owner: Json,
    template: Json | None = None,
    *,
    number: int = 0,
    avoid: tuple[str, ...] = (),
    token: int = 0,
) -> Json:
    """The pod of a group's standby with this number. Raises `LaunchRefused` where there is no image."""
    plain = node._replace(name=node.group, node=node.group, index=0, incarnation=0, avoid=())
    shape = _shape(_nameless(pods.manifest(here, told, plain, owner, template), node.group))
    pod = _nameless(pods.manifest(here, told, plain._replace(avoid=avoid), owner, template, token), node.group)
    metadata = pod["metadata"]
    metadata["name"] = names.pod_name(f"{here.job}-{node.group}-standby-{number}", here.run)
    metadata["annotations"] |= {names.NOTE_STANDBY: f"{node.group}/{number}", names.NOTE_SHAPE: shape}
    return pod


def shape_of(pod: Json) -> str:
    """What nodes a standby fits."""
    return _note(pod, names.NOTE_SHAPE)


def _nameless(pod: Json, group: str) -> Json:
    metadata, main = pod["metadata"], pods.main_of(pod["spec"]["containers"], pod["metadata"])
    for key in (names.NOTE_NAME, names.NOTE_NODE):
        metadata["annotations"].pop(key)
    for key in (names.LABEL_NODE, names.LABEL_INDEX):
        metadata["labels"].pop(key)
    metadata["labels"][names.LABEL_STANDBY] = names.label_value(group)
    named = [
        {"name": STANDBY, "value": group},
        {"name": SEAT, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    ]
    main["env"] = [one for one in main["env"] if one["name"] not in {NODE, STANDBY, SEAT}] + named
    return pod


def _shape(pod: Json) -> str:
    metadata = pod["metadata"]
    kept = {key: value for key, value in metadata["annotations"].items() if key != names.NOTE_TOKEN}
    text = json.dumps([pod["spec"], metadata["labels"], kept], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:SHAPE]


def claim(pod: Json, node: NodeLaunch, token: int) -> Json:
    """The patch that makes a free standby the node. It fails where the pod is another one, or has changed."""
    metadata = pod["metadata"]
    return {
        "metadata": {
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "labels": {
                names.LABEL_STANDBY: None,
                names.LABEL_NODE: names.label_value(node.node),
                names.LABEL_INDEX: str(node.index),
            },
            "annotations": {
                names.NOTE_NAME: node.name,
                names.NOTE_NODE: node.node,
                names.NOTE_TOKEN: str(token),
            },
        }
    }


# ---- what is seen of a pod


def is_standby(pod: Json) -> bool:
    """Was the pod made as a standby? It may be a node by now."""
    return bool(_note(pod, names.NOTE_STANDBY))


def is_free(pod: Json) -> bool:
    """Is the pod a standby that is no node?"""
    return is_standby(pod) and not _note(pod, names.NOTE_NAME)


def group_of(pod: Json) -> str:
    """The group of a standby."""
    return _note(pod, names.NOTE_STANDBY).partition("/")[0]


def number_of(pod: Json) -> int:
    """The number of a standby; -1: it has none."""
    text = _note(pod, names.NOTE_STANDBY).partition("/")[2]
    return int(text) if text.isascii() and text.isdecimal() else -1


def seat_of(pod: Json) -> str:
    """The seat of a standby's agent; empty: the pod was made under its node's name."""
    return f"{STANDBY_SEAT}{pod['metadata'].get('uid', '')}" if is_standby(pod) else ""


def host_of(pod: Json) -> str:
    """Where the pod is; empty: nowhere yet."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def may_be(pod: Json, node: NodeLaunch, shape: str) -> bool:
    """Could this free standby become the node? It must be well, stay, fit, and be where the node may be."""
    seen = endings.observation(pod)
    if seen.phase not in {"pending", "running"} or seen.notice or seen.waits:
        return False  # its host is lost, it is about to be taken away, or its image does not come
    if group_of(pod) != node.group or shape_of(pod) != shape:
        return False
    if host_of(pod):
        return host_of(pod) not in node.avoid
    avoids = set(filter(None, _note(pod, names.NOTE_AVOID).split(",")))
    return set(node.avoid) <= avoids


def lives(pod: Json) -> bool:
    """Has the pod not ended?"""
    return (pod.get("status") or {}).get("phase") not in {"Failed", "Succeeded"}


def runs(pod: Json) -> bool:
    """Has its container begun?"""
    return (pod.get("status") or {}).get("phase") == "Running"


def _note(pod: Any, key: str) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(key) or "")
