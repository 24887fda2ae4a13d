"""The campaign `borders`: a million foreign words at every border where words enter (`tests.unit.borders`).

A trial is one seed: some hundred texts, names, lines, packets and frames, each sent through its border as a worker, a host,
another process or a person would. A border that raises, logs a traceback, lets through what cannot be encoded or what a terminal
obeys, or takes longer than `TRIAL_S` breaks the trial.
"""

from __future__ import annotations

import signal
import types
from typing import Any

from tests.unit import borders

TRIAL_S = 60


def trial(seed: int) -> dict[str, Any]:
    """One seed. Raises AssertionError for what hangs, and whatever a border raises."""

    def late(_number: int, _frame: types.FrameType | None) -> None:
        raise AssertionError(f"a border hangs: the trial is not over after {TRIAL_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(TRIAL_S)
    try:
        return dict(borders.trial(seed))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
