"""What is asked of Kueue, and what its answers mean: objects in, objects and decisions out."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlrover_backends.k8s import kueue
from dlrover_backends.k8s.kueue import Decision, Job
from dlrover_core.runtime.backend import SUSPENDED, GroupSize, Wanted

OWNER = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", "uid": "u-1"}}
POD = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        "containers": [{"name": "node", "image": "i", "env": [{"name": "A"}], "resources": {"limits": {"gpu": "8"}}}],
        "nodeSelector": {"disk": "ssd"},
        "volumes": [{"name": "v"}],
    },
}
WORKERS = GroupSize("worker", "worker", 2, 4)
NOW = "2026-11-01T00:00:00Z"


def job(*groups: GroupSize, state: str = "running") -> Job:
    """A job of these groups."""
    sizes = groups or (WORKERS,)
    return Job("pre", "r1", "research", Wanted(sizes, state, "why"), OWNER, {one.name: POD for one in sizes})


def stored(workload: dict[str, Any], *told: tuple[str, bool, str], **status: Any) -> dict[str, Any]:
    """A Workload as the API server has it."""
    found = copy.deepcopy(workload)
    found["metadata"] |= {"uid": f"of-{found['metadata']['name']}", "resourceVersion": "7", "generation": 1}
    conditions = [
        {"type": type_, "status": "True" if holds else "False", "reason": reason, "message": f"{reason} it is"}
        for type_, holds, reason in told
    ]
    found["status"] = {"conditions": conditions, **status}
    return found


def admission(group: str = "worker", count: int = 2) -> dict[str, Any]:
    """What Kueue writes of an admission."""
    sets = [{"name": group, "flavors": {"cpu": "h100", "gpu": "h100"}, "count": count}]
    return {"clusterQueue": "c", "podSetAssignments": sets}


GRANTED = (("QuotaReserved", True, "QuotaReserved"), ("Admitted", True, "Admitted"))


def test_one_for_min_and_one_for_each_above() -> None:
    """Nodes above MIN ask once MIN is admitted; names, owner, queue and resources are what Kueue and we need."""
    (one,) = kueue.workloads(job(), admitted=False)
    assert one["spec"]["queueName"] == "research"
    assert [(each["name"], each["count"]) for each in one["spec"]["podSets"]] == [("worker", 2)]
    assert one["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    spec = one["spec"]["podSets"][0]["template"]["spec"]
    assert spec["containers"] == [{"name": "node", "image": "i", "resources": {"limits": {"gpu": "8"}}}]
    assert spec["nodeSelector"] == {"disk": "ssd"}
    all_of_them = kueue.workloads(job(), admitted=True)
    assert [each["metadata"]["annotations"][kueue.NOTE_PLACE] for each in all_of_them] == ["", "worker-2", "worker-3"]
    assert len({each["metadata"]["name"] for each in all_of_them}) == 3
    groups = (WORKERS, GroupSize("ps", "worker", 1, 1))
    assert [each["count"] for each in kueue.workloads(job(*groups), admitted=False)[0]["spec"]["podSets"]] == [2, 1]


def test_what_answers_mean() -> None:
    """Pending says why, admitted names the flavor, evicted still holds quota, and a deactivated one is never admitted."""
    (one,) = kueue.workloads(job(), admitted=False)
    pending = kueue.standing(stored(one, ("QuotaReserved", False, "Pending")))
    assert (pending.state, pending.reason) == ("pending", "Kueue: queue research: Pending it is")
    granted = kueue.standing(stored(one, *GRANTED, admission=admission()))
    assert (granted.state, granted.reserved, granted.flavors) == ("admitted", True, {"worker": ("h100",)})
    evicted = kueue.standing(stored(one, *GRANTED, ("Evicted", True, "Preempted"), admission=admission()))
    assert (evicted.state, evicted.reserved) == ("evicted", True)
    assert evicted.reason == "Kueue: queue research: Preempted: Preempted it is"
    off = copy.deepcopy(one)
    off["spec"]["active"] = False
    assert kueue.standing(stored(off, *GRANTED)).state == "pending"
    checks = [{"name": "provision", "state": "Pending"}]
    waits = kueue.standing(stored(one, GRANTED[0], admission=admission(), admissionChecks=checks))
    assert (waits.state, waits.reason) == (
        "pending",
        "Kueue: queue research: quota is reserved, and waits for provision",
    )


def test_strangers_are_left_aside() -> None:
    """A Workload of another owner under our labels, and one that is being deleted, say nothing of this run."""
    (one,) = kueue.workloads(job(), admitted=False)
    assert kueue.admitted([stored(one, *GRANTED, admission=admission())], "u-1").admitted
    assert kueue.admitted([stored(one, *GRANTED, admission=admission())], "u-2") == Decision(None, {})
    leaving = stored(one, *GRANTED, admission=admission())
    leaving["metadata"]["deletionTimestamp"] = NOW
    assert kueue.admitted([leaving], "u-1") == Decision(None, {})


def test_a_node_is_part_of_one_workload() -> None:
    """The first MIN places are those of the common one, as it was admitted; the others have their own."""
    objects = [stored(one, *GRANTED, admission=admission()) for one in kueue.workloads(job(), admitted=True)]
    objects[1]["status"]["admission"] = objects[2]["status"]["admission"] = admission(count=1)
    seen = kueue.admitted(objects, "u-1")
    places = [found.place for index in range(4) if (found := seen.of("worker", index)) is not None]
    assert places == ["", "", "worker-2", "worker-3"]
    assert seen.of("worker", 4) is None


def test_pods_go_where_their_flavor_is() -> None:
    """Labels and tolerations of the flavor, and what admission checks add, are in the pod; what it has stays."""
    (one,) = kueue.workloads(job(), admitted=False)
    update = {"name": "worker", "nodeSelector": {"rack": "r1"}, "annotations": {"a": "b"}}
    checks = [{"name": "c", "state": "Ready", "podSetUpdates": [update]}]
    found = kueue.standing(stored(one, *GRANTED, admission=admission(), admissionChecks=checks))
    pod, toleration = copy.deepcopy(POD), {"key": "gpu", "operator": "Exists"}
    flavor = {"spec": {"nodeLabels": {"pool": "h100"}, "tolerations": [toleration]}}
    kueue.placed(pod, found, "worker", {"h100": flavor})
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd", "pool": "h100", "rack": "r1"}
    assert pod["spec"]["tolerations"] == [toleration]
    assert pod["metadata"]["annotations"] == {"a": "b"}
    with pytest.raises(KeyError):
        kueue.placed(pod, found, "worker", {})


def living(*places: str, phase: str = "Running", ready: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Pods in these places."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {place: [{"status": {"phase": phase, "conditions": conditions}}] for place in places}


def test_quota_is_given_back_when_pods_are_gone() -> None:
    """While one lives, nothing is written; then the admission goes, in one patch that names the version that was read."""
    (one,) = kueue.workloads(job(state="held"), admitted=False)
    seen = kueue.admitted([stored(one, *GRANTED, ("Evicted", True, "Preempted"), admission=admission())], "u-1")
    assert kueue.writes(job(state="held"), seen, living("worker-3"), NOW) == []
    for gone in ({}, living("worker-0", phase="Failed")):
        (write,) = kueue.writes(job(state="held"), seen, gone, NOW)
        assert (write.verb, write.body["metadata"]) == ("status", {"resourceVersion": "7"})
        assert write.body["status"]["admission"] is None
        told = {each["type"]: (each["status"], each["reason"]) for each in write.body["status"]["conditions"]}
        assert told["QuotaReserved"] == ("False", "Pending")
        assert told["Admitted"] == ("False", "NoReservation")
        assert told["Requeued"] == ("True", "Preempted")
        assert told["Evicted"] == ("True", "Preempted")


@pytest.mark.parametrize(
    ("before", "ready", "said"),
    [
        ((), False, ("False", "WaitForStart")),
        ((), True, ("True", "Started")),
        ((("PodsReady", False, "WaitForStart"),), True, ("True", "Started")),
        ((("PodsReady", False, "WaitForStart"),), False, None),
        ((("PodsReady", True, "Started"),), False, ("False", "WaitForRecovery")),
        ((("PodsReady", False, "WaitForRecovery"),), True, ("True", "Recovered")),
        ((("PodsReady", True, "Started"),), True, None),
    ],
)
def test_readiness_is_told(before: Any, ready: bool, said: tuple[str, str] | None) -> None:
    """Kueue may wait for pods to be ready, and evict what does not come or does not recover: it hears each change once."""
    alone = GroupSize("worker", "worker", 2, 2)
    (one,) = kueue.workloads(job(alone), admitted=False)
    seen = kueue.admitted([stored(one, *GRANTED, *before, admission=admission())], "u-1")
    found = kueue.writes(job(alone), seen, living("worker-0", "worker-1", ready=ready), NOW)
    told = [
        (each["status"], each["reason"])
        for one in found
        for each in one.body["status"]["conditions"]
        if each["type"] == "PodsReady"
    ]
    assert told == ([said] if said else [])


def test_what_is_not_wanted_goes() -> None:
    """A job that a person suspends asks for nothing, and one that is over is finished."""
    objects = [stored(one, *GRANTED, admission=admission()) for one in kueue.workloads(job(), admitted=True)]
    seen = kueue.admitted(objects, "u-1")
    assert kueue.writes(job(state=SUSPENDED), seen, living("worker-0", "worker-2", "worker-3"), NOW) == []
    assert {one.verb for one in kueue.writes(job(state=SUSPENDED), seen, {}, NOW)} == {"delete"}
    for state, reason in (("succeeded", "Succeeded"), ("failed", "Failed"), ("stopped", "Failed")):
        found = kueue.writes(job(state=state), seen, {}, NOW)
        assert [one.body["status"]["conditions"][-1]["reason"] for one in found] == [reason] * 3
