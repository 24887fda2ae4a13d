"""The lives of an incident and of an action, as data; and an action."""

from __future__ import annotations

from dataclasses import dataclass

from dlrover_core.kernel.lifecycle import Lifecycle

INCIDENT = Lifecycle(
    "incident",
    states=["open", "diagnosed", "acting", "held", "closed", "fatal"],
    initial="open",
    transitions=[
        {"trigger": "diagnose", "source": "open", "dest": "diagnosed"},
        {"trigger": "act", "source": ["diagnosed", "acting", "held"], "dest": "acting"},
        {"trigger": "hold", "source": ["diagnosed", "acting"], "dest": "held"},
        {"trigger": "fail", "source": "held", "dest": "fatal"},
        {"trigger": "close", "source": ["diagnosed", "acting", "held"], "dest": "closed"},
    ],
    ignored=[
        # A verdict is revised as long as anybody looks; only an action that follows moves the incident.
        *[(state, "diagnose") for state in ("diagnosed", "acting", "held", "closed", "fatal")],
        ("held", "hold"),
        ("fatal", "close"),
    ],
    terminal=["closed", "fatal"],
)

ACTION = Lifecycle(
    "action",
    states=["chosen", "waiting", "in_force", "superseded", "done"],
    initial="chosen",
    transitions=[
        {"trigger": "take", "source": "chosen", "dest": "in_force"},
        {"trigger": "hold", "source": "chosen", "dest": "waiting"},
        {"trigger": "supersede", "source": ["in_force", "waiting"], "dest": "superseded"},
        {"trigger": "finish", "source": ["in_force", "waiting"], "dest": "done"},
    ],
    # The end of an incident ends what is still in force; what was superseded stays so.
    ignored=[("superseded", "finish"), ("superseded", "supersede"), ("done", "finish"), ("done", "supersede")],
    terminal=["superseded", "done"],
)


@dataclass(slots=True)
class Action:
    """One thing done about an incident, on ``node``; ``state`` by `ACTION`; ``budget``: what it is charged to."""

    action: str
    node: str
    state: str = ACTION.initial
    budget: str = ""

    def fire(self, trigger: str) -> None:
        """Move by `ACTION`."""
        self.state = ACTION.fire(f"{self.action} on {self.node}", self.state, trigger)
