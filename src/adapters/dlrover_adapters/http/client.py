"""The agent's end of the HTTP transport, and the question `dlrover status` asks a master."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from dlrover_adapters.http import token as tokens
from dlrover_adapters.http.connection import MESSAGE_BYTES_LIMIT, HttpConnection, HttpLimits
from dlrover_core.errors import ConnectionLost, TokenRefused
from dlrover_core.runtime.within import within

AGENT_PATH = "/v1/agent"
STATUS_PATH = "/v1/status"
STATUS_BYTES_MAX = 64 * 1024 * 1024
_UNAUTHORIZED = 401
_OK = 200
_LIMITS = HttpLimits()


class HttpDialer:
    """Connects agents to masters. Keeps nothing between connections but the token."""

    def __init__(self, token: str, *, limits: HttpLimits = _LIMITS, tls: ssl.SSLContext | None = None) -> None:
        self._token, self._limits, self._tls = token, limits, tls
        self._session: aiohttp.ClientSession | None = None

    async def connect(self, address: str) -> HttpConnection:
        """A connection to the master at ``host:port``. Raises `ConnectionLost` (try again) and `TokenRefused` (do not)."""
        if self._session is None:
            self._session = _session(self._token)
        dial = self._session.ws_connect(
            _url(address, AGENT_PATH, self._tls),
            heartbeat=self._limits.ping_s,
            compress=0,
            max_msg_size=MESSAGE_BYTES_LIMIT,
            ssl=self._tls if self._tls is not None else True,
        )
        try:
            ws = await within(self._limits.handshake_s, dial)
        except aiohttp.WSServerHandshakeError as error:
            raise _refusal(address, error.status, bool(self._token)) from error
        except asyncio.TimeoutError as error:
            raise ConnectionLost(f"nobody answered at {address} within {self._limits.handshake_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConnectionLost(f"{address} cannot be reached: {error}") from error
        return HttpConnection(ws, address, self._limits)

    async def close(self) -> None:
        """Release everything. Open connections end."""
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
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ConnectionLost(f"the master at {address} cannot be asked: {error}") from error


async def _fetch(address: str, token: str, tls: ssl.SSLContext | None) -> Mapping[str, Any]:
    url = _url(address, STATUS_PATH, tls)
    async with _session(token) as session, session.get(url, ssl=tls if tls is not None else True) as response:
        if response.status != _OK:
            raise _refusal(address, response.status, bool(token))
        return cast(Mapping[str, Any], await response.json())


def _session(token: str) -> aiohttp.ClientSession:
    # No total timeout: each call has its own. No limit and no reuse: a connection is an agent's for life.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=tokens.authorization(token))


def _url(address: str, path: str, tls: ssl.SSLContext | None) -> str:
    return f"{'https' if tls is not None else 'http'}://{address}{path}"


def _refusal(address: str, status: int, shown: bool) -> ConnectionLost | TokenRefused:
    if status != _UNAUTHORIZED:
        return ConnectionLost(f"{address} answered with HTTP status {status}; is a dlrover master listening there?")
    what = "is not this job's" if shown else "is missing"
    return TokenRefused(
        f"the master at {address} refused us: the job token {what}. "
        f"Set {tokens.VARIABLE}, or --token-file, to the token the job was started with."
    )
