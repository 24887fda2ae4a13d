"""Asking masters for pages of records: one of them while it answers, else the next.

Bounds: an answer has at most `PACKED_BYTES_MAX`, begins and ends within `ANSWER_S` and the time it was asked to wait, and is
not followed to another place, for the token would go with it. Raises `LogUnavailable` where no master can be asked now,
`TokenRefused`, `LogCorrupt` and `SchemaTooNew` for good.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp

from dlrover_adapters.http.client import ANSWER_BYTES_MAX, RECORDS_PATH, why_failed
from dlrover_adapters.http.log_address import PROXY_AUTHORIZATION, Address
from dlrover_adapters.http.token import VARIABLE
from dlrover_core.errors import (
    CoreError,
    LogCorrupt,
    LogUnavailable,
    MalformedMessage,
    SchemaTooNew,
    TokenRefused,
)
from dlrover_core.runtime.records import CONTENT_TYPE, PACKED_BYTES_MAX, Told, unpack
from dlrover_core.runtime.within import within

ANSWER_S = 30.0
# A host that is gone swallows what is sent to it: the next master should not wait for that longer than this.
CONNECT_S = 5.0
LEARNED_MAX = 16
_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _CONFLICT, _MISDIRECTED = 200, 401, 403, 404, 409, 421
_FAILED, _UNAVAILABLE = 500, 503


class NoMaster(LogUnavailable):
    """The masters that were asked, and why none of them answered."""


class Asking:
    """The masters of one URL. ``current`` is asked first."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        self._address, self._tls = address, tls
        self._masters = list(address.masters)
        self.current = self._masters[0]
        self._session: aiohttp.ClientSession | None = None

    async def page(self, job: str, after: int, *, bytes_max: int, wait_s: float = 0.0) -> Told:
        """The next page beyond ``after``, from the first master that has one to give. An empty ``job``: whichever it leads."""
        asked = list[str]()
        failed = list[str]()
        left = [self.current, *(one for one in self._masters if one != self.current)]
        while left:
            master = left.pop(0)
            asked.append(master)
            try:
                told = await self._ask(master, job, after, bytes_max, wait_s)
            except _Elsewhere as error:
                failed.append(str(error))
                if self._learn(error.leader) and error.leader not in (*asked, *left):
                    left.append(error.leader)
                continue
            self.current = master
            if told.leader is not None:
                self._learn(told.leader.address)
            return told
        raise NoMaster("; ".join(failed))

    def _learn(self, leader: str) -> bool:
        """Remember a leader that was named. Behind a proxy its address means nothing here."""
        if not leader or self._address.prefix or len(self._masters) >= LEARNED_MAX + len(self._address.masters):
            return False
        if leader not in self._masters:
            self._masters.append(leader)
        return True

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, master: str, job: str, after: int, bytes_max: int, wait_s: float) -> Told:
        """One master. Raises `_Elsewhere` where another one may do better."""
        try:
            data = await within(ANSWER_S + wait_s, self._fetch(master, job, after, bytes_max, wait_s))
            told = unpack(data)
        except asyncio.TimeoutError as error:
            raise _Elsewhere(f"the master at {master} did not answer within {ANSWER_S + wait_s:g} s") from error
        except MalformedMessage as error:
            raise _Elsewhere(f"what listens at {master} is no dlrover master: {error}") from error
        except (SchemaTooNew, _Elsewhere, TokenRefused):
            raise
        except LogUnavailable as error:
            raise _Elsewhere(f"the master at {master}: {error}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = await why_failed(master, error, encrypts=self._address.scheme == "https")
            raise _Elsewhere(why) from error
        if job not in ("", told.job) or told.after != after:
            raise _Elsewhere(f"the master at {master} answers for events of job {told.job!r} after {told.after}")
        return told

    async def _fetch(self, master: str, job: str, after: int, bytes_max: int, wait_s: float) -> bytes:
        asked = {"job": job} if job else {}
        query = urlencode({**asked, "after": after, "limit": bytes_max, "wait": f"{wait_s:g}"}, errors="surrogatepass")
        url = f"{self._address.scheme}://{master}{self._address.prefix}{RECORDS_PATH}?{query}"
        secure = self._tls if self._tls is not None else True
        session = self._session = self._session or _session(self._address.headers)
        async with session.get(url, ssl=secure, allow_redirects=False) as response:
            if response.status == _OK and response.content_type == CONTENT_TYPE:
                return await _body(master, response, PACKED_BYTES_MAX)
            raise self._refusal(master, job, response, await _reasons(master, response))

    def _refusal(self, master: str, job: str, response: aiohttp.ClientResponse, told: Mapping[str, Any]) -> CoreError:
        """What an answer that is no page means."""
        status, reason = response.status, str(told.get("reason", ""))
        if status in (_UNAUTHORIZED, _FORBIDDEN):
            return self._refused(master, status, ours=response.headers.get("Server", "").startswith("Python/"))
        if status == _MISDIRECTED:
            return _Elsewhere(f"the master at {master} leads another job than {job!r}")
        if status == _CONFLICT and "head" in told:
            return LogCorrupt(
                job, int(told["head"]) + 1, f"{reason}: it was replaced by an older copy, or is another job's"
            )
        if status == _FAILED and "seq" in told:
            return LogCorrupt(job, int(told["seq"]), f"says the master at {master}: {reason}")
        if status == _FAILED and reason:
            return SchemaTooNew(f"the master at {master}: {reason}")
        if status == _UNAVAILABLE and reason:
            return _Elsewhere(f"the master at {master}: {reason}", str(told.get("leader", "")))
        if status == _NOT_FOUND:
            return _Elsewhere(
                f"the master at {master} hands out no records: it is of an older version, or no dlrover master"
            )
        if 300 <= status < 400:
            where = response.headers.get("Location", "")[:200]
            return _Elsewhere(f"{master} sends us on to {where!r}; name that place in the URL")
        return _Elsewhere(f"{master} answered with HTTP status {status}; is a dlrover master listening there?")

    def _refused(self, master: str, status: int, *, ours: bool) -> TokenRefused:
        if self._address.prefix and not ours:
            return TokenRefused(
                f"the proxy at {master} refused us (HTTP status {status}): set {PROXY_AUTHORIZATION} to what it wants to see "
                f"('Bearer ...'), and {VARIABLE} to the job's token"
            )
        what = "is not this job's" if self._address.token else "is missing"
        return TokenRefused(
            f"the master at {master} refused us: the job token {what}. Set {VARIABLE}, or --token-file, to the token the job was "
            "started with."
        )


class _Elsewhere(LogUnavailable):
    """This master cannot be read through now; another one may, for example at ``leader``."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


async def _body(master: str, response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """All of an answer, in however many pieces it comes. Raises `_Elsewhere` for one that is too long."""
    pieces, size = list[bytes](), 0
    async for piece in response.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > bytes_max:
            response.close()
            raise _Elsewhere(f"what listens at {master} is no dlrover master: it answers more than {bytes_max:,} bytes")
    return b"".join(pieces)


async def _reasons(master: str, response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    """What a master says that hands out nothing; nothing where it is no JSON."""
    if response.content_type != "application/json":
        response.close()
        return {}
    try:
        told = json.loads(await _body(master, response, ANSWER_BYTES_MAX))
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    # Masters compress nothing, and a few compressed bytes could become any number.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=4),
        timeout=timeout,
        headers={**headers, "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=False,
    )
