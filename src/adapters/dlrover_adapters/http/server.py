"""The master's end of the HTTP transport.

``GET /v1/agent`` is the agents' WebSocket, ``GET /v1/status`` the master's state as JSON, ``POST /v1/command`` what people
ask of the job (`command`), ``GET /v1/records`` its log (`handing`), ``GET /v1/healthz`` needs no token.

The listening socket is bound by whoever outlives masters, and shared with the standby: until `HttpListener.serve` runs,
connections wait in its backlog, and to agents a change of masters is one reconnection. A stranger's bytes cost one line in
the log, or one more in a count of such lines, and one answer; a connection that is no agent's after ``handshake_s`` is cut,
and where ``strangers_max`` of them wait the oldest makes room, so that who hurries gets in however many dawdle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import structlog
from aiohttp import web

from dlrover_adapters.http import command, handing
from dlrover_adapters.http import tls as encryption
from dlrover_adapters.http import token as tokens
from dlrover_adapters.http.client import AGENT_PATH, COMMAND_PATH, RECORDS_PATH, STATUS_PATH
from dlrover_adapters.http.connection import MESSAGE_BYTES_LIMIT, HttpConnection, HttpLimits
from dlrover_core.runtime.complaints import Complaints
from dlrover_core.runtime.transport import Accept, HandOut, Obey, Status

HEALTH_PATH = "/v1/healthz"
BACKLOG = 4096
# How many connections asyncio takes in one go: in between it is the agents' turn.
ACCEPTS_AT_ONCE = 16
# File descriptors that are not connections: the log, the node host, files.
OTHER_FDS = 128
_LIMITS = HttpLimits()
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104  # recognised, not bound

log = structlog.get_logger("dlrover.http")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def bind(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket for `HttpListener`, not inherited unless passed on (``pass_fds``). Port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def adopt(fd: int) -> socket.socket:
    """The listening socket that was passed on to this process as descriptor ``fd``, which it owns from now on."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return sock


