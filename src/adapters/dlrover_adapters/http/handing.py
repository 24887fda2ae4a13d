"""``GET /v1/records?after=N``: the job's records beyond N, a page (`dlrover_core.runtime.records`) at a time.

``limit`` is the most bytes of batches in a page (a single batch may be larger; 0: only the head of the log, and who leads),
``wait`` how many seconds to wait for news where there are none. Leader and standby answer alike, each from the log itself.

200: a page, and the connection stays open for the next one. Else JSON with a ``reason``: 400, no such request; 404, this
master hands out none; 409, ``after`` lies beyond the log, whose end is ``head``; 500, the log is damaged (``seq``), or of a
newer version; 503, the log cannot be read now, or too many read: ``leader`` is who else might be asked, if that is known.
"""

from __future__ import annotations

import asyncio
import json

import structlog
from aiohttp import web

from dlrover_adapters.http.connection import HttpLimits
from dlrover_core.errors import LogCorrupt, LogError, SchemaTooNew
from dlrover_core.runtime.records import CONTENT_TYPE, PAGE_BYTES, PAGE_BYTES_MAX, WAIT_S_MAX, BeyondHead, Elsewhere
from dlrover_core.runtime.transport import HandOut

SEQ_DIGITS_MAX = 18
# A peer that takes nothing is found out after so many bytes.
PIECE_BYTES = 128 * 1024

log = structlog.get_logger("dlrover.http")


class BadQuery(ValueError):
    """What was asked for makes no sense. The message is for people."""


class Handing:
    """Answers for records, as many at once as the limits allow. Without a ``hand_out`` there are none."""

    def __init__(self, hand_out: HandOut | None, limits: HttpLimits) -> None:
        self._hand_out, self._limits = hand_out, limits
        self._under_way = 0

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """One page, or why not."""
        if self._hand_out is None:
            return _not(404, "this master hands out no records")
        if self._under_way >= self._limits.readers_max:
            return _not(503, f"{self._limits.readers_max} others read here already; ask another master, or again later")
        self._under_way += 1
        try:
            after, bytes_max, wait_s = _asked(request)
            page = await self._hand_out(after, bytes_max, wait_s)
            return await self._send(request, page)
        except BadQuery as bad:
            return _not(400, str(bad))
        except BeyondHead as beyond:
            return _not(409, str(beyond), head=beyond.head)
        except LogCorrupt as damage:
            return _not(500, str(damage), seq=damage.seq)
        except SchemaTooNew as error:
            return _not(500, str(error))
        except LogError as error:
            return _not(503, str(error), leader=error.address if isinstance(error, Elsewhere) else "")
        finally:
            self._under_way -= 1

    async def _send(self, request: web.BaseRequest, page: bytes) -> web.StreamResponse:
        """A page, to a peer that takes it."""
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})
        response.content_length = len(page)
        await response.prepare(request)
        pieces = memoryview(page)
        for at in range(0, len(page), PIECE_BYTES):
            # A timer, for a task for each piece would cost as much as all else.
            timer = asyncio.get_running_loop().call_later(self._limits.send_s, _cut, request)
            try:
                await response.write(pieces[at : at + PIECE_BYTES])
            finally:
                timer.cancel()
        return response


def _cut(request: web.BaseRequest) -> None:
    """The peer takes nothing."""
    if request.transport is not None:
        log.info("a reader takes nothing, its connection is cut", limit="send_s")
        request.transport.abort()


def _asked(request: web.BaseRequest) -> tuple[int, int, float]:
    """After what, how many bytes, and how long to wait. Raises `BadQuery`."""
    after, limit = request.query.get("after", "0"), request.query.get("limit", str(PAGE_BYTES))
    for name, text in (("after", after), ("limit", limit)):
        if not (text.isascii() and text.isdecimal() and len(text) <= SEQ_DIGITS_MAX):
            raise BadQuery(f"{name}={text[:40]} is no number of {'an event' if name == 'after' else 'bytes'}")
    try:
        wait_s = float(request.query.get("wait", "0"))
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s < float("inf"):
        raise BadQuery(f"wait={request.query['wait'][:40]} is no number of seconds")
    return int(after), min(int(limit), PAGE_BYTES_MAX), min(wait_s, WAIT_S_MAX)


def _not(status: int, reason: str, **more: object) -> web.Response:
    response = web.Response(status=status, text=json.dumps({"reason": reason, **more}), content_type="application/json")
    response.force_close()
    return response
