"""Samples that ranks leave out, and samples that are suspected: what the ranks of a generation are told, and what a cut says.

A sample that makes its worker fail again and again is quarantined: all ranks leave it out, in every epoch. Until it is known
which sample of a range does so, the range is suspected: ranks divide their micro-batches at its middle, so that the next failure
halves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.data.cut import NAME_CHARS_MAX, Cut, Place
from dlrover_core.data.ranges import POSITION_MAX

VARIABLE = "DLROVER_QUARANTINE"
"""The environment variable by which an agent tells its ranks."""
MARK = "/quarantined/"
"""Between a dataset's name and the index of a sample: the place of a cut that counts how often the sample was left out."""
QUARANTINED_MAX, SUSPECTS_MAX = 32, 16
"""So many samples of one set may be quarantined, and so many ranges be suspected at a time."""
_NAME_CHARS = NAME_CHARS_MAX - len(MARK) - len(str(POSITION_MAX))


class Spot(NamedTuple):
    """A sample that is left out, or a range that is suspected.

    dataset: its name
    since:   the generation from which it holds: all ranks of one generation go by the same ones
    sample:   of the sample that is left out; -1: the positions are suspected
    epoch:   of the positions
    first:   the positions from here
    to:      up to here, exclusive
    """

    dataset: str
    since: int
    sample: int = -1
    epoch: int = 0
    first: int = 0
    to: int = 0


class Heard(NamedTuple):
    """What a rank was told of one dataset. ``left_out``: indices; ``suspected``: epoch, first and end of each range."""

    left_out: tuple[int, ...] = ()
    suspected: tuple[tuple[int, int, int], ...] = ()


def told(spots: Iterable[Spot], generation: int) -> str:
    """What the ranks of a generation are told; empty: nothing."""
    now = [one for one in spots if one.since <= generation]
    words = {
        name: [
            sorted({one.sample for one in now if one.dataset == name and one.sample >= 0}),
            sorted({one[3:] for one in now if one.dataset == name and one.sample < 0}),
        ]
        for name in sorted({one.dataset for one in now})
    }
    return json.dumps(words, separators=(",", ":")) if words else ""


def heard(text: str, dataset: str) -> Heard:
    """What `told` says of a dataset."""
    return heard_of_all(text).get(dataset, Heard())


def heard_of_all(text: str) -> dict[str, Heard]:
    """What `told` says, by dataset."""
    words = json.loads(text) if text else {}
    return {
        name: Heard(tuple(left_out), tuple((epoch, first, to) for epoch, first, to in suspected))
        for name, (left_out, suspected) in words.items()
    }


def nameable(dataset: str) -> bool:
    """Is the name short enough for a cut to name its samples?"""
    return len(dataset) <= _NAME_CHARS


def place_of_sample(dataset: str, index: int, times: int) -> Place:
    """How often a sample was left out, as a cut has it."""
    return Place(f"{dataset}{MARK}{index}", 0, times)


def sample_of(name: str) -> tuple[str, int] | None:
    """Dataset and index of the sample whose place has this name; None: it is no sample's."""
    dataset, mark, index = name.rpartition(MARK)
    return (dataset, int(index)) if mark and dataset and index.isascii() and index.isdecimal() else None


def left_out(cut: Cut, dataset: str) -> dict[int, int]:
    """Of each sample that a cut says was left out, how often it was."""
    found = {}
    for one in cut:
        sample = sample_of(one.dataset)
        if sample is not None and sample[0] == dataset:
            found[sample[1]] = one.position
    return found


def left_out_of_partitions(cut: Cut, stream: str) -> int:
    """How often messages of a stream were left out: its partitions are datasets of a cut, ``clicks/0``."""
    found = ((sample_of(one.dataset), one.position) for one in cut)
    return sum(times for sample, times in found if sample is not None and sample[0].startswith(f"{stream}/"))
