"""Node checks as the master decides them: who is checked when, what a world waits for, and who goes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from drive import SECOND, Drive, spec_of
from orders import Told

from dlrover_core.errors import SpecError
from dlrover_core.job import checks, job, nodes, plans, world
from dlrover_core.job.checks import CheckAsked, CheckJudged, CheckReported, CheckStarted, ReportCheck
from dlrover_core.job.evidence import EvidenceSeen
from dlrover_core.job.incidents import IncidentOpened
from dlrover_core.kernel.engine import Accepted, NotDone
from dlrover_core.kernel.state import digest
from dlrover_core.rules import membership
from dlrover_core.rules.checks import ask
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL

TIMED_OUT = "all_reduce timed out"


class Checked(Drive):
    """A job with checks, whose nodes answer as told: ``ill`` fail with whoever works with them, ``unfit`` fail alone."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("precheck", "full")
        super().__init__(**settings)
        self.ill: set[str] = set()
        self.unfit: dict[str, str] = {}
        self.slow: dict[str, float] = {}
        self.mute: set[str] = set()

    @property
    def check(self) -> checks.Check | None:
        """The check that runs."""
        return self.state.checks.running.get("worker")

    def arrive(self, *indexes: int, incarnation: int = 0) -> Checked:
        """These nodes join."""
        for one in indexes:
            self.join(f"worker-{one}-{incarnation}", f"host-{one}-{incarnation}")
        return self

    def groups(self) -> list[set[str]]:
        """Who works with whom now, by index."""
        check = self.check
        assert check is not None
        return [{check.members[one].split("-")[1] for one in group} for group in check.groups]

    def answer(self, *, times: int = 10) -> Checked:
        """Everybody answers, until no check runs."""
        for _ in range(times):
            check = self.check
            if check is None:
                return self
            number, round_ = check.number, check.round
            for group in check.groups:
                names = [check.members[one] for one in group]
                for name in names:
                    if name not in self.mute and (
                        self.check and (self.check.number, self.check.round) == (number, round_)
                    ):
                        self.do(self.word(name, names, number, round_))
            if self.mute:
                self.wait(self.spec.check_s + 5)
        return self

    def word(self, name: str, group: Iterable[str], number: int, round_: int) -> ReportCheck:
        """What a node says of a round."""
        took = max(self.slow.get(one, 1.0) for one in group)
        took_us, alone_us = round(took * 1e6), round(self.slow.get(name, 1.0) * 1e6)
        if name in self.unfit:
            return ReportCheck(name, number, round_, False, False, 0, 0, self.unfit[name])
        several = len(list(group)) > 1
        if several and (set(group) & self.ill or set(group) & set(self.unfit)):
            return ReportCheck(name, number, round_, False, True, took_us, alone_us, TIMED_OUT)
        return ReportCheck(name, number, round_, True, True, took_us, alone_us)

    def found(self) -> dict[str, str]:
        """What all checks so far found, but for the good."""
        return {name: kind for fact in self.facts(CheckJudged) for name, kind, _ in fact.found}


def _names(*indexes: int) -> list[str]:
    return [f"worker-{one}-0" for one in indexes]


# ---- before training


def test_without_checks_nothing_changes() -> None:
    """Off is the default: a world forms with the last node, and no check ever runs."""
    drive = Checked(nodes_max=2, precheck="off").arrive(0, 1)
    assert drive.members == _names(0, 1)
    assert drive.facts(CheckStarted) == []
    assert list(ask(drive.state, "worker", "why not")) == []


def test_a_world_forms_only_of_those_checked() -> None:
    """The check begins when the world would have; the world forms with its verdict, in one batch."""
    drive = Checked(nodes_max=4).arrive(0, 1, 2)
    assert drive.check is None
    drive.arrive(3)
    assert drive.groups() == [{"0", "1"}, {"2", "3"}]
    assert drive.members == []
    drive.answer()
    assert drive.names()[:3] == ["CheckReported", "CheckJudged", "WorldFormed"]
    assert drive.members == _names(0, 1, 2, 3)
    assert drive.facts(CheckJudged) == [CheckJudged("worker", 1, 1, (), (("worker", 0, 4, 0, 2),))]


