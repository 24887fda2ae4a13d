"""`Incident` and `Action`, and their lifecycles as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_core.diagnosis.evidence import CASC, Evidence
from dlrover_core.job.evidence import Spent
from dlrover_core.kernel.lifecycle import Lifecycle
from dlrover_core.spec import us

# Kernel and platform report a death up to this many seconds after it.
LATE_S = 5.0

INCIDENT = Lifecycle(
    "incident",
    states=["open", "diagnosed", "acting", "held", "closed", "fatal"],
    initial="open",
    transitions=[
        {"trigger": "diagnose", "source": "open", "dest": "diagnosed"},
        {"trigger": "act", "source": ["diagnosed", "acting", "held"], "dest": "acting"},
        {"trigger": "hold", "source": ["diagnosed", "acting"], "dest": "held"},
        {"trigger": "fail", "source": "held", "dest": "fatal"},
        # From "fatal": it ended a set that the job continues without.
        {"trigger": "close", "source": ["diagnosed", "acting", "held", "fatal"], "dest": "closed"},
    ],
    ignored=[
        # A verdict may be revised in any state; only an action moves the incident.
        *[(state, "diagnose") for state in ("diagnosed", "acting", "held", "closed", "fatal")],
        ("held", "hold"),
    ],
    terminal=["closed"],
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
    # The end of an incident finishes the actions in force; superseded ones stay superseded.
    ignored=[("superseded", "finish"), ("superseded", "supersede"), ("done", "finish"), ("done", "supersede")],
    terminal=["superseded", "done"],
)


@dataclass(slots=True)
class Action:
    """One action for an incident, on ``node``. ``state``: by `ACTION`; ``budget``: what the action is charged to."""

    action: str
    node: str
    state: str = ACTION.initial
    budget: str = ""

    def fire(self, trigger: str) -> None:
        """Take a trigger of `ACTION`."""
        self.state = ACTION.fire(f"{self.action} on {self.node}", self.state, trigger)


@dataclass(slots=True)
class Incident:
    """An incident, as far as decisions need it. Fields without a line here are the newest verdict's, as in `Diagnosed`.

    opened_at:     microseconds
    cause:         the death or observation that opened it
    evidence:      records of its evidence, as far as they are remembered
    step:          the step that its generation had reached; -1: unknown
    diagnosed_seq: record of the newest verdict; 0: none
    state:         by `INCIDENT`
    actions:       oldest first
    rule:          the rule that chose the newest action
    known:         evidence that is kept to be judged again
    over_at:       when the next world formed; 0: not yet
    """

    number: int
    node: str
    generation: int
    opened_at: int
    cause: Evidence
    evidence: list[int]
    step: int = -1
    diagnosed_seq: int = 0
    verdict: str = ""
    signature: str = ""
    state: str = INCIDENT.initial
    actions: list[Action] = field(default_factory=list)
    rule: str = ""
    known: list[Evidence] = field(default_factory=list)
    over_at: int = 0
    hint: str = ""
    place: str = ""
    host: str = ""
    blamed: str = ""
    confidence: float = 0.0
    why: str = ""

    @property
    def action(self) -> str:
        """The newest action; empty before the first."""
        return self.actions[-1].action if self.actions else ""

    @property
    def end_pending(self) -> bool:
        """Does the action that ends the job wait for the rest of the evidence?"""
        return self.state == "held"

    @property
    def closed(self) -> bool:
        """Does training go on?"""
        return self.state == "closed"

    def covers(self, one: Evidence) -> bool:
        """Can this evidence belong to the incident?

        Evidence from after the next world formed belongs to the next failure; of a whole node, evidence from `LATE_S`
        later.
        """
        return not self.over_at or one.at <= self.over_at + (us(LATE_S) if one.rank < 0 else 0)

    def spent(self, name: str) -> Spent:
        """The evidence that the incident has used up. ``name``: the coupling set whose world broke."""
        return Spent(
            self.number,
            name,
            self.generation,
            self.over_at,
            self.node,
            self.cause.node,
            self.host or self.cause.host,
        )

    def tells(self, seq: int) -> bool:
        """Can this newest evidence change the verdict? Not evidence that was not news, nor a cascade where a cause is known."""
        newest = self.known[-1] if self.known else None
        return newest is not None and newest.seq == seq and (newest.verdict != CASC or self.verdict in ("", CASC))

    def fire(self, trigger: str) -> None:
        """Take a trigger of `INCIDENT`."""
        self.state = INCIDENT.fire(f"incident {self.number}", self.state, trigger)
