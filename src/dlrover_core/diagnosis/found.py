"""What was found in a text, and which of it counts.

Whatever the program lived through is doubted. It counts after all where nothing else is left, or where the rest says only how
something ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from dlrover_core.diagnosis.evidence import ERROR, EXIT, LOG
from dlrover_core.diagnosis.offline import Observation

SAME_MAX, FOUND_MAX = 3, 512
"""Of one signature and rank so many are taken from a text, from its beginning and from its end; of all."""
GOES_ON_STEPS, BURST_LINES = 40, 120
"""After so many steps a run has gone on for sure. Words within `BURST_LINES` lines are of one failure."""
WENT_ON = "handled: the run went on after it"
LIVED = "lived through: the program went on to the exception that ended it"
EARLIER = "an earlier attempt's end"
# How something ended, and what is done to the rest: no reason.
ENDS = ("exit.", "slurm.cancelled", "exception.ChildFailedError", "mpi.abort", "nccl.aborted")


class Spot(NamedTuple):
    """Where something was read: file, line number, the line, and the signature found there (of an exit, empty)."""

    file: str
    number: int
    line: str
    signature: str = ""


class Found(NamedTuple):
    """Something found: at a row, and what is observed there, still on the file's own clock.

    ``vague``: a consequence of another's failure, or a symptom of many; ``telling``: an exception that says what it was.
    ``mild``: words on what a program may live through.
    """

    row: int
    seen: Observation
    signature: str
    doubted: str = ""
    shown: int = -1
    vague: bool = False
    telling: bool = False
    mild: bool = False


class Stepping(Protocol):
    """A text of a run that makes steps."""

    def steps_after(self, index: int) -> int:
        """How many steps are told of after a row."""


_Text = TypeVar("_Text", bound=Stepping)


def believed(kept: Sequence[tuple[int, _Text, Found]]) -> list[tuple[int, _Text, Found]]:
    """What counts: all that is not doubted. Where that says only how something ended, also words just before it.

    Other ranks' progress may stand between a failure's lines: a run that seems to have gone on for a few steps, and then ended
    for no other reason, ended for that one.
    """
    sure = [one for one in kept if not one[2].doubted]
    if not sure:
        return list(kept)
    telling = [found for _, _, found in sure if _tells(found)]
    if any(not found.vague for found in telling):
        return sure
    near = {
        place: found
        for place, (_, file, found) in enumerate(kept)
        if found.doubted in (WENT_ON, EARLIER) and file.steps_after(found.row) < GOES_ON_STEPS
    }
    if telling:  # only consequences and general symptoms: an exception that was handled is neither, nor their cause
        near = {
            place: found
            for place, found in near.items()
            if found.signature and not found.signature.startswith("exception.")
        }
    newest = max((found.row for found in near.values()), default=0)
    words = {place for place, found in near.items() if newest - found.row <= BURST_LINES}
    return [
        (number, file, found._replace(seen=last_word(found)) if found.doubted else found)
        for place, (number, file, found) in enumerate(kept)
        if not found.doubted or place in words
    ]


def symptoms_alone(found: Sequence[Found]) -> bool:
    """Is there nothing but symptoms, ends and consequences, of which none has words of its own to guess by? Or nothing at all?"""
    sure = [one for one in found if not one.doubted]
    return not found or (bool(sure) and all((one.vague and not one.seen.guess) or not _tells(one) for one in sure))


def _tells(found: Found) -> bool:
    """Does it say more than how something ended?"""
    if found.seen.source == ERROR and not found.signature:
        return True
    return found.seen.source != EXIT and not found.signature.startswith(ENDS) and not found.signature.endswith(".sweep")


def last_word(found: Found) -> Observation:
    """An exception that ended its rank: logs seldom tell of every rank's end."""
    raised = found.seen.source == LOG and found.signature.startswith("exception.")
    return found.seen._replace(exit_code=1) if raised else found.seen


def thinned(found: Sequence[Found]) -> list[Found]:
    """Of one signature and rank the first and the last few, so that no flood hides another failure."""
    counted: Counter[tuple[str, int, int]] = Counter()
    numbered = []
    for one in found:
        key = (one.signature or one.seen.text[-200:], one.seen.rank, one.seen.exit_code)
        counted[key] += 1
        numbered.append((one, key, counted[key]))
    kept = [one for one, key, number in numbered if number <= SAME_MAX or number > counted[key] - SAME_MAX]
    return kept if len(kept) <= FOUND_MAX else [*kept[: FOUND_MAX // 2], *kept[-FOUND_MAX // 2 :]]
