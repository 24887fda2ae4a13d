"""From evidence to action in the engine: what joins an incident, who pays, what is escalated, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
from drive import SECOND, Drive
from recovering import BUG, newest, see

from dlrover_core.diagnosis import ladder
from dlrover_core.job import evidence, hosts, incidents, job, nodes, progress, world
from dlrover_core.rules.desired import desired

TYPO = "Traceback (most recent call last):\n  File \"/job/train.py\", line 3, in <module>\nModuleNotFoundError: No module 'm'"


# ---- evidence


def test_what_was_seen_before_the_death_may_be_its_cause() -> None:
    """The kernel names a broken GPU; a second later a worker dies: its node goes to another host, and the host is left alone."""
    drive = Drive(nodes_max=3, nproc=1).up()
    see(drive, "worker-1-0", "xid.fallen_off", age_s=1)
    assert drive.state.incidents.number == 0
    drive.exit("worker-1-0", 1, -6)
    found = newest(drive, incidents.Diagnosed)
    assert (found.verdict, found.signature, found.blamed, found.host) == (
        "HW",
        "xid.fallen_off",
        "worker-1-0",
        "host-of-worker-1-0",
    )
    assert found.evidence[0] == next(one.seq for one in drive.records if type(one.event) is evidence.EvidenceSeen)
    assert len(found.discarded) == 1
    assert newest(drive, incidents.ActionChosen).action == "ISOLATE_HOST"
    assert drive.incident.cause.text == "sign of xid.fallen_off"
    assert newest(drive, hosts.HostQuarantined).host == "host-of-worker-1-0"
    planned = newest(drive, nodes.NodePlanned)
    assert (planned.node, planned.avoid) == ("worker-1-1", ("host-of-worker-1-0",))
    drive.observe("worker-1-0", "gone")
    drive.join("worker-1-1")
    drive.run(2)
    assert drive.incident.closed
    assert drive.state.incidents.restarts == 0


def test_what_is_seen_after_the_death_revises_and_escalates() -> None:
    """Processes are restarted at once; when the kernel then names the GPU, the node is replaced, and the restart given back."""
    drive = Drive(nodes_max=3, nproc=1).up()
    drive.exit("worker-1-0", 1, -9)
    assert (drive.incident.action, drive.state.incidents.restarts) == ("RESTART_PROCESSES", 1)
    see(drive, "worker-1-0", "xid.fallen_off", age_s=2)
    assert [(one.action, one.state) for one in drive.incident.actions] == [
        ("RESTART_PROCESSES", "superseded"),
        ("ISOLATE_HOST", "in_force"),
    ]
    assert (drive.state.incidents.restarts, drive.state.incidents.relaunches) == (0, {"worker-1": 1})


def test_a_verdict_after_recovery_moves_the_charge_and_no_node() -> None:
    """Training goes on when the true cause is known: the charge follows it, and nothing that works is disturbed."""
    drive = Drive(nodes_max=3, nproc=1).up()
    drive.exit("worker-1-0", 1, 1)
    drive.now += SECOND
    drive.run(2)
    see(drive, "worker-1-0", "xid.fallen_off", age_s=2)
    assert drive.names() == ["EvidenceSeen", "Diagnosed"]
    assert (drive.state.incidents.restarts, len(drive.state.incidents.software)) == (0, 1)
    assert newest(drive, incidents.Diagnosed).budget == "software"


def test_what_explains_one_incident_is_no_cause_of_the_next() -> None:
    """A line of the kernel belongs to the failure in whose time it falls; what comes after recovery waits for the next one."""
    drive = Drive(nodes_max=3, nproc=1, max_restarts=9).up()
    drive.exit("worker-1-0", 1, -9)
    see(drive, "worker-1-0", "cgroup.oom")
    drive.now += SECOND
    drive.run(2)
    drive.now += 60 * SECOND
    drive.exit("worker-2-0", 2, 1, BUG)
    assert (drive.incident.number, drive.incident.signature) == (2, "exception.KeyError")
    drive.now += SECOND
    drive.run(3)
    drive.now += 10 * SECOND
    see(drive, "worker-0-0", "cgroup.oom")
    drive.exit("worker-0-0", 0, -9)
    assert (drive.incident.number, drive.incident.signature) == (3, "cgroup.oom")


def wrote(drive: Drive, rank: int, signature: str, generation: int, place: str = "") -> None:
    """A rank wrote a line that a signature knows."""
    drive.do(
        evidence.ReportEvidence(
            f"worker-{rank}-0", "log", signature, f"line of {signature}", rank, generation, 0, place
        )
    )


def test_a_handled_exception_ends_no_job() -> None:
    """Every generation prints the same traceback and goes on; kills that follow are kills, as often as restarts are left."""
    drive = Drive(nodes_max=3, nproc=1, max_restarts=5).up()
    for generation in (1, 2, 3):
        for rank in range(3):
            wrote(drive, rank, "exception.ModuleNotFoundError", generation, "ModuleNotFoundError at job/train.py:4")
        drive.wait(4)
        drive.exit("worker-1-0", 1, -9)
        found = newest(drive, incidents.Diagnosed)
        assert (found.signature, found.place, drive.incident.action) == ("exit.sigkill", "", "RESTART_PROCESSES")
        drive.now += SECOND
        drive.run(5 + generation)


def test_a_line_alone_ends_no_job() -> None:
    """What only a line says, of a rank that then ends with 1, has no place and is answered by restarts."""
    drive = Drive(nodes_max=3, nproc=1, max_restarts=5).up()
    for generation in (1, 2, 3):
        wrote(drive, 1, "exception.ModuleNotFoundError", generation, "ModuleNotFoundError at job/train.py:4")
        drive.wait(1)
        drive.exit("worker-1-0", 1, 1)
        found = newest(drive, incidents.Diagnosed)
        assert (found.signature, found.place, found.hint) == ("exception.ModuleNotFoundError", "", "proc")
        assert drive.incident.action == "RESTART_PROCESSES"
        drive.now += SECOND
        drive.run(5)


def test_what_came_before_an_incident_is_spent_with_it() -> None:
    """The same line of two nodes before the first death is that death's; the next one, minutes later, is none of it."""
    drive = Drive(nodes_max=4, nproc=1, max_restarts=9).up()
    for rank in (0, 1):
        wrote(drive, rank, "cuda.oom", 1)
    drive.wait(0.2)
    for rank in (0, 1):
        drive.exit(f"worker-{rank}-0", rank, 1, signature="cuda.oom", generation=1)
    assert drive.incident.signature == "cuda.oom"
    drive.now += SECOND
    drive.run(5)
    drive.wait(300)
    drive.exit("worker-3-0", 3, -9)
    assert (drive.incident.number, drive.incident.signature) == (2, "exit.sigkill")


