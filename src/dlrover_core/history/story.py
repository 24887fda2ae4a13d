"""One incident as a story: evidence in order of time, discarded evidence with reasons, verdicts, actions, cost.

Everything comes from the log. Of discarded evidence the log holds the numbers. The reasons come from the procedure that
discarded it, run again on the same evidence; where the procedure differs today, they are given in general words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.diagnosis import evidence as kinds
from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.procedure import judge
from dlrover_core.history.headline import Headlines
from dlrover_core.history.incidents import IncidentsBuilder, Story, story_values
from dlrover_core.history.phrases import exit_of
from dlrover_core.history.plain import plain
from dlrover_core.job import evidence, hosts, incidents, job, nodes, world
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.events import Record

WORDS_MAX = 20
_SEEN = (incidents.WorkerExited, nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, evidence.EvidenceSeen)
_FOLLOWS = (
    hosts.HostQuarantined,
    hosts.HostReleased,
    nodes.NodePlanned,
    world.WorldFormed,
    job.JobFailed,
    job.SetGivenUp,
)


class Seen(NamedTuple):
    """One piece of evidence.

    at:    when it happened, microseconds by the leader's clock
    rank:  global rank; -1: the node as a whole
    words: the last lines of a dead worker
    aside: why it is no cause; empty: it may be the cause
    """

    seq: int
    at: int
    source: str
    node: str
    host: str
    rank: int
    text: str
    signature: str
    words: tuple[str, ...] = ()
    aside: str = ""


class IncidentTold(NamedTuple):
    """A whole incident.

    began:   when the run began, microseconds
    titles:  titles of the signatures in it
    follows: records that followed from its verdicts and actions at once
    end:     the end of the run; None: it has not ended
    """

    job: str
    began: int
    story: Story
    headline: str
    evidence: tuple[Seen, ...]
    titles: Mapping[str, str]
    follows: tuple[Record, ...]
    end: Record | None


def incident_of(records: Iterable[Record], number: int = 0) -> IncidentTold | None:
    """The story of an incident; None: the log has no incident of that number.

    Without a ``number``: the incident that the last run failed over, else its newest; None: it ended without either.
    """
    teller = _Teller()
    for record in records:
        teller.feed(record)
    return teller.told(number or teller.newest())


class _Teller:
    """Reads a whole log once."""

    def __init__(self) -> None:
        self._state: JobState = FOLD.new()
        self._builder, self._headlines = IncidentsBuilder(), Headlines()
        self._lines: dict[int, str] = {}
        self._seen: dict[int, Record] = {}
        self._hosts: dict[int, str] = {}
        self._evidence: dict[int, kinds.Evidence] = {}
        # Evidence that joined an incident after its last verdict and changed nothing, kept as long as the engine keeps it.
        self._later: dict[int, tuple[int, ...]] = {}
        self._runs: dict[int, tuple[str, int]] = {}
        self._run: tuple[str, int] = ("", 0)
        self._follows: dict[int, list[Record]] = {}
        self._planned: dict[str, int] = {}
        self._end: Record | None = None
        self._last = 0
        self._ends: dict[int, Record] = {}

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact = record.event
        if isinstance(fact, _SEEN):
            # Read before the record is applied, because a node that is gone has no host any more.
            self._seen[record.seq] = record
            self._hosts[record.seq] = self._state.hosts.host_of(fact.node)
        FOLD.apply(self._state, record)
        if isinstance(fact, _SEEN):
            self._note(fact, record)
        self._builder.feed(self._state, record)
        line = self._headlines.feed(self._state, record)
        if line is not None:
            self._lines[line.incident] = line.text
        if isinstance(fact, job.JobCreated):
            self._run, self._last, self._end = (fact.job, record.at), 0, None
        elif isinstance(fact, incidents.IncidentClosed) and fact.incident in self._state.incidents.by_number:
            self._later[fact.incident] = tuple(self._state.incidents.by_number[fact.incident].evidence)
        elif isinstance(fact, incidents.IncidentOpened):
            self._last = fact.incident
            self._runs[fact.incident] = self._run
        elif isinstance(fact, (job.JobSucceeded, job.JobFailed, job.JobStopped, job.JobAbandoned)):
            self._end = record
            self._ends.update({number: record for number in self._runs if number not in self._ends})
        if isinstance(fact, _FOLLOWS) and record.cause:
            self._follows.setdefault(record.cause, []).append(record)
        if isinstance(fact, nodes.NodePlanned):
            self._planned[fact.node] = record.cause
        elif isinstance(fact, nodes.NodeJoined) and fact.seat.startswith(nodes.STANDBY_SEAT):
            self._follows.setdefault(self._planned.get(fact.node, 0), []).append(record)

    def _note(self, fact: object, record: Record) -> None:
        """Keep what the engine judged by, so that this story judges by the same evidence."""
        death = self._state.incidents.deaths.get(record.seq)
        if isinstance(fact, evidence.EvidenceSeen):
            self._evidence[record.seq] = evidence.of(fact, record)
        elif death is not None:
            self._evidence[record.seq] = death

    def newest(self) -> int:
        """The incident that is worth explaining; a run that ended for another reason has none."""
        if self._end is not None and isinstance(self._end.event, job.JobFailed):
            return self._end.event.incident
        return self._last

    def told(self, number: int) -> IncidentTold | None:
        """The story of the incident of that number."""
        story = self._builder.stories.get(number)
        if story is None:
            return None
        name, began = self._runs.get(number, self._run)
        seqs = {seq for judged in story.judgements for seq in (*judged.evidence, *judged.discarded)} | {story.cause_seq}
        known = self._state.incidents.by_number.get(number)
        seqs.update(known.evidence if known is not None else self._later.get(number, ()))
        aside = self._aside(story, sorted(seqs))
        seen = [self._piece(self._seen[seq], aside.get(seq, "")) for seq in sorted(seqs) if seq in self._seen]
        causes = {*(one.seq for one in story.judgements), *(one.seq for one in story.measures), *seqs}
        return IncidentTold(
            name,
            began,
            story,
            self._lines.get(number, ""),
            tuple(sorted(seen, key=lambda one: (one.at, one.seq))),
            self._titles([one.signature for one in seen] + [judged.signature for judged in story.judgements]),
            tuple(sorted((one for cause in causes for one in self._follows.get(cause, ())), key=lambda one: one.seq)),
            self._ends.get(number),
        )

    def _titles(self, names: Sequence[str]) -> Mapping[str, str]:
        known = signatures.table(self._state.job.spec.signatures)
        found = {name: known.get(name) for name in sorted(set(names)) if name}
        return {name: one.title for name, one in found.items() if one is not None}

    def _aside(self, story: Story, seqs: Sequence[int]) -> Mapping[int, str]:
        """Why each piece of evidence was discarded by the newest verdict."""
        dropped = story.judgements[-1].discarded if story.judgements else ()
        said: Mapping[int, str] = {}
        known = [self._evidence[seq] for seq in seqs if seq in self._evidence]
        if dropped and known:
            said = dict(judge(known, signatures.table(self._state.job.spec.signatures)).discarded)
        return {seq: said.get(seq) or self._in_general(seq, story) for seq in dropped}

    def _in_general(self, seq: int, story: Story) -> str:
        one = self._evidence.get(seq)
        if one is not None and one.verdict == kinds.CASC:
            return "a consequence of another end"
        return f"weaker evidence than #{story.cause_seq}"

    def _piece(self, record: Record, aside: str) -> Seen:
        fact, known = record.event, self._evidence.get(record.seq)
        host = self._hosts.get(record.seq, "")
        if isinstance(fact, incidents.WorkerExited):
            seen = _exit(fact, record, host)
        elif isinstance(fact, evidence.EvidenceSeen):
            told = (fact.source, fact.node, fact.host or host, fact.rank, fact.text, fact.signature)
            seen = Seen(record.seq, record.at - fact.age_us, *told)
        else:
            seen = _node(fact, record, host)
        return seen._replace(aside=aside, signature=known.signature if known is not None else seen.signature)


def _exit(fact: incidents.WorkerExited, record: Record, host: str) -> Seen:
    """A death and the worker's last words: its error file's message, else its last lines."""
    lines = [line.rstrip() for line in (fact.error or fact.tail).splitlines() if line.strip()]
    last = f": {lines[-1].strip()}" if lines and (fact.error or fact.exit_code > 0) else ""
    step = f" at step {fact.step}" if fact.step >= 0 else ""
    text = f"{exit_of(fact.exit_code)}{', as asked' if fact.asked else ''}{step}{last}"
    source = kinds.ERROR if fact.error else kinds.EXIT
    words = tuple(lines[-WORDS_MAX:]) if len(lines) > 1 else ()
    return Seen(record.seq, record.at - fact.age_us, source, fact.node, host, fact.rank, text, "", words)


def _node(fact: object, record: Record, host: str) -> Seen:
    assert isinstance(fact, (nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost))
    if isinstance(fact, nodes.NodeFailed):
        text = f"the node failed: {exit_of(fact.exit_code)}{', ' + fact.reason if fact.reason else ''}"
    else:
        how = "the node is gone" if isinstance(fact, nodes.NodeGone) else "the node was given up"
        text = f"{how}{': ' + fact.reason if fact.reason else ''}"
    source = kinds.PLATFORM if fact.reason else kinds.NODE
    return Seen(record.seq, record.at, source, fact.node, host, -1, text, "")


def incident_values(told: IncidentTold) -> dict[str, Any]:
    """An incident's story: the evidence in order, verdicts and actions within ``story``, what followed, how it ended."""
    values: dict[str, Any] = plain(told)
    values["story"] = story_values(told.story)
    return values
