"""Orders of people about a job's size, and what came of them."""

from __future__ import annotations

from typing import Any

from drive import Drive

from dlrover_core.job import nodes, operations
from dlrover_core.job.orders import Order
from dlrover_core.kernel.engine import NotDone, Reply
from dlrover_core.rules.desired import desired

GRACE_US = 7_000_000


def scale(drive: Drive, nodes_max: int, nodes_min: int = 0, group: str = "worker") -> Reply:
    """Ask for other sizes."""
    return drive.do(operations.ScaleGroup(group, nodes_min, nodes_max, "test"))


def drain(drive: Drive, node: str) -> Reply:
    """Ask for a node's leave."""
    return drive.do(operations.DrainNode(node, "test"))


def refused(reply: Reply) -> str:
    """Why it was refused."""
    assert isinstance(reply, NotDone), reply
    return reply.reason


def up(**settings: Any) -> Drive:
    """A job that trains, with a grace that no default has."""
    return Drive(nproc=1, stop_grace_s=7.0, **settings).up()


def orders(drive: Drive) -> dict[str, Order]:
    """What every agent should be doing."""
    return dict(desired(drive.state).orders)


def launches(drive: Drive) -> dict[str, tuple[str, ...]]:
    """The nodes that should be launched, with the hosts they avoid."""
    return {one.node: one.avoid for one in desired(drive.state).launch}


def goes(drive: Drive, node: str) -> None:
    """An agent leaves as it was told, and its backend sees it."""
    assert orders(drive)[node].leave
    drive.do(nodes.ReportLeft(node))
    drive.observe(node, "succeeded")
    drive.observe(node, "gone")
