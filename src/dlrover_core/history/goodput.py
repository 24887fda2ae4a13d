"""Goodput: the share of wall-clock time in which training made steps that it had not made before.

The measure has two names in the field. Google's "ML productivity goodput" and Meta's *effective training time ratio*, ETTR
(Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024: productive run time over
the available wall-clock time of a job run), agree on what we count: start-up, recovery and steps made again are not
productive. Time spent in a queue before the job was created is not in the log and not in the ratio.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.history.timeline import CLASSES, TRAINING, Timeline


class Goodput(NamedTuple):
    """Wall-clock time by class, in microseconds; the classes sum to ``wall_us`` exactly."""

    wall_us: int
    by_class: dict[str, int]

    @property
    def training_us(self) -> int:
        """Time in which new steps were made."""
        return self.by_class[TRAINING]

    @property
    def ratio(self) -> float:
        """Training over wall-clock time, the ETTR of this run; 0 for a job without any time."""
        return self.training_us / self.wall_us if self.wall_us else 0.0

    def share(self, kind: str) -> float:
        """The share of one class in wall-clock time."""
        return self.by_class[kind] / self.wall_us if self.wall_us else 0.0


def goodput_of(line: Timeline) -> Goodput:
    """Sum a timeline by class. Every class is named, in reading order, whether or not any time was spent in it."""
    by_class = dict.fromkeys(CLASSES, 0)
    for segment in line.segments:
        by_class[segment.kind] += segment.length_us
    return Goodput(line.wall_us, by_class)
