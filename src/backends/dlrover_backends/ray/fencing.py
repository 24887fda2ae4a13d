"""The highest fencing token of a run, in the cluster's key-value store. It blocks."""

from __future__ import annotations

from dlrover_backends.ray import private
from dlrover_backends.shared.asking import StaleToken

DIGITS = 20  # of every key, so that none begins another one


class Fence:
    """The tokens of one run, as one desk sees them. ``prefix``: of their keys.

    ``is_removed``: were the run's keys removed since this desk's first order, as ``dlrover ray rm`` does it? It stays so.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self._began, self.is_removed = prefix, False, False

    def check(self, token: int) -> None:
        """An order of the master with this token comes. Raises `StaleToken` where a newer one has given orders."""
        if (highest := self.newest(token)) > token:
            raise StaleToken(token, highest)

    def newest(self, token: int) -> int:
        """The highest token of a master that has given orders, this one among them.

        Each token is a key of its own: of two masters that look and write at once neither overwrites the other's. Nothing is
        written for a run that was removed.
        """
        known = self._known()
        self.is_removed = self.is_removed or (self._began and not known)
        if self.is_removed:
            return max(known, default=token)
        if token > max(known, default=-1):
            private.put(f"{self._prefix}{token:0{DIGITS}d}", b"1", overwrite=False)
            known = self._known()
        self._began = True
        highest = max(known, default=token)
        for old in known - {highest}:
            private.remove(f"{self._prefix}{old:0{DIGITS}d}")
        return highest

    def _known(self) -> set[int]:
        return {int(one.removeprefix(self._prefix)) for one in private.keys(self._prefix)}
