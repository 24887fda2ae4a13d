"""The one place that speaks HTTP to an API server: `kubernetes-asyncio` for credentials, TLS and the pool; JSON stays raw.

Its models cost twelve times as much to decode as the JSON, and its watch retries behind its caller's back: neither is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import aiohttp

from dlrover_backends.k8s import library
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.errors import ApiError, Request, Unauthorized, Unreachable, of_answer
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject

parts = library.parts()
kube: Any = parts.config  # partly typed, and not everywhere installed

CONNECT_S, READ_S, TOTAL_S = 5.0, 30.0, 60.0
PASSED_S = 120.0
"""For so long what is behind the proxy may be silent: masters hold a question for news back for some time."""
POOL_MAX = 64
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
MERGE_PATCH = "application/merge-patch+json"
LINE_BYTES_MAX = 16 * 1024 * 1024
"""The longest line of a watch: an object of 1.5 MiB, managed fields and escapes included, is far below."""


class Transport:
    """`Api` over HTTPS. Credentials are read at the first request, and again when the server no longer accepts them.

    kubeconfig: path of the file; empty: ``KUBECONFIG``, ``~/.kube/config``, or in a pod its service account
    context:    name of a context in it; empty: the current one
    """

    def __init__(self, kubeconfig: str = "", context: str = "") -> None:
        self._kubeconfig, self._context = kubeconfig, context
        self._configuration: Configuration | None = None
        self._rest: RESTClientObject | None = None
        self._last: RESTClientObject | None = None
        self._watches: dict[aiohttp.ClientResponse, RESTClientObject] = {}
        self._opening = asyncio.Lock()
        self.namespace = ""

    async def close(self) -> None:
        """Close all connections; the next request opens new ones. Open watches end with `Unreachable`."""
        rests, self._rest, self._last = (self._last, self._rest), None, None
        for one in rests:
            if one is not None:
                await self._ended(one)

    async def _renew(self, refused: RESTClientObject) -> None:
        """Read the credentials at the next request. What is open stays so until they are renewed once more.

        Requests that are refused together renew them once: the connections of a watch would be closed under it.
        """
        if refused is not self._rest:
            return
        last, self._last, self._rest = self._last, self._rest, None
        if last is not None:
            await self._ended(last)

    async def _ended(self, rest: RESTClientObject) -> None:
        """Close its connections. aiohttp tells nobody who reads from one, and takes its read timeout away as well."""
        for answer in [one for one, its in self._watches.items() if its is rest]:
            answer.content.set_exception(aiohttp.ClientConnectionError("the connection was closed on this side"))
        await rest.close()

    async def open(self) -> None:
        """Read credentials, unless that is done. Raises `SpecError` where there are none."""
        await self._opened()

    async def ask(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> Json:
        """Send one request; the decoded answer. Raises `ApiError`, and `SpecError` where there are no credentials."""
        asked = Request(method, _with_query(path, query))
        rest, configuration = await self._opened()
        try:
            return await self._ask(rest, configuration, asked, body)
        except Unauthorized:
            # A token of an exec plugin or of a service account has run out: a new one is made by reading them anew.
            await self._renew(rest)
            return await self._ask(*await self._opened(), asked, body)

    async def _ask(
        self, rest: RESTClientObject, configuration: Configuration, asked: Request, body: Json | None
    ) -> Json:
        timeout = aiohttp.ClientTimeout(total=TOTAL_S, sock_connect=CONNECT_S, sock_read=READ_S)
        answer = await _sent(rest, configuration, asked, body, timeout)
        try:
            data = await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _unreachable(asked, error) from error
        finally:
            answer.release()
        if not 200 <= answer.status <= 299:
            raise of_answer(asked, answer.status, _decoded(data), answer.headers)
        found = _decoded(data)
        if not isinstance(found, dict):
            raise Unreachable(asked, 0, f"the answer is no JSON object: {data[:100]!r}")
        return found

    async def pass_on(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """A request that the API server's proxy passes on: status, headers and body of whatever answers. Raises `ApiError`."""
        rest, configuration = await self._opened()
        asked = Request(method, path)
        theirs = {
            str(one["key"]): str(one["value"])
            for one in (await configuration.auth_settings()).values()
            if one.get("value")
        }
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=PASSED_S)
        proxy = {"proxy": configuration.proxy} if configuration.proxy else {}
        try:
            async with rest.pool_manager.request(
                method,
                str(configuration.host).rstrip("/") + path,
                headers={**headers, **theirs},
                data=data or None,
                timeout=timeout,
                **proxy,
            ) as answer:
                return answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _unreachable(asked, error) from error

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Lines of a text that grows, such as a container's output, until it ends. Raises `ApiError`."""
        asked = Request("GET", _with_query(path, query))
        rest, configuration = await self._opened()
        answer = await _sent(rest, configuration, asked, None, aiohttp.ClientTimeout(sock_connect=CONNECT_S))
        try:
            if answer.status != 200:
                raise of_answer(asked, answer.status, _decoded(await answer.read()), answer.headers)
            async for line in _lines(answer, asked):
                yield line
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _unreachable(asked, error) from error
        finally:
            answer.close()

    async def watch(self, path: str, query: Mapping[str, str], read_s: float) -> AsyncGenerator[Json, None]:
        """Events of a watch as they come, until the server ends it. Raises `ApiError`."""
        asked = Request("GET", _with_query(path, {**query, "watch": "1"}))
        rest, configuration = await self._opened()
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=read_s)
        answer = await _sent(rest, configuration, asked, None, timeout)
        self._watches[answer] = rest
        try:
            if answer.status != 200:
                if answer.status == 401:
                    await self._renew(rest)
                raise of_answer(asked, answer.status, _decoded(await answer.read()), answer.headers)
            async for line in _lines(answer, asked):
                event = _decoded(line)
                if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                    raise Unreachable(asked, 0, f"the watch said what is no event: {line[:100]!r}")
                yield event
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _unreachable(asked, error) from error
        finally:
            del self._watches[answer]
            answer.close()

    async def _opened(self) -> tuple[RESTClientObject, Configuration]:
        async with self._opening:
            if self._rest is None or self._configuration is None:
                self._configuration = await self._credentials()
                self._rest = parts.rest(self._configuration, maxsize=POOL_MAX)
            return self._rest, self._configuration

    async def _credentials(self) -> Configuration:
        found: Configuration = type.__call__(
            parts.configuration
        )  # a new one: calling the class gives the process's default
        path = self._kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        there = _exists(path)
        in_cluster = not there and not self._kubeconfig and bool(os.environ.get(IN_CLUSTER))
        if not there and not in_cluster:
            raise SpecError(
                "kubeconfig",
                f"{path!r} is not there, and this is no pod; set KUBECONFIG, or say --backend k8s:kubeconfig=FILE",
            )
        try:
            if in_cluster:
                kube.load_incluster_config(client_configuration=found)
                self.namespace = _own_namespace()
                return found
            loader = await kube.load_kube_config(
                config_file=path, context=self._context or None, client_configuration=found, persist_config=False
            )
        except Exception as error:  # the library meets a file that people wrote, and raises whatever it trips over
            raise SpecError("kubeconfig", f"{path!r} cannot be used: {type(error).__name__}: {error}") from error
        context: Any = (loader.current_context or {}).get("context") or {}
        self.namespace = str(context.get("namespace") or "")
        return found


