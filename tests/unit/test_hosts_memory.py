"""Hosts: what counts against one, when it is kept off, how it comes back, and what is never done to it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.drive import BEGIN, SECOND, Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.history import hosts_of, render_hosts
from dlrover_core.job import hosts, incidents, job, nodes, progress, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.kernel.events import Record, kind_of
from dlrover_core.rules import hosts as hosts_rules
from dlrover_core.rules.desired import desired
from dlrover_core.spec import us

HOUR = 3600.0
DAY = 24 * HOUR


class Life:
    """A job of so many nodes, one per host (``h0``, ``h1`` ...); verdicts are put into its history as they are."""

    def __init__(self, count: int, *, racks: int = 0, joining: bool = False) -> None:
        self.drive = Drive(nodes_max=count, nproc=1, joining=joining)
        self.state: JobState = self.drive.state
        self.at = BEGIN
        self.incident = 0
        self.made: list[Any] = []
        for index in range(count):
            rack = f"r{index // racks}" if racks else ""
            self.add(nodes.NodeRunning(f"worker-{index}-0", f"h{index}", rack))
            self.add(nodes.NodeJoined(f"worker-{index}-0", f"h{index}", f"h{index}", 1))

    def add(self, fact: Any, cause: int = 0) -> None:
        """Let it happen, and what the concern makes of it."""
        self._apply(fact, cause)
        reacts, cause = hosts_rules.RULES.react.get(type(fact)), self.state.seq
        for follow in reacts(self.state, fact, Record(cause, self.at, 1, 0, fact)) if reacts else ():
            self.made.append(follow)
            self._apply(follow, cause)

    def _apply(self, fact: Any, cause: int = 0) -> None:
        record = Record(self.state.seq + 1, self.at, 1, cause, fact)
        self.state.seq, self.state.at = record.seq, self.at
        if type(fact) in hosts.FACTS.evolve:
            hosts.FACTS.evolve[type(fact)](self.state.hosts, fact, record)

    def later(self, seconds: float) -> None:
        """Time passes."""
        self.at += us(seconds)
        self.state.at = self.at

    def strike(self, index: int, signature: str = "node.gone", verdict: str = "PLAT", **more: Any) -> int:
        """An incident of this node gets this verdict; its number."""
        self.incident += 1
        node = more.pop("node", f"worker-{index}-0")
        self.add(incidents.IncidentOpened(self.incident, node, 1, (index,)))
        self.judge(signature, verdict, self.state.seq, **more)
        return self.incident

    def judge(self, signature: str, verdict: str, cause: int = 0, **more: Any) -> None:
        """The newest incident gets a verdict."""
        self.add(incidents.Diagnosed(self.incident, verdict, signature, (1,), 0.8, **more), cause)

    def serve(self, index: int) -> None:
        """The node's workers run for as long as proves a host, and the job makes steps."""
        self.add(world.WorkersStarted(f"worker-{index}-0", 1))
        self.later(hosts.SERVED_S)
        self.add(progress.Progressed("worker", 1, 100))

    @property
    def kept_off(self) -> list[str]:
        """The hosts in quarantine."""
        return self.state.hosts.quarantined(self.at)


@pytest.mark.parametrize(
    ("verdict", "signature", "against"),
    [
        ("HW", "cuda.ecc", True),
        ("HW", "xid.fallen_off", True),
        ("PLAT", "exit.sigkill", True),
        ("PLAT", "node.gone", True),
        ("SOFT", "check.failed", True),
        ("SOFT", "hang.rank", True),
        ("SOFT", "hang.global", False),
        ("USER", "exception.ValueError", False),
        ("USER", "cuda.assert", False),
        ("PLAT", "k8s.preempted", False),
        ("PLAT", "slurm.preempted", False),
        ("RES", "cgroup.oom", False),
        ("CASC", "gloo.peer", False),
        ("DATA", "data.connection", False),
        ("SOFT", "loss.nan_everywhere", False),
    ],
)
def test_what_counts(verdict: str, signature: str, *, against: bool) -> None:
    """Hardware, failed checks, hanging ranks and unexplained deaths count against a host; errors and pre-emptions never."""
    life = Life(4)
    life.strike(1, signature, verdict)
    assert hosts_rules.record(life.state, "h1").failures_24h == int(against)
    assert hosts_rules.record(life.state, "h0") == hosts.HostRecord()


