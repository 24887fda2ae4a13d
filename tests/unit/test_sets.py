"""Coupling sets: a change in one restarts nobody in another, the job ends with those it waits for, and goes on without others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drive import SECOND, Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.history.render import report as rendered
from dlrover_core.history.render import status as shown
from dlrover_core.history.report import report_of
from dlrover_core.history.status import status_of
from dlrover_core.job import checks, incidents, job, nodes, operations, progress, world
from dlrover_core.job.sets import Sets, sets_of
from dlrover_core.kernel.engine import NotDone
from dlrover_core.rules import coupling, layout
from dlrover_core.rules.desired import desired
from dlrover_core.rules.reasons import reasons
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.steps import Steps
from dlrover_core.spec import GroupSpec, JobSpec

ERROR = "Traceback (most recent call last):\nValueError: bad batch"
STORAGE = "ConnectionError: s3 is away"
TRAINER = GroupSpec("trainer", 2, 2, uses=("rollout",))
ROLLOUT = GroupSpec("rollout", 2, 3, coupling="each", ends=False, uses=("trainer",))
EVALUATOR = GroupSpec("evaluator", ends=False, critical=False, max_restarts=1, store=False)
CHIEF, WORKER = GroupSpec("chief", set="train"), GroupSpec("worker", 1, 2, set="train")


class Several(Drive):
    """A job of several groups, each node of which runs one worker."""

    def up(self, first_step: int = 1) -> Several:
        """All nodes join, all worlds start; those of ``trainer`` and ``train`` make a step."""
        for node in list(self.state.nodes.nodes):
            self.observe(node, "running")
            self.join(node)
        for name in list(self.state.world.worlds):
            self.begin(name, first_step if name in ("trainer", "train") else 0)
        return self

    def begin(self, name: str, step: int = 0) -> None:
        """The newest world of a set starts, and makes a step if one is given."""
        current = self.state.world.worlds[name]
        for member in current.members:
            self.do(world.ReportStarted(member.node, current.generation))
            self.offer(member.node)
        if step:
            self.do(progress.ReportFirstStep(current.members[0].node, current.generation, step, told=True))

    def dies(self, node: str, error: str = ERROR, step: int = 7) -> None:
        """The worker of a node fails."""
        current = self.state.world.of(node)
        member = current.member(node)
        assert member is not None
        self.do(incidents.ReportExit(node, current.generation, member.first_rank, 1, step=step, error=error))

    def ends(self, name: str) -> None:
        """All workers of a set end well."""
        current = self.state.world.worlds[name]
        for member in current.members:
            self.do(world.ReportFinished(member.node, current.generation))

    @property
    def generations(self) -> dict[str, int]:
        """The newest generation of every set."""
        return {name: one.generation for name, one in self.state.world.worlds.items()}


def several(*groups: GroupSpec, **settings: Any) -> Several:
    """Such a job, up."""
    return Several(groups=groups or (TRAINER, ROLLOUT, EVALUATOR), **settings).up()


def test_every_set_has_its_own_world() -> None:
    """A group is a set, a node of a group of single ones is one, and each has a world of its own."""
    drive = several()
    assert drive.generations == {"trainer": 1, "rollout-0": 1, "rollout-1": 1, "rollout-2": 1, "evaluator": 1}
    assert [one.size for one in drive.state.world.worlds.values()] == [2, 1, 1, 1, 1]
    assert {drive.state.set_of("rollout-2-5"), drive.state.set_of("trainer-1-0")} == {"rollout-2", "trainer"}
    orders = desired(drive.state).orders
    assert {node: (order.work.world_size, bool(order.work.store)) for node, order in orders.items()} == {
        **dict.fromkeys(("trainer-0-0", "trainer-1-0"), (2, True)),
        **dict.fromkeys(("rollout-0-0", "rollout-1-0", "rollout-2-0"), (1, True)),
        "evaluator-0-0": (1, False),
    }


def test_a_worker_that_trains_alone_comes_back_alone() -> None:
    """A rollout dies: it alone is started again; nobody else hears of it."""
    drive = several()
    before = {node: order for node, order in desired(drive.state).orders.items() if node != "rollout-1-0"}
    drive.dies("rollout-1-0")
    assert drive.generations == {"trainer": 1, "rollout-0": 1, "rollout-1": 2, "rollout-2": 1, "evaluator": 1}
    after = desired(drive.state).orders
    assert {node: after[node] for node in before} == before
    drive.begin("rollout-1")
    assert drive.incident.state == "acting", "trainers use it: it is mended by their next step"


def test_a_node_that_trains_alone_is_replaced_alone() -> None:
    """A rollout's node dies: its successor forms a world of one, and generations of its place go on counting."""
    drive = several()
    drive.observe("rollout-1-0", "failed", -9, "preempted")
    drive.observe("rollout-1-0", "gone")
    assert drive.generations["trainer"] == 1
    drive.observe("rollout-1-1", "running")
    drive.join("rollout-1-1")
    assert drive.generations == {"trainer": 1, "rollout-0": 1, "rollout-1": 2, "rollout-2": 1, "evaluator": 1}


