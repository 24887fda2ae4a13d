"""What a refused request means for a node: it waits, or it can never be; and which right is missing, in words to act on."""

from __future__ import annotations

from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.errors import ApiError, Forbidden, Invalid, NotFound, Request
from dlrover_core.errors import LaunchRefused

RIGHTS = {
    "pods": ("create", "get", "list", "watch", "delete"),
    "configmaps": ("create", "get", "patch"),
    "secrets": ("create", "get", "delete"),
    "pods/proxy": ("create", "get"),
    "podgroups": ("create", "get", "patch", "delete"),
}
"""What a master needs in its namespace: the Role of docs/kubernetes.md."""


def of_launch(error: ApiError) -> LaunchRefused | None:
    """The refusal that an answer to a create is; None: its outcome is unknown, or it may be asked again."""
    if isinstance(error, Forbidden):
        return of_forbidden(error)
    if isinstance(error, NotFound):
        return LaunchRefused(f"{error.message}: create it, or say --backend k8s:namespace=NAME", permanent=True)
    if isinstance(error, Invalid):
        faults = "; ".join(f"{field}: {message}" for field, message in error.causes) or error.message
        return LaunchRefused(f"the API server does not take the pod: {faults}", permanent=True)
    return None


def of_forbidden(error: Forbidden) -> LaunchRefused:
    """A 403 is a quota (the node waits), a missing right, or a rule of the namespace (it can never be)."""
    message = error.message
    if "exceeded quota" in message:
        return LaunchRefused(f"QuotaExceeded: {message}", permanent=False)
    if "failed quota" in message and "must specify" in message:
        lacking = message.rpartition("must specify")[2].strip()
        return LaunchRefused(
            f"{message}; write {lacking} under resources of each container of the nodes' pod template, or give the namespace a "
            "LimitRange with defaults",
            permanent=True,
        )
    if "podgroup phase is Pending" in message:  # Volcano's admission, where it is set up so
        return LaunchRefused(f"Gang: {message}", permanent=False)
    if " cannot " in message and " resource " in message:
        return LaunchRefused(missing_right(error), permanent=True)
    return LaunchRefused(f"the namespace's rules refuse the pod: {message}", permanent=True)


def of_stranger(pod: Json, namespace: str) -> LaunchRefused:
    """A pod of somebody else's has the node's name."""
    owner = (pod["metadata"].get("ownerReferences") or [{}])[0]
    whose = f"{owner.get('kind', 'nobody')} {owner.get('name', '')}".strip()
    return LaunchRefused(
        f"pod {pod['metadata']['name']} in namespace {namespace} is not of this run (its owner: {whose}); delete it, or rename "
        "the job",
        permanent=True,
    )


def of_removed(pod: Json) -> LaunchRefused:
    """Somebody removed the node's pod before the answer to its create came."""
    return LaunchRefused(
        f"Deleted: pod {pod['metadata']['name']} was removed as soon as it was made; it is made again", permanent=False
    )


def missing_right(error: ApiError) -> str:
    """Which verb on what is missing, and the command that grants it: of a Role, or of a ClusterRole for what no namespace has."""
    namespace, resource = place(error.asked)
    kind, _, sub = resource.partition("/")
    plain = "/".join(filter(None, (kind.partition(".")[0], sub)))
    verbs = ",".join(dict.fromkeys((*RIGHTS.get(plain, ()), error.asked.verb)))
    where, role = (f"kubectl -n {namespace}", "role") if namespace else ("kubectl", "clusterrole")
    return (
        f"{error.message or 'no right'} (verb {error.asked.verb}, resource {resource}); grant it: {where} create {role} "
        f"dlrover-{plain.replace('/', '-')} --verb={verbs} --resource={resource}, and bind it with kubectl create {role}binding"
    )


def place(asked: Request) -> tuple[str, str]:
    """Namespace and resource of a request; an empty namespace: all of them."""
    parts = asked.path.partition("?")[0].strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource = rest[0] if rest else parts[-1]
    group = f".{parts[1]}" if parts[0] == "apis" and len(parts) > 1 else ""
    return namespace, f"{resource}{group}{f'/{rest[2]}' if len(rest) > 2 else ''}"
