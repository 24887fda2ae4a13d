"""Planned changes of the world: all ranks save after the same step, and wait there to be stopped.

The agent sets the word ``armed``; each rank acknowledges it between two steps, and looks at the store in every step from then on.
Once all have, rank 0 is told to ``go``: in its call ``n`` of ``step`` it posts ``n + 1``. Nobody gets past that unaware, because
there is a collective between two calls: who is in call ``n + 1`` has met rank 0 after it posted. On CUDA that is known one call
later, since hosts are ahead of their devices: there it posts ``n + 2``. Calls are counted, and not steps, since all ranks make
the same calls, whatever the numbers are that they give.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dlrover_core.checkpoint.arena import Control
from dlrover_core.checkpoint.slots import LAG

from .line import Line
from .meeting import Meeting

LOOK_S = 0.01
"""Between two looks at the word that ends the wait. Signals end it too: the process is stopped in here."""


class Boundary:
    """This rank's part in it."""

    def __init__(self, line: Line, meeting: Meeting, lag: int = LAG) -> None:
        self._line, self._meeting, self._ahead = line, meeting, lag - 1
        self._plan = 0
        self._at: int | None = None

    def reached(self, control: Control, call: int) -> int:
        """The plan whose boundary this call is; 0: none. Costs a look at a word, and while a plan is armed one at the store."""
        armed = control.armed
        if not armed:
            self._plan = 0
            return 0
        if armed != self._plan:
            self._plan, self._at = armed, None
            control.acked = armed
            self._line.acked(armed)
        if self._at is None:
            if self._meeting.rank == 0:
                self._choose(control, armed, call)
            else:
                told = self._meeting.look(f"boundary/{armed}")
                self._at = int(told) if told is not None else None
        return armed if self._at is not None and call >= self._at else 0

    def _choose(self, control: Control, armed: int, call: int) -> None:
        """By rank 0. Alone it need not warn anybody."""
        if control.go != armed:
            return
        alone = self._meeting.world == 1
        self._at = call if alone else call + self._ahead
        self._meeting.post(f"boundary/{armed}", str(self._at).encode())

    def wait(self, control: Control, plan: int, step: int, stopped: Callable[[], bool]) -> None:
        """The state after ``step`` is published: say so, and wait until this process is stopped, or the plan is dropped."""
        control.boundary = step + 1
        self._line.boundary(plan, step)
        never = threading.Event()
        while control.armed == plan and not stopped():
            never.wait(LOOK_S)
        control.boundary = 0
        self._plan, self._at = 0, None
