"""Events in words: one line for people who do not know the field names; and what an event answers.

The words of a concern are in the module of its name here: ``words.nodes`` for events of ``job.nodes``. There is no list of
these modules. An event without words of its own is shown by its fields.

A module may define more, for readers that follow links between records (`history.explain`):

WORDS    by kind: the event in words
KEYS     by kind: the key of a record; of each kind and key the newest record is known
ENDS     by kind: another kind and a key; the record of that kind and key has been answered
FOLLOWS  by kind: the records that this one answers, where `Record.cause` does not say so
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from dlrover_core.history.phrases import key_values, one_line
from dlrover_core.job.sets import Sets
from dlrover_core.kernel.engine import CommandFailed, CommandRefused
from dlrover_core.kernel.events import Event

LINE_CHARS_MAX = 1000


class Known(Protocol):
    """The records so far, for a module that looks for the record that the present one answers."""

    @property
    def sets(self) -> Sets:
        """The coupling sets of the run."""
        ...

    @property
    def cause(self) -> int:
        """The record that the present one follows from, by the engine; 0: the engine recorded none."""
        ...

    def newest(self, kind: type, key: Hashable = None) -> int:
        """The newest record of a kind and key; 0: there is none, or it has had its answer."""
        ...


Words = Mapping[type, Callable[[Any], str]]
Keys = Mapping[type, Callable[[Any], Hashable]]
Ends = Mapping[type, tuple[type, Callable[[Any], Hashable]]]
Follows = Mapping[type, Callable[[Any, Known], Iterable[int]]]

_KERNEL: Words = {
    CommandRefused: lambda fact: f"{fact.command} was refused: {fact.reason}",
    CommandFailed: lambda fact: f"deciding {fact.command} failed, a bug of ours: {fact.error} in {fact.where}",
}


class About(NamedTuple):
    """What a module says of one kind of events; None: nothing."""

    words: Callable[[Any], str] | None = None
    key: Callable[[Any], Hashable] | None = None
    ends: tuple[type, Callable[[Any], Hashable]] | None = None
    follows: Callable[[Any, Known], Iterable[int]] | None = None


@lru_cache(maxsize=256)
def about(kind: type) -> About:
    """What the module of the concern's name says of a kind of events."""
    package, facts, concern = kind.__module__.rpartition(".job.")
    name = f"{package}.history.words.{concern}"
    try:
        says = importlib.import_module(name) if facts else None
    except ModuleNotFoundError as error:
        if not error.name or not name.startswith(error.name):
            raise
        says = None
    if says is None:
        return About(_KERNEL.get(kind))
    tables = (getattr(says, table, {}) for table in ("WORDS", "KEYS", "ENDS", "FOLLOWS"))
    return About(*(table.get(kind) for table in tables))


def say(event: Event) -> str:
    """An event in words."""
    words = about(type(event)).words
    return one_line(words(event), LINE_CHARS_MAX) if words is not None else key_values(event)
