"""Caches of values that follow from a part of the state: computed once, never packed into snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")


def unanswered(told: Mapping[int, T], cause: int) -> dict[int, T]:
    """The entries whose reactions may still come, as seen from a record that reacts to ``cause`` (0: to none).

    Reactions come in the order of their causes. A command's next event comes only after all reactions to the event before.
    """
    return {seq: one for seq, one in told.items() if 0 < cause <= seq}


class Remembering:
    """Base of a part of the state that is never replaced field by field; it keeps values that follow from it."""

    __slots__ = ("_memory",)
    _memory: dict[str, Any]

    def recall(self, what: str, work_out: Callable[[], T]) -> T:
        """The value that ``work_out`` returned when it was first asked for."""
        try:
            return cast(T, self._memory[what])
        except AttributeError:
            self._memory = {}
        except KeyError:
            pass
        found = self._memory[what] = work_out()
        return found

    def listed(self, names: str, name: str) -> bool:
        """Is ``name`` in the list of that field, which only ever grows?"""
        known: set[str] = self.recall(names, set)
        listed: list[str] = getattr(self, names)
        if len(known) < len(listed):
            known.update(listed[len(known) :])
        return name in known
