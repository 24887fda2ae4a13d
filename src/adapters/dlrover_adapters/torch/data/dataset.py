"""`ElasticDataset`: samples in a total order, of which every rank takes its own by arithmetic alone, and a position that counts.

    data = ElasticDataset("train", size=len(source), fetch=source.__getitem__, epochs=3, seed=7)
    loader = DataLoader(data, batch_size=None, num_workers=4)

What a loader has drawn does not count. A sample counts when the optimizer step that it is in is made: `ElasticBatch` says so, or
the script, with `ElasticDataset.step`. So the position is that of the model's state, however far loaders have read ahead.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from dlrover_adapters.data.orders import order_of
from dlrover_adapters.data.source import APPEND, REFUSE, Source, as_source, fingerprint_of
from dlrover_adapters.torch import steps as steps_of_rank
from dlrover_core.data.cut import Place, cut_of
from dlrover_core.data.in_work import InWork
from dlrover_core.data.permutation import FILE, SHUFFLED, WINDOW, Order
from dlrover_core.data.quota import KEEP, NO_EPOCH, Batch, Batches, batches
from dlrover_core.data.streams import ENDLESS
from dlrover_core.data.terms import CURSOR, LEASE, SEED_MASK
from dlrover_core.errors import CoreError, SpecError

from . import world
from .constructors import Constructors, Fetched, check_terms
from .leased import MODEL, Leased, check_assignment, leased_of, not_leased
from .noting import Fetching, notes
from .plan import Division, GlobalStep, Micro, division, steps
from .quarantine import LEFT_OUT, QUARANTINE, QUARANTINE_MAX, Left, bound, read, written
from .quotas import QuotaTable
from .source_fetch import SourceFetch, positions_of

_log = logging.getLogger("dlrover.torch")
_SIZE = re.compile(r"size=(\d{1,19}) ")


class DataEnded(CoreError):
    """A step was counted for which there are no samples any more."""


class ElasticDataset(Constructors, IterableDataset[Any]):
    """Iterates over this rank's micro-batches, from its position to the end of the last epoch.

    ``name``: of the dataset, its own in the job. ``size``: samples of an epoch, the same on all ranks. ``fetch``: the sample at
    an index from 0 to ``size`` - 1, called in loader processes; pickled where those are spawned. ``epochs``: how many; 0:
    without end. ``seed``: of the order. ``order``: "shuffled", or "file": as the samples lie. ``chunk``: neighbours that are
    read in a run; ``window``: chunks that are mixed at a time. ``last``: of an epoch's remainder that fills no global batch,
    "keep" makes a shorter batch, and "drop" leaves it out. ``fingerprint``: what the source's content is told by; a checkpoint's
    position in other content is refused. ``collate``: makes a micro-batch of a list of samples; None: as DataLoader does.

    `ElasticDataset.of` takes all of these that a source knows from the source; `Constructors` has ``lines``, ``jsonl``, ``tar``,
    ``parquet``, ``mixed`` and ``packed``, which make the source, too. There ``grown="append"`` takes samples that were
    added at the source's end since a checkpoint: the epoch in flight ends without them, later ones have them.

    ``global_batch``, ``micro_batch``: samples of a step of all ranks, and of a micro-batch; for loops without `ElasticBatch`,
    which says them itself. There all steps must be alike: a multiple of the ranks times ``micro_batch``, and no remainder of an
    epoch, or ``last="drop"``. ``ahead``: global steps that may be drawn in this process before they are counted, by a prefetcher.

    ``poison``: what becomes of a sample at which the same failure ends a worker again and again, under dlrover: "quarantine"
    leaves it out on all ranks, ``quarantine_max`` samples at most; "fail" ends the job with the sample's name.

    ``assign="lease"``: workers that keep their own pace draw ``shard`` samples at a time (None: as many as a micro-batch has),
    under `dlrover-run` alone; fast ones draw more. With ``lineage="server"`` what a worker acknowledges counts, and a worker
    that dies may have used its shard without a word: samples are used at least once. With ``lineage="model"`` it counts what the
    restored model was trained on, exactly once: give the dataset to `FlashCheckpoint`, and call `step`.

    Raises `SpecError` for what cannot be right.
    """

    fixed = True
    """Does a position keep its sample? Not where a plan of this run says which sample it has."""

    def __init__(
        self,
        name: str,
        *,
        size: int,
        fetch: Callable[[int], Any],
        epochs: int = 1,
        seed: int = 0,
        order: str = SHUFFLED,
        chunk: int = 1,
        window: int = WINDOW,
        last: str = KEEP,
        fingerprint: str = "",
        collate: Callable[[list[Any]], Any] | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        ahead: int = 1,
        grown: str = REFUSE,
        poison: str = QUARANTINE,
        quarantine_max: int = QUARANTINE_MAX,
        assign: str = CURSOR,
        lineage: str = MODEL,
        shard: int | None = None,
    ) -> None:
        super().__init__()
        check_terms(name, size, fetch, epochs, ahead)
        self.most = bound(name, poison, quarantine_max)
        unused = {"global_batch": global_batch is not None, "grown": grown != REFUSE, "last": last != KEEP}
        check_assignment(name, assign, lineage, unused)
        if grown not in ((REFUSE, APPEND) if isinstance(fetch, SourceFetch) else (REFUSE,)):
            raise SpecError(
                "grown",
                f'{grown!r} of dataset {name!r}: give "refuse"; "append" where ElasticDataset.of knows a source',
            )
        self.grown, self._in_flight = grown, NO_EPOCH
        self.name, self.size, self.epochs, self.seed, self.order = name, size, epochs, seed, order
        self.chunk, self.window, self.last, self.source, self.ahead = chunk, window, last, fingerprint, ahead
        self._fetch, self._collate = fetch, collate or default_collate
        self._order = order_of(size, seed, 0, chunk=chunk, window=window, order=order)
        self._fingerprint = positions_of(self, size, fingerprint)
        self._fingerprint_in_flight = ""
        batches(size, 1, epochs=epochs, last=last)
        self._asked = (global_batch, micro_batch)
        self._division: Division | None = None
        self._divides = False
        self._quotas: QuotaTable | None = None
        self.left = Left(name, self._order_of)
        self._epoch = self._position = 0
        self._begun = False
        self._iterated_in = -1
        cut_of([Place(name, 0, 0, self._fingerprint)])
        self._leased = leased_of(self, self._fingerprint, micro_batch, shard, lineage) if assign == LEASE else None

    # ---- sources

    @classmethod
    def of(cls, name: str, source: Any, **more: Any) -> ElasticDataset:
        """The samples of a source: of `dlrover_adapters.data`, or anything with a length and items by index.

        The source says its size, its fingerprint, and in which runs it is best read. ``more``: as of `ElasticDataset`.
        """
        found = as_source(source)
        for field in ("size", "fetch", "fingerprint"):
            if field in more:
                raise SpecError(field, f"{more[field]!r} of dataset {name!r}: leave it out, the source says it")
        given = {"chunk": getattr(found, "chunk", 1), "window": getattr(found, "window", WINDOW), **more}
        if getattr(found, "fixed_order", False):
            if more.get("order", FILE) != FILE:
                message = f"{more['order']!r} of dataset {name!r}: a mixture has its own order; give mixed(..., order=) instead"
                raise SpecError("order", message)
            given["order"] = FILE
        return cls(name, size=len(found), fetch=SourceFetch(found), fingerprint=fingerprint_of(found), **given)

    def as_source(self) -> Source:
        """The samples by index, as a source of a mixture or of packed rows."""
        if isinstance(self._fetch, SourceFetch):
            return self._fetch.source
        return Fetched(self.size, self._fetch, self.source)

    # ---- the position

    @property
    def place(self) -> Place:
        """What all ranks together have consumed: all epochs before, and of this one the positions before the position."""
        if self._leased is not None:
            raise not_leased(
                self.name, "it has no position that a checkpoint could have: what workers acknowledge counts"
            )
        before = self._epoch == self._in_flight[0]
        return Place(
            self.name, self._epoch, self._position, self._fingerprint_in_flight if before else self._fingerprint
        )

    @property
    def terms(self) -> tuple[str, int, int, str, str, int, int, str, str]:
        """As `dlrover_core.job.shards.Terms` has it in the job's log; a global batch of 0: not known yet."""
        if self._leased is not None:
            return self._leased.work.terms
        batch = self._division.global_batch if self._division is not None else self._asked[0] or 0
        return (
            self.name,
            self.size,
            self.seed & SEED_MASK,
            self.order,
            self._fingerprint,
            self.epochs,
            batch,
            CURSOR,
            self.last,
        )

    @property
    def samples(self) -> int:
        """How many samples all ranks together have consumed: what schedules go by. Of a source that grew, as if it always had."""
        return self._epoch * self.size + self._position

    @property
    def ended(self) -> bool:
        """Is everything consumed?"""
        return bool(self.epochs) and self._epoch >= self.epochs

    @property
    def leased(self) -> Leased | None:
        """Its leases, which are saved with the model; None: a position is, or nothing."""
        return self._leased if self._leased is not None and self._leased.of_model else None

    def step(self) -> None:
        """The next global batch is consumed: call it on all ranks after each optimizer step, and before `FlashCheckpoint.step`.

        With ``assign="lease"``, ``lineage="model"`` all batches that this rank has got are. A step that a GradScaler skips is
        one, too. `ElasticBatch` calls it. Raises `DataEnded`.
        """
        if self.leased is not None:
            self.leased.step()
            return
        batch = self.next_batch
        if batch is None:
            raise DataEnded(
                f"dataset {self.name!r}: a step was counted after the last of {self.epochs} epochs; count each optimizer step "
                "once, or give more epochs="
            )
        self.left.consumed(batch)
        if not self._divides and (here := notes()) is not None:
            here.stepped()
        self._epoch, self._position = self._batches.after(batch)

    def say_skipped(self) -> None:
        """A GradScaler has skipped the step that comes to be counted next: its samples count, and rank 0 says so."""
        batch = self.next_batch
        if batch is not None and self.division.rank == 0:
            _log.warning(
                "the GradScaler skipped a step, as gradients were infinite or no numbers: positions [%d, %d) of epoch %d of "
                "dataset %r count as consumed, and the model has not learnt from them",
                batch.start, batch.end, batch.epoch, self.name,
            )  # fmt: skip

    def begin(self, *, epoch: int = 0, position: int = 0) -> None:
        """Begin here: what a checkpoint that has no position is to be taken for. A checkpoint's own position comes first."""
        if epoch < 0 or not 0 <= position < self.size or (self.epochs and (epoch, position) > (self.epochs, 0)):
            known = (
                f"0 to {self.size - 1}, in epochs 0 to {self.epochs - 1}" if self.epochs else f"0 to {self.size - 1}"
            )
            raise SpecError("position", f"epoch {epoch}, position {position} of dataset {self.name!r}: give {known}")
        self._epoch, self._position, self._begun = epoch, position, True

    def state_dict(self) -> dict[str, Any]:
        """The position, and how often each quarantined sample was left out, for a script's own checkpoint.

        Plain numbers and text, the same on all ranks.
        """
        return {**self.place._asdict(), LEFT_OUT: written(self.left.places)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that `state_dict` gave, at any world size. Raises `SpecError` for one of other data."""
        try:
            place = Place(*(state[field] for field in Place._fields))
            left = read(state.get(LEFT_OUT, ""))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(
                "data", f"{state!r} is no position of dataset {self.name!r}: give what state_dict() returned"
            ) from error
        self.accept(place)
        self.go_on(place)
        self.left.go_on(left)

    def accept(self, place: Place | None) -> str:
        """Can it go on from this place of a checkpoint? None: the checkpoint has none. Returns what is to be said of it.

        Raises `SpecError`.
        """
        if place is None:
            here = f"epoch {self._epoch}, position {self._position}"
            if self._begun:
                return f"the checkpoint has no position of dataset {self.name!r}: it begins at {here}, as begin() said"
            raise SpecError(
                "data",
                f"the checkpoint has no position of dataset {self.name!r}, as it was saved without it: samples would be trained "
                "again or never. Say where to go on, data.begin(epoch=..., position=...), before restore()",
            )
        cut_of([place])
        if place.dataset != self.name:
            raise SpecError("data", f"the position is of dataset {place.dataset!r}, and this one is {self.name!r}")
        if place.fingerprint == self._fingerprint:
            return ""
        before = self._size_before(place.fingerprint)
        if before and self.grown == APPEND:
            return f"dataset {self.name!r} had {before} samples at the checkpoint, and {self.size} now: later epochs have all"
        remedy = (
            f'{self.size - before} samples were added at the end: give grown="append" to take them'
            if before
            else "positions are of other samples. Give the same size, seed, order and source, or another name"
        )
        raise SpecError(
            "data",
            f"the checkpoint's position is in dataset {self.name!r} with {place.fingerprint!r}, and it has "
            f"{self._fingerprint!r} now: {remedy}",
        )

    def _size_before(self, fingerprint: str) -> int:
        """How many samples the source had, if it has only got more since; 0: that is not so."""
        found = _SIZE.match(fingerprint)
        size = int(found[1]) if found else 0
        if not isinstance(self._fetch, SourceFetch) or not 0 < size < self.size:
            return 0
        return size if fingerprint == positions_of(self, size, self._fetch.source.fingerprint_at(size)) else 0

    @property
    def left_out(self) -> tuple[int, ...]:
        """The indices of the samples that are quarantined, ascending: no rank trains on them."""
        return tuple(sorted(self.left.indices))

    @property
    def places(self) -> tuple[Place, ...]:
        """The place in a cut, and of each quarantined sample how often it was left out."""
        return (self.place, *self.left.places)

    def owns(self, name: str) -> bool:
        """Is a place of this name in a cut of this dataset?"""
        return name == self.name or self.left.owns(name)

    def accept_places(self, places: Mapping[str, Place]) -> str:
        """As `accept`, of all places of a cut."""
        return self.accept(places.get(self.name))

    def go_on_places(self, places: Mapping[str, Place]) -> None:
        """As `go_on`, of all places of a cut."""
        self.go_on(places.get(self.name))
        self.left.go_on(places.values())

    @property
    def waits(self) -> bool:
        """May a sample be waited for, as in a stream?"""
        return isinstance(self._fetch, SourceFetch) and bool(getattr(self._fetch.source, "waits", False))

    def size_of(self, epoch: int) -> int:
        """Samples of an epoch: of one that began before the source grew, those that it began with."""
        return self._in_flight[1] if epoch == self._in_flight[0] else self.size

    def go_on(self, place: Place | None) -> None:
        """Go on from this place, which was accepted; None: from where it is."""
        if place is None:
            return
        self._epoch, self._position, self._in_flight = place.epoch, place.position, NO_EPOCH
        if place.position and place.fingerprint != self._fingerprint:
            self._in_flight = place.epoch, self._size_before(place.fingerprint)
            self._fingerprint_in_flight = place.fingerprint

    # ---- iteration

    def divide(self, of: Division, quotas: QuotaTable | None = None) -> None:
        """How global batches are divided from now on. `ElasticBatch` says so before it iterates.

        ``quotas``: which of them are divided otherwise than ``of`` says.
        """
        if self._leased is not None:
            raise not_leased(self.name, "ElasticBatch divides global steps, in which its ranks do not meet")
        self._division, self._divides, self._quotas = of, True, quotas

    @property
    def division(self) -> Division:
        """How global batches are divided. Raises `SpecError` where nobody has said how large they are."""
        if self._leased is not None:
            raise not_leased(self.name, "ranks do not meet in global steps")
        if self._division is not None:
            return self._division
        global_batch, micro_batch = self._asked
        if global_batch is None:
            raise SpecError(
                "global_batch",
                f"dataset {self.name!r} was not told how many samples a step has: iterate over "
                "ElasticBatch(...).over(loader), or give ElasticDataset(..., global_batch=512, micro_batch=16)",
            )
        rank, size = world.of_process()
        division(global_batch, global_batch if micro_batch is None else micro_batch, size, rank)
        found = division(global_batch, global_batch // size if micro_batch is None else micro_batch, size, rank)
        self._check_even(found)
        return found

    def _check_even(self, of: Division) -> None:
        """Raises `SpecError` where steps differ in their micro-batches, as a loop without `ElasticBatch` cannot see that."""
        batch, here = of.global_batch, "and a loop without ElasticBatch cannot see that"
        remedy = "or iterate over ElasticBatch(...).over(loader)"
        if batch % (of.world * of.micro_batch):
            raise SpecError(
                "global_batch",
                f"{batch} of dataset {self.name!r} is no multiple of {of.world} ranks times {of.micro_batch}, the micro_batch: "
                f"micro-batches would differ in size or number, {here}; give a multiple, {remedy}",
            )
        for size in (self.size, self.size_of(self._epoch) - self._position):
            if self.last == KEEP and self.size < ENDLESS and size % batch:
                raise SpecError(
                    "last",
                    f"{self.last!r} of dataset {self.name!r}: the last step of an epoch would have {size % batch} samples, not "
                    f'{batch}, {here}; give last="drop", {remedy}',
                )

    def ask(self, global_batch: int, micro_batch: int) -> None:
        """What a trainer says of its batches, where the dataset was not told: as ``global_batch`` and ``micro_batch``."""
        if self._asked[0] is None:
            self._asked = (global_batch, micro_batch)

    def collate_by(self, collate: Callable[[list[Any]], Any]) -> None:
        """What makes a micro-batch of a list of samples, where the dataset was not told: as ``collate``."""
        if self._collate is default_collate:
            self._collate = collate

    @property
    def asked(self) -> bool:
        """Does the dataset know how large a step is?"""
        return self._asked[0] is not None

    @property
    def steps_per_epoch(self) -> int:
        """Global steps of a whole epoch."""
        return self._batches.steps_per_epoch

    @property
    def next_batch(self) -> Batch | None:
        """The positions that the next step takes; None: the data has ended."""
        return self._batches.next(self._epoch, self._position)

    @property
    def _batches(self) -> Batches:
        batch = self.division.global_batch
        return batches(self.size, batch, epochs=self.epochs, last=self.last, in_flight=self._in_flight)

    def steps(self) -> Iterator[GlobalStep]:
        """The global steps from here to the end, as this rank takes them."""
        return map(self._planned, self._whole_steps()) if self.left.any else self._whole_steps()

    def _whole_steps(self) -> Iterator[GlobalStep]:
        """The same with the samples that are left out."""
        quota_at = self._quotas.at if self._quotas is not None else None
        return steps(self._batches, self.division, self._epoch, self._position, quota_at)

    def _planned(self, step: GlobalStep) -> GlobalStep:
        return self.left.planned(step, self.size_of(step.batch.epoch), divides=self._divides)

    def after(self, batch: Batch) -> tuple[int, int]:
        """Epoch and position once this batch is consumed."""
        return self._batches.after(batch)

    def indices(self, batch: Batch, micro: Micro) -> list[int]:
        """The indices of a micro-batch's samples, without those that are left out."""
        return self._indices(batch.epoch, micro.start, micro.end)

    def _indices(self, epoch: int, start: int, end: int) -> list[int]:
        found = list(self._order_of(epoch).indices(start, end))
        for position in reversed(self.left.within(epoch, start, end)):
            del found[position - start]
        return found

    def trained(self, batch: Batch, start: int, end: int) -> int:
        """Samples of these positions of a batch's epoch that are not left out."""
        return end - start - len(self.left.within(batch.epoch, start, end))

    def note(self, step: GlobalStep) -> None:
        """Have the agent know that this rank's share of a step is in work, in a loop without `ElasticBatch`, which says more."""
        here = notes() if self.fixed and not self._divides and step.micros[0].counts else None
        if here is not None:
            here.step(self.in_work(step.batch.epoch, step.micros[0].start, step.micros[-1].end))

    def in_work(self, epoch: int, start: int, end: int) -> InWork:
        """The samples at these positions, as the agent is to know them while they are in a step."""
        out = set(self.left.within(epoch, start, end))
        kept = [at for at in range(start, end) if at not in out] if out else [start, end - 1]
        index = self._order_of(epoch).index(kept[0]) if kept[0] == kept[-1] else -1
        return InWork(self.name, epoch, kept[0], kept[-1] + 1, index, self.most, False)

    def __iter__(self) -> Iterator[Any]:
        """Collated micro-batches of this rank, in order; in a loader process every n-th of them."""
        loader = get_worker_info()
        if self._leased is not None:
            return self._leased.here() if loader is None else self._leased.in_loader()
        if loader is None:
            return self._drawn_here()
        again, self._iterated_in = self._iterated_in == os.getpid(), os.getpid()
        return self._loaded(loader.id, loader.num_workers, again=again)

    def over(self, loader: Iterable[Any], *, pauses: bool = False) -> Iterator[Any]:
        """With ``assign="lease"``: the batches of a DataLoader with processes; each counts when the next one is asked for.

        ``pauses``: None comes while there is nothing to draw, for ranks that meet: others may hold the last samples.
        """
        if self._leased is None:
            raise SpecError(
                "assign", f"dataset {self.name!r} is not leased: iterate over ElasticBatch(...).over(loader)"
            )
        return self._leased.over(loader, pauses=pauses)

    def done(self) -> None:
        """With ``assign="lease"``: say now that all batches were used, this one too, as before a long pause or a ``break``."""
        if self._leased is None:
            raise SpecError("assign", f"dataset {self.name!r} is not leased: count steps with step()")
        self._leased.done()

    def _loaded(self, first: int, every: int, *, again: bool) -> Iterator[Any]:
        if again:  # said with the first draw: an error before that ends the process without a word
            raise SpecError(
                "persistent_workers",
                "True: loader processes do not hear where the next iteration begins; give False, or iterate once over all epochs",
            )
        number = 0
        for step in self.steps():
            for micro in step.micros:
                if number % every == first:
                    yield self._content(step.batch, micro)
                number += 1

    def _drawn_here(self) -> Iterator[Any]:
        ahead: list[tuple[int, int]] = []
        for step in self.steps():
            here = (self._epoch, self._position)
            ahead = [one for one in ahead if one >= here]
            if len(ahead) > self.ahead:
                raise CoreError(
                    f"dataset {self.name!r}: {len(ahead)} global steps were drawn, and none of them was counted. Call "
                    "data.step() after each optimizer step, or iterate over ElasticBatch(...).over(loader); if a prefetcher "
                    f"draws so far ahead, give ElasticDataset(..., ahead={len(ahead)})"
                )
            ahead.append((step.batch.epoch, step.batch.start))
            self.note(step)
            for micro in step.micros:
                yield self._content(step.batch, micro)

    def _content(self, batch: Batch, micro: Micro) -> Any:
        return self.made(batch.epoch, micro.start, micro.end)

    def made(self, epoch: int, start: int, end: int) -> Any:
        """The collated samples at these positions, without those that are left out."""
        fetch = self._fetch.of_epoch(epoch) if isinstance(self._fetch, SourceFetch) else self._fetch
        fetching = Fetching(self.name, epoch, self.most, notes())
        at, to, index = start, end, -1
        try:
            samples = []
            out = self.left.within(epoch, start, end)
            positions = (one for one in range(start, end) if one not in out)
            for at, index in zip(positions, self._indices(epoch, start, end), strict=True):
                fetching.begin(at, to := at + 1, index)
                samples.append(self._sample(fetch, index))
            fetching.begin(at := start, to := end, index := -1)
            content = self._collate(samples)
        except Exception as error:
            fetching.failed(at, to, index, error)
            raise
        fetching.end()
        return content

    def _sample(self, fetch: Callable[[int], Any], index: int) -> Any:
        found = fetch(index)
        if found is None:
            raise SpecError(
                "fetch",
                f"None for index {index} of dataset {self.name!r}: return the sample, or raise what is wrong with it; a sample "
                "is never left out in silence",
            )
        return found

    def _order_of(self, epoch: int) -> Order:
        size = self.size_of(epoch)
        found = self._order  # a thread that draws ahead may be in another epoch, and put its own there
        if (found.epoch, found.size) != (epoch, size):
            found = order_of(size, self.seed, epoch, chunk=self.chunk, window=self.window, order=self.order)
            self._order = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For a loader process, which belongs to no world: with the division, if it is known."""
        told = dict(self.__dict__)
        if self._leased is None and (self._division is not None or self._asked[0] is not None):
            told["_division"] = self.division
        return told | {"_page": steps_of_rank.handed()}

    def __setstate__(self, told: dict[str, Any]) -> None:
        """In a loader process, which may be spawned: with its worker's page."""
        steps_of_rank.adopt(told.pop("_page", None))
        self.__dict__.update(told)
