"""What of the things a node sees is told, and when."""

from __future__ import annotations

from dlrover_core.diagnosis.evidence import CASC, HW, LOG, SOFT
from dlrover_core.diagnosis.sightings import (
    AGAIN_S,
    FOR_DEATHS,
    KINDS_MAX,
    MINUTE_S,
    SECOND_US,
    TEXT_MAX,
    TOLD_MAX,
    Sighting,
    Sightings,
)
from dlrover_core.diagnosis.signatures import Signature

ECC = Signature("cuda.ecc", "ECC", HW, "reset", "gpu", 0.9)
ABORTED = Signature("nccl.aborted", "aborted", CASC, "obs", "job", 0.9)
ADVICE = Signature("cuda.advice", "advice", "", "obs", "process", 0.9)
REMAP = Signature("xid.remap", "a warning", HW, "obs", "gpu", 0.5)


def at(seconds: float) -> int:
    """A time."""
    return round(seconds * SECOND_US)


def line(signature: Signature, when: float, rank: int = 0, text: str = "a line", times: int = 1) -> Sighting:
    """It was seen."""
    return Sighting(signature, LOG, text, at(when), rank, 1, times=times)


def seen(sightings: Sightings, one: Sighting) -> list[str]:
    """What is told when this is seen, at once."""
    return [told.text for told in sightings.seen(one, one.at)]


def test_the_first_is_told_and_the_rest_are_counted() -> None:
    """A rank's first line of a kind is told at once, its repetitions only with its death, by then with their number."""
    sightings = Sightings()
    assert seen(sightings, line(ECC, 1)) == ["a line"]
    assert seen(sightings, line(ECC, 2, times=36)) == []
    assert seen(sightings, line(ECC, 3, rank=1)) == ["a line"]
    assert seen(sightings, line(REMAP, 3)) == ["a line"]
    (told,) = sightings.died(1, 0, at(4))
    assert (told.text, told.times, told.at) == ("a line (37+ times)", 37, at(2))
    assert sightings.died(1, 0, at(5)) == []


def test_what_goes_on_is_told_again() -> None:
    """A leader looks ten minutes back, so what does not end is told again long before it would be forgotten."""
    sightings = Sightings()
    told = [second for second in range(600) if seen(sightings, line(ECC, second))]
    assert told == [0, AGAIN_S, 2 * AGAIN_S]


def test_consequences_wait_for_the_death_of_their_rank() -> None:
    """A line about a peer's failure is told when its own rank has died, and once for all ranks of a node."""
    sightings = Sightings()
    assert seen(sightings, line(ABORTED, 1, rank=0)) == []
    assert seen(sightings, line(ABORTED, 1, rank=1)) == []
    assert seen(sightings, line(ECC, 1, rank=1)) == ["a line"]
    assert sightings.due(at(100)) == []
    assert [one.rank for one in sightings.died(1, 1, at(101))] == [1]
    assert sightings.died(1, 0, at(101)) == []
    assert [one.rank for one in sightings.died(2, 0, at(102))] == []


def test_causes_go_before_consequences() -> None:
    """Where there is little room the dead rank's causes have it."""
    sightings = Sightings()
    seen(sightings, line(ABORTED, 1))
    seen(sightings, line(ECC, 2))
    seen(sightings, line(ECC, 3))
    assert [one.signature.id for one in sightings.died(1, 0, at(4))] == ["cuda.ecc", "nccl.aborted"]


def test_words_that_come_after_the_death_are_told_at_once() -> None:
    """The thread that reads may be slower than the kernel: what it brings of a dead rank waits for nothing."""
    sightings = Sightings()
    seen(sightings, line(ECC, 0))
    assert sightings.died(1, 0, at(1)) == []
    assert seen(sightings, line(ABORTED, 2)) == ["a line"]
    assert seen(sightings, line(ECC, 2)) == ["a line (2+ times)"]


def test_what_has_no_class_is_never_told() -> None:
    """Advice that libraries print beside every error is no evidence; a warning of the hardware is."""
    sightings = Sightings()
    assert seen(sightings, line(ADVICE, 1)) == []
    assert sightings.died(1, 0, at(2)) == []
    assert seen(sightings, line(REMAP, 3)) == ["a line"]


def test_a_node_tells_twenty_a_minute_and_keeps_some_for_deaths() -> None:
    """However much is seen, no minute has more reports than the bound; the dead still find room; the rest is told later."""
    sightings, kinds = Sightings(), [Signature(f"t.{number}", "", SOFT, "proc", "gpu", 0.5) for number in range(40)]
    told = [at(1) for one in kinds for _ in sightings.seen(line(one, 1, rank=0), at(1))]
    assert len(told) == TOLD_MAX - FOR_DEATHS
    told += [at(2) for _ in sightings.died(1, 0, at(2))]
    assert len(told) == TOLD_MAX
    while_full = sightings.due(at(3))
    assert while_full == []
    told += [at(1 + MINUTE_S) for _ in sightings.due(at(1 + MINUTE_S))]
    told += [at(2 + MINUTE_S) for _ in sightings.due(at(2 + MINUTE_S))]
    assert len(told) == len(kinds)
    for begin in told:
        assert sum(begin <= one < begin + MINUTE_S * SECOND_US for one in told) <= TOLD_MAX


def test_memory_and_text_are_bounded() -> None:
    """A program that invents subjects without end costs no memory without end, and a line of megabytes is told short."""
    sightings = Sightings()
    for number in range(3 * KINDS_MAX):
        sightings.seen(line(ECC, 1)._replace(subject=str(number)), at(1))
        sightings.died(number, 0, at(1))
    assert len(sightings._kinds) <= KINDS_MAX
    (told,) = Sightings().seen(line(ECC, 1, text="x" * 10_000_000, times=5), at(1))
    assert told.text == f"{'x' * TEXT_MAX} (5+ times)"
