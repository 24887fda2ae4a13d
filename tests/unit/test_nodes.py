"""Nodes: who should exist, who does, and what became of each."""

from __future__ import annotations

import pytest
from drive import SECOND, Drive, spec_of

from dlrover_core.job import incidents, job, nodes, observing, silence
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL


def _names(drive: Drive) -> list[str]:
    return list(drive.state.nodes.nodes)


def _launches(drive: Drive) -> list[str]:
    return [one.node for one in desired(drive.state).launch]


def test_a_new_job_plans_nodes_max() -> None:
    """Every place of every group gets its first incarnation, and the backend is asked for all of them."""
    drive = Drive(nodes_max=3, nodes_min=1)
    assert _names(drive) == ["worker-0-0", "worker-1-0", "worker-2-0"]
    assert _launches(drive) == _names(drive)
    assert desired(drive.state).names == {"j-worker-0-0", "j-worker-1-0", "j-worker-2-0"}
    assert desired(drive.state).launch[1].name == "j-worker-1-0"


def test_what_was_accepted_is_not_launched_again() -> None:
    """Once the backend lists a node it is wanted but no longer to be launched."""
    drive = Drive(nodes_max=2)
    drive.observe("worker-0-0", "pending")
    assert _launches(drive) == ["worker-1-0"]
    assert "j-worker-0-0" in desired(drive.state).names


@pytest.mark.parametrize(
    ("phases", "state"),
    [
        (["pending"], "pending"),
        (["running"], "running"),
        (["pending", "running"], "running"),
        (["running", "pending"], "running"),
        (["running", "running"], "running"),
    ],
)
def test_observations(phases: list[str], state: str) -> None:
    """An observation moves a node forward and never back; the same again is no event."""
    drive = Drive()
    for phase in phases:
        drive.observe("worker-0-0", phase)
    assert drive.state.nodes.nodes["worker-0-0"].state == state
    drive.observe("worker-0-0", phases[-1])
    assert drive.new == []


def test_a_phase_no_backend_has_is_refused() -> None:
    """A backend that invents a phase hears so."""
    drive = Drive()
    reply = drive.observe("worker-0-0", "dreaming")
    assert isinstance(reply, NotDone)
    assert "no phase 'dreaming'" in reply.reason


def test_a_host_that_its_platform_cannot_reach() -> None:
    """While the agent is heard it is only named; once it is silent its node is replaced at once, not after unreachable_s."""
    drive = Drive(nodes_max=2).up()
    drive.observe("worker-1-0", "lost", reason="NodeNotReady")
    assert drive.names() == ["HostUnreached"]
    drive.do(silence.NoteSilence("worker-1-0", 16 * SECOND))
    (lost,) = drive.facts(nodes.NodeLost)
    assert (lost.node, lost.reason) == ("worker-1-0", "NodeNotReady")
    assert [planned.node for planned in drive.facts(nodes.NodePlanned)][-1] == "worker-1-1"


def test_a_silent_node_is_lost_as_soon_as_its_host_is() -> None:
    """The agent was silent first, and may have died: the platform's word settles it."""
    drive = Drive(nodes_max=2).up()
    drive.do(silence.NoteSilence("worker-1-0", 16 * SECOND))
    drive.observe("worker-1-0", "lost", reason="NodeNotReady")
    assert [lost.reason for lost in drive.facts(nodes.NodeLost)] == ["NodeNotReady"]


def test_a_host_is_known_before_the_node_runs() -> None:
    """Its platform has placed it and pulls images: the host has a name, and is avoided if nothing comes of it."""
    drive = Drive(nodes_max=1, nproc=1, launch_s=900.0)
    seen = nodes.Observed("worker-0-0", "pending", host="h1", rack="r1")
    drive.do(nodes.ObserveNodes((seen,)))
    drive.do(nodes.ObserveNodes((seen,)))
    assert drive.facts(observing.NodePlaced) == [observing.NodePlaced("worker-0-0", "h1", "r1")]
    assert (drive.state.hosts.host_of("worker-0-0"), drive.state.hosts.rack_of("h1")) == ("h1", "r1")
    drive.wait(900)
    assert [fact.avoid for fact in drive.facts(nodes.NodePlanned)] == [(), ("h1",)]


