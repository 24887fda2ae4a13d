"""Why a group has no world: the reason as a value, which `rules.membership` gives and people read."""

from __future__ import annotations

from typing import NamedTuple

JOB = "job"
"""The job forms no worlds: it is suspended, stopping or over."""
END = "end"
"""An incident is about to fail the job."""
CHECK = "check"
"""Nodes are checked first."""
NODES = "nodes"
"""There are fewer nodes than the smallest world has."""
STORE = "store"
"""No node, or not the one of rank 0, offers a store."""
PAUSE = "pause"
"""The program has failed at once several times, or an action asked for a pause."""
LAST_CALL = "last call"
"""The smallest world could form; the other nodes get their time to come."""
PLAN = "plan"
"""The running world is changed at a step boundary, which is not reached yet."""


class Wait(NamedTuple):
    """Why the next world of a group does not form now.

    ``group``: whose world.
    ``why``: the kind of reason, one of this module.
    ``words``: the reason in words.
    ``until``: when time alone ends this wait, in microseconds; 0: only an event does.
    ``nodes``: the nodes, or vacant places, that are waited for, where they are known.
    """

    group: str
    why: str
    words: str
    until: int = 0
    nodes: tuple[str, ...] = ()
