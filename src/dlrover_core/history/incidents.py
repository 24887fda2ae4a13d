"""Incidents told end to end: what died, the verdicts, the actions with their rules, and the duration of each part.

`IncidentsBuilder` is fed the records in order, each with the state that they fold to. So the cause that it names is the one
that the engine decided by, and not a second opinion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlrover_core.diagnosis.classify import describe
from dlrover_core.history.plain import plain
from dlrover_core.job import checkpoints, evidence, incidents, job, nodes, progress, world
from dlrover_core.job.sets import NO_SETS
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record


class Judgement(NamedTuple):
    """One `Diagnosed`, with its fields. ``revises``: number of the verdict that it replaces; 0: it is the first."""

    seq: int
    at: int
    verdict: str
    signature: str
    confidence: float
    evidence: tuple[int, ...]
    revises: int
    blamed: str
    rank: int = -1
    host: str = ""
    discarded: tuple[int, ...] = ()
    why: str = ""


class Measure(NamedTuple):
    """One `ActionChosen`, with its fields."""

    seq: int
    at: int
    action: str
    node: str
    rule: str
    budget_left: int
    budget: str = ""
    budget_before: int = -1
    host: str = ""


@dataclass(slots=True)
class Story:
    """One incident. Times are microseconds by the leader's clock; 0: not yet.

    seq:                          record that opened it
    cause, cause_seq:             the root cause in words, and its record
    ranks:                        all ranks that died without being asked to
    formed_at, formed_generation: the next world
    started_at:                   when that world's workers ran
    stepped_at:                   when it made its first step
    imports_us:                   part of the down time that the first worker to step spent on imports
    steps_lost:                   as counted by the engine, or, if that is more, the distance from the highest reported step
                                  to the step that training resumed from (a dead node takes its count along); -1: unknown
    paused_us:                    how long the job was suspended meanwhile; not part of the down time
    restores:                     where its nodes resumed from, as far as reported; one node reports for all that found
                                  their own memory
    set:                          the coupling set whose world broke
    without:                      ``set`` if the job goes on without it where it fails; empty: the job fails with it
    given_up:                     the set was given up over this incident, or while it was open
    """

    number: int
    seq: int
    node: str
    generation: int
    died_at: int
    opened_at: int
    cause: str
    cause_seq: int
    ranks: list[int] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    formed_at: int = 0
    formed_generation: int = 0
    started_at: int = 0
    stepped_at: int = 0
    imports_us: int = 0
    closed_at: int = 0
    steps_lost: int = -1
    paused_us: int = 0
    restores: list[checkpoints.Restored] = field(default_factory=list)
    set: str = ""
    without: str = ""
    given_up: bool = False

    @property
    def verdict(self) -> str:
        """The class of the newest verdict."""
        return self.judgements[-1].verdict if self.judgements else ""

    @property
    def signature(self) -> str:
        """The signature of the newest verdict."""
        return self.judgements[-1].signature if self.judgements else ""

    @property
    def action(self) -> str:
        """The newest action."""
        return self.measures[-1].action if self.measures else ""

    @property
    def restored(self) -> checkpoints.Restored | None:
        """The slowest restore, which all nodes waited for."""
        return max(self.restores, key=lambda one: (checkpoints.TIERS.index(one.tier), one.took_us), default=None)

    @property
    def down_us(self) -> int | None:
        """Time from the death to the next step, without suspension; None: there was no step yet."""
        return self.stepped_at - self.died_at - self.paused_us if self.stepped_at else None


def story_values(story: Story) -> dict[str, Any]:
    """A story, with what follows from its parts."""
    derived = {
        "verdict": story.verdict,
        "signature": story.signature,
        "action": story.action,
        "down_us": story.down_us,
        "restored": plain(story.restored),
    }
    return {**plain(story), **derived}


class IncidentsBuilder:
    """All incidents of a history, by number."""

    def __init__(self) -> None:
        self.stories: dict[int, Story] = {}
        self._sets = NO_SETS
        self._open: dict[int, Story] = {}
        # By group whose script tells step numbers: the newest generation that made steps, and its highest known step.
        self._reach: dict[str, tuple[int, int]] = {}
        self._paused_at = 0

    def feed(self, state: JobState, record: Record) -> None:
        """Take in the next record; ``state`` is the fold up to and including it."""
        fact, self._sets = record.event, state.sets
        self._note_reach(fact)
        if isinstance(fact, incidents.IncidentOpened):
            self._opened(state, fact, record)
        elif isinstance(fact, incidents.WorkerExited):
            self._another(fact)
        elif isinstance(fact, (job.JobSuspended, job.JobResumed)):
            self._paused(isinstance(fact, job.JobSuspended), record.at)
        elif isinstance(fact, incidents.Diagnosed) and fact.incident in self.stories:
            self.stories[fact.incident].judgements.append(_judgement(fact, record))
            self._name_cause(state, self.stories[fact.incident])
        elif isinstance(fact, incidents.ActionChosen) and fact.incident in self.stories:
            self.stories[fact.incident].measures.append(_measure(fact, record))
        elif isinstance(fact, incidents.IncidentClosed) and fact.incident in self.stories:
            story = self.stories[fact.incident]
            story.closed_at, story.steps_lost = record.at, max(story.steps_lost, fact.steps_lost)
            self._open.pop(fact.incident, None)
        else:
            self._mending(fact, record.at)
        for story in self._open.values():
            self._name_cause(state, story)

    def _opened(self, state: JobState, fact: incidents.IncidentOpened, record: Record) -> None:
        cause = state.incidents.by_number[fact.incident].cause
        story = Story(fact.incident, record.seq, fact.node, fact.generation, cause.at, record.at, "", cause.seq)
        story.ranks.extend(fact.ranks)
        story.set = state.set_of(fact.node)
        story.without = "" if state.sets.critical(story.set) else story.set
        self.stories[fact.incident] = self._open[fact.incident] = story

    def _paused(self, begins: bool, at: int) -> None:
        for story in () if begins else self._open.values():
            story.paused_us += at - max(self._paused_at, story.died_at)
        self._paused_at = at

    def _another(self, fact: incidents.WorkerExited) -> None:
        for story in self._open.values():
            ours = (story.set, story.generation) == (self._sets.of(fact.node), fact.generation)
            if ours and not fact.asked and fact.rank not in story.ranks:
                story.ranks.append(fact.rank)

    def _mending(self, fact: object, at: int) -> None:
        if isinstance(fact, world.WorldFormed):
            for story in self._broken_before(fact.group, fact.generation):
                story.formed_at, story.formed_generation, story.started_at = at, fact.generation, 0
                story.restores.clear()
        elif isinstance(fact, world.WorkersStarted):
            for story in self._broken_before(self._sets.of(fact.node), fact.generation):
                story.started_at = at  # the last of all nodes
        elif isinstance(fact, checkpoints.Restored):
            for story in self._broken_before(self._sets.of(fact.node), fact.generation):
                story.restores.append(fact)
        elif isinstance(fact, progress.FirstStep):
            self._stepped(fact, at)
        elif isinstance(fact, job.SetGivenUp):
            for story in self._open.values():
                story.given_up = story.given_up or story.set == fact.set

    def _stepped(self, fact: progress.FirstStep, at: int) -> None:
        group = self._sets.of(fact.node)
        mended = self._broken_before(group, fact.generation)
        for story in mended:
            story.stepped_at, story.imports_us = at, fact.imports_us
        if fact.told:
            # The first incident broke the running world; later ones lost no steps.
            lost = max(0, self._reach[group][1] - (fact.step - 1)) if group in self._reach else -1
            for place, story in enumerate(mended):
                story.steps_lost = 0 if place else lost
            self._reach[group] = (fact.generation, fact.step)
        else:
            self._reach.pop(group, None)

    def _note_reach(self, fact: object) -> None:
        if isinstance(fact, (incidents.WorkerExited, world.WorkersStopped, evidence.EvidenceSeen)):
            self._reached(self._sets.of(fact.node), fact.generation, fact.step)
        elif isinstance(fact, (progress.Progressed, checkpoints.CheckpointCommitted)):
            self._reached(fact.group, fact.generation, fact.step)
        elif isinstance(fact, checkpoints.StepsHeld) and fact.steps:
            self._reached(self._sets.of(fact.node), fact.generation, fact.steps[-1])

    def _reached(self, group: str, generation: int, step: int) -> None:
        known = self._reach.get(group)
        if known is not None and known[0] == generation:
            self._reach[group] = (generation, max(known[1], step))

    def _broken_before(self, group: str, generation: int) -> list[Story]:
        """The open incidents of a group that this generation may mend: those that broke a world."""
        stories = [story for story in self._open.values() if story.set == group and story.generation < generation]
        return [story for story in stories if story.generation != incidents.ASIDE or group not in self._reach]

    @staticmethod
    def _name_cause(state: JobState, story: Story) -> None:
        known = state.incidents.by_number.get(story.number)
        if known is not None:
            story.cause_seq, story.cause = known.cause.seq, describe(known.cause)
            if not story.closed_at:
                story.died_at = known.cause.at


def _judgement(fact: incidents.Diagnosed, record: Record) -> Judgement:
    what = (fact.verdict, fact.signature, fact.confidence, fact.evidence, fact.revises, fact.blamed)
    return Judgement(record.seq, record.at, *what, fact.rank, fact.host, fact.discarded, fact.why)


def _measure(fact: incidents.ActionChosen, record: Record) -> Measure:
    what = (fact.action, fact.node, fact.rule, fact.budget_left, fact.budget, fact.budget_before, fact.host)
    return Measure(record.seq, record.at, *what)


def is_death(event: object) -> bool:
    """Is it the end of a worker or a node, asked or not?"""
    return isinstance(event, (incidents.WorkerExited, nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost))
