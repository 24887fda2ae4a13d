"""Refusals of the fake API server: Status objects with the words of a real kube-apiserver 1.36."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlrover_backends.fake_k8s.kinds import Kind

Object = dict[str, Any]

NAMES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    406: "NotAcceptable",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Refused(Exception):
    """A request that the server refuses: `code`, its `body` (a Status object, or plain text) and extra `headers`."""

    def __init__(self, code: int, body: Object | str, headers: dict[str, str] | None = None) -> None:
        super().__init__(code, body)
        self.code = code
        self.body = body
        self.headers = headers or {}
        self.warnings: list[str] = []


def status(
    code: int, message: str, *, reason: str | None = None, details: Object | None = None, metadata: Object | None = None
) -> Object:
    """A Status object of a failure."""
    answer: Object = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": metadata or {},
        "status": "Failure",
        "message": message,
        "reason": reason or NAMES.get(code, "Unknown"),
    }
    if details is not None:
        answer["details"] = details
    answer["code"] = code
    return answer


def success(*, code: int | None = None, details: Object | None = None) -> Object:
    """A Status object of a success."""
    answer: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details is not None:
        answer["details"] = details
    if code is not None:
        answer["code"] = code
    return answer


def _details(kind: Kind, name: str, *, plural: bool = True) -> Object:
    answer: Object = {"name": name} if name else {}
    if kind.group:
        answer["group"] = kind.group
    answer["kind"] = kind.plural if plural else kind.kind
    return answer


def not_found(kind: Kind, name: str) -> Refused:
    """404 for an object that is not there."""
    return Refused(404, status(404, f'{kind.qualified} "{name}" not found', details=_details(kind, name)))


def no_such_path() -> Refused:
    """What the server says of a group, version or resource that it does not serve: text, no Status object."""
    return Refused(404, "404 page not found\n", {"X-Content-Type-Options": "nosniff"})


def already_exists(kind: Kind, name: str, *, leaving: bool = False) -> Refused:
    """409 for a name that is taken, perhaps by an object that is being deleted."""
    words = f'{"object is being deleted: " if leaving else ""}{kind.qualified} "{name}" already exists'
    return Refused(409, status(409, words, reason="AlreadyExists", details=_details(kind, name)))


def modified(kind: Kind, name: str) -> Refused:
    """A write that names an older version than the stored one."""
    words = (
        f'Operation cannot be fulfilled on {kind.qualified} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return Refused(409, status(409, words, details=_details(kind, name)))


def precondition(kind: Kind, name: str, words: str) -> Refused:
    """A delete whose precondition does not hold."""
    message = f'Operation cannot be fulfilled on {kind.singular_qualified} "{name}": {words}'
    return Refused(409, status(409, message, details=_details(kind, name, plural=False)))


def conflict(resource: str, name: str, words: str) -> Refused:
    """409 with words of its own."""
    message = f'Operation cannot be fulfilled on {resource} "{name}": {words}'
    return Refused(409, status(409, message, details={"name": name, "kind": resource}))


def bad_request(message: str) -> Refused:
    """400: the request cannot be understood."""
    return Refused(400, status(400, message))


def forbidden(kind: Kind, name: str, words: str, causes: list[Object] | None = None) -> Refused:
    """A request that admission refuses."""
    details = _details(kind, name)
    if causes:
        details["causes"] = causes
    subject = f'{kind.qualified} "{name}"' if name else kind.qualified
    return Refused(403, status(403, f"{subject} is forbidden: {words}", details=details))


def cause(reason: str, message: str, field: str) -> Object:
    """One of the causes in the details of a refusal."""
    return {"reason": reason, "message": message, "field": field}


def required(field: str, words: str = "") -> Object:
    """The cause of a field that is missing."""
    return cause("FieldValueRequired", f"Required value{': ' + words if words else ''}", field)


def wrong(field: str, shown: str, words: str) -> Object:
    """The cause of a field whose value is wrong; `shown` is the value as JSON."""
    return cause("FieldValueInvalid", f"Invalid value: {shown}: {words}", field)


def unsupported(field: str, shown: str, supported: Iterable[str]) -> Object:
    """The cause of a field with a value other than the supported ones."""
    choices = ", ".join(f'"{one}"' for one in supported)
    return cause("FieldValueNotSupported", f"Unsupported value: {shown}: supported values: {choices}", field)


def not_allowed(field: str, words: str) -> Object:
    """The cause of a field that may not be set or changed."""
    return cause("FieldValueForbidden", f"Forbidden: {words}", field)


def invalid(kind: Kind, name: str, causes: list[Object]) -> Refused:
    """A body whose fields break rules."""
    told = []
    for one in causes:
        words = f"{one['field']}: {one['message']}"
        if words not in told:
            told.append(words)
    listed = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    details = _details(kind, name, plural=False)
    details["causes"] = causes
    message = f'{kind.singular_qualified} "{name}" is invalid: {listed}'
    return Refused(422, status(422, message, details=details))


def expired(message: str, continued: str | None = None) -> Refused:
    """410 for a version that is compacted; `continued` is the token of an inconsistent continuation."""
    metadata = {"continue": continued} if continued else None
    return Refused(410, status(410, message, metadata=metadata))


def busy(*, text: bool, after_s: int | None = None) -> Refused:
    """429 in both forms that a real server has: text of the in-flight limit, Status of a storage that begins."""
    if text:
        headers = {"Retry-After": str(1 if after_s is None else after_s), "X-Content-Type-Options": "nosniff"}
        return Refused(429, "Too many requests, please try again later.\n", headers)
    body = status(429, "storage is (re)initializing", details={"retryAfterSeconds": 1})
    return Refused(429, body, {"Retry-After": "1"})


def unsupported_media(accepted: Iterable[str]) -> Refused:
    """415 for a body in a form that the resource does not take."""
    words = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    return Refused(415, status(415, words))
