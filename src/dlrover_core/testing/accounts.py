"""Time by class, in the words of `Run`, where a log and not the simulator says what it was spent on."""

from __future__ import annotations

from dlrover_core.history import timeline
from dlrover_core.history.goodput import Goodput
from dlrover_core.sim import run as runs

_CLASSES = {
    timeline.RUNNING: runs.TRAINING, timeline.REWORK: runs.REPLAY, timeline.STARTING: runs.STARTUP,
    timeline.DETECTING: runs.DETECT, timeline.DECIDING: runs.STOP, timeline.FORMING: runs.FORM,
    timeline.RESTARTING: runs.LOAD, timeline.WAITING: runs.WAIT,
}  # fmt: skip


def by_class(goodput: Goodput) -> dict[str, float]:
    """Seconds by the classes of `Run.by_class`; what has no such class keeps its own name."""
    found: dict[str, float] = {}
    for kind, length_us in goodput.by_class.items():
        name = _CLASSES.get(kind, kind)
        found[name] = found.get(name, 0.0) + length_us / 1e6
    return found