def test_trainers_restart_and_nobody_else() -> None:
    """A trainer dies: both trainers begin anew, rollouts and the evaluator go on."""
    drive = several()
    drive.dies("trainer-1-0")
    assert drive.generations == {"trainer": 2, "rollout-0": 1, "rollout-1": 1, "rollout-2": 1, "evaluator": 1}


def test_budgets_are_each_sets_own() -> None:
    """What one set has used of its restarts, or of the system's, no other has."""
    drive = several(max_restarts=2)
    for _ in range(2):
        drive.dies("rollout-0-0")
        drive.begin("rollout-0")
    assert drive.state.incidents.charged("rollout-0").restarts == 2
    assert (drive.state.incidents.restarts, drive.state.incidents.charged("trainer").restarts) == (2, 0)
    drive.dies("trainer-0-0")
    assert drive.incident.action == ladder.RESTART_PROCESSES
    drive.dies("rollout-1-0", error=STORAGE)
    slice_, now = drive.state.incidents, drive.state.at
    assert [slice_.software_used(name, now) for name in ("rollout-1", "rollout-0", "trainer")] == [1, 0, 0]
    assert dict(status_of(drive.state).restarts_left_of) == {"rollout-0": 0, "trainer": 1}


def test_failures_to_be_expected_are_each_sets_own() -> None:
    """A rollout that fails all the time does not make the trainers save more often."""
    drive = several()
    for _ in range(3):
        drive.wait(100)
        drive.dies("rollout-0-0", error="CUDA error: an illegal memory access was encountered")
        drive.begin("rollout-0")
    assert (drive.state.checkpoints.mtbf("rollout-0"), drive.state.checkpoints.mtbf("trainer")) == (100, 0)


def test_what_a_critical_set_cannot_do_fails_the_job() -> None:
    """A trainer that fails once too often ends the job, whatever the others have left."""
    drive = several(replace(TRAINER, max_restarts=0), ROLLOUT)
    drive.dies("trainer-0-0")
    for node in ("trainer-0-0", "trainer-1-0"):
        drive.do(world.ReportStopped(node, 1, 7))
    assert drive.state.job.state == "failed"


