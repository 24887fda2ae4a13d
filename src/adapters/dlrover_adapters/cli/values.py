"""Values of options that argparse does not know, with errors that say what would do."""

from __future__ import annotations

import argparse
import re

_BYTES = re.compile(r"(\d+)\s*([kmgt]?)(i?b)?", re.IGNORECASE)


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
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; say for example 512K, 128M, 1G, or 0 for no bound")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2].lower()]
