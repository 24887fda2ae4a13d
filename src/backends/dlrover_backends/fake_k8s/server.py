"""The fake API server on a real socket: paths, bodies, content types, watches as streams, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import Callable
from typing import Any

from aiohttp import web

from dlrover_backends.fake_k8s import answers, discovery, patching, proxying, schemas, tables
from dlrover_backends.fake_k8s.answers import Refused
from dlrover_backends.fake_k8s.api import Api
from dlrover_backends.fake_k8s.definitions import Definitions
from dlrover_backends.fake_k8s.deleting import Deletion
from dlrover_backends.fake_k8s.faults import Fault, Faults, What
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.lists import Later, Lists, number, options_refused, wanted
from dlrover_backends.fake_k8s.requests import Cut, Request, parsed
from dlrover_backends.fake_k8s.rights import ADMIN, Rights, account
from dlrover_backends.fake_k8s.store import encoded
from dlrover_backends.fake_k8s.watching import Watch

Object = dict[str, Any]

PATCHES = {
    "application/json-patch+json": "json",
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/apply-patch+yaml": "apply",
    "application/apply-patch+cbor": "apply",
}
BOOKMARK_S = 60.0
FOLLOW_S = 0.05
BODY_BYTES_MAX = 3 << 20


class FakeServer:
    """An API server in the running event loop.

    Args:
        token: of a user who may do everything.
        seed: of uids and generated names; None for others each time.
        port: where to listen; 0 for any free port.
        bookmark_s: seconds between bookmarks of a watch that asked for them.
        future_s: seconds that a list waits for a version from the future.
        definition_s: seconds until a new CustomResourceDefinition is served.
        services: first half of services' addresses.
    """

    def __init__(
        self,
        *,
        token: str = "admin-token",  # noqa: S107  the tests' own
        seed: int | None = None,
        port: int = 0,
        bookmark_s: float = BOOKMARK_S,
        future_s: float = 3.0,
        definition_s: float = 0.02,
        services: str = "10.96",
    ) -> None:
        self.api = Api(seed, services=services)
        self.lists = Lists(self.api)
        self.deletion = Deletion(self.api, self._soon)
        self.rights = Rights(self.api.store)
        self.rights.tokens[token] = ADMIN
        self.faults = Faults()
        self.token = token
        self.port = port
        self.bookmark_s = bookmark_s
        self.future_s = future_s
        self.requests = 0
        self.logs: Callable[[str, str], bytes | None] = lambda _where, _name: None
        self._draw = random.Random(seed)
        self._watches: set[Watch] = set()
        self._frozen = asyncio.Event()
        self._frozen.set()
        self._runner: web.ServerRunner | None = None
        self._transports: set[asyncio.BaseTransport] = set()
        self._definitions = Definitions(self.api, self._soon, definition_s)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self.port}"

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; again on the same port after `stop` or `kill`."""
        self._runner = web.ServerRunner(
            # As a real server does, a request is given up when its client goes away.
            web.Server(self._handle, access_log=None, handler_cancellation=True),
            shutdown_timeout=0.1,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        sockets = site._server.sockets  # type: ignore[attr-defined]
        self.port = sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End all watches, refuse new connections, close."""
        self.end_watches()
        await self._down()

    async def kill(self) -> None:
        """Break all connections, as SIGKILL does, and refuse new ones."""
        for transport in tuple(self._transports):
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        self.end_watches("cut")
        await self._down()

    async def _down(self) -> None:
        self._frozen.set()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def freeze(self) -> None:
        """Answer nothing more, with all connections open, as under SIGSTOP."""
        self._frozen.clear()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._frozen.set()

    def end_watches(self, how: str = "end", *, resource: str = "") -> int:
        """End open watches: `end` cleanly, `cut`, or `expired` with an ERROR event 410; returns how many."""
        found = [one for one in self._watches if not resource or one._kind.plural == resource]
        for watch in found:
            watch.interrupt(how)
        return len(found)

    def freeze_watches(self, *, frozen: bool = True) -> int:
        """Let open watches send nothing more, and stay open; returns how many."""
        for watch in self._watches:
            watch.frozen = frozen
            watch._news.set()
        return len(self._watches)

    def compact(self) -> None:
        """Forget the history: watches that come back, and pages that go on, find their version expired."""
        self.api.store.compact()

    @property
    def initializing(self) -> bool:
        """Whether a definition is not served yet."""
        return bool(self._definitions.initializing)

    def establish(self) -> None:
        """Serve all definitions now, whatever ``definition_s`` says."""
        self._definitions.establish()

    @property
    def watches(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def _soon(self, function: Callable[[], None]) -> None:
        try:
            asyncio.get_running_loop().call_soon(function)
        except RuntimeError:  # objects made before the loop runs
            function()

    # -- requests ----------------------------------------------------------------------------------------------

    async def _handle(self, raw: web.BaseRequest) -> web.StreamResponse:
        await self._frozen.wait()
        self.requests += 1
        if raw.transport is not None:
            self._transports.add(raw.transport)
        try:
            return await self._answer(raw)
        except Refused as refused:
            return _refusal(refused)
        except Cut:
            if raw.transport is not None:
                raw.transport.abort()
            return web.Response(status=500)  # of which no byte is sent
        except Later as later:
            await asyncio.sleep(self.future_s)
            words = f"Timeout: Too large resource version: {later.version}, current: {self.api.store.version}"
            cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            body = answers.status(504, words, details={"causes": [cause], "retryAfterSeconds": 1})
            return _refusal(Refused(504, body, {"Retry-After": "1"}))
        finally:
            if raw.transport is not None and raw.transport.is_closing():
                self._transports.discard(raw.transport)

    async def _answer(self, raw: web.BaseRequest) -> web.StreamResponse:
        user = self.rights.user(raw.headers.get("Authorization"))
        plain = discovery.plain(raw.path, self.api, self.port)
        if plain is not None:
            return _plain(plain)
        through = proxying.target(raw.method, raw.path)
        if through is not None:
            kind = self.api.kind("", "v1", through.plural)
            self.rights.demand(user, through.verb, kind, through.where, sub="proxy", name=through.name)
            return await proxying.passed_on(raw, through, self.api.store)
        request = await parsed(raw, self.api, user)
        if request.kind.key in self._definitions.initializing:
            raise answers.busy(text=False)
        fault = self.faults.meet(request.verb, request.resource, request.name, user.name)
        if fault is not None:
            await self._before(fault, request)
        if request.plural == "selfsubjectaccessreviews":
            return self._review(request)
        self.rights.demand(user, request.verb, request.kind, request.where, sub=request.sub, name=request.name)
        if request.verb == "watch":
            return await self._watch(raw, request, fault)
        if request.resource == "pods/log" and request.query.get("follow") == "true":
            return await self._follow(raw, request)
        if fault is not None and fault.what is What.STALE and not _any_version(request.query):
            fault = None
        response = await self._done(request, fault)
        if fault is not None and fault.what is What.SLOW and fault.late:
            await asyncio.sleep(fault.delay_s)
        if fault is not None and fault.what is What.LOST:
            raise Cut
        return response

    async def _before(self, fault: Fault, request: Request) -> None:
        if fault.what is What.SLOW and not fault.late:
            await asyncio.sleep(fault.delay_s)
        elif fault.what is What.REFUSED:
            raise Cut
        elif fault.what is What.THROTTLED:
            raise answers.busy(text=True, after_s=fault.retry_after_s)
        elif fault.what is What.CONFLICT:
            raise answers.modified(request.kind, request.name)
        elif fault.what is What.EXPIRED and request.verb == "list":
            raise answers.expired("The resourceVersion for the provided list is too old.")
        elif fault.what is What.ERROR:
            headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
            raise Refused(fault.code, answers.status(fault.code, f"scripted {fault.code}"), headers)

    async def _done(self, request: Request, fault: Fault | None) -> web.StreamResponse:
        if request.sub:
            return self._sub(request)
        verbs: dict[str, Callable[[Request], web.Response]] = {
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_all,
        }
        if request.verb == "get":
            return self._get(request, fault)
        if request.verb == "list":
            behind = fault.behind if fault is not None and fault.what is What.STALE else 0
            return _json(
                200, self.lists.encoded(request.kind, request.where, request.query, request.form, behind=behind)
            )
        return verbs[request.verb](request)

    def _get(self, request: Request, fault: Fault | None) -> web.Response:
        kind = request.kind
        if fault is not None and fault.what is What.STALE:
            history = self.api.store.shelf(kind.key).history
            if history:
                version = history[max(0, len(history) - fault.behind)].version - 1
                found = self.api.store.at(kind.key, version).get((request.where, request.name))
                if found is None:
                    raise answers.not_found(kind, request.name)
                return _json(200, found.raw)
        stored = self.api.stored(kind, request.where, request.name)
        if request.form == "table":
            metadata = {"resourceVersion": str(stored.version)}
            return _json(200, encoded(tables.table(kind, [stored.obj], metadata, self.api.clock())))
        return _json(200, encoded(tables.partial(stored.obj)) if request.form == "partial" else stored.raw)

    def _create(self, request: Request) -> web.Response:
        strict = request.query.get("fieldValidation", "Warn")
        obj, warnings = self.api.create(request.kind, request.where, request.body, dry=request.dry, strict=strict)
        return _json(201, encoded(obj), warnings)

    def _update(self, request: Request) -> web.Response:
        obj, warnings = self.api.write(
            request.kind, request.where, request.name, request.body, dry=request.dry, sub=request.sub
        )
        return _json(200, encoded(obj), warnings)

    def _patched(self, request: Request, target: Object) -> Object:
        how = PATCHES[request.media]
        body: Any = request.body
        if how == "json":
            return patching.json_patch(target, body)
        if how == "strategic":
            result = patching.strategic(target, body)
        else:
            result = patching.merge(target, body)
        assert isinstance(result, dict)
        return result

    def _patch(self, request: Request) -> web.Response:
        kind, where, name = request.kind, request.where, request.name
        if PATCHES[request.media] == "apply":
            return self._apply(request)
        current = self.api.stored(kind, where, name).obj
        patched = self._patched(request, current)
        if not (isinstance(request.body, dict) and (request.body.get("metadata") or {}).get("resourceVersion")):
            patched = {**patched, "metadata": {k: v for k, v in patched["metadata"].items() if k != "resourceVersion"}}
        obj, warnings = self.api.write(kind, where, name, patched, sub=request.sub, dry=request.dry)
        return _json(200, encoded(obj), warnings)

    def _apply(self, request: Request) -> web.Response:
        kind, where, name = request.kind, request.where, request.name
        manager = request.query.get("fieldManager")
        if not manager:
            raise answers.bad_request("fieldManager is required for apply patch")
        force = request.query.get("force") == "true"
        found = self.api.store.get(kind.key, (where, name))
        if found is None:
            applied = patching.Applied()
            body = applied.apply({}, request.body, manager, force=force)
            body.setdefault("metadata", {})["name"] = name
            obj, warnings = self.api.create(kind, where, body)
            self.api.applied[obj["metadata"]["uid"]] = applied
            return _json(201, encoded(obj), warnings)
        applied = self.api.applied.setdefault(found.obj["metadata"]["uid"], patching.Applied())
        patched = applied.apply(found.obj, request.body, manager, force=force)
        patched["metadata"] = {k: v for k, v in patched["metadata"].items() if k != "resourceVersion"}
        obj, warnings = self.api.write(kind, where, name, patched, sub=request.sub)
        return _json(200, encoded(obj), warnings)

    def _options(self, request: Request) -> Object:
        if isinstance(request.body, dict) and request.body:
            return request.body
        query = request.query
        options: Object = {}
        if "gracePeriodSeconds" in query:
            options["gracePeriodSeconds"] = int(query["gracePeriodSeconds"])
        if "propagationPolicy" in query:
            options["propagationPolicy"] = query["propagationPolicy"]
        return options

    def _delete(self, request: Request) -> web.Response:
        answer = self.deletion.delete(
            request.kind, request.where, request.name, self._options(request), dry=request.dry
        )
        return _json(200, encoded(answer))

    def _delete_all(self, request: Request) -> web.Response:
        kind = request.kind
        listed = self.lists.encoded(kind, request.where, request.query, "")
        test = wanted(kind, request.where, request.query)
        for key in [key for key, one in sorted(self.api.store.shelf(kind.key).objects.items()) if test(one.obj)]:
            with contextlib.suppress(Refused):
                self.deletion.delete(kind, *key, self._options(request))
        return _json(200, listed)

    def _sub(self, request: Request) -> web.Response:
        kind, where, name, sub = request.kind, request.where, request.name, request.sub
        if kind.key == ("", "pods") and sub == "binding":
            self.api.bind(where, name, str(request.body["target"]["name"]))
            return _json(201, encoded(answers.success(code=201)))
        if kind.key == ("", "pods") and sub == "eviction":
            return _json(201, encoded(self.deletion.evict(where, name, request.body.get("deleteOptions") or {})))
        if kind.key == ("", "pods") and sub == "log":
            return self._log(request)
        if kind.key == ("", "serviceaccounts") and sub == "token":
            return self._token(request)
        if sub == "scale" and kind.scale is not None:
            return self._scale(request)
        if sub == "status" and (kind.status or kind.plural == "pods"):
            if request.verb == "get":
                return _json(200, self.api.stored(kind, where, name).raw)
            return self._patch(request) if request.verb == "patch" else self._update(request)
        raise answers.no_such_path()

    async def _follow(self, raw: web.BaseRequest, request: Request) -> web.StreamResponse:
        """A pod's output as it grows, until its container has ended."""
        first = self._log(request)
        if first.status != 200:
            return first
        stream = web.StreamResponse()
        stream.content_type = "text/plain"
        await stream.prepare(raw)
        key, sent = (request.where, request.name), 0
        if request.query.get("tailLines") == "0":
            sent = len(self.logs(*key) or b"")
        with contextlib.suppress(ConnectionError):
            over = False
            while not over:
                await self._frozen.wait()
                stored = self.api.store.get(("", "pods"), key)
                over = stored is None or stored.obj["status"].get("phase") in {"Succeeded", "Failed"}
                text = self.logs(*key) or b""
                if text[sent:]:
                    await stream.write(text[sent:])
                    sent = len(text)
                if not over:
                    await asyncio.sleep(FOLLOW_S)
            await stream.write_eof()
        return stream

    def _log(self, request: Request) -> web.Response:
        pod = self.api.stored(request.kind, request.where, request.name).obj
        if not pod["spec"].get("nodeName"):
            return web.Response(status=204)
        text = self.logs(request.where, request.name)
        if text is None:
            words = f'container "{pod["spec"]["containers"][0]["name"]}" in pod "{request.name}" is waiting to start'
            raise answers.bad_request(words)
        return web.Response(status=200, body=text, content_type="text/plain")

    def _token(self, request: Request) -> web.Response:
        """A token for a service account: its rights are those of its bindings."""
        self.api.stored(request.kind, request.where, request.name)
        token = secrets.token_urlsafe(16)
        self.rights.tokens[token] = account(request.where, request.name)
        return _json(201, encoded({**request.body, "status": {"token": token}}))

    def _scale(self, request: Request) -> web.Response:
        kind, where, name = request.kind, request.where, request.name
        paths = kind.scale
        assert paths is not None
        obj = self.api.stored(kind, where, name).obj
        if request.verb != "get":
            shown = _scale_of(obj, paths)
            body = request.body if request.verb == "update" else self._patched(request, shown)
            new: Any = json.loads(encoded(obj))
            at: Any = new
            *steps, last = paths["specReplicasPath"].strip(".").split(".")
            for step in steps:
                at = at.setdefault(step, {})
            at[last] = int((body.get("spec") or {}).get("replicas") or 0)
            version = (body.get("metadata") or {}).get("resourceVersion")
            new["metadata"]["resourceVersion"] = version if request.verb == "update" else None
            obj, _ = self.api.write(kind, where, name, new)
        return _json(200, encoded(_scale_of(obj, paths)))

    def _review(self, request: Request) -> web.Response:
        asked = (request.body.get("spec") or {}).get("resourceAttributes") or {}
        found = Kind(asked.get("group", ""), "v1", asked.get("resource", ""), "")
        may = self.rights.may(
            request.user,
            asked.get("verb", ""),
            found,
            asked.get("namespace", ""),
            sub=asked.get("subresource", ""),
            name=asked.get("name", ""),
        )
        body = {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "metadata": {},
            "spec": request.body.get("spec") or {},
            "status": {"allowed": may},
        }
        return _json(201, encoded(body))

    # -- watch -------------------------------------------------------------------------------------------------

    async def _watch(self, raw: web.BaseRequest, request: Request, fault: Fault | None) -> web.StreamResponse:
        query = request.query
        initial = query.get("sendInitialEvents") == "true"
        if initial and query.get("resourceVersionMatch") != "NotOlderThan":
            words = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            raise options_refused("resourceVersionMatch", words)
        test = wanted(request.kind, request.where, query)
        asked = number(query)
        began = asked or self.api.store.version
        watch = Watch(request.kind, self.api.store, test, began, request.form)
        stream = web.StreamResponse(headers={"Cache-Control": "no-cache, private"})
        stream.content_type = "application/json"
        stream.enable_chunked_encoding()
        first = watch.initial() if not asked or initial else []
        self._watches.add(watch)
        try:
            await stream.prepare(raw)
            how = await self._stream(stream, watch, request, fault, first, initial=initial)
        except (ConnectionError, OSError):
            how = "cut"
        finally:
            self._watches.discard(watch)
            watch.close()
        if how == "cut":
            raise Cut
        with contextlib.suppress(ConnectionError):
            await stream.write_eof()
        return stream

    async def _stream(
        self,
        stream: web.StreamResponse,
        watch: Watch,
        request: Request,
        fault: Fault | None,
        first: list[bytes],
        *,
        initial: bool,
    ) -> str:
        """Send events until the watch's time is over; returns how it ended: `end` or `cut`."""
        loop = asyncio.get_running_loop()
        query = request.query
        until = loop.time() + float(query.get("timeoutSeconds") or self._draw.uniform(1800, 3600))
        bookmarks = query.get("allowWatchBookmarks") == "true"
        next_bookmark = loop.time() + self.bookmark_s
        sent = 0
        if (fault is not None and fault.what is What.EXPIRED) or watch.expired():
            await stream.write(watch.error())
            return "end"
        lines = list(first) or watch.pending()  # what happened before this watch began, too
        if initial:
            lines.append(watch.bookmark(initial=True))
        while True:
            if fault is not None and fault.what in _STREAM_ENDS and sent + len(lines) > fault.events:
                lines = lines[: max(0, fault.events - sent)]
            if lines and not watch.frozen:
                await self._frozen.wait()
                await stream.write(b"".join(lines))
                sent += len(lines)
            if fault is not None and fault.what in _STREAM_ENDS and sent >= fault.events:
                how = _STREAM_ENDS[fault.what]
                if how:
                    return how
                watch.frozen = True
            now = loop.time()
            if watch.closing == "expired":
                await stream.write(watch.error())
            if watch.closing:
                return "cut" if watch.closing == "cut" else "end"
            if now >= until:
                if bookmarks and not watch.frozen:  # what happened during the last write comes before it
                    await stream.write(b"".join([*watch.pending(), watch.bookmark()]))
                return "end"
            await watch.news(min(until, next_bookmark) - now if bookmarks else until - now)
            lines = [] if watch.frozen else watch.pending()
            if bookmarks and loop.time() >= next_bookmark:
                next_bookmark = loop.time() + self.bookmark_s
                if not watch.frozen:
                    lines.append(watch.bookmark())


_STREAM_ENDS = {What.CUT: "cut", What.ENDED: "end", What.FROZEN: ""}


def _any_version(query: dict[str, str]) -> bool:
    """Whether a read may be answered from a cache."""
    return bool(query.get("resourceVersion")) and query.get("resourceVersionMatch", "") != "Exact"


def _scale_of(obj: Object, paths: dict[str, str]) -> Object:
    metadata = {k: obj["metadata"][k] for k in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")}
    status: Object = {"replicas": schemas.at(obj, paths["statusReplicasPath"]) or 0}
    if paths.get("labelSelectorPath"):
        status["selector"] = schemas.at(obj, paths["labelSelectorPath"]) or ""
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": schemas.at(obj, paths["specReplicasPath"]) or 0},
        "status": status,
    }


def _json(code: int, body: bytes, warnings: list[str] | None = None) -> web.Response:
    response = web.Response(status=code, body=body, content_type="application/json")
    for words in warnings or []:
        quoted = words.replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def _plain(answer: tuple[str, bytes]) -> web.Response:
    charset = "utf-8" if answer[0] == "text/plain" else None
    return web.Response(status=200, body=answer[1], content_type=answer[0], charset=charset)


def _refusal(refused: Refused) -> web.Response:
    if isinstance(refused.body, str):
        response = web.Response(status=refused.code, text=refused.body)
    else:
        response = _json(refused.code, encoded(refused.body), refused.warnings)
    response.headers.update(refused.headers)
    return response
