"""How far leased datasets are: who holds what, what came back, and what may have been used twice; for people and for `--json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dlrover_core.history.phrases import duration, one_line
from dlrover_core.history.render_ledger import named_samples, pace
from dlrover_core.job.leases import KILO, Leased, Spans
from dlrover_core.job.shards import LEASE, MODEL_LEASE
from dlrover_core.job.state import JobState
from dlrover_core.words import count

SECOND_US = 1_000_000
SHOWN = 8
"""Ranges, and nodes, that are shown of each dataset."""


class HeldRow(NamedTuple):
    """What one node holds.

    node:     its name
    samples:  that it may use, and has not acknowledged
    per_s:    samples a second that it had used before its newest grant; 0: unknown
    recalled: of them, those that it was asked to give back
    """

    node: str
    samples: int
    per_s: float
    recalled: int


class LeasedRow(NamedTuple):
    """One leased dataset. Samples are counted over all epochs.

    group:      of nodes that share it
    dataset:    its name
    size:       samples of an epoch
    epochs:     how many; 0: without end
    used:       samples that were acknowledged
    held:       samples that nodes hold
    free:       samples that nobody holds; -1: without end
    nodes:      who holds what
    returns:    how often a lease was given back, or a dead worker's shards were handed out again
    again:      samples that may have been used more than once; with "lease-model", that were trained again after
                roll-backs, of those that the log knew
    repeated:   their positions over all epochs, as ranges with exclusive ends
    per_s:      samples a second since it was registered
    left_us:    time that the rest takes at that rate; -1: unknown, or without end
    known_at:   when the newest samples were acknowledged, microseconds; 0: none were
    finished:   all of it is used
    assignment: "lease"; "lease-model": what is used is what the model was trained on
    quarantined: indices of the samples that workers leave out, ascending
    """

    group: str
    dataset: str
    size: int
    epochs: int
    used: int
    held: int
    free: int
    nodes: tuple[HeldRow, ...]
    returns: int
    again: int
    repeated: Spans
    per_s: float
    left_us: int
    known_at: int
    finished: bool
    assignment: str = LEASE
    quarantined: tuple[int, ...] = ()


def leased_of(state: JobState) -> tuple[LeasedRow, ...]:
    """The leased datasets of all groups, in the order in which they were registered."""
    return tuple(
        _row(group, one)._replace(quarantined=_quarantined(state, group, one.terms.name))
        for group, datasets in state.leases.groups.items()
        for one in datasets.values()
    )


def _quarantined(state: JobState, group: str, dataset: str) -> tuple[int, ...]:
    """What any set of the group leaves out."""
    sets = [one for name, one in state.poison.by_set.items() if group in state.sets.groups(name)]
    return tuple(sorted({hit.sample for one in sets for hit in one.quarantined if hit.dataset == dataset}))


def _many(spans: Spans) -> int:
    return sum(end - start for start, end in spans)


def _row(group: str, one: Leased) -> LeasedRow:
    used, free = _many(one.acked), _many(one.free) if one.terms.epochs else -1
    nodes = tuple(
        HeldRow(
            node, _many(lease.spans), lease.rate / KILO, _many(one.recalled[node].spans) if node in one.recalled else 0
        )
        for node, lease in sorted(one.held.items())
    )
    held, took_us = sum(row.samples for row in nodes), one.acked_at - one.began_at
    per_s = used * SECOND_US / took_us if used and took_us > 0 else 0.0
    left_us = round((free + held) / per_s * SECOND_US) if free >= 0 and per_s else -1
    return LeasedRow(
        group, one.terms.name, one.terms.size, one.terms.epochs, used, held, free, nodes, one.returns, one.again,
        tuple((start, end) for start, end in one.repeated), per_s, 0 if one.finished else left_us, one.acked_at, one.finished,
        one.terms.assignment,
    )  # fmt: skip


def lines(rows: tuple[LeasedRow, ...], *, over: bool = False) -> Iterator[str]:
    """Each dataset for a terminal; ``over``: the job has ended."""
    for one in rows:
        yield row(one)
        if one.per_s:
            left = f", {duration(one.left_us)} left" if one.left_us > 0 and not over else ""
            yield f"  {one.per_s:,.1f} samples/s{left}"
        for node in one.nodes[:SHOWN]:
            pace = f", {node.per_s:,.1f} samples/s" if node.per_s else ""
            asked = f", asked to give {node.recalled:,} back" if node.recalled else ""
            yield f"  {node.node} holds {node.samples:,}{pace}{asked}"
        if len(one.nodes) > SHOWN:
            yield f"  and {len(one.nodes) - SHOWN} more nodes"
        if one.quarantined:
            yield f"  quarantined: {named_samples(one.quarantined)}"
        if one.again and one.assignment == MODEL_LEASE:
            yield f"  {_again(one)}"
        elif one.again:
            ranges = ", ".join(f"{start} to {end}" for start, end in one.repeated[:SHOWN])
            more = f" and {len(one.repeated) - SHOWN} more ranges" if len(one.repeated) > SHOWN else ""
            yield f"  {count(one.again, 'sample')} may have been used twice: positions {ranges}{more}, ends exclusive"


def rows(every: tuple[LeasedRow, ...], *, over: bool = False) -> Iterator[str]:
    """One line for each dataset, for a report. ``over``: as of `lines`."""
    for one in every:
        quarantined = f", quarantined: {named_samples(one.quarantined)}" if one.quarantined else ""
        again = f", {_again(one)}" if one.again else ""
        yield f"{row(one)}{pace(one.per_s, 0 if over else one.left_us)}{again}{quarantined}"


def _again(one: LeasedRow) -> str:
    became = "trained again after roll-backs" if one.assignment == MODEL_LEASE else "may have been used twice"
    return f"{count(one.again, 'sample')} {became}"


def row(one: LeasedRow) -> str:
    """A dataset in one line."""
    of = f" of {one.size * one.epochs:,}" if one.epochs else ""
    held = f", {one.held:,} held by {count(len(one.nodes), 'node')}" if one.held else ""
    returned = f", {count(one.returns, 'return')}" if one.returns else ""
    what = "samples in the model" if one.assignment == MODEL_LEASE else "samples used"
    return f"{one.group}: {one_line(one.dataset, 80)}: {one.used:,}{of} {what}{held}{returned} ({one.assignment})"
