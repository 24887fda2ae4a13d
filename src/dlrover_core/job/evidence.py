"""Evidence beside the deaths themselves: log lines, kernel messages, hangs, failed checks.

One event holds everything that judging needs, so a later table of signatures changes no old verdict. Evidence waits for
`WINDOW_S`, in bounded number, for a death that it may explain. Evidence from a source in `OPENING` opens an incident by
itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis.evidence import KERNEL, Evidence
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command
from dlrover_core.spec import us

# The `generation` of an incident that broke no world.
ASIDE = 0
WINDOW_S = 660.0
KEPT_MAX = 256
TEXT_MAX = 500
SUBJECT_MAX = 200


@event(66)
class EvidenceSeen(NamedTuple):
    """A node observed something, ``age_us`` before this record. Fields as in `Evidence`, and:

    rank:       global rank; -1: the node as a whole
    generation: 0: of no generation
    subject:    what it names beside: a GPU, a network port, a process, lagging ranks
    step:       step of the node's ranks; -1: unknown
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
    """An agent observed something, ``age_us`` ago, that its table of signatures knows. Fields as in `EvidenceSeen`."""

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
    """Evidence that a finished incident has used up: it must not explain a later incident.

    group:        the coupling set of the incident
    until:        end of the time that is used up, microseconds
    node:         where the incident opened
    blamed, host: node and host of the root cause; kernel messages of other hosts are not used up
    """

    incident: int
    group: str
    generation: int
    until: int
    node: str
    blamed: str
    host: str

    def takes(self, one: Evidence, name: str) -> bool:
        """Has the incident used up this evidence, observed in the set of that ``name``?"""
        if not self.until or one.at > self.until or name != self.group:
            return False
        if self.generation == ASIDE:
            return one.node == self.node
        return one.generation in (0, self.generation)

    def leaves(self, one: Evidence) -> bool:
        """Is this a kernel message of another host than the root cause's?"""
        elsewhere = one.host != self.host if one.host and self.host else one.node != self.blamed
        return one.source == KERNEL and elsewhere


@dataclass(slots=True)
class EvidenceSlice:
    """The newest evidence, oldest first."""

    recent: list[Evidence] = field(default_factory=list)


def _on_seen(slice_: EvidenceSlice, fact: EvidenceSeen, record: Record) -> None:
    slice_.recent = [one for one in slice_.recent if one.at >= record.at - us(WINDOW_S)][-KEPT_MAX + 1 :]
    slice_.recent.append(of(fact, record))


def of(fact: EvidenceSeen, record: Record) -> Evidence:
    """The `Evidence` in a record of `EvidenceSeen`."""
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
    evolve={EvidenceSeen: _on_seen},
)