async def _sent(
    rest: RESTClientObject,
    configuration: Configuration,
    asked: Request,
    body: Json | None,
    timeout: aiohttp.ClientTimeout,
) -> aiohttp.ClientResponse:
    """The answer, as soon as its head is there."""
    headers = {"Accept": "application/json"}
    headers["Content-Type"] = MERGE_PATCH if asked.method == "PATCH" else "application/json"
    for one in (await configuration.auth_settings()).values():
        if one.get("value"):
            headers[str(one["key"])] = str(one["value"])
    try:
        answer: aiohttp.ClientResponse = await rest.request(
            asked.method,
            str(configuration.host).rstrip("/") + asked.path,
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=timeout,
        )
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise _unreachable(asked, error) from error
    return answer


def _exists(paths: str) -> bool:
    """Is any of these files there? ``KUBECONFIG`` may name several, and a home."""
    return any(Path(one).expanduser().exists() for one in paths.split(os.pathsep) if one)


def _own_namespace() -> str:
    with contextlib.suppress(OSError):
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text(encoding="utf-8").strip()
    return ""


async def _lines(answer: aiohttp.ClientResponse, asked: Request) -> AsyncGenerator[bytes, None]:
    """Lines of the answer, however they are cut into chunks, and however long. What a cut stream leaves behind is dropped."""
    held = bytearray()
    async for chunk in answer.content.iter_any():
        begun = len(held)
        held += chunk
        end = held.find(b"\n", begun)
        start = 0
        while end >= 0:
            if line := bytes(held[start:end]).strip():
                yield line
            start = end + 1
            end = held.find(b"\n", start)
        del held[:start]
        if len(held) > LINE_BYTES_MAX:
            raise Unreachable(asked, 0, f"an event of the watch is longer than {LINE_BYTES_MAX} bytes")
    if held.strip():
        yield bytes(held)


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")


def _with_query(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _unreachable(asked: Request, error: BaseException) -> ApiError:
    return Unreachable(asked, 0, f"{type(error).__name__}: {error}".rstrip(": "))
