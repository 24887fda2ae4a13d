"""The names of a run that have been deleted, in the cluster's key-value store: none of them is used again. All of it blocks.

A mark says the time that the node has to end too, so that every desk heeds it: the next one of the same master, and those of
masters on other hosts.
"""

from __future__ import annotations

import json

from dlrover_backends.ray import names, private
from dlrover_backends.ray.names import Run


class Deletions:
    """The deleted names of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def names(self) -> set[str]:
        """All of them."""
        prefix = self._run.key(names.DELETED)
        return {key.removeprefix(prefix) for key in private.keys(prefix)}

    def mark(self, name: str, grace_s: float) -> None:
        """Write down that a name is used up, and the seconds its node has to end. Asked again, the shorter time holds."""
        key = self._run.key(names.DELETED, name)
        before = _grace_s(private.get(key))
        if before is None or grace_s < before:
            private.put(key, json.dumps({"grace_s": grace_s}).encode())

    def grace_s(self, name: str) -> float:
        """The seconds that the node of a deleted name has to end, from when it was told; 0: the mark does not say."""
        return _grace_s(private.get(self._run.key(names.DELETED, name))) or 0.0


def _grace_s(raw: bytes | None) -> float | None:
    """What a mark says; None: there is none, or it is an earlier version's ``1``."""
    told = json.loads(raw) if raw else None
    return float(told["grace_s"]) if isinstance(told, dict) else None
