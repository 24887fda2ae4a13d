"""What the Kubernetes API server answers in place of what was asked: one error class for each reaction that callers differ in.

The errors of the client library do not leave `transport`; they are the `__cause__` of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dlrover_core.errors import CoreError

TEXT_MAX = 1000


class Request(NamedTuple):
    """A request as people know it: an HTTP method, and a path with its query."""

    method: str
    path: str

    @property
    def verb(self) -> str:
        """The verb that a Role grants for it."""
        path, _, query = self.path.partition("?")
        named = len(path.strip("/").split("/")) % 2 == 0 if path.startswith("/api/") else path.count("/") % 2 == 1
        if self.method == "GET":
            return "watch" if "watch=" in query else "get" if named else "list"
        return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(self.method, self.method)


class ApiError(CoreError):
    """The API server did not do what was asked.

    status:        the HTTP status; 0: there was no answer
    reason:        the Status object's reason, such as ``AlreadyExists``; empty: the answer was no Status object
    message:       the server's own words
    causes:        (field, message) of each fault that validation has found
    retry_after_s: how long the server asks to wait; None: it does not say
    """

    def __init__(
        self,
        asked: Request,
        status: int,
        message: str,
        *,
        reason: str = "",
        causes: tuple[tuple[str, str], ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{asked.method} {asked.path}: {status or 'no answer'} {reason} {message}".strip())
        self.asked, self.status, self.message, self.reason = asked, status, message, reason
        self.causes, self.retry_after_s = causes, retry_after_s


class Unauthorized(ApiError):
    """401: the credentials are not accepted, or no longer."""


class Forbidden(ApiError):
    """403: no right to it, a quota that is used up, or an admission rule that says no: `why_not` tells them apart."""


class NotFound(ApiError):
    """404: the object, its namespace, or its kind is not there."""


class Conflict(ApiError):
    """409: the name is taken, or the object is not in the state that was presumed."""


class Expired(ApiError):
    """410: the version is too old to go on from. List anew."""


class Invalid(ApiError):
    """400, 415 or 422: asking again in the same way is pointless."""


class Busy(ApiError):
    """429, 500, 503 or 504: ask again later. After a write its outcome is unknown, except after 429."""


class Unreachable(ApiError):
    """No answer came, or it was cut off. After a write its outcome is unknown."""


_CLASSES: Mapping[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: Invalid,
    409: Conflict,
    410: Expired,
    415: Invalid,
    422: Invalid,
    429: Busy,
}


def of_answer(asked: Request, status: int, body: Any, headers: Mapping[str, str]) -> ApiError:
    """The error that an answer is: ``body`` is a Status object, or any text."""
    told = body if isinstance(body, dict) else {"message": str(body or "").strip()}
    found = told.get("details")
    details: dict[str, Any] = found if isinstance(found, dict) else {}
    causes = tuple(
        (str(one.get("field", "")), str(one.get("message", "")))
        for one in details.get("causes") or ()
        if isinstance(one, dict)
    )
    after = headers.get("Retry-After", details.get("retryAfterSeconds"))
    return _class_of(status)(
        asked,
        status,
        str(told.get("message") or "")[:TEXT_MAX],
        reason=str(told.get("reason") or ""),
        causes=causes,
        retry_after_s=_seconds(after),
    )


def _class_of(status: int) -> type[ApiError]:
    return _CLASSES.get(status, Busy if status >= 500 else ApiError)


def _seconds(text: object) -> float | None:
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if 0 <= found < float("inf") else None
