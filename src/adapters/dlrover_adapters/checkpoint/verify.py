"""Is every byte of a step as it was written? Reads all of it."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_adapters.checkpoint.manifests import CheckpointDamaged, CheckpointIncomplete
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.reader import Progress, StepReader

DAMAGES_MAX = 100


class Verdict(NamedTuple):
    """What was found of a step: ``size`` bytes were compared, and ``damages`` says where they are not as they were written.

    ``sealed``: it is complete. ``missing``: why it cannot be, in words.
    """

    step: int
    sealed: bool
    size: int
    damages: tuple[str, ...] = ()
    missing: str = ""

    @property
    def fine(self) -> bool:
        """Complete, and every byte as it was written."""
        return self.sealed and not self.damages and not self.missing


def verify(place: Place, step: int, progress: Progress | None = None) -> Verdict:
    """Look at all of it; the first `DAMAGES_MAX` damages are told. Raises `OSError` with the URL, and `CheckpointTooNew`."""
    try:
        reader = StepReader(place, step)
    except CheckpointIncomplete as error:
        return Verdict(step, sealed=False, size=0, missing=str(error))
    except CheckpointDamaged as error:
        return Verdict(step, sealed=False, size=0, damages=(str(error),))
    damages = []
    for one in reader.damages(progress):
        damages.append(str(one))
        if len(damages) == DAMAGES_MAX:
            break
    return Verdict(step, reader.sealed, reader.size, tuple(damages))
