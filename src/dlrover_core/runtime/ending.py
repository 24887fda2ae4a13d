"""Why an agent left."""

from __future__ import annotations

from typing import NamedTuple


class Ending(NamedTuple):
    """Why an agent left, for the process that started it.

    outcome: "succeeded", "failed" or "stopped": the job is over; "drained", "scaled down", "given up", "replaced", "lost",
             "leaving", "left": this node is released, the job goes on, and another agent may take its seat; empty: it left
             by its own signal, or was turned away for good
    reason:  in words
    root:    the root cause of a job that has failed
    """

    outcome: str = ""
    reason: str = ""
    root: str = ""
