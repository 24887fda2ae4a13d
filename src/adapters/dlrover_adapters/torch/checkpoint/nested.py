"""Containers in containers, with tensors among their leaves: walked, taken apart, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch

Path = tuple[Any, ...]
LARGE_BYTES = 256 * 1024
"""Tensors of at least so much in an ``extra`` lie in the arena as tensors; smaller ones are serialised with the rest of it."""
_MARK = "__dlrover_tensor__"
_DIGITS_MAX = 18
"""Of a place in a list."""


def name_of(path: Path) -> str:
    """As torch.distributed.checkpoint flattens."""
    return ".".join(map(str, path))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is here: all of it, or a DTensor's shard."""
    return cast("torch.Tensor", getattr(tensor, "_local_tensor", tensor))


def leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any, Any, Any]]:
    """Leaves with path, owner and key. As torch.distributed.checkpoint: lists are leaves unless tensors or dicts are in them."""
    items: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, value in items:
        at = (*path, key if isinstance(node, list) else str(key))
        if (isinstance(value, Mapping) and value) or (isinstance(value, list) and holds(value)):
            yield from leaves(value, at)
        else:
            yield at, value, node, key


def reached(row: list[Any], key: str) -> int | None:
    """The place in a list that a stored name leads to: one that is there, or the next one, which is made. None: neither.

    A stored name may hold any number: the list must not grow by more than what is stored for it.
    """
    place = int(key) if key.isdecimal() and len(key) <= _DIGITS_MAX else -1
    if not 0 <= place <= len(row):
        return None
    if place == len(row):
        row.append(None)
    return place


def in_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts names so that places of a list come in turn: 0, 1, ..., 10."""
    parts = name.split(".")
    return tuple(
        (False, int(one), "") if one.isdecimal() and len(one) <= _DIGITS_MAX else (True, 0, one) for one in parts
    )


def holds(values: list[Any]) -> bool:
    """Are there tensors or dicts in a list?"""
    return any(isinstance(one, (torch.Tensor, Mapping)) or (isinstance(one, list) and holds(one)) for one in values)


def is_large(value: Any) -> bool:
    """A tensor of at least `LARGE_BYTES`."""
    return isinstance(value, torch.Tensor) and local(value).nbytes >= LARGE_BYTES


def marked(node: Any, path: Path, which: Callable[[Any], bool] = is_large) -> Any:
    """A copy of the containers, with the name of each tensor in its place, of large ones or ``which``."""
    if which(node):
        return {_MARK: name_of(path)}
    if isinstance(node, Mapping):
        changed = {key: marked(value, (*path, str(key)), which) for key, value in node.items()}
        return changed if any(changed[key] is not node[key] for key in node) else node
    if isinstance(node, list) and holds(node):
        return [marked(value, (*path, number), which) for number, value in enumerate(node)]
    return node


def unmarked(node: Any, room: Mapping[str, Any]) -> Any:
    """The containers with tensors where marks were; changed in place."""
    if isinstance(node, Mapping):
        if _MARK in node:
            return room[node[_MARK]]
        if isinstance(node, MutableMapping):
            for key in list(node):
                node[key] = unmarked(node[key], room)
    elif isinstance(node, list):
        node[:] = [unmarked(one, room) for one in node]
    return node
