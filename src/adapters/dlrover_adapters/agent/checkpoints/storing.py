"""What the saver does with storage: parts of a step, and once all are there, the seal, and what goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dlrover_adapters.checkpoint.slotview import SlotView


class Order(NamedTuple):
    """Where, and how."""

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
    """How far whoever writes has come: about so many of so many bytes. One thread writes it, another reads it."""

    def __init__(self) -> None:
        self.written = self.size = 0

    def begins(self, size: int) -> None:
        """To write so many bytes."""
        self.written, self.size = 0, size

    def wrote(self, size: int) -> None:
        """So many more."""
        self.written += size


def write(views: Sequence[SlotView], order: Order, progress: Progress | None = None) -> tuple[int, int]:
    """The parts of these ranks of one node; how many, and their bytes. Raises OSError, `CoreError`, `ArenaBroken`."""
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
    reports = [
        parts.write_part(
            view,
            place,
            run=order.run,
            job=order.job,
            generation=view.stamp.generation,
            format=order.format,
            beside=beside,
        )
        for view, beside in together
    ]
    return len(reports), sum(one.size for one in reports)


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
