"""A two-way stream to one member: grpc.aio's, with bounds, our errors, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dlrover_adapters.etcd.errors import TimedOut, translated
from dlrover_adapters.etcd.members import Member
from dlrover_core.errors import LogError, LogUnavailable


class Stream:
    """One call to a streaming method, under ``token``. ``cut`` makes the error for a stream that our own side ended."""

    def __init__(
        self, member: Member, method: str, cut: Callable[[Member], LogError], token: str, **options: Any
    ) -> None:
        self.member, self.token, self._cut = member, token, cut
        self._call = member.methods[method](**options)
        self._reading: asyncio.Future[Any] | None = None

    async def write(self, request: Any, timeout_s: float) -> None:
        """Send a request. Raises `LogUnavailable` and what etcd means by an error."""
        writing = asyncio.ensure_future(self._call.write(request))
        try:
            done, _ = await asyncio.wait({writing}, timeout=timeout_s)
        finally:
            if not writing.done():
                writing.cancel()
                self._call.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        if not done:
            raise TimedOut(f"{self.member.endpoint} takes nothing", timeout_s)
        self._result(writing)

    async def read(self, timeout_s: float) -> Any:
        """The next response; None: there is none yet. Raises as `write` does; `LogUnavailable` at the stream's end."""
        # Never cancelled but at the end: a read that is cancelled ends the whole stream.
        reading = self._reading = self._reading or asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if not done:
            return None
        self._reading = None
        response = self._result(reading)
        if not hasattr(response, "header"):  # grpc's EOF
            raise LogUnavailable(f"{self.member.endpoint} ended the stream")
        return response

    async def close(self) -> None:
        """End it. Idempotent."""
        self._call.cancel()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _result(self, done: asyncio.Future[Any]) -> Any:
        from grpc import RpcError

        if done.cancelled():
            raise self._cut(self.member)
        error = done.exception()
        if isinstance(error, RpcError):
            raise translated(self.member.endpoint, error, 0.0) from error
        if isinstance(error, asyncio.InvalidStateError):
            raise LogUnavailable(f"{self.member.endpoint} ended the stream") from error
        return done.result()
