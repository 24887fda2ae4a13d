"""Events of incidents in words."""

from __future__ import annotations

from dlrover_core.diagnosis import ladder
from dlrover_core.history.phrases import duration, exit_of
from dlrover_core.history.words import Follows, Keys, Known, Words
from dlrover_core.job import incidents
from dlrover_core.words import count

VERDICTS = {
    "USER": "the program itself",
    "PLAT": "the platform took it away",
    "RES": "a resource ran out",
    "NET": "the network",
    "HW": "the hardware",
    "SOFT": "transient",
    "DATA": "the data",
    "CASC": "a consequence of another death",
}
ACTIONS = {
    ladder.RESTART_PROCESSES: "restart the processes",
    ladder.RETRY: "restart the processes after a pause",
    ladder.RELAUNCH_NODE: "relaunch the node",
    ladder.RELAUNCH_MORE_MEMORY: "relaunch the node with more memory",
    ladder.ISOLATE_HOST: "isolate the host and relaunch the node elsewhere",
    ladder.SUSPECTS: "report the suspects",
    ladder.GO_ON_SMALLER: "go on with fewer nodes",
    ladder.AWAIT_EVIDENCE: "wait for all evidence, then give up",
    ladder.FAIL_JOB: "fail the job",
    ladder.GIVE_UP_SET: "give its set up, the job goes on",
}


def verdict(name: str) -> str:
    """A verdict in words."""
    return VERDICTS.get(name, name)


def action(name: str, without: str | None = None) -> str:
    """An action in words.

    ``without``: the coupling set that the job continues without when the set fails; empty: the job fails with it; None: not
    known to the caller.
    """
    if name == ladder.AWAIT_EVIDENCE and without is not None:
        return f"wait for all evidence, then {f'go on without {without}' if without else 'fail the job'}"
    if name in ladder.ENDINGS and without:
        return f"give {without} up, the job goes on without it"
    return ACTIONS.get(name, name)


def _exited(fact: incidents.WorkerExited) -> str:
    how = exit_of(fact.exit_code) + (", as asked" if fact.asked else "")
    step = f", step {fact.step}" if fact.step >= 0 else ""
    late = f", reported {duration(fact.age_us)} later" if fact.age_us >= 1000 else ""
    return f"rank {fact.rank} on {fact.node}: {how} (generation {fact.generation}{step}){late}"


def _opened(fact: incidents.IncidentOpened) -> str:
    who = (
        f"rank{'s' if len(fact.ranks) > 1 else ''} {', '.join(map(str, fact.ranks))} on {fact.node}"
        if fact.ranks
        else f"node {fact.node}"
    )
    return f"incident {fact.incident}: {who} died in generation {fact.generation}"


def _diagnosed(fact: incidents.Diagnosed) -> str:
    revised = f", revising #{fact.revises}" if fact.revises else ""
    blamed = f", blaming node {fact.blamed}" if fact.blamed else ""
    blamed += f" on {fact.host}" if fact.host else ""
    blamed += f", rank {fact.rank}" if fact.rank >= 0 else ""
    evidence = ", ".join(f"#{seq}" for seq in fact.evidence)
    return (
        f"incident {fact.incident}: {fact.signature} ({fact.verdict}: {verdict(fact.verdict)}; confidence "
        f"{fact.confidence:g}{blamed}) from {evidence}{revised}"
    )


def _chosen(fact: incidents.ActionChosen) -> str:
    host = f" of host {fact.host}" if fact.host else ""
    budget = f"budget {fact.budget}: " if fact.budget else "budget left "
    before = f"{fact.budget_before} -> " if fact.budget_before >= 0 else ""
    return (
        f"incident {fact.incident}: {fact.action} ({action(fact.action)}) for {fact.node}{host}; "
        f"rule {fact.rule}; {budget}{before}{fact.budget_left}"
    )


def _closed(fact: incidents.IncidentClosed) -> str:
    if fact.down_us < 0:
        return f"incident {fact.incident} is over: its set is given up, the job goes on without it"
    lost = ", no step lost"
    if fact.steps_lost:
        lost = f", {count(fact.steps_lost, 'step')} to make again" if fact.steps_lost > 0 else ""
    return f"incident {fact.incident} is over: {duration(fact.down_us)} from death to next step{lost}"


def _action_before(fact: incidents.ActionChosen, known: Known) -> tuple[int, ...]:
    judged = known.newest(incidents.Diagnosed, fact.incident)
    # Else it is a final action that was held: time, or the last rank's word, released it.
    return () if known.cause == judged else (known.newest(incidents.ActionChosen, fact.incident), judged)


WORDS: Words = {
    incidents.WorkerExited: _exited,
    incidents.IncidentOpened: _opened,
    incidents.Diagnosed: _diagnosed,
    incidents.ActionChosen: _chosen,
    incidents.IncidentClosed: _closed,
}

KEYS: Keys = dict.fromkeys(
    (incidents.IncidentOpened, incidents.Diagnosed, incidents.ActionChosen), lambda fact: fact.incident
)
FOLLOWS: Follows = {
    incidents.Diagnosed: lambda fact, _: (*fact.evidence, fact.revises),
    incidents.ActionChosen: _action_before,
    incidents.IncidentClosed: lambda fact, known: (known.newest(incidents.IncidentOpened, fact.incident),),
}
