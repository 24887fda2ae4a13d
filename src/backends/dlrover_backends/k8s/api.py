"""The port to the Kubernetes API: raw JSON objects in and out. `transport` implements it over sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol

Json = dict[str, Any]
"""An object of the Kubernetes API, as decoded."""
Ask = Callable[..., Awaitable[Json]]
"""Sends a request as `Api.ask` does: method, path, body."""


class Api(Protocol):
    """Requests to one API server."""

    async def ask(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        """Send one request; the decoded answer. Raises `ApiError`."""
        ...

    def watch(self, path: str, query: Mapping[str, str], read_s: float) -> AsyncGenerator[Json, None]:
        """Events of a watch as they come, until the server ends it.

        Raises `ApiError`: where the server refuses, `Unreachable` where the stream is cut or silent for ``read_s``.
        """
        ...


def uid_of(thing: Json) -> str:
    """An object's uid; empty: it has none."""
    return str(thing["metadata"].get("uid") or "")


def only(uid: str) -> Json:
    """The options of a deletion of the object with this uid alone, and of none that has its name by now."""
    return {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
