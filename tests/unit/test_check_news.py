"""What people read of a node check while it goes on."""

from __future__ import annotations

from test_checks import Checked

from dlrover_core.history.checks import CheckNews
from dlrover_core.history.words import say
from dlrover_core.job.checks import CheckStarted, ReportCheck


def lines(drive: Checked) -> list[str]:
    """All lines about a job's checks."""
    news = CheckNews()
    return [line for record in drive.records for line in news.feed(record)]


def test_nothing_to_say_but_that_all_is_well() -> None:
    """Two lines: who is checked, and that they passed."""
    drive = Checked(nodes_max=4).arrive(0, 1, 2, 3).answer()
    assert lines(drive) == [
        "node check (full): 4 nodes, before training",
        "node check: 4 nodes passed in 0.000 s",
    ]


def test_a_faulty_node() -> None:
    """Who failed with whom in each round, and who it is."""
    drive = Checked(nodes_max=4)
    drive.ill.add("worker-3-0")
    drive.arrive(0, 1, 2, 3).answer()
    assert lines(drive) == [
        "node check (full): 4 nodes, before training",
        "node check, round 1: worker-2-0 failed with worker-3-0 (all_reduce timed out); round 2 with other partners",
        "node check, round 2: worker-0-0 failed with worker-3-0 (all_reduce timed out)",
        "node check: worker-3-0 is faulty: all_reduce timed out (with worker-0-0, worker-2-0)",
        "node check: 3 nodes passed in 0.000 s",
    ]


def test_two_nodes_are_not_told_apart() -> None:
    """The second round has the same partners, and says so."""
    drive = Checked(nodes_max=2)
    drive.ill.add("worker-1-0")
    told = lines(drive.arrive(0, 1).answer())
    assert told[1].endswith("(all_reduce timed out); round 2 with the same")
    assert told[3].startswith("node check: worker-0-0 cannot be told apart from its partners: all_reduce timed out")


def test_a_long_check_says_whom_it_waits_for() -> None:
    """After two seconds, and not more often than every ten."""
    drive = Checked(nodes_max=4, check_s=60.0).arrive(0, 1, 2, 3)
    drive.do(ReportCheck("worker-0-0", 1, 1, True))
    drive.wait(11)
    drive.do(ReportCheck("worker-1-0", 1, 1, True))
    drive.do(ReportCheck("worker-2-0", 1, 1, True))
    drive.do(ReportCheck("worker-3-0", 1, 1, True))
    assert lines(drive)[1:] == [
        "node check, round 1: 2 of 4 nodes have answered; waiting for worker-2-0, worker-3-0",
        "node check: 4 nodes passed in 11.0 s",
    ]


def test_phrases() -> None:
    """Each event of a check has its sentence for the timeline."""
    drive = Checked(nodes_max=2)
    drive.unfit["worker-0-0"] = "no space left"
    drive.arrive(0, 1).answer()
    said = [say(record.event) for record in drive.records if type(record.event).__module__.endswith(".checks")]
    assert said == [
        "node check 1 (full), round 1: worker-0-0 with worker-1-0 (before training)",
        "node check 1, round 1: worker-0-0 failed: no space left",
        "node check 1, round 1: worker-1-0 failed: all_reduce timed out",
        "node check 1: 1 node passed; worker-0-0 is faulty: no space left",
    ]
    assert len(drive.facts(CheckStarted)) == 1
