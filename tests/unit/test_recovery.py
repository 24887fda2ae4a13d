"""From evidence to action in the engine: what joins an incident, who pays, what is escalated, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
from drive import SECOND, Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.diagnosis.policy import Policy
from dlrover_core.job import evidence, hosts, incidents, job, nodes, progress, world
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import Accepted, Engine
from dlrover_core.rules import choose_action
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL, model
from dlrover_core.spec import GroupSpec, JobSpec

BUG = "Traceback (most recent call last):\n  File \"/job/train.py\", line 31, in load\n    raise KeyError(name)\nKeyError: 'x'"
TYPO = "Traceback (most recent call last):\n  File \"/job/train.py\", line 3, in <module>\nModuleNotFoundError: No module 'm'"
STORAGE = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in load\nConnectionError: s3 is away'


def see(drive: Drive, node: str, signature: str, source: str = "kernel", *, age_s: float = 0, rank: int = -1) -> None:
    """The node's agent sees a sign of something."""
    drive.do(
        evidence.ReportEvidence(node, source, signature, f"sign of {signature}", rank, age_us=round(age_s * SECOND))
    )


def newest(drive: Drive, cls: type) -> Any:
    """The newest event of a kind."""
    return drive.facts(cls)[-1]


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


# ---- pauses, memory


def test_a_pause_longer_than_the_last_call_is_waited_for() -> None:
    """Nothing is due before the pause is over: a leader neither spins nor is late."""
    drive = Drive(nodes_max=1, nproc=1, policy=Policy(retry_pause_s=100.0).to_json()).up()
    drive.exit("worker-0-0", 0, 1, STORAGE)
    drive.offer("worker-0-0")
    assert (drive.members, MODEL.due(drive.state)) == ([], drive.now + 100 * SECOND)
    drive.wait(100)
    assert drive.members == ["worker-0-0"]


def test_what_passes_by_itself_waits_longer_each_time() -> None:
    """Storage is away: the world forms again after a second, then two; a step ends the count."""
    drive = Drive(nodes_max=1, nproc=1).up()
    for pause_s in (1, 2):
        drive.now += 60 * SECOND
        drive.exit("worker-0-0", 0, 1, STORAGE)
        assert (drive.incident.action, drive.members) == ("RETRY", [])
        drive.offer("worker-0-0")
        drive.wait(pause_s - 0.1)
        assert drive.members == []
        drive.wait(0.2)
        assert drive.members == ["worker-0-0"]
    assert drive.state.incidents.restarts == 0
    drive.run(5)
    drive.exit("worker-0-0", 0, 1, STORAGE)
    assert newest(drive, incidents.ActionChosen).pause_us == SECOND


def test_more_memory_for_a_group_that_ran_out_of_it() -> None:
    """Its next nodes ask for a fifth more, and so does every node of the group from then on."""
    drive = Drive(nodes_max=2, nproc=1)
    spec = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=1, memory_mib=10_000, cpu_m=1500, gpus=8),))
    drive.do(job.CreateJob("run-2", spec.to_json()))
    assert {one.memory_mib for one in desired(drive.state).launch} == {10_000}
    assert {(one.cpu_m, one.gpus) for one in desired(drive.state).launch} == {(1500, 8)}
    names = sorted(drive.state.nodes.nodes)
    for name in names:
        drive.observe(name, "running")
        drive.join(name)
    drive.run(1)
    drive.observe(names[1], "failed", 137, "OOMKilled")
    assert newest(drive, incidents.ActionChosen)[1:] == (
        "RELAUNCH_MORE_MEMORY", names[1], "memory.more: 10000 MiB did not suffice, 12000 may", 2, "relaunches", 3, "", 12_000, 0
    )  # fmt: skip
    assert [one.memory_mib for one in desired(drive.state).launch] == [12_000]


# ---- the policy and its hook


class Veto:
    """Never isolates a host, and breaks where it is asked about a node's end."""

    def __init__(self) -> None:
        self.asked = 0

    def choose(self, judgement: Case, choice: Choice, context: Context) -> Choice | None:
        """As the port says."""
        self.asked += 1
        if not context.alive:
            raise LookupError("no idea")
        return Choice(ladder.RESTART_PROCESSES, "not on my watch", 0) if choice.action == ladder.ISOLATE_HOST else None


