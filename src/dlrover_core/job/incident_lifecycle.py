"""An incident and an action, and the lives of both as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_core.diagnosis.evidence import CASC, Evidence
from dlrover_core.job.evidence import Spent
from dlrover_core.job.names import group_of
from dlrover_core.kernel.lifecycle import Lifecycle
from dlrover_core.spec import us

# A node's kernel and its platform tell of a death a moment after it.
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


@dataclass(slots=True)
class Incident:
    """An incident as far as decisions need it; ``state`` by `INCIDENT`.

    ``known``: what was seen of it, to be judged again; ``evidence``: the numbers of all of it, as far as they are remembered.
    ``over_at``: when the next world formed, 0: it has not. The rest is the newest verdict's.
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
    def held(self) -> bool:
        """Does a final action wait for the rest of the evidence?"""
        return self.state == "held"

    @property
    def closed(self) -> bool:
        """Does training go on?"""
        return self.state == "closed"

    def covers(self, one: Evidence) -> bool:
        """May this be about it? What happens once the next world has formed, and `LATE_S` later, is about the next failure."""
        return not self.over_at or one.at <= self.over_at + (us(LATE_S) if one.rank < 0 else 0)

    @property
    def spent(self) -> Spent:
        """What was seen until it was over, as far as it is its own."""
        return Spent(
            self.number,
            self.group,
            self.generation,
            self.over_at,
            self.node,
            self.cause.node,
            self.host or self.cause.host,
        )

    def tells(self, seq: int) -> bool:
        """May this newest observation change the verdict? Not one that was no news, nor a cascade where a cause is known."""
        newest = self.known[-1] if self.known else None
        return newest is not None and newest.seq == seq and (newest.verdict != CASC or self.verdict in ("", CASC))

    def fire(self, trigger: str) -> None:
        """Move by `INCIDENT`."""
        self.state = INCIDENT.fire(f"incident {self.number}", self.state, trigger)

    @property
    def group(self) -> str:
        """The group whose world broke."""
        return group_of(self.node)
