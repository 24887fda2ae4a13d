"""What a set waits for: the reason as a value, which the rule that waits returns and people read (`rules.reasons`)."""

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
ROOM = "room"
"""The set gave its nodes back, because the platform has no place for the others. It asks again later."""
STORE = "store"
"""No node offers a store, or rank 0's node offers none."""
PAUSE = "pause"
"""The program failed early several times, or an action asked for a pause."""
LAST_CALL = "last call"
"""The smallest world could form, and the other nodes have some time left to come."""
PLAN = "plan"
"""The running world is changed at a step boundary, which is not reached yet, or could not be chosen yet."""
GROW = "grow"
"""The running world could be larger. Other nodes have some time left to come, or rank 0's node lacks something."""
SAVE = "save"
"""An ended generation left a whole step in memory, and not all nodes have said yet what they hold."""
OF_RUNNING = (PLAN, GROW, SAVE)
"""Reasons of sets that may have a world all the same."""


class Wait(NamedTuple):
    """Why the next world of a set does not form now, or what else the set waits for.

    group: the set
    why:   the kind of reason, one of this module
    words: the reason in words
    until: when this wait ends by time alone, microseconds; 0: only an event ends it
    nodes: the nodes, or vacant places, that are awaited, where they are known
    """

    group: str
    why: str
    words: str
    until: int = 0
    nodes: tuple[str, ...] = ()
