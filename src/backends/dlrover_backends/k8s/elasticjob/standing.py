"""How a job stands, for kubectl: its status with conditions, and events. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlrover_backends.k8s import endings, masters, names
from dlrover_backends.k8s.api import Json
from dlrover_backends.k8s.elasticjob import translate
from dlrover_backends.k8s.elasticjob.telling import Told

PENDING, RUNNING, SUSPENDED, SUCCEEDED, FAILED, REJECTED = (
    "Pending",
    "Running",
    "Suspended",
    "Succeeded",
    "Failed",
    "Rejected",
)
_OVER = {SUCCEEDED, FAILED}
_PHASES = {
    "created": PENDING,
    "running": RUNNING,
    "suspended": SUSPENDED,
    "stopping": RUNNING,
    "succeeded": SUCCEEDED,
    "failed": FAILED,
    "stopped": FAILED,
}
TEXT_MAX = 1024
RECONCILED = "Reconciled"
"""A condition that is there once something could not be written: False with what to do, until all is written."""
Event = tuple[str, str, str]


class Facts(NamedTuple):
    """What was observed of a job, as `reconcile.Observed` has it."""

    job: Json
    masters: Json | None
    pods: tuple[Json, ...]
    told: Told | None
    refused: str
    now: str
    unheard: str = ""


def is_over(job: Json) -> bool:
    """Has the job ended, as its status says?"""
    return (job.get("status") or {}).get("phase") in _OVER


def holds(job: Json, condition: str) -> bool:
    """Is this condition of the job's status true?"""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(one.get("type") == condition and one.get("status") == "True" for one in conditions)


def ended(made: Json) -> str:
    """How the masters' Job has ended: ``Complete`` or ``Failed``; empty: it goes on."""
    for one in (made.get("status") or {}).get("conditions") or ():
        if one.get("status") == "True" and one.get("type") in {"Complete", "Failed"}:
            return str(one["type"])
    return ""


def status(facts: Facts, job: translate.Job, plan: masters.MasterPlan) -> tuple[Json, tuple[Event, ...]]:
    """The status from now on, and what is news of it."""
    before: Json = dict(facts.job.get("status") or {})
    phase, why = _phase(facts, before)
    made = {**before, **_levels(facts, {one.name: one.nodes_max for one in job.groups}), "phase": phase}
    made["masters"] = f"{plan.called}.{plan.namespace}.svc:{masters.PORT}"
    conditions = _Conditions(before, facts)
    conditions.settle()
    conditions.set("Accepted", "True", "Accepted", "; ".join(job.notes))
    refused = facts.refused if job.suspended and phase != SUSPENDED else ""
    _told(made, conditions, facts, why, refused)
    return made, tuple(_news(before, made, why, refused, job.notes))


def rejected(facts: Facts, why: str) -> tuple[Json, tuple[Event, ...]]:
    """The status of an object that is no job. What runs of it is counted on, and ends."""
    before: Json = dict(facts.job.get("status") or {})
    conditions = _Conditions(before, facts)
    conditions.settle()
    news: list[Event] = [] if conditions.message_of(before, "Accepted") == why else [("Warning", "Rejected", why)]
    conditions.set("Accepted", "False", "Invalid", why)
    if facts.masters is None and not is_over(facts.job):
        generation = int(facts.job["metadata"].get("generation", 0))
        made = {**before, "operator": names.BY, "observedGeneration": generation, "phase": REJECTED}
        return {**made, "conditions": conditions.made()}, tuple(news)
    phase, said = _phase(facts, before)
    sizes = {name: one.nodes_max for name, one in facts.told.groups.items()} if facts.told is not None else {}
    made = {**before, **_levels(facts, sizes), "phase": phase}
    _told(made, conditions, facts, said, "")
    return made, (*news, *_news(before, made, said, "", ()))


def blocked(facts: Facts, made: Json | None, reason: str, why: str) -> tuple[Json, tuple[Event, ...]]:
    """The status where something could not be written, and its news. ``made``: the status otherwise; None: as it was."""
    before: Json = dict(facts.job.get("status") or {})
    now: Json = dict(before if made is None else made)
    conditions = _Conditions(now, facts)
    conditions.restore(RECONCILED, before)
    conditions.set(RECONCILED, "False", reason, why)
    now = {"phase": PENDING, "observedGeneration": conditions.generation, **now, "operator": names.BY}
    now["conditions"] = conditions.made()
    told = conditions.message_of(before, RECONCILED) == why[: 4 * TEXT_MAX]
    return now, () if told else (("Warning", reason, why),)


