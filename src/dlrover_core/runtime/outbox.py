"""An agent's outbox: its numbered commands, each kept until the leader has recorded it."""

from __future__ import annotations

import asyncio
from collections import deque

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import evidence, incidents, progress
from dlrover_core.runtime.messages import Message
from dlrover_core.words import INTEGER_MAX, plain_fields

UNANSWERED_MAX = 16
SECOND_US = 1_000_000


class Outbox:
    """Numbered commands without gaps, at most 16 unanswered on the wire, sent again in order after every reconnect."""

    def __init__(self) -> None:
        self._next = 1
        self._unanswered: deque[tuple[int, Message, float]] = deque()
        self._sent = 0
        self.changed = asyncio.Event()

    def add(self, command: Message) -> int:
        """Number a command and queue it, with its texts cleaned, so that every command can be encoded."""
        number = self._next
        self._next += 1
        self._unanswered.append((number, plain_fields(command), asyncio.get_running_loop().time()))
        self.changed.set()
        return number

    def rewind(self) -> None:
        """A new connection: all unanswered commands are sent again."""
        self._sent = 0
        self.changed.set()

    def expected(self, number: int) -> None:
        """The leader wants all from ``number`` on. Raises `ConnectionLost` if that was answered: it forgot this node."""
        if self._unanswered and number < self._unanswered[0][0]:
            raise ConnectionLost(
                f"command {number} was answered long ago; a leader that asks for it does not know this node"
            )
        self._sent = sum(1 for one, _, _ in self._unanswered if one < number)
        self.changed.set()

    def answered(self, number: int) -> None:
        """``number`` and all before it are durable."""
        while self._unanswered and self._unanswered[0][0] <= number:
            self._unanswered.popleft()
            self._sent = max(0, self._sent - 1)
        self.changed.set()

    def next(self) -> tuple[int, Message] | None:
        """The next command to send, if one may be sent. The ages in it grow by its wait here."""
        if self._sent >= min(len(self._unanswered), UNANSWERED_MAX):
            return None
        self._sent += 1
        number, command, added = self._unanswered[self._sent - 1]
        if isinstance(command, (incidents.ReportExit, progress.ReportFirstStep, evidence.ReportEvidence)):
            waited_us = int((asyncio.get_running_loop().time() - added) * SECOND_US)
            command = command._replace(age_us=min(INTEGER_MAX, command.age_us + waited_us))
        return number, command

    @property
    def empty(self) -> bool:
        """Is every command answered?"""
        return not self._unanswered
