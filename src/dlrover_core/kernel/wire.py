"""Numbers by which peers know what they say to each other: each is declared beside the class that it stands for.

Numbers are append-only, as those of events are: a test pins them. A process knows the numbers of the classes that it has loaded,
and needs no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

C = TypeVar("C", bound=type)
Part = tuple[Any, ...]
"""What one concern tells beside the others, in an order, a heartbeat or the answer to one: a NamedTuple declared with `part`."""
P = TypeVar("P", bound=Part)

COMMANDS: dict[int, type] = {}
"""The commands that agents may send."""
PARTS: dict[int, type] = {}
"""The parts of orders, heartbeats and answers to them."""


class Unknown(NamedTuple):
    """A command that this release does not have: a newer agent's. It is refused by its ``name``."""

    name: str


def command(number: int, since: int = 0) -> Callable[[C], C]:
    """Declare a NamedTuple as command ``number``. ``since``: the oldest protocol that has it; 0: all that are served have."""

    def mark(cls: C) -> C:
        setattr(cls, "__since__", since)
        return _numbered(COMMANDS, number, cls)

    return mark


def part(number: int) -> Callable[[C], C]:
    """Declare a NamedTuple as part ``number``. Every field has a default: a part of defaults means the same as no part.

    A part travels as its fields; so does each NamedTuple in a tuple of them. Either may grow by fields at its end, each with
    a default: peers of the release before skip them, and what such peers say lacks them. Peers that do not know a part skip it.
    """
    return lambda cls: _numbered(PARTS, number, cls)


def find(parts: Iterable[Part], cls: type[P]) -> P:
    """The part of this class; the one that says nothing, if there is none."""
    for one in parts:
        if type(one) is cls:
            return one
    return cast(P, _saying_nothing(cls))


@lru_cache(maxsize=256)
def _saying_nothing(cls: type[Part]) -> Part:
    return cls()


def number_of(cls: type) -> int:
    """The number of a class. Raises TypeError for one that has none."""
    number = getattr(cls, "__number__", None)
    if not isinstance(number, int):
        raise TypeError(f"{cls.__name__} has no number: declare it with @command or @part")
    return number


def since(cls: Any) -> int:
    """The oldest protocol that has a command; 0: all that are served have."""
    return int(cls.__since__)


def _numbered(known: dict[int, type], number: int, cls: C) -> C:
    if number in known:
        raise ValueError(f"number {number} is both {known[number].__name__} and {cls.__name__}")
    known[number] = cls
    setattr(cls, "__number__", number)
    return cls
