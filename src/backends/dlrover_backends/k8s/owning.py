"""Owner references: what bears one is deleted with its owner by Kubernetes."""

from __future__ import annotations

from dlrover_backends.k8s.api import Json


def reference(owner: Json) -> Json:
    """The entry of ``metadata.ownerReferences`` that names this object as owner and controller."""
    metadata = owner["metadata"]
    return of(owner["apiVersion"], owner["kind"], metadata["name"], metadata.get("uid", ""))


def of(api_version: str, kind: str, name: str, uid: str) -> Json:
    """The same, of an object that is known by these alone."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
