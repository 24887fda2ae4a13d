"""The action ladder: the cheapest rung that suffices and that the budgets still allow."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.diagnosis.evidence import CASC, DATA, HW, NET, PLAT, RES, SOFT, USER
from dlrover_core.diagnosis.ladder import choose
from dlrover_core.diagnosis.policy import Policy

KILLED = Case(PLAT, "exit.sigkill", 0.6, "relaunch", host="h")
BUG = Case(USER, "exception.KeyError", 0.8, "proc", "KeyError at train.py:3", "worker-1-0", "h")
ECC = Case(HW, "xid.ecc_double", 0.95, "reset", "", "worker-1-0", "h")
FLAKY = Case(SOFT, "port.in_use", 0.8, "proc", "", "worker-1-0", "h")
OOM = Case(RES, "cgroup.oom", 0.9, "mem+", "", "worker-1-0", "h")
STORAGE = Case(DATA, "data.connection", 0.8, "wait", "", "worker-1-0", "h")
GONE = Case(PLAT, "node.gone", 0.8, "relaunch", "", "worker-1-0", "h")
PREEMPTED = Case(PLAT, "k8s.preempted", 0.95, "relaunch", "", "worker-1-0", "h")


def answer(case: Case, policy: Policy | None = None, **told: Any) -> Choice:
    """What is chosen in a job of four nodes of which three make a world, with budgets left."""
    known: dict[str, Any] = {"restarts": 3, "software": 10, "relaunches": 3, "others": 3, "floor": 3, **told}
    return choose(case, Context(**known), policy or Policy())


def rule(choice: Choice) -> tuple[str, str]:
    """The action and the name of its rule."""
    return choice.action, choice.rule.split(":")[0]


# ---- what torchrun's users know


@pytest.mark.parametrize(
    ("left", "action", "after"), [(3, "RESTART_PROCESSES", 2), (1, "RESTART_PROCESSES", 0), (0, "AWAIT_EVIDENCE", 0)]
)
@pytest.mark.parametrize("case", [KILLED, BUG, Case(CASC, "gloo.peer", 0.8), Case(SOFT, "exit.silent", 0.5, "proc")])
def test_workers(case: Case, left: int, action: str, after: int) -> None:
    """Dead workers on a living node are restarted while restarts are left; then the final decision waits for evidence.

    So it is for a bug, and for what only an exit code tells: a SIGKILL that nobody explains is no proven pre-emption.
    """
    choice = answer(case, restarts=left)
    assert (choice.action, choice.budget_left, choice.budget) == (action, after, "restarts")


@pytest.mark.parametrize(
    ("left", "others", "floor", "action", "after"),
    [
        (3, 1, 2, "RELAUNCH_NODE", 2),
        (1, 9, 2, "RELAUNCH_NODE", 0),
        (0, 2, 2, "GO_ON_SMALLER", 0),
        (0, 1, 2, "AWAIT_EVIDENCE", 0),
        (0, 0, 1, "AWAIT_EVIDENCE", 0),
    ],
)
def test_nodes(left: int, others: int, floor: int, action: str, after: int) -> None:
    """A dead node is relaunched while relaunches are left, then done without if enough remain, else the job ends."""
    choice = answer(GONE, relaunches=left, others=others, floor=floor, alive=False)
    assert (choice.action, choice.budget_left) == (action, after)


@pytest.mark.parametrize("case", [KILLED, BUG, FLAKY, ECC, OOM, STORAGE])
def test_no_restarts_means_none(case: Case) -> None:
    """``--max-restarts 0``, or a launcher that has none left: nothing is started again, whoever is at fault."""
    assert rule(answer(case, granted=False)) == ("AWAIT_EVIDENCE", "workers.exhausted")


def test_budgets_never_go_below_zero() -> None:
    """An overdrawn budget is an empty one."""
    assert answer(BUG, restarts=-1).budget_left == answer(GONE, relaunches=-1, alive=False).budget_left == 0


# ---- who pays


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        (KILLED, "restarts"), (BUG, "restarts"), (OOM, "restarts"), (Case(CASC, "nccl.timeout", 0.5), "restarts"),
        (FLAKY, "software"), (Case(NET, "ib.retry_exceeded", 0.8), "software"), (Case(HW, "cuda.contained", 0.8), "software"),
        (Case(SOFT, "exit.sigsegv", 0.5), "restarts"), (PREEMPTED, "platform"), (GONE, "restarts"),
    ],
)  # fmt: skip
def test_each_class_has_a_budget_of_its_own(case: Case, budget: str) -> None:
    """The program and what nobody explains pay with restarts, the system with its own, the platform with nothing."""
    assert ladder.budget_of(case.verdict, case.signature) == budget


def test_the_systems_failures_have_an_hourly_budget() -> None:
    """Transient failures do not use up the program's restarts; beyond so many an hour they do."""
    choice = answer(FLAKY, software=1)
    assert (choice.action, choice.budget, choice.budget_left, choice.budget_before) == (
        "RESTART_PROCESSES",
        "software",
        0,
        1,
    )
    assert answer(FLAKY, software=0).budget == "restarts"
    assert answer(FLAKY, software=0, restarts=0).action == "AWAIT_EVIDENCE"


