"""What ``--backend k8s:KEY=VALUE,...`` says: where pods are made, and from what."""

from __future__ import annotations

import re
from typing import NamedTuple

from dlrover_core.errors import SpecError
from dlrover_core.runtime.backends import BackendContext

QUEUE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
OWNER = re.compile(r"([a-z0-9.-]+/)?v[a-z0-9]+/[a-z]+/[a-z0-9.-]+")
GPU = "nvidia.com/gpu"
LINE, TEMPLATE = "line", "template"
NATIVE, VOLCANO, COSCHEDULING = GANGS = ("native", "volcano", "coscheduling")


class Settings(NamedTuple):
    """Arguments of the backend.

    image:      the image of the container that runs the node; empty: the template's
    namespace:  where everything is made; empty: the kubeconfig context's, in a pod its own
    template:   a file with a Pod or PodTemplate (YAML or JSON), or ``configmap:NAME`` with one for each group; read at each
                launch; empty: none
    kubeconfig: a kubeconfig file; empty: ``KUBECONFIG``, ``~/.kube/config``, or the pod's service account
    context:    a context of it; empty: the current one
    account:    the pods' service account, whose token they do not get; empty: the template's, or ``default``
    pull:       Always, IfNotPresent or Never; empty: the template's
    gpu:        the resource that a node's GPUs are
    command:    ``line``: the container runs dlrover-run with the words of the line; ``template``: its own command, which must
                run dlrover-run
    user:       the numeric user that containers run as, where neither the template nor the image has one that is not root
    grace_s:    seconds between SIGTERM and SIGKILL where Kubernetes itself ends a pod; 0: the job's stop_grace_s, and 10 s
    claim:      with ``--detach``: the PersistentVolumeClaim that the log of the job lies on; empty: none
    owner:      APIVERSION/PLURAL/NAME of an object that owns the pods and whose uid is the run; empty: a Secret is made
    secret:     a Secret with the job's token; empty: that which owns the pods
    gang:       whose PodGroup lets MIN nodes start together, one of `GANGS`; empty: each pod is scheduled by itself
    budget:     the PodDisruptionBudget of the job's nodes, which follows its size; empty: none does
    rack:       the label of hosts that names their failure domain; empty: it is the zone that the pods' own labels have
    queue:      a LocalQueue of Kueue that admits the job; with ``gang=volcano`` a Queue of Volcano; empty: there is none
    """

    image: str = ""
    namespace: str = ""
    template: str = ""
    kubeconfig: str = ""
    context: str = ""
    account: str = ""
    pull: str = ""
    gpu: str = GPU
    command: str = LINE
    user: int = 1000
    grace_s: float = 0.0
    claim: str = ""
    owner: str = ""
    secret: str = ""
    gang: str = ""
    queue: str = ""
    budget: str = ""
    rack: str = ""


def read(here: BackendContext) -> Settings:
    """The arguments of a context. Raises `SpecError` with the field, its value, and what to write."""
    texts = {key: str(value or "") for key, value in Settings()._asdict().items()}
    told = here.options(**texts)
    namespace, pull = told["namespace"], told["pull"]
    if namespace and not NAME.fullmatch(namespace):
        raise SpecError(
            "backend",
            f"namespace={namespace!r} is no namespace: write lower-case letters, digits and hyphens, 63 at most",
        )
    if pull not in {"", "Always", "IfNotPresent", "Never"}:
        raise SpecError("backend", f"pull={pull!r}: write Always, IfNotPresent or Never")
    if told["command"] not in {LINE, TEMPLATE}:
        raise SpecError("backend", f"command={told['command']!r}: write {LINE} or {TEMPLATE}")
    if told["gang"] and told["gang"] not in GANGS:
        raise SpecError("backend", f"gang={told['gang']!r}: write {', '.join(GANGS[:-1])} or {GANGS[-1]}")
    if told["queue"] and not QUEUE.fullmatch(told["queue"]):
        raise SpecError(
            "backend", f"queue={told['queue']!r} is no queue: write lower-case letters, digits, hyphens and dots"
        )
    if told["rack"] and not LABEL.fullmatch(told["rack"]):
        raise SpecError(
            "backend", f"rack={told['rack']!r} is no label's key: write topology.kubernetes.io/rack, for example"
        )
    if any(one.isspace() for one in told["image"]):
        raise SpecError("backend", f"image={told['image']!r} has a space in it: write NAME:TAG, or NAME@sha256:DIGEST")
    if told["owner"] and not OWNER.fullmatch(told["owner"]):
        raise SpecError(
            "backend", f"owner={told['owner']!r} is no object: write APIVERSION/PLURAL/NAME, v1/secrets/digits"
        )
    return Settings(
        **{key: value for key, value in told.items() if key not in {"user", "grace_s"}},
        user=int(_number("user", told["user"])),
        grace_s=_number("grace_s", told["grace_s"]),
    )


def _number(key: str, text: str) -> float:
    if not text:
        return 0.0
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 2**31 or (key == "user" and found != int(found)):
        raise SpecError("backend", f"{key}={text!r} is not a number from 0 to 2147483647")
    return found
