"""The highest fencing token of a run, in the cluster's key-value store. It blocks."""

from __future__ import annotations

from dlrover_backends.ray import private

DIGITS = 20  # of every key, so that none begins another one


def newest(prefix: str, token: int) -> int:
    """The highest token of a master that has given orders, this one among them. ``prefix``: of the tokens' keys.

    Each token is a key of its own: of two masters that look and write at once neither overwrites the other's.
    """
    known = _known(prefix)
    if token > max(known, default=-1):
        private.put(f"{prefix}{token:0{DIGITS}d}", b"1", overwrite=False)
        known = _known(prefix)
    highest = max(known, default=token)
    for old in known - {highest}:
        private.remove(f"{prefix}{old:0{DIGITS}d}")
    return highest


def _known(prefix: str) -> set[int]:
    return {int(one.removeprefix(prefix)) for one in private.keys(prefix)}
