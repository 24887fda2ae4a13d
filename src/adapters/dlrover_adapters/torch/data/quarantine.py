"""The samples of a dataset that its ranks leave out, and the ranges at whose middle they divide their micro-batches."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from dlrover_core.data.cut import Place
from dlrover_core.data.permutation import Order
from dlrover_core.data.poison import MARK, QUARANTINED_MAX, VARIABLE, heard, place_of_sample, sample_of
from dlrover_core.data.quota import Batch
from dlrover_core.errors import SpecError

from .plan import GlobalStep, Micro

QUARANTINE, FAIL = "quarantine", "fail"
LEFT_OUT = "left_out"
"""The entry of a script's own checkpoint that says how often each quarantined sample was left out."""
QUARANTINE_MAX = 8
"""By default so many samples of a dataset may be left out. A poison sample is an accident; more of them are damaged data or an
error of the program, which nobody should train past. Each costs two restarts or more, so the number bounds those, too."""


class Left:
    """What is left out of one dataset, and how often each sample was: told by the agent, and by the cut that was restored.

    ``order``: the order of an epoch.
    """

    def __init__(self, dataset: str, order: Callable[[int], Order]) -> None:
        told = heard(os.environ.get(VARIABLE, ""), dataset)
        self._dataset, self._order = dataset, order
        self._told, self._suspected = frozenset(told.left_out), told.suspected
        self._times: dict[int, int] = {}
        self._at: tuple[int, int, tuple[int, ...]] = (-1, 0, ())

    @property
    def indices(self) -> frozenset[int]:
        """The indices of the samples that are left out."""
        return self._told.union(self._times)

    @property
    def any(self) -> bool:
        """Does anything differ from a dataset of which all is well?"""
        return bool(self._told or self._times or self._suspected)

    def positions(self, epoch: int) -> tuple[int, ...]:
        """Where the samples that are left out stand in an epoch, ascending."""
        indices = self.indices
        if not indices:
            return ()
        order = self._order(epoch)
        at, key = self._at, (epoch, hash((indices, order.size)))  # another thread may be in another epoch
        if at[:2] != key:
            at = *key, tuple(sorted(order.position(index) for index in indices if index < order.size))
            self._at = at
        return at[2]

    def within(self, epoch: int, start: int, end: int) -> tuple[int, ...]:
        """Those from ``start`` to ``end``, exclusive."""
        found = self.positions(epoch)
        return found[bisect_left(found, start) : bisect_left(found, end)]

    def consumed(self, batch: Batch) -> None:
        """A batch is consumed, without its samples that are left out."""
        for position in self.within(batch.epoch, batch.start, batch.end):
            index = self._order(batch.epoch).index(position)
            self._times[index] = self._times.get(index, 0) + 1

    # ---- in a cut

    @property
    def places(self) -> Iterator[Place]:
        """How often each sample was left out."""
        return (place_of_sample(self._dataset, index, times) for index, times in sorted(self._times.items()))

    def owns(self, name: str) -> bool:
        """Is a place of this name one of its samples'?"""
        return name.startswith(self._dataset + MARK) and sample_of(name) is not None

    def go_on(self, places: Iterable[Place]) -> None:
        """Go on from what a cut says."""
        samples = ((sample_of(one.dataset), one.position) for one in places if self.owns(one.dataset))
        self._times = {sample[1]: times for sample, times in samples if sample is not None}

    # ---- in the plan

    def planned(self, step: GlobalStep, size: int, *, divides: bool) -> GlobalStep:
        """A rank's step without what is left out. ``divides``: ranks may run micro-batches of any number and size.

        Raises `SpecError` where nothing is left of a micro-batch of a loop that counts them.
        """
        batch = step.batch
        cuts = self.cuts(batch.epoch, batch.start, batch.end) if divides else ()
        if not cuts and not self.positions(batch.epoch):
            return step
        micros = [piece for micro in step.micros for piece in (divided(micro, cuts) if micro.counts else (micro,))]
        found = tuple(self._healthy(batch, one, size, divides=divides) for one in micros)
        return GlobalStep(batch, found, step.rounds + len(cuts))

    def cuts(self, epoch: int, start: int, end: int) -> tuple[int, ...]:
        """The positions within before which a micro-batch begins: the ends and the middle of each suspected range."""
        ranges = [(first, to) for of, first, to in self._suspected if of == epoch]
        found = {cut for first, to in ranges for cut in (first, (first + to) // 2, to) if start < cut < end}
        return tuple(sorted(found))

    def _healthy(self, batch: Batch, micro: Micro, size: int, *, divides: bool) -> Micro:
        """The micro-batch, or where nothing is left of it a stand-in of weight zero."""
        if len(self.within(batch.epoch, micro.start, micro.end)) < micro.end - micro.start:
            return micro
        if not divides and micro.counts:
            raise SpecError(
                "micro_batch",
                f"all samples of a micro-batch of dataset {self._dataset!r} are quarantined (positions {micro.start} to "
                f"{micro.end} exclusive of epoch {batch.epoch}), and a loop without ElasticBatch cannot leave the micro-batch "
                "out: give a larger micro_batch, or use ElasticBatch",
            )
        poison = set(self.positions(batch.epoch))
        stands = next((at % size for at in range(batch.start, batch.start + size) if at % size not in poison), None)
        if stands is None:
            raise SpecError("size", f"all {size} samples of dataset {self._dataset!r} are quarantined: mend the data")
        return Micro(stands, stands + 1, counts=False)


def written(places: Iterable[Place]) -> str:
    """The counts of `Left.places` as one text of JSON; an empty text if there are none.

    It is one text because torch.distributed.checkpoint fills only entries that the new state has already.
    """
    times = {one.dataset: one.position for one in places}
    return json.dumps(times) if times else ""


def read(text: str) -> list[Place]:
    """The places that `written` wrote. Raises ValueError, TypeError or AttributeError for another text."""
    return [Place(name, 0, int(times)) for name, times in json.loads(text).items()] if text else []


def divided(micro: Micro, cuts: Iterable[int]) -> Iterator[Micro]:
    """The pieces of a micro-batch that begin at these positions, ascending."""
    start = micro.start
    for cut in cuts:
        if start < cut < micro.end:
            yield Micro(start, cut)
            start = cut
    yield Micro(start, micro.end)


def bound(dataset: str, poison: str, most: int) -> int:
    """How many samples may be left out. Raises `SpecError`."""
    if poison not in (QUARANTINE, FAIL):
        raise SpecError("poison", f'{poison!r} of dataset {dataset!r}: give "{QUARANTINE}" or "{FAIL}"')
    given: object = most
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= QUARANTINED_MAX:
        raise SpecError(
            "quarantine_max",
            f'{most!r} of dataset {dataset!r}: give 1 to {QUARANTINED_MAX} samples, or poison="{FAIL}"',
        )
    if sample_of(dataset) is not None:
        raise SpecError("name", f"{dataset!r} is how a sample of another dataset is called: give another name")
    return most if poison == QUARANTINE else 0
