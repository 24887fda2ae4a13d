"""A job in Kueue: what is asked of its queue, and what the queue's answer means. Pure: objects in, objects and decisions out.

The MIN nodes of a job are one `Workload`, which Kueue admits as a whole, and each node above MIN is one of its own. So a job
starts when MIN fits into the quota, grows by what is left over, and gives single nodes back. Pods carry no label of Kueue's:
its groups of pods count a successor beside its predecessor as one too many, and end it.

* What is admitted may be launched, with the node labels and tolerations of the flavor that Kueue chose.
* What is evicted keeps its quota until its pods are gone; then the admission is taken out of its status, as controllers of
  Kueue's own jobs do, and it waits in the queue again.
* Workloads above MIN exist only while MIN is admitted: they would hold quota that another job's MIN needs.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_backends.k8s import names, owning
from dlrover_backends.k8s.api import Json, only
from dlrover_core.runtime.backend import ENDS, SUSPENDED, Wanted

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
API = f"{GROUP}/{VERSION}"
QUEUE_LABEL = f"{GROUP}/queue-name"
NOTE_PLACE, NOTE_DIGEST = "dlrover-core/place", "dlrover-core/asked"
PENDING, ADMITTED, EVICTED, FINISHED = "pending", "admitted", "evicted", "finished"
REQUEUED = ("Preempted", "NodeFailures")
"""After these evictions the job is back in the queue at once; after others Kueue says when."""
SAYS = "Kueue"
_SLIM = ("affinity", "nodeSelector", "overhead", "resourceClaims", "runtimeClassName", "schedulerName", "tolerations")
_CONTAINER = ("name", "image", "resources", "restartPolicy")


class Job(NamedTuple):
    """A job as its queue has to know it.

    name:   the job's
    run:    the id of this life of it
    queue:  the LocalQueue that admits it
    wanted: its sizes, and whether it runs
    owner:  the object that owns all of the run
    pods:   a pod of each group, as the backend makes it; requests, selectors and tolerations are read from it
    """

    name: str
    run: str
    queue: str
    wanted: Wanted
    owner: Json
    pods: Mapping[str, Json]


class Standing(NamedTuple):
    """Where one Workload stands.

    place:    the node's place, ``worker-2``; empty: it is that of the MIN nodes
    state:    `PENDING`, `ADMITTED`, `EVICTED` or `FINISHED`
    reason:   why, in Kueue's words
    counts:   nodes by group
    reserved: does it hold quota?
    flavors:  names of the flavors of each group's nodes
    updates:  what admission checks add to each group's pods
    object:   the Workload
    """

    place: str
    state: str
    reason: str
    counts: Mapping[str, int]
    reserved: bool
    flavors: Mapping[str, tuple[str, ...]]
    updates: Mapping[str, tuple[Json, ...]]
    object: Json


class Decision(NamedTuple):
    """What a queue lets a job have.

    minimum: the Workload of the MIN nodes; None: there is none
    above:   those of nodes above MIN, by place
    """

    minimum: Standing | None
    above: Mapping[str, Standing]

    @property
    def admitted(self) -> bool:
        """May the job have nodes?"""
        return self.minimum is not None and self.minimum.state == ADMITTED

    @property
    def reason(self) -> str:
        """Why it may or may not."""
        return self.minimum.reason if self.minimum is not None else f"{SAYS}: the job is on its way into the queue"

    def of(self, group: str, index: int) -> Standing | None:
        """The Workload that a node is part of; None: there is none yet."""
        if self.minimum is not None and index < self.minimum.counts.get(group, 0):
            return self.minimum
        return self.above.get(f"{group}-{index}")


class Write(NamedTuple):
    """A change of one Workload.

    verb: ``create``, ``delete``, or ``status`` for a merge patch of its status
    name: the Workload's
    body: the object, the preconditions, or the patch
    """

    verb: str
    name: str
    body: Json


# ---- what is asked


def workloads(job: Job, *, admitted: bool, counts: Mapping[str, int] | None = None) -> list[Json]:
    """The Workloads that a job should have: that of MIN, and with ``admitted`` one for each node above.

    ``counts``: nodes of each group that the existing MIN stands for; None: those of the present sizes.
    """
    sizes = job.wanted.groups
    fewest = {one.name: one.nodes_min for one in sizes}
    found = [_workload(job, "", [(one.name, one.nodes_min) for one in sizes])]
    if admitted:
        covered = fewest if counts is None else counts
        places = [(one.name, index) for one in sizes for index in range(covered.get(one.name, 0), one.nodes_max)]
        found += [_workload(job, f"{group}-{index}", [(group, 1)]) for group, index in places]
    return found


def workload_name(job: str, run: str, place: str) -> str:
    """The name of the Workload of a place; of that of MIN, whose place is empty."""
    return names.pod_name(f"{job}-{place or 'min'}", f"{run}\0workload")


def _workload(job: Job, place: str, sets: Sequence[tuple[str, int]]) -> Json:
    pod_sets = [{"name": group, "count": count, "template": _template(job.pods[group])} for group, count in sets]
    return {
        "apiVersion": API,
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job.name, job.run, place),
            "labels": names.labels(job.name, job.run),
            "annotations": {names.NOTE_JOB: job.name, NOTE_PLACE: place, NOTE_DIGEST: _digest(job.queue, pod_sets)},
            "ownerReferences": [owning.reference(job.owner)],
        },
        "spec": {"queueName": job.queue, "active": True, "podSets": pod_sets},
    }


def _template(pod: Json) -> Json:
    """What of a pod counts for quota and flavors."""
    spec = pod["spec"]
    slim = {key: copy.deepcopy(spec[key]) for key in _SLIM if spec.get(key)}
    for kind in ("initContainers", "containers"):
        if spec.get(kind):
            slim[kind] = [{key: copy.deepcopy(one[key]) for key in _CONTAINER if one.get(key)} for one in spec[kind]]
    return {"spec": {**slim, "restartPolicy": "Never"}}


def _digest(queue: str, pod_sets: list[Json]) -> str:
    """Changes with what is asked. What the API server fills in is not in it."""
    return hashlib.sha256(json.dumps([queue, pod_sets], sort_keys=True).encode()).hexdigest()[:16]


# ---- what is answered


def admitted(objects: Iterable[Json], owner: str) -> Decision:
    """What the Workloads of a run say. ``owner``: the uid of what owns them; others' are left aside."""
    minimum, above = None, {}
    for one in objects:
        owners = one["metadata"].get("ownerReferences") or ()
        if not any(each.get("uid") == owner for each in owners) or one["metadata"].get("deletionTimestamp"):
            continue
        found = standing(one)
        if found.place:
            above[found.place] = found
        else:
            minimum = found
    return Decision(minimum, above)


