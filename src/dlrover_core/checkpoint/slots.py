"""Which slot of its arena a rank may overwrite, so that some state is always whole on all ranks, whenever anything is killed.

The invariant: at every moment some state is *proven* whole on all ranks and is not being overwritten on any. A rank proves by
what it knows without asking anybody:

* The training's own collectives. Between two calls of ``step`` there is one, and a copy that is begun in one call is finished
  before the next call ends. Who is in call ``n`` has come through collective ``n``, so everybody has entered it, and has left
  call ``n - 1`` before; what was begun in call ``n - 2`` is published everywhere. That is `LAG`.
* Unless somebody left that save out, because its slots were being read, or threw it away, because the state had changed under
  it. Who does, says so to all before it leaves the call after. So ``missed`` is complete for what is proven by the rule above.
* What the agents tell of each other (``whole``), late but true. It is all there is in jobs without a collective per step.

A rank that keeps the newest state that it has proven may overwrite any older one. Newer ones are kept too, because they are about
to be proven, unless they never will be. With saves in every call, two slots hold one that is proven and one that is not yet: such
jobs need a third. tests/unit/test_slots.py goes through all that two ranks can do.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

LAG = 2
"""Calls after which a save is published everywhere, where there is a collective in each."""
NOTHING = -1


class SlotContent(NamedTuple):
    """One slot: the state after ``step`` (`NOTHING`: none that anybody may need), saved in ``call``.

    ``base``: it is what all ranks began from in this generation. ``pinned``: somebody is reading it.
    """

    step: int = NOTHING
    call: int = 0
    base: bool = False
    pinned: bool = False


def slots_for(every: int, world: int, lag: int = LAG) -> int:
    """How many slots saves in every ``every``-th call need: one to write, one that is proven, and those not proven yet."""
    return 2 + ((lag - 1) // every if world > 1 else 0)


def choose(
    slots: Sequence[SlotContent],
    *,
    call: int,
    missed: Container[int] = (),
    whole: int = NOTHING,
    coupled: bool = True,
    alone: bool = False,
    lag: int = LAG,
) -> int | None:
    """The slot to overwrite in ``call``, or None: leave this save out.

    ``missed``: steps that some rank has not saved. ``whole``: a step that is whole on all ranks. ``coupled``: there is a
    collective between two calls. ``alone``: there is one rank. Free slots first, then what is of no use to anybody, then the
    oldest.
    """

    def proven(one: SlotContent) -> bool:
        by_collectives = coupled and call - one.call >= lag and one.step not in missed
        return one.step != NOTHING and (alone or one.base or one.step == whole or by_collectives)

    newest = max((one.step for one in slots if proven(one)), default=NOTHING)
    best: tuple[int, int, int] | None = None
    for number, one in enumerate(slots):
        if one.pinned:
            continue
        if one.step == NOTHING:
            rank = 0
        elif one.step in missed and one.step != newest:
            rank = 1
        elif one.step < newest:
            rank = 2
        else:
            continue
        best = min(best or (3, 0, 0), (rank, one.step, number))
    return best[2] if best else None
