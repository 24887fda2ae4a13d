"""What a run was: its outcome, its records, where its time went; and how a broken promise is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlrover_core.errors import CoreError
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.events import Origin, Record
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.scenario import Plan

Watcher = Callable[[JobState, Record], None]

# Where time goes, in reading order. They sum to the job's life.
TRAINING, REPLAY, CHECKPOINT, DEGRADED = "training", "replay", "checkpoint", "degraded"
STARTUP, DETECT, STOP, WAIT, FORM, LOAD = "startup", "detect", "stop", "wait", "form", "load"
SUSPENDED, FINISH = "suspended", "finish"
CLASSES = {
    TRAINING: "steps that had not been made before",
    DEGRADED: "what steps took longer because the world was smaller, or slow",
    CHECKPOINT: "training stands still for a checkpoint",
    REPLAY: "steps made again, and the step that a death cut short",
    STARTUP: "until the first step of all",
    DETECT: "from a death to the record of the incident",
    STOP: "from that record until the last worker is stopped",
    WAIT: "for nodes",
    FORM: "from then until all workers are started",
    LOAD: "from there until the first step is begun",
    SUSPENDED: "the job was suspended by a person",
    FINISH: "from the last step to the end of the job",
}


class Broken(CoreError, AssertionError):
    """A promise was broken: which, by which record."""

    def __init__(self, promise: str, seq: int = 0, event: str = "") -> None:
        self.promise, self.seq, self.event = promise, seq, event
        super().__init__(f"{promise} (record {seq}: {event})" if event else promise)


class Stalled(Broken):
    """The job makes no progress any more though it could, or has not ended in time: liveness is broken."""


class Input(NamedTuple):
    """A command as an engine was given it, ``at`` by its leader's clock; ``seq`` is the last record before."""

    at: int
    command: Command
    origin: Origin | None
    seq: int


class Recovery(NamedTuple):
    """One incident by phases, in seconds: found, decided, stopped, waited for nodes, formed, loaded, steps made again."""

    incident: int
    cause: str
    detect_s: float
    decide_s: float
    stop_s: float
    form_s: float
    load_s: float
    replay_s: float
    wait_s: float

    @property
    def total_s(self) -> float:
        """From the death to where training had been."""
        return sum(self[2:])


@dataclass
class Run:
    """A run that is over, at whatever level. Not every level can tell everything."""

    plan: Plan
    outcome: str
    root: str
    state: JobState
    records: list[Record] = field(default_factory=list)
    log_hash: str = ""
    events: int = 0
    virtual_s: float = 0.0
    steps: int = 0
    lost_steps: int = 0
    goodput: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict)
    struck: list[tuple[Fault, int]] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    hits: dict[tuple[str, str], int] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)

    def check(self, *invariants: Any) -> None:
        """Fold the records anew and ask every promise after every one of them. Raises `Broken`.

        A promise is a class to make one of, a function of state and record, or a tuple of such.
        """
        if not self.records and self.events:
            raise ValueError("this run kept no records (keep=False): there is nothing to check")
        promises = [one() if isinstance(one, type) else one for one in _flat(invariants)]
        state = FOLD.new()
        for record in self.records:
            FOLD.apply(state, record)
            for promise in promises:
                kept(promise, state, record)
        for promise in promises:
            end = getattr(promise, "end", None)
            if end is not None:
                try:
                    end(self)
                except AssertionError as error:
                    raise _broken(error, self.records[-1]) from error


def _flat(invariants: Iterable[Any]) -> Iterator[Any]:
    for one in invariants:
        if isinstance(one, (tuple, list)):
            yield from _flat(one)
        else:
            yield one


def kept(promise: Watcher, state: JobState, record: Record) -> None:
    """Ask one promise about one record. Raises `Broken`."""
    try:
        promise(state, record)
    except AssertionError as error:
        raise _broken(error, record) from error


def _broken(error: AssertionError, record: Record) -> Broken:
    return (
        error
        if isinstance(error, Broken)
        else Broken(str(error) or "a promise was broken", record.seq, repr(record.event))
    )
