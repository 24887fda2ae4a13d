"""What every stream must do, as a test class: subclass it, give it your stream, run pytest.

```python
class TestMyStream(StreamConformance):
    @contextlib.contextmanager
    def make_stand(self):
        with a_new_empty_stream() as stand:     # a `Stand`: the stream, and how to write to it
            yield stand
```
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dlrover_core.data.streams import Message, OffsetAhead, OffsetGone, Stream, UnknownPartition

WAIT_S = 30.0
"""A bound: a stream that has the message returns at once."""
NOW_S = 0.0


class Stand(Protocol):
    """A new stream with one partition at least, without any message, and what the stories do to it."""

    stream: Stream
    partition: str

    def write(self, count: int) -> None:
        """Append so many messages to ``partition``; they can be read when this returns."""
        ...

    def values(self, messages: Sequence[Message]) -> list[int]:
        """What was written, as numbers: the first message ever written is 0."""
        ...

    def another(self) -> Stream:
        """The same stream as another reader opens it."""
        ...

    def trim(self) -> bool:
        """Remove the oldest messages, some and not all. False: streams of this kind keep all."""
        ...


def raised(kind: type[Exception], stream: Stream, partition: str, offset: int) -> Any:
    """The error of a read."""
    try:
        found = stream.read(partition, offset, 10, NOW_S)
    except kind as error:
        return error
    raise AssertionError(f"offset {offset} of {partition} was read: {found}, where {kind.__name__} is due")


class StreamConformance:
    """The promises of the port."""

    def make_stand(self) -> AbstractContextManager[Stand]:
        """A new stand."""
        raise NotImplementedError

    def test_nothing_is_there_at_first(self) -> None:
        """A new stream has its partition, without messages, and a read that may not wait returns at once."""
        with self.make_stand() as stand:
            extent = stand.stream.extents()[stand.partition]
            assert extent.first == extent.end
            assert list(stand.stream.read(stand.partition, extent.end, 10, NOW_S)) == []

    def test_messages_come_in_order(self) -> None:
        """From any offset on, as many as are asked for at most, the same ones whenever they are read."""
        with self.make_stand() as stand:
            begin = stand.stream.extents()[stand.partition].first
            stand.write(7)
            stand.write(5)
            found: list[Message] = []
            offset = begin
            while len(found) < 12:
                some = stand.stream.read(stand.partition, offset, 5, WAIT_S)
                assert 1 <= len(some) <= 5
                found += some
                offset = some[-1].offset + 1
            offsets = [one.offset for one in found]
            assert offsets == sorted(set(offsets))
            assert stand.values(found) == list(range(12))
            extent = stand.stream.extents()[stand.partition]
            assert (extent.first, extent.end) == (offsets[0], offsets[-1] + 1)
            for number in (11, 3, 0, 6):
                again = stand.stream.read(stand.partition, offsets[number], 1, WAIT_S)
                assert again == [found[number]] or tuple(again) == (found[number],)

    def test_a_read_waits(self) -> None:
        """A reader at the end gets the message that comes while it waits, and nothing where none comes."""
        with self.make_stand() as stand:
            end = stand.stream.extents()[stand.partition].end
            assert list(stand.stream.read(stand.partition, end, 10, 0.01)) == []
            found: list[int] = []
            reader = threading.Thread(
                target=lambda: found.extend(stand.values(stand.stream.read(stand.partition, end, 10, WAIT_S)))
            )
            reader.start()
            stand.write(1)
            reader.join(2 * WAIT_S)
            assert found == [0]

    def test_other_readers_and_commits_change_nothing(self) -> None:
        """A reader's offsets are its own; what was committed is not read back."""
        with self.make_stand() as stand:
            begin = stand.stream.extents()[stand.partition].first
            stand.write(6)
            first = stand.stream.read(stand.partition, begin, 3, WAIT_S)
            stand.stream.commit({stand.partition: first[-1].offset + 1})
            other = stand.another()
            assert other.fingerprint == stand.stream.fingerprint
            assert stand.values(other.read(stand.partition, begin, 3, WAIT_S)) == [0, 1, 2]
            assert stand.values(stand.stream.read(stand.partition, begin, 1, WAIT_S)) == [0]
            other.close()
            other.close()
            assert stand.values(stand.stream.read(stand.partition, first[-1].offset + 1, 1, WAIT_S)) == [3]

    def test_what_is_not_there_is_told(self) -> None:
        """Another partition, and an offset behind the end, as after a stream was made anew."""
        with self.make_stand() as stand:
            stand.write(3)
            end = stand.stream.extents()[stand.partition].end
            raised(UnknownPartition, stand.stream, "no-such-partition", 0)
            error = raised(OffsetAhead, stand.stream, stand.partition, end + 5)
            assert (error.offset, error.end) == (end + 5, end)

    def test_what_was_removed_is_told(self) -> None:
        """Retention has passed the reader: the error names the first offset that is left, and from there on it reads."""
        with self.make_stand() as stand:
            begin = stand.stream.extents()[stand.partition].first
            stand.write(6)
            stand.write(6)
            everything = stand.values(stand.stream.read(stand.partition, begin, 12, WAIT_S))
            if not stand.trim():
                return
            first, end = stand.stream.extents()[stand.partition]
            assert begin < first < end
            error = raised(OffsetGone, stand.stream, stand.partition, begin)
            assert (error.offset, error.first) == (begin, first)
            left = stand.values(stand.stream.read(stand.partition, first, 1, WAIT_S))
            assert left[0] in everything[1:] or left[0] > everything[-1]

    def test_it_goes_to_other_processes(self) -> None:
        """A loader process that is spawned reads the same."""
        with self.make_stand() as stand:
            begin = stand.stream.extents()[stand.partition].first
            stand.write(4)
            copy = pickle.loads(pickle.dumps(stand.stream))  # noqa: S301
            assert stand.values(copy.read(stand.partition, begin, 2, WAIT_S)) == [0, 1]
            assert copy.fingerprint == stand.stream.fingerprint
            copy.close()
