"""Restarts that somebody else counts: torch's elastic agent, under ``torchrun --rdzv-backend dlrover``."""

from __future__ import annotations

from drive import Drive

from dlrover_core.job import budgets, nodes, world
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.rules.desired import desired

WITHOUT_END = 1_000_000_000


def _spent(node: str, **settings: int) -> Drive:
    """A job whose own budgets are without end, and a node that has no restarts left."""
    drive = Drive(nproc=1, max_restarts=WITHOUT_END, relaunch_max=WITHOUT_END, **settings).up()
    assert isinstance(drive.do(budgets.SpendRestarts(node, drive.world.generation)), Accepted)
    assert drive.names() == ["RestartsSpent"]
    return drive


def test_the_exit_after_it_ends_the_job() -> None:
    """As one beyond our own budget: held until all have spoken, and workers may end by themselves for a moment."""
    drive = _spent("worker-1-0")
    drive.exit("worker-1-0", 1, 3)
    assert drive.names()[-2:] == ["ActionChosen", "WorldDissolved"]
    assert desired(drive.state).orders["worker-0-0"].linger_us == 5_000_000
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(world.ReportStopped(node, 1))
    assert drive.state.job.state == "failed"
    assert drive.state.job.root.startswith("rank 1 on worker-1-0: exit code 3")


def test_it_counts_for_that_node_alone() -> None:
    """Another one's workers are started again, by whoever has restarts left there."""
    drive = _spent("worker-1-0")
    drive.exit("worker-0-0", 0, 3)
    assert drive.names()[-1] == "WorldFormed"
    assert drive.state.job.live


def test_its_node_is_not_waited_for() -> None:
    """It was to start again because of another one's failure, and cannot: with too few left, nobody waits for long."""
    drive = _spent("worker-1-0")
    drive.exit("worker-0-0", 0, 3)
    drive.do(nodes.ReportLeft("worker-1-0"))
    drive.do(world.ReportStopped("worker-0-0", 2))
    assert drive.state.job.state == "failed"


def test_the_others_go_on_where_they_are_enough() -> None:
    """MIN:MAX."""
    drive = _spent("worker-1-0", nodes_min=1, nodes_max=2)
    drive.exit("worker-0-0", 0, 3)
    drive.do(nodes.ReportLeft("worker-1-0"))
    assert drive.state.job.live
    assert drive.members == ["worker-0-0"]


def test_it_is_said_once_and_a_new_run_knows_nothing_of_it() -> None:
    """Saying it again is refused."""
    drive = _spent("worker-1-0")
    assert isinstance(drive.do(budgets.SpendRestarts("worker-1-0", 1)), NotDone)
    assert isinstance(drive.do(budgets.SpendRestarts("stranger-0-0", 1)), NotDone)
    drive.take_over()
    assert drive.state.budgets.spent == ["worker-1-0"]
