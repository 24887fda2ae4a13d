"""What tests of planned changes share: wishes, and what came of them."""

from __future__ import annotations

from typing import Any

from boundaries import Saves, up
from drive import Drive
from orders import Told

from dlrover_core.job import operations, plans, world
from dlrover_core.job.orders import Order
from dlrover_core.kernel.engine import NotDone, Reply
from dlrover_core.rules.desired import desired

SECOND = 1_000_000


def order(drive: Drive, node: str) -> Order:
    """What an agent should be doing."""
    return Told(desired(drive.state).orders[node])


def scale(drive: Drive, nodes_max: int, nodes_min: int = 0) -> Reply:
    """Ask for other sizes."""
    return drive.do(operations.ScaleGroup("worker", nodes_min, nodes_max, "test"))


def drain(drive: Drive, node: str = "worker-1") -> Reply:
    """Ask for a node's leave."""
    return drive.do(operations.DrainNode(node, "test"))


def formed(drive: Drive) -> world.WorldFormed:
    """The newest world, as it was formed."""
    found = drive.facts(world.WorldFormed)[-1]
    assert isinstance(found, world.WorldFormed)
    return found


def dropped(drive: Drive) -> list[str]:
    """Why plans were dropped."""
    return [fact.reason for fact in drive.facts(plans.WorldPlanDropped)]


def refused(reply: Reply) -> str:
    """Why it was refused."""
    assert isinstance(reply, NotDone), reply
    return reply.reason


def grown(**settings: Any) -> Saves:
    """2 -> 4, and both newcomers are there."""
    drive = up(nodes_min=2, nodes_max=2, **settings)
    scale(drive, 4, 2)
    drive.join("worker-2-0")
    drive.join("worker-3-0")
    return drive
