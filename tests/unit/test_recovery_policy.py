"""Pauses and memory before a retry, the policy and its hook."""

from __future__ import annotations

from typing import Any

import pytest
from drive import SECOND, Drive
from recovering import BUG, newest, see

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.diagnosis.policy import Policy
from dlrover_core.job import incidents, job
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.engine import Accepted, Engine
from dlrover_core.rules import choose_action
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL, model
from dlrover_core.spec import GroupSpec, JobSpec

STORAGE = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in load\nConnectionError: s3 is away'


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
