"""What-if: the same recorded observations under another policy, with the decisions side by side.

The log is folded again with another spec. Wherever it holds a verdict, the ladder is asked again, and its answer replaces
the recorded action, so budgets change as they would have. The comparison ends where the other policy would have ended the
job, because the log knows what followed only for the real decisions. Later observations are taken as they were.

Under the job's own policy, every decision must come out as it was recorded: that checks a log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dlrover_core.diagnosis import classify, ladder, signatures
from dlrover_core.diagnosis.classify import describe
from dlrover_core.job import incidents, job
from dlrover_core.job.incidents import ActionChosen, Diagnosed, IncidentOpened, WorkerExited
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.events import Record
from dlrover_core.rules.incidents import rules
from dlrover_core.spec import JobSpec

if TYPE_CHECKING:
    from dlrover_core.diagnosis.policy import Hook


class Decision(NamedTuple):
    """One verdict and its action, as recorded, and both under the other policy. None: no action."""

    incident: int
    seq: int
    at: int
    cause: str
    judged: Diagnosed
    done: ActionChosen | None
    judged_instead: Diagnosed
    done_instead: ActionChosen | None

    @property
    def same(self) -> bool:
        """Are class and action the same?"""
        return self.same_verdict and _what(self.done) == _what(self.done_instead)

    @property
    def same_verdict(self) -> bool:
        """Are the verdicts the same?"""
        return _found(self.judged) == _found(self.judged_instead)

    @property
    def exact(self) -> bool:
        """Would the log be the same, byte for byte?"""
        return (self.judged, self.done) == (self.judged_instead, self.done_instead)


class WhatIf(NamedTuple):
    """All decisions, in order.

    ended:    the decision by which the other policy would have ended a job that went on; None: there is none
    left_out: number of decisions recorded after that
    outlived: record of the `JobFailed` that the other policy would not have decided; 0: there is none
    """

    job: str
    decisions: tuple[Decision, ...]
    ended: Decision | None
    left_out: int
    outlived: int

    @property
    def differ(self) -> int:
        """How many decisions differ."""
        return sum(not one.same for one in self.decisions)

    @property
    def exact(self) -> bool:
        """Is every decision, its verdict, rule and budget, as it was recorded?"""
        return all(one.exact for one in self.decisions)


def _what(chosen: ActionChosen | None) -> tuple[str, str]:
    return (chosen.action, chosen.node) if chosen is not None else ("", "")


def _found(judged: Diagnosed) -> tuple[str, str, str]:
    return judged.verdict, judged.signature, judged.blamed


def whatif(
    records: Sequence[Record],
    *,
    change: Callable[[JobSpec], JobSpec] = lambda spec: spec,
    hook: Hook | None = None,
    anew: bool = False,
) -> WhatIf:
    """Decide again with the spec that ``change`` makes of the recorded one.

    ``anew``: match recorded exits against the changed spec's signatures; without it, recorded signatures stand.
    """
    return _Replay(records, change, hook, anew=anew).run()


class _Replay:
    def __init__(
        self, records: Sequence[Record], change: Callable[[JobSpec], JobSpec], hook: Hook | None, *, anew: bool
    ) -> None:
        self._records, self._change, self._anew = records, change, anew
        self._react: Any = rules(hook).react
        self._state: JobState = FOLD.new()
        self._done = {record.cause: record for record in records if _chosen_now(record)}
        # Verdicts whose recorded action has not come yet, by record.
        self._open: dict[int, tuple[Diagnosed, Diagnosed, Record]] = {}
        self._decisions: list[Decision] = []
        # Decisions that would have ended the job, unless a later one revises them.
        self._held: dict[int, Decision] = {}
        self._outlived = 0
        self._job = ""

    def run(self) -> WhatIf:
        for place, record in enumerate(self._records):
            self._take(record)
            ended = self._ended(record)
            if ended is not None or self._outlived:
                later = sum(isinstance(one.event, Diagnosed) for one in self._records[place + 1 :])
                return self._told(ended, later)
        return self._told(None, 0)

    def _told(self, ended: Decision | None, left_out: int) -> WhatIf:
        return WhatIf(self._job, tuple(self._decisions), ended, left_out, self._outlived)

    def _take(self, record: Record) -> None:
        fact: Any = record.event
        if isinstance(fact, job.JobCreated):
            self._job = fact.job
            self._held.clear()
            fact = fact._replace(spec=self._change(JobSpec.from_json(fact.spec)).to_json())
        elif isinstance(fact, WorkerExited) and self._anew:
            fact = self._recognised(fact)
        elif isinstance(fact, Diagnosed):
            self._judged(fact, record)
            return
        elif isinstance(fact, ActionChosen):
            if record.seq in self._open:
                self._answer(*self._open.pop(record.seq), record)
            else:
                self._chosen(fact, record)
            return
        elif isinstance(fact, job.JobFailed) and not self._doomed(fact.incident):
            self._outlived = record.seq
        self._apply(record._replace(event=fact))

    def _doomed(self, number: int) -> bool:
        """Does this incident end the job under the other policy too? A job may also fail without any incident."""
        incident = self._state.incidents.by_number.get(number)
        return incident is None or incident.state == "fatal"

    def _apply(self, record: Record) -> None:
        FOLD.apply(self._state, record)

    def _recognised(self, fact: WorkerExited) -> WorkerExited:
        table = signatures.table(self._state.job.spec.signatures)
        found = classify.of_exit(table, 1 if fact.asked else fact.exit_code, fact.error, fact.tail)
        return fact._replace(
            signature=found.signature,
            place=fact.place or found.place,
            verdict=found.verdict,
            confidence=found.confidence,
        )

    def _judged(self, fact: Diagnosed, record: Record) -> None:
        """A verdict, judged again where texts are.

        Its action follows where the recorded action does, because other records may come between.
        """
        instead = self._judged_instead(fact, record) if self._anew else fact
        self._apply(record._replace(event=instead))
        done = self._done.get(record.seq)
        if done is None:
            self._answer(fact, instead, record, None)
        else:
            self._open[done.seq] = (fact, instead, record)

    def _answer(self, fact: Diagnosed, instead: Diagnosed, record: Record, done: Record | None) -> None:
        answers = self._react[Diagnosed](self._state, instead, record)
        other = next(
            (one for one in answers if isinstance(one, ActionChosen) and one.action not in ladder.ENDINGS), None
        )
        was = cast("ActionChosen", done.event) if done is not None else None
        cause = describe(self._state.incidents.by_number[fact.incident].cause)
        decision = Decision(fact.incident, record.seq, record.at, cause, fact, was, instead, other)
        if was is not None or other is not None:
            self._decisions.append(decision)
        if other is not None:
            self._apply((done or record)._replace(event=other))
            self._held.pop(fact.incident, None)
            critical = self._state.sets.critical(self._state.set_of(other.node))
            if other.action == ladder.AWAIT_EVIDENCE and critical:
                self._held[fact.incident] = decision

    def _judged_instead(self, fact: Diagnosed, record: Record) -> Diagnosed:
        """The verdict by the changed table, from the same evidence; the recorded verdict where the evidence does not tell."""
        known = self._state.incidents.by_number.get(fact.incident)
        if known is None:
            return fact
        opened = IncidentOpened(known.number, known.node, known.generation, () if fact.blamed else (0,))
        answers = self._react[IncidentOpened](self._state, opened, record)
        found = next((one for one in answers if isinstance(one, Diagnosed)), fact)
        dead = fact.blamed if fact.blamed and fact.blamed not in _living(self._state) else found.blamed
        return found._replace(revises=fact.revises, blamed=dead)

    def _chosen(self, fact: ActionChosen, record: Record) -> None:
        """An action that no verdict led to at once: a pending end that is carried out, or a report."""
        incident = self._state.incidents.by_number.get(fact.incident)
        if incident is not None and (fact.action not in ladder.ENDINGS or incident.end_pending):
            self._apply(record)

    def _ended(self, record: Record) -> Decision | None:
        """Training went on after a decision that would have ended the job."""
        fact = record.event
        if isinstance(fact, incidents.IncidentClosed) and fact.incident in self._held:
            return self._held[fact.incident]
        return None


def _living(state: JobState) -> set[str]:
    return {node.node for node in state.nodes.nodes.values() if node.joined and not node.released}


def _chosen_now(record: Record) -> bool:
    fact = record.event
    return isinstance(fact, ActionChosen) and fact.action not in (*ladder.ENDINGS, ladder.SUSPECTS)


def changed(
    *, policy: str | None = None, signatures_: str | None = None, max_restarts: int | None = None
) -> Callable[[JobSpec], JobSpec]:
    """A change of a spec: another policy (JSON), other signatures (JSON), another ``--max-restarts``; None: as it was."""
    values: dict[str, Any] = {"policy": policy, "signatures": signatures_, "max_restarts": max_restarts}
    given = {name: value for name, value in values.items() if value is not None}
    return lambda spec: dataclasses.replace(spec, **given)


def plain(found: WhatIf) -> dict[str, Any]:
    """For JSON."""
    return {
        "job": found.job,
        "decisions": [
            {
                "incident": one.incident,
                "seq": one.seq,
                "at": one.at,
                "cause": one.cause,
                "same": one.same,
                "recorded": _plain(one.judged, one.done),
                "other": _plain(one.judged_instead, one.done_instead),
            }
            for one in found.decisions
        ],
        "differ": found.differ,
        "exact": found.exact,
        "ended_by": found.ended.seq if found.ended is not None else None,
        "left_out": found.left_out,
        "outlived": found.outlived or None,
    }


def _plain(judged: Diagnosed, done: ActionChosen | None) -> dict[str, Any]:
    values: dict[str, Any] = {"verdict": judged.verdict, "signature": judged.signature}
    if done is not None:
        values |= {
            "action": done.action,
            "node": done.node,
            "rule": done.rule,
            "budget": done.budget,
            "budget_before": done.budget_before,
            "budget_left": done.budget_left,
        }
    return values
