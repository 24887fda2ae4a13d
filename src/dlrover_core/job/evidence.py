"""What is seen about a failure beside the deaths themselves: lines of logs, the kernel's words, a hang, a failed check.

An observation is one event with everything that judging needs, so that no later table of signatures changes an old verdict.
What is seen waits, bounded in number and for `WINDOW_S`, for a death that it may explain; sources in `OPENING` are a failure
by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis.evidence import KERNEL, Evidence
from dlrover_core.job import job
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command
from dlrover_core.spec import us

# The generation of an incident that broke no world.
ASIDE = 0
WINDOW_S = 660.0
KEPT_MAX = 256
TEXT_MAX = 500
SUBJECT_MAX = 200


@event(66)
class EvidenceSeen(NamedTuple):
    """Something was observed on a node, ``age_us`` before this record. The fields are those of `Evidence`; ``rank`` -1: the node.

    ``generation`` 0: not of one generation; ``step``: how far its ranks had come, -1 where that is not known.
    """

    node: str
    source: str
    signature: str
    verdict: str
    confidence: float
    text: str
    rank: int = -1
    generation: int = 0
    age_us: int = 0
    place: str = ""
    subject: str = ""
    host: str = ""
    step: int = -1


@command(14)
class ReportEvidence(NamedTuple):
    """An agent saw something, ``age_us`` ago, that its table of signatures knows."""

    node: str
    source: str
    signature: str
    text: str
    rank: int = -1
    generation: int = 0
    age_us: int = 0
    place: str = ""
    subject: str = ""


class Spent(NamedTuple):
    """An incident that is over: evidence up to ``until`` is used up and must not explain a later one.

    ``node``: where the incident opened; ``blamed`` and ``host``: the root's. What the kernel said of other hosts is not used up.
    """

    incident: int
    group: str
    generation: int
    until: int
    node: str
    blamed: str
    host: str

    def takes(self, one: Evidence) -> bool:
        """Was this seen in its time, and of what it was about?"""
        if not self.until or one.at > self.until or group_of(one.node) != self.group:
            return False
        if self.generation == ASIDE:
            return one.node == self.node
        return one.generation in (0, self.generation)

    def leaves(self, one: Evidence) -> bool:
        """Does it speak of another machine than the root's, by that machine's own kernel?"""
        elsewhere = one.host != self.host if one.host and self.host else one.node != self.blamed
        return one.source == KERNEL and elsewhere


@dataclass(slots=True)
class EvidenceSlice:
    """The newest observations, oldest first."""

    recent: list[Evidence] = field(default_factory=list)


def _on_created(slice_: EvidenceSlice, fact: job.JobCreated, record: Record) -> None:
    slice_.recent.clear()


def _on_seen(slice_: EvidenceSlice, fact: EvidenceSeen, record: Record) -> None:
    slice_.recent = [one for one in slice_.recent if one.at >= record.at - us(WINDOW_S)][-KEPT_MAX + 1 :]
    slice_.recent.append(of(fact, record))


def of(fact: EvidenceSeen, record: Record) -> Evidence:
    """What a record of an observation says."""
    return Evidence(
        record.seq,
        record.at - fact.age_us,
        fact.node,
        fact.rank,
        0,
        fact.step,
        fact.text,
        fact.verdict,
        fact.signature,
        fact.confidence,
        fact.source,
        fact.host,
        fact.place,
        fact.subject,
        fact.generation,
    )


FACTS = Facts(
    kinds=(EvidenceSeen,),
    evolve={job.JobCreated: _on_created, EvidenceSeen: _on_seen},
)