def test_agents_are_told_once_what_to_do() -> None:
    """An order names the round, the partners, the store and the time; it is taken back when the check is over."""
    drive = Checked(nodes_max=2, check_s=30.0).arrive(0, 1)
    told = desired(drive.state).orders
    first, second = (Told(told[one]) for one in _names(0, 1))
    assert (first.check, first.check_round, first.check_kind, first.check_us) == (1, 1, "full", 30 * SECOND)
    assert (first.check_rank, first.check_size, first.check_with) == (0, 2, ("worker-1-0",))
    assert (second.check_rank, second.check_with) == (1, ("worker-0-0",))
    assert first.check_store == second.check_store == drive.state.world.offers["worker-0-0"][0]
    drive.answer()
    assert {Told(one).check for one in desired(drive.state).orders.values()} == {0}
    # It was used under a prefix only: the world may still be named by it.
    assert drive.world.store == first.check_store


def test_basic_checks_need_no_partner() -> None:
    """Each alone, one round, no store."""
    drive = Checked(nodes_max=2, precheck="basic").arrive(0, 1)
    assert drive.groups() == [{"0"}, {"1"}]
    drive.answer()
    assert drive.members == _names(0, 1)


def test_the_last_call_holds_for_checks_too() -> None:
    """With nodes_min there, those present are checked after the last call, and train."""
    drive = Checked(nodes_min=2, nodes_max=4, last_call_s=30.0).arrive(0, 1, 2)
    drive.wait(29)
    assert drive.check is None
    drive.wait(1)
    assert drive.groups() == [{"0", "1", "2"}]
    drive.answer()
    assert drive.members == _names(0, 1, 2)


def test_the_faulty_one_goes_and_the_others_train() -> None:
    """Two rounds name node 3; it is relaunched off its host, its successor is checked with good partners, and all train."""
    drive = Checked(nodes_max=4)
    drive.ill.add("worker-3-0")
    drive.arrive(0, 1, 2, 3).answer()
    assert drive.found() == {"worker-3-0": "faulty"}
    second = drive.facts(CheckStarted)[1]
    assert (second.round, {frozenset(one) for one in second.groups}) == (2, {frozenset((0, 3)), frozenset((1, 2))})
    failed = drive.facts(nodes.NodeFailed)
    assert [one.node for one in failed] == ["worker-3-0"]
    assert failed[0].reason == "check_failed: all_reduce timed out (with worker-0-0, worker-2-0)"
    seen = drive.facts(EvidenceSeen)
    assert [(one.node, one.source, one.signature) for one in seen] == [("worker-3-0", "check", "check.failed")]
    assert drive.members == []
    planned = drive.facts(nodes.NodePlanned)[-1]
    assert (planned.node, planned.avoid) == ("worker-3-1", ("host-3-0",))
    drive.observe("worker-3-0", "gone")
    drive.arrive(3, incarnation=1)
    assert drive.check is not None
    assert (drive.check.members, drive.check.fresh) == (("worker-3-1", "worker-0-0", "worker-1-0"), 1)
    drive.answer()
    assert drive.members == [*_names(0, 1, 2), "worker-3-1"]


def test_who_fails_alone_needs_no_second_round_of_its_own() -> None:
    """A full disk is named after one round; its partner is tried again with others, and stays."""
    drive = Checked(nodes_min=3, nodes_max=4, last_call_s=0.0)
    drive.unfit["worker-1-0"] = "no space left in /tmp"
    drive.arrive(0, 1, 2, 3).answer()
    assert drive.found() == {"worker-1-0": "faulty"}
    assert drive.members == _names(0, 2, 3)


def test_nobody_waits_for_the_mute() -> None:
    """A node that never answers has failed after check_s; the others train."""
    drive = Checked(nodes_min=3, nodes_max=4, check_s=60.0, last_call_s=0.0)
    drive.mute.add("worker-2-0")
    drive.arrive(0, 1, 2, 3).answer(times=2)
    assert drive.facts(nodes.NodeFailed)[0].reason == "check_failed: no answer within 60 s"
    drive.answer()
    assert drive.members == _names(0, 1, 3)


def test_a_slow_node_is_reported_and_trains() -> None:
    """Slow in both rounds: evidence that opens no incident, and by default nothing else."""
    drive = Checked(nodes_max=4)
    drive.slow["worker-1-0"] = 9.0
    drive.arrive(0, 1, 2, 3).answer()
    assert drive.found() == {"worker-1-0": "slow"}
    assert [one.signature for one in drive.facts(EvidenceSeen)] == ["check.slow"]
    assert drive.members == _names(0, 1, 2, 3)
    assert drive.state.incidents.number == 0


