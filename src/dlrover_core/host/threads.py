"""Threads for blocking calls, where the kernel may refuse to start more of them (`ulimit -u`, a control group's `pids.max`)."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from concurrent.futures import ThreadPoolExecutor

NO_THREAD = "no thread can be started; raise `ulimit -u`, or the container's limit of processes (pids.max)"


class Threads(ThreadPoolExecutor):
    """Makes do with the threads it has where no more can be started: calls wait for one another then.

    Only where it has none at all does `submit` raise RuntimeError.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()  # private; of a Python without it `submit` raises as ever
        except RuntimeError:
            if not self._threads:
                with contextlib.suppress(queue.Empty):
                    self._work_queue.get_nowait()  # whoever hears of the error calls again
                raise


def install() -> None:
    """Have `asyncio.to_thread` of the running loop make do with the threads it has, of which one is started now."""
    threads = Threads(thread_name_prefix="dlrover")
    with contextlib.suppress(RuntimeError):  # whoever calls first hears of it
        threads.submit(int)
    asyncio.get_running_loop().set_default_executor(threads)
