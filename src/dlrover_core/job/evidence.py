"""What is seen about a failure beside the deaths themselves: lines of logs, the kernel's words, a hang, a failed check.

An observation is one event with everything that judging needs, so that no later table of signatures changes an old verdict.
What is seen waits, bounded in number and for `WINDOW_S`, for a death that it may explain; sources in `OPENING` are a failure
by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.evidence import SOURCES, Evidence
from dlrover_core.errors import Refused
from dlrover_core.job import job, nodes
from dlrover_core.kernel.engine import Facts, Rules
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

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


@dataclass(slots=True)
class EvidenceSlice:
    """The newest observations, oldest first."""

    recent: list[Evidence] = field(default_factory=list)


def _report(state: JobState, command: ReportEvidence, now: int) -> Iterator[Event]:
    node = nodes.present(state, command.node)
    if command.source not in SOURCES:
        raise Refused(f"node {command.node!r}: there is no source of evidence {command.source!r}")
    known = signatures.table(state.job.spec.signatures).get(command.signature)
    if known is None:
        raise Refused(f"node {command.node!r}: there is no signature {command.signature!r}")
    yield EvidenceSeen(
        command.node,
        command.source,
        known.id,
        known.verdict,
        known.confidence,
        command.text[:TEXT_MAX],
        command.rank,
        command.generation,
        min(max(command.age_us, 0), now),
        command.place[:TEXT_MAX],
        command.subject[:SUBJECT_MAX],
        node.host,
    )


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

RULES = Rules(
    decide={ReportEvidence: _report},
)
