"""`ElasticStream`: trains on a stream with any number of partitions, whose offsets are saved with the state.

    data = ElasticStream("kafka://broker:9092/clicks", parse=json.loads)

Rank 0 plans batches of what can be read, and tells all ranks. So all ranks have one order, and the offsets after each batch are
the same on every rank.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.utils.data import get_worker_info

from dlrover_adapters.data.folder_stream import FolderStream
from dlrover_adapters.data.following import TOLD_S, WAIT_S, announced
from dlrover_adapters.data.kafka import HOLES, SCHEME, KafkaStream
from dlrover_adapters.data.stream_plan import Book, Counts, Holes, divided
from dlrover_core.data.cut import Place, cut_of
from dlrover_core.data.permutation import FILE
from dlrover_core.data.poison import sample_of
from dlrover_core.data.quota import Batch
from dlrover_core.data.streams import (
    ENDLESS,
    Extent,
    Holed,
    OffsetAhead,
    OffsetGone,
    Stream,
    StreamError,
    StreamUnavailable,
    UnknownPartition,
)
from dlrover_core.data.terms import CURSOR
from dlrover_core.errors import CoreError, SpecError

from . import world
from .dataset import ElasticDataset
from .noting import Fetching, notes
from .plan import Division, GlobalStep, Micro
from .quarantine import QUARANTINE, QUARANTINE_MAX
from .quotas import QuotaTable
from .stream_left import SEPARATOR, StreamLeft

_log = logging.getLogger("dlrover.torch")
PARTITIONS_MAX = 62
"""A cut has room for so many, beside quarantined samples."""
PLANNED_MAX = 64
"""So many batches are planned at once, where there are so many messages."""
COMMIT_S = 5.0
"""Consumed offsets are told to the broker so often at most, where no checkpoint says what is consumed for good."""
FIRST, END = "first", "end"
REFUSE, SKIP = "refuse", "skip"
SKIP_IT = f'give lost="{SKIP}" to do so'
_T = TypeVar("_T")


class ElasticStream(ElasticDataset):
    """Iterates over this rank's micro-batches of a stream, without end.

    ``stream``: an address, ``kafka://host:port/topic`` or ``folder:///path``, or a `dlrover_core.data.streams.Stream`. ``name``:
    of the dataset; empty: the last part of the stream's name. ``parse``: makes a sample of a message's value; None: the value,
    which is bytes of Kafka. ``begin``: where partitions begin that no checkpoint knows, "first" or "end". ``lost``: messages that
    were removed before they were consumed, and partitions that are gone, end training ("refuse"), or are left out with a warning
    ("skip"). ``config``: the Kafka client's settings. ``poison``, ``quarantine_max``: as of `ElasticDataset`, for messages at
    which ``parse`` raises, and for each partition. ``assign``: "cursor" alone. All others as of `ElasticDataset`.

    Give the loader ``num_workers=0``: the client fetches ahead in threads of its own. Raises `SpecError`, `StreamError`.
    """

    fixed = False
    by_storage = False
    """Does a checkpoint call `stored`?"""

    def __init__(
        self,
        stream: str | Stream,
        *,
        name: str = "",
        parse: Callable[[Any], Any] | None = None,
        begin: str = FIRST,
        lost: str = REFUSE,
        config: Mapping[str, Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        ahead: int = 1,
        poison: str = QUARANTINE,
        quarantine_max: int = QUARANTINE_MAX,
        assign: str = CURSOR,
    ) -> None:
        if assign != CURSOR:
            raise SpecError(
                "assign",
                f"{assign!r}: a stream has no size to divide into leases, and its ranks consume it in common steps; leave "
                "assign= out, or lease a dataset of files that are finished",
            )
        for field, value, known in (("begin", begin, (FIRST, END)), ("lost", lost, (REFUSE, SKIP))):
            if value not in known:
                raise SpecError(field, f"{value!r}: give {' or '.join(map(repr, known))}")
        self.stream = _opened(stream, config)
        name = name or self.stream.name.rstrip("/").rpartition("/")[2]
        self._book = Book(0, {})
        self._parse, self._begin_at, self._lost = parse, begin, lost
        self._told_at = 0.0
        self._without: set[str] = set()
        self._failed: CoreError | None = None
        self._divided: tuple[tuple[int, int], Division] | None = None
        super().__init__(
            name,
            size=ENDLESS,
            fetch=self._never,
            epochs=1,
            order=FILE,
            fingerprint=self.stream.fingerprint,
            collate=collate,
            global_batch=global_batch,
            micro_batch=micro_batch,
            ahead=ahead,
            poison=poison,
            quarantine_max=quarantine_max,
        )
        self._stream_left = self.left = StreamLeft(self.name, self._order_of, self._planned_now)
        self._noted = False

    def _never(self, index: int) -> Any:
        raise CoreError(f"message {index} of dataset {self.name!r} has no place of its own: iterate over the dataset")

    def _planned_now(self) -> Book:
        """A method, as a lambda could not be pickled, and a loader process that is spawned could not say what is wrong."""
        return self._book

    # ---- the position

    @property
    def offsets(self) -> dict[str, int]:
        """Of each partition, the first message that is not consumed. Empty: nothing is planned yet."""
        return dict(self._book.offsets)

    @property
    def places(self) -> tuple[Place, ...]:
        """The number of messages that are consumed, the offset of each partition, and which messages were left out."""
        parts = (Place(f"{self.name}{SEPARATOR}{one}", 0, offset) for one, offset in self._book.offsets.items())
        return cut_of((self.place, *parts, *self.left.places))

    def accept_places(self, places: Mapping[str, Place]) -> str:
        """As `ElasticDataset.accept`, of all places of a cut. Raises `SpecError`."""
        own = places.get(self.name)
        told = self.accept(own)
        if own is not None and own.position and not any(self.owns(one) and one != self.name for one in places):
            raise SpecError(
                "data",
                f"the checkpoint has a position of dataset {self.name!r}, and no offsets of its partitions: it was saved of a "
                "dataset that was no ElasticStream; give that one, or another name",
            )
        return told

    def owns(self, name: str) -> bool:
        """Is a place of this name in a cut of this dataset?"""
        return name == self.name or name.startswith(self.name + SEPARATOR)

    def go_on_places(self, places: Mapping[str, Place]) -> None:
        """Go on from what of these places is of this dataset."""
        own = places.get(self.name)
        self.go_on(own)
        self.left.go_on(places.values())
        if own is not None:
            self._book = Book(own.position, self._offsets_of(places))

    def _offsets_of(self, places: Mapping[str, Place]) -> dict[str, int]:
        """The offset of each partition in a cut."""
        before = len(self.name + SEPARATOR)
        return {
            name[before:]: one.position
            for name, one in places.items()
            if self.owns(name) and name != self.name and sample_of(name) is None
        }

    def begin(self, *, epoch: int = 0, position: int = 0) -> None:
        """Begin without a position of a checkpoint: as ``begin=`` says. Only at 0."""
        if epoch or position:
            raise SpecError(
                "position",
                f"epoch {epoch}, position {position} of dataset {self.name!r}: a stream begins where begin= says; give none",
            )
        super().begin()

    def state_dict(self) -> dict[str, Any]:
        """As of `ElasticDataset.state_dict`, with the offset of each partition."""
        # One text, as torch.distributed.checkpoint restores only the entries that the state to be filled has already.
        return {**super().state_dict(), "offsets": json.dumps(self.offsets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Raises `SpecError`."""
        try:
            told = state["offsets"]  # as a mapping in checkpoints of older versions
            offsets = {
                str(one): int(offset) for one, offset in (json.loads(told) if isinstance(told, str) else told).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(
                "data", f"{state!r} is no position of stream {self.name!r}: give what state_dict() returned"
            ) from error
        super().load_state_dict(state)
        self._book = Book(self._position, offsets)

    @property
    def division(self) -> Division:
        """As of `ElasticDataset`."""
        if self._division is None:
            here = world.of_process()
            if self._divided is None or self._divided[0] != here:
                self._divided = here, super().division
            return self._divided[1]
        return self._division

    def divide(self, of: Division, quotas: QuotaTable | None = None) -> None:
        """As of `ElasticDataset`. What is planned in batches of another size is planned anew."""
        if self._division is not None and self._division.global_batch != of.global_batch:
            self._book = Book(self._book.position, self._book.offsets)
        super().divide(of, quotas)

    def step(self) -> None:
        """As of `ElasticDataset.step`."""
        self._reach(self._position + self.division.global_batch)
        super().step()
        self._book.consume(self._position)
        now = time.monotonic()
        if now - self._told_at >= COMMIT_S and not self.by_storage:
            self._told_at = now
            self._commit(self._book.offsets)

    def stored(self, places: Mapping[str, Place]) -> None:
        """A checkpoint on storage has consumed up to these places: the broker is told so."""
        if offsets := self._offsets_of(places):
            self._commit(offsets)

    def _commit(self, offsets: Mapping[str, int]) -> None:
        if world.of_process()[0] == 0:
            try:
                self.stream.commit(offsets)
            except StreamError as error:
                _log.warning("offsets were not committed, which changes nothing for this job: %s", error)

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        """Collated micro-batches of this rank, in order."""
        if get_worker_info() is not None:
            return self._refused()
        return super().__iter__()

    def _refused(self) -> Iterator[Any]:
        yield from ()
        raise SpecError(
            "num_workers", f"stream {self.name!r} is read in the process that trains, ahead of it, by threads: give 0"
        )

    def steps(self) -> Iterator[GlobalStep]:
        """The global steps; each waits until all its messages can be read."""
        whole = self._whole_steps()
        while True:
            # A batch is planned before the step that has it is told.
            step = next(whole)
            self._reach(step.batch.end)
            yield self._planned(step) if self.left.any else step

    def indices(self, batch: Batch, micro: Micro) -> list[int]:
        """The positions of a micro-batch's messages, without those that are left out; `messages` says where they are."""
        out = self.left.within(batch.epoch, micro.start, micro.end)
        return [at for at in range(micro.start, micro.end) if at not in out]

    def messages(self, batch: Batch, micro: Micro) -> list[tuple[str, int]]:
        """Partition and offset of each message of a micro-batch. Ask before its step is counted."""
        planned = self._book.batch_at(batch.start)
        return [
            (run.partition, offset)
            for run in planned.pieces(micro.start, micro.end)
            for offset in range(run.offset, run.offset + run.many)
            if offset not in self._stream_left.of(run.partition)
        ]

    def _content(self, batch: Batch, micro: Micro) -> Any:
        values: list[Any] = []
        for run in self._book.batch_at(batch.start).pieces(micro.start, micro.end):
            found = self._read(run.partition, run.offset, run.many)
            offsets: Sequence[int] = range(run.offset, run.offset + run.many)
            if out := self._stream_left.of(run.partition):
                offsets = [at for at in offsets if at not in out]
                found = [found[at - run.offset] for at in offsets]
            values += found if self._parse is None else self._parsed(run.partition, offsets, found)
        # `None in values` would compare samples, which arrays do element by element.
        missing = next((at for at, one in enumerate(values) if one is None), None)
        if missing is not None:
            partition, offset = self.messages(batch, micro)[missing]
            raise SpecError(
                "parse",
                f"None for the message at offset {offset} of partition {partition} of stream {self.name!r}: return the sample, "
                "or raise what is wrong with it; none is left out in silence",
            )
        return self._collate(values)

    def _parsed(self, partition: str, offsets: Sequence[int], values: Sequence[Any]) -> list[Any]:
        """The samples of a partition's messages. An exception leaves with the message's name, and the agent knows it, too."""
        assert self._parse is not None
        left = iter(values)
        here = notes() if self._noted else None
        if here is not None:  # of a message before, whose exception the script has outlived
            here.fetched()
        self._noted = False
        try:
            return [self._parse(value) for value in left]
        except Exception as error:
            at, self._noted = offsets[-1 - length_hint(left)], True
            fetching = Fetching(f"{self.name}{SEPARATOR}{partition}", 0, self.most, notes())
            fetching.begin(at, at + 1, at)
            fetching.failed(at, at + 1, at, error)
            raise

    def _read(self, partition: str, offset: int, count: int) -> list[Any]:
        values: list[Any] = []
        waits = _Waits(f"{self.stream.name}, partition {partition}, offset {offset}")
        try:
            while len(values) < count:
                at = offset + len(values)
                values += waits.call(lambda at: self._values(partition, at, count - (at - offset)), at) or ()
        except OffsetGone as gone:
            if self._lost == REFUSE:
                raise StreamError(f"{gone}: {SKIP_IT}") from gone
            raise StreamError(
                f"{gone}. They were removed after their batch had been planned on all ranks; once the ranks have started again, "
                f'they are passed over, as lost="{SKIP}" says'
            ) from gone
        return values

    def _values(self, partition: str, offset: int, most: int) -> list[Any]:
        fast = getattr(self.stream, "values", None)
        if fast is not None:
            found: list[Any] = fast(partition, offset, most, WAIT_S)
            return found
        some = self.stream.read(partition, offset, most, WAIT_S)
        if some and (some[0].offset, some[-1].offset) != (offset, offset + len(some) - 1):
            raise StreamError(
                f"{self.stream.name}, partition {partition}: {HOLES.format(offset, offset + len(some) - 1)}"
            )
        return [one.value for one in some]

    # ---- the plan

    def _reach(self, position: int) -> None:
        """Plan until ``position``, with all ranks. A collective where there are several and more has to be planned."""
        if self._book.end >= position:
            return
        rank, size = world.of_process()
        if size > 1 and not (dist.is_available() and dist.is_initialized()):
            raise SpecError(
                "stream",
                f"torch.distributed is not initialized, and WORLD_SIZE is {size}: rank 0 tells the others which messages are "
                "whose; call torch.distributed.init_process_group() before",
            )
        waits = _Waits(f"{self.stream.name}: {position - self._book.position} messages more")
        while self._book.end < position:
            with announced():
                told = self._told(waits) if rank == 0 else None
                if size > 1:
                    box = [told]
                    dist.broadcast_object_list(box, src=0)
                    told = box[0]
            assert told is not None
            if told.why:
                raise self._failed or StreamError(told.why)
            self._book.add(told.begin, told.batches, told.holes)
            if rank == 0 and told.batches:
                self._warn_of(told)

    def _warn_of(self, told: _Told) -> None:
        """Which messages the batches pass over."""
        for partition, holes in told.holes.items():
            first, end = told.begin.get(partition, 0), self._book.planned_to.get(partition, 0)
            for one in holes:
                if first < one.end and one.first < end:
                    _log.warning("%s", OffsetGone(self.stream.name, partition, max(first, one.first), one.end))

    def _told(self, waits: _Waits) -> _Told:
        batch = self.division.global_batch
        until = time.monotonic() + WAIT_S
        begin = self._book.planned_to
        try:
            while True:
                extents = waits.call(lambda _: self.stream.extents(), 0)
                if extents is not None:
                    begin = self._offsets_in(extents, begin)
                    stream: object = self.stream
                    holes = stream.holes() if self._lost == SKIP and isinstance(stream, Holed) else {}
                    batches = divided(extents, begin, batch, PLANNED_MAX, holes)
                    if batches:
                        return _Told("", begin, batches, holes)
                left = until - time.monotonic()
                if left <= 0 or extents is None:
                    waits.tell()
                    return _Told("", begin, (), {})
                time.sleep(min(left, WAIT_S / 10))  # no broker rings a bell for several partitions
        except (StreamError, SpecError) as error:
            self._failed = error
            return _Told(str(error), {}, (), {})

    def _offsets_in(self, extents: Mapping[str, Extent], begin: Mapping[str, int]) -> dict[str, int]:
        """The offsets from which more can be planned, with partitions that are new. Raises `StreamError`."""
        if len(extents) > PARTITIONS_MAX:
            raise SpecError(
                "stream", f"{self.stream.name} has {len(extents)} partitions: a position has {PARTITIONS_MAX} at most"
            )
        found = dict(begin)
        for one, extent in extents.items():
            offset = found.get(one)
            if offset is None:
                found[one] = extent.end if self._begin_at == END and not begin else extent.first
                if begin:
                    _log.warning(
                        "%s: partition %s is new, and is read from offset %d on", self.stream.name, one, found[one]
                    )
            elif offset > extent.end:
                raise OffsetAhead(self.stream.name, one, offset, extent.end)
            elif offset < extent.first:
                gone = OffsetGone(self.stream.name, one, offset, extent.first)
                if self._lost == REFUSE:
                    raise StreamError(f"{gone}: {SKIP_IT}")
                _log.warning("%s", gone)
                found[one] = extent.first
        for one in sorted(found.keys() - extents.keys()):
            message = f"{self.stream.name}: partition {one} is gone; it was consumed up to offset {found[one]}"
            if self._lost == REFUSE:
                raise UnknownPartition(
                    f'{message}: give the stream of the checkpoint, or lost="skip" to go on without it'
                )
            if one not in self._without:
                self._without.add(one)
                _log.warning("%s", message)
        return found


class _Told(NamedTuple):
    """What rank 0 tells all.

    why:     it cannot go on; empty: it can
    begin:   offsets
    batches: from there on; none: they are to wait
    holes:   what the batches pass over
    """

    why: str
    begin: Mapping[str, int]
    batches: Sequence[Counts]
    holes: Holes


class _Waits:
    """Calls that are made again while the stream cannot be reached, and what is said meanwhile."""

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()
        self._said = self._began
        self._why = ""

    def call(self, of: Callable[[int], _T], at: int) -> _T | None:
        """None: it cannot be reached now."""
        try:
            with announced():
                found = of(at)
            if not found:
                self.tell()
        except StreamUnavailable as error:
            self._why = str(error)
            self.tell()
            time.sleep(WAIT_S / 10)
            return None
        self._why = ""
        return found

    def tell(self) -> None:
        """Once in a while."""
        now = time.monotonic()
        if now - self._said >= TOLD_S:
            self._said = now
            _log.warning(
                "%s: waited for %.0f s%s", self._what, now - self._began, f" ({self._why})" if self._why else ""
            )


def _opened(stream: str | Stream, config: Mapping[str, Any] | None) -> Stream:
    """The stream of an address; one that cannot be reached now is waited for."""
    if not isinstance(stream, str):
        if config:
            raise SpecError("config", "goes with an address: give the stream its settings")
        return stream
    if stream.startswith("folder://"):
        return FolderStream(stream.removeprefix("folder://"))
    if not stream.startswith(SCHEME):
        raise SpecError("stream", f"{stream!r}: give kafka://host:port/topic, folder:///path, or a Stream")
    waits = _Waits(stream.partition("?")[0])
    while True:
        found = waits.call(lambda _: KafkaStream(stream, config=config), 0)
        if found is not None:
            return found


__all__ = ["ElasticStream"]
