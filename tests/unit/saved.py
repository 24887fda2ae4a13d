"""Jobs whose ranks save checkpoints, for the rules of them."""

from __future__ import annotations

from typing import Any

from drive import Drive
from orders import Told

from dlrover_core.job.checkpoints import (
    CommitCheckpoint,
    ReportHeld,
    ReportKeeping,
)
from dlrover_core.job.orders import Order
from dlrover_core.kernel.engine import NotDone
from dlrover_core.rules.desired import desired

A, B, C = "worker-0-0", "worker-1-0", "worker-2-0"
URL = "file:///ckpts"


def saving(nodes: int = 2, spread: int = 1, planned: bool = True, **settings: Any) -> Drive:
    """A job whose first generation saves."""
    drive = Drive(nodes_max=nodes, nproc=1, **settings).up()
    drive.do(ReportKeeping(A, 1, URL, 2, 10, 3, planned, 4096, spread))
    return drive


def commit(drive: Drive, step: int, generation: int = 1) -> list[str]:
    """The leader says that all parts of a step are there."""
    drive.do(CommitCheckpoint("worker", generation, step, 2, 4096, 7))
    return drive.names()


def held(
    drive: Drive, node: str, *steps: int, generation: int = 1, copies: tuple[tuple[int, int], ...] = ()
) -> list[str]:
    """A node tells what it holds of a generation that has ended."""
    drive.do(ReportHeld(node, generation, steps, 0, copies))
    return drive.names()


def order(drive: Drive, node: str) -> Order:
    """What a node is told now."""
    return Told(desired(drive.state).orders[node])


def refusal(drive: Drive, command: Any) -> str:
    """Why a command is refused; it leaves nothing behind but that."""
    reply = drive.do(command)
    assert isinstance(reply, NotDone), drive.new
    assert drive.names() == ["CommandRefused"]
    return reply.reason
