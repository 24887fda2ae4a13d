"""The last words of `dlrover-run`: how the job ended, and of a failure first what began it.

The order is that of a reader's questions: what was the cause, what did it say, who else failed, where is the rest of the
output, what was tried, what to do next. Everything is taken from the job's log; worker output may not steer the terminal.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dlrover_adapters.cli.settings import Settings
    from dlrover_core.job.incidents import WorkerExited
    from dlrover_core.job.state import JobState
    from dlrover_core.kernel.events import Record

TAIL_LINES_MAX = 20
LINE_CHARS_MAX = 300
OTHERS_MAX = 8
ATTEMPTS_MAX = 6
WHO = "dlrover-run:"

_TRIED = {
    "RESTART_PROCESSES": "restart of the processes",
    "RELAUNCH_NODE": "relaunch of a node",
    "GO_ON_SMALLER": "going on without a node",
}


class OutputFolder(NamedTuple):
    """Where workers' output stays: ``folder`` is empty if it does not. ``label``: how a run's folder begins."""

    folder: str = ""
    label: str = ""

    def of(self, run: str, node: str, attempt: int, local_rank: int) -> str:
        """The folder of one rank in one attempt."""
        name = f"{self.label}_{run}_{node}".replace(os.sep, "-")
        return os.path.join(self.folder, name, f"attempt_{attempt}", str(local_rank))


def kept_by(settings: Settings) -> OutputFolder:
    """Where this run's workers write."""
    asked = any((*settings.redirects, *settings.tee))
    return OutputFolder(settings.log_dir or "" if asked else "", settings.run_id or settings.job.job)


def words(
    records: Sequence[Record], state: JobState, where: str, kept: OutputFolder | None = None, place: str = ""
) -> Iterator[str]:
    """The lines to print.

    ``where`` are the options with which `dlrover` finds the log, empty for the default one. ``place``: what `dlrover` calls the
    job elsewhere, in place of its name and ``where``, as ``k8s:ml/train`` where the log lies in a pod.
    """
    job, incidents = state.job, state.incidents.number
    called = place or f"{job.name}{where}"
    if job.state == "failed":
        yield from _failure(_this_run(records), state, called, kept or OutputFolder())
    say = f"{WHO} job {job.name} {job.state}"
    if job.reason and job.state in ("failed", "stopped", "stopping"):
        say += f" ({job.reason})"
    if incidents:
        say += f"; {_count(incidents, 'incident')}, see: dlrover report {called}"
    yield say


def _failure(records: Sequence[Record], state: JobState, called: str, kept: OutputFolder) -> Iterator[str]:
    yield f"{WHO} root cause: {_line(state.job.root)}"
    culprit = guilty(records)
    if culprit is not None:
        yield from _details(records, state, culprit, kept)
        yield from _last_lines(culprit)
        yield from _others(records, culprit)
    yield from _attempts(records)
    yield f"{WHO} next: dlrover explain {called}"


def _this_run(records: Sequence[Record]) -> Sequence[Record]:
    """The records of the newest run: a log may hold those of earlier ones under the same name."""
    from dlrover_core.job.job import JobCreated

    begins = [place for place, record in enumerate(records) if isinstance(record.event, JobCreated)]
    return records[begins[-1] :] if begins else records


def guilty(records: Sequence[Record]) -> Record | None:
    """The exit that `JobFailed.root` names, among the newest verdict's evidence; None if it was no worker's."""
    from dlrover_core.job.incidents import Diagnosed, WorkerExited
    from dlrover_core.job.job import JobFailed

    ends = [record.event for record in records if isinstance(record.event, JobFailed)]
    if not ends:
        return None
    verdicts = [
        one.event for one in records if isinstance(one.event, Diagnosed) and one.event.incident == ends[-1].incident
    ]
    seqs = verdicts[-1].evidence if verdicts else ()
    for record in records:
        fact = record.event
        if (
            record.seq in seqs
            and isinstance(fact, WorkerExited)
            and ends[-1].root.startswith(f"rank {fact.rank} on {fact.node}:")
        ):
            return record
    return None


def _exit(record: Record) -> WorkerExited:
    from dlrover_core.job.incidents import WorkerExited

    assert isinstance(record.event, WorkerExited)
    return record.event


def _details(records: Sequence[Record], state: JobState, culprit: Record, kept: OutputFolder) -> Iterator[str]:
    """What torchrun's table says of a failure, and where the output is."""
    from dlrover_core.history.phrases import exit_of

    fact = _exit(culprit)
    died = datetime.fromtimestamp((culprit.at - fact.age_us) / 1e6).astimezone()
    local_rank, attempt = _place(records, fact)
    if kept.folder:
        logs = kept.of(state.job.run, fact.node, attempt, local_rank)
    else:
        logs = "not kept; -r 3 --log-dir DIR keeps every rank's output, -t 3 shows it too"
    rows = {
        "time": died.isoformat(sep="_", timespec="seconds"),
        "host": _hosts(records).get(fact.node, "unknown"),
        "rank": f"{fact.rank} (local rank {local_rank}, node {fact.node})",
        "exitcode": str(fact.exit_code) + (f" ({exit_of(fact.exit_code)})" if fact.exit_code < 0 else ""),
        "error": _line(fact.error.strip().splitlines()[-1]) if fact.error.strip() else "",
        "step": str(fact.step) if fact.step >= 0 else "",
        "attempt": f"{attempt} (generation {fact.generation})",
        "logs": logs,
    }
    yield from (f"  {name:<9}: {text}" for name, text in rows.items() if text)