@pytest.mark.parametrize(("reason", "strikes"), [(nodes.DELETED, 0), ("Deleted; node h1 is not Ready", 1), ("", 1)])
def test_a_node_that_a_person_deleted_is_no_strike(reason: str, strikes: int) -> None:
    """A person who deletes a pod gives no evidence against its host; a host that is not well, or no word at all, does."""
    life = Life(4)
    life.add(nodes.NodeGone("worker-1-0", reason, expected=False))
    life.strike(1)
    assert hosts_rules.record(life.state, "h1").failures_24h == strikes


def test_strikes_are_of_one_day() -> None:
    """Failures are counted by class for 24 hours, and forgotten afterwards."""
    life = Life(8)
    life.strike(1)
    life.later(23 * HOUR)
    life.strike(1, "cuda.ecc", "HW")
    assert hosts_rules.record(life.state, "h1").by_class == (("HW", 1), ("PLAT", 1))
    life.later(2 * HOUR)
    assert hosts_rules.record(life.state, "h1").by_class == (("HW", 1),)


def test_a_lemon_is_left() -> None:
    """A host on which nodes die three times in a day, and nowhere else, is kept off though no verdict blamed it."""
    life = Life(4)
    life.strike(1)
    life.strike(1, "exit.sigsegv", "SOFT")
    assert life.kept_off == []
    number = life.strike(1)
    assert life.kept_off == ["h1"]
    assert hosts_rules.leave(life.state, "worker-1-0", number).startswith("host.quarantine: h1 ")
    assert hosts_rules.leave(life.state, "worker-0-0", number) == ""
    assert hosts_rules.record(life.state, "h1").quarantined_until == life.at + us(DAY)


def test_kills_by_hand_make_no_lemon() -> None:
    """Who kills workers on one host again and again condemns it not; with a death of another kind the kills count, too."""
    life = Life(4)
    for _ in range(6):
        life.strike(1, "exit.sigkill")
    assert life.kept_off == []
    assert hosts_rules.record(life.state, "h1").failures_24h == 6
    life.strike(1, "exit.sigsegv", "SOFT")
    assert life.kept_off == ["h1"]


def test_nodes_that_are_killed_make_a_lemon() -> None:
    """A node that is killed is no worker that a person killed, whatever its exit code is called."""
    life = Life(4)
    for _ in range(3):
        life.strike(1, "exit.sigkill", blamed="worker-1-0")
    assert life.kept_off == ["h1"]


def test_kills_by_hand_leave_a_host_in_use() -> None:
    """The same rank killed three times in a day, through the whole engine: its processes are restarted each time."""
    drive = Drive(nodes_max=4, nproc=1, max_restarts=10).up()
    for step in (1000, 2000, 3000):
        drive.wait(6 * HOUR)
        drive.exit("worker-1-0", 1, -9, step=step)
        assert drive.incident.action == "RESTART_PROCESSES"
        drive.run(step + 1)
    assert drive.state.hosts.quarantined(drive.now) == []


def test_who_fails_everywhere_is_no_lemon() -> None:
    """Where other hosts fail as well it is the program or the fabric, and nobody is kept off."""
    life = Life(4)
    for _ in range(6):
        for index in range(4):
            life.strike(index)
    assert life.kept_off == []


def test_a_rank_that_fails_wherever_it_runs_condemns_no_second_host() -> None:
    """A place whose nodes die on one host after the other speaks for its ranks: after the first host no other is kept off."""
    life = Life(4)
    for _ in range(3):
        life.strike(1)
    life.add(nodes.NodeJoined("worker-1-1", "h9", "h9", 1))
    for _ in range(3):
        life.strike(1, node="worker-1-1")
    assert life.kept_off == ["h1"]


def test_one_host_is_never_a_lemon() -> None:
    """With a single host there is nothing to compare it with, and nowhere to go."""
    life = Life(1)
    for _ in range(9):
        life.strike(0)
    assert life.kept_off == []


def test_isolated_hosts_are_kept_off() -> None:
    """The ladder's choice to isolate a host puts it in quarantine, with the rule as its reason."""
    life = Life(4)
    number = life.strike(2, "cuda.ecc", "HW")
    life.add(incidents.ActionChosen(number, ladder.ISOLATE_HOST, "worker-2-0", "host.hardware", 1, host="h2"))
    assert life.kept_off == ["h2"]
    assert life.state.hosts.hosts["h2"].why == "incident 1: host.hardware"


