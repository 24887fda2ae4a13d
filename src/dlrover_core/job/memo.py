"""Values that follow from a part of the state and are no part of it: worked out once, never packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Remembering:
    """A part of the state that is made once and never replaced piecemeal: what follows from it is worked out once."""

    __slots__ = ("_memory",)
    _memory: dict[str, Any]

    def recall(self, what: str, work_out: Callable[[], T]) -> T:
        """What ``work_out`` gave when it was first asked."""
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
