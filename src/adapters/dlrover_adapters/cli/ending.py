"""The last words of `dlrover-run`: how the job ended, and of a failure first what the guilty rank said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState
    from dlrover_core.kernel.events import Record

TAIL_LINES_MAX = 20
LINE_CHARS_MAX = 300
WHO = "dlrover-run:"


def words(records: Sequence[Record], state: JobState, where: str) -> Iterator[str]:
    """The lines to print. ``where`` are the options with which `dlrover` finds the log, empty for the default one."""
    job, incidents = state.job, state.failures.number
    if job.state == "failed":
        yield from _last_lines(records)
        yield f"{WHO} root cause: {job.root}"
    say = f"{WHO} job {job.name} {job.state}"
    if job.reason and job.state in ("failed", "stopped", "stopping"):
        say += f" ({job.reason})"
    if incidents:
        say += f"; {incidents} incident{'s' * (incidents > 1)}, see: dlrover report {job.name}{where}"
    yield say


def _last_lines(records: Sequence[Record]) -> Iterator[str]:
    """What the rank that began the end wrote last."""
    from dlrover_core.job.failures import WorkerExited

    fact = guilty(records)
    if not isinstance(fact, WorkerExited) or not fact.tail.strip():
        return
    lines = fact.tail.rstrip().splitlines()
    yield f"{WHO} the last lines of rank {fact.rank} on {fact.node} (generation {fact.generation}):"
    if len(lines) > TAIL_LINES_MAX:
        yield "  | ..."
    yield from (f"  | {line[:LINE_CHARS_MAX]}" for line in lines[-TAIL_LINES_MAX:])


def guilty(records: Sequence[Record]) -> object:
    """The exit that `JobFailed.root` names, among the newest verdict's evidence; None if it was no worker's."""
    from dlrover_core.job.failures import Diagnosed, WorkerExited
    from dlrover_core.job.job import JobFailed

    facts = {record.seq: record.event for record in records}
    ends = [fact for fact in facts.values() if isinstance(fact, JobFailed)]
    if not ends:
        return None
    verdicts = [fact for fact in facts.values() if isinstance(fact, Diagnosed) and fact.incident == ends[-1].incident]
    evidence = [facts.get(seq) for seq in (verdicts[-1].evidence if verdicts else ())]
    for fact in evidence:
        if isinstance(fact, WorkerExited) and ends[-1].root.startswith(f"rank {fact.rank} on {fact.node}:"):
            return fact
    return None