class HttpListener:
    """Takes agents' connections on a listening socket, which it owns: closing closes this process's copy only.

    ``advertise`` is what agents are told where the socket is bound to a wildcard or sits behind a forwarder: ``host`` or
    ``host:port``. Who asks for another ``job`` than this one is turned away.
    """

    def __init__(
        self,
        sock: socket.socket,
        token: str,
        *,
        job: str = "",
        limits: HttpLimits = _LIMITS,
        advertise: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not token:
            raise ValueError("a listener without a token would take anybody: make_token() makes one")
        self._sock, self._token, self._job, self._limits, self._tls = sock, token, job, limits, tls
        self._address = _address(sock, advertise)
        self._gate: _Gate | None = None
        self._server: asyncio.AbstractServer | None = None
        self._closed: asyncio.Future[None] | None = None
        self._connections: set[HttpConnection] = set()
        self._accept: Accept | None = None
        self._status: Status | None = None
        self._complaints = Complaints(log)
        self._obey: Obey | None = None
        self._handing: handing.Handing | None = None
        self._routes: dict[str, Handler] = {
            AGENT_PATH: self._agent,
            STATUS_PATH: self._tell,
            COMMAND_PATH: self._do,
            RECORDS_PATH: self._hand_out,
            HEALTH_PATH: self._health,
        }

    @property
    def address(self) -> str:
        """Where agents reach it, ``host:port``."""
        return self._address

    async def serve(
        self, accept: Accept, status: Status, obey: Obey | None = None, hand_out: HandOut | None = None
    ) -> None:
        """Begin to take connections, those first that waited; each runs ``accept`` in a task of its own."""
        assert self._server is None and self._closed is None, "a listener serves once"
        self._accept, self._status, self._obey = accept, status, obey
        self._handing = handing.Handing(hand_out, self._limits)
        limits = self._limits._replace(connections_max=_room(self._limits.connections_max))
        self._gate = _Gate(self._route, limits, self._complaints)
        loop = asyncio.get_running_loop()
        enter = self._gate if self._tls is None else partial(_Door, self._gate, self._tls)
        self._server = await loop.create_server(enter, sock=self._sock, backlog=ACCEPTS_AT_ONCE)
        # asyncio has told the kernel the same number, which is far too few to wait.
        self._sock.listen(BACKLOG)
        log.debug("listening", address=self._address)

    async def close(self) -> None:
        """Take no more, say goodbye to everybody at once, and stop. Idempotent; whoever calls second waits for the first."""
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        if self._server is None:
            self._sock.close()
            return
        self._server.close()
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        assert self._gate is not None
        # What is left are handlers that do not heed their connection's end, and requests under way.
        self._gate.pre_shutdown()
        await self._gate.shutdown(self._limits.close_s)
        self._complaints.close()

    # ---- requests

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = self._routes.get(request.path)
        if handler is None:
            return _answer(404, f"nothing is at {request.path}; see {STATUS_PATH}\n")
        method = "POST" if request.path == COMMAND_PATH else "GET"
        if request.method != method:
            return _answer(405, f"only {method} is served here\n")
        if request.path != HEALTH_PATH and not self._known(request):
            return _answer(401, f"the job token is missing or wrong: set {tokens.VARIABLE} or --token-file\n")
        asked = request.query.get("job", self._job)
        if self._job and asked != self._job:
            self._complaints.warning("another job's", peer=_peer(request), asked=asked[:200])
            return _answer(421, f"this master leads job {self._job}\n")
        return await handler(request)

    def _known(self, request: web.BaseRequest) -> bool:
        # Two of them are none: whoever stands between us might have looked at the other one.
        plain = request.headers.getall(tokens.PLAIN_HEADER, [])
        headers = request.headers.getall(tokens.HEADER, [])
        shown = tokens.shown_plainly(plain) if plain else tokens.shown(headers[0] if len(headers) == 1 else None)
        if tokens.same(shown, self._token):
            return True
        self._complaints.warning(
            "token refused", peer=_peer(request), path=request.path, token="wrong" if shown else "missing"
        )
        return False

    async def _agent(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._accept is not None and self._gate is not None
        ws = web.WebSocketResponse(
            heartbeat=self._limits.ping_s,
            compress=False,
            max_msg_size=MESSAGE_BYTES_LIMIT,
            timeout=self._limits.close_s,
        )
        await ws.prepare(request)
        self._gate.admitted(request.protocol)
        connection = HttpConnection(ws, _peer(request), self._limits, self._complaints, request.transport)
        self._connections.add(connection)
        try:
            await self._accept(connection)
        finally:
            await connection.close()
            self._connections.discard(connection)
        return ws

    async def _tell(self, _request: web.BaseRequest) -> web.StreamResponse:
        assert self._status is not None
        return _answer(200, json.dumps(dict(self._status())), "application/json")

    async def _do(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._gate is not None
        try:
            asked = await command.body_of(request)
        except web.RequestPayloadError as broken:  # compressed, it says, and is not
            return _answer(*command.unreadable(broken), "application/json")
        # All of it is here: from now on it is the log that may take its time.
        self._gate.admitted(request.protocol)
        status, text = await command.answer_to(asked, self._obey, _peer(request))
        return _answer(status, text, "application/json")

    async def _hand_out(self, request: web.BaseRequest) -> web.StreamResponse:
        assert self._gate is not None and self._handing is not None
        # Whoever has the token may take its time: how many do is bounded there.
        self._gate.admitted(request.protocol)
        return await self._handing.answer(request)

    async def _health(self, _request: web.BaseRequest) -> web.StreamResponse:
        return _answer(200, "ok\n")


class _Gate(web.Server):
    """All sockets that came in: counted, and cut if nothing becomes of them."""

    def __init__(self, handler: Handler, limits: HttpLimits, complaints: Complaints) -> None:
        super().__init__(cast(Any, handler))
        self._limits, self.complaints = limits, complaints
        # By age: the first is the oldest.
        self._waiting: dict[asyncio.BaseProtocol, tuple[asyncio.TimerHandle, asyncio.Transport]] = {}
        self._open = 0
        self._full = False

    def __call__(self) -> web.RequestHandler:
        # But for pages of records REST answers close their connection, and a WebSocket is no keep-alive.
        idle_s = self._limits.idle_s
        return _Protocol(self, loop=self._loop, access_log=None, keepalive_timeout=idle_s, lingering_time=0)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.came(handler, transport)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        if isinstance(exc, ssl.SSLError) and handler in self._waiting:
            # Whoever does not trust us may say so when our end is through with the handshake.
            transport = self._waiting[handler][1]
            self.refused(transport, exc)
        self.gone(handler)
        super().connection_lost(handler, exc)

    def came(self, who: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        """A connection that is nobody's yet."""
        self._open += 1
        if self._open > self._limits.connections_max:
            if not self._full:
                log.error("too many connections, new ones are cut off", limit=self._limits.connections_max)
            self._full = True
            transport.abort()
            return
        self._full = False
        if len(self._waiting) >= self._limits.strangers_max:
            self._cut(next(iter(self._waiting)), "too many others wait")
        timer = self._loop.call_later(self._limits.handshake_s, self._cut, who, "it took too long")
        self._waiting[who] = (timer, transport)

    def gone(self, who: asyncio.BaseProtocol) -> None:
        """It is over, or goes on under another name."""
        self._open -= 1
        self.admitted(who)

    def admitted(self, who: asyncio.BaseProtocol) -> None:
        """The connection is an agent's, or over."""
        timer, _ = self._waiting.pop(who, (None, None))
        if timer is not None:
            timer.cancel()

    def refused(self, transport: asyncio.BaseTransport, error: BaseException) -> None:
        """No encryption came about."""
        peer = _host_port(transport.get_extra_info("peername"))
        self.complaints.warning("no TLS", peer=peer, reason=encryption.refused(error))

    def waits(self, who: asyncio.BaseProtocol) -> bool:
        """Is it still to be heard, that is, neither cut nor admitted?"""
        return who in self._waiting

    def _cut(self, who: asyncio.BaseProtocol, reason: str) -> None:
        timer, transport = self._waiting.pop(who)
        timer.cancel()
        peer = _host_port(transport.get_extra_info("peername"))
        limit_s = self._limits.handshake_s
        self.complaints.warning("connection cut: no handshake", peer=peer, reason=reason, limit_s=limit_s)
        transport.abort()


class _Door(asyncio.Protocol):
    """A connection until it is encrypted: counted and cut like any other, which asyncio's own TLS servers do not do."""

    def __init__(self, gate: _Gate, context: ssl.SSLContext) -> None:
        self._gate, self._context = gate, context
        self._early: list[bytes] = []
        self._error: BaseException | None = None
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast(asyncio.Transport, transport)
        self._gate.came(self, raw)
        self._opening = asyncio.ensure_future(self._open(raw))

    async def _open(self, raw: asyncio.Transport) -> None:
        """Encrypt, and go on as what came through an open door."""
        secure = None
        try:
            secure = await asyncio.get_running_loop().start_tls(raw, self, self._context, server_side=True)
        except (OSError, RuntimeError) as error:
            self._error = self._error or error
        heard = self._gate.waits(self)
        self._gate.gone(self)
        if secure is not None and not raw.is_closing():
            handler = self._gate()
            secure.set_protocol(handler)
            handler.connection_made(secure)
            for data in self._early:
                handler.data_received(data)
        elif heard and self._error is not None:
            self._gate.refused(raw, self._error)

    def data_received(self, data: bytes) -> None:
        # Of a peer that is quicker than our loop.
        self._early.append(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._error = exc or self._error


class _Protocol(web.RequestHandler):
    """aiohttp's, with our own words for what is not HTTP and for what our handlers raise."""

    __slots__ = ("_gate",)

    def __init__(self, gate: _Gate, **settings: Any) -> None:
        super().__init__(gate, **settings)
        self._gate = gate

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """One line in the log, one answer, and the end of the connection."""
        if isinstance(exc, ConnectionError):
            raise exc  # gone before the answer: nobody to tell
        complaints = self._gate.complaints
        reason = message or (f"{type(exc).__name__}: {exc}" if exc is not None else "")
        if status >= 500:
            complaints.error("request failed", peer=_peer(request), status=status, exc_info=exc)
        else:
            complaints.warning("not a request", peer=_peer(request), status=status, reason=reason.splitlines()[0][:200])
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        return _answer(
            status, "the master failed to answer; its log says why\n" if status >= 500 else "not a request\n"
        )


def _room(connections: int) -> int:
    """How many connections this process can hold: its soft limit of descriptors is raised for them as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FDS
    if soft != resource.RLIM_INFINITY and soft < needed:
        wished = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wished, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(1, min(connections, soft - OTHER_FDS))
    return connections


def _answer(status: int, text: str, content_type: str = "text/plain") -> web.Response:
    response = web.Response(status=status, text=text, content_type=content_type)
    response.force_close()
    return response


def _peer(request: web.BaseRequest) -> str:
    transport = request.transport
    return _host_port(transport.get_extra_info("peername") if transport is not None else None)


def _host_port(name: object) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return "unknown"
    return f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"


def _address(sock: socket.socket, advertise: str) -> str:
    host, port = sock.getsockname()[:2]
    if advertise:
        _, colon, tail = advertise.rpartition(":")
        return advertise if colon and tail.isdigit() and not advertise.endswith("]") else f"{advertise}:{port}"
    return _host_port((socket.gethostname() if host in _WILDCARDS else host, port))