def test_a_line_of_an_earlier_generation_is_none_of_the_next() -> None:
    """A line of the broken world that comes late, while the next one trains, is not why that one breaks."""
    drive = Drive(nodes_max=3, nproc=1, max_restarts=5).up()
    drive.exit("worker-1-0", 1, -9)
    drive.now += SECOND
    drive.run(5)
    drive.wait(20)
    wrote(drive, 0, "cuda.ecc", 1)
    drive.wait(2)
    drive.exit("worker-2-0", 2, -9)
    assert (drive.incident.number, drive.incident.signature) == (2, "exit.sigkill")
    assert drive.state.evidence.recent[-1].generation == 1


def test_a_flood_frees_no_evidence() -> None:
    """The root is among an incident's evidence however full that is, and explains no later incident."""
    drive = Drive(nodes_max=80, nproc=1, max_restarts=9).up()
    for rank in range(70):
        drive.cascade(f"worker-{rank}-0", rank, generation=1)
    see(drive, "worker-75-0", "xid.fallen_off", age_s=1)
    root = newest(drive, incidents.Diagnosed).evidence[0]
    assert drive.incident.signature == "xid.fallen_off"
    assert root in drive.incident.evidence
    assert len(drive.incident.evidence) == incidents.EVIDENCE_MAX
    drive.observe("worker-75-0", "gone")
    drive.join("worker-75-1")
    drive.now += SECOND
    drive.run(2)
    drive.wait(60)
    drive.exit("worker-5-0", 5, -9)
    assert (drive.incident.number, drive.incident.signature) == (2, "exit.sigkill")


