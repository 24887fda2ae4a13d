"""What a rendezvous handler under ``torchrun --rdzv-backend dlrover`` asks of a master for somebody who uses it by hand.

Beside the agent's connection, which there is only once a node has come to a rendezvous. Each call has a thread of its own,
so it may be made from a thread that runs an event loop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dlrover_adapters.http.client import fetch_status, send_command
from dlrover_core.errors import ConnectionLost, Refused

ASK_S = 20.0
"""A master may take this long to be started, to lead, and to answer."""
AGAIN_S = 0.1
CLOSED = ("stopping", "succeeded", "failed", "stopped")

T = TypeVar("T")


class Asking:
    """The master at ``address``. ``ended``: have the masters of this host ended, because the job is over?"""

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, ended: Callable[[], bool]) -> None:
        self._address, self._token, self._tls, self._ended = address, token, tls, ended

    def over(self) -> bool:
        """Is the job over, or about to be? Raises `ConnectionLost` and `TokenRefused`."""
        status = _patiently(
            lambda left_s: fetch_status(self._address, self._token, timeout_s=left_s, tls=self._tls), self._ended
        )
        return status is None or str(status.get("state", "")) in CLOSED

    def stop(self, reason: str) -> None:
        """Stop the job; one that is over stays so. Raises `ConnectionLost` and `TokenRefused`."""
        asked = {"command": "stop", "reason": reason}
        _patiently(lambda left_s: self._stop(asked, left_s), self._ended)

    async def _stop(self, asked: dict[str, str], left_s: float) -> None:
        try:
            await send_command(self._address, self._token, asked, timeout_s=left_s, tls=self._tls)
        except Refused:
            return  # it is over


def _patiently(ask: Callable[[float], Coroutine[Any, Any, T]], ended: Callable[[], bool]) -> T | None:
    """The answer, asked for again while there is none; None where the masters have ended. Both questions may be asked twice.

    Masters that end close their port before they are gone: whoever asks them in between looks again.
    """

    async def answer() -> T | None:
        until = time.monotonic() + ASK_S
        while not ended():
            try:
                return await ask(max(AGAIN_S, until - time.monotonic()))
            except ConnectionLost:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(AGAIN_S)
        return None

    with ThreadPoolExecutor(1, thread_name_prefix="dlrover-asking") as pool:
        return pool.submit(asyncio.run, answer()).result()