def test_a_slow_node_is_replaced_where_that_is_wanted() -> None:
    """Once for each place: its successor, as slow, trains."""
    drive = Checked(nodes_max=4, check_slow="replace")
    drive.slow["worker-1-0"] = drive.slow["worker-1-1"] = 9.0
    drive.arrive(0, 1, 2, 3).answer()
    assert [one.node for one in drive.facts(plans.NodeDrained)] == ["worker-1-0"]
    assert drive.members == []
    drive.arrive(1, incarnation=1).answer()
    assert drive.members == ["worker-0-0", "worker-1-1", "worker-2-0", "worker-3-0"]
    assert len(drive.facts(plans.NodeDrained)) == 1
    assert drive.state.incidents.number == 0


# ---- what cannot be told apart


def test_two_nodes_that_fail_together_end_the_job_honestly() -> None:
    """Nobody is evicted: the job says that it cannot tell them apart."""
    drive = Checked(nodes_max=2)
    drive.ill.add("worker-1-0")
    drive.arrive(0, 1).answer()
    assert drive.facts(nodes.NodeFailed) == []
    failed = drive.facts(job.JobFailed)[0]
    assert "none of 2 nodes passed: worker-0-0: all_reduce timed out (with worker-1-0); worker-1-0:" in failed.root
    assert "cannot be told from so few" in failed.root


def test_one_of_two_that_fails_alone_is_named() -> None:
    """What each does alone attributes where the pair cannot."""
    drive = Checked(nodes_max=2)
    drive.unfit["worker-0-0"] = "2 x 2 is wrong"
    drive.arrive(0, 1).answer()
    assert drive.found() == {"worker-0-0": "faulty"}
    assert [one.node for one in drive.facts(nodes.NodeFailed)] == ["worker-0-0"]
    assert drive.state.job.live


@pytest.mark.parametrize("ill", range(3))
def test_of_three_the_ill_one_is_found_in_the_end(ill: int) -> None:
    """One is left out in the second round; with the others found good, a further check names the right one."""
    drive = Checked(nodes_max=3)
    drive.ill.add(f"worker-{ill}-0")
    drive.arrive(0, 1, 2).answer()
    assert [one.node for one in drive.facts(nodes.NodeFailed)] == [f"worker-{ill}-0"]
    assert {one.node for one in drive.facts(EvidenceSeen)} == {f"worker-{ill}-0"}


def test_a_job_whose_nodes_all_fail_says_why() -> None:
    """What fails everywhere is no host's fault: one clear error, no relaunch."""
    drive = Checked(nodes_max=4, precheck="basic")
    drive.unfit = dict.fromkeys(_names(0, 1, 2, 3), "check site.sh: exit code 202: fabric manager is down")
    drive.arrive(0, 1, 2, 3).answer()
    assert drive.facts(nodes.NodeFailed) == []
    root = drive.facts(job.JobFailed)[0].root
    assert root.startswith("node check: none of 4 nodes passed: worker-0-0: check site.sh: exit code 202")


def test_a_lone_node_that_fails_is_relaunched_elsewhere() -> None:
    """A job of one node cannot compare; its node is replaced as any faulty one, within its budget."""
    drive = Checked(nodes_max=1, relaunch_max=1)
    drive.unfit = {"worker-0-0": "no GPU", "worker-0-1": "no GPU"}
    drive.arrive(0).answer()
    assert drive.facts(nodes.NodePlanned)[-1].avoid == ("host-0-0",)
    drive.observe("worker-0-0", "gone")
    drive.arrive(0, incarnation=1).answer()
    drive.wait(400)
    assert "no GPU" in drive.facts(job.JobFailed)[0].root


# ---- who is not checked, and who is later


def test_a_plain_restart_costs_nothing() -> None:
    """A process that dies is restarted with its world at once; a verdict older than check_fresh_s is made anew."""
    drive = Checked(nodes_max=2, check_fresh_s=3600.0).arrive(0, 1).answer()
    assert isinstance(drive, Checked)
    drive.run(1)
    drive.exit("worker-1-0", 3)
    assert "WorldFormed" in drive.names()
    drive.run(2)
    drive.wait(3601)
    drive.exit("worker-1-0", 3)
    assert "WorldDissolved" in drive.names()
    for one in _names(0, 1):
        drive.do(world.ReportStopped(one, 2))
    assert drive.check is not None
    drive.answer()
    assert drive.world.generation == 3


