"""The lifecycle of a node: DLRover's status flow with its gaps closed.

Every observation has a transition from every state, because it may come at any time: repeated, late, or out of order.
"""

from __future__ import annotations

from dlrover_core.kernel.lifecycle import Lifecycle

LIFECYCLE = Lifecycle(
    "node",
    states=["planned", "pending", "running", "suspect", "lost", "succeeded", "failed", "gone"],
    initial="planned",
    transitions=[
        {"trigger": "pend", "source": ["planned", "pending"], "dest": "pending"},
        {"trigger": "run", "source": ["planned", "pending"], "dest": "running"},
        {"trigger": "silence", "source": "running", "dest": "suspect"},
        {"trigger": "hear", "source": "suspect", "dest": "running"},
        {"trigger": "lose", "source": ["planned", "pending", "running", "suspect", "failed"], "dest": "lost"},
        {"trigger": "succeed", "source": ["planned", "pending", "running", "suspect"], "dest": "succeeded"},
        {"trigger": "fail", "source": ["planned", "pending", "running", "suspect"], "dest": "failed"},
        {
            "trigger": "vanish",
            "source": ["planned", "pending", "running", "suspect", "lost", "succeeded", "failed"],
            "dest": "gone",
        },
    ],
    ignored=[
        # Repeated and late observations: a level said again, or one that a later level has overtaken.
        *[(state, "pend") for state in ("running", "suspect", "lost", "succeeded", "failed", "gone")],
        *[(state, "run") for state in ("running", "suspect", "lost", "succeeded", "failed", "gone")],
        *[(state, "silence") for state in ("planned", "pending", "suspect", "lost", "succeeded", "failed", "gone")],
        *[(state, "hear") for state in ("planned", "pending", "running", "lost", "succeeded", "failed", "gone")],
        *[(state, "succeed") for state in ("lost", "succeeded", "failed", "gone")],
        *[(state, "fail") for state in ("lost", "succeeded", "failed", "gone")],
        *[(state, "lose") for state in ("lost", "succeeded", "gone")],
        ("gone", "vanish"),
    ],
    terminal=["gone"],
)

ALIVE = ("running", "suspect")
COMING = ("planned", "pending", *ALIVE)