def _hooked(hook: Any, **settings: Any) -> Drive:
    drive = Drive(nodes_max=3, nproc=1, **settings)
    drive.engine = Engine(model(hook), CODEC, drive.state, token=1)
    return drive.up()


def test_a_hook_may_choose_another_rung() -> None:
    """Its choice and what it replaces are in the log, on the budget that such an action draws on; reading asks nobody."""
    hook = Veto()
    drive = _hooked(hook)
    see(drive, "worker-1-0", "xid.fallen_off")
    drive.exit("worker-1-0", 1, -6)
    chosen = newest(drive, incidents.ActionChosen)
    assert (chosen.action, chosen.budget, chosen.budget_left) == ("RESTART_PROCESSES", "restarts", 2)
    assert chosen.rule.startswith("hook: not on my watch; instead of ISOLATE_HOST by host.isolate")
    asked = hook.asked
    folded = MODEL.fold(drive.records)
    assert (hook.asked, folded.incidents.restarts) == (asked, 1)


def test_a_hook_that_breaks_is_not_heard() -> None:
    """An exception of a user's code changes nothing but the rule, which says so."""
    drive = _hooked(Veto())
    drive.observe("worker-1-0", "gone")
    chosen = newest(drive, incidents.ActionChosen)
    assert chosen.action == "RELAUNCH_NODE"
    assert chosen.rule.endswith(f"{choose_action.UNHEARD}: LookupError: no idea")


