"""How many examples a property is tried with: some in `make test`, all in `make nightly`, which tries them on other Pythons."""

from __future__ import annotations

import os

BY_NIGHT = "DLROVER_TESTS_NIGHT"
"""Set by `tools.nightly` for all that it runs."""


def examples(day: int, night: int) -> int:
    """By day the first ones of those by night: they are drawn without chance."""
    return night if os.environ.get(BY_NIGHT) else day