def test_forgotten_incidents_keep_what_was_theirs() -> None:
    """After more incidents than are remembered, all in minutes, the first one's evidence is still no cause of the next."""
    drive = Drive(nodes_max=3, nproc=1, max_restarts=90).up()
    see(drive, "worker-0-0", "cgroup.oom", "cgroup")
    for step in range(incidents.CLOSED_KEPT + 3):
        drive.wait(1)
        drive.exit("worker-0-0", 0, -9)
        drive.now += SECOND
        drive.run(10 + 10 * step)
    assert 1 not in drive.state.incidents.by_number
    assert [one.incident for one in drive.state.incidents.spent][:2] == [1, 2]
    drive.wait(1)
    drive.exit("worker-0-0", 0, -9)
    assert drive.incident.signature == "exit.sigkill"


def test_the_second_of_two_broken_hosts_is_not_forgotten() -> None:
    """The kernels of two hosts name broken GPUs at once: one is the root; the other's word is heard at its own death."""
    drive = Drive(nodes_max=8, nproc=1, max_restarts=3).up()
    for node in ("worker-1-0", "worker-2-0"):
        see(drive, node, "xid.fallen_off", age_s=1)
    drive.exit("worker-1-0", 1, -6)
    drive.observe("worker-1-0", "gone")
    drive.join("worker-1-1")
    drive.now += SECOND
    drive.run(2)
    drive.wait(20)
    drive.exit("worker-2-0", 2, -6)
    found = newest(drive, incidents.Diagnosed)
    assert (drive.incident.number, found.signature, found.blamed) == (2, "xid.fallen_off", "worker-2-0")


def test_evidence_of_another_group_or_of_long_ago_is_not_taken() -> None:
    """Ten minutes bound what a death may have to do with."""
    drive = Drive(nodes_max=3, nproc=1).up()
    see(drive, "worker-1-0", "xid.fallen_off")
    drive.now += 661 * SECOND
    drive.exit("worker-1-0", 1, -9)
    assert drive.incident.signature == "exit.sigkill"


def test_a_thousand_cascades_hide_no_cause() -> None:
    """However many survivors speak first, who has a cause is kept; the memory of an incident is bounded."""
    drive = Drive(nodes_max=200, nodes_min=200, nproc=1).up()
    for index in range(199):
        drive.cascade(f"worker-{index}-0", index, generation=1)
    assert len(drive.incident.known) <= incidents.KNOWN_MAX
    drive.exit("worker-199-0", 199, 1, BUG, generation=1)
    assert (drive.incident.signature, drive.incident.cause.rank) == ("exception.KeyError", 199)
    assert len(drive.incident.evidence) == incidents.EVIDENCE_MAX


