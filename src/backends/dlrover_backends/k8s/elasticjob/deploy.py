"""The operator's objects, as the files of ``deploy/`` have them. Pure; ``python -m tools.deploy`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover_backends.k8s import gangs, masters, names, queues, yaml_text
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.elasticjob import crd
from dlrover_backends.k8s.elasticjob.translate import GROUP, OLD_GROUP, PLURAL

NAME, NAMESPACE, IMAGE = "dlrover-operator", "dlrover", "dlrover-core"
LABELS: Mapping[str, str] = {"app.kubernetes.io/name": NAME, names.LABEL_BY: names.BY}
USER = 1000
LOG_SECRET, LOG_KEY = "dlrover-operator", "log"
READ, MAKE = ("get", "list", "watch"), ("create", "delete", "get", "patch")

RULES: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ((GROUP, OLD_GROUP), (PLURAL,), (*READ, "patch")),
    ((GROUP, OLD_GROUP), (f"{PLURAL}/status",), ("get", "patch")),
    ((GROUP, OLD_GROUP), (f"{PLURAL}/finalizers",), ("update",)),
    (("batch",), ("jobs",), (*MAKE, "list", "watch")),
    (("",), ("services", "secrets", "configmaps", "serviceaccounts", "persistentvolumeclaims"), MAKE),
    (("rbac.authorization.k8s.io",), ("roles", "rolebindings"), MAKE),
    (("networking.k8s.io",), ("networkpolicies",), MAKE),
    (("policy",), ("poddisruptionbudgets",), MAKE),
    (tuple(one.group for one in gangs.KINDS.values()), (gangs.PLURAL,), MAKE),
    (("",), ("pods",), ("create", "delete", "patch", *READ)),
    (("",), ("pods/log",), ("get",)),
    (("",), ("events",), ("create", "patch")),
    (("coordination.k8s.io",), ("leases",), ("create", "get", "update")),
)
"""API groups, resources, verbs. Only who has a right may grant it: those of masters are among these."""

HOST_RULES: list[Json] = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
"""What masters may do with hosts where an administrator lets them: see conditions, taints and cordons."""


def files() -> dict[str, list[Json]]:
    """The objects of each file under ``deploy/``."""
    return {
        "base/namespace.yaml": [_namespace()],
        "base/crd.yaml": [crd.definition(), crd.definition(OLD_GROUP)],
        "base/rights.yaml": [_account(), role(), _binding("Role")],
        "base/operator.yaml": [deployment(), _policy()],
        "base/kustomization.yaml": [_kustomization()],
        "overlays/cluster-wide/rights.yaml": [role("ClusterRole"), _binding("ClusterRole")],
        "overlays/cluster-wide/kustomization.yaml": [_cluster_wide()],
        "overlays/beside-dlrover/kustomization.yaml": [_beside_dlrover("../../base")],
        "overlays/beside-dlrover-cluster-wide/kustomization.yaml": [_beside_dlrover("../cluster-wide")],
        "overlays/kueue/rights.yaml": _kueue_rights(),
        "overlays/kueue/kustomization.yaml": [_kueue()],
        "overlays/node-reader/rights.yaml": _for_masters("hosts", HOST_RULES),
        "overlays/node-reader/kustomization.yaml": [_node_reader()],
    }


def rules() -> list[Json]:
    """What the operator may do."""
    return [
        {"apiGroups": list(groups), "resources": list(what), "verbs": sorted(verbs)} for groups, what, verbs in RULES
    ]


def role(kind: str = "Role") -> Json:
    """The operator's rights, in its namespace or in all."""
    return _object("rbac.authorization.k8s.io/v1", kind, rules=rules())


