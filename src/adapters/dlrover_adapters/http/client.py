"""The agent's end of the HTTP transport, and what people ask of a master: its status, and to do something."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import structlog

from dlrover_adapters.http import tls as encryption
from dlrover_adapters.http import token as tokens
from dlrover_adapters.http.connection import MESSAGE_BYTES_LIMIT, HttpConnection, HttpLimits
from dlrover_core.errors import ConnectionLost, MalformedMessage, Refused, TokenRefused
from dlrover_core.runtime.complaints import Complaints
from dlrover_core.runtime.within import within

AGENT_PATH = "/v1/agent"
STATUS_PATH = "/v1/status"
COMMAND_PATH = "/v1/command"
RECORDS_PATH = "/v1/records"
STATUS_BYTES_MAX = 64 * 1024 * 1024
ANSWER_BYTES_MAX = 64 * 1024
_OK, _BAD_REQUEST, _UNAUTHORIZED, _CONFLICT, _TOO_LARGE, _UNAVAILABLE = 200, 400, 401, 409, 413, 503
_MISDIRECTED = 421
_LIMITS = HttpLimits()

log = structlog.get_logger("dlrover.http")


class WrongJob(TokenRefused):
    """The master there leads another job. Where this one's is said by the same options on every host."""


class NotAMaster(ConnectionLost):
    """Whoever listens there does not speak as a master does."""