def _told(made: Json, conditions: _Conditions, facts: Facts, why: str, refused: str) -> None:
    """Conditions and times that follow from the phase."""
    phase = made["phase"]
    conditions.set("Running", _truth(phase == RUNNING), phase, why)
    conditions.set("Succeeded", _truth(phase == SUCCEEDED), phase, why if phase == SUCCEEDED else "")
    conditions.set("Failed", _truth(phase == FAILED), phase, why if phase == FAILED else "")
    paused = facts.told is not None and facts.told.state == "suspended"
    ours = _suspended(facts.job) or conditions.was("Suspended")
    if phase == SUSPENDED:
        conditions.set("Suspended", _truth(ours or not paused), "Asked" if ours else "ByHand", why)
    else:
        conditions.set("Suspended", "False", "Refused" if refused else "NotAsked", refused)
    made["conditions"] = conditions.made()
    if phase == RUNNING and not made.get("startTime"):
        made["startTime"] = facts.now
    if phase in _OVER and not made.get("completionTime"):
        made["completionTime"] = facts.now


def _phase(facts: Facts, before: Json) -> tuple[str, str]:
    """The phase, and why."""
    if before.get("phase") in _OVER:
        return str(before["phase"]), _Conditions.message_of(before, str(before["phase"]))
    told, made = facts.told, facts.masters
    end = ended(made) if made is not None else ""
    if end:
        return (SUCCEEDED, "") if end == "Complete" else (FAILED, _last_words(facts))
    if told is not None and told.state in {"succeeded", "failed", "stopped"}:
        return _PHASES[told.state], told.reason
    if made is None:
        return (
            (SUSPENDED, "no masters are made for a job that is suspended") if _suspended(facts.job) else (PENDING, "")
        )
    if told is None:
        known = str(before.get("phase") or PENDING)
        why = facts.unheard or _masters_wait(facts)
        return (known if known in {RUNNING, SUSPENDED} else PENDING), f"no master answers: {why}"
    return _PHASES.get(told.state, RUNNING), "; ".join(told.waits)


def _suspended(job: Json) -> bool:
    return (job.get("spec") or {}).get("suspend") is True


def _masters_wait(facts: Facts) -> str:
    for one in _masters_of(facts.pods):
        seen = endings.observation(one, None)
        if seen.phase == "pending" and seen.waits:
            return f"pod {one['metadata']['name']}: {seen.waits}"
    return "its pod starts"


def _masters_of(pods: tuple[Json, ...]) -> list[Json]:
    return [one for one in pods if is_master(one)]


def _last_words(facts: Facts) -> str:
    """What the newest master's pod said last, else what the Job says of its end."""
    newest = sorted(
        _masters_of(facts.pods), key=lambda one: str(one["metadata"].get("creationTimestamp")), reverse=True
    )
    for one in newest:
        for each in (one.get("status") or {}).get("containerStatuses") or ():
            if words := ((each.get("state") or {}).get("terminated") or {}).get("message"):
                return str(words).strip()[-TEXT_MAX:]
    conditions = ((facts.masters or {}).get("status") or {}).get("conditions") or ()
    return next((str(one.get("message") or "") for one in conditions if one.get("type") == "Failed"), "")[:TEXT_MAX]


def _levels(facts: Facts, groups: Mapping[str, int]) -> Json:
    """What is counted. ``groups``: the most nodes of each; empty: sizes are not known, and nothing of groups is told."""
    metadata, told = facts.job["metadata"], facts.told
    nodes = [one for one in facts.pods if is_node(one)]
    label = names.label_value(str(metadata["name"]))
    found: Json = {
        "operator": names.BY,
        "observedGeneration": int(metadata.get("generation", 0)),
        "run": str(metadata["uid"]),
        "replicas": len([one for one in nodes if _group_of(one) == translate.WORKER and lives(one)]),
        "selector": f"{names.LABEL_BY}={names.BY},{names.LABEL_JOB}={label},{names.LABEL_NODE}",
    }
    if groups:
        ready = sum(one.running for one in told.groups.values()) if told is not None else _phases(nodes)["Running"]
        found["ready"] = f"{ready}/{sum(groups.values())}"
        found["replicaStatuses"] = {
            name: _replicas([pod for pod in nodes if _group_of(pod) == name]) for name in groups
        }
    if told is not None:
        found["goodput"] = f"{told.goodput:.0%}"
        found["incidents"] = told.incidents
        if told.step >= 0:
            found["step"] = told.step
        if told.incident:
            found["lastIncident"] = told.incident[:TEXT_MAX]
    return found


