"""What a request asks for: its verb, kind, place and form, taken from its method, path, query and headers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from dlrover_backends.fake_k8s import answers
from dlrover_backends.fake_k8s.answers import Refused
from dlrover_backends.fake_k8s.api import Api
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.rights import User

_BODIES = ("application/json", "application/yaml", "application/vnd.kubernetes.protobuf")
_PATCHES = (
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
)
_REVIEW = Kind("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False)


class Cut(Exception):
    """The connection breaks instead of an answer."""


@dataclass
class Request:
    """One request.

    Attributes:
        verb: get, list, watch, create, update, patch, delete or deletecollection.
        kind: what it is about.
        where: namespace; empty for all, and for kinds without.
        name: object's name; empty for collections.
        sub: subresource; empty for the object itself.
        query: parameters.
        media: content type of the body, without parameters.
        form: `table`, `partial`, or empty for whole objects.
        body: decoded JSON; None without one.
        user: who asks.
    """

    verb: str
    kind: Kind
    where: str
    name: str
    sub: str
    query: dict[str, str]
    media: str
    form: str
    body: Any
    user: User

    @property
    def plural(self) -> str:
        """The plural name of the kind."""
        return self.kind.plural

    @property
    def resource(self) -> str:
        """The plural name with the subresource: `pods/status`."""
        return f"{self.kind.plural}/{self.sub}" if self.sub else self.kind.plural

    @property
    def dry(self) -> bool:
        """Whether nothing is to be stored."""
        return self.query.get("dryRun") == "All"


async def parsed(raw: web.BaseRequest, api: Api, user: User) -> Request:
    """A request, taken apart.

    Raises:
        Refused: no such path, verb, media type or form; or a body that is no JSON object.
    """
    kind, where, name, sub = _place(raw.path, api)
    query = dict(raw.query)
    watch = query.get("watch") in {"true", "1"} and not name
    verb = _verb(raw.method, name, watch=watch)
    form = _form(raw.headers.get("Accept", "*/*"))
    media = raw.headers.get("Content-Type", "").partition(";")[0].strip()
    body: Any = None
    if raw.method in {"POST", "PUT", "PATCH", "DELETE"}:
        text = await raw.read()
        if verb in {"create", "update"} and media not in {"", "application/json"}:
            raise answers.unsupported_media(_BODIES)
        if verb == "patch":
            _patch_media(kind, media)
        body = _decoded(text, kind) if text else ({} if verb.startswith("delete") else None)
        if body is None:
            raise answers.bad_request(f"the request has no body: a {kind.kind} is expected")
    return Request(verb, kind, where, name, sub, query, media, form, body, user)


def _place(path: str, api: Api) -> tuple[Kind, str, str, str]:
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise answers.no_such_path()
    where = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in {"status", "finalize"}:
        where, rest = rest[1], rest[2:]
    if group == _REVIEW.group and rest[0] == _REVIEW.plural:
        return _REVIEW, "", "", ""
    kind = api.kind(group, version, rest[0])
    if where and not kind.namespaced:
        raise answers.no_such_path()
    return kind, where, rest[1] if len(rest) > 1 else "", "/".join(rest[2:])


def _verb(method: str, name: str, *, watch: bool) -> str:
    if method in {"GET", "HEAD"}:
        return "get" if name else ("watch" if watch else "list")
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete" if name else "deletecollection"}
    if method not in verbs or (method in {"PUT", "PATCH"} and not name):
        words = "the server does not allow this method on the requested resource"
        raise Refused(405, answers.status(405, words, details={}))
    return verbs[method]


def _form(accept: str) -> str:
    for one in accept.split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        if "as=Table" in parameters:
            return "table"
        if any(part.startswith("as=PartialObjectMetadata") for part in parameters):
            return "partial"
        if kind in {"application/json", "*/*", "application/*"}:
            return ""
    words = f"406: Not Acceptable\n\nAvailable representations: {', '.join(_BODIES)}"
    raise Refused(406, answers.status(406, words, details={}))


def _patch_media(kind: Kind, media: str) -> None:
    if media == "application/strategic-merge-patch+json" and kind.custom:
        raise answers.unsupported_media(one for one in _PATCHES if "strategic" not in one)
    if media not in _PATCHES:
        raise Refused(415, answers.status(415, "415: Unsupported Media Type", details={}))


def _decoded(text: bytes, kind: Kind) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        shown = text.decode(errors="replace")
        first = shown.lstrip("{ \n")[:1]
        words = (
            f"the object provided is unrecognized (must be of type {kind.kind}): couldn't get version/kind; json parse "
            f"error: invalid character '{first}' looking for beginning of object key string ({shown[:100]})"
        )
        raise answers.bad_request(words) from None
