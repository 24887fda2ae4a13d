"""Untrusted fields become the class that they claim to be, or `MalformedMessage` names the field that cannot."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Union, cast

from dlrover_core.errors import MalformedMessage
from dlrover_core.words import INTEGER_MAX

Message = tuple[object, ...]


def checked(cls: type, fields: tuple[Any, ...]) -> Message:
    """``cls`` from untrusted fields: count and types as declared; missing trailing fields take their defaults."""
    checks = _checks(cls)
    defaults = cast(Any, cls)._field_defaults
    if not len(checks) - len(defaults) <= len(fields) <= len(checks):
        raise MalformedMessage(f"{cls.__name__} has {len(checks)} fields, got {len(fields)}")
    for (name, check), value in zip(checks, fields, strict=False):
        if not check(value):
            raise MalformedMessage(f"{cls.__name__}.{name}: {_shown(value)} is not what was declared")
    return cast(Message, cls(*fields))


def _shown(value: Any) -> str:
    # Never the text of a container: at a depth that msgpack still reads, Python's own repr raises RecursionError.
    shown = f" {str(value)[:40]!r}" if isinstance(value, (int, float, str)) else ""
    return f"{type(value).__name__}{shown}"


_CHECKS: dict[type, tuple[tuple[str, Callable[[Any], bool]], ...]] = {}


def _checks(cls: type) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    found = _CHECKS.get(cls)
    if found is None:
        hints = typing.get_type_hints(cls)
        found = _CHECKS[cls] = tuple((name, _check(hints[name])) for name in cast(Any, cls)._fields)
    return found


def _check(hint: Any) -> Callable[[Any], bool]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda _: True
    if hint is int:
        # bool is an int to Python, not to us; the bound leaves room to add and subtract in what msgpack and SQLite can hold.
        return lambda value: type(value) is int and -INTEGER_MAX <= value <= INTEGER_MAX
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return lambda value: isinstance(value, hint)  # made from its own checked fields
    if hint in (str, bytes, bool, float):
        return lambda value: type(value) is hint
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
