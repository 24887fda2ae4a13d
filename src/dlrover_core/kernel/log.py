"""The port of the event log: append under a fencing token with four outcomes, read, follow, snapshot.

Leases are liveness, the fence is safety: `Leadership.append` either lands whole under the newest token, or says exactly why
not. The outcome of a lost acknowledgement is never guessed: the same batch sent again is recognised by its identity.
Outcomes are no tuples: `Appended(2)` does not equal `AlreadyAppended(2)`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Union, runtime_checkable

from dlrover_core.kernel.events import Batch, Record


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch is durable; ``seq`` is its last sequence number."""

    seq: int


@dataclass(frozen=True, slots=True)
class AlreadyAppended:
    """The same batch was durable before: an earlier acknowledgement was lost."""

    seq: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """A newer leader exists. Drop all working state and stop deciding. ``current`` is its token."""

    mine: int
    current: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """The head is not where this leader believes it is though nobody newer leads: a bug, to be loud about."""

    expected: int
    found: int


Outcome = Union[Appended, AlreadyAppended, Fenced, Conflict]


class Snapshot(NamedTuple):
    """A cached fold. ``schema`` is the hash of the state schema it was taken with; another one means: ignore it."""

    seq: int
    schema: str
    state: bytes


class LeaderInfo(NamedTuple):
    """Who leads a job, and where it can be reached (``address`` may be empty)."""

    token: int
    holder: str
    address: str


class Leadership(Protocol):
    """The right to append to one job's log, until somebody newer holds it."""

    @property
    def token(self) -> int:
        """The fencing number: larger is newer."""
        ...

    @property
    def lost(self) -> Awaitable[None]:
        """Done when leadership is known to be over."""
        ...

    def valid(self) -> bool:
        """May orders still be given? By the local clock alone, without I/O."""
        ...

    def trouble(self) -> str:
        """Why the log cannot be reached or written, as far as was noticed; empty: all is well. Without I/O."""
        ...

    async def append(self, batch: Batch) -> Outcome:
        """Append whole or not at all. Raises `LogUnavailable` (send the same batch again) and `LogFull`."""
        ...

    async def snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the newest two stay. A failure is a warning, never an outage."""
        ...

    async def announce(self, address: str) -> None:
        """Publish where this leader can be reached."""
        ...

    async def resign(self) -> None:
        """Hand leadership on at once. Idempotent."""
        ...


class Segment(NamedTuple):
    """Records ``first`` to ``last`` in one file of the archive; ``digest`` chains it to the one before."""

    first: int
    last: int
    digest: str

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.first:020d}-{self.last:020d}.seg"


@runtime_checkable
class Archiving(Protocol):
    """A log that can copy what is old to an archive. Nothing is deleted that is not archived."""

    async def archive(self, job: str, upto: int | None = None, noted: int | None = None) -> Sequence[Segment]:
        """Copy what fills whole files, up to ``upto``; nothing where no archive is configured.

        Returns the new files. With ``noted``, the last event whose file stands in the log: all files beyond it, checked, those
        included that an earlier leader wrote and could not tell of. Raises `LogError`.
        """
        ...

    async def trim(self, job: str, upto: int) -> int:
        """Delete what is archived up to ``upto`` and what this log does not keep for ever; returns how many batches.

        Called by the leader once the segments stand in the log. Whoever takes over must not need the archive: nothing goes
        that the older of two snapshots does not cover. Raises `LogError` for what the archive does not hold whole.
        """
        ...


class Page(NamedTuple):
    """Batches as they lie, undecoded and in order. ``last`` is their last sequence number; ``more``: there may be more."""

    payloads: Sequence[bytes]
    last: int
    more: bool


@runtime_checkable
class Paging(Protocol):
    """A log that hands out batches undecoded. One that cannot is read through `EventLog.batches`, which costs more."""

    async def page(self, job: str, after: int, bytes_max: int) -> Page:
        """The next batches beyond ``after``: at most ``bytes_max`` together, or one. Raises as `EventLog.batches` does."""
        ...


class EventLog(Protocol):
    """All jobs' logs at one URL."""

    @property
    def shared(self) -> bool:
        """May masters of several hosts lead here?"""
        ...

    async def lead(
        self, job: str, holder: str, ttl_s: float = 5.0, *, wait: bool = True, dead: Collection[str] = ()
    ) -> Leadership:
        """Become the leader of ``job``; with ``wait`` stand by until the present one is gone, else raise `NotLeading`.

        ``dead`` are holders that the caller knows to be dead: if the present one is among them, its lease is not waited for.
        """
        ...

    async def leader(self, job: str) -> LeaderInfo | None:
        """Who leads now, as far as the log knows."""
        ...

    async def head(self, job: str) -> int:
        """The last durable sequence number; 0 for an empty log."""
        ...

    async def jobs(self) -> list[str]:
        """The names of all jobs with a log here, sorted."""
        ...

    def batches(self, job: str, after: int = 0) -> AsyncIterator[Batch]:
        """Every batch whose last record is beyond ``after``, in order; archive and log as one stream. Raises `LogCorrupt`."""
        ...

    def read(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """Every record beyond ``after``, in order."""
        ...

    def follow(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """`read`, then whatever is appended, without gap or duplicate, until cancelled."""
        ...

    async def latest_snapshot(self, job: str) -> Snapshot | None:
        """The newest snapshot that is whole, or None."""
        ...

    async def close(self) -> None:
        """Release everything, leadership included."""
        ...
