"""DLRover's conformance behaviours, under the numbers of our reference (its section 4.2), against our decisions.

Each docstring says the behaviour; where ours differs it says why, and the test asserts what ours does instead.
"""

from __future__ import annotations

import pytest
from drive import SECOND, Drive

from dlrover_core.diagnosis.classify import node_death
from dlrover_core.job import job, nodes, silence, world
from dlrover_core.job.node_lifecycle import LIFECYCLE
from dlrover_core.kernel.engine import NotDone
from dlrover_core.rules.desired import desired


def _planned(drive: Drive) -> list[str]:
    return [fact.node for fact in drive.facts(nodes.NodePlanned)]


def test_behaviour_01_pending_becomes_running() -> None:
    """A pending node that is seen running is running; nothing is relaunched."""
    drive = Drive(nodes_max=1)
    drive.observe("worker-0-0", "pending")
    drive.observe("worker-0-0", "running")
    assert drive.names() == ["NodeRunning"]
    assert _planned(drive) == ["worker-0-0"]


def test_behaviour_02_a_running_node_is_deleted() -> None:
    """A running node that is deleted is relaunched."""
    drive = Drive(nodes_max=1).up()
    drive.observe("worker-0-0", "gone")
    assert _planned(drive) == ["worker-0-0", "worker-0-1"]


def test_behaviour_03_a_succeeded_node_is_deleted() -> None:
    """A node that had succeeded and is deleted is gone (DLRover drops this row); nothing is relaunched."""
    drive = Drive(nodes_max=2).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "gone")
    assert drive.facts(nodes.NodeGone)[0].expected
    assert _planned(drive) == ["worker-0-0", "worker-1-0"]


@pytest.mark.parametrize("complete", [True, False])
def test_behaviour_04_a_pending_node_is_deleted(*, complete: bool) -> None:
    """A pending node that is deleted, by its own event or by missing in a list, is relaunched."""
    drive = Drive(nodes_max=1)
    drive.observe("worker-0-0", "pending")
    if complete:
        drive.listed()
    else:
        drive.observe("worker-0-0", "gone")
    assert _planned(drive) == ["worker-0-0", "worker-0-1"]


def test_behaviour_05_running_never_becomes_pending() -> None:
    """An observation that lags behind is ignored."""
    drive = Drive(nodes_max=1)
    drive.observe("worker-0-0", "running")
    drive.observe("worker-0-0", "pending")
    assert drive.new == []
    assert ("running", "pend") in LIFECYCLE.ignored


def test_behaviour_06_pending_ends() -> None:
    """Pending to failed is relaunched, as there. Pending to succeeded is *also* relaunched here.

    There a pod that succeeded has done its work; here work is done when the agent says that its workers finished, so a node that
    ends well without a word leaves the world a member short, and DLRover's row would let the job wait for ever.
    """
    for phase in ("failed", "succeeded"):
        drive = Drive(nodes_max=1)
        drive.observe("worker-0-0", "pending")
        drive.observe("worker-0-0", phase)
        assert _planned(drive) == ["worker-0-0", "worker-0-1"], phase


def test_behaviour_07_no_relaunch_while_stopping() -> None:
    """A pending node that fails while the job stops is not relaunched; in a new run its place is planned again."""
    drive = Drive(nodes_max=2)
    drive.observe("worker-1-0", "pending")
    drive.join("worker-0-0")
    drive.do(job.StopJob("asked"))
    drive.observe("worker-1-0", "failed", 1)
    assert _planned(drive) == ["worker-0-0", "worker-1-0"]
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert _planned(drive)[2:] == ["worker-0-1", "worker-1-1"]


def test_behaviour_08_no_relaunch_beyond_the_budget() -> None:
    """After relaunch_max a node is not relaunched.

    There a fatal exit code of the pod forbids it too. Here an exit code of the *agent* says nothing about the program: a
    program's fatal errors are workers' exits and use up the restarts of the job, which end it with the root cause shown.
    """
    drive = Drive(nodes_max=2, nodes_min=1, relaunch_max=3).up()
    for incarnation in range(4):
        drive.observe(f"worker-1-{incarnation}", "failed", 1, "Error")
    assert _planned(drive)[2:] == ["worker-1-1", "worker-1-2", "worker-1-3"]
    fatal = Drive(nodes_max=1, nproc=1, max_restarts=1, evidence_s=0.0).up()
    for _ in range(2):
        fatal.exit("worker-0-0", 0, 1, "ValueError: x")
    fatal.wait(1)
    assert fatal.state.job.state == "failed"
    assert _planned(fatal) == ["worker-0-0"]


# 9 (relaunch after running out of memory, by job type and size) comes with scaling, which decides on memory.


def test_behaviour_10_failed_nodes_are_counted_by_place() -> None:
    """Places 0, 0 and 1 fail: one bad place after the first two, two after the third, each counted by itself."""
    drive = Drive(nodes_max=2, nodes_min=1, relaunch_max=9).up()
    drive.observe("worker-0-0", "failed", 1)
    drive.observe("worker-0-1", "failed", 1)
    assert drive.state.incidents.relaunches == {"worker-0": 2}
    drive.observe("worker-1-0", "failed", 1)
    assert drive.state.incidents.relaunches == {"worker-0": 2, "worker-1": 1}


