"""The port of streams: data that grow while they are consumed, in partitions whose messages have offsets.

An offset is a position, so what was consumed of a partition is one number, and lies in the cut as that of a file does. A stream
is read from an offset that our own ledger says. It balances nothing among readers, and what it is told by `Stream.commit` is
for others to see and never read back.

``dlrover_core.testing.stream_conformance`` says what an implementation must do, as a test class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dlrover_core.errors import CoreError

ENDLESS = 2**53
"""The size of a dataset without end, as a stream is. Larger than any that ends."""


class StreamError(CoreError):
    """Root of everything that a stream may raise. Training cannot go on by itself, unless it is `StreamUnavailable`."""


class StreamUnavailable(StreamError):
    """The stream cannot be reached or read now. Ask again later: nothing is lost."""


class StreamGone(StreamError):
    """There is no such stream, or none any more."""


class AccessRefused(StreamError):
    """The stream may not be read with these credentials, or by this user."""


class UnknownPartition(StreamError):
    """The stream has no such partition, or none any more."""


class SegmentChanged(StreamError):
    """Messages that had offsets already are not what they were."""


class OffsetGone(StreamError):
    """Retention has passed this offset: messages were removed before they were consumed. ``first`` is the first that is left."""

    def __init__(self, stream: str, partition: str, offset: int, first: int) -> None:
        super().__init__(
            f"{stream}, partition {partition}: offset {offset} is no longer there, the first that is left is {first}: "
            f"{first - offset} messages were removed before they were consumed; keep them for longer, and begin at {first}"
        )
        self.partition, self.offset, self.first = partition, offset, first


class OffsetAhead(StreamError):
    """This offset is behind the end of the partition: the stream was made anew. ``end``: its end."""

    def __init__(self, stream: str, partition: str, offset: int, end: int) -> None:
        super().__init__(
            f"{stream}, partition {partition}: offset {offset} is behind its end {end}: the stream was made anew, or is another "
            "one; give the stream of the checkpoint, or begin under another name"
        )
        self.partition, self.offset, self.end = partition, offset, end


class Message(NamedTuple):
    """One message.

    offset: its place in the partition.
    value: what it holds: bytes of a broker, a row of a file.
    at_us: when it was written, microseconds since 1970; 0: the stream does not say.
    """

    offset: int
    value: Any
    at_us: int = 0


class Extent(NamedTuple):
    """The offsets of a partition that can be read now: ``first`` up to, and without, ``end``."""

    first: int
    end: int


@runtime_checkable
class Stream(Protocol):
    """A stream. It may be copied to other processes, by fork or pickle, and read there. Calls block; none is asynchronous.

    name: what people call it.
    """

    name: str

    @property
    def fingerprint(self) -> str:
        """Which stream it is: one that was made anew under the same name has another."""
        ...

    def extents(self) -> Mapping[str, Extent]:
        """The partitions, and what of each can be read now. More may come. Raises `StreamError`."""
        ...

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """At most ``most`` messages from ``offset`` on, in order. Where there is none yet it waits, at most ``wait_s`` seconds.

        Raises `OffsetGone`, `OffsetAhead`, `UnknownPartition`, or another `StreamError`.
        """
        ...

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Tell others that all before these offsets is consumed, by partition. It changes nothing for any reader."""
        ...

    def close(self) -> None:
        """Let go of connections and files. Once more is no error."""
        ...


@runtime_checkable
class Holed(Protocol):
    """A stream that can lose messages in the middle of a partition, as a folder does when a file is removed."""

    def holes(self) -> Mapping[str, Sequence[Extent]]:
        """What is gone within the extents that were told last, by partition: ascending, and no two touch. Raises nothing."""
        ...