def standing(workload: Json) -> Standing:
    """Where a Workload stands."""
    status, spec = workload.get("status") or {}, workload["spec"]
    evicted, finished = condition(workload, "Evicted"), condition(workload, "Finished")
    admission = status.get("admission") or {}
    counts = {str(one.get("name") or "main"): int(one.get("count", 1)) for one in spec.get("podSets") or ()}
    for one in admission.get("podSetAssignments") or ():
        if one.get("count") is not None:
            counts[str(one.get("name") or "main")] = int(one["count"])
    queue = f"{SAYS}: queue {spec.get('queueName', '')}"
    if finished.get("status") == "True":
        state, why = FINISHED, f"{queue}: finished: {finished.get('message', '')}"
    elif evicted.get("status") == "True":
        state, why = EVICTED, f"{queue}: {evicted.get('reason', 'Evicted')}: {evicted.get('message', '')}"
    elif condition(workload, "Admitted").get("status") == "True" and spec.get("active") is not False:
        state, why = ADMITTED, f"{queue}: admitted"
    else:
        state, why = PENDING, f"{queue}: {_why_pending(workload)}"
    return Standing(
        str((workload["metadata"].get("annotations") or {}).get(NOTE_PLACE) or ""),
        state,
        " ".join(why.split()).strip(": "),
        counts,
        bool(admission) or condition(workload, "QuotaReserved").get("status") == "True",
        {
            str(one.get("name") or "main"): tuple(sorted(set((one.get("flavors") or {}).values())))
            for one in admission.get("podSetAssignments") or ()
        },
        _updates(status),
        workload,
    )


def condition(workload: Json, type_: str) -> Json:
    """A condition of a Workload; empty: it has none of this type."""
    found = (workload.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one.get("type") == type_), {})


def _why_pending(workload: Json) -> str:
    if workload["spec"].get("active") is False:
        return "somebody has set spec.active of its Workload to false"
    reserved = condition(workload, "QuotaReserved")
    if reserved.get("status") == "True":
        checks = (workload.get("status") or {}).get("admissionChecks") or ()
        waits = [one.get("name", "") for one in checks if one.get("state") != "Ready"]
        return f"quota is reserved, and waits for {', '.join(waits) or 'its admission'}"
    return str(reserved.get("message") or "waits for quota")


def _updates(status: Json) -> dict[str, tuple[Json, ...]]:
    found: dict[str, tuple[Json, ...]] = {}
    for check in status.get("admissionChecks") or ():
        for one in check.get("podSetUpdates") or ():
            name = str(one.get("name") or "main")
            found[name] = (*found.get(name, ()), one)
    return found


def placed(pod: Json, found: Standing, group: str, flavors: Mapping[str, Json]) -> None:
    """Let a pod go where its flavor is. ``flavors``: the ResourceFlavors by name; one that is missing is a `KeyError`."""
    spec, metadata = pod["spec"], pod["metadata"]
    updates: list[Json] = [
        {"nodeSelector": of.get("nodeLabels"), "tolerations": of.get("tolerations")}
        for of in (flavors[name].get("spec") or {} for name in found.flavors.get(group, ()))
    ]
    for one in (*updates, *found.updates.get(group, ())):
        if one.get("nodeSelector"):
            spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **one["nodeSelector"]}
        if one.get("tolerations"):
            there = spec.get("tolerations") or []
            spec["tolerations"] = [*there, *(each for each in one["tolerations"] if each not in there)]
        for key in ("labels", "annotations"):
            if one.get(key):
                metadata[key] = {**one[key], **(metadata.get(key) or {})}


