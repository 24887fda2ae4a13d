"""Whole incidents from anywhere: raw observations in, a judgement out.

What an agent, a backend and a master do while a job runs is done here in one go: words are matched with the table of signatures,
codes and reasons are looked up, and the whole is judged by the same procedure. Nothing of a job is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis import classify, signatures, vocabulary
from dlrover_core.diagnosis.evidence import ERROR, EXIT, NODE, PLATFORM, Evidence
from dlrover_core.diagnosis.matching import matcher
from dlrover_core.diagnosis.procedure import Judgement, judge
from dlrover_core.diagnosis.signatures import Signature, Table

LINE_MAX = 500
# Types that any layer raises.
GENERAL = frozenset(
    f"exception.{one}" for one in ("RuntimeError", "Exception", "OSError", "IOError", "Error", "unknown")
)
# Types that libraries raise for whatever they find: known by type alone, they mostly do not name the cause.
ANYBODYS = frozenset(
    f"exception.{one}"
    for one in (
        "AssertionError",
        "ValueError",
        "UnicodeDecodeError",
        "RecursionError",
        "InvalidArgumentError",
        "NotFoundError",
    )
)


class Observation(NamedTuple):
    """One thing seen, raw. ``at_s``: seconds on any clock that all share; ``source`` as in `evidence.SOURCES`.

    ``text``: a line, an error file's message or several lines; of a check, a hang and the like also the id of a signature.
    ``phase``, ``reason``: what a platform says of a node's end.
    ``guess``: the signature that its words are likely about, where nothing knows them (`vocabulary`).
    """

    at_s: float
    source: str
    node: str = ""
    host: str = ""
    rank: int = -1
    text: str = ""
    exit_code: int = 0
    phase: str = ""
    reason: str = ""
    step: int = -1
    guess: str = ""


def diagnose(observations: Sequence[Observation], extra: str = "") -> Judgement:
    """The judgement on an incident. ``extra``: a user's own signatures (JSON). ``Judgement.root.seq`` numbers from 1, in order.

    Raises ValueError where nothing in it is known.
    """
    return judge(told(observations, extra), signatures.table(extra))


def told(observations: Sequence[Observation], extra: str = "") -> list[Evidence]:
    """What the observations tell, numbered from 1 in their order."""
    table = signatures.table(extra)
    homes = _homes(observations)
    return [
        one
        for number, observation in enumerate(observations, 1)
        for one in evidence(table, _at_home(observation, homes), number)
    ]


def evidence(table: Table, seen: Observation, number: int) -> Iterator[Evidence]:
    """What one observation tells; nothing, if the table knows nothing in it."""
    if seen.source in (EXIT, ERROR):
        if seen.source == ERROR or seen.exit_code or seen.text:
            # An exception's own words are what they are, whatever code it ended with.
            code = seen.exit_code or 1
            said = seen.text if seen.source == ERROR else ""
            found = classify.of_exit(table, code, said, "" if said else seen.text)
            bare = found.signature.startswith("exit.")
            likely = table.get(seen.guess) if seen.guess else None
            if likely is not None and _unknown(table, found):
                found = found._replace(
                    signature=likely.id, verdict=likely.verdict, confidence=min(likely.confidence, vocabulary.GUESSED)
                )
            yield _made(seen, number, EXIT if bare else seen.source, found)
        return
    if seen.source in (PLATFORM, NODE) and (seen.phase or seen.reason or seen.exit_code):
        reason = seen.reason or seen.text
        found = classify.of_platform(table, _phase(seen.phase), seen.exit_code, reason)
        yield _made(seen, number, seen.source, found)
        return
    likely = table.get(seen.guess) if seen.guess else None
    named = table.get(seen.text.strip()) if seen.text else None
    if named is not None:
        yield _made(seen, number, seen.source, _of(named))
        return
    hits = matcher(table).scan(seen.text, seen.source)
    if likely is not None and all(_unknown(table, _of(hit.signature)) for hit in hits):
        sure = min(likely.confidence, vocabulary.GUESSED)
        yield _made(seen, number, seen.source, classify.Found(likely.id, likely.verdict, sure, line=seen.text))
        return
    for hit in hits:
        place = classify.place_of(seen.text) if hit.signature.id.startswith("exception.") else ""
        signature = hit.signature
        yield _made(
            seen,
            number,
            seen.source,
            classify.Found(signature.id, signature.verdict, signature.confidence, place, hit.subject, hit.line.strip()),
        )


def _unknown(table: Table, found: classify.Found) -> bool:
    """Is it an exception of a type that anybody raises, or of one without a row, whose words nothing knows?"""
    if not found.signature.startswith("exception."):
        return False
    known = table.by_id.get(found.signature)
    return known is None or (found.signature in GENERAL | ANYBODYS and found.confidence <= known.confidence)


def _phase(phase: str) -> str:
    """As a backend of ours says it."""
    return {"": "failed", "Failed": "failed", "deleted": "gone", "Deleted": "gone", "silent": "lost"}.get(phase, phase)


def _of(signature: Signature) -> classify.Found:
    return classify.Found(signature.id, signature.verdict, signature.confidence)


def _made(seen: Observation, number: int, source: str, found: classify.Found) -> Evidence:
    lines = [line for line in (found.line or seen.text or seen.reason).strip().splitlines() if line.strip()]
    return Evidence(
        number,
        round(seen.at_s * 1_000_000),
        seen.node,
        seen.rank,
        seen.exit_code,
        seen.step,
        lines[-1].strip()[:LINE_MAX] if lines else "",
        found.verdict,
        found.signature,
        found.confidence,
        source,
        seen.host,
        found.place,
        found.subject,
    )


def _homes(observations: Sequence[Observation]) -> dict[str, str]:
    """Which node runs on which host, and the other way round, where some observation says both."""
    homes: dict[str, str] = {}
    for one in observations:
        if one.node and one.host:
            homes.setdefault(f"node {one.node}", one.host)
            # Where several nodes share a host, what the host's kernel says is about none of them alone.
            if homes.setdefault(f"host {one.host}", one.node) != one.node:
                homes[f"host {one.host}"] = ""
    return homes


def _at_home(one: Observation, homes: dict[str, str]) -> Observation:
    if one.node and not one.host:
        return one._replace(host=homes.get(f"node {one.node}", ""))
    if one.host and not one.node:
        return one._replace(node=homes.get(f"host {one.host}", ""))
    return one