def test_behaviour_11_a_host_that_failed_its_check_is_avoided() -> None:
    """A node that fails its check puts its host on record, and its successor is launched elsewhere, until that expires."""
    drive = Drive(nodes_max=1)
    drive.join("worker-0-0", "10.0.0.7")
    drive.observe("worker-0-0", "failed", 1, "check_failed")
    drive.wait(0)
    assert drive.state.hosts.quarantined(drive.now) == ["10.0.0.7"]
    assert [one.avoid for one in desired(drive.state).launch] == [("10.0.0.7",)]


def test_behaviour_12_a_silent_node() -> None:
    """A silent node is given up only if it is still wanted and its silence is of this life.

    There 600 s without a heartbeat is death. Here silence makes a suspect, and only unreachable_s more makes it lost; work that
    has ended, nodes that have not joined and silence before the leader's own beginning do not count.
    """
    drive = Drive(nodes_max=3, unreachable_s=300.0).up()
    drive.do(silence.NoteSilence("worker-0-0", 1000 * SECOND))
    assert drive.facts(silence.NodeSuspected)[0].silent_us == 1000 * SECOND
    assert drive.facts(nodes.NodeLost) == []
    drive.wait(200)
    drive.take_over()
    drive.wait(299)
    assert drive.facts(nodes.NodeLost) == []
    drive.wait(1)
    assert [fact.node for fact in drive.facts(nodes.NodeLost)] == ["worker-0-0"]
    # Ended already: nothing to be silent about.
    ended = Drive(nodes_max=2).up()
    ended.do(world.ReportFinished("worker-0-0", 1))
    ended.observe("worker-0-0", "succeeded")
    ended.do(silence.NoteSilence("worker-0-0", 1000 * SECOND))
    assert ended.new == []


def test_behaviour_13_given_up_is_terminal() -> None:
    """A node given up for silence never comes back: there it is deleted; here it is lost, told to leave, its name unwanted."""
    drive = Drive(nodes_max=3).up()
    drive.do(silence.NoteSilence("worker-0-0", 1))
    drive.wait(300)
    for phase in ("pending", "running", "failed"):
        drive.observe("worker-0-0", phase)
        assert drive.state.nodes.nodes["worker-0-0"].state == "lost"
    drive.do(silence.NoteHeard("worker-0-0"))
    assert drive.new == []
    assert isinstance(drive.do(nodes.ReportJoined("worker-0-0", "h", "a", 2)), NotDone)
    assert "j-worker-0-0" not in desired(drive.state).names


def test_behaviour_14_too_few_nodes_end_the_job() -> None:
    """All-reduce, 4 of 4 needed, worker 0 out of relaunches: no relaunch, and the job ends once the others have spoken."""
    drive = Drive(nodes_max=4, nproc=1, relaunch_max=3).up()
    for incarnation in range(3):
        drive.observe(f"worker-0-{incarnation}", "gone")
        drive.join(f"worker-0-{incarnation + 1}")
    planned = _planned(drive)
    drive.observe("worker-0-3", "gone")
    assert _planned(drive) == planned
    for one in (1, 2, 3):
        drive.do(world.ReportStopped(f"worker-{one}-0", drive.world.generation))
    assert drive.state.job.state == "failed"


def test_behaviour_15_trailing_events_of_a_replaced_node() -> None:
    """Whatever is still heard of a node whose replacement is pending ends nothing and charges nothing."""
    drive = Drive(nodes_max=4, nproc=1, relaunch_max=1).up()
    drive.observe("worker-0-0", "failed", -9)
    drive.observe("worker-0-1", "pending")
    for phase in ("failed", "succeeded", "gone", "gone"):
        drive.observe("worker-0-0", phase)
    assert drive.state.job.state == "running"
    assert drive.state.incidents.relaunches == {"worker-0": 1}
    assert drive.state.incidents.number == 1


def test_behaviour_16_a_master_restarts_and_the_cluster_has_moved_on() -> None:
    """A new master whose log knows nodes that the cluster no longer has: those are gone and their successors planned.

    There the list brings ids that the store does not know, and they are adopted. Here names are never given by the cluster: what
    the log does not know was not launched by us and is deleted, because desired does not name it.
    """
    drive = Drive(nodes_max=2)
    for node in ("worker-0-0", "worker-1-0"):
        drive.observe(node, "pending")
    drive.take_over()
    drive.listed(nodes.Observed("worker-2-0", "running"), nodes.Observed("worker-3-0", "running"))
    assert [fact.node for fact in drive.facts(nodes.NodeGone)] == ["worker-0-0", "worker-1-0"]
    assert list(drive.state.nodes.nodes) == ["worker-0-1", "worker-1-1"]
    assert desired(drive.state).names == {"j-worker-0-1", "j-worker-1-1"}


