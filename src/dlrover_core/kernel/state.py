"""State as plain values: how a fold is packed, unpacked, hashed, and its schema named.

State classes are slotted dataclasses of plain values, tuples, lists, dicts and one another. Packing follows the declared
order of fields, so that a state's hash depends on nothing but its values, and the schema hash on nothing but the shape: a
snapshot of another shape is ignored, never misread. A class that moves to another module keeps its shape.

Fields that a class gained `LATER` stand at its end and are packed only where one of them, or of those after it, is not empty: a
history that knows nothing of them folds to the bytes that it always did.
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
T = TypeVar("T")
Unplain = Callable[[Any], Any]


LATER = {"later": True}
"""The metadata of a field that a class has gained since histories were recorded with it: its default is empty."""


def lasting(made_by: Callable[[], T]) -> T:
    """A field of a slice that outlives a run. The fold sets all other fields of a slice back when a new run begins."""
    return dataclasses.field(default_factory=made_by, metadata={"lasts": True})


def reset(slice_: object) -> None:
    """Set all fields of a slice but the `lasting` ones back to what they are at first."""
    cls: Any = type(slice_)
    for name, made_by in _passing(cls):
        setattr(slice_, name, made_by())


@cache
def _passing(cls: type) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """The fields that do not outlast a run, each with what makes its first value."""
    return tuple((field.name, _first(field)) for field in dataclasses.fields(cls) if "lasts" not in field.metadata)


def _first(field: dataclasses.Field[Any]) -> Callable[[], Any]:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return lambda: field.default


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
    late = [field.name for field in dataclasses.fields(cls) if "later" in field.metadata]
    if late:
        return lambda value: _filled(value, names, len(late))
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


def _filled(value: Any, names: list[str], late: int) -> list[Any]:
    """The fields, without empty ones of those at the end that came later."""
    found = [getattr(value, name) for name in names]
    while late and not found[-1]:
        found.pop()
        late -= 1
    return found


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


def _default(field: dataclasses.Field[Any]) -> Callable[[], Any]:
    """What makes the default value of a field."""
    if field.default_factory is dataclasses.MISSING:
        return lambda: field.default
    return field.default_factory


@cache
def _unplain_class(cls: type) -> Unplain:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    inner = [_unplainer(hints[name]) for name in names]

    late = {field.name: _default(field) for field in dataclasses.fields(cls) if "later" in field.metadata}
    finish = getattr(cls, "__post_init__", None)

    def build(raw: Any) -> Any:
        made: Any = object.__new__(cls)
        for name, unplain, value in zip(names, inner, raw, strict=not late):
            setattr(made, name, unplain(value))
        for name in names[len(raw) :]:
            setattr(made, name, late[name]())
        if finish is not None:
            finish(made)
        return made

    return build
