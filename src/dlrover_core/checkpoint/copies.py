"""Which step all nodes copy to their partners, where each of them has only its share of the state.

Such a copy is of use only where all nodes still have that very step, in memory of their own or in a partner's, when one of them
dies. Nodes do not ask each other; by the time a word has been around, fast jobs have overwritten what it was about. So each node
*keeps* one step from being overwritten, always the roundest that it has (`roundest`): whoever looks, and whenever, comes to the
same ones, and the rounder a step is, the longer it takes until a rounder one comes. Sooner or later all keep the same one for
longer than a beat goes around. The leader sees that and says so: it is the *aim*. From then on everybody stays with it, sends a
copy, and tells when the partner has it; once all do, it is *safe*, and is kept until the next one is. So at every moment after
the first there is a step that all have at home and at their partners. A step that some have not saved is given up by those who
keep it, after `PATIENCE` beats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

NONE = -1
PATIENCE = 4
"""Two beats of everybody's, and as many to spare: all have said by then what they keep, and heard what follows."""
_ROUNDEST = 64


def _zeros(step: int, every: int) -> int:
    count = step // max(1, every)
    return (count & -count).bit_length() if count else _ROUNDEST


def roundest(held: Iterable[int], every: int, safe: int = NONE, aim: int = NONE) -> int:
    """Of the steps that a node holds the one to keep, newer than that which is ``safe`` or given up; `NONE`: there is none.

    The ``aim`` if it has it, else the one whose number of saves, one in ``every`` steps, the largest power of two divides; of
    several the newest.
    """
    newer = [step for step in held if step > safe]
    if aim > safe and aim in newer:
        return aim
    return max(newer, key=lambda step: (_zeros(step, every), step), default=NONE)


@dataclass(slots=True)
class Tally:
    """How many nodes keep which step, and how many have copies of it; the leader's, changed by one beat at a time."""

    keeping: Counter[int] = field(default_factory=Counter)
    copied: Counter[int] = field(default_factory=Counter)

    def change(self, keeps: Iterable[int], copies: Iterable[int], *, by: int) -> None:
        """One node more (``by`` 1) or less (-1) says so."""
        for counter, steps in ((self.keeping, keeps), (self.copied, copies)):
            for step in set(steps) - {NONE}:
                counter[step] += by
                if not counter[step]:
                    del counter[step]

    def aim(self, nodes: int) -> int:
        """The step that all ``nodes`` keep to be copied; `NONE`: they differ."""
        return max((step for step, count in self.keeping.items() if count == nodes), default=NONE)

    def safe(self, nodes: int) -> int:
        """The newest step that all of them have a copy of at their partners, and keep at home; `NONE`: there is none."""
        return max((step for step, count in self.copied.items() if count == nodes), default=NONE)
