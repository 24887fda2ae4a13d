"""``POST /v1/command``: what a person asks of the job, as JSON, and the answer.

200 ``{"seq": n}``: done, and durable as record n. Else ``{"reason": ...}``: 409, the job's state forbids it; 400, no command;
413, more than `BODY_BYTES_MAX`; 503, nobody can say whether it was done: the log is away, or another master leads now.
With ``"done": false`` nothing was, for a standby was asked: ``"leader"`` is where the leader is, if that is known.
"""

from __future__ import annotations

import asyncio
import json

import structlog
from aiohttp import web

from dlrover_core.errors import CoreError, MalformedMessage, Refused, StandsBy
from dlrover_core.runtime.transport import Obey
from dlrover_core.runtime.within import within

BODY_BYTES_MAX = 16 * 1024
# Longer than a log is away for a moment, shorter than a person's patience.
ANSWER_S = 20.0

log = structlog.get_logger("dlrover.http")


async def body_of(request: web.BaseRequest) -> bytes:
    """What was sent, and no more than a byte beyond the limit: whoever cuts late connections ends the wait for it."""
    body = b""
    while len(body) <= BODY_BYTES_MAX:
        piece = await request.content.read(BODY_BYTES_MAX + 1 - len(body))
        if not piece:
            break
        body += piece
    return body


def unreadable(broken: web.RequestPayloadError) -> tuple[int, str]:
    """The answer to a body that is not encoded as its headers say."""
    return _not(400, f"a body that cannot be read: {broken}")


async def answer_to(body: bytes, obey: Obey | None, peer: str) -> tuple[int, str]:
    """Let it be done; returns the status and the JSON of the answer."""
    if len(body) > BODY_BYTES_MAX:
        return _not(413, f"a command has at most {BODY_BYTES_MAX} bytes")
    if obey is None:
        return _not(503, "this listener takes no commands")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _not(400, f"not JSON: {error}")
    try:
        seq = await within(ANSWER_S, obey(asked))
    except MalformedMessage as bad:
        return _not(400, str(bad))
    except Refused as refused:
        log.info("command refused", peer=peer, command=asked["command"], reason=refused.reason)
        return _not(409, refused.reason)
    except StandsBy as elsewhere:
        return 503, json.dumps({"reason": str(elsewhere), "done": False, "leader": elsewhere.address})
    except asyncio.TimeoutError:
        return _not(503, f"not recorded within {ANSWER_S:g} s; it is done as soon as the log can be reached")
    except CoreError as error:
        return _not(503, str(error))
    log.info("command done", peer=peer, command=asked["command"], seq=seq)
    return 200, json.dumps({"seq": seq})


def _not(status: int, reason: str) -> tuple[int, str]:
    return status, json.dumps({"reason": reason})
