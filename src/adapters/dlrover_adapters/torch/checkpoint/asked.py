"""What a script asks of `FlashCheckpoint`, checked before anything is allotted."""

from __future__ import annotations

import os

from dlrover_core.checkpoint.slots import slots_for
from dlrover_core.errors import SpecError

ASYNC, BLOCKING = "async", "blocking"


def slots(asked: int | None, every: int | str, world: int, lag: int, *, coupled: bool) -> int:
    """How many slots an arena gets: those that were asked for, else as many as are needed. Raises `SpecError` for too few."""
    fixed = max(1, every) if isinstance(every, int) else lag
    least = slots_for(fixed, world, lag)
    found = asked or least + (not coupled and world > 1)
    if found < least:
        raise SpecError("slots", f"every={every} needs {least} slots in a world of {world}, got {asked}")
    return found


def check(*, mode: str, verify: str, format: str, keep: object, slots: object) -> None:  # noqa: A002  # the word that FlashCheckpoint takes
    """Raises `SpecError`."""
    if mode not in {ASYNC, BLOCKING}:
        raise SpecError("mode", f"'async' or 'blocking', got {mode!r}")
    if verify not in {"sample", "full", "off"}:
        raise SpecError("verify", f"'sample', 'full' or 'off', got {verify!r}")
    if format not in {"dcp", "torch"}:
        raise SpecError("format", f"'dcp' or 'torch', got {format!r}")
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise SpecError("keep", f"a number of checkpoints, 0 for all, got {keep!r}")
    if slots is not None and not (isinstance(slots, int) and 2 <= slots <= 8):
        raise SpecError("slots", f"2 to 8, got {slots!r}")


def check_places(url: object, local: object) -> None:
    """Raises `SpecError`."""
    if not isinstance(url, (str, os.PathLike)):
        raise SpecError("url", f'where checkpoints are stored, a path or a URL; "" for memory alone, got {url!r}')
    if local is not None and not isinstance(local, (str, os.PathLike)):
        raise SpecError("local", f"a folder of this host, got {local!r}")