def test_what_is_not_critical_is_given_up() -> None:
    """The evaluator fails for good: that is a fact, its node is let go by plan, and the job succeeds when the trainers have."""
    drive = several()
    for _ in range(2):
        drive.dies("evaluator-0-0")
        if drive.state.world.worlds["evaluator"].active:
            drive.begin("evaluator")
    drive.do(world.ReportStopped("evaluator-0-0", 2, 7))
    (fact,) = drive.facts(job.SetGivenUp)
    assert (fact.set, fact.incident) == ("evaluator", 2)
    assert "ValueError: bad batch" in fact.root
    assert drive.state.job.state == "running"
    assert drive.state.nodes.nodes["evaluator-0-0"].released == nodes.SET_GIVEN_UP
    assert desired(drive.state).orders["evaluator-0-0"].grace_us == 30 * SECOND
    assert not any(one.node.startswith("evaluator") for one in desired(drive.state).launch)
    drive.say(nodes.ReportLeft("evaluator-0-0"))
    drive.observe("evaluator-0-0", "gone")
    drive.wait(3_600)
    assert not [one for one in drive.facts(nodes.NodePlanned) if one.node == "evaluator-0-1"]
    assert reasons(drive.state) == ()
    assert "evaluator is given up, the job goes on without it" in shown(status_of(drive.state))
    drive.ends("trainer")
    assert drive.state.job.state == "succeeded"
    assert "given up, the job went on without" in rendered(report_of(drive.records))


def test_a_place_that_was_given_up_leaves_the_others() -> None:
    """A rollout whose node cannot be had any more is done without, as long as enough are left; then the job fails."""
    drive = several(TRAINER, replace(ROLLOUT, relaunch_max=0))
    drive.observe("rollout-2-0", "failed", 1, "hardware: fell off the bus")
    drive.observe("rollout-2-0", "gone")
    assert (drive.incident.action, drive.state.job.state) == (ladder.GO_ON_SMALLER, "running")
    assert list(coupling.sets(drive.state)) == ["trainer", "rollout-0", "rollout-1"]
    drive.observe("rollout-1-0", "failed", 1, "hardware: fell off the bus")
    drive.observe("rollout-1-0", "gone")
    drive.wait(300)
    assert drive.state.job.state == "failed"


def test_the_job_ends_with_those_it_waits_for() -> None:
    """Trainers have finished: rollouts and evaluator are told to leave, with the grace of a planned stop."""
    drive = several()
    drive.ends("trainer")
    assert drive.state.job.state == "succeeded"
    orders = desired(drive.state).orders
    assert {(order.leave, order.outcome, order.grace_us) for order in orders.values()} == {
        (True, "succeeded", 30 * SECOND)
    }


def test_the_job_waits_for_every_set_that_ends_it() -> None:
    """Several groups may end the job, and of single nodes all must: in any order."""
    drive = several(TRAINER, replace(ROLLOUT, ends=True))
    drive.ends("rollout-1")
    drive.ends("trainer")
    drive.ends("rollout-2")
    assert drive.state.job.state == "running"
    drive.ends("rollout-0")
    assert drive.state.job.state == "succeeded"


def test_groups_of_one_set_train_together() -> None:
    """Chief and workers are one world, the chief first; the floor is each group's own, and one's death restarts all."""
    drive = Several(groups=(CHIEF, WORKER), last_call_s=30.0)
    drive.join("worker-0-0")
    drive.join("worker-1-0")
    (wait,) = reasons(drive.state)
    assert (wait.group, wait.words.split(";")[0]) == ("train", "0 of at least 1 node of chief are there")
    drive.join("chief-0-0")
    formed = drive.state.world.worlds["train"]
    assert [(one.node, one.first_rank) for one in formed.members] == [
        ("chief-0-0", 0),
        ("worker-0-0", 1),
        ("worker-1-0", 2),
    ]
    (fact,) = drive.facts(world.WorldFormed)
    assert (fact.group, fact.members) == ("train", (("chief", 0, 1, 0, 1), ("worker", 0, 2, 0, 1)))
    drive.begin("train", 1)
    drive.dies("worker-1-0")
    assert drive.generations == {"train": 2}
    drive.ends("train")
    assert drive.state.job.state == "succeeded"


