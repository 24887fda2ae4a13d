"""A node host's half of the wire: who talks to it, and what each connection gets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from dlrover_backends.shared import wire
from dlrover_backends.shared.asking import StaleToken
from dlrover_core.errors import ConnectionLost, LaunchRefused, MalformedMessage
from dlrover_core.runtime.within import within

REQUEST_S = 10.0

log = structlog.get_logger("dlrover.host")

Order = Callable[[tuple[Any, ...]], Awaitable[tuple[object, ...]]]
"""Does what a request says; the answer. Raises `LaunchRefused`, `StaleToken`, `MalformedMessage`; anything else: it failed."""
Observing = Callable[[tuple[Any, ...], asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Tells one client of changes until it goes away; given the words behind ``observe``."""


class Conversations:
    """Those that go on now. ``take`` is for `asyncio.start_unix_server`."""

    def __init__(self, order: Order, observed: Observing) -> None:
        self._order, self._observed = order, observed
        self.tasks: set[asyncio.Task[None]] = set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from the request to the answer, or to the end of observing."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            request = await within(REQUEST_S, wire.read(reader))
            if request[0] == "observe":
                await self._observed(request[1:], reader, writer)
            else:
                await wire.write(writer, *await self._answer(request))
        except (ConnectionLost, asyncio.TimeoutError):
            log.debug("a client went away")
        except MalformedMessage as bad:
            log.warning("a client was not understood", reason=str(bad))
        except asyncio.CancelledError:
            # asyncio's own bookkeeping of connections takes a cancelled one for an error; we cancel only when we close.
            log.debug("a conversation ends with the host")
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _answer(self, request: tuple[Any, ...]) -> tuple[object, ...]:
        try:
            return await self._order(request)
        except LaunchRefused as refused:
            return ("refused", refused.reason, refused.permanent)
        except StaleToken as stale:
            log.warning("order of a deposed master refused", order=request[0], token=stale.token, highest=stale.highest)
            return ("stale", stale.token, stale.highest)
        except MalformedMessage:
            raise
        except Exception as error:
            log.exception("an order failed", order=request[0])
            return ("failed", f"{type(error).__name__}: {error}")
