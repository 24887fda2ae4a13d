"""Reads samples in the order of an epoch. What a training loop needs of source and order, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dlrover_adapters.data.orders import order_of
from dlrover_adapters.data.source import REFUSE, Source, resumed_size
from dlrover_core.data.cut import Place
from dlrover_core.data.permutation import FILE, SHUFFLED, WINDOW, Order
from dlrover_core.data.quota import KEEP, NO_EPOCH, Batches, batches
from dlrover_core.errors import SpecError


class Reader:
    """The samples of ``source``, in the order that ``seed`` chooses for each epoch.

    name: of the dataset, in its places. chunk, window: as of `Order`; 0: as the source says.
    """

    def __init__(
        self,
        source: Source,
        name: str = "data",
        *,
        seed: int = 0,
        order: str = SHUFFLED,
        chunk: int = 0,
        window: int = 0,
    ) -> None:
        """Raises: SpecError where a number is out of bounds, or ``order`` is unknown."""
        if chunk < 0 or window < 0:
            field, value = ("chunk", chunk) if chunk < 0 else ("window", window)
            raise SpecError(field, f"{value}: give 1 or more, or 0 for the source's own")
        self.source, self.name, self.seed = source, name, seed
        self.order = FILE if getattr(source, "fixed_order", False) else order
        self.chunk = chunk or int(getattr(source, "chunk", 1))
        self.window = window or int(getattr(source, "window", WINDOW))
        self.in_flight = NO_EPOCH
        """An epoch that began before the source grew, and its samples."""
        self._order = self._made(0)
        self._source = self._of(0)

    def _made(self, epoch: int) -> Order:
        size = self.size_of(epoch)
        return order_of(size, self.seed, epoch, chunk=self.chunk, window=self.window, order=self.order)

    def size_of(self, epoch: int) -> int:
        """Samples of an epoch."""
        return self.in_flight[1] if epoch == self.in_flight[0] else len(self.source)

    def batches(self, batch: int, *, epochs: int = 1, last: str = KEEP) -> Batches:
        """The global batches of ``epochs`` epochs. Raises: SpecError as `dlrover_core.data.quota.batches`."""
        return batches(len(self.source), batch, epochs=epochs, last=last, in_flight=self.in_flight)

    def place(self, epoch: int, position: int) -> Place:
        """What is to be saved with the state when [0, ``position``) of ``epoch`` is consumed."""
        return Place(self.name, epoch, position, self.source.fingerprint_at(self.size_of(epoch)))

    def resume(self, place: Place, *, grown: str = REFUSE) -> None:
        """Go on from a saved place. ``grown="append"``: samples may have been added at the end; later epochs have them.

        Raises: SpecError where the data are others than those of the place.
        """
        size = resumed_size(place, self.source, grown=grown)
        self.in_flight = (place.epoch, size) if size < len(self.source) else NO_EPOCH
        self._order, self._source = self._made(place.epoch), self._of(place.epoch)

    def _of(self, epoch: int) -> Source:
        found: Source = self.source.of_epoch(epoch) if hasattr(self.source, "of_epoch") else self.source
        return found

    def _turn_to(self, epoch: int) -> None:
        if self._order.epoch != epoch:
            self._order, self._source = self._made(epoch), self._of(epoch)

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """The indices, in the source, of the samples at the positions [``start``, ``stop``) of ``epoch``."""
        self._turn_to(epoch)
        return list(self._order.indices(start, stop))

    def samples(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """The samples at these positions, one after the other.

        Raises: SpecError where the source gives None for a sample.
        """
        for index in self.indices(epoch, start, stop):
            yield self.sample(index)

    def sample(self, index: int) -> Any:
        """The sample with this index, of the epoch that was asked for last."""
        found = self._source[index]
        if found is None:
            raise SpecError(
                "fetch", f"None for sample {index}: return a sample, or raise an error that says why there is none"
            )
        return found