def test_a_joint_set_may_be_smaller_than_all_its_groups() -> None:
    """One of two workers has not come by the last call: the chief and the other begin; the late one is taken in, ranks last."""
    drive = Several(groups=(CHIEF, WORKER), last_call_s=30.0)
    for node in ("chief-0-0", "worker-1-0"):
        drive.observe(node, "running")
        drive.join(node)
    assert drive.generations == {"train": 0}
    drive.wait(30)
    assert [one.node for one in drive.state.world.worlds["train"].members] == ["chief-0-0", "worker-1-0"]
    drive.begin("train", 1)
    drive.join("worker-0-0")
    drive.wait(60)
    members = [one.node for one in drive.state.world.worlds["train"].members]
    assert members[0] == "chief-0-0"
    assert sorted(members[1:]) == ["worker-0-0", "worker-1-0"]


def test_layout_goes_group_by_group() -> None:
    """Survivors of each group stay where they are in their group, whatever happens to the other."""
    ready = [
        nodes.Node(f"{group}-{index}-0", group, index, 0, 0, nproc=1) for group in ("a", "b") for index in range(3)
    ]
    ordered = layout.by_group(["a-2-0", "a-1-0", "b-1-0"], ready, (("a", 2), ("b", 3)))
    assert [node.node for node in ordered] == ["a-2-0", "a-1-0", "b-1-0", "b-0-0", "b-2-0"]


def test_a_set_without_stores_forms_without_one() -> None:
    """Nobody waits for a store that nobody needs."""
    drive = Several(groups=(GroupSpec("ps", 2, 2, store=False),))
    for node in ("ps-0-0", "ps-1-0"):
        drive.do(nodes.ReportJoined(node, node, node, 1))
    formed = drive.state.world.worlds["ps"]
    assert (formed.active, formed.store, list(drive.state.world.check())) == (True, "", [])


def test_a_set_without_steps_is_mended_by_who_uses_it() -> None:
    """The leader hears by the trainers' beats that they made a step since the parameter server ran again."""
    ps = GroupSpec("ps", 1, 2, coupling="each", ends=False, store=False)
    drive = several(replace(TRAINER, uses=("ps",)), ps)
    drive.dies("ps-1-0", step=-1)
    steps = Steps()

    def beat(step: int) -> list[object]:
        steps.heard(drive.state, "trainer-0-0", Beat(1, step, 0))
        found = list(steps.findings(drive.state, drive.now))
        for command in found:
            drive.do(command)
        return found

    assert beat(5) == []
    drive.begin("ps-1")
    assert beat(6) == []
    assert not drive.incident.closed
    assert beat(6) == []
    drive.now += SECOND
    assert beat(7) == [incidents.NoteUsed("ps-1", 2)]
    assert drive.incident.closed
    assert drive.facts(incidents.IncidentClosed)[-1].down_us == SECOND
    assert beat(8) == []


def test_a_set_without_steps_that_nobody_uses_is_mended_once_it_runs() -> None:
    """The evaluator makes no steps, and nobody waits for it: it is well when its workers have started."""
    drive = several()
    drive.dies("evaluator-0-0", step=-1)
    assert not drive.incident.closed
    drive.begin("evaluator")
    drive.wait(0)
    assert drive.incident.closed


def test_policy_follows_the_set() -> None:
    """Checks, hangs, laggards and joining by restart are each group's own where it says so."""
    late = GroupSpec("late", 1, 2, on_join="never", finish_s=5.0)
    drive = Several(groups=(GroupSpec("checked", precheck="basic"), late), last_call_s=0.0, finish_s=0.0)
    drive.join("checked-0-0")
    assert list(drive.state.checks.running) == ["checked"]
    drive.join("late-0-0")
    drive.wait(1)
    assert drive.generations == {"checked": 0, "late": 1}
    drive.do(checks.ReportCheck("checked-0-0", 1, 1, True))
    assert drive.generations["checked"] == 1
    drive.begin("late", 1)
    drive.join("late-1-0")
    drive.wait(600)
    assert drive.generations["late"] == 1


