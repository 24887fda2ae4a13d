"""A node's link to masters: what is wrong with it, and what waits on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover_core.sim.clock import key_of

Frame = tuple[Callable[..., None], tuple[Any, ...]]


class Link:
    """A node's link to masters. ``clean``: nothing was ever wrong with it, and frames need no look."""

    __slots__ = (
        "black",
        "clean",
        "closed_to_master",
        "closed_to_node",
        "cut",
        "cuts",
        "doubles",
        "down_at",
        "extra_us",
        "held_to_master",
        "held_to_node",
        "key",
        "losses",
        "swaps",
        "up_at",
    )  # fmt: skip

    def __init__(self, node: str) -> None:
        self.key = key_of(node)
        self.clean = True
        self.black = self.cut = False
        self.cuts = self.closed_to_master = self.closed_to_node = 0
        self.extra_us = self.losses = self.doubles = self.swaps = 0
        self.up_at = self.down_at = 0
        self.held_to_master: list[Frame] = []
        self.held_to_node: list[Frame] = []

    def black_out(self) -> None:
        """Its host has no power: nothing leaves it, not even a reset."""
        self.clean, self.black = False, True
        self.held_to_master, self.held_to_node = [], []
