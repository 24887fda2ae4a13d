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
    """The master at ``address``."""

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None) -> None:
        self._address, self._token, self._tls = address, token, tls

    def over(self) -> bool:
        """Is the job over, or about to be? Raises `ConnectionLost` and `TokenRefused`."""
        status = _patiently(lambda left_s: fetch_status(self._address, self._token, timeout_s=left_s, tls=self._tls))
        return str(status.get("state", "")) in CLOSED

    def stop(self, reason: str) -> None:
        """Stop the job; one that is over stays so. Raises `ConnectionLost` and `TokenRefused`."""
        asked = {"command": "stop", "reason": reason}
        _patiently(lambda left_s: self._stop(asked, left_s))

    async def _stop(self, asked: dict[str, str], left_s: float) -> None:
        try:
            await send_command(self._address, self._token, asked, timeout_s=left_s, tls=self._tls)
        except Refused:
            return  # it is over


def _patiently(ask: Callable[[float], Coroutine[Any, Any, T]]) -> T:
    """The answer, asked for again while there is none. Both questions may be asked twice."""

    async def answer() -> T:
        until = time.monotonic() + ASK_S
        while True:
            try:
                return await ask(max(AGAIN_S, until - time.monotonic()))
            except ConnectionLost:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(AGAIN_S)

    with ThreadPoolExecutor(1, thread_name_prefix="dlrover-asking") as pool:
        return pool.submit(asyncio.run, answer()).result()