def test_a_relaunched_node_is_checked_before_it_trains() -> None:
    """The survivors' verdicts hold; the newcomer is checked with them as partners."""
    drive = Checked(nodes_max=3).arrive(0, 1, 2).answer()
    drive.run(1)
    drive.observe("worker-1-0", "failed", -9)
    for one in _names(0, 2):
        drive.do(world.ReportStopped(one, 1))
    drive.arrive(1, incarnation=1)
    assert drive.check is not None
    assert drive.check.members == ("worker-1-1", "worker-0-0", "worker-2-0")
    drive.answer()
    assert drive.members == ["worker-0-0", "worker-1-1", "worker-2-0"]


def test_nobody_is_checked_while_its_workers_stop() -> None:
    """A check waits until the members of the broken world have stopped, or that takes too long."""
    drive = Checked(nodes_max=2, stop_grace_s=10.0, kill_wait_s=5.0, linger_s=0.0).arrive(0, 1).answer()
    drive.run(1)
    drive.observe("worker-1-0", "failed", -9)
    drive.arrive(1, incarnation=1)
    assert drive.check is None
    drive.wait(14)
    assert drive.check is None
    drive.wait(1)
    assert drive.check is not None


def test_a_late_node_is_checked_aside() -> None:
    """The others train meanwhile; it joins them when it has passed, and not when it has failed."""
    drive = Checked(nodes_min=2, nodes_max=3, last_call_s=0.0, grow_window_s=0.0).arrive(0, 1).answer()
    drive.run(1)
    drive.unfit["worker-2-0"] = "no space left"
    drive.arrive(2)
    assert drive.facts(CheckStarted)[-1].aside
    assert drive.members == _names(0, 1)
    drive.answer()
    assert drive.members == _names(0, 1)
    assert drive.world.generation == 1
    drive.observe("worker-2-0", "gone")
    drive.arrive(2, incarnation=1).answer()
    assert drive.members == [*_names(0, 1), "worker-2-1"]


def test_a_world_that_breaks_does_not_wait_for_a_check_aside() -> None:
    """Those who have trained go on at once; the late node is taken in when it has passed."""
    drive = Checked(nodes_min=2, nodes_max=3, last_call_s=0.0, grow_window_s=0.0).arrive(0, 1).answer()
    drive.run(1)
    drive.arrive(2)
    drive.exit("worker-1-0", 3)
    assert drive.world.generation == 2
    assert drive.members == _names(0, 1)


def test_a_restart_does_not_wait_for_a_newcomers_check() -> None:
    """A late node that is not taken in is no reason to wait: the last world goes on as it was."""
    drive = Checked(nodes_min=2, nodes_max=3, last_call_s=0.0, on_join="never").arrive(0, 1).answer()
    drive.run(1)
    drive.arrive(2)
    assert drive.check is None
    drive.exit("worker-1-0", 3)
    assert "WorldFormed" in drive.names()
    assert drive.members == _names(0, 1)


def test_asking_makes_the_next_world_wait() -> None:
    """After a failure in doubt the named nodes are checked, with good ones as partners, before anybody trains."""
    drive = Checked(nodes_max=4).arrive(0, 1, 2, 3).answer()
    drive.run(1)
    fact = next(iter(ask(drive.state, "worker", "incident 1: nccl.remote", ["worker-2-0"])))
    assert fact == CheckAsked("worker", ("worker-2-0",), "incident 1: nccl.remote")
    drive.engine._emit(fact, drive.now, 0, None)
    assert not membership.may_train(drive.state, drive.state.nodes.nodes["worker-2-0"])
    drive.exit("worker-0-0", 0)
    assert "WorldDissolved" in drive.names()
    for one in _names(0, 1, 2, 3):
        drive.do(world.ReportStopped(one, 1))
    assert drive.check is not None
    assert (drive.check.members[0], drive.check.fresh, drive.check.why) == ("worker-2-0", 1, "incident 1: nccl.remote")
    drive.answer()
    assert drive.members == _names(0, 1, 2, 3)