def test_preemption_is_charged_to_nobody() -> None:
    """What the platform says it took is relaunched for ever; what it does not explain is counted."""
    for left in (3, 0):
        choice = answer(PREEMPTED, relaunches=left, alive=False)
        assert (choice.action, choice.budget, choice.budget_left) == ("RELAUNCH_NODE", "platform", left)
    assert answer(GONE, alive=False).budget == "relaunches"


# ---- rungs


def test_what_passes_by_itself_is_tried_again_after_a_pause() -> None:
    """Storage that does not answer: a second, then twice as long each time, up to ten minutes."""
    pauses = [answer(STORAGE, retries=count).pause_us / 1e6 for count in (0, 1, 2, 20)]
    assert pauses == [1, 2, 4, 600]
    assert rule(answer(STORAGE)) == ("RETRY", "workers.retry")


def test_a_host_at_fault_is_left_for_another() -> None:
    """Broken hardware: another host where one can be had, fewer nodes where not, a restart in place where neither is possible."""
    assert rule(answer(ECC)) == ("ISOLATE_HOST", "host.isolate")
    assert rule(answer(ECC, relaunches=0)) == ("GO_ON_SMALLER", "host.shrink")
    assert rule(answer(ECC, relaunches=0, others=2)) == ("RESTART_PROCESSES", "workers.software")
    assert answer(ECC._replace(confidence=0.7)).action == "RESTART_PROCESSES"
    assert answer(ECC._replace(blamed="")).action == "RESTART_PROCESSES"
    assert rule(answer(ECC, alive=False)) == ("ISOLATE_HOST", "host.isolate")


def test_hosts_that_come_by_themselves_are_not_isolated_to_the_last() -> None:
    """Where nobody can launch another host, a job of as few as may be keeps its own."""
    assert answer(ECC, joining=True, others=2, floor=3).action == "RESTART_PROCESSES"
    assert answer(ECC, joining=True, others=3, floor=3).action == "ISOLATE_HOST"


@pytest.mark.parametrize(
    ("group", "now", "relaunched", "then"),
    [
        ("worker", 10_000, False, 12_000),
        ("worker", 300, False, 400),
        ("ps", 1000, False, 2000),
        ("ps", 2000, True, 2400),
    ],
)
def test_more_memory(group: str, now: int, relaunched: bool, then: int) -> None:
    """A fifth more, at least 100 MiB; a parameter server's is doubled, then a fifth more."""
    choice = answer(OOM, memory_mib=now, group=group, serves=group == "ps", relaunched=relaunched)
    assert (choice.action, choice.memory_mib, choice.budget) == ("RELAUNCH_MORE_MEMORY", then, "relaunches")


def test_memory_that_nobody_gives_is_not_asked_for() -> None:
    """Where the spec names no memory, or the policy's bound is reached, a node is started as it was."""
    assert answer(OOM).action == "RESTART_PROCESSES"
    assert rule(answer(OOM, Policy(memory_max_mib=1000), memory_mib=1000)) == ("RELAUNCH_NODE", "memory.most")


def test_what_led_to_no_step_is_not_done_for_ever() -> None:
    """Two restarts in place in vain: a fresh node; that in vain: another host. The program's own failures are its own."""
    assert answer(FLAKY, tried=1).action == "RESTART_PROCESSES"
    assert rule(answer(FLAKY, tried=2)) == ("RELAUNCH_NODE", "node.escalate")
    assert rule(answer(FLAKY, tried=2, relaunched=True)) == ("ISOLATE_HOST", "host.escalate")
    assert answer(BUG, tried=9).action == answer(KILLED, tried=9).action == "RESTART_PROCESSES"
    assert answer(FLAKY, Policy(escalate_after=0), tried=9).action == "RESTART_PROCESSES"


# ---- ends


def test_the_same_error_at_the_same_place_ends_the_job() -> None:
    """Once may be chance; the same place again, with nothing gained, is the program. A place that is not known is none."""
    assert answer(BUG, repeats=0).action == "RESTART_PROCESSES"
    assert rule(answer(BUG, repeats=1)) == ("AWAIT_EVIDENCE", "user.repeats")
    assert answer(BUG._replace(place=""), repeats=9).action == "RESTART_PROCESSES"
    assert answer(BUG, Policy(user_repeats=0), repeats=9).action == "RESTART_PROCESSES"
    assert answer(FLAKY._replace(place="x"), repeats=1).action == "RESTART_PROCESSES"