def is_master(pod: Json) -> bool:
    """Is it a master's pod?"""
    return bool((pod["metadata"].get("labels") or {}).get(masters.LABEL_ROLE) == masters.ROLE)


def is_node(pod: Json) -> bool:
    """Is it a node's pod: no master's, and no standby's?"""
    return names.LABEL_NODE in (pod["metadata"].get("labels") or {})


def _group_of(pod: Json) -> str:
    name = str((pod["metadata"].get("annotations") or {}).get(names.NOTE_NODE) or "")
    return name.rsplit("-", 2)[0]


def lives(pod: Json) -> bool:
    """Has the pod not ended?"""
    return (pod.get("status") or {}).get("phase") not in {"Failed", "Succeeded"}


def _phases(pods: list[Json]) -> Counter[str]:
    return Counter(str((one.get("status") or {}).get("phase") or "Pending") for one in pods)


def _replicas(pods: list[Json]) -> Json:
    found = _phases(pods)
    keys = {"pending": "Pending", "active": "Running", "failed": "Failed", "succeeded": "Succeeded"}
    return {key: found[phase] for key, phase in keys.items()}


def _truth(value: bool) -> str:
    return "True" if value else "False"


def _news(before: Json, now: Json, why: str, refused: str, notes: tuple[str, ...]) -> list[Event]:
    """What is worth an event."""
    found: list[Event] = []
    if before.get("phase") != now["phase"]:
        kind = "Warning" if now["phase"] == FAILED else "Normal"
        found.append((kind, now["phase"], why or f"the job is {str(now['phase']).lower()}"))
    if not before and notes:
        found += [("Normal", "Note", one) for one in notes]
    if now.get("lastIncident") and now["lastIncident"] != before.get("lastIncident"):
        found.append(("Warning", "Incident", now["lastIncident"]))
    if refused and refused != _Conditions.message_of(before, "Suspended"):
        found.append(("Warning", "SuspendRefused", refused))
    return found


class _Conditions:
    """Conditions, each of which keeps the time of its last change."""

    def __init__(self, before: Mapping[str, Any], facts: Facts) -> None:
        self._known: dict[str, Json] = {one["type"]: dict(one) for one in before.get("conditions") or ()}
        self._now, self.generation = facts.now, int(facts.job["metadata"].get("generation", 0))

    @staticmethod
    def message_of(before: Mapping[str, Any], kind: str) -> str:
        """The message of a condition; empty: there is none."""
        return next((str(one.get("message", "")) for one in before.get("conditions") or () if one["type"] == kind), "")

    def was(self, kind: str) -> bool:
        """Was it true?"""
        return bool(self._known.get(kind, {}).get("status") == "True")

    def restore(self, kind: str, before: Mapping[str, Any]) -> None:
        """Let a condition be what it was before."""
        self._known.pop(kind, None)
        self._known |= {one["type"]: dict(one) for one in before.get("conditions") or () if one["type"] == kind}

    def settle(self) -> None:
        """What was in the way of writing no longer is."""
        if self._known.get(RECONCILED, {}).get("status") == "False":
            self.set(RECONCILED, "True", RECONCILED, "")

    def set(self, kind: str, truth: str, reason: str, message: str) -> None:
        """What a condition is from now on."""
        old = self._known.get(kind)
        since = old["lastTransitionTime"] if old is not None and old["status"] == truth else self._now
        self._known[kind] = {
            "type": kind,
            "status": truth,
            "reason": reason,
            "message": message[: 4 * TEXT_MAX],
            "lastTransitionTime": since,
            "observedGeneration": self.generation,
        }

    def made(self) -> list[Json]:
        """All of them, in the order in which they appeared."""
        return list(self._known.values())
