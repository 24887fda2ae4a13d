"""What is not there: saves that some rank has not made, and states that storage never took."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dlrover_core.checkpoint.arena import Control
from dlrover_core.checkpoint.slots import NOTHING

from .meeting import Meeting, MeetingFailed

BUSY = "every slot is being read; storage is slower than saves come"
HELD = "step {} of the generation that ended is kept until it is on storage, or nobody needs it there"
_log = logging.getLogger(__name__)


def why_full(control: Control, generation: int) -> str:
    """Why ``generation`` has no slot to save into, for people."""
    pinned = [stamp for slot, stamp in control.stamps() if control.pinned(slot)]
    held = max((stamp.step for stamp in pinned if stamp.generation < generation), default=NOTHING)
    return HELD.format(held) if held != NOTHING else BUSY


class Missed:
    """The steps that some rank has not saved. A rank posts what it misses before it goes on, and looks up what others miss.

    Where the store of the ranks does not answer, that is not known any more: ``unknown`` says why, until the generation ends.
    From then on only what the agents tell of each other proves that a state is whole on all ranks (`slots.choose`, not coupled).
    The other ranks find the same, since the store has gone for all; a connection that one rank alone has lost is made anew by
    its meeting.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._known: set[int] = set()
        self._attempts: dict[int, int] = {}
        self.unknown: MeetingFailed | None = None

    def tell(self, step: int) -> None:
        """Post that this rank has no state of a step."""
        if self._meeting.world > 1 and self.unknown is None:
            try:
                self._meeting.post(self._name(step), b"1")
            except MeetingFailed as error:
                self.unknown = error

    def heard(self, steps: Iterable[int]) -> set[int]:
        """Those of the steps that some rank misses; once ``unknown`` is set, those that were known before."""
        if self._meeting.world == 1:
            return set()
        asked = set(steps)
        self._known &= asked
        try:
            for step in asked - self._known if self.unknown is None else ():
                if self._meeting.look(self._name(step)) is not None:
                    self._known.add(step)
        except MeetingFailed as error:
            self.unknown = error
        return self._known

    def anew(self, step: int) -> None:
        """All ranks are to save it once more: what was told of it counts no more."""
        self._attempts = {step: self._attempts.get(step, 0) + 1}
        self._known.discard(step)

    def _name(self, step: int) -> str:
        attempt = self._attempts.get(step, 0)
        return f"missed/{step}.{attempt}" if attempt else f"missed/{step}"


class Unstored:
    """Steps that were due on storage, were overwritten in memory before it had them, and are older than what it has now."""

    def __init__(self, *, tells: bool) -> None:
        self.count = 0
        self._tells = tells
        self._doubtful: set[int] = set()

    def look(self, committed: int, overwritten: int = NOTHING) -> None:
        """Before a slot is overwritten: the newest step on storage, and the one in that slot, if it was due there."""
        late = {step for step in self._doubtful if step < committed}
        self._doubtful -= {*late, committed}
        if overwritten > committed:
            self._doubtful.add(overwritten)
        before, self.count = self.count, self.count + len(late)
        if self._tells and before.bit_length() != self.count.bit_length():  # the first, the second, the fourth ...
            _log.warning(
                "step %d was due on storage and will not be there (%d such steps by now): a newer state took its place in memory "
                "before storage had taken it; store less often, or give it one slot more",
                max(late),
                self.count,
            )

    def forget(self) -> None:
        """Training goes on from another state."""
        self._doubtful.clear()
