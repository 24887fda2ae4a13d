"""Times and limits that a master gives to its agents, in seconds; the defaults hold until a master answers."""

from __future__ import annotations

from dataclasses import dataclass

from dlrover_core.data.poison import told
from dlrover_core.job.orders import Order
from dlrover_core.job.poison import Quarantine
from dlrover_core.runtime.launcher import WorkersLaunch
from dlrover_core.runtime.messages import Welcome

SECOND_US = 1_000_000


@dataclass(slots=True)
class Granted:
    """The job's settings for an agent, and the ``run`` that the agent belongs to. Times are in seconds."""

    run: str = ""
    heartbeat_s: float = 1.0
    silence_s: float = 15.0
    unreachable_s: float = 300.0
    kill_wait_s: float = 30.0
    max_restarts: int = 0
    stop_grace_s: float = 30.0

    @classmethod
    def by(cls, welcome: Welcome) -> Granted:
        """The settings in a master's greeting."""
        return cls(
            welcome.run,
            welcome.heartbeat_us / SECOND_US,
            welcome.silence_us / SECOND_US,
            welcome.unreachable_us / SECOND_US,
            welcome.kill_wait_us / SECOND_US,
            welcome.max_restarts,
            welcome.stop_grace_us / SECOND_US,
        )


def launch_of(node: str, order: Order, settings: Granted) -> WorkersLaunch:
    """The launch that an order asks of a launcher."""
    work = order.work
    return WorkersLaunch(
        run=settings.run,
        generation=work.generation,
        first_rank=work.first_rank,
        nproc=work.nproc,
        world_size=work.world_size,
        node_rank=work.node_rank,
        nodes=work.nodes,
        store=work.store,
        restart_count=work.restarts,
        max_restarts=settings.max_restarts,
        resume_step=work.resume_step,
        node=node,
        left_out=told(order.part(Quarantine).spots, work.generation),
    )
