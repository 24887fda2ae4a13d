"""A stream as a source: its offsets are the indices, so it is trained on and resumed as a file is; its end is waited for."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from dlrover_adapters.data.index_file import say
from dlrover_core.data.streams import ENDLESS, Message, Stream, StreamError
from dlrover_core.errors import SpecError

AHEAD = 256
"""So many messages are read at once, where there are so many."""
WAIT_S = 1.0
"""A wait is made of parts of this length; each tells the agent that no step is made meanwhile."""
PHASE = "waiting for data"
STEPS = "dlrover_adapters.torch.steps"
TOLD_S = 60.0
"""Who waits for a message says so, when it takes longer, and again after each such time."""


class Followed:
    """The messages of a stream with one partition, without holes in its offsets, as samples in their order."""

    fixed_order = True
    chunk = 1
    waits = True

    def __init__(self, stream: Stream) -> None:
        """Raises: SpecError where the stream has several partitions; `StreamError` where it cannot be read."""
        partitions = sorted(stream.extents())
        if len(partitions) != 1:
            message = (
                f"{stream.name} has {len(partitions)} partitions: give a stream with one, whose messages have one order"
            )
            raise SpecError("stream", message)
        self.stream, self.partition = stream, partitions[0]
        self._read: Sequence[Message] = ()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, offset: int) -> Any:
        """The message at ``offset``; it waits until it comes. Raises `StreamError`."""
        begin = self._read[0].offset if self._read else -1
        if not begin <= offset < begin + len(self._read):
            self._read = self._waited(offset)
            begin = offset
        found = self._read[offset - begin]
        if found.offset != offset:
            message = f"{self.stream.name}, partition {self.partition}: offset {offset} was left out, {found.offset} comes next"
            raise StreamError(f"{message}: streams with holes cannot be followed by position")
        return found.value

    def _waited(self, offset: int) -> Sequence[Message]:
        began = told = time.monotonic()
        while True:
            with announced():
                found = self.stream.read(self.partition, offset, AHEAD, WAIT_S)
            if found:
                return found
            now = time.monotonic()
            if now - told >= TOLD_S:
                told = now
                say(f"{self.stream.name}: {now - began:.0f} s waited for offset {offset} of partition {self.partition}")

    def fingerprint_at(self, _: int) -> str:
        """The stream's own: it is the same however far it has grown."""
        return self.stream.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read": ()}


def announced() -> contextlib.AbstractContextManager[None]:
    """A wait in a worker of a job, or in a loader process of one, is no hang: tell its agent."""
    # A worker has imported the module before its script; an import from here would be a circle.
    steps: Any = sys.modules.get(STEPS)
    return contextlib.nullcontext() if steps is None else steps.waiting(PHASE)
