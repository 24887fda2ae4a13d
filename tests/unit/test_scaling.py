"""What people ask of a running job: other sizes, a node's leave, a pause; and all that may come in between."""

from __future__ import annotations

from drive import Drive
from sized import GRACE_US, drain, goes, launches, orders, refused, scale, up

from dlrover_core.job import incidents, job, nodes, plans, silence, world
from dlrover_core.kernel.engine import Accepted
from dlrover_core.rules import slots
from dlrover_core.rules.desired import CLOSING_S, deletion_grace_s, desired

# ---- growing


def test_growth_plans_the_new_places_and_a_running_world_takes_them_in() -> None:
    """2 -> 4: two more nodes are planned while training goes on; when both are there the world is 4, its stop planned."""
    drive = up(nodes_min=2, nodes_max=2)
    assert isinstance(scale(drive, 4), Accepted)
    assert drive.names() == ["GroupScaled", "NodePlanned", "NodePlanned"]
    assert (drive.state.job.spec.group("worker").nodes_min, drive.state.job.spec.group("worker").nodes_max) == (2, 4)
    assert list(launches(drive)) == ["worker-2-0", "worker-3-0"]
    assert drive.members == ["worker-0-0", "worker-1-0"]
    drive.join("worker-2-0")
    assert drive.world.generation == 1
    drive.join("worker-3-0")
    assert drive.members == ["worker-0-0", "worker-1-0", "worker-2-0", "worker-3-0"]
    assert [fact.planned for fact in drive.facts(world.WorldDissolved)] == [True]
    assert orders(drive)["worker-0-0"].grace_us == GRACE_US
    assert drive.state.incidents.number == 0


def test_on_join_never_is_respected() -> None:
    """What joins after a growth by hand waits for the next world, as any late node does."""
    drive = up(nodes_min=2, nodes_max=2, on_join="never")
    scale(drive, 3)
    drive.join("worker-2-0")
    drive.wait(1000)
    assert drive.world.generation == 1
    drive.exit("worker-0-0", 0)
    assert len(drive.members) == 3


def test_growth_wants_given_up_places_again_with_their_budgets_whole() -> None:
    """A place that was given up is planned anew; so is it when the same size is asked for."""
    drive = up(nodes_min=1, nodes_max=3, relaunch_max=1)
    for incarnation in (0, 1):
        drive.observe(f"worker-1-{incarnation}", "gone")
        if incarnation == 0:
            drive.join("worker-1-1")
            drive.run(2)
    assert drive.state.nodes.slots["worker-1"].given_up
    assert slots.wanted(drive.state, "worker") == 2
    scale(drive, 3)
    assert drive.facts(job.GroupScaled)[-1].revived == (1,)
    assert "worker-1-2" in launches(drive)
    assert drive.state.incidents.relaunches == {}
    assert slots.wanted(drive.state, "worker") == 3
    assert refused(scale(drive, 3)) == "group worker has 1 to 3 nodes already"


def test_growth_before_the_first_world() -> None:
    """Sizes may change while nodes are still coming: the first world waits for all of them."""
    drive = Drive(nodes_max=2, nproc=1)
    scale(drive, 3, 3)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    assert drive.members == []
    drive.join("worker-2-0")
    assert len(drive.members) == 3
    assert drive.state.job.state == "running"


def test_growth_does_not_recall_who_is_done() -> None:
    """A member that has finished and gone left no gap while its world goes on."""
    drive = up(nodes_max=2)
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "gone")
    scale(drive, 3)
    assert list(launches(drive)) == ["worker-2-0"]
    drive.join("worker-2-0")
    assert drive.world.generation == 1


# ---- shrinking


def test_shrinking_goes_on_at_once_with_those_who_stay() -> None:
    """4 -> 2: one planned stop, two nodes released with grace, and the next world is there in the same batch."""
    drive = up(nodes_min=2, nodes_max=4)
    scale(drive, 2)
    assert drive.names() == ["GroupScaled", "WorldDissolved", "NodeReleased", "NodeReleased", "WorldFormed"]
    assert drive.facts(world.WorldDissolved)[-1].planned
    assert drive.members == ["worker-0-0", "worker-1-0"]
    told = orders(drive)
    assert (told["worker-0-0"].generation, told["worker-0-0"].grace_us) == (2, GRACE_US)
    for node in ("worker-2-0", "worker-3-0"):
        assert (told[node].leave, told[node].grace_us, told[node].outcome) == (True, GRACE_US, "scaled down")
        assert deletion_grace_s(drive.state, f"j-{node}") >= 7.0 + CLOSING_S
        goes(drive, node)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert (drive.state.incidents.number, drive.state.incidents.relaunches) == (0, {})
    assert refused(scale(drive, 2)) == "group worker has 2 nodes already"


def test_the_next_death_has_no_grace() -> None:
    """Only the change that was planned is gentle: what breaks later is broken."""
    drive = up(nodes_min=2, nodes_max=3)
    scale(drive, 2)
    drive.run(5)
    drive.exit("worker-0-0", 0)
    assert drive.world.generation == 3
    assert orders(drive)["worker-1-0"].grace_us == 0


