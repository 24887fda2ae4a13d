"""Values of options that argparse does not know, with errors that say what would do."""

from __future__ import annotations

import argparse
import re

from dlrover_core.errors import SpecError

DIGITS_MAX = 18  # longer ones fit no counter, and the interpreter refuses to read the longest
_BYTES = re.compile(r"([0-9]+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


def whole(text: str) -> int | None:
    """The number that ``text`` is, from 0 on; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else None


def seconds(text: str) -> float:
    """A number of seconds, 0 for never."""
    try:
        found = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from error
    if not 0 <= found < 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; 0 means never")
    return found


def size_in_bytes(text: str) -> int:
    """512K, 128M, 1G: a size."""
    found = _BYTES.fullmatch(text.strip())
    if found is None or len(found[1]) > DIGITS_MAX - 6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; say for example 512K, 128M, 1G, or 0 for no bound")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2].lower()]


def ranks_filter(text: str) -> tuple[int, ...] | None:
    """``--local-ranks-filter``: the local ranks to show; None: all. Raises `SpecError`."""
    if not text:
        return None
    parts = [one.strip() for one in text.split(",")]
    ranks = [whole(one) for one in parts]
    if any(one is None for one in ranks):
        raise SpecError("local-ranks-filter", f"{text!r} is not a list of local ranks; say for example 0,1")
    return tuple(one for one in ranks if one is not None)
