"""A stream of numbers, for the tests of streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover_core.data.streams import (
    Extent,
    Message,
    OffsetAhead,
    OffsetGone,
    Stream,
    UnknownPartition,
)


class Toy:
    """A stream in one file of JSON: the first offset that is left, and the messages."""

    name, fingerprint = "toy", "toy:1"

    def __init__(self, path: Path) -> None:
        self.path = path

    def told(self) -> tuple[int, list[int]]:
        """First offset, messages."""
        first, values = json.loads(self.path.read_text())
        return first, values

    def extents(self) -> Mapping[str, Extent]:
        """Of the one partition."""
        first, values = self.told()
        return {"a": Extent(first, first + len(values))}

    def read(self, partition: str, offset: int, most: int, wait_s: float) -> Sequence[Message]:
        """As the port says; it looks all the time."""
        if partition != "a":
            raise UnknownPartition(partition)
        ended = threading.Event()
        timer = threading.Timer(wait_s, ended.set)
        timer.start()
        try:
            while True:
                over = ended.is_set() or not wait_s
                first, values = self.told()
                if offset < first:
                    raise OffsetGone(self.name, partition, offset, first)
                if offset > first + len(values):
                    raise OffsetAhead(self.name, partition, offset, first + len(values))
                some = values[offset - first : offset - first + most]
                if some or over:
                    return [Message(offset + at, value) for at, value in enumerate(some)]
        finally:
            timer.cancel()

    def commit(self, offsets: Mapping[str, int], /) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing is open."""


class ToyStand:
    """A toy and how to write to it."""

    partition = "a"

    def __init__(self, path: Path, kind: type[Toy]) -> None:
        self.path, self.kind, self.written = path, kind, 0
        self._put(0, [])
        self.stream: Stream = kind(path)

    def _put(self, first: int, values: list[int]) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps([first, values]))
        part.rename(self.path)

    def write(self, count: int) -> None:
        """Append."""
        first, values = Toy(self.path).told()
        self._put(first, values + list(range(self.written, self.written + count)))
        self.written += count

    def values(self, messages: Sequence[Message]) -> list[int]:
        """They are numbers."""
        return [one.value for one in messages]

    def another(self) -> Stream:
        """Another reader."""
        return self.kind(self.path)

    def trim(self) -> bool:
        """The oldest two go."""
        first, values = Toy(self.path).told()
        self._put(first + 2, values[2:])
        return True


# The folder.


def fill(folder: Path, name: str, *values: int) -> Path:
    """A file of JSONL."""
    path = folder / name
    path.write_text("".join(f"{one}\n" for one in values))
    return path
