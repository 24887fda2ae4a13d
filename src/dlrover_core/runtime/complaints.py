"""Bounded log lines about what strangers do: a flood of them costs a few lines and a count."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

FIRST, EVERY_S = 10, 60.0
TEXT_MAX = 300


@dataclass(slots=True)
class _Kind:
    """The lines of one kind of event in the present interval."""

    method: str
    timer: asyncio.TimerHandle
    told: int = 0
    suppressed: int = 0
    last: dict[str, Any] = field(default_factory=dict)


class Complaints:
    """A logger that writes the first ``first`` events of a kind in ``every_s`` seconds; one line counts the rest.

    That line says ``suppressed`` and shows the newest event. A kind is identified by its text, so texts must be constants.
    Words of a stranger are cut, and shown without characters that control a terminal.
    """

    def __init__(self, log: Any, *, first: int = FIRST, every_s: float = EVERY_S) -> None:
        self._log, self._first, self._every_s = log, first, every_s
        self._kinds: dict[str, _Kind] = {}

    def info(self, event: str, **words: Any) -> None:
        """Log something ordinary."""
        self._tell("info", event, words)

    def warning(self, event: str, **words: Any) -> None:
        """Log something that no correct peer does."""
        self._tell("warning", event, words)

    def error(self, event: str, **words: Any) -> None:
        """Log something that should not happen."""
        self._tell("error", event, words)

    def close(self) -> None:
        """Log what is suppressed so far. Idempotent; later complaints are logged."""
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
            # The flood may go on: its next lines are only counted as long as it lasts.
            self._kinds[event] = _Kind(kind.method, self._arm(event), told=self._first)

    def _sum(self, event: str, kind: _Kind) -> None:
        if kind.suppressed:
            getattr(self._log, kind.method)(event, suppressed=kind.suppressed, within_s=self._every_s, **kind.last)


def _shown(word: Any) -> Any:
    if not isinstance(word, str):
        return word
    cut = word if len(word) <= TEXT_MAX else f"{word[:TEXT_MAX]}..."
    return cut if cut.isprintable() else cut.encode("unicode_escape").decode()
