"""Values that follow from a part of the state and are no part of it: worked out once, never packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")


def unanswered(told: Mapping[int, T], cause: int) -> dict[int, T]:
    """What was told by records whose reactions may still come, seen from a record that reacts to ``cause`` (0: to none).

    Reactions come in the order of their causes, and a command's next event only after all reactions to the one before.
    """
    return {seq: one for seq, one in told.items() if 0 < cause <= seq}


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