class HttpDialer:
    """Connects agents to masters. Keeps nothing between connections but the token. A master of another ``job`` refuses us."""

    def __init__(
        self, token: str, *, job: str = "", limits: HttpLimits = _LIMITS, tls: ssl.SSLContext | None = None
    ) -> None:
        self._token, self._job, self._limits, self._tls = token, job, limits, tls
        self._session: aiohttp.ClientSession | None = None
        self._complaints = Complaints(log)

    async def connect(self, address: str) -> HttpConnection:
        """A connection to the master at ``host:port``. Raises `ConnectionLost` (try again) and `TokenRefused` (do not)."""
        if self._session is None:
            self._session = _session(self._token)
        dial = self._session.ws_connect(
            _url(address, AGENT_PATH, self._tls, self._job),
            heartbeat=self._limits.ping_s,
            compress=0,
            max_msg_size=MESSAGE_BYTES_LIMIT,
            ssl=self._tls if self._tls is not None else True,
        )
        try:
            ws = await within(self._limits.handshake_s, dial)
        except aiohttp.WSServerHandshakeError as error:
            raise _refusal(address, error.status, bool(self._token), self._job) from error
        except asyncio.TimeoutError as error:
            raise ConnectionLost(f"nobody answered at {address} within {self._limits.handshake_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            untrusted = await _untrusted(address, error, self._tls)
            if untrusted is not None:
                self._complaints.warning("master not trusted", master=address, reason=str(untrusted))
                raise untrusted from error
            raise ConnectionLost(f"{address} cannot be reached: {_why(error)}") from error
        return HttpConnection(ws, address, self._limits, self._complaints)

    async def close(self) -> None:
        """Release everything. Open connections end."""
        self._complaints.close()
        if self._session is not None:
            await self._session.close()


async def fetch_status(
    address: str, token: str, *, timeout_s: float = 10.0, tls: ssl.SSLContext | None = None
) -> Mapping[str, Any]:
    """What the master at ``host:port`` says of its job. Raises `ConnectionLost` and `TokenRefused`."""
    try:
        return await within(timeout_s, _fetch(address, token, tls))
    except asyncio.TimeoutError as error:
        raise ConnectionLost(f"the master at {address} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientResponseError as error:
        raise NotAMaster(f"what listens at {address} is no dlrover master: {error.message}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        found = await _untrusted(address, error, tls)
        raise found or ConnectionLost(f"the master at {address} cannot be asked: {_why(error)}") from error


async def _fetch(address: str, token: str, tls: ssl.SSLContext | None) -> Mapping[str, Any]:
    url = _url(address, STATUS_PATH, tls)
    async with _session(token) as session, session.get(url, ssl=tls if tls is not None else True) as response:
        if response.status != _OK:
            raise _refusal(address, response.status, bool(token))
        return await _answer(address, response, STATUS_BYTES_MAX)


async def _answer(address: str, response: aiohttp.ClientResponse, bytes_max: int) -> Mapping[str, Any]:
    """All of an answer, in however many pieces it comes. Raises `NotAMaster` for what no master answers."""
    if response.content_type != "application/json":
        raise NotAMaster(
            f"what listens at {address} is no dlrover master: it answers with {response.content_type[:80]}"
        )
    found = bytearray()
    async for piece in response.content.iter_any():
        found += piece
        if len(found) > bytes_max:
            raise NotAMaster(
                f"what listens at {address} is no dlrover master: it answers more than {bytes_max:,} bytes"
            )
    try:
        told = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise NotAMaster(f"what listens at {address} is no dlrover master: its answer is no JSON: {error}") from error
    if not isinstance(told, dict):
        raise NotAMaster(f"what listens at {address} is no dlrover master: it answers {type(told).__name__}, not a map")
    return told


class Unanswered(ConnectionLost):
    """The master was told, and then nothing came back: it may or may not have been done."""


async def send_command(
    address: str, token: str, asked: Mapping[str, Any], *, timeout_s: float = 30.0, tls: ssl.SSLContext | None = None
) -> int:
    """Let the master at ``host:port`` do what is asked; returns the number of the record it led to.

    Raises `Refused`, `MalformedMessage`, `TokenRefused`; `ConnectionLost` where nothing can have been done, and `Unanswered`
    where that is not known.
    """
    try:
        return await within(timeout_s, _send(address, token, asked, tls))
    except MalformedMessage:  # a ValueError, and an answer
        raise
    except asyncio.TimeoutError as error:
        raise Unanswered(f"the master at {address} did not answer within {timeout_s:g} s") from error
    except aiohttp.ClientConnectorError as error:
        found = await _untrusted(address, error, tls)
        raise found or ConnectionLost(f"nobody answers at {address}: {_why(error)}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        found = await _untrusted(address, error, tls)
        raise found or Unanswered(f"the master at {address} gave no answer: {error}") from error


async def _send(address: str, token: str, asked: Mapping[str, Any], tls: ssl.SSLContext | None) -> int:
    url, secure = _url(address, COMMAND_PATH, tls), tls if tls is not None else True
    async with _session(token) as session, session.post(url, json=dict(asked), ssl=secure) as response:
        if response.status not in (_OK, _BAD_REQUEST, _CONFLICT, _TOO_LARGE, _UNAVAILABLE):
            raise _refusal(address, response.status, bool(token))
        try:
            told = await _answer(address, response, ANSWER_BYTES_MAX)
        except NotAMaster as error:  # whatever spoils an answer, the command was sent
            raise Unanswered(f"the master at {address} gave no answer: {error}") from error
        if response.status == _OK:
            if type(told.get("seq")) is not int:
                raise Unanswered(f"the master at {address} gave no answer: it does not say which record it made")
            return int(told["seq"])
        reason = str(told.get("reason", ""))
        if response.status == _CONFLICT:
            raise Refused(reason)
        if response.status == _UNAVAILABLE and told.get("done") is False:
            raise ConnectionLost(f"the master at {address} stands by: {reason}")
        if response.status == _UNAVAILABLE:
            raise Unanswered(f"the master at {address} says: {reason}")
        raise MalformedMessage(reason)


async def _untrusted(address: str, error: Exception, tls: ssl.SSLContext | None) -> encryption.Untrusted | None:
    """Was it TLS that failed, or TLS that we did not speak?"""
    if isinstance(error, aiohttp.ClientConnectorError):
        return encryption.untrusted(address, error)
    hung_up = tls is None and isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionResetError))
    return encryption.encrypted(address) if hung_up and await encryption.encrypts(address) else None


async def why_failed(address: str, error: Exception, *, encrypts: bool) -> str:
    """What kept a request from being answered, for people. ``encrypts``: it was sent over TLS."""
    if isinstance(error, aiohttp.ClientConnectorError):
        found = encryption.untrusted(address, error)
    else:
        found = None if encrypts else await _untrusted(address, error, None)
    return str(found or f"the master at {address} cannot be asked: {_why(error)}")


def _why(error: BaseException) -> str:
    """The kernel's reason or the resolver's, where there is one: our callers name the address, aiohttp would say it twice."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return str(error)
    cause = error.os_error
    return os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror or str(error)


def _session(token: str) -> aiohttp.ClientSession:
    # No total timeout: each call has its own. No limit and no reuse: a connection is an agent's for life. Masters compress
    # nothing, and a few compressed bytes could become any number.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    headers = {**tokens.authorization(token), "Accept-Encoding": "identity"}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, auto_decompress=False)


def _url(address: str, path: str, tls: ssl.SSLContext | None, job: str = "") -> str:
    query = f"?job={quote(job, errors='surrogatepass')}" if job else ""
    return f"{'https' if tls is not None else 'http'}://{address}{path}{query}"


def _refusal(address: str, status: int, shown: bool, job: str = "") -> ConnectionLost | TokenRefused:
    if status == _MISDIRECTED:
        return WrongJob(f"the master at {address} leads another job than {job!r}")
    if status != _UNAUTHORIZED:
        return NotAMaster(f"what listens at {address} is no dlrover master: it answers with HTTP status {status}")
    what = "is not this job's" if shown else "is missing"
    return TokenRefused(
        f"the master at {address} refused us: the job token {what}. "
        f"Set {tokens.VARIABLE}, or --token-file, to the token the job was started with."
    )
