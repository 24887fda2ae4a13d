"""What the saver does with storage: parts of a step, and once all are there, the seal, and what goes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_core.checkpoint.arena import ArenaBroken
from dlrover_core.data.trained import added, pack_counted, unpack_counted
from dlrover_core.errors import SpecError

THREADS_MIN, THREADS_MAX = 2, 4
"""Parts of one node that are written beside each other: two, or one for each four cores, at most four."""
THREAD_NAME = "saver-persist"
"""Prefix of the names of all threads that write to storage; `orders.moved` finds the threads by it."""
_T = TypeVar("_T")


class Order(NamedTuple):
    """Where a step is to be written, and how.

    ``url``: of the storage.
    ``run``: the job's run.
    ``format``: as `parts.write_part` has it.
    ``keep``: newest steps that are kept; 0: all.
    ``job``: the job's name.
    """

    url: str
    run: str
    format: str
    keep: int
    job: str = ""

    @classmethod
    def of(cls, body: dict[str, Any]) -> Order:
        """From a frame of the agent's."""
        return cls(body["url"], body["run"], body["format"], int(body["keep"]), str(body.get("job", "")))


class Progress:
    """Progress of writing one step: ``written`` of about ``size`` bytes. Any thread may add to it or read it."""

    def __init__(self) -> None:
        self.written = self.size = 0
        self._lock = threading.Lock()

    def begins(self, size: int) -> None:
        """Start at 0 of ``size`` bytes."""
        with self._lock:
            self.written, self.size = 0, size

    def wrote(self, size: int) -> None:
        """So many more."""
        with self._lock:
            self.written += size


def write(views: Sequence[SlotView], order: Order, progress: Progress | None = None) -> tuple[int, int]:
    """Write the parts of these ranks of one node, several beside each other; how many parts, and their bytes.

    After an error no further part is begun; those that are under way are finished, and found there when the step is tried again.
    Raises the first error: OSError, `CoreError`, `ArenaBroken`.
    """
    from dlrover_adapters.checkpoint import parts
    from dlrover_adapters.checkpoint.manifests import TORCH
    from dlrover_adapters.checkpoint.places import Place

    progress = progress if progress is not None else Progress()
    place = Place(order.url, progress.wrote)
    if order.format == TORCH:
        together = [(views[0], tuple(views[1:]))]
    else:
        whole = tuple(one for one in views if not one.table.elsewhere)
        together = [(one, whole if one.table.elsewhere else ()) for one in views if _writes(one)]
    progress.begins(_size(views, once=order.format == TORCH))

    def one(which: tuple[SlotView, Sequence[SlotView]]) -> int:
        view, beside = which
        return parts.write_part(
            view,
            place,
            run=order.run,
            job=order.job,
            generation=view.stamp.generation,
            format=order.format,
            beside=beside,
        ).size

    sizes = _beside_each_other([functools.partial(one, which) for which in together])
    return len(sizes), sum(sizes)


def trained(views: Sequence[SlotView]) -> bytes:
    """What the ranks of these parts were trained on by leases, added up, as `Written.trained` has it; empty: not said."""
    try:
        said = {view.table.rank: packed for view in views if (packed := view.trained())}
        sums = added(unpack_counted(packed)[2] for packed in said.values())
    except (SpecError, ArenaBroken):
        return b""  # the log knows less; the state itself is as it is, and written
    return pack_counted(views[0].table.world, len(said), sums) if said else b""


def _beside_each_other(work: Sequence[Callable[[], _T]]) -> list[_T]:
    """Do all of it by a few threads; what each returned. Raises the first error, once nothing of it runs any more."""
    threads = min(len(work), max(THREADS_MIN, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 4)))
    if threads < 2:
        return [one() for one in work]
    failed: list[BaseException] = []

    def unless_failed(one: Callable[[], _T]) -> _T | None:
        if failed:
            return None
        try:
            return one()
        except BaseException as error:
            failed.append(error)
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix=THREAD_NAME) as pool:
        futures = [pool.submit(unless_failed, one) for one in work]
    if failed:
        raise failed[0]
    return [cast("_T", future.result()) for future in futures]


def _writes(view: SlotView) -> bool:
    return bool(view.table.objects) or any(item.write for item in (*view.table.items, *view.table.elsewhere))


def _size(views: Sequence[SlotView], *, once: bool) -> int:
    """The bytes of tensors that are to be written; ``once``: all in one file, what several ranks hold one time."""
    items = [item for view in views for item in (*view.table.items, *view.table.elsewhere) if item.write or once]
    return sum(
        {(one.name, tuple(one.offsets)): one.size for one in items}.values() if once else (one.size for one in items)
    )


def seal(order: Order, step: int, generation: int = 0) -> int:
    """All parts of a step are there: make it a checkpoint, and remove what is too old. Its bytes. Raises as `write`.

    Parts of other runs do not count, nor those of other generations; ``generation`` 0: the newest there is.
    """
    from dlrover_adapters.checkpoint import listing
    from dlrover_adapters.checkpoint import seal as sealing
    from dlrover_adapters.checkpoint.places import Place

    place = Place(order.url)
    sealed = sealing.seal(place, step, run=order.run, generation=generation or None)
    if order.keep:
        listing.retain(place, order.keep, run=order.run, job=order.job)
    return sealed.size
