"""Kubernetes' quantities (``500m``, ``16Gi``), as the units of our specs."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from dlrover_core.errors import SpecError

_FORM = re.compile(r"\+?([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})([numk]|[KMGTPE]i|[MGTPE]|[eE][+-]?[0-9]{1,2})?")
_UNITS = {"": Decimal(1), "k": Decimal(1000)}
_UNITS |= {one: Decimal(1000) ** -power for power, one in enumerate("mun", 1)}
_UNITS |= {f"{one}i": Decimal(2 ** (10 * power)) for power, one in enumerate("KMGTPE", 1)}
_UNITS |= {one: Decimal(1000) ** power for power, one in enumerate("MGTPE", 2)}
MIB = Decimal(2**20)
MOST = Decimal(2**63 - 1)
"""Kubernetes has no larger one."""
SHOWN_MAX = 80


def amount(value: object, field: str) -> Decimal:
    """The number that a quantity is. Raises `SpecError`."""
    told = _FORM.fullmatch(str(value).strip())
    if told is None or isinstance(value, bool):
        raise SpecError(field, f"{shown(value)} is no quantity: write a number, 500m, or 16Gi")
    unit = told[2] or ""
    power = unit[:1] in {"e", "E"} and unit[1:]
    found = Decimal(told[1]) * (Decimal(10) ** int(unit[1:]) if power and unit != "Ei" else _UNITS[unit])
    if found > MOST:
        raise SpecError(field, f"{shown(value)} is more than any host has: write a number, 500m, or 16Gi")
    return found


def mib(value: object, field: str) -> int:
    """Memory in MiB, rounded up. Raises `SpecError`."""
    return math.ceil(amount(value, field) / MIB)


def thousandths(value: object, field: str) -> int:
    """CPUs in thousandths, rounded up. Raises `SpecError`."""
    return math.ceil(amount(value, field) * 1000)


def shown(value: object) -> str:
    """A value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