def _quarantine(life: Life, index: int) -> int:
    number = life.strike(index, "cuda.ecc", "HW")
    life.add(incidents.ActionChosen(number, ladder.ISOLATE_HOST, f"worker-{index}-0", "rule", 1, host=f"h{index}"))
    return number


def test_probation() -> None:
    """After its quarantine a host is on probation: its first failure puts it back for twice as long, up to the bound."""
    life = Life(8)
    _quarantine(life, 1)
    lengths = []
    for _ in range(5):
        known = life.state.hosts.hosts["h1"]
        life.later((known.until - life.at) / SECOND + 60)
        assert hosts_rules.record(life.state, "h1").on_probation
        began = life.at
        life.strike(1)
        assert life.kept_off == ["h1"]
        lengths.append((life.state.hosts.hosts["h1"].until - began) / us(DAY))
    assert lengths == [2, 4, 7, 7, 7]


def test_probation_is_served() -> None:
    """A host whose node ran for an hour, with steps at its end, is on probation no longer: its next quarantine is a first one."""
    life = Life(8)
    _quarantine(life, 1)
    life.later(DAY)
    life.serve(1)
    assert not hosts_rules.record(life.state, "h1").on_probation
    life.strike(1)
    assert life.kept_off == []


def test_probation_is_not_served_by_others() -> None:
    """Steps that were made after its node had gone prove nothing about a host, nor do those of another host."""
    life = Life(8)
    _quarantine(life, 1)
    life.later(DAY)
    life.serve(2)
    assert hosts_rules.record(life.state, "h1").on_probation
    life.add(world.WorkersStarted("worker-1-0", 1))
    life.add(nodes.NodeReleased("worker-1-0", "replaced"))
    life.later(hosts.SERVED_S)
    life.add(progress.Progressed("worker", 1, 200))
    assert hosts_rules.record(life.state, "h1").on_probation


def test_old_sins_are_forgiven() -> None:
    """A week after its quarantine ended, a failure of a host that nobody used since begins at the shortest again."""
    life = Life(8)
    _quarantine(life, 1)
    life.later(DAY + hosts.FORGIVEN_S)
    _quarantine(life, 1)
    assert life.state.hosts.hosts["h1"].times == 1


def test_a_quarter_of_the_hosts_at_most() -> None:
    """No more than a quarter of the hosts seen is kept off: whose quarantine ends first gives way to the newest."""
    life = Life(8)
    for index in range(3):
        _quarantine(life, index)
        life.later(60)
    assert life.kept_off == ["h1", "h2"]
    assert [fact.how for fact in life.made if isinstance(fact, hosts.HostReleased)] == [hosts.GIVES_WAY]
    assert hosts_rules.record(life.state, "h0").on_probation


def test_the_only_host_of_a_joining_job() -> None:
    """Where hosts come by themselves the only one is not kept off: no other could be taken."""
    life = Life(1, joining=True)
    _quarantine(life, 0)
    assert life.kept_off == []


def test_revised_verdicts_take_their_quarantine_back() -> None:
    """An incident that turns out to be somebody else's doing frees the host that was kept off for it."""
    life = Life(4)
    _quarantine(life, 1)
    life.judge("k8s.preempted", "PLAT", revises=1, blamed="worker-1-0")
    assert life.kept_off == []
    assert hosts_rules.record(life.state, "h1") == hosts.HostRecord()
    assert life.made[-1].how == hosts.REVISED


def test_a_quarantine_for_another_reason_is_not_taken_back() -> None:
    """A host that was struck by an incident, and is kept off later for slowness, stays in quarantine when the verdict changes."""
    life = Life(4)
    life.strike(1)
    life.later(60)
    for fact in list(hosts_rules.keep_off(life.state, "h1", "rank 1 on worker-1-0 was slow", life.at)):
        life.add(fact)
    life.judge("k8s.preempted", "PLAT", revises=1, blamed="worker-1-0")
    assert life.kept_off == ["h1"]


