"""Boxes of tensors: do they cover all of it, once; and nested states from the keys that lead to their leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


def fault(full_shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """What keeps ``boxes`` from covering a tensor of ``full_shape`` completely and once; empty: nothing."""
    for offsets, shape in boxes:
        if not len(offsets) == len(shape) == len(full_shape):
            return f"a chunk of {len(shape)} dimensions in a tensor of {len(full_shape)}"
        if any(
            at < 0 or length < 0 or at + length > full
            for at, length, full in zip(offsets, shape, full_shape, strict=True)
        ):
            return f"a chunk of {list(shape)} at {list(offsets)} in a tensor of {list(full_shape)}"
    solid = sorted(box for box in boxes if prod(box[1]))
    there, wanted = sum(prod(shape) for _, shape in solid), prod(full_shape)
    if wanted and there < wanted:
        return f"{wanted - there:,} of {wanted:,} elements are nowhere"
    clash = _overlap(solid)
    if clash is not None:
        return f"the chunks at {list(clash[0])} and {list(clash[1])} overlap"
    return "" if boxes else "no chunk at all"


def _overlap(boxes: Sequence[Box]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Two of these, sorted by their offsets, that have an element in common."""
    for number, (offsets, shape) in enumerate(boxes):
        for other, length in boxes[number + 1 :]:
            if offsets and other[0] >= offsets[0] + shape[0]:
                break  # and all that follow begin later still
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, shape, other, length, strict=True)):
                return offsets, other
    return None


def nested(leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> Any:
    """The nested state of these (keys, value). A number among the keys is a place in a list, as in torch's own checkpoints."""
    root: dict[Any, Any] = {}
    for path, value in leaves:
        here: Any = root
        for key, following in itertools.pairwise(path):
            fresh: Any = [] if type(following) is int else {}
            if isinstance(here, list):
                _reach(here, key)
                if here[key] is None:
                    here[key] = fresh
                here = here[key]
            else:
                here = here.setdefault(key, fresh)
        if isinstance(here, list):
            _reach(here, path[-1])
        here[path[-1]] = value
    return root


def _reach(row: list[Any], place: int) -> None:
    row.extend([None] * (place + 1 - len(row)))
