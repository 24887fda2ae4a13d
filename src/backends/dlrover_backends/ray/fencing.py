"""Whose orders a run takes: its highest fencing token, and whether it was removed. In the key-value store; it blocks."""

from __future__ import annotations

import time

from dlrover_backends.ray import names, private
from dlrover_backends.ray.names import Run
from dlrover_backends.shared.asking import StaleToken

DIGITS = 20  # of every key, so that none begins another one
MARK_S = 30 * 86400.0
"""So long a removed run's mark stays, at the least. Masters of the run that live on for longer are heard again."""


class Fence:
    """The tokens of one run, as one desk sees them, and its mark, if it was removed.

    ``is_removed``: was the run removed, as `bar` said, or were its keys since this desk's first order? It stays so.
    """

    def __init__(self, run: Run) -> None:
        self._prefix, self._mark, self._began, self.is_removed = run.key(names.TOKEN), run.mark, False, False

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
        if self.is_barred():
            return max(known, default=token)
        if token > max(known, default=-1):
            private.put(self._key(token), b"1", overwrite=False)
            if self.is_barred():  # whoever removed the run's keys meanwhile did not see this one
                private.remove(self._key(token))
            known = self._known()
        self._began = True
        highest = max(known, default=token)
        for old in known - {highest}:
            private.remove(self._key(old))
        return highest

    def is_barred(self) -> bool:
        """Was the run removed, as far as this desk knows or a mark says?"""
        self.is_removed = self.is_removed or private.get(self._mark) is not None
        return self.is_removed

    def bar(self) -> None:
        """From now on no desk takes orders of this run. The marks of runs that were removed `MARK_S` ago go."""
        now = time.time()
        private.put(self._mark, f"{now:.0f}".encode())
        for key in private.keys(names.REMOVED):
            if now - float(private.get(key) or now) > MARK_S:
                private.remove(key)

    def _key(self, token: int) -> str:
        return f"{self._prefix}{token:0{DIGITS}d}"

    def _known(self) -> set[int]:
        return {int(one.removeprefix(self._prefix)) for one in private.keys(self._prefix)}
