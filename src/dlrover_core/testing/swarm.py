"""Plans by chance: each seed draws which kinds of fault there are at all, and only then faults of these.

That is swarm testing: where every run has a little of everything, the frequent drowns the rare, and whatever ends a run early
hides what would have come later. A run with three kinds does those three many times, in each other's way. Everything is drawn
here, before the run begins; the run draws nothing, so its faults can be left out one by one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from dlrover_core.errors import PlanError
from dlrover_core.sim.faults import ENGINE, KINDS, Fault
from dlrover_core.sim.faults import kinds as kinds_of
from dlrover_core.sim.scenario import Plan, Scenario

FAULTS_MAX = 12
KINDS_MAX = 6
LOOP_FAULTS = 4

# What platforms say of queues, notices and hosts; drawn where it is named: plans of old seeds stay what they were.
PLATFORM = ("unreach_node", "dark_host", "preempt_sooner", "preempt_later", "preempt_withdrawn", "hold_queue")

# Moments that follow from the fault before, by what that was; a fault is aimed at the recovery from another one.
_AFTER_DEATH = (
    "incident opened",
    "WorldDissolved",
    "relaunch requested",
    "NodeJoined",
    "WorldFormed",
    "WorkersStarted",
    "all running",
)
_AFTER_MASTER = ("LeaderStarted", "all running")
_AFTER = {
    **dict.fromkeys(("kill_node", "kill_host", "kill_rack", "preempt", "preempt_now", *PLATFORM[2:5]), _AFTER_DEATH),
    **dict.fromkeys(("kill_worker", "fail_worker"), ("incident opened", "restart requested", "WorldFormed", "all running")),
    **dict.fromkeys(("crash_master", "crash_before_append", "crash_after_append", "hand_over"), _AFTER_MASTER),
    **dict.fromkeys(("silence_node", "lose_host", "dark_host"), ("NodeSuspected",)),
}  # fmt: skip
# Moments of the beginning, before there are steps to count.
_AT_FIRST = ("0 s", "NodeJoined", "WorldFormed", "WorkersStarted", "FirstStep")
# A job whose patience is shorter than what faults last: else nobody is ever waited for in vain.
IMPATIENT = (
    ("silence_s", 5.0), ("unreachable_s", 20.0), ("mass_silence_s", 40.0), ("launch_s", 120.0), ("last_call_s", 10.0),
    ("grow_window_s", 10.0), ("stop_grace_s", 5.0), ("evidence_s", 60.0),
)  # fmt: skip
# What people do, and what would leave too few machines or none to recover with, comes more rarely.
_RARE = ("interrupt", "kill_rack", "scale", "sick_host", "suspend")


def draw(
    seed: int,
    scenario: Scenario | None = None,
    *,
    level: str = ENGINE,
    kinds: Collection[str] | None = None,
    faults_max: int = FAULTS_MAX,
    nodes: int = 64,
) -> Plan:
    """The plan of a seed: some kinds out of ``kinds``, and up to ``faults_max`` faults of these.

    Default of ``kinds``: all of the level but `PLATFORM`.
    Without a scenario that is drawn too, of up to ``nodes`` nodes. Raises `PlanError` for kinds that the level does not have.
    """
    allowed = _allowed(level, kinds)
    if scenario is None:
        scenario = draw_scenario(seed, nodes)
    dice = random.Random(f"faults {seed}")
    weights = [0.3 if kind in _RARE else 1.0 for kind in allowed]
    chosen = sorted(set(dice.choices(allowed, weights, k=dice.randint(1, KINDS_MAX))))
    moments = sorted(dice.random() for _ in range(dice.randint(1, faults_max)))
    faults: list[Fault] = []
    for moment in moments:
        kind = dice.choice(chosen)
        at = _at(dice, moment, scenario, faults[-1] if faults else None)
        faults.append(Fault(at, kind, dice.randrange(1000), _amount(dice, kind, scenario)))
    loops = random.Random(f"loops {seed}")
    if "fail_worker" in chosen and loops.random() < 0.5 and len(faults) + LOOP_FAULTS <= faults_max:
        # A program that fails as soon as it is started, again and again.
        faults += [Fault("WorkersStarted", "fail_worker", loops.randrange(1000)) for _ in range(LOOP_FAULTS)]
    return Plan(level, scenario, tuple(faults), seed)


def draw_scenario(seed: int, nodes: int = 64) -> Scenario:
    """The job of a seed: of up to ``nodes`` nodes, mostly of exactly that many, with rules and budgets of all sorts."""
    dice = random.Random(f"scenario {seed}")
    unit = dice.choice([one for one in (1, 1, 1, 1, 2, 4, 8) if one <= nodes])
    most = (nodes if dice.random() < 0.8 else dice.randint(unit, nodes)) // unit * unit
    fewest = 0 if dice.random() < 0.5 else dice.randint(1, most // unit) * unit
    generous = dice.random() < 0.8
    step_s = dice.choice([0.5, 1.0, 5.0])
    return Scenario(
        nodes=most,
        workers_per_node=dice.choice([1, 1, 2, 8]),
        steps=dice.randint(30, 200),
        spares=dice.choice([0, 1, 1, 2, 8]),
        hosts_per_rack=dice.choice([4, 16, 16]),
        nodes_min=fewest,
        unit=unit,
        max_restarts=1_000_000 if generous else dice.randrange(6),
        relaunch_max=1_000_000 if dice.random() < 0.8 else dice.randrange(4),
        on_join=dice.choice(["restart", "restart", "never"]),
        standbys=dice.choice([0, 0, 1, 2]),
        hosted_masters=dice.random() < 0.3,
        step_s=step_s,
        fixed_batch=dice.random() < 0.8,
        checkpoint_steps=dice.choice([1, 1, 10, 50]),
        checkpoint_s=dice.choice([0.0, 0.0, 0.2]),
        cascade_s=dice.choice([0.05, 0.05, 0.0, 1.0, -1.0]),
        cascade_ranks=dice.choice([0, 8, 8, 32]),
        failover_s=dice.choice([0.2, 1.0, 5.0, 30.0]),
        notice_s=dice.choice([0.1, 5.0, 5.0, 40.0]),
        snapshot_events=dice.choice([10_000, 10_000, 100, 7]),
        settings=dice.choice([(), (), IMPATIENT]),
        finish_s=dice.choice([0.0, 0.0, 10.0]),
    )


def _allowed(level: str, chosen: Collection[str] | None) -> Sequence[str]:
    """The kinds to draw from, in the order of the vocabulary, whatever the order of ``chosen``."""
    there = kinds_of(level)
    if chosen is None:
        return [kind for kind in there if kind not in PLATFORM]
    wrong = sorted(set(chosen) - set(there))
    if wrong:
        raise PlanError(f"no such faults at the level {level!r}: {', '.join(wrong)}; there are {', '.join(there)}")
    if not chosen:
        raise PlanError("no kinds of fault to draw from")
    return [kind for kind in there if kind in chosen]


def _at(dice: random.Random, moment: float, scenario: Scenario, before: Fault | None) -> str:
    """A moment at about this part of the run, or the very one of the fault before, or one of the recovery from that."""
    if before is None and dice.random() < 0.2:
        return dice.choice(_AT_FIRST)
    if before is not None and before.kind in _AFTER and dice.random() < 0.4:
        return dice.choice(_AFTER[before.kind])
    if before is not None and before.at.startswith("step ") and dice.random() < 0.2:
        return before.at
    step = max(1, round(moment * scenario.steps))
    how = dice.random()
    if how < 0.5:
        return f"step {step}"
    if how < 0.9:
        # Times reach into the start, before there are steps.
        starts_s = scenario.boot_s + scenario.start_s + scenario.load_s
        return f"{moment * (starts_s + scenario.steps * scenario.step_s):.3f} s"
    # A job of n nodes plans and hears each at the beginning: two to three records a node.
    return f"event {1 + round(moment * 4 * scenario.nodes)}"


def _amount(dice: random.Random, kind: str, scenario: Scenario) -> float:
    """Mostly what is usual, else a fraction or a multiple of it."""
    if kind == "hang_worker":
        # Less, about and more than what the leader takes for a hang.
        return dice.choice([5.0, 60.0, 600.0])
    if kind == "scale":
        return float(dice.randint(1, scenario.nodes // scenario.unit) * scenario.unit)
    usual = KINDS[kind].default
    if not usual or dice.random() < 0.5:
        return 0.0
    many = dice.choice([0.1, 0.3, 3.0])
    if KINDS[kind].unit == "n":
        return float(max(1, round(usual * many)))
    return round(1.0 + (usual - 1.0) * many if KINDS[kind].unit == "x" else usual * many, 3)
