"""Poison: what follows from a failure that had samples in work, and what agents are told to leave out."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.data.in_work import parsed
from dlrover_core.data.poison import QUARANTINED_MAX, Spot, nameable
from dlrover_core.diagnosis.evidence import DATA, RES, SOFT, USER
from dlrover_core.job import incidents
from dlrover_core.job.poison import (
    AGAIN,
    ENDS,
    FIRST,
    NARROWED,
    QUARANTINED,
    STUCK,
    Hit,
    Poison,
    Quarantine,
    RangeQuarantined,
    RangeSuspected,
    Suspect,
    covers,
)
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.words import count

STRIKES = 2
"""The same failure quarantines a sample when it strikes it so often."""
STRIKES_OF_OTHERS = 3
"""So often where a signal ended the worker that others send, too."""
_OTHERS = ("exit.sigkill", "exit.sigterm")
ROW_MAX = 3
"""A run that has made no step may quarantine so many samples in a row. With more, the script probably fails at every sample. Once
it has made a step, a whole batch may be damaged, and only the dataset's own bound counts."""
TEXT_MAX = 500


class _Struck:
    """A failure with samples in work, compared with those before it."""

    def __init__(self, known: Poison, exit_seq: int, since: int) -> None:
        self.exit = known.exits[exit_seq]
        work = parsed(self.exit.work)
        assert work is not None, "the leader records no work that cannot be read"
        self.work, self._known = work, known
        here = Suspect(work.dataset, work.epoch, work.first, work.to, work.sample, self.exit.signature, 0, since)
        before = [one for one in known.suspects if one.signature == here.signature and covers(one, here)]
        self.before = min(before, key=lambda one: (one.to - one.first, -one.strikes), default=None)
        self.suspect = here._replace(strikes=1 + max((one.strikes for one in before), default=0))

    def finding(self, row: int, most: int) -> tuple[str, str]:
        """What follows from the failure, and why the sample may not be quarantined, if so.

        ``row``: samples in a row, as in `RangeQuarantined`. ``most``: how many may follow one another.
        """
        now, before = self.suspect, self.before
        if before is None:
            return FIRST, ""
        if now.sample < 0:
            narrowed = now.to - now.first < before.to - before.first or before.since > self.exit.generation
            return (NARROWED if narrowed else STUCK), ""
        if now.strikes < (STRIKES_OF_OTHERS if now.signature in _OTHERS else STRIKES):
            return AGAIN, ""
        why = self._forbidden(row, most)
        return (ENDS, why) if why else (QUARANTINED, "")

    def _forbidden(self, row: int, most: int) -> str:
        """Why the sample may not be quarantined; empty: it may."""
        name, done = self.work.dataset, self._known.quarantined
        already = sum(1 for one in done if one.dataset == name)
        if any((one.dataset, one.sample) == (name, self.work.sample) for one in done):
            return "it is quarantined already, and some rank trains on it all the same"
        if not self.work.most:
            return 'poison="fail" of its dataset'
        if not nameable(name):
            return "the name of its dataset is too long for a checkpoint to name a sample"
        if already >= self.work.most:
            return f"{count(already, 'sample')} of its dataset are quarantined (quarantine_max)"
        if len(done) >= QUARANTINED_MAX:
            return f"{QUARANTINED_MAX} samples are quarantined, which is the most"
        if row > most:
            return f"{most} samples in a row were quarantined, and this run has not made a step"
        return ""


def _struck(state: JobState, incident: incidents.Incident, exit_seq: int) -> _Struck | None:
    group = state.set_of(incident.node)
    known = state.poison.of(group)
    if exit_seq not in known.exits or parsed(known.exits[exit_seq].work) is None:
        return None
    return _Struck(known, exit_seq, state.world.at(group).generation + 1)


def _row(state: JobState, group: str) -> int:
    """The place that a sample quarantined now would have in a row without a new step."""
    done, cycles = state.poison.of(group).quarantined, state.incidents.of(group)
    return done[-1].row + 1 if done and (cycles.stale or cycles.failure.early) else 1


def _row_max(state: JobState, group: str) -> int:
    """How long such a row may be."""
    return QUARANTINED_MAX if state.incidents.of(group).stepped else ROW_MAX


def may_be(verdict: str, signature: str) -> bool:
    """May a sample cause such a failure? Not one of hardware, network or platform, nor a consequence of another failure."""
    return verdict in (USER, SOFT, RES, DATA) or signature.startswith("exit.")


def finding(state: JobState, incident: incidents.Incident, exit_seq: int, verdict: str, signature: str) -> Hit | None:
    """What follows for the samples from an incident with this cause; None: nothing. The same before and after it is recorded."""
    group = state.set_of(incident.node)
    hit = state.poison.hit(group, incident.number)
    if hit is not None and hit.exit == exit_seq:
        return hit
    struck = _struck(state, incident, exit_seq) if may_be(verdict, signature) else None
    return Hit(exit_seq, *struck.finding(_row(state, group), _row_max(state, group))) if struck is not None else None


def fresh(state: JobState, group: str, hit: Hit | None) -> bool:
    """Is this another sample, right after one was quarantined? Then it is no repetition of that failure."""
    return (
        hit is not None
        and hit.finding == FIRST
        and bool(state.poison.of(group).quarantined)
        and _row(state, group) <= _row_max(state, group)
    )


def where(state: JobState, group: str, hit: Hit) -> str:
    """The samples that an incident had in work, in words."""
    found = state.poison.of(group).exits.get(hit.exit)
    work = parsed(found.work) if found is not None else None
    return work.words if work is not None else "its samples"


# ---- react


def _on_diagnosed(state: JobState, fact: incidents.Diagnosed, record: Record) -> Iterator[Event]:
    incident, seq = state.incidents.by_number[fact.incident], fact.evidence[0]
    group = state.set_of(incident.node)
    known = state.poison.hit(group, fact.incident)
    found = finding(state, incident, seq, fact.verdict, fact.signature)
    struck = _struck(state, incident, seq) if found is not None and found != known else None
    if found is None or struck is None:
        return
    now, work = struck.suspect, struck.work
    if found.finding == QUARANTINED:
        yield RangeQuarantined(
            group, fact.incident, seq, work.dataset, work.sample, work.epoch, work.first, now.signature, now.strikes,
            now.since, _row(state, group), incident.cause.text[:TEXT_MAX],
        )  # fmt: skip
    else:
        yield RangeSuspected(group, fact.incident, seq, *now, found.finding, found.why)


def _known(state: JobState, group: str) -> tuple[Spot, ...]:
    return state.poison.of(group).spots


def _telling(state: JobState, group: str, spots: tuple[Spot, ...]) -> Telling:
    return Telling(Quarantine(spots) if spots else None)


def _alarm(fact: RangeQuarantined) -> str:
    return (
        f"sample {fact.sample} of dataset {fact.dataset!r} is quarantined, as {fact.signature} struck it {fact.strikes} times: "
        "all ranks leave it out from now on"
    )


RULES = Rules(
    react={incidents.Diagnosed: _on_diagnosed},
    levels={RangeQuarantined: always, RangeSuspected: always},
    tells=Tells(_known, _telling),
    alarms={RangeQuarantined: _alarm},
)
