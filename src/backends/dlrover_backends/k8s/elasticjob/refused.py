"""What the API server refuses the operator: a reason for a condition and an event, and the words that tell what to do. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from dlrover_backends.k8s.errors import ApiError, Conflict, Forbidden, Invalid, NotFound, Request
from dlrover_backends.k8s.refusals import place

TAKEN, RIGHT, QUOTA, RULES, INVALID, MISSING, NO_ANSWER, LOG_STAYS = (
    "NameTaken",
    "MissingRight",
    "QuotaExceeded",
    "ForbiddenHere",
    "NotTaken",
    "NotFound",
    "NoAnswer",
    "LogStays",
)
HOME, ROLE = "dlrover", "dlrover-operator"
"""Where ``deploy/base`` puts the operator, and its Role."""
OVERLAYS = (
    (re.compile(r"kueue\.x-k8s\.io"), "deploy/overlays/kueue"),
    (re.compile(r"^nodes(/|$)|[\"\[]nodes[\"\] ]"), "deploy/overlays/node-reader"),
)
"""Which overlay grants what ``deploy/base`` does not: by the resource, or by a rule as RBAC writes it."""


class Taken(Conflict):
    """The name is another's."""


class LogStays(ApiError):
    """What an etcd has of a job that is deleted cannot be removed."""


class Refusal(NamedTuple):
    """Why something is not written.

    reason: a word, as a condition has it
    why:    what was asked, the server's words, and what to do
    lasts:  does asking again not mend it?
    """

    reason: str
    why: str
    lasts: bool = True


def read(error: ApiError) -> Refusal:
    """What an error of the API means to whoever applied a job."""
    asked = _asked(error.asked)
    if isinstance(error, LogStays):
        return Refusal(LOG_STAYS, error.message)
    if isinstance(error, Taken):
        return Refusal(TAKEN, error.message)
    if isinstance(error, Forbidden):
        return _forbidden(error, asked)
    if isinstance(error, Invalid):
        faults = "; ".join(f"{field}: {message}" for field, message in error.causes) or error.message
        return Refusal(INVALID, f"the API server does not take what {asked} sends: {faults}")
    if isinstance(error, NotFound):
        return Refusal(MISSING, f"{asked}: {error.message}")
    return Refusal(NO_ANSWER, f"{asked}: {error.status or 'no answer'} {error.reason} {error.message}".strip(), False)


def _forbidden(error: Forbidden, asked: str) -> Refusal:
    said = error.message
    if "exceeded quota" in said:
        return Refusal(QUOTA, f"{asked}: {said}")
    if "attempting to grant" in said:
        # RBAC: nobody gives masters a right without having it.
        return Refusal(
            RIGHT, f"{asked}: the operator may give masters no right that it does not have: {remedy(error)}; {said}"
        )
    if (" cannot " in said and " resource " in said) or not said:
        return Refusal(RIGHT, f"no right to {asked}: {remedy(error)}; {said}".rstrip("; "))
    return Refusal(RULES, f"rules of the namespace refuse {asked}: {said}")


def remedy(error: ApiError) -> str:
    """Which part of ``deploy/`` grants the right that an answer says is missing."""
    namespace, resource = place(error.asked)
    lacking = error.message.partition("attempting to grant")[2] or resource
    for named, overlay in OVERLAYS:
        if named.search(lacking):
            return f"kubectl apply -k {overlay} grants it"
    if namespace in {HOME, "NAMESPACE"}:
        return f"kubectl apply -k deploy/base grants it, by its Role {ROLE}"
    return (
        f"kubectl apply -k deploy/overlays/cluster-wide grants it; or put the Role {ROLE} of deploy/base/rights.yaml, and its "
        f"RoleBinding, into namespace {namespace or 'NAMESPACE'}"
    )


def _asked(asked: Request) -> str:
    """``create services in namespace ml``."""
    namespace, resource = place(asked)
    return f"{asked.verb} {resource} {f'in namespace {namespace}' if namespace else 'in all namespaces'}"
