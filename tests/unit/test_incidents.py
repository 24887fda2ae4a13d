"""Labelled failures, made by somebody who had not seen the patterns; `tests/incidents/README.md` says how."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from incidents import HALVES, MATCHED, Incident, Line, Score, incidents, judgement_on, lines, score, share

from dlrover_core.diagnosis.matching import Matcher
from dlrover_core.diagnosis.signatures import table

ROOT_MIN, PLACE_MIN = 0.97, 0.98


@functools.lru_cache(maxsize=1)
def known() -> tuple[tuple[Line, ...], tuple[Incident, ...]]:
    """The data, read once."""
    return tuple(lines()), tuple(incidents())


@functools.lru_cache(maxsize=1)
def matcher() -> Matcher:
    """One for all lines."""
    return Matcher(table())


@functools.lru_cache(maxsize=4)
def judged(half: str) -> tuple[tuple[Incident, Score], ...]:
    """The incidents of a half and how they were judged."""
    return tuple((one, score(one, judgement_on(one.observations))) for one in known()[1] if one.half == half)


def meaning(line: Line) -> str:
    """What is recognised in it."""
    if line.seen.source in MATCHED:
        best = matcher().best(matcher().scan(line.seen.text, line.seen.source))
        return best.signature.id if best else ""
    judgement = judgement_on([line.seen])
    return judgement.signature if judgement else ""


def test_there_are_enough_of_all_kinds() -> None:
    """At least 200 lines, 40 of them harmless, 60 incidents, 15 of them controls; every id once; both halves are well filled."""
    rows, told = known()
    assert len(rows) >= 200
    assert len({one.id for one in rows}) == len(rows)
    assert sum(not one.label for one in rows) >= 40
    assert len(told) >= 60
    assert sum(one.control for one in told) >= 15
    for counted in (Counter(one.half for one in rows), Counter(one.half for one in told)):
        assert set(counted) == set(HALVES)
        assert min(counted.values()) >= 0.35 * sum(counted.values())


@pytest.mark.parametrize("half", HALVES)
def test_lines_mean_what_they_mean(half: str) -> None:
    """Of the labelled lines of each half at least 97 % are recognised as what they are."""
    told = [(one, meaning(one)) for one in known()[0] if one.half == half]
    wrong = [
        f"{one.id}: {one.label or 'nothing'}, not {said or 'nothing'}" for one, said in told if not one.right(said)
    ]
    assert share([one.right(said) for one, said in told]) >= ROOT_MIN, "\n".join(wrong)


@pytest.mark.parametrize("half", HALVES)
def test_the_root_cause_is_found(half: str) -> None:
    """Of the incidents of each half the root cause is named in at least 97 %."""
    wrong = [f"{one.name}: {one.root}, not {found.said}" for one, found in judged(half) if not found.root]
    assert share([found.root for _, found in judged(half)]) >= ROOT_MIN, "\n".join(wrong)


@pytest.mark.parametrize("half", HALVES)
def test_the_guilty_are_named(half: str) -> None:
    """The guilty node or rank is named in at least 98 % of the incidents that have one."""
    told = [(one, found) for one, found in judged(half) if found.where is not None]
    wrong = [f"{one.name}: {one.node}/{one.rank}, not {found.said}" for one, found in told if not found.where]
    assert share([bool(found.where) for _, found in told]) >= PLACE_MIN, "\n".join(wrong)


@pytest.mark.parametrize("half", HALVES)
def test_no_host_is_blamed_for_what_no_host_did(half: str) -> None:
    """Not one eviction on the negative controls, and none of another node than the guilty one."""
    assert [f"{one.name}: {found.said}" for one, found in judged(half) if found.evicted] == []
