"""Iterating over leased samples: in the script's own process, and in loader processes.

A loader process reads ahead, so a batch that it has made is not used yet. It sends each batch with its positions, and
`ElasticDataset.over` acknowledges them in the script's process once the next batch is asked for. With ``lineage="model"`` the
script's process takes a batch before it hands it to the loop, so that it is this rank's whatever becomes of the loader process;
it counts as trained once `ElasticDataset.step` says so. A loader process that has
nothing to draw says so instead of waiting: the loader takes batches of its processes in turn, and those of the others must not
wait behind it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from dlrover_adapters.data.index_file import say
from dlrover_adapters.data.leases import TOLD_S, LeasedIndices, Shard, Wait
from dlrover_core.data.in_work import InWork
from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.data.terms import CURSOR, LEASE, MODEL_LEASE
from dlrover_core.data.trained import Trained
from dlrover_core.errors import SpecError

from .noting import notes
from .plan import Micro
from .quarantine import Left, divided

MODEL, SERVER = "model", "server"
JOINED = 256
"""So many ranges are collected before they are joined."""
IDLE_S = 0.05
"""A loader process without samples says so after this time."""


@dataclasses.dataclass(slots=True)
class Rest:
    """The samples of a shard that a loop has taken and not yielded yet.

    start: its first position
    end:   the position behind its last one
    ours:  whether the loop still has them; False: another loop has taken them over
    pid:   the process of the loop; in a forked process, that of its parent
    """

    start: int
    end: int
    ours: bool = True
    pid: int = dataclasses.field(default_factory=os.getpid)


class Lent(NamedTuple):
    """A batch of a loader process, by its session; ``end`` 0: it had nothing to draw, for the reason in ``content``."""

    content: Any
    start: int
    end: int
    session: int = 0


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
        self._counted, self._pauses, self._iterated_in = False, False, -1
        self.of_model = work.terms.assignment == MODEL_LEASE
        self._base: Ranges | None = None
        self._taken: list[Span] = []
        self._trained: list[Span] = []
        self._stepped = False
        self._rest: Rest | None = None

    def here(self) -> Iterator[Any]:
        """Batches; each is used when the next one is asked for, in this loop or in another.

        A loop that draws takes over the samples that another loop has taken and not yielded. Otherwise a loop that stands still
        would keep the data from ending.
        """
        self._begun()
        while True:
            self._count_current()
            self._take_over()
            shard = self.work.draw(IDLE_S) if self._pauses else self.work.waited()
            if shard is None:
                return
            if isinstance(shard, Wait):
                yield None
                continue
            for span, batch in self._batches(shard):
                if self.of_model:
                    self.work.used(span)
                    self.work.done()
                self._works(span)
                yield batch
                self._count_current()

    def _take_over(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self._put_back(rest)

    def _put_back(self, rest: Rest) -> None:
        if rest.ours and rest.pid == os.getpid():
            self.work.put_back(Span(rest.start, rest.end))
        rest.ours = False

    def done(self) -> None:
        """Say now what was used, the present batch too."""
        self._count_current()
        self.work.done()

    def _works(self, span: Span) -> None:
        """The script has this batch now."""
        self._current, here = span, notes()
        if self.of_model:
            self._taken.append(span)
        if here is not None:
            epoch, start = divmod(span.start, self._of.size)
            here.step(self._of.in_work(epoch, start, start + span.end - span.start))

    def _count_current(self) -> None:
        span, self._current = self._current, None
        if span is not None:
            if not self.of_model:
                self.work.used(span)
            if (here := notes()) is not None:
                here.stepped()

    # ---- with a model that is restored

    def step(self) -> None:
        """All batches that the script has got are in the model now."""
        self._stepped = True
        self._trained += self._taken
        self._taken.clear()
        if len(self._trained) > JOINED:
            self._trained = list(Ranges(self._trained))

    @property
    def trained(self) -> Trained:
        """What this rank was trained on; of rank 0, with what its generation resumed from. Raises `SpecError`."""
        if self._taken and not self._stepped:
            raise SpecError(
                "data",
                f"dataset {self.work.terms.name!r}: batches were taken, and data.step() was never called: call it on each rank "
                "after each optimizer step, before FlashCheckpoint.step, as it says what the model was trained on",
            )
        self._trained = list(Ranges(self._trained))
        spans = Ranges(self._trained) | (self._base or Ranges())
        return Trained(self.work.terms.name, self.work.terms.fingerprint, spans)

    def accept(self, spans: Trained | None) -> None:
        """Can it go on from this? None: the checkpoint does not say what it was trained on. Raises `SpecError`."""
        terms = self.work.terms
        if spans is None:
            raise SpecError(
                "data",
                f"the checkpoint does not say on which samples of dataset {terms.name!r} it was trained, as it was saved without "
                "it: samples would be trained again or never. Begin anew, under another URL",
            )
        if spans.fingerprint != terms.fingerprint or (terms.epochs and spans.spans.last >= terms.size * terms.epochs):
            raise SpecError(
                "data",
                f"the checkpoint was trained on dataset {terms.name!r} with {spans.fingerprint!r}, up to position "
                f"{spans.spans.last} over all epochs; it has {terms.fingerprint!r} and {terms.epochs} epochs now: give the same "
                "size, seed, order, source and epochs, or another name",
            )

    def go_on(self, state: tuple[int, int], spans: Ranges, *, first: bool) -> None:
        """Go on from a state that was trained on ``spans``. ``first``: this is rank 0, which tells the leader."""
        if self._base is not None and (self._taken or self._trained):
            raise SpecError(
                "data",
                f"dataset {self.work.terms.name!r}: restore() came after batches were taken, and leases begin anew with a "
                "generation alone: restore once, before the first batch",
            )
        self.work.restored(*state, spans if first else None)
        self._base = spans if first else Ranges()

    def _begun(self) -> None:
        if self.of_model and self._base is None:
            raise SpecError(
                "lineage",
                f'"model" of dataset {self.work.terms.name!r}: nobody has said what the model was trained on. Give it to '
                'FlashCheckpoint(data=...) and call restore() before the first batch, or give lineage="server"',
            )

    # ---- in loader processes

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
        self._begun()
        session = self.work.session if self.of_model else 0
        while True:
            shard = self.work.draw(IDLE_S)
            if shard is None:
                return
            if isinstance(shard, Wait):
                yield Lent(shard.why, 0, 0)
                continue
            for span, batch in self._batches(shard):
                yield Lent(batch, *span, session)

    def over(self, loader: Iterable[Any], *, pauses: bool) -> Iterator[Any]:
        """The batches of a loader; each is used when the next one is asked for, in this loop or in another.

        ``pauses``: None comes while there is nothing to draw.
        """
        self._begun()
        self._pauses = pauses
        self._counted = True
        self.done()
        self._take_over()
        if getattr(loader, "num_workers", None) != 0:
            self.work.give_back()  # loader processes cannot use what an earlier loop has in hand here
        began = told = time.monotonic()
        for one in loader:
            if not isinstance(one, Lent):  # made in this process, by `here`
                yield one
                continue
            if one.end:
                span = Span(int(one.start), int(one.end))
                if self.of_model and not self.work.claim(span, int(one.session)):
                    say(f"dataset {self.work.terms.name!r}: a loader process is gone, and others use what it had drawn")
                    continue
                self._works(span)
                yield one.content
                self.done()
                began = told = time.monotonic()
            elif pauses:
                yield None
            elif time.monotonic() - told >= TOLD_S:
                told = time.monotonic()
                say(f"dataset {self.work.terms.name!r}: {told - began:.0f} s waited for samples: {one.content}")

    def _batches(self, shard: Shard) -> Iterator[tuple[Span, Any]]:
        """Without samples that are quarantined; a suspected range is divided at its middle."""
        before = shard.epoch * self._of.size
        first, end, left = shard.span.start - before, shard.span.end - before, self._of.left
        rest = self._rest = Rest(*shard.span)
        try:
            cuts = sorted({*range(first, end, self.micro_batch), *left.cuts(shard.epoch, first, end)})
            for micro in divided(Micro(first, end), cuts):
                span = Span(before + micro.start, before + micro.end)
                if len(left.within(shard.epoch, micro.start, micro.end)) == micro.end - micro.start:
                    self.work.used(span)  # none of it is left
                    rest.start = span.end
                    continue
                batch = self._of.made(shard.epoch, micro.start, micro.end)
                rest.start = span.end
                yield span, batch
                if not rest.ours:
                    return
        finally:
            self._put_back(rest)  # not in a forked process, which ends copies of its parent's loops


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


def leased_of(of: Leasable, fingerprint: str, micro_batch: int | None, shard: int | None, lineage: str) -> Leased:
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
        assignment=MODEL_LEASE if lineage == MODEL else LEASE,
    )
    return Leased(of, work, batch)
