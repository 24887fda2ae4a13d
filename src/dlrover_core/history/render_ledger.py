"""A job's data as text for a terminal: how far they are, and the audit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlrover_core.data.streams import ENDLESS
from dlrover_core.history.audit import MISSING, TWICE, Finding, Proof
from dlrover_core.history.ledger import DataRow
from dlrover_core.history.phrases import duration, one_line
from dlrover_core.words import count

FINDINGS_MAX = 20


def lines(rows: Sequence[DataRow], now: int | None = None) -> Iterator[str]:
    """How far each dataset is. ``now``: for how long ago that is known; None: the job is over."""
    several = len({one.group for one in rows}) > 1
    for one in rows:
        yield f"{_name(one, several=several)}: {_place(one)}"
        known = f"known by step {one.step} of generation {one.generation}" if one.step >= 0 else "no state has told yet"
        ago = f", {duration(now - one.known_at)} ago" if now is not None and one.known_at else ""
        about = f"; about {one.about:,} by now" if one.about > one.samples else ""
        yield f"  {one.samples - one.left_out:,} samples in the model, {known}{ago}{about}"
        if one.per_s:
            left = f", {duration(one.left_us)} left" if one.left_us >= 0 and now is not None else ""
            yield f"  {one.per_s:,.1f} samples/s{left}"
        if one.quarantined:
            yield f"  quarantined: {named_samples(one.quarantined)}; left out {count(one.left_out, 'time')} so far"
        if one.again:
            yield f"  {count_of(one.again)} trained again after roll-backs"
        if one.broken:
            yield f"  {count(one.broken, 'state')} did not go together with others: see 'dlrover data verify'"


def row(rows: Sequence[DataRow], *, over: bool = False) -> Iterator[str]:
    """One line for each dataset, for a report. ``over``: nothing is left to do."""
    several = len({one.group for one in rows}) > 1
    for one in rows:
        again = f", {count_of(one.again)} trained again after roll-backs" if one.again else ""
        again += (
            f", {count(len(one.quarantined), 'sample')} quarantined ({named_samples(one.quarantined)})"
            if one.quarantined
            else ""
        )
        again += pace(one.per_s, 0 if over else one.left_us)
        broken = f"; {count(one.broken, 'state')} did not go together: see 'dlrover data verify'" if one.broken else ""
        yield f"{_name(one, several=several)}: {_place(one)}, {one.samples - one.left_out:,} samples in the model{again}{broken}"


def pace(per_s: float, left_us: int) -> str:
    """', 95.3 samples/s, 8.038 s left'; empty: nothing is known."""
    left = f", {duration(left_us)} left" if left_us > 0 else ""
    return f", {per_s:,.1f} samples/s{left}" if per_s else ""


def named_samples(indices: Sequence[int]) -> str:
    """'sample 13', 'samples 13, 29'."""
    return f"{'sample' if len(indices) == 1 else 'samples'} {', '.join(map(str, indices))}"


def _name(one: DataRow, *, several: bool) -> str:
    return f"{one.group}: {one_line(one.dataset, 80)}" if several else one_line(one.dataset, 80)


def _place(one: DataRow) -> str:
    if not one.size:
        return f"epoch {one.epoch + 1}, position {one.position:,}"
    if one.epochs and one.epoch >= one.epochs:
        return f"all {count(one.epochs, 'epoch')} of {one.size:,} samples"
    if one.size >= ENDLESS:
        return f"position {one.position:,} of a stream"
    of = f" of {one.epochs}" if one.epochs else ""
    return f"epoch {one.epoch + 1}{of}, position {one.position:,} of {one.size:,}"


def count_of(many: int) -> str:
    """'1 sample', '2,048 samples'."""
    return f"{many:,} sample{'' if many == 1 else 's'}"


# ---- the audit


def proofs(found: Sequence[Proof]) -> Iterator[str]:
    """The audit of each dataset."""
    several = len({one.group for one in found}) > 1
    for one in found:
        name = f"{one.group}: {one_line(one.dataset, 80)}" if several else one_line(one.dataset, 80)
        yield f"{name}: {_verdict(one)}"
        yield (
            f"  {count_of(one.samples - one.left_out)} in the model, {_up_to(one)}; "
            f"{count(one.states, 'state')} of {count(one.generations, 'generation')} told"
        )
        if one.begun:
            yield (
                f"  of them, {count_of(one.begun)} are not this log's: the dataset was added at that position, as its script's "
                "begin() said"
            )
        if one.resumed:
            yield (
                f"  {count(one.resumed, 'generation')} resumed from a state, {one.witnessed} of them from one that had told "
                "before what it had consumed"
            )
        for sample in one.quarantined:
            why = f" ({one_line(sample.why, 100)})" if sample.why else ""
            yield f"  sample {sample.sample} is quarantined{why}: left out {count(sample.times, 'time')}"
        yield from (f"  {_finding(each)}" for each in one.findings[:FINDINGS_MAX])
        if len(one.findings) > FINDINGS_MAX:
            yield f"  ... and {len(one.findings) - FINDINGS_MAX} more; --json has all"
        if one.uneven:
            yield (
                f"  {count(one.uneven, 'time')} the position did not move by one batch a step: that is no fault where not "
                "every step draws a batch of this dataset"
            )


def _up_to(one: Proof) -> str:
    if one.epochs and one.epoch >= one.epochs:
        return f"up to the end of epoch {one.epochs} of {one.epochs}"
    return f"up to position {one.position:,} of epoch {one.epoch + 1}" + (f" of {one.epochs}" if one.epochs else "")


def _verdict(one: Proof) -> str:
    if one.findings:
        return "NOT proved"
    if not one.states:
        return "nothing to prove yet: no state has told what it has consumed"
    but = f", but for {count(len(one.quarantined), 'sample')} in quarantine" if one.quarantined else ""
    return f"proved: each sample is in the lineage once{but}"


def _finding(one: Finding) -> str:
    since = f"{one.first:,} of epoch {one.epoch + 1}"
    to = f"{one.to:,} of epoch {one.to_epoch + 1}"
    words = {MISSING: "missing", TWICE: "in the model twice"}.get(one.kind, "in doubt")
    if (one.epoch, one.first) == (one.to_epoch, one.to):
        return f"from position {since}: {words}: {one_line(one.why, 300)}"
    many = f"{count_of(one.samples)}, " if one.samples else ""
    return f"{many}positions {since} to {to} exclusive: {words}: {one_line(one.why, 300)}"
