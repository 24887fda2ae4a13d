"""Iterating over leased samples: in the script's own process, and in loader processes.

A loader process reads ahead, so a batch that it has made is not used yet. It sends each batch with its positions, and
`ElasticDataset.over` acknowledges them in the script's process once the next batch is asked for. A loader process that has
nothing to draw says so instead of waiting: the loader takes batches of its processes in turn, and those of the others must not
wait behind it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from dlrover_adapters.data.index_file import say
from dlrover_adapters.data.leases import TOLD_S, LeasedIndices, Shard, Wait
from dlrover_core.data.in_work import InWork
from dlrover_core.data.ranges import Span
from dlrover_core.errors import SpecError
from dlrover_core.job.shards import CURSOR, LEASE

from .noting import notes
from .plan import Micro
from .quarantine import Left, divided

MODEL, SERVER = "model", "server"
IDLE_S = 0.05
"""A loader process without samples says so after this time."""


class Lent(NamedTuple):
    """A batch of a loader process; ``end`` 0: it had nothing to draw, for the reason in ``content``."""

    content: Any
    start: int
    end: int


def check_assignment(name: str, assign: str, lineage: str, given: dict[str, bool]) -> None:
    """Raises `SpecError` for words that are none, or do not go together. ``given``: options that lease has no use for."""
    if assign not in (CURSOR, LEASE):
        raise SpecError("assign", f'{assign!r} of dataset {name!r}: give "cursor" or "lease"')
    if lineage not in (MODEL, SERVER):
        raise SpecError("lineage", f'{lineage!r} of dataset {name!r}: give "model" or "server"')
    if assign == CURSOR and lineage == SERVER:
        raise SpecError(
            "lineage",
            f'"server" of dataset {name!r} goes with assign="lease" alone: with "cursor" what the saved model has counts',
        )
    if assign == LEASE and lineage == MODEL:
        raise SpecError(
            "lineage",
            f'"model" of dataset {name!r}: leases that are restored with a checkpoint are not served yet. Give lineage="server", '
            "where what workers acknowledge counts, or leave assign= out",
        )
    for field, is_given in given.items():
        if assign == LEASE and is_given:
            raise SpecError(field, f'dataset {name!r}: it has no use with assign="lease"; leave it out')


def not_leased(name: str, what: str) -> SpecError:
    """The error of a call that leased samples do not have."""
    return SpecError(
        "assign",
        f'"lease" of dataset {name!r}: {what}. Iterate over it or over data.over(loader), and leave it out of FlashCheckpoint',
    )


class Leased:
    """The leased half of an `ElasticDataset`. ``micro_batch``: samples of a batch, at most."""

    def __init__(self, of: Leasable, work: LeasedIndices, micro_batch: int) -> None:
        self.work, self.micro_batch, self._of = work, micro_batch, of
        self._current: Span | None = None
        self._counted, self._iterated_in = False, -1

    def here(self) -> Iterator[Any]:
        """Batches; each is used when the next one is asked for, in this loop or in another."""
        while True:
            self._count_current()
            shard = self.work.waited()
            if shard is None:
                return
            for span, batch in self._batches(shard):
                self._works(span)
                yield batch
                self._count_current()

    def done(self) -> None:
        """Say now what was used, the present batch too."""
        self._count_current()
        self.work.done()

    def _works(self, span: Span) -> None:
        """The script has this batch now."""
        self._current, here = span, notes()
        if here is not None:
            epoch, start = divmod(span.start, self._of.size)
            here.step(self._of.in_work(epoch, start, start + span.end - span.start))

    def _count_current(self) -> None:
        span, self._current = self._current, None
        if span is not None:
            self.work.used(span)
            if (here := notes()) is not None:
                here.stepped()

    def in_loader(self) -> Iterator[Lent]:
        """Batches with their positions, for `over`."""
        if not self._counted:
            raise SpecError(
                "loader",
                f"dataset {self.work.terms.name!r} is leased, and nobody would say which batches of loader processes were used: "
                "iterate over data.over(loader), and give it the DataLoader itself",
            )
        if self._iterated_in == os.getpid():
            self.work.begin_anew()  # persistent workers: what they had read ahead was thrown away
        self._iterated_in = os.getpid()
        while True:
            shard = self.work.draw(IDLE_S)
            if shard is None:
                return
            if isinstance(shard, Wait):
                yield Lent(shard.why, 0, 0)
                continue
            for span, batch in self._batches(shard):
                yield Lent(batch, *span)

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader; each is used when the next one is asked for, in this loop or in another."""
        self._counted = True
        self.done()
        began = told = time.monotonic()
        for one in loader:
            if not isinstance(one, Lent):  # made in this process, by `here`
                yield one
                continue
            if one.end:
                self._works(Span(int(one.start), int(one.end)))
                yield one.content
                self.done()
                began = told = time.monotonic()
            elif time.monotonic() - told >= TOLD_S:
                told = time.monotonic()
                say(f"dataset {self.work.terms.name!r}: {told - began:.0f} s waited for samples: {one.content}")

    def _batches(self, shard: Shard) -> Iterator[tuple[Span, Any]]:
        """Without samples that are quarantined; a suspected range is divided at its middle."""
        before, start = shard.epoch * self._of.size, shard.span.start
        first, end, left = start - before, shard.span.end - before, self._of.left
        try:
            cuts = sorted({*range(first, end, self.micro_batch), *left.cuts(shard.epoch, first, end)})
            for micro in divided(Micro(first, end), cuts):
                span = Span(before + micro.start, before + micro.end)
                if len(left.within(shard.epoch, micro.start, micro.end)) == micro.end - micro.start:
                    self.work.used(span)  # none of it is left
                    start = span.end
                    continue
                batch = self._of.made(shard.epoch, micro.start, micro.end)
                start = span.end
                yield span, batch
        finally:
            self.work.put_back(Span(start, shard.span.end))


class Leasable(Protocol):
    """An `ElasticDataset`, as far as it is needed here."""

    name: str
    size: int
    epochs: int
    seed: int
    order: str
    chunk: int
    window: int

    left: Left

    @property
    def waits(self) -> bool:
        """May a sample be waited for, as in a stream?"""

    def made(self, epoch: int, start: int, end: int) -> Any:
        """The collated samples at these positions, without those that are left out."""

    def in_work(self, epoch: int, start: int, end: int) -> InWork:
        """The samples at these positions, as the agent is to know them."""


def leased_of(of: Leasable, fingerprint: str, micro_batch: int | None, shard: int | None) -> Leased:
    """The leased half of a dataset."""
    if of.waits:
        raise SpecError(
            "assign", f'"lease" of dataset {of.name!r}: a stream has no size to be divided; leave assign= out'
        )
    batch = 1 if micro_batch is None else micro_batch
    work = LeasedIndices(
        of.name,
        size=of.size,
        epochs=of.epochs,
        seed=of.seed,
        order=of.order,
        chunk=of.chunk,
        window=of.window,
        shard=batch if shard is None else shard,
        fingerprint=fingerprint,
    )
    return Leased(of, work, batch)