@pytest.mark.parametrize(
    "answer",
    [
        "RESTART", Choice("EXPLODE", "x", 0), Choice(ladder.FAIL_JOB, "x", 0), Choice(ladder.RETRY, 7, 0),  # type: ignore[arg-type]
        Choice(ladder.RETRY, "x", 0, pause_us=None),  # type: ignore[arg-type]
        Choice(ladder.RETRY, "x", 0, pause_us=-1), Choice(ladder.RETRY, "x", 0, pause_us=600 * SECOND + 1),
        Choice(ladder.RETRY, "x", 0, pause_us=10**30), Choice(ladder.RETRY, "x", True), Choice(ladder.RETRY, "x", 0.5),  # type: ignore[arg-type]
        Choice(ladder.RELAUNCH_MORE_MEMORY, "x", 0, memory_mib=-5), Choice(ladder.RELAUNCH_MORE_MEMORY, "x", 0, memory_mib=7000),
        Choice(ladder.RELAUNCH_MORE_MEMORY, "x", 0, memory_mib=1_048_577),
        Choice(ladder.RELAUNCH_MORE_MEMORY, "x", 0, memory_mib=9000.0),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_hook_that_answers_nonsense_is_not_heard(answer: Any) -> None:
    """Only rungs that answer this failure, within what is left of budgets, are taken."""

    class Odd:
        def choose(self, judgement: Case, choice: Choice, context: Context) -> Any:
            return answer

    drive = _hooked(Odd())
    drive.state.incidents.memory["worker"] = 8000
    assert isinstance(drive.exit("worker-1-0", 1, -9), Accepted)
    chosen = newest(drive, incidents.ActionChosen)
    assert (chosen.action, choose_action.UNHEARD in chosen.rule) == ("RESTART_PROCESSES", True)


class Mute(Exception):
    """Cannot be said."""

    def __str__(self) -> str:
        """As an exception of a user's may."""
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [SystemExit(3), Mute(), ValueError("\ud800"), RecursionError()])
def test_whatever_a_hook_raises_the_death_is_answered(error: BaseException) -> None:
    """Even one that wants to leave the interpreter, or cannot be put into words."""

    class Leaves:
        def choose(self, judgement: Case, choice: Choice, context: Context) -> Choice | None:
            raise error

    drive = _hooked(Leaves())
    assert isinstance(drive.exit("worker-1-0", 1, -9), Accepted)
    assert choose_action.UNHEARD in newest(drive, incidents.ActionChosen).rule


def test_what_a_hook_says_is_fit_for_the_log() -> None:
    """Its rule is text that can be written, and numbers that its rung has no use for are left out."""

    class Odd:
        def choose(self, judgement: Case, choice: Choice, context: Context) -> Choice | None:
            return Choice(ladder.RELAUNCH_NODE, "\ud800 bad", 0, memory_mib=9000, pause_us=5)

    drive = _hooked(Odd())
    drive.state.incidents.memory["worker"] = 8000
    assert isinstance(drive.exit("worker-1-0", 1, -9), Accepted)
    chosen = newest(drive, incidents.ActionChosen)
    assert chosen.rule.startswith("hook: ? bad; instead of")
    assert (chosen.action, chosen.memory_mib, chosen.pause_us) == ("RELAUNCH_NODE", 9000, 0)


@pytest.mark.parametrize("action", [ladder.RETRY, ladder.RELAUNCH_NODE, ladder.ISOLATE_HOST, ladder.GO_ON_SMALLER])
def test_a_hook_grants_no_restarts(action: str) -> None:
    """``--max-restarts 0`` holds for hooks, too: on a node that lives nothing is started again."""

    class Generous:
        def choose(self, judgement: Case, choice: Choice, context: Context) -> Choice | None:
            return Choice(action, "once more", 0)

    drive = _hooked(Generous(), nodes_min=2, max_restarts=0)
    drive.exit("worker-1-0", 1, -9)
    chosen = newest(drive, incidents.ActionChosen)
    assert (chosen.action, choose_action.UNHEARD in chosen.rule) == ("AWAIT_EVIDENCE", True)


def test_the_jobs_own_policy_counts() -> None:
    """Numbers of the policy in the spec are the ladder's."""
    drive = Drive(max_restarts=9, policy=Policy(user_repeats=0).to_json()).up()
    for _ in range(4):
        drive.exit("worker-1-0", 2, 1, BUG, step=60)
        assert drive.incident.action == "RESTART_PROCESSES"
        drive.run(51)


def test_what_another_policy_would_have_chosen() -> None:
    """The same state under another policy: a question, which changes nothing."""
    drive = Drive(max_restarts=9).up()
    drive.exit("worker-1-0", 2, 1, BUG, step=60)
    drive.run(51)
    drive.exit("worker-1-0", 2, 1, BUG, step=60)
    digest = drive.engine.digest()
    assert drive.incident.action == "AWAIT_EVIDENCE"
    other = choose_action.choice_of(drive.state, drive.incident, drive.incident.node, by=Policy(user_repeats=5))
    assert other.action == "RESTART_PROCESSES"
    assert drive.engine.digest() == digest


def test_a_charge_that_a_later_verdict_cannot_pay_stops_the_job() -> None:
    """A restart on the system's account turns out to be the program's, which has none left: it ends as --max-restarts says."""
    drive = Drive(max_restarts=1, nproc=1, nodes_max=3).up()
    drive.exit("worker-1-0", 1, 1, BUG, step=5)
    drive.run(2)
    drive.exit("worker-1-0", 1, 1, "OSError: [Errno 98] Address already in use")
    assert (drive.incident.action, drive.state.incidents.restarts) == ("RESTART_PROCESSES", 1)
    for rank in (0, 2):
        known = {"signature": "exception.KeyError", "place": "KeyError at a.py:9"}
        drive.exit(f"worker-{rank}-0", rank, 1, "KeyError: 1", generation=2, **known)
    assert drive.incident.signature == "exception.KeyError"
    assert (drive.incident.end_pending, drive.state.incidents.restarts) == (True, 1)


def test_restarts_on_the_systems_account_come_back_after_an_hour() -> None:
    """The system's failures have ten restarts an hour; when they are used up the job's own pay, until the hour is over."""
    drive = Drive(max_restarts=9, nproc=1).up()
    begin, paid = drive.now, []
    for at_s in (*range(0, 600, 60), 600, 3590, 3600):
        drive.wait(at_s - (drive.now - begin) / SECOND)
        drive.exit("worker-1-0", 1, 1, "OSError: [Errno 98] Address already in use")
        paid.append(newest(drive, incidents.ActionChosen).budget)
        drive.wait(10)
        drive.run(1 + len(paid))
    assert paid == [*("software",) * 10, "restarts", "restarts", "software"]