def test_the_platforms_later_word_revises_a_failure_that_nobody_saw() -> None:
    """An agent left, unasked; then its platform says why: the place is free, and the verdict is the platform's."""
    drive = Drive(nodes_max=2, relaunch_max=3).up()
    drive.do(nodes.ReportLeft("worker-1-0"))
    (before,) = drive.facts(incidents.Diagnosed)
    assert [one.node for one in desired(drive.state).launch] == []
    drive.observe("worker-1-0", "failed", 137, "OOMKilled")
    assert drive.facts(observing.NodeEnded) == [observing.NodeEnded("worker-1-0", 137, "OOMKilled", True)]
    after = drive.facts(incidents.Diagnosed)[-1]
    assert (after.revises, after.verdict, before.verdict) == (before_seq(drive), "RES", "PLAT")
    assert [one.node for one in desired(drive.state).launch] == ["worker-1-1"]
    drive.observe("worker-1-0", "failed", 137, "OOMKilled")
    assert len(drive.facts(observing.NodeEnded)) == 1


def before_seq(drive: Drive) -> int:
    """The record of the first verdict."""
    return next(record.seq for record in drive.records if isinstance(record.event, incidents.Diagnosed))


def test_our_own_kill_revises_nothing() -> None:
    """What failed unseen is deleted by us: that its processes are killed then says nothing about why it failed."""
    drive = Drive(nodes_max=2).up()
    drive.do(nodes.ReportFault("worker-1-0", "workers cannot be started"))
    drive.observe("worker-1-0", "failed", -9)
    assert [fact.tells for fact in drive.facts(observing.NodeEnded)] == [False]
    assert len(drive.facts(incidents.Diagnosed)) == 1


def test_strangers_are_ignored() -> None:
    """What a backend lists that is not ours changes nothing; desired does not name it, so it is deleted."""
    drive = Drive()
    drive.observe("worker-9-0", "running")
    assert drive.new == []
    assert "j-worker-9-0" not in desired(drive.state).names


def test_a_complete_list_says_who_is_gone() -> None:
    """What a complete list lacks is gone, but for nodes that were never accepted: those may still be on their way."""
    drive = Drive(nodes_max=3)
    drive.observe("worker-0-0", "running")
    drive.observe("worker-1-0", "pending")
    drive.listed()
    assert [fact.node for fact in drive.facts(nodes.NodeGone)] == ["worker-0-0", "worker-1-0"]
    assert [name for name in _names(drive) if name.endswith("-0")] == ["worker-2-0"]


def test_a_relaunch_keeps_group_and_index() -> None:
    """A dead node's successor has its place and the next incarnation."""
    drive = Drive().up()
    drive.observe("worker-1-0", "failed", 1)
    assert drive.names() == [
        "NodeFailed", "IncidentOpened", "WorldDissolved", "Diagnosed", "ActionChosen", "NodeReleased", "NodePlanned",
    ]  # fmt: skip
    planned = drive.facts(nodes.NodePlanned)[-1]
    assert (planned.node, planned.group, planned.index, planned.incarnation) == ("worker-1-1", "worker", 1, 1)


def test_the_next_incarnation_waits_until_the_last_is_seen_dead() -> None:
    """A node that only says of itself that it is no good is released first; its successor starts when it is seen to end."""
    drive = Drive().up()
    drive.observe("worker-1-0", "gone")
    assert _launches(drive) == ["worker-1-1"]
    drive = Drive().up()
    drive.do(silence.NoteSilence("worker-1-0", 1))
    drive.wait(300)
    assert _launches(drive) == ["worker-1-1"]
    assert drive.state.nodes.nodes["worker-1-0"].released == "lost"


def test_dead_hosts_are_avoided_when_they_could_not_be_reached() -> None:
    """The successor of a node that was lost to silence starts on another host."""
    drive = Drive().up()
    drive.do(silence.NoteSilence("worker-1-0", 1))
    drive.wait(300)
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("host-of-worker-1-0",)


def test_quarantine_and_its_expiry() -> None:
    """A host that failed for the host's sake is avoided for quarantine_s and no longer."""
    drive = Drive(nodes_max=2, relaunch_max=9, quarantine_s=100.0, launch_s=1000.0).up()
    drive.observe("worker-1-0", "failed", 1, "check_failed: slow link")
    assert drive.names()[1] == "HostQuarantined"
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("host-of-worker-1-0",)
    drive.wait(99)
    drive.observe("worker-0-0", "failed", 1)
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("host-of-worker-1-0",)
    drive.wait(1)
    drive.observe("worker-0-1", "failed", 1)
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ()