def test_shrinking_lowers_the_minimum_too() -> None:
    """4:4 -> 3 without a minimum means 3:3; with one it must fit."""
    drive = up(nodes_max=4, nodes_min=4)
    scale(drive, 3)
    group = drive.state.job.spec.group("worker")
    assert (group.nodes_min, group.nodes_max) == (3, 3)
    assert "need 1 <= MIN <= MAX" in refused(scale(drive, 3, 5))
    assert "need 1 <= MIN <= MAX" in refused(scale(drive, 0))
    assert "need 1 <= MIN <= MAX" in refused(scale(drive, 3, -1))


def test_sizes_keep_to_the_unit() -> None:
    """A maximum that is no multiple of the unit is refused, and nothing changes."""
    drive = up(nodes_min=2, nodes_max=4, unit=2)
    assert "not a multiple of 2" in refused(scale(drive, 3))
    assert drive.names() == ["CommandRefused"]
    assert drive.state.job.sizes == {}


def test_unknown_groups_are_named() -> None:
    """The refusal says which groups there are."""
    assert refused(scale(up(), 3, group="ps")) == "there is no group 'ps'; there are: worker"


def test_shrinking_rescues_a_world_that_waits_for_a_node_that_is_not_wanted() -> None:
    """3:3 waits for a third node; scaled to 2 it goes on at once, and nobody waits for the third."""
    drive = up(nodes_max=3, nodes_min=3)
    drive.observe("worker-2-0", "gone")
    assert drive.members == []
    scale(drive, 2)
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert [fact.node for fact in drive.facts(nodes.NodeGone)][-1] == "worker-2-1"
    assert launches(drive) == {}


def test_shrinking_while_another_is_relaunched() -> None:
    """The world of those who stay and are there is formed at the last call at the latest; the incident goes its way."""
    drive = up(nodes_max=4, nodes_min=1)
    drive.observe("worker-0-0", "gone")
    scale(drive, 3)
    assert drive.members == []
    drive.join("worker-0-1")
    assert drive.members == ["worker-0-1", "worker-1-0", "worker-2-0"]
    drive.run(9)
    assert drive.incident.closed


def test_those_who_stay_do_not_wait_for_who_was_missing_before() -> None:
    """Three of four train and one is coming: when the largest place goes, the other two go on at once."""
    drive = up(nodes_min=1, nodes_max=4, on_join="never")
    drive.observe("worker-1-0", "gone")
    drive.wait(31)
    assert drive.members == ["worker-0-0", "worker-3-0", "worker-2-0"]
    scale(drive, 3)
    assert drive.members == ["worker-0-0", "worker-2-0"]


def test_an_incident_of_a_place_that_is_not_wanted_any_more_is_over() -> None:
    """A late node that died broke no world; when its place goes, so does its incident."""
    drive = up(nodes_min=1, nodes_max=2, on_join="never")
    scale(drive, 3)
    drive.observe("worker-2-0", "running")
    drive.observe("worker-2-0", "failed", 1)
    assert not drive.incident.closed
    scale(drive, 2)
    assert drive.incident.closed
    assert launches(drive) == {}


def test_shrinking_spares_a_world_whose_leavers_are_done() -> None:
    """Members that had finished may go without anybody being stopped, and the job still succeeds."""
    drive = up(nodes_min=1, nodes_max=2)
    drive.do(world.ReportFinished("worker-1-0", 1))
    scale(drive, 1)
    assert drive.names() == ["GroupScaled", "NodeReleased"]
    goes(drive, "worker-1-0")
    drive.do(world.ReportFinished("worker-0-0", 1))
    assert drive.state.job.state == "succeeded"


def test_shrinking_and_growing_again_reuses_a_place_when_it_is_free() -> None:
    """The next incarnation waits until the one before is seen to end, and its place has not been given up."""
    drive = up(nodes_min=1, nodes_max=2)
    scale(drive, 1)
    scale(drive, 2)
    assert "j-worker-1-1" in desired(drive.state).names
    assert launches(drive) == {}
    goes(drive, "worker-1-0")
    assert list(launches(drive)) == ["worker-1-1"]
    drive.join("worker-1-1")
    assert drive.members == ["worker-0-0", "worker-1-1"]


def test_a_place_whose_node_was_never_started_is_free_at_once() -> None:
    """No backend has accepted it, so nothing of it will ever be seen."""
    drive = up(nodes_min=1, nodes_max=1)
    for _ in range(3):
        scale(drive, 2)
        scale(drive, 1)
    scale(drive, 2)
    assert list(launches(drive)) == ["worker-1-3"]


def test_workers_that_finish_during_a_planned_stop_are_needed_again() -> None:
    """Their world is no more: what they report of it is refused, and everybody who stays trains in the next one."""
    drive = up(nodes_max=3, nodes_min=1)
    scale(drive, 2)
    assert "is over" in refused(drive.do(world.ReportFinished("worker-0-0", 1)))
    drive.do(incidents.ReportExit("worker-0-0", 1, 0, 1, error="ValueError: x"))
    assert drive.state.incidents.number == 0
    assert drive.world.generation == 2