def test_a_joint_set_is_checked_together() -> None:
    """Nodes of both groups are checked, in pairs too, before their world forms, and told by their own groups' names."""
    drive = Several(groups=(CHIEF, WORKER), precheck="full")
    for node in ("chief-0-0", "worker-0-0", "worker-1-0"):
        drive.join(node)
    check = drive.state.checks.running["train"]
    assert check.members == ("chief-0-0", "worker-0-0", "worker-1-0")
    for name in check.members:
        drive.do(checks.ReportCheck(name, 1, 1, True, took_us=1, alone_us=1))
    assert drive.state.world.worlds["train"].active
    (judged,) = drive.facts(checks.CheckJudged)
    assert judged.passed == (("chief", 0, 1, 0, 1), ("worker", 0, 2, 0, 1))


def test_scaling_a_group_of_single_nodes() -> None:
    """More of them come, or the last ones go, with grace; nobody else is touched."""
    drive = several()
    drive.do(operations.ScaleGroup("rollout", 1, 4, "more"))
    drive.observe("rollout-3-0", "running")
    drive.join("rollout-3-0")
    assert drive.generations["rollout-3"] == 1
    drive.do(operations.ScaleGroup("rollout", 1, 1, "fewer"))
    active = {name for name, one in drive.state.world.worlds.items() if one.active}
    assert active == {"trainer", "rollout-0", "evaluator"}
    assert drive.generations["trainer"] == 1


def test_scaling_needs_a_name_where_there_are_several() -> None:
    """Of one group the name may be left out."""
    drive = several()
    reply = drive.do(operations.ScaleGroup("", 1, 4, "more"))
    assert isinstance(reply, NotDone)
    assert reply.reason == "which group is to be scaled? There are: trainer, rollout, evaluator"
    lone = Drive(nodes_max=1, nproc=1)
    lone.do(operations.ScaleGroup("", 1, 2, "more"))
    assert lone.state.job.sizes == {"worker": (1, 2)}


def test_draining_a_node_that_trains_alone() -> None:
    """Its successor is planned, and no other world is changed."""
    drive = several()
    drive.do(operations.DrainNode("rollout-1", "maintenance"))
    assert drive.generations == {"trainer": 1, "rollout-0": 1, "rollout-1": 1, "rollout-2": 1, "evaluator": 1}
    assert "rollout-1-1" in drive.state.nodes.nodes


def test_suspending_stops_all_sets_and_resuming_starts_them() -> None:
    """A person's word is about the whole job."""
    drive = several()
    drive.do(job.SuspendJob("lunch"))
    assert not any(one.active for one in drive.state.world.worlds.values())
    drive.do(job.ResumeJob("back"))
    assert set(drive.generations.values()) == {2}
    assert all(one.active for one in drive.state.world.worlds.values())


def test_a_take_over_keeps_every_set() -> None:
    """Folded again, or from a snapshot, the sets and what was charged to each are the same."""
    drive = Several(numbered=True, groups=(TRAINER, ROLLOUT, EVALUATOR)).up()
    drive.dies("rollout-1-0")
    before = (drive.generations, drive.state.incidents.by_set)
    again = drive.fork().state
    assert ({name: one.generation for name, one in again.world.worlds.items()}, again.incidents.by_set) == before
    drive.take_over()
    assert (drive.generations, drive.state.incidents.by_set) == before
    assert drive.state.set_of("rollout-1-3") == "rollout-1"


def test_sets_by_name() -> None:
    """Groups and places of each set; a job without groups that share anything needs none of it."""
    spec = JobSpec("j", (CHIEF, GroupSpec("ps"), WORKER, replace(ROLLOUT, uses=("ps",))))
    sets = sets_of(spec.to_json())
    assert list(sets.all(spec)) == ["train", "ps", "rollout-0", "rollout-1", "rollout-2"]
    assert [sets.groups(name) for name in ("train", "ps", "rollout-1")] == [("chief", "worker"), ("ps",), ("rollout",)]
    assert [sets.place(name) for name in ("train", "ps", "rollout-12")] == [-1, -1, 12]
    assert (sets.several, Sets(JobSpec("j").groups).several) == (True, False)
    assert (sets.ends("rollout-0"), sets.ends("train")) == (False, True)
