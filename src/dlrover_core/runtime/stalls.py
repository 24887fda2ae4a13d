"""Worlds that stand still: heartbeats report how long no rank has made a step, and the leader makes events of it.

Heartbeats report exact times, because workers note the instant of each step in memory that their agent reads. The rule is
in `diagnosis.stall`; what follows is decided in `rules.hangs`.

Time in which no step could be made does not count. If a job was stopped as a whole (SIGSTOP, a paused container, a frozen
machine), its nodes were not heard, or its leader changed, a standstill counts from the end of that.
"""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

from dlrover_core.diagnosis import stall
from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.job import hangs, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.wire import find
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.levels import Beat, Levels
from dlrover_core.spec import us

SECOND_US = 1_000_000
FRESH_BEATS = 2.5
LOOK_S = 0.05


class _Heard(NamedTuple):
    generation: int
    pulse: Pulse
    at: float


class Stalls(Levels):
    """The newest reports of steps, from the agents of one master's job."""

    def __init__(self, master: Leader) -> None:
        self._master = master
        self._heard: dict[str, _Heard] = {}
        self._looks: dict[str, asyncio.TimerHandle] = {}
        self._lessons: dict[str, asyncio.TimerHandle] = {}
        self._again: dict[str, float] = {}

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """Take in a heartbeat."""
        self._note(state, node, beat)
        return False

    def _note(self, state: JobState, node: str, beat: Beat) -> None:
        pulse = find(beat.parts, Pulse)
        if pulse.idle_us < 0:
            return
        group, now = state.set_of(node), asyncio.get_running_loop().time()
        last = self._heard.get(node)
        if last is not None and now - last.at > self._fresh_s():
            # The node was stopped or cut off: what its ranks did meanwhile is unknown.
            self._again[group] = now
        self._heard[node] = _Heard(beat.generation, pulse, now)
        spec, hang_s = state.job.spec, state.job.policy(group).hang_s
        if not hang_s:
            return
        self._mind_moves(group, beat.generation, pulse.idle_us)
        if group not in self._lessons and self._worth_keeping(group, pulse):
            # If it is a standstill, the other nodes have seen it too by then.
            self._lessons[group] = asyncio.get_running_loop().call_later(spec.heartbeat_s, self._learn, group)
        # Most heartbeats end here: a rank has just made a step.
        soon_us = us(hang_s) - us(spec.heartbeat_s)
        if pulse.idle_us >= soon_us and group not in self._looks:
            self._look_in(group, LOOK_S)

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._heard.pop(node, None)

    def live(self, group: str) -> dict[str, int] | None:
        """How far a group is by its newest heartbeats; None: none of its world was heard.

        age_us:   since its last step
        heard_us: since the newest heartbeat
        step_us:  the usual time of a step; 0: fewer than two were made
        total:    the steps that the script will make; 0: it has not said
        """
        current, now = self._master.state.world.at(group), asyncio.get_running_loop().time()
        found = [self._heard[one.node] for one in current.members if one.node in self._heard]
        found = [one for one in found if one.generation == current.generation]
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
            # A step from before this instant does not count.
            since = self._master.now() - found.at
            if idle_us < since - us(LOOK_S) and idle_us < found.threshold_us:
                self._master.tell(hangs.NoteMoving(group, found.number))

    def _worth_keeping(self, group: str, pulse: Pulse) -> bool:
        # Most heartbeats end with the first half.
        learnt_us = self._master.state.hangs.learnt_us(group, pulse.phase)
        return pulse.pause_us > learnt_us and stall.worth_keeping(self._limits(group), pulse, learnt_us)

    def _limits(self, group: str) -> stall.Limits:
        slice_ = self._master.state.job
        return hangs.limits(slice_.spec, slice_.policy(group).hang_s)

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
        """Record a hang, if it is one by now; else return when it could be one."""
        del self._looks[group]
        state = self._master.state
        current = state.world.worlds.get(group)
        if current is None or current.finished or not state.job.live or not self._master.may_order():
            # A finished node says that the others are about to finish; `finish_s` bounds that.
            return
        pulse = self._together(current)
        if pulse is None or (pulse.step < 0 and not state.progress.of(group).generation):
            # A node was not heard, which silence handles; or this job reports no steps.
            return
        limit = stall.threshold(self._limits(group), pulse, state.hangs.learnt_us(group, pulse.phase))
        patience = state.hangs.patience_us(group, current.generation, pulse.step)
        if patience < 0 or state.hangs.suspected(group) is not None:
            return
        due_us, idle_us = max(limit.us, patience), min(pulse.idle_us, self._calm_us(group))
        if idle_us >= due_us:
            self._master.tell(hangs.NoteStall(group, current.generation, pulse.step, idle_us, limit.us, limit.budget))
        elif due_us - idle_us <= us(state.job.spec.heartbeat_s):
            # Waiting for the next heartbeat would be too late by the time that it takes.
            self._look_in(group, (due_us - idle_us) / SECOND_US + LOOK_S)

    def _calm_us(self, group: str) -> int:
        """For how long steps could have been made and been seen."""
        heard_s = asyncio.get_running_loop().time() - self._again.get(group, -math.inf)
        calm_us = self._master.now() - self._master.state.job.calm_at
        return int(min(calm_us, heard_s * SECOND_US))

    def _fresh_s(self) -> float:
        return FRESH_BEATS * self._master.state.job.spec.heartbeat_s

    def _together(self, current: world.World) -> Pulse | None:
        """The pulse of all members together, as of now; None: one of them was not heard lately."""
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
