"""What the API server refuses the operator, in words that name the verb, the resource, and what grants it."""

from __future__ import annotations

import pytest

from dlrover_backends.k8s.elasticjob import deploy, refused
from dlrover_backends.k8s.errors import ApiError, Busy, Forbidden, Invalid, NotFound, Request, Unreachable

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles"
CANNOT = 'x is forbidden: User "u" cannot create resource "y" in API group "" in the namespace "ml"'
GRANT = (
    'roles.rbac.authorization.k8s.io "mnist-masters" is forbidden: user "system:serviceaccount:dlrover:dlrover-operator" '
    '(groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:\n'
    '{APIGroups:["kueue.x-k8s.io"], Resources:["workloads"], Verbs:["create" "delete"]}'
)


def forbidden(path: str, message: str) -> Forbidden:
    """The answer to a create."""
    return Forbidden(Request("POST", path), 403, message)


@pytest.mark.parametrize(
    ("error", "reason", "words", "lasts"),
    [
        (
            forbidden("/api/v1/namespaces/dlrover/services", CANNOT),
            "MissingRight",
            [
                "no right to create services in namespace dlrover: kubectl apply -k deploy/base grants it",
                "Role dlrover-op",
            ],
            True,
        ),
        (
            forbidden("/apis/policy/v1/namespaces/ml/poddisruptionbudgets", CANNOT),
            "MissingRight",
            [
                "create poddisruptionbudgets.policy in namespace ml: kubectl apply -k deploy/overlays/cluster-wide",
                CANNOT,
            ],
            True,
        ),
        (
            forbidden("/api/v1/pods", CANNOT),
            "MissingRight",
            ["in all namespaces", "deploy/overlays/cluster-wide"],
            True,
        ),
        (
            forbidden(RBAC.format("dlrover"), GRANT),
            "MissingRight",
            ["kubectl apply -k deploy/overlays/kueue grants it"],
            True,
        ),
        (
            forbidden(RBAC.format("dlrover"), GRANT.replace("kueue.x-k8s.io", "").replace("workloads", "nodes")),
            "MissingRight",
            ["kubectl apply -k deploy/overlays/node-reader grants it"],
            True,
        ),
        (
            forbidden("/apis/policy/v1/namespaces/nodes/poddisruptionbudgets/mnist-nodes", CANNOT),
            "MissingRight",
            ["kubectl apply -k deploy/overlays/cluster-wide grants it"],
            True,
        ),
        (
            forbidden("/api/v1/nodes/gpu-1", CANNOT),
            "MissingRight",
            ["kubectl apply -k deploy/overlays/node-reader grants it"],
            True,
        ),
        (
            forbidden("/api/v1/namespaces/ml/persistentvolumeclaims", "exceeded quota: storage, requested: 1Gi"),
            "QuotaExceeded",
            ["create persistentvolumeclaims in namespace ml: exceeded quota"],
            True,
        ),
        (
            forbidden("/api/v1/namespaces/ml/services", 'admission webhook "w" denied the request: no'),
            "ForbiddenHere",
            ["rules of the namespace refuse create services in namespace ml: admission webhook"],
            True,
        ),
        (
            Invalid(Request("POST", "/api/v1/namespaces/ml/services"), 422, "m", causes=(("spec.ports", "Required"),)),
            "NotTaken",
            ["spec.ports: Required"],
            True,
        ),
        (
            NotFound(Request("POST", "/api/v1/namespaces/ml/services"), 404, 'namespaces "ml" not found'),
            "NotFound",
            ['create services in namespace ml: namespaces "ml" not found'],
            True,
        ),
        (
            refused.Taken(Request("POST", "/api/v1/namespaces/ml/services"), 409, "delete it"),
            "NameTaken",
            ["delete it"],
            True,
        ),
        (
            Busy(Request("PATCH", "/api/v1/namespaces/ml/services/a"), 500, "etcd"),
            "NoAnswer",
            ["patch services", "500"],
            False,
        ),
        (
            Unreachable(Request("GET", "/api/v1/namespaces/ml/services/a"), 0, "cut"),
            "NoAnswer",
            ["no answer", "cut"],
            False,
        ),
    ],
)
def test_what_a_refusal_means(error: ApiError, reason: str, words: list[str], lasts: bool) -> None:
    """A reason for a condition, and what to do; whether asking again may mend it."""
    found = refused.read(error)
    assert (found.reason, found.lasts) == (reason, lasts)
    for one in words:
        assert one in found.why


def test_remedies_are_there() -> None:
    """What is named is in deploy/."""
    assert (refused.HOME, refused.ROLE) == (deploy.NAMESPACE, deploy.NAME)
    known = {f"deploy/{name.rpartition('/')[0]}" for name in deploy.files()}
    assert {overlay for _, overlay in refused.OVERLAYS} | {"deploy/base", "deploy/overlays/cluster-wide"} <= known
