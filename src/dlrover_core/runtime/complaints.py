"""Log lines about what strangers do, bounded: a flood of them costs a few lines and a count, never a line each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

FIRST, EVERY_S = 10, 60.0
TEXT_MAX = 300


@dataclass(slots=True)
class _Kind:
    """One event's lines in the present interval."""

    method: str
    timer: asyncio.TimerHandle
    told: int = 0
    suppressed: int = 0
    last: dict[str, Any] = field(default_factory=dict)


class Complaints:
    """A logger whose every event is told ``first`` times at once in ``every_s`` seconds; the rest is one line with their number.

    That line says ``suppressed`` and shows the newest one. A kind of event is its text, so texts must be constants; words may
    be the stranger's own: they are cut, and shown without what a terminal would obey.
    """

    def __init__(self, log: Any, *, first: int = FIRST, every_s: float = EVERY_S) -> None:
        self._log, self._first, self._every_s = log, first, every_s
        self._kinds: dict[str, _Kind] = {}

    def info(self, event: str, **words: Any) -> None:
        """What is in order, if it does not come too often."""
        self._tell("info", event, words)

    def warning(self, event: str, **words: Any) -> None:
        """What no peer of ours does."""
        self._tell("warning", event, words)

    def error(self, event: str, **words: Any) -> None:
        """What ought not to be."""
        self._tell("error", event, words)

    def close(self) -> None:
        """Tell what is suppressed so far. Idempotent; whoever complains afterwards is heard."""
        for event in list(self._kinds):
            kind = self._kinds.pop(event)
            kind.timer.cancel()
            self._sum(event, kind)

    def _tell(self, method: str, event: str, words: dict[str, Any]) -> None:
        words = {name: _shown(word) for name, word in words.items()}
        kind = self._kinds.get(event)
        if kind is None:
            kind = self._kinds[event] = _Kind(method, self._arm(event))
        if kind.told < self._first:
            kind.told += 1
            getattr(self._log, method)(event, **words)
        else:
            kind.suppressed += 1
            kind.last = words

    def _arm(self, event: str) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._every_s, self._over, event)

    def _over(self, event: str) -> None:
        kind = self._kinds.pop(event)
        if kind.suppressed:
            self._sum(event, kind)
            # The flood may go on: its next lines are counted, not told, for as long as it lasts.
            self._kinds[event] = _Kind(kind.method, self._arm(event), told=self._first)

    def _sum(self, event: str, kind: _Kind) -> None:
        if kind.suppressed:
            getattr(self._log, kind.method)(event, suppressed=kind.suppressed, within_s=self._every_s, **kind.last)


def _shown(word: Any) -> Any:
    if not isinstance(word, str):
        return word
    cut = word if len(word) <= TEXT_MAX else f"{word[:TEXT_MAX]}..."
    return cut if cut.isprintable() else cut.encode("unicode_escape").decode()
