"""Makes plain text of words from outside: exception texts, host names, reasons, paths, lines of output.

Such words may hold anything that a Python string can: half characters (lone surrogates) that UTF-8 cannot encode, NUL, escape
sequences that a terminal obeys, a hundred thousand characters. Plain text can be encoded, stored and shown, and is short. Every
border where words enter calls `plain` or `plain_fields` once; code behind the border relies on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")

NAMED_MAX = 8
"""How many of a list a sentence names, unless it says otherwise."""

TEXT_CHARS_MAX = 16_384
"""The longest text of one field."""

TOTAL_CHARS_MAX = 131_072
"""The longest text of all fields of one message: in UTF-8 it takes half of a frame at most."""

INTEGER_MAX = 2**62
"""No number of a message is larger: there is room to add and subtract in what msgpack and SQLite can hold."""

_CUT = "..."
# Sequences with their end. A title without its end would swallow all words behind it: `_LONE` takes only its start.
_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# Beyond control characters and half characters, what changes the direction of the text that a terminal shows.
_LOUD = re.compile("[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONE = re.compile(r"\x1b[\[\]PX^_]?|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def first_few(names: Sequence[object], most: int = NAMED_MAX, between: str = ", ") -> str:
    """The first ``most`` of ``names`` in one text, and how many more there are: ``a, b and 3 more``."""
    shown, left_out = between.join(map(str, names[:most])), len(names) - most
    if left_out <= 0:
        return shown
    return f"{shown}{'' if between == ', ' else between.rstrip()} and {left_out} more"


def count(number: int, one: str) -> str:
    """'1 node', '2 nodes'."""
    return f"{number} {one}{'' if number == 1 else 's'}"


def without_sequences(text: str) -> str:
    """``text`` without the escape sequences that a terminal obeys."""
    return _SEQUENCES.sub("", text) if "\x1b" in text else text


def plain(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    r"""``text`` without escape sequences, in at most ``chars_max`` characters; '...' marks the cut.

    Line breaks and tabs stay. A control character is shown as ``\x00``, a byte that is not UTF-8 (as Python's file names hold it)
    as ``\xe9``, any other half character as ``\ud800``.
    """
    if len(text) <= chars_max and _LONE.search(text) is None:
        return text
    cut = len(text) > chars_max
    bare = without_sequences(text[:chars_max]).replace("\r\n", "\n").replace("\r", "\n")
    bare = _LONE.sub(_escaped, bare)
    if cut or len(bare) > chars_max:
        bare = bare[: max(0, chars_max - len(_CUT))] + _CUT[:chars_max]
    return bare


def plain_fields(message: T, total_max: int = TOTAL_CHARS_MAX) -> T:
    """The same tuple with `plain` texts, and with numbers within `INTEGER_MAX`; what is neither stays as it is.

    All texts together have at most ``total_max`` characters: the later ones are cut.
    """
    return cast(T, _Fields(total_max).clean(message))


def quiet_json(text: str) -> str:
    """The same JSON without characters that a terminal obeys or that cannot be encoded: they are escaped, as the others are."""
    return _LOUD.sub(lambda found: f"\\u{ord(found[0]):04x}", text) if not text.isascii() or "\x7f" in text else text


class _Fields:
    """Cleans one message, and counts its characters."""

    def __init__(self, left: int) -> None:
        self._left = left

    def clean(self, value: Any) -> Any:
        if isinstance(value, str):
            bare = plain(value, min(self._left, TEXT_CHARS_MAX))
            self._left -= len(bare)
            return bare
        if type(value) is int and not -INTEGER_MAX <= value <= INTEGER_MAX:
            return INTEGER_MAX if value > 0 else -INTEGER_MAX
        if isinstance(value, tuple):
            found = [self.clean(one) for one in value]
            same = all(one is other for one, other in zip(found, value, strict=True))
            return value if same else tuple.__new__(type(value), found)
        return value


def _escaped(found: re.Match[str]) -> str:
    # Of a sequence without its end, the letters behind ESC.
    code = ord(found[0][0])
    if code == 0x1B:
        return f"\\x1b{found[0][1:]}"
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
