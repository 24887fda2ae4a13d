"""The same recorded observations under another policy, decisions side by side."""

from __future__ import annotations

import json
from pathlib import Path

from drive import Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.choices import Case, Choice, Context
from dlrover_core.history.render_whatif import lines
from dlrover_core.history.whatif import changed, plain, whatif
from dlrover_core.job.incidents import ActionChosen
from dlrover_core.sim.scenario import Scenario
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.swarm import draw

HISTORIES = Path(__file__).parent / "histories"


def struck(times: int, *, code: int = -9, error: str = "", **settings: object) -> Drive:
    """A job whose rank 0 dies so many times, each time after some steps."""
    drive = Drive(**settings).up()
    for one in range(times):
        drive.exit(f"worker-{one % 2}-0", one % 2, code, error)
        drive.run(10 * (one + 1))
    return drive


def test_the_same_policy_decides_the_same() -> None:
    """Under its own policy a log is decided again byte for byte."""
    found = whatif(struck(3).records)
    assert len(found.decisions) == 3
    assert found.exact
    assert found.ended is None
    assert "each comes out as it was recorded" in "\n".join(lines(found, asked=False))


def test_simulated_histories_decide_the_same() -> None:
    """So do histories of many faults: verdicts, rules and budgets are a function of the log alone."""
    kinds = ("kill_worker", "fail_worker", "kill_node", "kill_host", "preempt_now", "sick_host", "crash_master")
    decided = 0
    for seed in range(6):
        plan = draw(seed, Scenario(nodes=6, workers_per_node=2, steps=300, spares=2), kinds=kinds)
        found = whatif(simulate(plan).records)
        assert found.exact, [one for one in found.decisions if not one.exact]
        decided += len(found.decisions)
    assert decided >= 10


def test_a_smaller_budget_ends_the_job_earlier() -> None:
    """With fewer restarts the job would have ended where they were used up; what came later is left out."""
    found = whatif(struck(3).records, change=changed(max_restarts=2))
    assert [one.done_instead.action for one in found.decisions if one.done_instead] == [
        ladder.RESTART_PROCESSES, ladder.RESTART_PROCESSES, ladder.AWAIT_EVIDENCE,
    ]  # fmt: skip
    assert found.ended is found.decisions[2]
    assert not found.decisions[0].exact  # one restart less was left
    assert found.decisions[0].same
    assert "would have ended with incident 3" in "\n".join(lines(found, asked=True))
    assert plain(found)["ended_by"] == found.decisions[2].seq


def test_a_larger_budget_outlives_the_recorded_end() -> None:
    """With more restarts the recorded end would not have come: the comparison says so and stops there."""
    drive = Drive(max_restarts=1).up()
    drive.exit("worker-0-0", 0)
    drive.run(10)
    drive.exit("worker-0-0", 0)
    drive.wait(400)
    assert drive.state.job.state == "failed"
    found = whatif(drive.records, change=changed(max_restarts=5))
    assert found.outlived
    assert [one.same for one in found.decisions] == [True, False]
    assert "would not have ended" in "\n".join(lines(found, asked=True))


class Cautious:
    """A hook that relaunches instead of restarting."""

    def choose(self, judgement: Case, choice: Choice, context: Context) -> Choice | None:
        """A new node for everything."""
        return choice._replace(action=ladder.RELAUNCH_NODE, rule="I trust no node")


def test_a_hook_has_its_say() -> None:
    """A policy's hook is asked anew, and its word stands beside what was done."""
    found = whatif(struck(1).records, hook=Cautious())
    assert found.differ == 1
    instead = found.decisions[0].done_instead
    assert instead is not None
    assert instead.action == ladder.RELAUNCH_NODE
    assert "I trust no node" in instead.rule


def test_other_signatures_name_it_otherwise() -> None:
    """Recorded last lines are matched again by another table: the verdict changes, and the action with it."""
    error = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nRuntimeError: flux capacitor empty'
    mine = json.dumps(
        [
            {
                "id": "mine.flux", "title": "no flux", "class": "USER", "action": "fail",
                "sources": ["error", "log"], "patterns": ["flux capacitor empty"],
            }
        ]
    )  # fmt: skip
    drive = struck(1, code=1, error=error)
    found = whatif(drive.records, change=changed(signatures_=mine), anew=True)
    assert found.decisions[0].judged_instead.signature == "mine.flux"
    assert not found.decisions[0].same
    assert whatif(drive.records, anew=True).exact
    assert [one.event.action for one in drive.records if isinstance(one.event, ActionChosen)]