def test_a_program_that_cannot_run_ends_at_once() -> None:
    """A SyntaxError before the first step ever needs no second attempt; after it, or something else, does."""
    typo = BUG._replace(signature="exception.SyntaxError")
    assert rule(answer(typo, stepped=False)) == ("AWAIT_EVIDENCE", "user.at_once")
    assert answer(typo, stepped=True).action == answer(BUG, stepped=False).action == "RESTART_PROCESSES"


def test_cycles_without_progress_end_the_job() -> None:
    """So many cycles without a new step end it, whatever budgets are left; a pre-emption is not counted against it."""
    assert rule(answer(FLAKY, stale=3, stale_max=3)) == ("AWAIT_EVIDENCE", ladder.NO_PROGRESS)
    assert answer(FLAKY, stale=2, stale_max=3).action == "RESTART_PROCESSES"
    assert answer(PREEMPTED, stale=9, stale_max=3, alive=False).action == "RELAUNCH_NODE"


@pytest.mark.parametrize("hint", ["retry", "wait"])
def test_what_passes_by_itself_is_tried_once_whatever_was_before(hint: str) -> None:
    """Cycles without progress do not end the job over a failure that passes, before that was given one pause."""
    case = STORAGE._replace(hint=hint)
    assert rule(answer(case, stale=3, stale_max=3)) == ("RETRY", "workers.retry")
    assert rule(answer(case, stale=3, stale_max=3, retries=1)) == ("AWAIT_EVIDENCE", ladder.NO_PROGRESS)


def test_a_refused_node_is_done_without() -> None:
    """What its backend will never start is not asked for again."""
    refused = Case(USER, "node.refused", 0.9, "fail", "", "worker-1-0")
    assert rule(answer(refused, alive=False)) == ("GO_ON_SMALLER", "node.refused")
    assert rule(answer(refused, alive=False, others=2)) == ("AWAIT_EVIDENCE", "node.refused")


@pytest.mark.parametrize("signature", ["k8s.config", "k8s.image_pull", "launcher.usage"])
def test_a_node_that_nothing_can_start_ends_the_job_at_once(signature: str) -> None:
    """A wrong image or configuration spends no relaunch before the first step; after it, it may be one node's."""
    case = Case(USER, signature, 0.9, "fail", "", "worker-1-0")
    assert rule(answer(case, alive=False, stepped=False)) == ("AWAIT_EVIDENCE", "node.at_once")
    assert rule(answer(case, alive=False, stepped=True)) == ("RELAUNCH_NODE", "node.relaunch")
    assert rule(answer(case, Policy(fail_nodes=()), alive=False, stepped=False)) == ("RELAUNCH_NODE", "node.relaunch")


def test_every_rule_has_a_name_of_its_own() -> None:
    """Each choice says by which rule, and rules differ, so that explanations do."""
    rules = [
        answer(KILLED), answer(KILLED, restarts=0), answer(GONE, alive=False), answer(GONE, alive=False, relaunches=0),
        answer(GONE, alive=False, relaunches=0, others=2), answer(FLAKY), answer(STORAGE), answer(ECC),
        answer(ECC, relaunches=0), answer(OOM, memory_mib=1), answer(FLAKY, tried=2),
        answer(FLAKY, tried=2, relaunched=True), answer(BUG, repeats=1), answer(FLAKY, stale=3, stale_max=3),
        answer(PREEMPTED, alive=False), answer(PREEMPTED),
    ]  # fmt: skip
    assert len({choice.rule.split(":")[0] for choice in rules}) == len(rules)


def test_what_no_time_cures_ends_at_once() -> None:
    """Refused credentials, a missing model, a bad certificate: before the first step they end the job, and no restart is tried.

    After steps the same may be a token that has run out, and is tried again.
    """
    for signature in ("hub.denied", "storage.denied", "hub.missing", "checkpoint.mismatch"):
        case = Case(USER, signature, 0.9, "fail", "HTTPError at train.py:3", "worker-1-0", "h")
        assert rule(answer(case, stepped=False)) == ("AWAIT_EVIDENCE", "user.at_once")
        assert answer(case, stepped=True).action == "RESTART_PROCESSES"
    assert answer(Case(NET, "net.tls", 0.9, "fail"), stepped=False).action == "AWAIT_EVIDENCE"
    assert answer(case, Policy(fail_signatures=()), stepped=False).action == "RESTART_PROCESSES"
    # What passes by itself waits, as before.
    assert answer(Case(DATA, "hub.rate_limited", 0.85, "wait"), stepped=False).action == "RETRY"
