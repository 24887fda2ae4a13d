"""How far each node's workers are, by its newest heartbeat; now and then that is noted in the log."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.job.names import group_of
from dlrover_core.job.progress import NoteProgress
from dlrover_core.job.state import JobState
from dlrover_core.runtime.levels import Beat, Levels
from dlrover_core.spec import us


class Steps(Levels):
    """The newest generation and step of each node."""

    def __init__(self) -> None:
        self._steps: dict[str, tuple[int, int]] = {}

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """A heartbeat has come."""
        self._steps[node] = (beat.generation, beat.step)
        return False

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._steps.pop(node, None)

    def of(self, group: str, generation: int | None = None) -> list[int]:
        """The steps that a group's agents reported last, of one generation or of any."""
        return [
            step for node, (seen, step) in self._steps.items() if generation in (seen, None) and group_of(node) == group
        ]

    def findings(self, state: JobState, now_us: int) -> Iterator[NoteProgress]:
        """Progress that is worth a record."""
        for group, seen in state.progress.groups.items() if state.job.live else ():
            steps = self.of(group, seen.generation)
            if steps and max(steps) > seen.step and now_us - seen.at >= us(state.job.spec.progress_s):
                yield NoteProgress(group, seen.generation, max(steps))