def _place(records: Sequence[Record], fact: WorkerExited) -> tuple[int, int]:
    """The local rank, and which attempt of this run it was: the first is 0."""
    from dlrover_core.job.job import JobCreated
    from dlrover_core.job.ranges import from_ranges
    from dlrover_core.job.sets import NO_SETS, sets_of
    from dlrover_core.job.world import WorldFormed

    specs = [one.event.spec for one in records if isinstance(one.event, JobCreated)]
    name = (sets_of(specs[-1]) if specs else NO_SETS).of(fact.node)
    worlds = [one.event for one in records if isinstance(one.event, WorldFormed) and one.event.group == name]
    for attempt, formed in enumerate(worlds):
        if formed.generation == fact.generation:
            member = next((one for one in from_ranges(formed.group, formed.members) if one.node == fact.node), None)
            return fact.rank - (member.first_rank if member is not None else 0), attempt
    return fact.rank, 0


def _hosts(records: Sequence[Record]) -> dict[str, str]:
    from dlrover_core.job.nodes import NodeJoined

    return {one.event.node: one.event.host for one in records if isinstance(one.event, NodeJoined)}


def _last_lines(culprit: Record) -> Iterator[str]:
    """What the rank that began the end wrote last."""
    from dlrover_core.history.phrases import safe

    fact = _exit(culprit)
    lines = safe(fact.tail).rstrip().splitlines()
    if not lines:
        return
    yield f"{WHO} the last lines of rank {fact.rank} on {fact.node} (generation {fact.generation}):"
    if len(lines) > TAIL_LINES_MAX:
        yield "  | ..."
    yield from (f"  | {line[:LINE_CHARS_MAX]}" for line in lines[-TAIL_LINES_MAX:])


def _others(records: Sequence[Record], culprit: Record) -> Iterator[str]:
    """Who else failed in the same generation: mostly because of it."""
    from dlrover_core.history.phrases import exit_of
    from dlrover_core.job.incidents import WorkerExited

    found: dict[int, str] = {}
    for record in records:
        fact = record.event
        if not isinstance(fact, WorkerExited) or fact.generation != _exit(culprit).generation:
            continue
        if fact.rank != _exit(culprit).rank and not (fact.asked and not fact.error):
            said = [line for line in (fact.error or fact.tail).strip().splitlines() if line.strip()][-1:]
            about = f": {_line(said[0])}" if said else ""
            how = "stopped after it" if fact.asked else exit_of(fact.exit_code)
            found[fact.rank] = f"  rank {fact.rank} on {fact.node}: {how}{about}"
    if found:
        yield f"{WHO} other failures of the same attempt:"
        yield from (found[rank] for rank in sorted(found)[:OTHERS_MAX])
        if len(found) > OTHERS_MAX:
            yield f"  and {len(found) - OTHERS_MAX} more ranks"


def _attempts(records: Sequence[Record]) -> Iterator[str]:
    """What failed before, and what was done about it."""
    from dlrover_core.job.incidents import ActionChosen, Diagnosed, IncidentOpened

    opened = {one.event.incident: one.event for one in records if isinstance(one.event, IncidentOpened)}
    verdicts = {one.event.incident: one.event.signature for one in records if isinstance(one.event, Diagnosed)}
    actions = {one.event.incident: one.event for one in records if isinstance(one.event, ActionChosen)}
    done = Counter(one.action for one in actions.values() if one.action in _TRIED)
    if not done:
        return
    yield f"{WHO} tried: " + ", ".join(f"{_TRIED[name]} {_times(times)}" for name, times in done.items())
    before = [number for number in opened if number in actions and actions[number].action in _TRIED]
    if len(before) > ATTEMPTS_MAX:
        yield f"  {len(before) - ATTEMPTS_MAX} earlier incidents"
    for number in before[-ATTEMPTS_MAX:]:
        fact = opened[number]
        who = f"rank {fact.ranks[0]} on {fact.node}" if fact.ranks else f"node {fact.node}"
        yield f"  incident {number}, generation {fact.generation}: {who}: {verdicts.get(number, 'unknown')}"


def _line(text: str) -> str:
    from dlrover_core.history.phrases import one_line

    return one_line(text, LINE_CHARS_MAX)


def _count(number: int, one: str) -> str:
    return f"{number} {one}{'s' * (number != 1)}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
