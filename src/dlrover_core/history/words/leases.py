"""Events of leases in words."""

from __future__ import annotations

from dlrover_core.history.words import Ends, Follows, Keys, Words
from dlrover_core.job import leases
from dlrover_core.words import count

SHOWN = 4


def ranges_said(packed: bytes) -> str:
    """The positions of an event, for people: the first few ranges, their ends exclusive."""
    spans = leases.spans_of(packed)
    more = f" and {len(spans) - SHOWN} more ranges" if len(spans) > SHOWN else ""
    return ", ".join(f"{start} to {end}" for start, end in spans[:SHOWN]) + more


def _many(packed: bytes) -> str:
    return count(sum(end - start for start, end in leases.spans_of(packed)), "sample")


def _granted(fact: leases.LeaseGranted) -> str:
    rate = f", at {fact.rate / leases.KILO:.4g} a second" if fact.rate else ""
    return f"{fact.node} may use {_many(fact.spans)} of {fact.dataset!r}{rate}: {ranges_said(fact.spans)}"


def _acked(fact: leases.LeaseAcked) -> str:
    return f"{fact.node} has used {_many(fact.spans)} of {fact.dataset!r}: {ranges_said(fact.spans)}"


def _returned(fact: leases.LeaseReturned) -> str:
    gives = f"{fact.node} gives {_many(fact.spans)} of {fact.dataset!r} back: {fact.why}"
    if not fact.repeated:
        return gives
    again = f"{_many(fact.repeated)} of {fact.dataset!r} may be used again: {ranges_said(fact.repeated)}"
    return f"{gives}; {again}" if fact.spans else f"{again}; {fact.node}: {fact.why}"


def _recalled(fact: leases.LeaseRecalled) -> str:
    return f"{fact.node} is to give up to {_many(fact.spans)} of {fact.dataset!r} back, for {fact.to}"


def _restored(fact: leases.LeasesRestored) -> str:
    state = f"step {fact.step} of generation {fact.of}" if fact.of else "nothing"
    trained = f"{_many(fact.spans)} of {fact.dataset!r} are in the model: {ranges_said(fact.spans)}"
    goes_on = trained if leases.spans_of(fact.spans) else f"no sample of {fact.dataset!r} is in the model"
    return f"generation {fact.generation} goes on from {state}, and {goes_on}; all others are free"


def _saved(fact: leases.LeasesSaved) -> str:
    many = count(fact.samples, "sample")
    return f"step {fact.step} of generation {fact.generation} on storage was trained on {many} of {fact.dataset!r}"


WORDS: Words = {
    leases.LeasesSaved: _saved,
    leases.LeasesRestored: _restored,
    leases.LeaseGranted: _granted,
    leases.LeaseAcked: _acked,
    leases.LeaseReturned: _returned,
    leases.LeaseRecalled: _recalled,
}
KEYS: Keys = {leases.LeaseRecalled: lambda fact: (fact.dataset, fact.node)}
ENDS: Ends = {leases.LeaseReturned: (leases.LeaseRecalled, lambda fact: (fact.dataset, fact.node))}
FOLLOWS: Follows = {
    leases.LeaseReturned: lambda fact, known: (known.newest(leases.LeaseRecalled, (fact.dataset, fact.node)),),
}
