"""Where objects of the kinds that we make are in the API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLURALS: Mapping[str, str] = {
    "Secret": "secrets",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Service": "services",
    "ConfigMap": "configmaps",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Job": "jobs",
    "Pod": "pods",
    "ElasticJob": "elasticjobs",
}


def path_in(version: str, kind: str, namespace: str) -> str:
    """The path of a kind's collection in a namespace; of all namespaces, where that is empty."""
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"/{'apis' if '/' in version else 'api'}/{version}{where}/{PLURALS[kind]}"


def collection(thing: Mapping[str, Any]) -> str:
    """The path of the collection that an object is in."""
    return path_in(thing["apiVersion"], thing["kind"], thing["metadata"]["namespace"])


def path_of(thing: Mapping[str, Any]) -> str:
    """An object's path."""
    return f"{collection(thing)}/{thing['metadata']['name']}"
