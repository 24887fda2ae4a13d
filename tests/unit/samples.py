"""One sample of every event, command and message kind, made from the declared types: no kind can be forgotten."""

from __future__ import annotations

import types
import typing
from typing import Any

from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.job.plans import Boundary
from dlrover_core.job.state import REGISTRY
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Origin, Record


def sample(hint: Any, name: str = "") -> Any:
    """A value of a declared type; texts repeat the field's name, so that a swap of two fields shows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return 1
    if hint is bool:
        return True
    if hint is int:
        return sum(name.encode()) or 3
    if hint is float:
        return 0.5
    if hint is str:
        return name or "text"
    if hint is bytes:
        return name.encode()
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return (sample(args[0], name),)
    if origin is tuple:
        return tuple(sample(one, name) for one in args)
    if origin in (typing.Union, types.UnionType):
        return sample(args[0], name)
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return of(hint)
    raise TypeError(f"no sample of {hint}")


def of(cls: Any) -> Any:
    """An instance with every field filled."""
    hints = typing.get_type_hints(cls)
    if cls._field_defaults.get("parts") == ():
        return cls(
            *(sample(hints[name], name) for name in cls._fields if name != "parts"), parts=(of(Pulse), of(Boundary))
        )
    return cls(*(sample(hints[name], name) for name in cls._fields))


def records() -> list[Record]:
    """One record of every event kind, by number; every third has a cause, every fourth an origin."""
    made = []
    for seq, number in enumerate(sorted(REGISTRY.by_kind), start=1):
        cause = seq - 1 if seq % 3 == 0 else 0
        origin = Origin("worker-1-0", 77, seq) if seq % 4 == 0 else None
        made.append(Record(seq, 1_000_000 + seq, 5, cause, of(REGISTRY.by_kind[number].cls), origin))
    return made


CODEC = Codec(REGISTRY)