@pytest.mark.parametrize("reason", ["", "OOMKilled", "Error", "Evicted"])
def test_other_reasons_do_not_blame_the_host(reason: str) -> None:
    """What speaks against the program or the platform puts no host in quarantine."""
    drive = Drive().up()
    drive.observe("worker-1-0", "failed", 1, reason)
    assert drive.state.hosts.quarantined(drive.now) == []


# ---- joining and leaving


def test_joining() -> None:
    """An agent's first word makes its node ready; the backend's running comes before or after."""
    drive = Drive()
    assert isinstance(drive.join("worker-0-0", "h0"), Accepted)
    node = drive.state.nodes.nodes["worker-0-0"]
    assert (node.state, node.host, node.ready) == ("running", "h0", True)
    drive.observe("worker-0-0", "running")
    assert drive.new == []


@pytest.mark.parametrize("why", ["stranger", "twice", "failed", "replaced"])
def test_joining_is_refused(why: str) -> None:
    """Strangers, second agents and nodes that ended do not join."""
    drive = Drive().up()
    if why == "failed":
        drive.do(nodes.ReportFault("worker-0-0", "broken"))
    if why == "replaced":
        drive.observe("worker-0-0", "gone")
    reply = drive.do(nodes.ReportJoined("worker-7-0" if why == "stranger" else "worker-0-0", "h", "a", 2))
    assert isinstance(reply, NotDone)


def test_an_agent_that_leaves_unasked_is_replaced() -> None:
    """A node whose platform ends it politely (SIGTERM) is as lost to the job as one that was killed."""
    drive = Drive().up()
    drive.do(nodes.ReportLeft("worker-1-0"))
    assert drive.facts(nodes.NodeFailed) == [nodes.NodeFailed("worker-1-0", 0, "its agent left, unasked", seen=False)]
    assert "worker-1-1" in drive.state.nodes.nodes
    assert desired(drive.state).launch == (), "it may still run: its place is not free"
    drive.observe("worker-1-0", "succeeded")
    drive.observe("worker-1-0", "gone")
    assert [launch.node for launch in desired(drive.state).launch] == ["worker-1-1"]
    assert drive.state.incidents.number == 1


def test_a_node_that_ends_well_before_its_work_is_done_is_replaced() -> None:
    """Exit code 0 of an agent whose workers have not finished is a failure: the world misses a member."""
    drive = Drive(nodes_max=1, nproc=1).up()
    drive.observe("worker-0-0", "succeeded")
    assert drive.members == []
    assert _launches(drive) == ["worker-0-1"]


def test_an_agent_that_leaves_when_told_is_not_replaced() -> None:
    """Whoever was released leaves without consequence."""
    drive = Drive(nodes_max=2, nodes_min=1, relaunch_max=0).up()
    drive.do(nodes.ReportFault("worker-1-0", "broken"))
    planned = len(drive.facts(nodes.NodePlanned))
    drive.do(nodes.ReportLeft("worker-1-0"))
    drive.observe("worker-1-0", "gone")
    assert len(drive.facts(nodes.NodePlanned)) == planned
    assert drive.members == ["worker-0-0"]


# ---- silence


def test_silence_is_not_death() -> None:
    """A silent node is suspect and stays a member; heard again, it is as before."""
    drive = Drive(nodes_max=3).up()
    drive.do(silence.NoteSilence("worker-1-0", 16 * SECOND))
    assert drive.state.nodes.nodes["worker-1-0"].state == "suspect"
    assert "worker-1-0" in drive.members
    drive.wait(299)
    assert drive.new == []
    drive.do(silence.NoteHeard("worker-1-0"))
    drive.wait(10_000)
    assert drive.facts(nodes.NodeLost) == []


def test_unreachable_for_too_long() -> None:
    """A suspect is given up after unreachable_s and replaced; it is one incident."""
    drive = Drive(nodes_max=3, unreachable_s=100.0).up()
    drive.do(silence.NoteSilence("worker-1-0", 16 * SECOND))
    drive.wait(99)
    assert drive.facts(nodes.NodeLost) == []
    drive.wait(1)
    assert drive.facts(nodes.NodeLost) == [nodes.NodeLost("worker-1-0", "silent")]
    assert (drive.incident.signature, drive.incident.action) == ("node.silent", "RELAUNCH_NODE")


