"""Kubernetes' quantities (``500m``, ``16Gi``), as the units of our specs."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from dlrover_core.errors import SpecError

_FORM = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|[KMGTPE]i|[MGTPE]|[eE][0-9]+)?")
_UNITS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)}
_UNITS |= {f"{one}i": Decimal(2 ** (10 * power)) for power, one in enumerate("KMGTPE", 1)}
_UNITS |= {one: Decimal(1000) ** power for power, one in enumerate("MGTPE", 2)}
MIB = Decimal(2**20)


def amount(value: object, field: str) -> Decimal:
    """The number that a quantity is. Raises `SpecError`."""
    text = str(value).strip()
    told = _FORM.fullmatch(text)
    if told is None or isinstance(value, bool):
        raise SpecError(field, f"{value!r} is no quantity: write a number, 500m, or 16Gi")
    unit = told[2] or ""
    return Decimal(told[1]) * (Decimal(10) ** int(unit[1:]) if unit[:1] in {"e", "E"} and unit[1:] else _UNITS[unit])


def mib(value: object, field: str) -> int:
    """Memory in MiB, rounded up. Raises `SpecError`."""
    return math.ceil(amount(value, field) / MIB)


def thousandths(value: object, field: str) -> int:
    """CPUs in thousandths, rounded up. Raises `SpecError`."""
    return math.ceil(amount(value, field) * 1000)