def test_an_isolated_host_is_freed_though_the_verdict_was_revised_before() -> None:
    """The incident that a quarantine came from is known where its verdict was another first: its last one frees the host."""
    life = Life(4)
    number = life.strike(1)
    life.judge("cuda.ecc", "HW", revises=1, host="h1")
    life.add(incidents.ActionChosen(number, ladder.ISOLATE_HOST, "worker-1-0", "hardware", 0, host="h1"))
    assert life.kept_off == ["h1"]
    life.judge("k8s.preempted", "PLAT", revises=1, blamed="worker-1-0")
    assert life.kept_off == []


def test_revised_verdicts_move_the_strike() -> None:
    """A verdict that blames another host takes its strike along."""
    life = Life(4)
    life.strike(1)
    life.judge("cuda.ecc", "HW", revises=1, host="h3")
    assert hosts_rules.record(life.state, "h1").failures_24h == 0
    assert hosts_rules.record(life.state, "h3").failures_24h == 1


def test_what_is_remembered_is_bounded() -> None:
    """Strikes per host and hosts have bounds; those in quarantine are forgotten last."""
    life = Life(8)
    for _ in range(40):
        life.strike(0)
    assert len(life.state.hosts.hosts["h0"].strikes) == hosts.STRIKES_MAX
    _quarantine(life, 1)
    for number in range(2 * hosts.HOSTS_MAX):
        life.judge("cuda.ecc", "HW", host=f"x{number}")
    assert len(life.state.hosts.hosts) == hosts.HOSTS_MAX
    assert "h1" in life.state.hosts.hosts


# ---- in the whole engine


def _failed_check(drive: Drive, node: str) -> None:
    drive.observe(node, "failed", 1, "check_failed: memory")


def test_planned_nodes_keep_off_too() -> None:
    """A node that was planned before a host went into quarantine, and is not launched yet, keeps off it all the same."""
    drive = Drive(nodes_max=3, relaunch_max=9).up()
    drive.observe("worker-0-0", "failed", 1)
    (launch,) = desired(drive.state).launch
    assert launch.avoid == ()
    assert isinstance(drive.do(hosts.QuarantineHost("bad", 600, "smells")), Accepted)
    (launch,) = desired(drive.state).launch
    assert launch.avoid == ("bad",)
    drive.wait(600)
    drive.do(hosts.QuarantineHost("worse", 600, "smells too"))
    (launch,) = desired(drive.state).launch
    assert launch.avoid == ("worse",)


def test_survives_masters_and_runs() -> None:
    """What is known of hosts is the same after a fail-over and from a snapshot, and a new run on the same log knows it."""
    drive = Drive(numbered=True, nodes_max=8, nproc=1, relaunch_max=9).up()
    _failed_check(drive, "worker-1-0")
    before = drive.state.hosts.hosts
    assert drive.fork().state.hosts.hosts == before
    drive.take_over()
    assert drive.state.hosts.hosts == before
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.hosts.hosts == before
    assert {one.avoid for one in desired(drive.state).launch} == {("host-of-worker-1-0",)}


def test_old_records_are_read() -> None:
    """Quarantines of logs that know of no person, and nodes without racks, are read as they were."""
    assert kind_of(hosts.HostQuarantined).upcasters[1](("h", 5, "x")) == hosts.HostQuarantined("h", 5, "x")
    assert kind_of(nodes.NodeRunning).upcasters[1](("worker-0-0", "h")) == nodes.NodeRunning("worker-0-0", "h")


def test_people_have_the_last_word() -> None:
    """A person's quarantine is no part of the bound and ends when the person says; releasing forgives everything."""
    drive = Drive(nodes_max=4, nproc=1, relaunch_max=9).up()
    for index in range(3):
        assert isinstance(drive.do(hosts.QuarantineHost(f"host-of-worker-{index}-0", 3600, "ops")), Accepted)
    assert len(drive.state.hosts.quarantined(drive.now)) == 3
    _failed_check(drive, "worker-3-0")
    assert len(drive.state.hosts.quarantined(drive.now)) == 4
    drive.do(hosts.ReleaseHost("host-of-worker-3-0", "mended"))
    assert hosts_rules.record(drive.state, "host-of-worker-3-0") == hosts.HostRecord()


