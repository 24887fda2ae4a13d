"""A job whose ranks can agree on a step boundary, driven command by command: what tests of planned changes begin with."""

from __future__ import annotations

from typing import Any

from drive import Drive

from dlrover_core.job import checkpoints, plans
from dlrover_core.job.plans import Boundary
from dlrover_core.kernel.engine import Accepted, Reply
from dlrover_core.rules.desired import desired


class Saves(Drive):
    """A job whose ranks save with us and can agree on a boundary, one worker per node."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"nproc": 1, "stop_grace_s": 10.0, "plan_s": 100.0, "boundary_s": 20.0, **settings})

    def keeps(self, *, planned: bool = True) -> Saves:
        """Rank 0 says that the newest generation saves."""
        node, generation = self.world.members[0].node, self.world.generation
        command = checkpoints.ReportKeeping(node, generation, "memory:x", 1, 10, 3, planned, 1 << 20)
        assert isinstance(self.do(command), Accepted)
        return self

    def trains(self, first_step: int = 1, *, planned: bool = True) -> Saves:
        """The newest world starts, saves, and makes a step."""
        self.run(first_step)
        return self.keeps(planned=planned)

    @property
    def plan(self) -> plans.Plan:
        """The open plan."""
        return self.state.plans.by_group["worker"]

    @property
    def planned(self) -> bool:
        """Is one open?"""
        return "worker" in self.state.plans.by_group

    def arm(self, *names: str) -> Reply:
        """All ranks of these nodes look for the boundary; without names, those of all members."""
        replies = [self.do(checkpoints.ReportArmed(name, self.plan.number)) for name in names or self.members]
        return replies[-1]

    def hold(self, step: int, *names: str) -> list[str]:
        """These nodes, or all members, wait at the boundary with this step; the kinds of what follows."""
        plan, generation = self.plan.number, self.world.generation
        seen: list[str] = []
        for name in names or self.members:
            self.do(checkpoints.ReportHeld(name, generation, (step,), plan))
            seen += self.names()
        return seen

    def whole(self, step: int) -> list[str]:
        """Members arm and come to the boundary."""
        self.arm()
        return self.hold(step)

    def asked(self) -> dict[str, tuple[int, bool]]:
        """What every agent is told of a plan."""
        return {node: tuple(order.part(Boundary)) for node, order in desired(self.state).orders.items()}


def up(**settings: Any) -> Saves:
    """It trains, and saves."""
    drive = Saves(**settings)
    drive.up()
    return drive.keeps()