# ---- draining


def test_drain() -> None:
    """The node leaves with its grace, its successor keeps off its host, and the world forms when that has joined."""
    drive = up(nodes_max=2)
    drain(drive, "worker-1-0")
    assert drive.names() == ["NodeDrained", "WorldDissolved", "NodeReleased", "NodePlanned"]
    assert drive.facts(world.WorldDissolved)[-1].planned
    told = orders(drive)
    assert (told["worker-1-0"].leave, told["worker-1-0"].outcome) == (True, "drained")
    assert told["worker-1-0"].grace_us == told["worker-0-0"].grace_us == GRACE_US
    assert launches(drive) == {}
    goes(drive, "worker-1-0")
    assert launches(drive) == {"worker-1-1": ("host-of-worker-1-0",)}
    drive.join("worker-1-1", "elsewhere")
    assert drive.members == ["worker-0-0", "worker-1-1"]
    assert (drive.state.incidents.number, drive.state.incidents.relaunches) == (0, {})


def test_a_world_that_can_be_smaller_waits_for_the_successor_as_long_as_the_last_call_allows() -> None:
    """Shrinking and growing again would restart everybody twice."""
    drive = up(nodes_min=1, nodes_max=3)
    drain(drive, "worker-0-0")
    drive.wait(29)
    assert drive.members == []
    drive.wait(2)
    assert drive.members == ["worker-2-0", "worker-1-0"]


def test_the_host_is_kept_clear_of_others_until_the_node_is_gone() -> None:
    """Another node that is planned meanwhile does not take the room that was just asked for."""
    drive = up(nodes_max=3, nodes_min=1)
    drain(drive, "worker-1-0")
    drive.observe("worker-2-0", "gone")
    assert launches(drive)["worker-2-1"] == ("host-of-worker-1-0",)


def test_drain_by_place() -> None:
    """`worker-1` is whoever is there now."""
    drive = up(nodes_max=2)
    drain(drive, "worker-1")
    assert drive.facts(plans.NodeDrained)[-1].node == "worker-1-0"


def test_drain_of_the_last_node() -> None:
    """A job of one node is drained like any other: it waits for the successor."""
    drive = up(nodes_max=1, nodes_min=1)
    drain(drive, "worker-0-0")
    goes(drive, "worker-0-0")
    drive.join("worker-0-1")
    assert drive.members == ["worker-0-1"]


def test_drain_of_a_late_node_stops_nobody() -> None:
    """Who is no member is replaced without a word to the others."""
    drive = up(nodes_max=2, on_join="never")
    scale(drive, 3)
    drive.observe("worker-2-0", "running", host="h")
    drain(drive, "worker-2-0")
    assert drive.names() == ["NodeDrained", "NodeReleased", "NodePlanned"]
    assert drive.world.generation == 1


def test_drain_of_a_node_that_is_done() -> None:
    """It goes, and nobody takes its place."""
    drive = up(nodes_max=2)
    drive.do(world.ReportFinished("worker-1-0", 1))
    drain(drive, "worker-1-0")
    assert drive.names() == ["NodeDrained", "NodeReleased"]
    assert drive.world.active


def test_who_had_finished_is_needed_again_after_a_drain() -> None:
    """The world that the drain ended is made anew with everybody, those who were done and gone included."""
    drive = up(nodes_max=3)
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "gone")
    drain(drive, "worker-1-0")
    assert list(launches(drive)) == ["worker-0-1"]
    goes(drive, "worker-1-0")
    assert sorted(launches(drive)) == ["worker-0-1", "worker-1-1"]


def test_refused_drains() -> None:
    """Each refusal says why, and an unknown name lists the nodes there are."""
    drive = up(nodes_max=2)
    assert refused(drain(drive, "worker-9-0")) == "there is no node 'worker-9-0'; there are: worker-0-0, worker-1-0"
    drain(drive, "worker-1-0")
    assert refused(drain(drive, "worker-1-0")) == "node worker-1-0 is drained already"
    assert "is planned and on no host yet" in refused(drain(drive, "worker-1-1"))
    drive.do(nodes.ReportFault("worker-0-0", "broken"))
    assert refused(drain(drive, "worker-0-0")) == "node worker-0-0 is replaced already"


def test_a_drained_node_that_falls_silent_does_not_hold_its_place_for_ever() -> None:
    """Unseen and unheard for `unreachable_s`, it is lost, and the successor may start elsewhere."""
    drive = up(nodes_max=2, unreachable_s=60.0)
    drain(drive, "worker-1-0")
    drive.do(silence.NoteSilence("worker-1-0", 1))
    drive.wait(59)
    assert launches(drive) == {}
    drive.wait(2)
    assert launches(drive) == {"worker-1-1": ("host-of-worker-1-0",)}
    assert drive.state.incidents.number == 0