def deployment() -> Json:
    """The operator. Of two, one leads; a node that dies costs seconds."""
    container: Json = {
        "name": "operator",
        "image": IMAGE,
        "command": ["dlrover"],
        "args": ["k8s", "operator"],
        "env": [
            _field("DLROVER_OPERATOR_NAMESPACE", "metadata.namespace"),
            _field("DLROVER_OPERATOR_POD", "metadata.name"),
            {
                "name": "DLROVER_OPERATOR_LOG",
                "valueFrom": {"secretKeyRef": {"name": LOG_SECRET, "key": LOG_KEY, "optional": True}},
            },
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # a mount in a container of ours
            {"name": masters.FILES, "mountPath": masters.FILES_PATH, "readOnly": True},
        ],
    }
    spec: Json = {
        "serviceAccountName": NAME,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {
                "name": masters.FILES,
                "secret": {"secretName": LOG_SECRET, "optional": True, "defaultMode": masters.FILES_MODE},
            },
        ],
    }
    return _object(
        "apps/v1",
        "Deployment",
        spec={
            "replicas": 2,
            "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
            "template": {"metadata": {"labels": dict(LABELS)}, "spec": spec},
        },
    )


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _namespace() -> Json:
    labels = {"pod-security.kubernetes.io/warn": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def _account() -> Json:
    return _object("v1", "ServiceAccount")


def _binding(kind: str) -> Json:
    return _object(
        "rbac.authorization.k8s.io/v1",
        f"{kind}Binding",
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": NAME},
        subjects=[{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
    )


def _policy() -> Json:
    """Nothing connects to the operator."""
    selector = {"matchLabels": {"app.kubernetes.io/name": NAME}}
    return _object("networking.k8s.io/v1", "NetworkPolicy", spec={"podSelector": selector, "policyTypes": ["Ingress"]})


def _object(api_version: str, kind: str, **content: Any) -> Json:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": NAME, "labels": dict(LABELS)}, **content}


def _kustomization() -> Json:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": ["namespace.yaml", "crd.yaml", "rights.yaml", "operator.yaml"],
        "images": [{"name": IMAGE, "newName": IMAGE, "newTag": "latest"}],
    }


def _kueue_rights() -> list[Json]:
    """What masters of jobs in a queue do with Workloads, which the operator grants them; and flavors, for all masters here."""
    made = [_object("rbac.authorization.k8s.io/v1", "Role", rules=queues.rules("any")), _binding("Role")]
    for one in made:
        one["metadata"]["name"] = f"{NAME}-kueue"
        one["metadata"]["namespace"] = NAMESPACE
    made[1]["roleRef"]["name"] = f"{NAME}-kueue"
    return [*made, *_for_masters("flavors", queues.flavor_rules())]


def _for_masters(what: str, granted: list[Json]) -> list[Json]:
    """Rights on what is in no namespace, for all masters of the operator's namespace."""
    metadata: Json = {"name": f"{NAME}-{what}", "labels": dict(LABELS)}
    accounts = {"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": f"system:serviceaccounts:{NAMESPACE}"}
    version = "rbac.authorization.k8s.io/v1"
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": metadata["name"]}
    return [
        {"apiVersion": version, "kind": "ClusterRole", "metadata": metadata, "rules": granted},
        {
            "apiVersion": version,
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [accounts],
        },
    ]


def _kueue() -> Json:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base", "rights.yaml"],
    }


def _node_reader() -> Json:
    """Without the base: it is applied beside whichever overlay has it."""
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["rights.yaml"]}


def _beside_dlrover(rest: str) -> Json:
    """Where DLRover has its own operator: its definition stays, and only annotated jobs are taken. ``rest``: all the rest."""
    kept = f"{PLURAL}.{GROUP}"
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kept},
    }
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [rest],
        "patches": [
            {"target": {"kind": "Deployment", "name": NAME}, "patch": _argument("--annotated-only")},
            {"patch": f"$patch: delete\n{yaml_text.written([definition]).removeprefix('---' + chr(10))}"},
        ],
    }


def _argument(word: str) -> str:
    """The patch that gives the operator one more argument."""
    return f"- op: add\n  path: /spec/template/spec/containers/0/args/-\n  value: {word}\n"


def _cluster_wide() -> Json:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../../base", "rights.yaml"],
        "patches": [{"target": {"kind": "Deployment", "name": NAME}, "patch": _argument("--all-namespaces")}],
    }
