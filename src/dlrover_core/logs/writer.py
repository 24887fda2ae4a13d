"""The one thread that writes: a commit waits for the disk, and the event loop must not.

Own thread and queue rather than an executor: two hand-overs per call and nothing else on the way, in order, and what a
cancelled caller has asked for is still done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from dlrover_core.errors import LogUnavailable
from dlrover_core.logs.tables import of_disk

T = TypeVar("T")
_Work = tuple[Callable[[], Any], "asyncio.Future[Any] | None", "Callable[[], None] | None"]


class Writer:
    """Runs calls one after another in its own thread. Belongs to one event loop; ``start`` it, and await ``stop``."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the thread, for the running loop."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._thread.start()

    async def call(self, work: Callable[[], T], then: Callable[[], None] | None = None) -> T:
        """Run ``work`` in the thread and return what it returns. ``then`` runs on the loop after it, cancelled or not.

        Raises `LogUnavailable` after `stop`, and it or `LogFull` for an `OSError`: whoever waits for the log goes on waiting.
        """
        assert self._loop is not None, "the writer was not started"
        if self._stopping:
            raise LogUnavailable("the log is closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((work, answer, then))
        return await answer

    def post(self, work: Callable[[], None]) -> None:
        """Run ``work`` after what is queued; nobody waits for it. It must not raise. After `stop` it runs here and now."""
        if self._stopping:
            work()
            return
        self._queue.put((work, None, None))

    async def stop(self) -> None:
        """Finish what is queued, then end the thread."""
        assert self._ended is not None, "the writer was not started"
        self._stopping = True
        self._queue.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    def _run(self) -> None:
        assert self._loop is not None and self._ended is not None
        while (item := self._queue.get()) is not None:
            work, answer, then = item
            result: object = None
            error: BaseException | None = None
            try:
                result = work()
            except OSError as caught:
                error = of_disk(caught)
                error.__cause__ = caught
            except BaseException as caught:  # noqa: BLE001  # handed whole to whoever waits for it
                error = caught
            if answer is not None:
                self._tell(functools.partial(_settle, answer, result, error, then))
            # Held across the next wait they would keep a batch, or a traceback, alive.
            del item, work, answer, then, result, error
        self._tell(functools.partial(_settle, self._ended, None, None, None))

    def _tell(self, what: Callable[[], None]) -> None:
        assert self._loop is not None
        # A loop that has closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)


def _settle(
    answer: asyncio.Future[Any] | None, result: object, error: BaseException | None, then: Callable[[], None] | None
) -> None:
    if then is not None:
        then()
    if answer is None or answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
