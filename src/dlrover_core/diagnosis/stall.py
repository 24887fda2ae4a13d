"""When nobody making steps is a hang: what is legal, and for how long.

A step may take three times as long as steps usually do; a pause between two steps half as long again as the longest one that
has ended by itself; and nothing shorter than a floor is worth a look. What has its own nature has its own budget: the way to
the first steps (imports, compilation, loading), and phases that a script announces (`PHASES`). What was learnt about one of
them says nothing about the others, and only ever makes it longer: a short phase may be followed by a long one of that name.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.kernel.wire import part

# What a worker may say that it is at, by its number in the step slot and in heartbeats. 0: it trains, or says nothing.
PHASES = ("training", "evaluation", "checkpoint", "phase")

STEPS = 3
PAUSES = 1.5
# Somebody computes where others wait: perhaps rank 0 evaluates alone. It may for as long as an announced phase, or for this many
# thresholds where that is longer; then it is a hang all the same.
BUSY = 5


@part(6)
class Pulse(NamedTuple):
    """What workers say of their steps, in microseconds.

    ``step`` -1: none was made. ``idle_us`` counts from the last step, or the last change of ``phase``; -1: nobody can say.
    ``step_us`` is the usual time of one, 0 before two were made; ``pause_us`` the longest that ended by itself in ``phase``.
    ``total``: the steps that the script means to make; 0: it has not said.
    """

    step: int = -1
    idle_us: int = -1
    step_us: int = 0
    pause_us: int = 0
    phase: int = 0
    total: int = 0


class Limits(NamedTuple):
    """The floor, what the first steps may take, and what an announced phase may take, however short those before were."""

    floor_us: int
    first_us: int
    phase_us: int


class Threshold(NamedTuple):
    """How long nobody may make a step, and which budget says so."""

    us: int
    budget: str


def together(pulses: list[Pulse]) -> Pulse:
    """Several workers as one: the newest step of any counts, and whoever announces a phase does it for all who wait.

    So a pause is nobody's phase only where all saw it as that: those who wait for one that evaluates know nothing of it.
    """
    phase = max(one.phase for one in pulses)
    longest = max if phase else min
    return Pulse(
        max(one.step for one in pulses),
        min(one.idle_us for one in pulses),
        max(one.step_us for one in pulses),
        longest(one.pause_us for one in pulses if one.phase == phase),
        phase,
        max(one.total for one in pulses),
    )


def threshold(limits: Limits, pulse: Pulse, learnt_us: int) -> Threshold:
    """What is legal now; ``learnt_us``: the longest pause in this phase of earlier generations."""
    pause_us = round(PAUSES * max(pulse.pause_us, learnt_us))
    if pulse.phase:
        name = PHASES[min(pulse.phase, len(PHASES) - 1)]
        return max(
            Threshold(_phase_us(limits), name),
            Threshold(pause_us, f"{name}: {PAUSES:g} times the longest"),
            key=lambda one: one.us,
        )
    if not pulse.step_us:
        return Threshold(max(limits.floor_us, limits.first_us), "first steps")
    return max(
        Threshold(limits.floor_us, "floor"),
        Threshold(STEPS * pulse.step_us, f"{STEPS} steps"),
        Threshold(pause_us, f"{PAUSES:g} times the longest pause"),
        key=lambda one: one.us,
    )


def _phase_us(limits: Limits) -> int:
    return max(limits.phase_us, limits.floor_us)


def worth_keeping(limits: Limits, pulse: Pulse, learnt_us: int) -> bool:
    """Is this pause so much longer than all before it that the next generation must know?"""
    least_us = _phase_us(limits) if pulse.phase else limits.floor_us
    return pulse.pause_us > 1.25 * learnt_us and PAUSES * pulse.pause_us > least_us


def patience_us(limits: Limits, idle_us: int, threshold_us: int) -> int:
    """Somebody is busy: when to look again. 0: never mind, this is a hang."""
    last = max(limits.phase_us, BUSY * threshold_us)
    return 0 if idle_us >= last else min(2 * idle_us, last)