def test_a_verdict_in_doubt_asks_by_itself() -> None:
    """Words that only say that somebody's link is bad lead to a check of all before the world forms again."""
    drive = Checked(nodes_max=4).arrive(0, 1, 2, 3).answer()
    drive.run(1)
    said = "NET/IB: Got completion from peer 10.0.0.7<41000> with status=12 opcode=0 len=0 vendor err 129"
    drive.exit("worker-1-0", 1, 1, f"RuntimeError: NCCL error: {said}")
    assert drive.incident.hint == "check"
    assert [fact.nodes for fact in drive.facts(CheckAsked)] == [()]
    for one in _names(0, 1, 2, 3):
        drive.do(world.ReportStopped(one, 1))
    assert drive.check is not None
    assert len(drive.check.members) == 4
    drive.answer()
    assert drive.members == _names(0, 1, 2, 3)


# ---- in the middle of a round


def test_a_node_that_dies_in_a_round_is_waited_for_no_more() -> None:
    """Its partner, who failed for want of it, is not blamed."""
    drive = Checked(nodes_min=3, nodes_max=4, last_call_s=0.0).arrive(0, 1, 2, 3)
    for one in _names(0, 1):
        drive.do(ReportCheck(one, 1, 1, True, took_us=SECOND))
    drive.do(ReportCheck("worker-2-0", 1, 1, False, what=TIMED_OUT))
    drive.observe("worker-3-0", "failed", -9)
    drive.answer()
    assert drive.members == _names(0, 1, 2)
    assert drive.found() == {}


def test_a_death_closes_its_group_for_the_round() -> None:
    """Its partner is told to stop at once and need not speak; it is blamed for nothing, and checked with the next ones."""
    drive = Checked(nodes_min=3, nodes_max=4, last_call_s=30.0).arrive(0, 1, 2, 3)
    drive.observe("worker-3-0", "failed", -9)
    told = desired(drive.state).orders
    assert [Told(told[one]).check for one in _names(0, 1, 2)] == [1, 1, 0]
    for one in _names(0, 1):
        drive.do(ReportCheck(one, 1, 1, True, took_us=SECOND))
    assert drive.facts(CheckJudged) == [CheckJudged("worker", 1, 1, (), (("worker", 0, 2, 0, 2),))]
    drive.wait(30)
    assert drive.check is not None
    assert (drive.check.members[0], drive.check.fresh) == ("worker-2-0", 1)
    drive.answer()
    assert (drive.members, drive.found()) == (_names(0, 1, 2), {})


def test_a_lone_partner_waits_for_its_next_one() -> None:
    """Of two, one dies: nobody waits for the time limit, and the check begins anew as soon as its successor is there."""
    drive = Checked(nodes_max=2, check_s=120.0).arrive(0, 1)
    drive.observe("worker-1-0", "failed", -9)
    assert drive.check is None
    drive.arrive(1, incarnation=1)
    assert drive.check is not None
    assert drive.check.members == ("worker-0-0", "worker-1-1")
    drive.answer()
    assert drive.members == ["worker-0-0", "worker-1-1"]


def test_the_time_limit_blames_no_partner_of_the_dead() -> None:
    """Whoever is silent for want of its partner has not failed when the time is over; whoever is simply silent has."""
    drive = Checked(nodes_min=2, nodes_max=4, last_call_s=30.0, check_s=60.0).arrive(0, 1, 2, 3)
    drive.observe("worker-3-0", "failed", -9)
    drive.do(ReportCheck("worker-1-0", 1, 1, True, took_us=SECOND))
    drive.wait(65)
    assert [one.node for one in drive.facts(CheckReported)] == ["worker-1-0", "worker-0-0"]


def test_doubts_for_a_dead_nodes_sake_end_no_job() -> None:
    """Three fail together, then the ill one dies: the other two are not taken for bad because nothing was learnt of them."""
    drive = Checked(nodes_max=3)
    drive.ill.add("worker-2-0")
    drive.arrive(0, 1, 2)
    for one in _names(0, 1, 2):
        drive.do(drive.word(one, _names(0, 1, 2), 1, 1))
    assert drive.groups() == [{"0", "2"}, {"1"}]
    drive.observe("worker-2-0", "failed", -9)
    drive.do(ReportCheck("worker-1-0", 1, 2, True, took_us=SECOND))
    assert drive.check is None
    assert drive.facts(job.JobFailed) == []
    assert drive.found() == {}
    drive.arrive(2, incarnation=1).answer()
    assert drive.members == [*_names(0, 1), "worker-2-1"]


