"""The objects that are a job's masters in a cluster: a `batch/v1` Job, and what its pods need. Pure: a plan in, objects out.

Who owns what decides what a deletion takes along. A plan with an owner (a custom resource, say) hangs everything on it: pods of
nodes too. Without one the Secret with the job's token owns everything, and is the Job's in turn: so deleting either removes all.
A node's pod is never the Job's own, for the Job's controller would count it, or disown it.

The Job ends as the run does: exit 0 completes it; a failed job, wrong usage and a log that cannot be led fail it; 75 (handed
over) and what the platform does to the pod start another one without counting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlrover_backends.k8s import gangs, names, owning, pods, queues, settings
from dlrover_backends.k8s.api import Json
from dlrover_core.errors import SpecError

PORT = 29400
CONTAINER, SUFFIX = "masters", "-masters"
LABEL_ROLE, ROLE = "dlrover-core/role", "masters"
UID = "set-by-the-api-server"
NAME_MAX = 40
"""A pod of the Job has its name, an index, and five characters more, within 63."""
STATE, STATE_PATH = "state", "/var/lib/dlrover"
FILES, FILES_PATH = "log-files", "/etc/dlrover/log"
FILES_MODE = 0o440
ENDS_JOB = (1, 2, 4, 78, 93)
"""Exit statuses that another master would repeat: failed, wrong usage, a log that cannot be read or led, no progress."""
HANDED_OVER = 75
RETRIES = 20
"""Masters that end in another way, killed for memory for example, until the Job fails."""

BACKEND, BIND, MASTERS = "DLROVER_MASTER_BACKEND", "DLROVER_MASTER_BIND", "DLROVER_MASTER_AT"
JOB, LOG, STATE_DIR, RUN = "DLROVER_MASTER_JOB", "DLROVER_MASTER_LOG", "DLROVER_MASTER_STATE", "DLROVER_RUN"
"""In a masters' pod: what takes the place of options of the same meaning (`dlrover_adapters.cli.in_pod`)."""
LOG_KEY = "log"

Rule = dict[str, list[str]]
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class Owner:
    """The object that a job belongs to.

    api_version: ``elastic.iml.github.io/v1alpha1``
    kind:        ``ElasticJob``
    plural:      its name in paths, ``elasticjobs``
    name:        the object's
    uid:         the object's; it names the run
    """

    api_version: str
    kind: str
    plural: str
    name: str
    uid: str


