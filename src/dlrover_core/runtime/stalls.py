"""Worlds that stand still, as the leader finds them: heartbeats tell how long nobody has made a step, here that becomes an edge.

What is here are levels, like everything that heartbeats tell: exact at its source, where workers note the instant of each step in
memory that their agent reads. The rule is `diagnosis.stall`'s, and what follows from it is decided in `rules.hangs`.

Steps that nobody could make do not count: after a job was stopped as a whole (SIGSTOP, a paused container, a frozen machine) and
goes on, or its nodes were not heard of, or its leader changed, a standstill counts from there.
"""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

from dlrover_core.diagnosis import stall
from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.job import hangs, world
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.wire import find
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.levels import Beat, Levels
from dlrover_core.spec import JobSpec, us

SECOND_US = 1_000_000
FRESH_BEATS = 2.5
LOOK_S = 0.05


class _Heard(NamedTuple):
    generation: int
    pulse: Pulse
    at: float


class Stalls(Levels):
    """What the agents of one master's job said last of their workers' steps."""

    def __init__(self, master: Leader) -> None:
        self._master = master
        self._heard: dict[str, _Heard] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self._lessons: dict[str, asyncio.TimerHandle] = {}
        self._again: dict[str, float] = {}

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """A heartbeat has come."""
        self._note(state.job.spec, node, beat)
        return False

    def _note(self, spec: JobSpec, node: str, beat: Beat) -> None:
        pulse = find(beat.parts, Pulse)
        if pulse.idle_us < 0:
            return
        group, now = group_of(node), asyncio.get_running_loop().time()
        last = self._heard.get(node)
        if last is not None and now - last.at > self._fresh_s():
            # It was stopped, or cut off: what its ranks did meanwhile, or could not do, nobody knows.
            self._again[group] = now
        self._heard[node] = _Heard(beat.generation, pulse, now)
        if not spec.hang_s:
            return
        self._mind_moves(group, beat.generation, pulse.idle_us)
        if group not in self._lessons and self._worth_keeping(group, pulse):
            # The others will have seen it too by then, or it was none.
            self._lessons[group] = asyncio.get_running_loop().call_later(spec.heartbeat_s, self._learn, group)
        # Most beats end here: somebody has just made a step.
        soon_us = us(spec.hang_s) - us(spec.heartbeat_s)
        if pulse.idle_us >= soon_us and group not in self._looks:
            self._look_in(group, LOOK_S)

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._heard.pop(node, None)

    def live(self, group: str) -> dict[str, int] | None:
        """How far a group is by its newest heartbeats; None where none of its world was heard of.

        ``age_us``: since its last step; ``heard_us``: since the newest heartbeat; ``step_us``: the usual time of a step, 0 before
        two were made; ``total``: the steps that the script means to make, 0: it has not said.
        """
        current, now = self._master.state.world.worlds.get(group), asyncio.get_running_loop().time()
        members = current.members if current is not None else ()
        found = [self._heard[one.node] for one in members if one.node in self._heard]
        found = [one for one in found if current is not None and one.generation == current.generation]
        if not found:
            return None
        ages = [int((now - one.at) * SECOND_US) for one in found]
        aged = [one.pulse._replace(idle_us=one.pulse.idle_us + age) for one, age in zip(found, ages, strict=True)]
        pulse = stall.together(aged)
        told = {"step": pulse.step, "age_us": pulse.idle_us, "step_us": pulse.step_us, "total": pulse.total}
        return {**told, "heard_us": min(ages)}

    def close(self) -> None:
        """This master leads no more."""
        for timer in [*self._looks.values(), *self._lessons.values()]:
            timer.cancel()
        self._looks.clear()
        self._lessons.clear()

    def _mind_moves(self, group: str, generation: int, idle_us: int) -> None:
        found = self._master.state.hangs.suspected(group)
        if found is not None and generation == found.generation:
            # An instant before is not a step after.
            since = self._master.now() - found.at
            if idle_us < since - us(LOOK_S) and idle_us < found.threshold_us:
                self._master.tell(hangs.NoteMoving(group, found.number))

    def _worth_keeping(self, group: str, pulse: Pulse) -> bool:
        state = self._master.state
        return stall.worth_keeping(hangs.limits(state.job.spec), pulse, state.hangs.learnt_us(group, pulse.phase))

    def _learn(self, group: str) -> None:
        del self._lessons[group]
        current = self._master.state.world.worlds.get(group)
        pulse = self._together(current) if current is not None else None
        if pulse is not None and self._worth_keeping(group, pulse):
            self._master.tell(hangs.NotePauseLegal(group, pulse.phase, pulse.pause_us))

    def _look_in(self, group: str, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._looks[group] = loop.call_later(after_s, self._look, group)

    def _look(self, group: str) -> None:
        """Is it a hang by now? If not: when could it be one?"""
        del self._looks[group]
        state = self._master.state
        current = state.world.worlds.get(group)
        if current is None or current.finished or not state.job.live or not self._master.may_order():
            # Who is done says that the others are about to be: how long that may take is `finish_s`.
            return
        pulse = self._together(current)
        if pulse is None or (pulse.step < 0 and not state.progress.of(group).generation):
            # Somebody was not heard of, which is another matter; or this job makes no steps that anybody could see.
            return
        limit = stall.threshold(hangs.limits(state.job.spec), pulse, state.hangs.learnt_us(group, pulse.phase))
        patience = state.hangs.patience_us(group, current.generation, pulse.step)
        if patience < 0 or state.hangs.suspected(group) is not None:
            return
        due_us, idle_us = max(limit.us, patience), min(pulse.idle_us, self._calm_us(group))
        if idle_us >= due_us:
            self._master.tell(hangs.NoteStall(group, current.generation, pulse.step, idle_us, limit.us, limit.budget))
        elif due_us - idle_us <= us(state.job.spec.heartbeat_s):
            # The next beat would be too late by as much as it takes to come.
            self._look_in(group, (due_us - idle_us) / SECOND_US + LOOK_S)

    def _calm_us(self, group: str) -> int:
        """For how long steps could have been made, and been seen."""
        heard_s = asyncio.get_running_loop().time() - self._again.get(group, -math.inf)
        calm_us = self._master.now() - self._master.state.job.calm_at
        return int(min(calm_us, heard_s * SECOND_US))

    def _fresh_s(self) -> float:
        return FRESH_BEATS * self._master.state.job.spec.heartbeat_s

    def _together(self, current: world.World) -> Pulse | None:
        """All members as one, as of now; None where one of them was not heard of lately."""
        now, fresh_s = asyncio.get_running_loop().time(), self._fresh_s()
        found = []
        for member in current.members:
            if current.done(member.node):
                continue
            one = self._heard.get(member.node)
            if one is None or one.generation != current.generation or now - one.at > fresh_s:
                return None
            found.append(one.pulse._replace(idle_us=one.pulse.idle_us + int((now - one.at) * SECOND_US)))
        return stall.together(found) if found and current.active else None
