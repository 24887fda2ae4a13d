"""State as plain values: how a fold is packed, unpacked, hashed, and its schema named.

State classes are slotted dataclasses of plain values, tuples, lists, dicts and one another. Packing follows the declared
order of fields, so that a state's hash depends on nothing but its values, and the schema hash on nothing but the shape: a
snapshot of another shape is ignored, never misread. A class that moves to another module keeps its shape.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
import typing
from collections.abc import Callable
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgpack

S = TypeVar("S")
Unplain = Callable[[Any], Any]


def pack(state: object) -> bytes:
    """A state as bytes."""
    return cast(bytes, msgpack.packb(state, default=_values))


def _values(value: Any) -> Any:
    """What msgpack does not know by itself: a dataclass, as the array of its fields."""
    cls: Any = type(value)
    return _values_of(cls)(value)


@lru_cache(maxsize=256)
def _values_of(cls: type) -> Callable[[Any], Any]:
    names = [field.name for field in dataclasses.fields(cls)]
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


def unpack(cls: type[S], data: bytes) -> S:
    """The state that `pack` made these bytes of."""
    raw = msgpack.unpackb(data, use_list=False, strict_map_key=False)
    return cast(S, _unplainer(cls)(raw))


def digest(state: object) -> str:
    """128 bits of blake2b over the packed state, as hex: what two replicas compare."""
    return hashlib.blake2b(pack(state), digest_size=16).hexdigest()


def schema(cls: type) -> str:
    """A hash of the shape of a state class and of all it holds."""
    lines: list[str] = []
    _describe(cls, lines, set())
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _describe(cls: Any, lines: list[str], seen: set[Any]) -> None:
    for part in typing.get_args(cls):
        _describe(part, lines, seen)
    names = _field_names(cls)
    if cls in seen or not names:
        return
    seen.add(cls)
    hints = typing.get_type_hints(cls)
    for name in names:
        lines.append(f"{cast(type, cls).__name__}.{name}: {_named(hints[name])}")
        _describe(hints[name], lines, seen)


def _named(hint: Any) -> str:
    """A type as it is written, by the names of classes alone, without their modules."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if not args:
        return str(getattr(hint, "__name__", hint))
    # Python before 3.14 spells the two kinds of optional in two ways.
    own = "Union" if origin in (typing.Union, types.UnionType) else _named(origin)
    return f"{own}[{', '.join(map(_named, args))}]"


def _field_names(cls: Any) -> tuple[str, ...]:
    """Fields of a dataclass or a NamedTuple, in order; none for anything else."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, "_fields", ()))


def _same(value: Any) -> Any:
    return value


def _unplainer(hint: Any) -> Unplain:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _unplain_class(hint)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return lambda raw: tuple.__new__(hint, raw)
    if origin is dict:
        inner = _unplainer(args[1])
        return lambda raw: {key: inner(one) for key, one in raw.items()}
    if origin is list:
        inner = _unplainer(args[0])
        return lambda raw: [inner(one) for one in raw]
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        inner = _unplainer(args[0])
        return _same if inner is _same else lambda raw: tuple(inner(one) for one in raw)
    optional = [arg for arg in args if arg is not type(None)]
    if len(optional) == 1 and len(args) == 2 and origin is not tuple:
        inner = _unplainer(optional[0])
        return lambda raw: None if raw is None else inner(raw)
    return _same


@cache
def _unplain_class(cls: type) -> Unplain:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    inner = [_unplainer(hints[name]) for name in names]

    def build(raw: Any) -> Any:
        made: Any = object.__new__(cls)
        for name, unplain, value in zip(names, inner, raw, strict=True):
            setattr(made, name, unplain(value))
        return made

    return build