@dataclass(frozen=True)
class MasterPlan:
    """One job's masters.

    namespace:   where everything is made
    name:        of the job, a DNS label of `NAME_MAX` characters; objects are called NAME-masters
    image:       of the masters' container; it needs this package with the extras ``k8s`` and ``http``
    argv:        the words after ``command`` that describe the job, as they were typed
    token:       the job's secret; empty: the Secret is there already, and is not among the objects
    owner:       what owns everything; None: the Secret
    job:         the job's own name, any text; empty: ``name``
    command:     what leads the job: ``dlrover-run``, or ``dlrover master``
    etcd:        URL of a log in etcd; there are two masters then, on different hosts
    etcd_files:  files that this URL names, in the folder `FILES_PATH`: contents by name, which lie in the Secret
    claim:       name of a PersistentVolumeClaim for a log on SQLite; one of ``etcd`` and ``claim`` is needed
    labels:      of every object, beside ours
    annotations: of the Job
    templates:   pod templates of nodes by group; the empty name is for groups that are not named. None: nodes have no template
    backend:     further arguments of ``--backend k8s:``, such as ``gpu`` and ``pull``
    env:         further variables of the masters
    pod:         what the masters' pods have otherwise: ``tolerations``, ``nodeSelector``, ``imagePullSecrets``, ...
    resources:   of the masters' container
    user:        the numeric user that the container runs as, who may write to the claim
    guard:       are NetworkPolicies made?
    standby:     are pods kept warm? Masters need further rights for that
    nodes_kept:  nodes that a drain leaves running, to begin with; None: no budget is made
    ttl_s:       seconds after which a Job that is over is removed, with all that it owns; None: never
    uid:         of the Secret, once it is made, where that is the owner
    """

    namespace: str
    name: str
    image: str
    argv: tuple[str, ...]
    token: str = field(default="", repr=False)
    owner: Owner | None = None
    job: str = ""
    command: tuple[str, ...] = ("dlrover-run",)
    etcd: str = field(default="", repr=False)
    etcd_files: Mapping[str, str] = field(default_factory=dict, repr=False)
    claim: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, Json] | None = None
    backend: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(
        default_factory=lambda: {"requests": {"cpu": "200m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    )
    user: int = 1000
    guard: bool = True
    standby: bool = False
    nodes_kept: int | None = None
    ttl_s: int | None = None
    uid: str = UID

    @property
    def called(self) -> str:
        """The name of the Job, the Service, the Secret and the others."""
        return f"{self.name}{SUFFIX}"

    @property
    def run(self) -> str:
        """The run's name: its owner's uid."""
        return self.owner.uid if self.owner is not None else self.uid

    @property
    def replicas(self) -> int:
        """How many masters there are."""
        return 2 if self.etcd else 1


def objects(job: MasterPlan) -> list[Json]:
    """Everything that the masters are, in the order of creation; the Job is last, and the Secret first. Raises `SpecError`."""
    check(job)
    made = [_account(job), _role(job), _binding(job), _service(job)]
    if job.token:
        made.insert(0, secret(job))
    if job.templates is not None:
        made.append(config(job))
    if job.guard:
        made += [_nodes_policy(job), _masters_policy(job)]
        made += [_nodes_policy(job, names.LABEL_STANDBY, "standbys")] if job.standby else []
    if job.nodes_kept is not None:
        made.append(_budget(job))
    return [*made, job_object(job)]


def check(job: MasterPlan) -> None:
    """Raises `SpecError` for a plan that makes no masters."""
    if len(job.name) > NAME_MAX or not _NAME.fullmatch(job.name):
        raise SpecError(
            "job-id",
            f"{job.name!r} names no object of Kubernetes: write lower-case letters, digits and hyphens, a letter first, "
            f"{NAME_MAX} at most",
        )
    if not job.image:
        raise SpecError("image", "missing: the masters' pods need one; say --image IMG")
    if job.etcd and job.claim:
        raise SpecError("log", "it is either in etcd or on a claim: leave one of them out")
    if job.etcd and not job.etcd.startswith("etcd"):
        raise SpecError(
            "log", f"{job.etcd.partition(':')[0]}: is no log that masters in pods share; say etcd://HOST:2379"
        )
    if not job.etcd and not job.claim:
        raise SpecError(
            "log",
            "masters in pods keep the job's log in etcd (--log etcd://HOST:2379), or on a volume of a block device: make a "
            "PersistentVolumeClaim with accessModes: [ReadWriteOncePod], and say --backend k8s:claim=NAME",
        )
    if job.templates is not None and (wrong := [key for key in job.templates if not re.fullmatch(r"[\w.-]*", key)]):
        raise SpecError("templates", f"{wrong[0]!r} is no group's name")


def name_of(job: str) -> str:
    """The name that a plan has for a job of this name: the name itself where it can be, else a part of it and a digest."""
    if len(job) <= NAME_MAX and _NAME.fullmatch(job):
        return job
    made = names.pod_name(job, "")
    digest = made[-names.DIGEST :]
    return f"{made[: -names.DIGEST - 1][: NAME_MAX - names.DIGEST - 1].rstrip('-')}-{digest}"


def by_namespace(url: str, namespace: str) -> str:
    """The etcd URL whose prefix is the namespace's own: jobs of two namespaces may have one name."""
    base, mark, query = url.partition("?")
    scheme, _, rest = base.partition("://")
    hosts, _, prefix = rest.partition("/")
    return f"{scheme}://{hosts}/{prefix.strip('/') or 'dlrover'}/{namespace}{mark}{query}"


def labels(job: MasterPlan, *, role: bool = False) -> dict[str, str]:
    """Labels of the job's objects; with ``role``, of its masters' pods too, which the Service selects."""
    ours = {names.LABEL_BY: names.BY, names.LABEL_JOB: names.label_value(job.job or job.name)}
    return {**job.labels, **ours, **({LABEL_ROLE: ROLE} if role else {})}


# ---- the masters


def job_object(job: MasterPlan) -> Json:
    """The Job whose pods are the masters."""
    spec: Json = {
        "parallelism": job.replicas,
        "completions": job.replicas,
        "completionMode": "Indexed" if job.replicas > 1 else "NonIndexed",
        "backoffLimit": RETRIES,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on_exit("FailJob", *ENDS_JOB),
                _on_exit("Ignore", HANDED_OVER),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": labels(job, role=True)}, "spec": _pod(job)},
    }
    if job.replicas > 1:  # whichever leads at the end says how the run has ended
        spec["successPolicy"] = {"rules": [{"succeededCount": 1}]}
    if job.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = job.ttl_s
    made = _object(job, "batch/v1", "Job", owned=job.owner is not None, spec=spec)
    made["metadata"]["annotations"] = {**job.annotations, names.NOTE_JOB: job.job or job.name}
    return made


def _on_exit(action: str, *codes: int) -> Json:
    return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": list(codes)}}


def _pod(job: MasterPlan) -> Json:
    given = {key: value for key, value in job.pod.items() if key not in {"containers", "restartPolicy"}}
    spec: Json = {
        **given,
        "restartPolicy": "Never",
        "serviceAccountName": job.called,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": given.get("terminationGracePeriodSeconds", 30),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user,
            "fsGroup": job.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
            **(given.get("securityContext") or {}),
        },
        "containers": [_container(job)],
        "volumes": [*(given.get("volumes") or []), *_volumes(job)],
    }
    if job.replicas > 1:
        spec["affinity"] = _apart(job, given.get("affinity") or {})
    return spec


def _container(job: MasterPlan) -> Json:
    mount: Json = {"name": STATE, "mountPath": STATE_PATH}
    if job.claim:
        mount["subPath"] = job.called  # several jobs may share a claim
    made: Json = {
        "name": CONTAINER,
        "image": job.image,
        "command": list(job.command),
        "args": list(job.argv),
        "env": _env(job),
        "ports": [{"name": "masters", "containerPort": PORT, "protocol": "TCP"}],
        "resources": dict(job.resources),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            mount,
            *([{"name": FILES, "mountPath": FILES_PATH, "readOnly": True}] if job.etcd_files else []),
        ],
    }
    if job.backend.get("pull"):
        made["imagePullPolicy"] = job.backend["pull"]
    return made


def _volumes(job: MasterPlan) -> list[Json]:
    kept: Json = {"persistentVolumeClaim": {"claimName": job.claim}} if job.claim else {"emptyDir": {}}
    found = [{"name": STATE, **kept}]
    if job.etcd_files:
        items = [{"key": name, "path": name} for name in job.etcd_files]
        found.append({"name": FILES, "secret": {"secretName": job.called, "items": items, "defaultMode": FILES_MODE}})
    return found


def _env(job: MasterPlan) -> list[Json]:
    """What the masters are told beside their words. ``$(NAME)`` is filled in by the kubelet, from what stands before it."""
    secret_key = {"secretKeyRef": {"name": job.called, "key": pods.TOKEN_KEY}}
    told: list[Json] = [
        *({"name": name, "value": value} for name, value in job.env.items()),
        {"name": "DLROVER_TOKEN", "valueFrom": secret_key},
        {"name": "DLROVER_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": RUN, "value": job.run},
        {"name": JOB, "value": job.job or job.name},
        {"name": BACKEND, "value": backend_of(job)},
        {"name": BIND, "value": f"$(DLROVER_ADDRESS):{PORT}"},
        {"name": MASTERS, "value": f"{job.called}.{job.namespace}.svc:{PORT}"},
        {"name": STATE_DIR, "value": STATE_PATH},
    ]
    if job.etcd:
        told.append({"name": LOG, "valueFrom": {"secretKeyRef": {"name": job.called, "key": LOG_KEY}}})
    return told


def backend_of(job: MasterPlan) -> str:
    """What the masters are told as ``--backend``. Raises `SpecError`."""
    ours = {
        "image": job.image,
        **job.backend,
        "namespace": job.namespace,
        "secret": job.called,
        "owner": owner_path(job),
    }
    if _follows(job):
        ours["budget"] = budget_of(job)
    if job.templates is not None:
        ours["template"] = f"{CONFIGMAP}{job.called}"
    wrong = next((key for key, value in ours.items() if set(value) & set(", \n")), "")
    if wrong:
        raise SpecError("backend", f"{wrong}={ours[wrong]!r} has a comma or a space in it, and is part of a list")
    return "k8s:" + ",".join(f"{key}={value}" for key, value in ours.items() if value)


CONFIGMAP, DEFAULT_KEY = "configmap:", "default"
"""A template that is read through the API: keys are names of groups, values are pods as JSON."""


def owner_path(job: MasterPlan) -> str:
    """What owns the nodes' pods, as the backend's argument ``owner`` has it: APIVERSION/PLURAL/NAME."""
    if job.owner is not None:
        return f"{job.owner.api_version}/{job.owner.plural}/{job.owner.name}"
    return f"v1/secrets/{job.called}"


def _apart(job: MasterPlan, affinity: Json) -> Json:
    """Never two masters of a job on one host."""
    key, found = "requiredDuringSchedulingIgnoredDuringExecution", dict(affinity.get("podAntiAffinity") or {})
    term = {"labelSelector": {"matchLabels": labels(job, role=True)}, "topologyKey": "kubernetes.io/hostname"}
    return {**affinity, "podAntiAffinity": {**found, key: [*(found.get(key) or []), term]}}


# ---- what they need


def secret(job: MasterPlan) -> Json:
    """The Secret with the job's token, and the URL of its log, which may have a password in it."""
    told = {pods.TOKEN_KEY: job.token}
    if job.etcd:
        told |= {LOG_KEY: by_namespace(job.etcd, job.namespace), **job.etcd_files}
    made = _object(job, "v1", "Secret", owned=job.owner is not None, type="Opaque", stringData=told)
    made["metadata"]["annotations"] = {names.NOTE_JOB: job.job or job.name}
    return made


def _account(job: MasterPlan) -> Json:
    return _object(job, "v1", "ServiceAccount", automountServiceAccountToken=False)


def rules(job: MasterPlan) -> list[Rule]:
    """What masters may do in their namespace: with pods, and see what owns them."""
    api_version, _, path = owner_path(job).rpartition("/")[0].rpartition("/")
    found = [
        _may("", "pods", "create", "delete", "get", "list", "patch", "watch"),
        _may("", "pods/log", "get"),
        _may(api_version.rpartition("/")[0], path, "get", named=owner_path(job).rpartition("/")[2]),
    ]
    if job.templates is not None:
        found.append(_may("", "configmaps", "get", named=job.called))
    if job.standby:
        claims = names.claims_name(job.job or job.name, job.run)
        found += [_may("", "configmaps", "create"), _may("", "configmaps", "get", "patch", named=claims)]
    if _follows(job):
        found.append(_may("policy", "poddisruptionbudgets", "get", "patch", named=budget_of(job)))
    gang = job.backend.get("gang", "")
    return found + gangs.rules(gang) + queues.rules("" if gang == settings.VOLCANO else job.backend.get("queue", ""))


def _may(group: str, resource: str, *verbs: str, named: str = "") -> Rule:
    rule = {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
    return {**rule, "resourceNames": [named]} if named else rule


def _role(job: MasterPlan) -> Json:
    return _object(job, "rbac.authorization.k8s.io/v1", "Role", rules=rules(job))


def _binding(job: MasterPlan) -> Json:
    return _object(
        job,
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": job.called},
        subjects=[{"kind": "ServiceAccount", "name": job.called, "namespace": job.namespace}],
    )


def _service(job: MasterPlan) -> Json:
    """Where agents find a master that they do not know. One that stands by names the leader."""
    ports = [{"name": "masters", "port": PORT, "targetPort": PORT, "protocol": "TCP"}]
    return _object(job, "v1", "Service", spec={"selector": _selected(job, masters=True), "ports": ports})


def config(job: MasterPlan) -> Json:
    """The ConfigMap with the templates of nodes. Nodes that are launched from then on have what it says."""
    told = {key or DEFAULT_KEY: json.dumps(one, sort_keys=True) for key, one in (job.templates or {}).items()}
    return _object(job, "v1", "ConfigMap", data=told)


def _nodes_policy(job: MasterPlan, label: str = names.LABEL_NODE, called: str = "nodes") -> Json:
    """Nodes, or standbys, talk with their own job's pods alone: torch's stores ask nobody for a token."""
    nodes: Json = {
        "matchLabels": _selected(job),
        "matchExpressions": [{"key": label, "operator": "Exists"}],
    }
    spec = {
        "podSelector": nodes,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": _selected(job)}}]}],
    }
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", name=f"{job.name}-{called}", spec=spec)


def _masters_policy(job: MasterPlan) -> Json:
    """Masters are reached at their port alone, by whoever has the token: the API server's proxy, too."""
    spec = {
        "podSelector": {"matchLabels": _selected(job, masters=True)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": PORT, "protocol": "TCP"}]}],
    }
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", spec=spec)


def _budget(job: MasterPlan) -> Json:
    """How many nodes a drain leaves alone. Pods without a scale have no ``maxUnavailable``: the number is that of those kept."""
    selector: Json = {
        "matchLabels": _selected(job),
        "matchExpressions": [{"key": names.LABEL_NODE, "operator": "Exists"}],
    }
    spec = {"minAvailable": job.nodes_kept, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return _object(job, "policy/v1", "PodDisruptionBudget", name=budget_of(job), spec=spec)


def budget_of(job: MasterPlan) -> str:
    """The name of the budget."""
    return f"{job.name}-nodes"


def _follows(job: MasterPlan) -> bool:
    """Do the masters let the budget follow the job's size? An owner's controller does so by itself."""
    return job.nodes_kept is not None and job.owner is None


def _selected(job: MasterPlan, *, masters: bool = False) -> dict[str, str]:
    """The labels by which pods of this job are selected; ``masters``: only its masters."""
    ours = {names.LABEL_BY: names.BY, names.LABEL_JOB: names.label_value(job.job or job.name)}
    return {**ours, LABEL_ROLE: ROLE} if masters else ours


def _object(
    job: MasterPlan, api_version: str, kind: str, *, owned: bool = True, name: str = "", **content: Any
) -> Json:
    metadata: Json = {"name": name or job.called, "namespace": job.namespace, "labels": labels(job, role=True)}
    if owned:
        metadata["ownerReferences"] = [_reference(job)]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def _reference(job: MasterPlan) -> Json:
    """Owned by whatever the plan names, else by the Secret. A custom resource's own controller is the owner's controller, too."""
    owner = job.owner
    if owner is None:
        return {"apiVersion": "v1", "kind": "Secret", "name": job.called, "uid": job.uid, **_LOOSE}
    return owning.of(owner.api_version, owner.kind, owner.name, owner.uid)


_LOOSE = {"controller": False, "blockOwnerDeletion": False}
