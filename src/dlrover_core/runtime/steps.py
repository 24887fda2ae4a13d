"""The step of each node's workers, by its newest heartbeat; now and then it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dlrover_core.job.incidents import NoteUsed
from dlrover_core.job.progress import NoteProgress
from dlrover_core.job.state import JobState
from dlrover_core.rules import coupling
from dlrover_core.runtime.levels import Beat, Levels
from dlrover_core.spec import us


class _Heard(NamedTuple):
    set: str
    generation: int
    step: int


class Steps(Levels):
    """The newest generation and step of each node. ``_used``: steps of a stepless set's users when that set began to run."""

    def __init__(self) -> None:
        self._steps: dict[str, _Heard] = {}
        self._used: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """Take in a heartbeat. True: it may have mended a set that its workers use."""
        self._steps[node] = _Heard(state.set_of(node), beat.generation, beat.step)
        return bool(self._used)

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._steps.pop(node, None)

    def of(self, name: str, generation: int | None = None) -> list[int]:
        """The newest steps of a set's agents, of one generation or of any."""
        heard = (one for one in self._steps.values() if one.set == name)
        return [one.step for one in heard if generation in (one.generation, None)]

    def findings(self, state: JobState, now_us: int) -> Iterator[NoteProgress | NoteUsed]:
        """Progress that is worth a record, and sets without steps that a user's step has mended."""
        for name, seen in state.progress.groups.items() if state.job.live else ():
            steps = self.of(name, seen.generation)
            if steps and max(steps) > seen.step and now_us - seen.at >= us(state.job.spec.progress_s):
                yield NoteProgress(name, seen.generation, max(steps))
        if state.sets.several and state.job.live:
            yield from self._mended(state)

    def _mended(self, state: JobState) -> Iterator[NoteUsed]:
        """Broken sets without steps that run again, and whose user has made a step since."""
        before, self._used = self._used, {}
        for name in {state.set_of(one.node) for one in state.incidents.by_number.values() if not one.closed}:
            world = state.world.worlds.get(name)
            if world is None or not world.active or len(world.started) < len(world.members):
                continue
            if name in state.progress.groups:
                continue
            how_far = {user: self._reached(user) for user in coupling.users(state, name)}
            seen = before.get((name, world.generation), how_far)
            self._used[name, world.generation] = {**how_far, **seen}
            if any(reached > seen.get(user, reached) for user, reached in how_far.items()):
                yield NoteUsed(name, world.generation)

    def _reached(self, name: str) -> tuple[int, int]:
        """The newest generation that a set's agents reported, and its step."""
        return max(((one.generation, one.step) for one in self._steps.values() if one.set == name), default=(0, -1))
