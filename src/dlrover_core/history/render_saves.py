"""A run's checkpoints as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.history.phrases import duration, size
from dlrover_core.history.saves import Saves
from dlrover_core.history.words.checkpoints import tier
from dlrover_core.words import count


def lines(told: Saves) -> Iterator[str]:
    """As text for a terminal."""
    if not told.any:
        return
    newest = f", the newest of step {told.newest}" if told.committed else ""
    ordered = f", {told.ordered} of them because a generation had ended" if told.ordered else ""
    yield f"{count(told.committed, 'checkpoint')} on storage{newest}{ordered} ({size(told.written_bytes)} written)"
    for one in told.restores:
        longest = f", the longest {duration(one.longest_us)}" if one.count > 1 else ""
        yield f"  resumed {count(one.count, 'time')} from {tier(one.tier)}, in {duration(one.total_us)}{longest}"
    if told.fell:
        how_often = count(told.fell, "time")
        yield f"  {how_often} a tier had a step that was not whole or was damaged: an older step, or the next tier, was used"
    if told.outages:
        now = f"; {', '.join(told.down)} cannot write now" if told.down else ""
        yield f"  storage was down {count(told.outages, 'time')}, for {duration(told.outage_us)}{now}"
