"""The messages of a stream that its ranks leave out.

A message is known by partition and offset, because its position is planned anew after a restart. To the agent, to the job's log
and in a cut each partition is a dataset of its own, ``clicks/0``, whose samples are the offsets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from dlrover_adapters.data.stream_plan import Book
from dlrover_core.data.cut import Place
from dlrover_core.data.permutation import Order
from dlrover_core.data.poison import VARIABLE, heard_of_all, place_of_sample, sample_of
from dlrover_core.data.quota import Batch
from dlrover_core.errors import SpecError

from .plan import Micro
from .quarantine import Left

SEPARATOR = "/"
"""Between the name of a stream's dataset and that of a partition."""


class StreamLeft(Left):
    """What is left out of a stream, by the agent's word and the restored cut. ``book``: the batches that are planned now."""

    def __init__(self, dataset: str, order: Callable[[int], Order], book: Callable[[], Book]) -> None:
        super().__init__(dataset, order)
        self._book, self._before = book, dataset + SEPARATOR
        told = heard_of_all(os.environ.get(VARIABLE, ""))
        names = {name.removeprefix(self._before): one for name, one in told.items() if name.startswith(self._before)}
        self._out: dict[str, dict[int, int]] = {
            partition: dict.fromkeys(one.left_out, 0) for partition, one in names.items() if one.left_out
        }

    def of(self, partition: str) -> Iterable[int]:
        """The offsets of a partition that are left out."""
        return self._out.get(partition, {}).keys()

    @property
    def any(self) -> bool:
        """Is any message left out?"""
        return bool(self._out)

    def positions(self, epoch: int) -> tuple[int, ...]:
        """Where they stand in the batches that are planned, ascending."""
        return tuple(at for one in self._book().planned for at in self.within(epoch, one.start, one.end))

    def within(self, epoch: int, start: int, end: int) -> tuple[int, ...]:  # noqa: ARG002  # a stream has one epoch
        """Those of one planned batch from ``start`` to ``end``, exclusive."""
        planned = (
            next((one for one in self._book().planned if one.start <= start < one.end), None) if self.any else None
        )
        if planned is None:
            return ()
        runs = planned.pieces(start, end)
        begins = accumulate((run.many for run in runs), initial=start)
        return tuple(
            sorted(
                at + offset - run.offset
                for at, run in zip(begins, runs, strict=False)
                for offset in self.of(run.partition)
                if run.offset <= offset < run.offset + run.many
            )
        )

    def consumed(self, batch: Batch) -> None:
        """A batch is consumed, without its messages that are left out."""
        planned = self._book().batch_at(batch.start) if self.any else None
        for position in self.within(0, batch.start, batch.end):
            assert planned is not None
            (run,) = planned.pieces(position, position + 1)
            self._out[run.partition][run.offset] += 1

    @property
    def places(self) -> Iterator[Place]:
        """How often each message was left out, of those that were."""
        for partition, times in sorted(self._out.items()):
            for offset, many in sorted(times.items()):
                if many:
                    yield place_of_sample(self._before + partition, offset, many)

    def owns(self, name: str) -> bool:
        """Is a place of this name one of its messages'?"""
        return name.startswith(self._before) and sample_of(name) is not None

    def go_on(self, places: Iterable[Place]) -> None:
        """Go on from what a cut says. What the agent has told stays."""
        for times in self._out.values():
            times.update(dict.fromkeys(times, 0))
        for one in places:
            sample = sample_of(one.dataset) if self.owns(one.dataset) else None
            if sample is not None:
                self._out.setdefault(sample[0].removeprefix(self._before), {})[sample[1]] = one.position

    def _healthy(self, batch: Batch, micro: Micro, size: int, *, divides: bool) -> Micro:
        out = len(self.within(0, batch.start, batch.end))
        if out == batch.end - batch.start:
            raise SpecError(
                "global_batch",
                f"all {out} messages of a global batch of stream {self._dataset!r} are quarantined: give a larger one",
            )
        return super()._healthy(batch, micro, size, divides=divides)
