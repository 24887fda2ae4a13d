"""Observations of agents are recorded as evidence."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis import signatures
from dlrover_core.diagnosis.evidence import SOURCES
from dlrover_core.errors import Refused
from dlrover_core.job.evidence import SUBJECT_MAX, TEXT_MAX, EvidenceSeen, ReportEvidence
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event
from dlrover_core.rules import slots


def _report(state: JobState, command: ReportEvidence, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
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


RULES = Rules(
    decide={ReportEvidence: _report},
)
