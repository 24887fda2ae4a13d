"""Plans by chance of jobs with several groups: coupled and not, needed and not, on too few hosts for a while.

What the job is like is drawn here; the faults are those of `swarm`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from dlrover_core.sim.faults import LOOP, kinds
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.spec import DEFAULT_GROUP
from dlrover_core.testing.swarm import FAULTS_MAX, IMPATIENT, draw

Settings = tuple[tuple[str, Any], ...]
Groups = tuple[tuple[str, Settings], ...]

GANG_S = 60.0
STEPS_MAX = 60
NO_LIMIT = 1_000_000


def draw_groups(seed: int, *, level: str = LOOP, faults_max: int = FAULTS_MAX) -> Plan:
    """The plan of a seed: a job of two to nine nodes in two to four groups, and faults of every kind of the level."""
    scenario = draw_job(seed)
    plan = draw(seed, scenario, level=level, kinds=kinds(level), faults_max=faults_max)
    if any(fault.kind == "scale" for fault in plan.faults):
        # Sets that were scaled up would hold hosts that others wait for, for ever: nobody takes from one what another needs.
        grown = sum(max(0, scenario.nodes - dict(settings)["nodes_max"]) for _, settings in scenario.groups)
        plan = plan._replace(scenario=replace(scenario, spares=scenario.spares + grown))
    return plan


def draw_job(seed: int) -> Scenario:
    """The job of a seed."""
    dice = random.Random(f"groups {seed}")
    trainers, aside = _groups(dice)
    groups = (*trainers, *((one.name, settings) for one, settings in aside))
    most = dict(trainers[0][1])["nodes_max"]
    wanted = sum(dict(settings)["nodes_max"] for _, settings in groups)
    spares = dice.choice([0, 1, 1, 2])
    short = dice.randint(1, wanted + spares) if dice.random() < 0.4 else 0
    generous = dice.random() < 0.8
    return Scenario(
        nodes=most,
        steps=dice.randint(20, STEPS_MAX),
        spares=spares,
        short=short,
        room_s=dice.choice([10.0, 100.0, 1000.0]) if short else 0.0,
        max_restarts=NO_LIMIT if generous else dice.randrange(4),
        on_join=dice.choice(["restart", "restart", "planned", "never"]),
        standbys=dice.choice([0, 0, 1]),
        hosted_masters=dice.random() < 0.3,
        step_s=dice.choice([0.5, 1.0]),
        fixed_batch=dice.random() < 0.8,
        checkpoint_steps=dice.choice([1, 1, 10]),
        cascade_s=dice.choice([0.05, 0.05, 0.0, 1.0, -1.0]),
        failover_s=dice.choice([0.2, 1.0, 5.0, 30.0]),
        notice_s=dice.choice([0.1, 5.0, 5.0, 40.0]),
        snapshot_events=dice.choice([10_000, 10_000, 100, 7]),
        settings=(*dice.choice([(), IMPATIENT]), ("gang_s", dice.choice([GANG_S, GANG_S, 600.0, 0.0]))),
        groups=groups,
        quiet=tuple(one.name for one, _ in aside if one.quiet),
    )


class _Aside(NamedTuple):
    """A group that works for those that train. ``serves``: they may use it; ``quiet``: its workers tell no steps."""

    name: str
    make: Callable[[random.Random], Settings]
    serves: bool = True
    quiet: bool = False


def _groups(dice: random.Random) -> tuple[Groups, list[tuple[_Aside, Settings]]]:
    """Who trains, and some of those that work for them."""
    aside = [one for one in _ASIDE if dice.random() < 0.6] or [_ASIDE[0]]
    uses = tuple(one.name for one in aside if one.serves and dice.random() < 0.7)
    return _trainers(dice, uses), [(one, one.make(dice)) for one in aside]


def _sizes(dice: random.Random, most: int) -> Settings:
    largest = dice.randint(1, most)
    fewest = largest if dice.random() < 0.5 else dice.randint(1, largest)
    return ("nodes_min", fewest), ("nodes_max", largest), ("nproc", dice.choice([1, 1, 2]))


def _relaunches(dice: random.Random) -> tuple[str, int]:
    return "relaunch_max", NO_LIMIT if dice.random() < 0.8 else dice.randrange(3)


def _trainers(dice: random.Random, uses: tuple[str, ...]) -> Groups:
    if dice.random() < 0.6:
        # One that bears the name of its set, and one that is called otherwise.
        named = (("set", "train"),) if dice.random() < 0.3 else ()
        checked = (("precheck", dice.choice(["basic", "full"])),) if dice.random() < 0.2 else ()
        return (("trainer", (*_sizes(dice, 3), _relaunches(dice), *named, *checked, ("uses", uses))),)
    joint, relaunches = ("set", "train"), _relaunches(dice)
    chief: Settings = (("nodes_min", 1), ("nodes_max", 1), ("nproc", 1), relaunches, joint)
    more: Settings = (*_sizes(dice, 2), relaunches, joint, ("uses", uses), ("ends", dice.random() < 0.7))
    return ("chief", chief), (DEFAULT_GROUP, more)


def _rollout(dice: random.Random) -> Settings:
    own = (("critical", dice.random() < 0.5), ("ends", False), ("store", dice.random() < 0.8))
    each = (("coupling", "each"),) if dice.random() < 0.8 else ()
    checked = (("precheck", "basic"),) if dice.random() < 0.2 else ()
    uses = (("uses", ("rollout",)),) if dice.random() < 0.3 else ()
    return (*_sizes(dice, 3), _relaunches(dice), *own, *each, *checked, *uses)


def _evaluator(dice: random.Random) -> Settings:
    own = (("critical", False), ("ends", dice.random() < 0.3))
    restarts = (("max_restarts", dice.randrange(3)),) if dice.random() < 0.5 else ()
    return (("nodes_min", 1), ("nodes_max", 1), ("nproc", 1), _relaunches(dice), *own, *restarts)


def _server(dice: random.Random) -> Settings:
    own = (("coupling", "each"), ("ends", False), ("store", False), ("hang_s", 0.0), ("critical", dice.random() < 0.8))
    return (*_sizes(dice, 2), _relaunches(dice), *own)


_ASIDE = (
    _Aside("rollout", _rollout),
    _Aside("evaluator", _evaluator, serves=False),
    _Aside("server", _server, quiet=True),
)