def test_everything_said_twice_counts_once() -> None:
    """A report of another round, check or node is refused, and so is a second one."""
    drive = Checked(nodes_max=2).arrive(0, 1)
    assert isinstance(drive.do(ReportCheck("worker-0-0", 1, 1, True)), Accepted)
    for wrong in (
        ReportCheck("worker-0-0", 1, 1, False),
        ReportCheck("worker-1-0", 1, 2, True),
        ReportCheck("worker-1-0", 2, 1, True),
        ReportCheck("worker-9-0", 1, 1, True),
    ):
        assert isinstance(drive.do(wrong), NotDone)
    assert isinstance(drive.do(ReportCheck("worker-1-0", 1, 1, True)), Accepted)
    assert isinstance(drive.do(ReportCheck("worker-1-0", 1, 1, True)), NotDone)
    assert len(drive.facts(CheckReported)) == 2


def test_a_new_master_goes_on_in_the_middle_of_any_round() -> None:
    """Whichever word was the last one before the fail-over: the same verdict, and what is desired does not change."""
    drive = Checked(nodes_max=4)
    drive.ill.add("worker-3-0")
    drive.arrive(0, 1, 2, 3)
    while (check := drive.check) is not None:
        place = next(one for one in check.busy if one not in check.outcomes)
        group = next(one for one in check.groups if place in one)
        before = desired(drive.state)
        drive.take_over()
        assert desired(drive.state).orders == before.orders
        names = [check.members[one] for one in group]
        drive.do(drive.word(check.members[place], names, check.number, check.round))
    assert drive.found() == {"worker-3-0": "faulty"}
    assert digest(MODEL.fold(drive.records)) == digest(drive.state)


def test_the_time_limit_starts_afresh_with_a_new_master() -> None:
    """Whoever could not reach a dead master has the time again."""
    drive = Checked(nodes_max=2, check_s=60.0).arrive(0, 1)
    drive.wait(60)
    drive.take_over()
    drive.wait(60)
    assert drive.check is not None
    drive.wait(5)
    assert drive.check is None


def test_an_old_verdict_is_a_strangers() -> None:
    """A new run of the job checks its nodes anew."""
    drive = Checked(nodes_max=1).arrive(0).answer()
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.checks.good == {}
    assert drive.check is None


def test_settings() -> None:
    """What could never be is refused, with what may be."""
    with pytest.raises(SpecError, match="'off', 'basic' or 'full'"):
        spec_of(precheck="1")
    with pytest.raises(SpecError, match="check_s: must be more than 0"):
        spec_of(check_s=0.0)
    with pytest.raises(SpecError, match="'report' or 'replace'"):
        spec_of(check_slow="shoot")


def test_two_that_fail_one_check_have_an_incident_each_with_its_own_cause() -> None:
    """Both deaths are told in one moment, before either is answered: an incident opens with the one that caused it."""
    drive = Checked(nodes_max=5, precheck="basic")
    drive.unfit = {"worker-1-0": "the disk is slow", "worker-3-0": "the disk is slow"}
    drive.arrive(0, 1, 2, 3, 4).answer(times=1)
    deaths = {record.seq: record.event.node for record in drive.records if isinstance(record.event, nodes.NodeFailed)}
    opened = [record for record in drive.records if isinstance(record.event, IncidentOpened)]
    assert [deaths[record.cause] for record in opened] == ["worker-1-0", "worker-3-0"]
    causes = [drive.state.incidents.by_number[number].evidence[0] for number in (1, 2)]
    assert causes == [record.cause for record in opened]


def test_a_single_node_that_fails_twice_ends_the_job() -> None:
    """One node may be bad; if its successor fails the same check, it is not the node: the job ends and says why."""
    drive = Checked(nodes_max=1)
    drive.unfit = {"worker-0-0": "no such device", "worker-0-1": "no such device"}
    drive.arrive(0).answer()
    assert drive.state.job.live
    assert drive.facts(nodes.NodeFailed)[-1].reason.startswith("check_failed")
    drive.observe("worker-0-0", "gone")
    drive.join("worker-0-1")
    drive.answer()
    assert drive.state.job.state == "failed"
    assert "no such device" in drive.state.job.root
