"""Resource quantities: `100m`, `64Mi`, `2`."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$")
_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


def amount(text: object) -> Decimal:
    """The number that a quantity stands for.

    Raises:
        ValueError: the text is no quantity.
    """
    match = _FORM.match(str(text))
    if match is None:
        raise ValueError(text)
    number, suffix = match.groups()
    if suffix in _SUFFIXES:
        return Decimal(number) * _SUFFIXES[suffix]
    if suffix[:1] in {"e", "E"} and suffix[1:].lstrip("+-").isdigit():
        return Decimal(number).scaleb(int(suffix[1:]))
    raise ValueError(text)
