"""Events of samples that are suspected or left out, in words."""

from __future__ import annotations

from dlrover_core.data.in_work import InWork
from dlrover_core.history.words import Words
from dlrover_core.job import poison
from dlrover_core.words import count

_THEN = {
    poison.FIRST: "if the same strikes there again, the samples are at fault",
    poison.NARROWED: "from generation {} on the range is halved",
    poison.AGAIN: "once more at the same sample, and it is left out",
    poison.STUCK: "the range cannot be narrowed",
    poison.ENDS: "the job ends: {}",
}


def _suspected(fact: poison.RangeSuspected) -> str:
    where = InWork(fact.dataset, fact.epoch, fact.first, fact.to, fact.sample, 0, False).words
    then = _THEN.get(fact.finding, "").format(fact.why if fact.finding == poison.ENDS else fact.since)
    return f"{fact.signature} struck {where}, for the {_nth(fact.strikes)} time: {then}"


def _quarantined(fact: poison.RangeQuarantined) -> str:
    return (
        f"sample {fact.sample} of dataset {fact.dataset!r} (epoch {fact.epoch + 1}, position {fact.position}) is quarantined: "
        f"{fact.signature} struck it {count(fact.strikes, 'time')}; all ranks leave it out from generation {fact.since} on"
    )


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


WORDS: Words = {
    poison.RangeSuspected: _suspected,
    poison.RangeQuarantined: _quarantined,
}