def test_behaviour_17_a_restart_has_one_node_per_rank() -> None:
    """A restart of the job's processes plans each vacant place once; beyond max_restarts the job stops and plans nothing."""
    drive = Drive(nodes_max=3, nproc=1, max_restarts=1, evidence_s=0.0).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.exit("worker-1-0", 1)
    assert _planned(drive)[3:] == ["worker-0-1"]
    drive.join("worker-0-1")
    assert len({member.rsplit("-", 1)[0] for member in drive.members}) == 3
    planned = _planned(drive)
    drive.exit("worker-1-0", 1)
    drive.wait(1)
    assert drive.state.job.state == "failed"
    assert _planned(drive) == planned


@pytest.mark.parametrize(
    ("code", "reason", "verdict", "quarantined"),
    [
        (143, "OOMKilled", "RES", False),
        (137, "", "PLAT", False),
        (1, "Error", "PLAT", False),
        (201, "hardware: driver", "HW", True),
        (202, "hardware: residue", "HW", True),
        (999, "", "PLAT", False),
    ],
)
def test_behaviour_18_exit_reasons(code: int, reason: str, verdict: str, *, quarantined: bool) -> None:
    """A platform's reason wins over its exit code; out of memory and bad hardware are told from the rest.

    There the codes are pods'. Here a backend translates its platform's codes to a reason (``hardware: ...``) and passes the code
    through; what a *worker's* code means is `test_classify`. Exit code 0 is success where the work was done (behaviour 6).
    """
    assert node_death("failed", code, reason).verdict == verdict
    drive = Drive(nodes_max=1).up()
    drive.observe("worker-0-0", "failed", code, reason)
    assert bool(drive.state.hosts.quarantined(drive.now)) == quarantined


def test_behaviour_19_success_is_kept() -> None:
    """A node that reported success stays successful whatever is reported later; its successor begins without a past."""
    drive = Drive(nodes_max=2).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "failed", 1, "check_failed")
    assert isinstance(drive.do(nodes.ReportFault("worker-0-0", "late")), NotDone)
    assert drive.state.nodes.nodes["worker-0-0"].state == "succeeded"
    assert drive.state.hosts.quarantined(drive.now) == []
    drive.exit("worker-1-0", 2)
    successor = drive.state.nodes.nodes["worker-0-1"]
    assert (successor.state, successor.joined, successor.released) == ("planned", False, "")


def test_behaviour_20_below_the_minimum_nobody_trains() -> None:
    """Two of three joined, time passes: no world, two waiting."""
    drive = Drive(nodes_max=3, nodes_min=3, last_call_s=0.5)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    drive.wait(1)
    assert (drive.world.generation, drive.members) == (0, [])
    orders = desired(drive.state).orders
    assert {node: order.reason for node, order in orders.items()} == dict.fromkeys(
        ["worker-0-0", "worker-1-0"], "waiting for a world"
    )


def test_behaviour_21_the_maximum_trains_at_once() -> None:
    """The third of three joins: the world of all, in one event, once, however often anybody asks."""
    drive = Drive(nodes_max=3, nodes_min=3)
    for one in range(3):
        drive.join(f"worker-{one}-0")
    drive.wait(100)
    assert [desired(drive.state).orders[node].generation for node in drive.members] == [1, 1, 1]
    assert len(drive.facts(world.WorldFormed)) == 1
    assert drive.members == ["worker-0-0", "worker-1-0", "worker-2-0"]


def test_behaviour_22_the_minimum_trains_after_the_last_call() -> None:
    """Two of two to three joined, the last call passes: the world of two."""
    drive = Drive(nodes_max=3, nodes_min=2, last_call_s=0.1)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    assert drive.members == []
    drive.wait(0.2)
    assert (drive.world.generation, drive.members) == (1, ["worker-0-0", "worker-1-0"])


def test_behaviour_23_units() -> None:
    """Of 8 to 12 by fours, 10 joined: a world of 8 and 2 waiting. Two more make another unit, and then the world grows.

    There the agents ask how many wait and restart by themselves. Here nobody asks: the waiting are told so by their order.
    """
    drive = Drive(nodes_max=12, nodes_min=8, unit=4, nproc=1, launch_s=10**6)
    for one in range(10):
        drive.join(f"worker-{one}-0")
    drive.wait(30)
    assert drive.members == [f"worker-{one}-0" for one in range(8)]
    orders = desired(drive.state).orders
    assert [node for node, order in orders.items() if not order.generation] == ["worker-8-0", "worker-9-0"]
    for one in (10, 11):
        drive.join(f"worker-{one}-0")
    assert len(drive.members) == 12


def test_behaviour_24_a_waiting_node_that_failed_is_not_counted() -> None:
    """A node that failed while it waited is removed; the world does not form with it."""
    drive = Drive(nodes_max=3, nodes_min=3)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    drive.do(nodes.ReportFault("worker-0-0", "broken"))
    drive.join("worker-2-0")
    assert drive.members == []
    drive.join("worker-0-1")
    assert drive.members == ["worker-0-1", "worker-1-0", "worker-2-0"]
