"""`dlrover status` tells the step of the newest heartbeat, the rate and the time left; `dlrover report` tells slow imports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from drive import SECOND, Drive

from dlrover_adapters.cli import live
from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.history import render, status_of
from dlrover_core.history.incidents import Story
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.stalls import Stalls
from dlrover_core.testing import virtual_loop


class Leader:
    """A master as far as this needs one."""

    def __init__(self, drive: Drive) -> None:
        self.state: Any = drive.state
        self.now = lambda: drive.now

    def may_order(self) -> bool:
        """It leads."""
        return True

    def tell(self, command: Any) -> None:
        """Nothing comes of it."""


def heard(drive: Drive, beat: Beat, node: str = "worker-0-0") -> Any:
    """What the leader tells two seconds after this beat."""

    async def hear() -> Any:
        stalls = Stalls(Leader(drive))  # type: ignore[arg-type]
        stalls.heard(drive.state, node, beat)
        await asyncio.sleep(2)
        found = stalls.live("worker")
        stalls.close()
        return found

    return virtual_loop.run(hear())


def test_the_step_of_the_newest_heartbeat_is_shown() -> None:
    """With its age, the rate, the time left, and when that was heard: not the step of the last record."""
    drive = Drive().up()
    beat = Beat(1, 165, 0, (Pulse(165, SECOND // 2, step_us=SECOND // 4, total=1165),))
    found = heard(drive, beat)
    assert found == {"step": 165, "age_us": 2_500_000, "step_us": 250_000, "total": 1165, "heard_us": 2_000_000}
    said = live.Told("here:1", {"live": found})
    text = render.status(status_of(drive.state), live=live.steps_of(said))
    words = "step 165 2.500 s ago, 4 steps/s, 4 min 10 s left of 1165 steps (heard 2.000 s ago)"
    assert words in text
    assert words in "\n".join(live.lines(said))


def test_beats_of_an_older_generation_tell_nothing() -> None:
    """Between two worlds the log is what is known."""
    assert heard(Drive().up(), Beat(0, 165, 0, (Pulse(165, 0),))) is None


def story(down_s: float, imports_s: float) -> Story:
    """A mended incident, and what of its time were imports."""
    began, us = SECOND, {"stepped_at": round((1 + down_s) * SECOND), "imports_us": round(imports_s * SECOND)}
    return Story(1, 7, "worker-0-0", 1, began, began, "killed", 6, **us)


def test_the_report_says_what_imports_took_and_what_to_type() -> None:
    """Where they are a good part of the time from a death to the next step; else nothing is said."""

    def lines(*stories: Story) -> list[str]:
        return list(render._imports(SimpleNamespace(incidents=stories)))  # type: ignore[arg-type]

    said = lines(story(3.6, 3.0), story(1.0, 0.6))
    assert said[0] == "  3.0 of 3.6 s of incident 1 were imports"
    assert "--preload auto" in said[1]
    assert not lines(story(3.6, 0.4), story(10.0, 2.0), story(0.1, 0.0))


def test_an_older_master_says_nothing_of_it() -> None:
    """Then the log's step is shown."""
    assert live.steps_of(live.Told("here:1", {"step": 3})) is None
    assert live.steps_of(live.Told("here:1", {"live": {"step": -1, "age_us": 0}})) is None
