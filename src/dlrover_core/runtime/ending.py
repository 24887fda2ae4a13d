"""Why an agent went."""

from __future__ import annotations

from typing import NamedTuple


class Ending(NamedTuple):
    """Why an agent went, for whoever keeps it.

    ``outcome``: "succeeded", "failed" (with its ``root`` cause) or "stopped": the job is over. "drained", "scaled down",
    "given up", "replaced", "lost", "leaving", "left": this node is released and the job goes on; a fresh agent may take its
    seat. Empty: its own signal, or turned away for good.
    """

    outcome: str = ""
    reason: str = ""
    root: str = ""