def test_silence_starts_afresh_with_a_new_leader() -> None:
    """A suspect gets its full time again when a master takes over, and when the master found itself paused."""
    for calm in (job.TakeOver("m2", "0"), job.NotePause(3 * SECOND)):
        drive = Drive(nodes_max=3, unreachable_s=100.0).up()
        drive.do(silence.NoteSilence("worker-1-0", 1))
        drive.wait(90)
        drive.do(calm)
        drive.wait(99)
        assert drive.facts(nodes.NodeLost) == []
        drive.wait(1)
        assert len(drive.facts(nodes.NodeLost)) == 1


def test_mass_silence() -> None:
    """More than half silent at once: the master suspects itself, and nobody is replaced before mass_silence_s."""
    drive = Drive(nodes_max=4, nodes_min=1, unreachable_s=10.0, mass_silence_s=500.0).up()
    for one in range(3):
        drive.do(silence.NoteSilence(f"worker-{one}-0", 1))
    assert drive.facts(silence.MassSilence) == [silence.MassSilence(3, 4)]
    drive.wait(499)
    assert drive.facts(nodes.NodeLost) == []
    drive.wait(1)
    assert len(drive.facts(nodes.NodeLost)) == 3


def test_mass_silence_ends_when_half_are_heard() -> None:
    """Once half of the nodes speak again, the silence of the rest counts as theirs."""
    drive = Drive(nodes_max=4, unreachable_s=10.0, mass_silence_s=500.0).up()
    for one in range(3):
        drive.do(silence.NoteSilence(f"worker-{one}-0", 1))
    drive.do(silence.NoteHeard("worker-0-0"))
    drive.wait(10)
    assert [fact.node for fact in drive.facts(nodes.NodeLost)] == ["worker-1-0", "worker-2-0"]


def test_mass_silence_is_noticed_every_time() -> None:
    """A mass silence that ended in replacements does not disarm the next one."""
    drive = Drive(nodes_max=4, nodes_min=1, unreachable_s=10.0, mass_silence_s=100.0).up()
    for one in range(3):
        drive.do(silence.NoteSilence(f"worker-{one}-0", 1))
    drive.wait(100)
    assert drive.state.nodes.mass_at == 0
    for one in range(3):
        drive.join(f"worker-{one}-1")
    drive.wait(1000)
    for one in range(3):
        drive.do(silence.NoteSilence(f"worker-{one}-1", 1))
    assert len(drive.facts(silence.MassSilence)) == 2
    lost = len(drive.facts(nodes.NodeLost))
    drive.wait(99)
    assert len(drive.facts(nodes.NodeLost)) == lost


def test_what_the_backend_says_counts_in_mass_silence_too() -> None:
    """Mass silence protects from silence alone: a node seen dead is replaced at once."""
    drive = Drive(nodes_max=4, nodes_min=1).up()
    for one in range(4):
        drive.do(silence.NoteSilence(f"worker-{one}-0", 1))
    drive.observe("worker-2-0", "failed", -9)
    assert "worker-2-1" in _names(drive)


@pytest.mark.parametrize("phase", ["", "pending", "running"])
def test_a_node_that_never_joins_is_replaced(phase: str) -> None:
    """Planned, pending or running without an agent: after launch_s the next incarnation is tried."""
    drive = Drive(nodes_max=1, launch_s=50.0)
    if phase:
        drive.observe("worker-0-0", phase)
    drive.wait(49)
    assert drive.new == []
    drive.wait(1)
    assert "worker-0-1" in _names(drive)
    assert drive.state.incidents.relaunches == {"worker-0": 1}


@pytest.mark.parametrize("phase", ["", "pending", "running"])
def test_a_node_whose_host_is_lost_before_it_joins_is_replaced_at_once(phase: str) -> None:
    """No agent of it is heard, and none could train: nobody waits launch_s, and the next one avoids the host."""
    drive = Drive(nodes_max=1, launch_s=900.0)
    if phase:
        drive.observe("worker-0-0", phase, host="host-7")
    drive.observe("worker-0-0", "lost", reason="NODE_DIED", host="host-7")
    assert [(lost.node, lost.reason) for lost in drive.facts(nodes.NodeLost)] == [("worker-0-0", "NODE_DIED")]
    assert "worker-0-1" in _names(drive)
    assert isinstance(drive.join("worker-0-0"), NotDone), "its agent comes after all"


