"""Numbers by which peers know what they say to each other: each is declared beside the class that it stands for.

Numbers are append-only, as those of events are: a test pins them. Who has not loaded a class does not know its number, and cannot
have a use for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

COMMANDS: dict[int, type] = {}
"""The commands that agents may send."""


def command(number: int, since: int = 1) -> Callable[[C], C]:
    """Declare a NamedTuple as command ``number``; masters know it from version ``since`` of the protocol on."""

    def mark(cls: C) -> C:
        setattr(cls, "__since__", since)
        return _numbered(COMMANDS, number, cls)

    return mark


def number_of(cls: type) -> int:
    """The number of a class. Raises TypeError for one that has none."""
    number = getattr(cls, "__number__", None)
    if not isinstance(number, int):
        raise TypeError(f"{cls.__name__} has no number: declare it with @command")
    return number


def since(cls: Any) -> int:
    """The version of the protocol from which on masters know a command."""
    return int(cls.__since__)


def _numbered(known: dict[int, type], number: int, cls: C) -> C:
    if number in known:
        raise ValueError(f"number {number} is both {known[number].__name__} and {cls.__name__}")
    known[number] = cls
    setattr(cls, "__number__", number)
    return cls
