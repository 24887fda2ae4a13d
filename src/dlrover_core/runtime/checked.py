"""Turns untrusted fields into the class that they claim to be. `MalformedMessage` names the field that does not fit."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, Union, cast

from dlrover_core.errors import MalformedMessage
from dlrover_core.words import INTEGER_MAX

Message = tuple[object, ...]
T = TypeVar("T")


class _Reader(NamedTuple):
    """How the fields of one class are read: worked out once, because thousands of messages come every second.

    checks: of each field its name, and the check that its value must pass
    width:  number of fields
    least:  number of fields without a default
    ints:   all fields are integers
    rows:   places of fields that are tuples of NamedTuples, each with the class of its members
    """

    checks: tuple[tuple[str, Callable[[Any], bool]], ...]
    width: int
    least: int
    ints: bool
    rows: tuple[tuple[int, type], ...]


def checked(cls: type[T], fields: tuple[Any, ...]) -> T:
    """``cls`` from untrusted fields: count and types as declared; missing trailing fields take their defaults."""
    reader = _READERS.get(cls) or _reader(cls)
    count = len(fields)
    if not reader.least <= count <= reader.width:
        raise MalformedMessage(f"{cls.__name__} has {reader.width} fields, got {count}")
    if not (reader.ints and _integers(fields)):
        for (name, check), value in zip(reader.checks, fields, strict=False):
            if not check(value):
                raise MalformedMessage(f"{cls.__name__}.{name}: {_shown(value)} is not what was declared")
    # Of a whole NamedTuple `cls(*fields)` makes the same, and takes three times as long.
    return tuple.__new__(cast(Any, cls), fields) if count == reader.width else cls(*fields)


def known(cls: type[T], fields: tuple[Any, ...]) -> T:
    """``cls`` from untrusted fields of a peer that may be newer: additional fields at the end are skipped, in rows too."""
    reader = _READERS.get(cls) or _reader(cls)
    if len(fields) > reader.width:
        fields = fields[: reader.width]
    for place, row in reader.rows:
        if place < len(fields) and fields[place] != ():
            fields = (*fields[:place], _rows(cls, place, row, fields[place]), *fields[place + 1 :])
    return checked(cls, fields)


def _rows(cls: Any, place: int, row: type, said: Any) -> tuple[Any, ...]:
    if not (isinstance(said, tuple) and all(isinstance(one, tuple) for one in said)):
        raise MalformedMessage(f"{cls.__name__}.{cls._fields[place]}: {_shown(said)} is not what was declared")
    return tuple([known(row, one) for one in said])


def _tuples(value: Any) -> bool:
    if not isinstance(value, tuple):
        return False
    for one in value:  # noqa: SIM110 - as below
        if not isinstance(one, tuple):
            return False
    return True


def _integers(fields: tuple[Any, ...]) -> bool:
    for one in fields:  # noqa: SIM110 - a generator takes three times as long
        # A bool is no integer here. The bound leaves room for sums within the range of msgpack and SQLite.
        if type(one) is not int or not -INTEGER_MAX <= one <= INTEGER_MAX:
            return False
    return True


def _shown(value: Any) -> str:
    # Never the text of a container: at a depth that msgpack still reads, Python's own repr raises RecursionError.
    shown = f" {str(value)[:40]!r}" if isinstance(value, (int, float, str)) else ""
    return f"{type(value).__name__}{shown}"


_READERS: dict[type, _Reader] = {}


def _reader(cls: Any) -> _Reader:
    hints = typing.get_type_hints(cls)
    fields = [(name, hints[name]) for name in cls._fields]
    found = _READERS[cls] = _Reader(
        tuple((name, _check(hint)) for name, hint in fields),
        len(fields),
        len(fields) - len(cls._field_defaults),
        all(hint is int for _, hint in fields),
        tuple((place, row) for place, (_, hint) in enumerate(fields) if (row := _row_of(hint)) is not None),
    )
    return found


def _row_of(hint: Any) -> type | None:
    """The NamedTuple class of a field that holds a tuple of them; None: it holds something else."""
    args = typing.get_args(hint)
    several = typing.get_origin(hint) is tuple and len(args) == 2 and args[1] is Ellipsis
    return args[0] if several and isinstance(args[0], type) and hasattr(args[0], "_fields") else None


def _check(hint: Any) -> Callable[[Any], bool]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda _: True
    if hint is int:
        return lambda value: type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX  # as in `_integers`
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return lambda value: isinstance(value, hint)  # made from its own checked fields
    if hint in (str, bytes, bool, float):
        return lambda value: type(value) is hint
    if origin is tuple and args == (int, Ellipsis):
        return lambda value: isinstance(value, tuple) and _integers(value)
    if hint == tuple[Any, ...]:
        return lambda value: isinstance(value, tuple)
    if hint == tuple[tuple[Any, ...], ...]:
        return _tuples
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        inner = _check(args[0])
        return lambda value: isinstance(value, tuple) and all(inner(one) for one in value)
    if origin is tuple:
        each = [_check(arg) for arg in args]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(each)
            and all(check(one) for check, one in zip(each, value, strict=True))
        )
    if origin in (Union, types.UnionType):
        options = [_check(arg) for arg in args]
        return lambda value: any(option(value) for option in options)
    if hint is type(None):
        return lambda value: value is None
    raise TypeError(f"messages carry no {hint}")