def test_what_people_ask_in_vain() -> None:
    """Of an unknown host there is nothing to forget, no quarantine is for ever, and the only host cannot be kept off."""
    drive = Drive(nodes_max=1, joining=True).up()
    answers = [
        drive.do(hosts.ReleaseHost("nobody", "")),
        drive.do(hosts.QuarantineHost("h", 0, "")),
        drive.do(hosts.QuarantineHost("", 9, "")),
        drive.do(hosts.QuarantineHost("host-of-worker-0-0", 9, "")),
    ]
    assert all(isinstance(answer, NotDone) for answer in answers)
    assert "the only host" in answers[-1].reason  # type: ignore[union-attr]


def test_hosts_are_shown() -> None:
    """The list names who is kept off and why first, counts failures by class, and says when a place fails everywhere."""
    life = Life(8, racks=4)
    _quarantine(life, 1)
    life.strike(2)
    life.add(nodes.NodeJoined("worker-2-1", "h5", "h5", 1))
    life.strike(2, node="worker-2-1")
    text = render_hosts.hosts(hosts_of(life.state))
    lines = text.splitlines()
    assert lines[2].split()[:2] == ["h1", "r0"]
    assert "1 (HW 1; last cuda.ecc)" in lines[2]
    assert "quarantine for 24 h 00 min more" in lines[2]
    assert "incident 1: rule" in lines[2]
    assert lines[-2] == "rack r0: 2 failures in 24 h on 2 hosts"
    assert lines[-1].startswith("place worker-2: 2 failures in 24 h on 2 hosts")


def test_one_failure_is_one_strike() -> None:
    """However often an incident is judged, it is one strike at its host, and no repetition on probation."""
    life = Life(8)
    _quarantine(life, 1)
    life.later(DAY - 60)
    life.strike(1)
    life.later(120)
    life.judge("exit.sigkill", "PLAT", revises=1, host="h1")
    assert life.kept_off == []
    assert hosts_rules.record(life.state, "h1").failures_24h == 1


def test_the_backend_names_hosts() -> None:
    """Where an agent knows its host by another name, it is the backend's that is kept off: that is the one it understands."""
    drive = Drive(nodes_max=2, relaunch_max=9)
    for index in range(2):
        drive.observe(f"worker-{index}-0", "running", host=f"machine-{index}")
        drive.join(f"worker-{index}-0", f"pod-{index}")
    drive.run(1)
    _failed_check(drive, "worker-1-0")
    assert [one.avoid for one in desired(drive.state).launch] == [("machine-1",)]
    assert [row.host for row in hosts_of(drive.state).hosts] == ["machine-1", "machine-0"]


# ---- one name for a host


def _see(drive: Drive, node: str, host: str, rack: str = "") -> None:
    """Its backend says where it runs."""
    drive.do(nodes.ObserveNodes((nodes.Observed(node, "running", host=host, rack=rack),)))


def test_the_platforms_name_stays_when_the_agent_joins() -> None:
    """A pod's own name is another one with each pod: what is avoided is what the platform calls the host."""
    drive = Drive(nodes_max=2, nproc=1)
    _see(drive, "worker-0-0", "node-a", "rack-1")
    drive.join("worker-0-0", "pod-7")
    node = drive.state.nodes.nodes["worker-0-0"]
    assert (node.host, drive.state.hosts.host_of("worker-0-0"), drive.state.hosts.rack_of("node-a")) == (
        "node-a", "node-a", "rack-1",
    )  # fmt: skip
    assert drive.facts(nodes.NodeJoined)[0].host == "node-a"


def test_the_platforms_name_is_taken_when_it_comes_late() -> None:
    """A status that is later than the agent's hello names host and failure domain from then on; said again it is no news."""
    drive = Drive(nodes_max=1, nproc=1)
    drive.join("worker-0-0", "pod-7")
    _see(drive, "worker-0-0", "node-a")
    assert drive.names() == ["NodeRunning"]
    _see(drive, "worker-0-0", "node-a", "rack-1")
    assert drive.names() == ["NodeRunning"]
    assert drive.state.hosts.rack_of("node-a") == "rack-1"
    _see(drive, "worker-0-0", "node-a", "rack-1")
    _see(drive, "worker-0-0", "")
    assert drive.new == []
    assert drive.state.nodes.nodes["worker-0-0"].ready
    drive.observe("worker-0-0", "failed", 1, "check_failed: slow link")
    assert drive.state.hosts.quarantined(drive.now) == ["node-a"]
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("node-a",)
