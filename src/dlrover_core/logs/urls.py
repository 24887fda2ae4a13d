"""What the URLs of logs have in common, whatever their scheme."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import parse_qs, unquote

from dlrover_core.errors import SpecError


def unquoted(part: str, text: str) -> str:
    """The text without its '%' signs. ``part`` says in an error which part of the URL it is. Raises `SpecError`."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise SpecError("log", f"the {part} is not UTF-8 behind its '%' signs") from error


def options(query: str, known: Collection[str]) -> dict[str, str]:
    """The options behind the '?', each of which has one value. Raises `SpecError`, also for one that is not ``known``."""
    try:
        found = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise SpecError("log", "what follows the '?' is not OPTION=VALUE&OPTION=VALUE") from error
    for name, values in found.items():
        if name not in known:
            raise SpecError("log", f"?{name} is not known; there are: {', '.join(known)}")
        if len(values) != 1 or not values[0]:
            raise SpecError("log", f"?{name} needs one value")
    return {name: values[0] for name, values in found.items()}