def test_what_an_agent_knows_is_not_matched_again() -> None:
    """An exit that comes with its signature and place has its class from the table; one of an unknown name is matched here."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3, 1, "words that mean nothing", signature="port.in_use", place="OSError at a.py:1")
    fact = newest(drive, incidents.WorkerExited)
    assert (fact.signature, fact.verdict, fact.place) == ("port.in_use", "SOFT", "OSError at a.py:1")
    drive.exit("worker-1-0", 2, 1, BUG, generation=1, signature="of.tomorrow")
    fact = newest(drive, incidents.WorkerExited)
    assert (fact.signature, fact.verdict) == ("exception.KeyError", "USER")
    assert "train.py:31" in fact.place


def test_exits_of_the_first_version_are_read_as_they_were() -> None:
    """Records without signature are judged as they were judged when they were written, whatever the table says today."""
    upcast = incidents.WorkerExited.__event__.upcasters[1]  # type: ignore[attr-defined]
    old = ("worker-0-0", 1, 0, 1, False, -1, 0, "", "RuntimeError: [gloo] Connection closed by peer")
    assert incidents.WorkerExited(*upcast(old))[9:] == ("peer.lost", "", "CASC", 0.8, "")
    killed = incidents.WorkerExited(*upcast(("worker-0-0", 1, 0, -9, False, -1, 0, "", "")))
    assert (killed.signature, killed.verdict) == ("exit.sigkill", "PLAT")
    upcast = incidents.ActionChosen.__event__.upcasters[1]  # type: ignore[attr-defined]
    assert incidents.ActionChosen(*upcast((1, "RESTART_PROCESSES", "n", "r", 2))).budget == "restarts"


# ---- repetition, progress


def test_the_same_error_at_the_same_step_ends_the_job() -> None:
    """A bug that comes back at its step, after steps were made again, ends the job, with restarts left."""
    drive = Drive(max_restarts=9).up()
    drive.exit("worker-1-0", 2, 1, BUG, step=60)
    assert drive.incident.action == "RESTART_PROCESSES"
    drive.run(51)
    drive.exit("worker-1-0", 2, 1, BUG, step=60)
    assert (drive.incident.action, drive.incident.rule.split(":")[0]) == ("AWAIT_EVIDENCE", "user.repeats")
    drive.wait(drive.spec.evidence_s)
    assert drive.state.job.state == "failed"
    assert "KeyError" in drive.state.job.root


@pytest.mark.parametrize(("step", "other"), [(60, BUG.replace("31", "77")), (61, BUG), (-1, BUG)])
def test_another_place_or_step_is_another_failure(step: int, other: str) -> None:
    """Another line, a later step, or a step that nobody knows: it is tried again, as often as --max-restarts says."""
    drive = Drive(max_restarts=9).up()
    drive.exit("worker-1-0", 2, 1, BUG, step=60 if step > 0 else -1)
    drive.run(51)
    drive.exit("worker-1-0", 2, 1, other, step=step)
    assert drive.incident.action == "RESTART_PROCESSES"


def test_a_program_that_cannot_be_imported_ends_at_once() -> None:
    """Before the first step ever there is nothing to try again."""
    drive = Drive(max_restarts=9)
    for name in ("worker-0-0", "worker-1-0"):
        drive.join(name)
    drive.exit("worker-1-0", 2, 1, TYPO)
    assert drive.incident.rule.startswith("user.at_once")
    later = Drive(max_restarts=9).up()
    later.exit("worker-1-0", 2, 1, TYPO)
    assert later.incident.action == "RESTART_PROCESSES"


# ---- scripts that signal no steps


def _silent(**settings: Any) -> Drive:
    """A job whose script signals nothing, its workers running."""
    drive = Drive(nproc=1, max_restarts=9, **settings)
    for name in list(drive.state.nodes.nodes):
        drive.join(name)
    _start(drive)
    return drive


def _start(drive: Drive) -> None:
    for member in drive.world.members:
        drive.do(world.ReportStarted(member.node, drive.world.generation))
        drive.offer(member.node)


def test_no_sign_of_steps_is_no_proof_of_none() -> None:
    """Hours between two errors at one line, or before the first ImportError: without signals nobody knows what was gained."""
    drive = _silent()
    for _ in range(3):
        drive.wait(6 * 3600)
        drive.exit("worker-1-0", 1, 1, BUG)
        assert drive.incident.action == "RESTART_PROCESSES"
        _start(drive)
    late = _silent()
    late.wait(11)
    late.exit("worker-1-0", 1, 1, TYPO)
    assert late.incident.action == "RESTART_PROCESSES"
    _start(late)
    late.exit("worker-1-0", 1, 1, TYPO)
    assert late.incident.action == "RESTART_PROCESSES"  # the generation before may have made steps


@pytest.mark.parametrize(("error", "lives", "rule"), [(BUG, 2, "user.repeats"), (TYPO, 1, "user.at_once")])
def test_who_dies_at_once_has_made_no_step(error: str, lives: int, rule: str) -> None:
    """Seconds after its workers started an error ends the job, however long the start took and whatever the script signals."""
    drive = _silent()
    for _ in range(lives):
        drive.wait(2)
        drive.exit("worker-1-0", 1, 1, error)
        drive.wait(60)
        if drive.members:
            _start(drive)
    assert drive.incident.rule.split(":")[0] == rule


def test_a_start_that_is_told_after_the_death_says_nothing() -> None:
    """Started and dead reach a new leader together, after hours without one: how long it lived is the time since its world."""
    drive = Drive(nproc=1, max_restarts=9)
    for name in ("worker-0-0", "worker-1-0"):
        drive.join(name)
    drive.wait(7200)
    _start(drive)
    drive.exit("worker-1-0", 1, 1, TYPO, age_us=60 * SECOND)
    assert drive.incident.action == "RESTART_PROCESSES"


def test_who_signals_steps_and_made_none_has_gained_nothing() -> None:
    """Where steps are signalled, a generation without one has made none, however long it lived."""
    drive = Drive(max_restarts=9).up()
    for _ in range(2):
        drive.exit("worker-1-0", 2, 1, BUG)
        assert drive.incident.action == "RESTART_PROCESSES"
        _start(drive)
        drive.wait(600)
    drive.exit("worker-1-0", 2, 1, BUG)
    assert drive.incident.rule.startswith("user.repeats")


def test_a_world_that_was_changed_may_have_made_steps() -> None:
    """A generation that ended by plan, after a time, counts like one that broke: the next error is not the first thing."""
    drive = _silent()
    drive.wait(600)
    drive.do(job.SuspendJob(""))
    drive.do(job.ResumeJob(""))
    for name in sorted(drive.state.nodes.nodes):
        drive.offer(name)
    drive.wait(60)
    assert (drive.world.generation, len(drive.members)) == (2, 2)
    _start(drive)
    drive.exit("worker-0-0", 0, 1, TYPO)
    assert drive.incident.action == "RESTART_PROCESSES"


# ---- progress


def _cycle(drive: Drive, step: int, **more: Any) -> None:
    """Made steps again up to ``step``, and broken by something that uses no restarts."""
    current = drive.world
    drive.do(progress.ReportFirstStep(current.members[0].node, current.generation, 51, told=True))
    for member in current.members:
        drive.offer(member.node)
    drive.exit("worker-1-0", 2, 1, "OSError: [Errno 98] Address already in use", step=step, **more)


def test_three_cycles_without_progress_end_the_job() -> None:
    """Three cycles in a row that reach no new step end it, for that reason; a new step begins the count anew."""
    drive = Drive()
    for name in ("worker-0-0", "worker-1-0"):
        drive.join(name)
    for step in (60, 58, 59, 70, 70, 55):
        _cycle(drive, step)
        assert drive.incident.action == "RESTART_PROCESSES", step
    _cycle(drive, 60)
    assert drive.incident.rule == f"{ladder.NO_PROGRESS}: 3 cycles in a row have reached no new step"
    drive.wait(drive.spec.evidence_s)
    assert drive.state.job.state == "failed"
    order = desired(drive.state).orders["worker-0-0"]
    assert order.leave
    assert ladder.NO_PROGRESS in order.reason


def test_kills_are_no_lack_of_progress() -> None:
    """Kills in a row, resumed from the same step each time, end nothing; nor do they once it is known who did it."""
    drive = Drive(max_restarts=3)
    for name in ("worker-0-0", "worker-1-0"):
        drive.join(name)
    _cycle(drive, 60)
    for code in (-9, -15, -9):
        drive.do(progress.ReportFirstStep(drive.members[0], drive.world.generation, 51, told=True))
        for member in drive.world.members:
            drive.offer(member.node)
        drive.exit("worker-1-0", 2, code, step=58)
        assert (drive.incident.verdict, drive.state.incidents.of("worker").stale) == ("PLAT", 0)
    # The cycle counts once another verdict takes the place of this one, and is not counted once it is taken back.
    drive.exit("worker-0-0", 0, 1, BUG, generation=drive.incident.generation)
    assert (drive.incident.verdict, drive.state.incidents.of("worker").stale) == ("USER", 1)


def test_unknown_steps_are_no_lack_of_progress() -> None:
    """A script that does not tell its steps is restarted as often as its budgets say."""
    drive = Drive(max_restarts=9).up()
    for step in range(6):
        drive.exit("worker-1-0", 2 + step % 2, 1, "OSError: [Errno 98] Address already in use")
        assert drive.incident.action == "RESTART_PROCESSES"
        drive.run(1)
