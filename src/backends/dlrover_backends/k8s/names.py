"""Names, labels and annotations: how a node of ours is called in a cluster, and how a pod is known to be that node.

Kubernetes takes lower-case DNS labels of 63 characters, and our names are any text of 255. So a pod's name is made from ours and
from the run, for people to recognise, with a digest that makes it one; the true name is an annotation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from urllib.parse import urlencode

LABEL_JOB, LABEL_RUN, LABEL_NODE = "dlrover-core/job", "dlrover-core/run", "dlrover-core/node"
LABEL_INDEX = "dlrover-core/index"
"""The node's place in its group, as a number."""
LABEL_STANDBY = "dlrover-core/standby"
"""The group of a pod that waits without a node's name; a pod that has become a node has it no more."""
LABEL_KEPT = "dlrover-core/kept"
"""The run of a failed pod that no list of nodes has any more."""
NOTE_STANDBY, NOTE_SHAPE = "dlrover-core/standby", "dlrover-core/shape"
LABEL_BY, BY = "app.kubernetes.io/managed-by", "dlrover-core"
NOTE_NAME, NOTE_NODE, NOTE_JOB = "dlrover-core/name", "dlrover-core/node-name", "dlrover-core/job-name"
NOTE_AVOID, NOTE_TOKEN = "dlrover-core/avoid", "dlrover-core/ordered-by"
NOTE_GANG = "dlrover-core/gang"
LENGTH_MAX, DIGEST = 63, 8


def pod_name(name: str, run: str) -> str:
    """The pod's name of the node that a job calls ``name``, in this run: a DNS label, the same each time it is asked for."""
    return _labelled(name, f"{run}\0{name}")


def owner_name(job: str, run: str) -> str:
    """The name of the object that owns all pods of a run."""
    return _labelled(f"dlrover-{job}", f"{run}\0owner\0{job}")


def gang_name(job: str, run: str, set_: str) -> str:
    """The name of the PodGroup of a coupling set."""
    return _labelled(f"{job}-{set_}", f"{run}\0gang\0{set_}")


def claims_name(job: str, run: str) -> str:
    """The name of the ConfigMap that says which standby is which node."""
    return _labelled(f"{job}-claims", f"{run}\0claims\0{job}")


def label_value(text: str) -> str:
    """A label's value for any text: the text itself where that is one, else a part of it and a digest."""
    if len(text) <= LENGTH_MAX and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", text):
        return text
    return _labelled(text, text)


def selector(job: str, run: str) -> str:
    """The label selector of all pods of a run."""
    return ",".join(f"{key}={value}" for key, value in labels(job, run).items())


def query(wanted: Mapping[str, str]) -> str:
    """The query of a list of what has these labels."""
    return urlencode({"labelSelector": ",".join(f"{key}={value}" for key, value in wanted.items())})


def labels(job: str, run: str) -> dict[str, str]:
    """The labels by which a run's objects are found. They are no proof: anybody can set them."""
    return {LABEL_BY: BY, LABEL_JOB: label_value(job), LABEL_RUN: label_value(run or "run")}


def _labelled(text: str, key: str) -> str:
    """A DNS label that begins as ``text`` does, keeps its end (the node's place), and ends with a digest of ``key``."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    digest = hashlib.sha256(key.encode()).hexdigest()[:DIGEST]
    room = LENGTH_MAX - DIGEST - 1
    if len(slug) > room:
        slug = f"{slug[: room // 2].strip('-')}-{slug[-(room - room // 2 - 1) :].strip('-')}"
    if not slug or not slug[0].isalpha():
        slug = f"n-{slug}"[:room].strip("-")
    return f"{slug}-{digest}"