def test_launching_for_ever_is_bounded() -> None:
    """A place whose nodes never come is given up after relaunch_max, and a job that can no longer run fails."""
    drive = Drive(nodes_max=1, launch_s=50.0, relaunch_max=2, evidence_s=10.0)
    drive.wait(50 * 3 + 10)
    assert drive.state.job.state == "failed"
    assert [fact.incarnation for fact in drive.facts(nodes.NodePlanned)] == [0, 1, 2]


# ---- incarnations


def test_incarnations_never_go_back() -> None:
    """Not after shrinking, not after relaunches, not in a new run on the same log."""
    drive = Drive(nodes_max=2, nodes_min=1, relaunch_max=1).up()
    drive.observe("worker-1-0", "gone")
    drive.observe("worker-1-1", "gone")
    drive.do(job.StopJob("enough"))
    drive.observe("worker-0-0", "gone")
    assert drive.state.job.state == "stopped"
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert _names(drive) == ["worker-0-1", "worker-1-2"]


def test_a_new_run_knows_bad_hosts_and_no_old_nodes() -> None:
    """Nodes of an earlier run are strangers; hosts it put in quarantine stay there."""
    drive = Drive().up()
    drive.observe("worker-1-0", "failed", 1, "hardware: gpu")
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert _names(drive) == ["worker-0-1", "worker-1-2"]
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("host-of-worker-1-0",)
    assert isinstance(drive.do(nodes.ReportLeft("worker-0-0")), NotDone)


def test_places_of_an_earlier_larger_run_stay_empty() -> None:
    """A run with fewer nodes than the last never plans the places beyond its own nodes_max."""
    drive = Drive(nodes_max=4)
    drive.do(job.CreateJob("run-2", spec_of(nodes_max=2).to_json()))
    drive.up()
    drive.exit("worker-0-1", 0)
    assert {fact.index for fact in drive.facts(nodes.NodePlanned)[4:]} == {0, 1}


def test_deadlines_are_known_in_advance() -> None:
    """`due` names the moment at which the next tick has something to say, and none where nobody is waited for."""
    drive = Drive(nodes_max=2, launch_s=50.0)
    assert MODEL.due(drive.state) == drive.now + 50 * SECOND
    drive.up()
    assert MODEL.due(drive.state) is None


def test_a_fault_that_nobody_sees_end_frees_its_place_elsewhere_in_time() -> None:
    """A faulty node that its backend goes on calling running is given up after unreachable_s, its host avoided."""
    drive = Drive(unreachable_s=100.0).up()
    drive.do(nodes.ReportFault("worker-1-0", "workers survived SIGKILL"))
    assert desired(drive.state).launch == ()
    drive.wait(100)
    (launch,) = desired(drive.state).launch
    assert (launch.node, launch.avoid) == ("worker-1-1", (drive.state.nodes.nodes["worker-1-0"].host,))
    assert drive.state.incidents.number == 1, "it was answered already"


def test_every_lost_host_is_avoided_until_it_is_seen_gone() -> None:
    """A host that could not be reached stays avoided when the next incarnation dies too."""
    drive = Drive(unreachable_s=100.0, mass_silence_s=100.0).up()
    host = drive.state.nodes.nodes["worker-1-0"].host
    drive.do(silence.NoteSilence("worker-1-0", 1))
    drive.wait(100)
    drive.observe("worker-1-1", "failed")
    (launch,) = desired(drive.state).launch
    assert (launch.node, host in launch.avoid) == ("worker-1-2", True)


def test_what_a_backend_refuses_for_good_is_not_asked_again() -> None:
    """A node that its backend will never start is not planned anew; with too few without it the job fails and says why."""
    drive = Drive()
    drive.observe("worker-1-0", "failed", reason="refused for good: no such image")
    assert drive.state.job.state == "failed"
    assert "no such image" in drive.state.job.root
    assert drive.state.incidents.relaunches == {}
