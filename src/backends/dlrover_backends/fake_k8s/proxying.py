"""The API server's proxy to ports of pods and services, which anybody with a kubeconfig reaches them through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from dlrover_backends.fake_k8s import answers, selectors
from dlrover_backends.fake_k8s.answers import Refused
from dlrover_backends.fake_k8s.store import Store

Object = dict[str, Any]

_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/(pods|services)/([^/:]+)(?::([^/:]+))?/proxy(/.*)?")
_KEPT = {"authorization", "host", "connection", "transfer-encoding", "content-length", "upgrade"}
_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Target(NamedTuple):
    """What a path of the proxy names.

    verb:   of a Role, on the subresource ``proxy``
    where:  namespace
    plural: pods or services
    name:   the pod's or service's
    port:   number or name; empty: the first one
    path:   what is asked there
    """

    verb: str
    where: str
    plural: str
    name: str
    port: str
    path: str


def target(method: str, path: str) -> Target | None:
    """What a request is to be passed on to; None: it is for the API server itself."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    return Target(_VERBS.get(method, "get"), found[1], found[2], found[3], found[4] or "", found[5] or "/")


async def passed_on(raw: web.BaseRequest, to: Target, store: Store) -> web.StreamResponse:
    """The answer of the pod. Credentials for the API server are not passed on.

    Raises:
        Refused: 404 or 503.
    """
    address = _address(store, to)
    url = f"http://{address}{to.path}{'?' + raw.query_string if raw.query_string else ''}"
    headers = {key: value for key, value in raw.headers.items() if key.lower() not in _KEPT}
    try:
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(raw.method, url, headers=headers, data=await raw.read(), allow_redirects=False) as answer,
        ):
            stream = web.StreamResponse(status=answer.status)
            stream.headers.update({key: value for key, value in answer.headers.items() if key.lower() not in _KEPT})
            await stream.prepare(raw)
            async for piece in answer.content.iter_any():
                await stream.write(piece)
            await stream.write_eof()
            return stream
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        words = f"error trying to reach service: dial tcp {address}: {error}"
        raise Refused(503, answers.status(503, words, reason="ServiceUnavailable")) from error


def _address(store: Store, to: Target) -> str:
    found = store.get(("", to.plural), (to.where, to.name))
    if found is None:
        words = f'{to.plural} "{to.name}" not found'
        raise Refused(404, answers.status(404, words, reason="NotFound"))
    if to.plural == "pods":
        return f"{found.obj['status'].get('podIP', '0.0.0.0')}:{to.port or 80}"  # noqa: S104  # nobody is there
    service = found.obj["spec"]
    port = next((one for one in service.get("ports") or [] if to.port in {"", str(one["port"]), one.get("name")}), None)
    for pod in _behind(store, to.where, service):
        if port is not None:
            return f"{pod['status']['podIP']}:{port.get('targetPort') or port['port']}"
    words = f'no endpoints available for service "{to.name}"'
    raise Refused(503, answers.status(503, words, reason="ServiceUnavailable"))


def _behind(store: Store, where: str, service: Object) -> Iterator[Object]:
    matches = selectors.labels_of_object({"matchLabels": service.get("selector") or {}})
    for (namespace, _), pod in store.shelf(("", "pods")).objects.items():
        status = pod.obj.get("status") or {}
        if namespace != where or status.get("phase") != "Running" or not status.get("podIP"):
            continue
        if matches(pod.obj["metadata"].get("labels") or {}):
            yield pod.obj
