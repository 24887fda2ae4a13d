"""The key-value store of a Ray cluster, as a dictionary."""

from __future__ import annotations

from collections.abc import Callable


class Store(dict[str, bytes]):
    """The store. ``on_put`` is called once, before the next write."""

    def __init__(self) -> None:
        super().__init__()
        self.on_put: Callable[[], None] | None = None

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """As `private.put`: was there none before?"""
        before, self.on_put = self.on_put, None
        if before is not None:
            before()
        new = key not in self
        if new or overwrite:
            self[key] = value
        return new