# ---- what is written


def writes(job: Job, seen: Decision, living: Mapping[str, Sequence[Json]], now: str) -> list[Write]:
    """What has to be written now. ``living``: pods that are not gone, by place; ``now``: the time as the API writes it."""
    if job.wanted.state in ENDS:
        return [_finished(one, job.wanted, now) for one in _all(seen) if one.state != FINISHED]
    if job.wanted.state == SUSPENDED:  # by a person: nothing is asked for, and what is free is given back
        return [_gone(one) for one in _all(seen) if not _lives(one, living)]
    counts = seen.minimum.counts if seen.minimum is not None else None
    wanted = {_place(one): one for one in workloads(job, admitted=seen.admitted, counts=counts)}
    there = {one.place: one for one in _all(seen)}
    found = [Write("create", one["metadata"]["name"], one) for place, one in wanted.items() if place not in there]
    for place, known in there.items():
        free = not _lives(known, living)
        if place not in wanted:
            found += [_gone(known)] if free else []
        elif known.state == EVICTED and known.reserved:
            found += [_released(known, now)] if free else []
        elif not known.reserved and _asked(known.object) != _asked(wanted[place]):
            found.append(_gone(known))  # its pod sets cannot change; the next one asks for what is wanted now
        elif known.state == ADMITTED and (ready := _ready(known, living, now)) is not None:
            found.append(ready)
    return found


def _all(seen: Decision) -> list[Standing]:
    return [*([seen.minimum] if seen.minimum is not None else []), *seen.above.values()]


def _place(workload: Json) -> str:
    return str(workload["metadata"]["annotations"][NOTE_PLACE])


def _asked(workload: Json) -> str:
    return str((workload["metadata"].get("annotations") or {}).get(NOTE_DIGEST) or "")


def _lives(one: Standing, living: Mapping[str, Sequence[Json]]) -> bool:
    """Is a pod there that uses its quota? While MIN gives its quota back the whole job does."""
    pods = living.get(one.place) or () if one.place else [pod for here in living.values() for pod in here]
    return any((pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"} for pod in pods)


def _gone(one: Standing) -> Write:
    metadata = one.object["metadata"]
    body = only(metadata["uid"])
    return Write("delete", metadata["name"], body)


def _finished(one: Standing, wanted: Wanted, now: str) -> Write:
    reason = "Succeeded" if wanted.state == "succeeded" else "Failed"
    return _status(one, now, ("Finished", True, reason, wanted.reason or f"the job {wanted.state}"))


def _released(one: Standing, now: str) -> Write:
    """Give the quota of an evicted Workload back: its admission goes, and it waits anew."""
    evicted = condition(one.object, "Evicted")
    reason, words = str(evicted.get("reason") or "Pending"), str(evicted.get("message") or "")
    return _status(
        one,
        now,
        ("Requeued", reason in REQUEUED, reason, words),
        ("QuotaReserved", False, "Pending", words),
        ("Admitted", False, "NoReservation", "The workload has no reservation"),
        admission=None,
    )


def _ready(one: Standing, living: Mapping[str, Sequence[Json]], now: str) -> Write | None:
    """Tell whether the pods are ready, where that has changed: Kueue may wait for it, or evict what does not come."""
    before = condition(one.object, "PodsReady")
    if one.place:
        places = [one.place]
    else:
        places = [f"{group}-{index}" for group, count in one.counts.items() for index in range(count)]
    ready = all(any(_is_ready(pod) for pod in living.get(place) or ()) for place in places)
    was, started = before.get("status") == "True", bool(before) and before.get("reason") != "WaitForStart"
    if before and ready == was:
        return None
    if ready:
        said = ("Recovered" if started else "Started", "All pods reached readiness and the workload is running")
    else:
        said = ("WaitForRecovery" if started else "WaitForStart", "Not all pods are ready or succeeded")
    return _status(one, now, ("PodsReady", ready, *said))


def _is_ready(pod: Json) -> bool:
    status = pod.get("status") or {}
    return status.get("phase") == "Succeeded" or any(
        one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ()
    )


def _status(one: Standing, now: str, *told: tuple[str, bool, str, str], **more: Any) -> Write:
    """A patch of conditions. It names the version that was read, so that nothing that Kueue has written since is lost."""
    metadata = one.object["metadata"]
    conditions = {each["type"]: each for each in (one.object.get("status") or {}).get("conditions") or ()}
    for type_, holds, reason, words in told:
        before, status = conditions.get(type_) or {}, "True" if holds else "False"
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        conditions[type_] = {
            "type": type_,
            "status": status,
            "reason": reason,
            "message": words,
            "lastTransitionTime": since or now,
            "observedGeneration": metadata.get("generation", 1),
        }
    body = {
        "metadata": {"resourceVersion": metadata["resourceVersion"]},
        "status": {"conditions": list(conditions.values()), **more},
    }
    return Write("status", metadata["name"], body)
