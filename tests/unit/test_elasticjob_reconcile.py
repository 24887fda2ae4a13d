"""What the operator writes for a job, from what it sees: a table of situations, each with its writes, status and events."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_backends.fake_k8s import schemas
from dlrover_backends.k8s import masters, names
from dlrover_backends.k8s.elasticjob import crd, reconcile, translate
from dlrover_backends.k8s.elasticjob.reconcile import Ask, Make, Observed, Patch, Remove, Settings
from dlrover_backends.k8s.elasticjob.telling import Size, Told
from dlrover_backends.k8s.paths import path_of

Json = dict[str, Any]

JOBS: dict[str, Json] = {
    one["metadata"]["name"]: one
    for one in yaml.safe_load_all((Path(__file__).parent / "elasticjobs.yaml").read_text(encoding="utf-8"))
}
SETTINGS = Settings("registry/dlrover-core:1")
NOW = "2026-01-01T00:00:00Z"
RUNNING = Told("running", step=7, goodput=0.925, groups={"worker": Size(3, 4, 4)})


def job(name: str = "mnist", *, status: Json | None = None, **metadata: Any) -> Json:
    """A job of the file, as the API server has it."""
    made = copy.deepcopy(JOBS[name])
    made["metadata"] = {**made["metadata"], "namespace": "ml", "uid": "u-1", "generation": 1}
    made["metadata"] |= {"resourceVersion": "7", **metadata}
    if status is not None:
        made["status"] = status
    return made


def kept(name: str = "mnist", **metadata: Any) -> Json:
    """The same with our finalizer."""
    return job(name, **{"finalizers": [reconcile.FINALIZER], **metadata})


def job_of(thing: Json, **status: Any) -> Json:
    """The masters' Job, as it was made for the object."""
    makes = [one.object for one in outcome(Observed(thing)).writes if isinstance(one, Make)]
    made = copy.deepcopy(makes[-1])
    made["metadata"]["annotations"][reconcile.NOTE_KEPT] = "3"
    return {**made, "status": status}


def outcome(seen: Observed, settings: Settings = SETTINGS) -> reconcile.Outcome:
    """What is to be written; the status fits the definition."""
    found = reconcile.reconcile(seen._replace(now=NOW), settings)
    if found.status is not None:
        assert schemas.causes(crd.schema(), {**seen.job, "status": found.status}) == []
        assert schemas.pruned(crd.schema(), {"status": found.status})[1] == []
    return found


def conditions(found: reconcile.Outcome) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    assert found.status is not None
    return {one["type"]: (one["status"], one["reason"]) for one in found.status["conditions"]}


def commands(found: reconcile.Outcome) -> list[Json]:
    """What masters are asked, without the reason."""
    asked = [dict(one.command) for one in found.writes if isinstance(one, Ask)]
    return [{key: value for key, value in one.items() if key != "reason"} for one in asked]


def test_a_new_job_gets_its_masters() -> None:
    """First the finalizer, then everything in its order, the Job last; all of it belongs to the object."""
    found = outcome(Observed(job()))
    first, *makes = found.writes
    assert isinstance(first, Patch)
    assert first.path == "/apis/elastic.iml.github.io/v1alpha1/namespaces/ml/elasticjobs/mnist"
    assert first.body == {"metadata": {"finalizers": [reconcile.FINALIZER], "resourceVersion": "7"}}
    made = [one.object for one in makes if isinstance(one, Make)]
    assert [one["kind"] for one in made[:3]] == ["ConfigMap", "PersistentVolumeClaim", "Secret"]
    assert made[-1]["kind"] == "Job"
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == "u-1" for one in made)
    assert [one.secret for one in makes if isinstance(one, Make)].count(True) == 1
    assert found.status is not None
    assert (found.status["phase"], found.status["ready"], found.status["run"]) == ("Pending", "0/4", "u-1")
    assert (
        "Normal",
        "Note",
        "spec.optimizeMode does nothing here: sizes are those of replicas and of kubectl scale",
    ) in found.events


def test_the_masters_find_their_words() -> None:
    """The job file lies where the words say, nodes keep their own command and image, and the claim is the job's."""
    made = job_of(kept())
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["--job=/etc/dlrover/job.toml", "--job-id=mnist"]
    assert {"name": "dlrover-job", "configMap": {"name": "mnist-job"}} in made["spec"]["template"]["spec"]["volumes"]
    assert any(one["mountPath"] == "/etc/dlrover" for one in container["volumeMounts"])
    backend = next(one["value"] for one in container["env"] if one["name"] == masters.BACKEND)
    assert "command=template" in backend
    assert "image=" not in backend
    assert container["image"] == SETTINGS.image


def test_a_log_in_etcd_needs_no_claim() -> None:
    """With etcd there are two masters, and no claim."""
    makes = [
        one.object
        for one in outcome(Observed(kept()), SETTINGS._replace(etcd="etcd://e:2379")).writes
        if isinstance(one, Make)
    ]
    assert "PersistentVolumeClaim" not in {one["kind"] for one in makes}
    assert makes[-1]["spec"]["completions"] == 2


def test_certificates_of_etcd_reach_the_masters() -> None:
    """They lie in the job's Secret, where the URL says; renewed ones replace them, and the URL of a job that runs stays."""
    told = SETTINGS._replace(etcd="etcd://e:2379?cacert=/etc/dlrover/log/etcd-ca.pem", etcd_files={"etcd-ca.pem": "a"})
    makes = [one.object for one in outcome(Observed(kept()), told).writes if isinstance(one, Make)]
    secret = next(one for one in makes if one["kind"] == "Secret")
    assert secret["stringData"]["etcd-ca.pem"] == "a"
    assert secret["stringData"]["log"] == "etcd://e:2379/dlrover/ml?cacert=/etc/dlrover/log/etcd-ca.pem"
    made = makes[-1]
    pod = made["spec"]["template"]["spec"]
    (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == masters.FILES)
    (volume,) = (one["secret"] for one in pod["volumes"] if one["name"] == masters.FILES)
    assert (mount["mountPath"], volume["secretName"]) == ("/etc/dlrover/log", secret["metadata"]["name"])
    made["metadata"]["annotations"][reconcile.NOTE_KEPT] = "3"
    assert outcome(Observed(kept(), made, (), RUNNING), told).writes == ()
    renewed = told._replace(etcd="etcd://other", etcd_files={"etcd-ca.pem": "b"})
    first, second = outcome(Observed(kept(), made, (), RUNNING), renewed).writes
    assert first == Patch(
        "/api/v1/namespaces/ml/secrets/mnist-masters", {"data": {"etcd-ca.pem": "Yg=="}}, as_read=True
    )
    assert isinstance(second, Patch)
    made["metadata"]["annotations"] |= second.body["metadata"]["annotations"]
    assert outcome(Observed(kept(), made, (), RUNNING), renewed).writes == ()
    before = job_of(kept())
    assert outcome(Observed(kept(), before, (), RUNNING), renewed).writes == (), "its log lies on a claim"


def test_a_gang_is_the_masters_to_make() -> None:
    """They are told whose PodGroup, and may write it; and how racks are named."""
    thing = kept()
    thing["spec"]["replicaSpecs"]["worker"]["BatchScheduler"] = "volcano"
    told = SETTINGS._replace(rack="example.com/rack")
    makes = [one.object for one in outcome(Observed(thing), told).writes if isinstance(one, Make)]
    (container,) = makes[-1]["spec"]["template"]["spec"]["containers"]
    backend = next(one["value"] for one in container["env"] if one["name"] == masters.BACKEND)
    assert {"gang=volcano", "rack=example.com/rack"} <= set(backend.split(","))
    (role,) = (one for one in makes if one["kind"] == "Role")
    (rule,) = (one for one in role["rules"] if one["resources"] == ["podgroups"])
    assert rule["apiGroups"] == ["scheduling.volcano.sh"]


def test_nothing_is_written_where_all_is_so() -> None:
    """With its own last status, a job that runs costs no write."""
    thing = kept()
    seen = Observed(thing, job_of(thing), (), RUNNING)
    first = outcome(seen)
    assert first.writes == ()
    assert first.status is not None
    thing["status"] = first.status
    again = outcome(seen._replace(job=thing))
    assert again == reconcile.Outcome((), None, ())


def test_the_status_says_how_the_job_stands() -> None:
    """Phase, nodes, step, goodput and the newest incident, each for a column."""
    thing = kept()
    told = RUNNING._replace(incidents=2, incident="incident 2: OOMKilled on worker-1-0")
    found = outcome(Observed(thing, job_of(thing), (), told))
    assert found.status is not None
    shown = {
        key: found.status[key]
        for key in ("phase", "ready", "step", "goodput", "lastIncident", "incidents", "startTime")
    }
    assert shown == {
        "phase": "Running",
        "ready": "4/4",
        "step": 7,
        "goodput": "92%",
        "lastIncident": "incident 2: OOMKilled on worker-1-0",
        "incidents": 2,
        "startTime": NOW,
    }
    assert conditions(found)["Accepted"] == ("True", "Accepted")
    assert conditions(found)["Running"] == ("True", "Running")
    assert ("Warning", "Incident", told.incident) in found.events
    assert ("Normal", "Running", "the job is running") in found.events


def test_masters_that_do_not_answer_change_no_phase() -> None:
    """A job that runs goes on: its masters may be starting again."""
    thing = kept(status={"phase": "Running", "operator": names.BY, "step": 5})
    found = outcome(Observed(thing, job_of(thing)))
    assert found.writes == ()
    assert found.status is not None
    assert (found.status["phase"], found.status["step"]) == ("Running", 5)


@pytest.mark.parametrize(
    ("state", "asked"),
    [("created", True), ("running", True), ("suspended", False), ("stopping", False)],
)
def test_a_pause_is_asked_for_once(state: str, asked: bool) -> None:
    """A job that is to pause is suspended, unless it is already, or is about to be."""
    thing = kept()
    thing["spec"]["suspend"] = True
    seen = Observed(thing, job_of(kept()), (), RUNNING._replace(state=state))
    wanted = [{"command": "suspend", "keep_nodes": False, "lose": False}] if asked else []
    assert commands(outcome(seen)) == wanted
    assert commands(outcome(seen._replace(told=RUNNING._replace(state=state, pausing=True)))) == []


def test_a_refused_pause_is_told_and_not_asked_again() -> None:
    """What would be lost is in the condition, as the masters said it."""
    thing = kept()
    thing["spec"]["suspend"] = True
    found = outcome(Observed(thing, job_of(kept()), (), RUNNING, refused="step 7 is on no storage"))
    assert commands(found) == []
    assert conditions(found)["Suspended"] == ("False", "Refused")
    assert ("Warning", "SuspendRefused", "step 7 is on no storage") in found.events


def test_who_paused_ends_the_pause() -> None:
    """A pause that the object asked for ends with it; a person's own does not."""
    paused = RUNNING._replace(state="suspended")
    asked = kept()
    asked["spec"]["suspend"] = True
    made = job_of(kept())
    status = outcome(Observed(asked, made, (), paused)).status
    assert status is not None
    assert status["phase"] == "Suspended"
    back = kept(status=status)
    assert commands(outcome(Observed(back, made, (), paused))) == [{"command": "resume"}]
    by_hand = kept(status={"phase": "Running", "operator": names.BY})
    found = outcome(Observed(by_hand, made, (), paused))
    assert commands(found) == []
    assert conditions(found)["Suspended"] == ("False", "ByHand")


def test_who_asked_for_a_pause_is_known_before_the_masters_are_told() -> None:
    """An operator that dies between the two, before the status says so, leaves no pause that nobody ends."""
    asked, made = kept(), job_of(kept())
    asked["spec"]["suspend"] = True
    *_, note, told = outcome(Observed(asked, made, (), RUNNING)).writes
    assert note == Patch(path_of(made), noted("true"))
    assert isinstance(told, Ask)
    assert told.command["command"] == "suspend"
    made["metadata"]["annotations"] |= noted("true")["metadata"]["annotations"]
    back = kept(status={"phase": "Running", "operator": names.BY})
    assert commands(outcome(Observed(back, made, (), RUNNING._replace(state="suspended")))) == [{"command": "resume"}]
    writes = outcome(Observed(back, made, (), RUNNING)).writes
    assert Patch(path_of(made), noted(None)) in writes, "a person's pause that comes later is that person's"


def test_a_pause_that_is_taken_back_before_it_begins_is_ended_at_once() -> None:
    """Until the masters say that nothing is planned, the note stays: the pause may have begun before they were asked."""
    made = job_of(kept())
    made["metadata"]["annotations"] |= noted("true")["metadata"]["annotations"]
    back = kept(status={"phase": "Running", "operator": names.BY})
    planned = RUNNING._replace(pausing=True)
    found = outcome(Observed(back, made, (), planned))
    assert commands(found) == [{"command": "resume"}]
    assert len(found.writes) == 1, "the note stays"
    assert commands(outcome(Observed(back, made, (), planned._replace(state="suspended")))) == [{"command": "resume"}]
    assert outcome(Observed(back, made, (), RUNNING)).writes == (Patch(path_of(made), noted(None)),)
    assert commands(outcome(Observed(back, job_of(kept()), (), planned))) == [], "a person's is that person's to end"


def noted(value: str | None) -> dict[str, Any]:
    """What is merged into the masters' Job."""
    return {"metadata": {"annotations": {reconcile.NOTE_PAUSES: value}}}


def test_a_job_that_begins_suspended_makes_nothing() -> None:
    """No masters are made before they are needed."""
    found = outcome(Observed(kept("automatic")))
    assert found.writes == ()
    assert found.status is not None
    assert found.status["phase"] == "Suspended"


def test_sizes_are_told() -> None:
    """`kubectl scale` is a command for the masters."""
    thing = kept(generation=2)
    thing["spec"]["replicaSpecs"]["worker"]["replicas"] = 6
    found = outcome(Observed(thing, job_of(kept()), (), RUNNING))
    assert commands(found) == [{"command": "scale", "group": "worker", "nodes_min": 3, "nodes_max": 6}]
    assert outcome(Observed(thing, job_of(kept()), (), None)).writes != ()  # the templates' NODE_NUM
    assert commands(outcome(Observed(thing, job_of(kept()), (), None))) == []


def test_a_changed_template_is_for_nodes_to_come() -> None:
    """The ConfigMap with templates is patched, and the Job's mark; no master is touched."""
    thing = kept(generation=2)
    thing["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["image"] = "registry/mnist:2"
    config, mark = outcome(Observed(thing, job_of(kept()), (), RUNNING)).writes
    assert isinstance(config, Patch)
    assert isinstance(mark, Patch)
    assert config.path.endswith("/configmaps/mnist-masters")
    assert config.as_read
    assert "registry/mnist:2" in config.body["data"]["worker"]
    assert mark.path.endswith("/jobs/mnist-masters")


@pytest.mark.parametrize(("running", "kept_nodes"), [(3, 2), (1, 0), (0, 0)])
def test_a_drain_may_take_one_node_of_those_that_run(running: int, kept_nodes: int) -> None:
    """The budget follows the number of nodes, down to one, which may go, and is made anew where somebody deleted it."""
    thing = kept()
    told = RUNNING._replace(groups={"worker": Size(1, 4, running)})
    wanted = copy.deepcopy(thing)
    wanted["spec"]["replicaSpecs"]["worker"]["minReplicas"] = 1
    again, budget, mark = outcome(Observed(wanted, job_of(wanted), (), told)).writes
    assert isinstance(again, Make)
    assert again.object["kind"] == "PodDisruptionBudget"
    assert isinstance(budget, Patch)
    assert (budget.path.rpartition("/")[2], budget.body) == ("mnist-nodes", {"spec": {"minAvailable": kept_nodes}})
    assert isinstance(mark, Patch)


def test_a_job_of_one_node_has_a_budget() -> None:
    """`kubectl scale` to more nodes finds it there."""
    budget = next(
        one.object
        for one in outcome(Observed(kept("small"))).writes
        if isinstance(one, Make) and one.object["kind"] == "PodDisruptionBudget"
    )
    assert budget["spec"]["minAvailable"] == 0


def node(name: str, phase: str, **metadata: Any) -> Json:
    """A node's pod."""
    labels = {names.LABEL_NODE: "worker"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ml", "labels": labels, **metadata},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize("valid", [True, False])
def test_nodes_do_not_outlive_their_masters(valid: bool) -> None:
    """When the masters' Job is over nodes that live are removed, for nobody else would; pods that ended stay for their logs."""
    thing = kept(status={"phase": "Running", "operator": names.BY})
    if not valid:
        thing["spec"]["replicaSpecs"] = {}
    pods = (
        node("a", "Running"),
        node("b", "Pending"),
        {
            **node("s", "Running"),
            "metadata": {"name": "s", "namespace": "ml", "labels": {names.LABEL_STANDBY: "worker"}},
        },
        node("c", "Failed"),
        node("d", "Running", deletionTimestamp=NOW),
        {
            **node("m", "Running"),
            "metadata": {"name": "m", "namespace": "ml", "labels": {masters.LABEL_ROLE: "masters"}},
        },
    )
    failed = job_of(kept(), conditions=[{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}])
    base = "/api/v1/namespaces/ml/pods"
    found = outcome(Observed(thing, failed, pods))
    assert found.writes == (Remove(f"{base}/a"), Remove(f"{base}/b"), Remove(f"{base}/s"))
    thing["status"] = found.status
    assert outcome(Observed(thing, None, pods)).writes == found.writes
    assert outcome(Observed(kept(), job_of(kept()), pods)).writes == ()


@pytest.mark.parametrize(
    ("end", "phase"),
    [("Complete", "Succeeded"), ("Failed", "Failed")],
)
def test_the_end_is_the_masters_jobs(end: str, phase: str) -> None:
    """The Job's end is the job's; nothing is made again, and what it said last is kept."""
    thing = kept(status={"phase": "Running", "operator": names.BY, "step": 9})
    made = job_of(kept(), conditions=[{"type": end, "status": "True", "message": "BackoffLimitExceeded"}])
    pod = {
        "metadata": {"name": "p", "labels": {masters.LABEL_ROLE: masters.ROLE}},
        "status": {"containerStatuses": [{"state": {"terminated": {"message": "dlrover-run: error: --x\n"}}}]},
    }
    found = outcome(Observed(thing, made, (pod,)))
    assert found.writes == ()
    assert found.status is not None
    assert (found.status["phase"], found.status["step"], found.status["completionTime"]) == (phase, 9, NOW)
    assert conditions(found)[phase] == ("True", phase)
    if phase == "Failed":
        assert ("Warning", "Failed", "dlrover-run: error: --x") in found.events
    over = kept(status=found.status)
    assert outcome(Observed(over)) == reconcile.Outcome((), None, ())


def test_what_is_no_job_is_told() -> None:
    """The condition `Accepted` has the field, its value, and what to write; nothing is made, and it is one event."""
    thing = job()
    thing["spec"]["replicaSpecs"]["worker"]["replicas"] = 2
    found = outcome(Observed(thing))
    assert found.writes == ()
    assert conditions(found) == {"Accepted": ("False", "Invalid")}
    assert found.status is not None
    assert found.status["phase"] == "Rejected"
    ((kind, reason, why),) = found.events
    assert (kind, reason) == ("Warning", "Rejected")
    assert "--nnodes=3:2: its fewest, 3, is more than replicas, 2" in why
    thing["status"] = found.status
    assert outcome(Observed(thing)) == reconcile.Outcome((), None, ())


def test_a_job_that_runs_outlives_a_wrong_edit() -> None:
    """An object that is edited to nonsense is told so, and what runs goes on, is counted, and ends."""
    thing = kept(status=outcome(Observed(kept(), job_of(kept()), (), RUNNING)).status, generation=2)
    thing["spec"]["replicaSpecs"] = {}
    found = outcome(Observed(thing, job_of(kept()), (), RUNNING._replace(step=9)))
    assert found.writes == ()
    assert found.status is not None
    assert (found.status["phase"], found.status["step"], found.status["ready"]) == ("Running", 9, "4/4")
    assert found.status["observedGeneration"] == 2
    assert conditions(found)["Accepted"][0] == "False"
    assert [one[1] for one in found.events] == ["Rejected"]
    thing["status"] = found.status
    again = outcome(Observed(thing, job_of(kept()), (), None))
    assert again.events == ()
    assert again.status is not None
    assert (again.status["phase"], again.status["ready"]) == ("Running", "4/4")
    ended = job_of(kept(), conditions=[{"type": "Complete", "status": "True"}])
    found = outcome(Observed(thing, ended))
    assert found.status is not None
    assert (found.status["phase"], found.status["completionTime"]) == ("Succeeded", NOW)
    assert conditions(found)["Succeeded"] == ("True", "Succeeded")
    thing["status"] = found.status
    assert outcome(Observed(thing)).status is None


def test_a_deleted_job_goes_in_order() -> None:
    """Masters first, then pods, then the rest; the object goes last."""
    thing = kept(deletionTimestamp=NOW)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ml"}}
    base = "/api/v1/namespaces/ml"
    steps = [
        outcome(Observed(thing, job_of(kept()), (pod,), left=True)).writes,
        outcome(Observed(thing, None, (pod,), left=True)).writes,
        outcome(Observed(thing, None, ({**pod, "metadata": {**pod["metadata"], "deletionTimestamp": NOW}},))).writes,
        outcome(Observed(thing, None, (), left=True)).writes,
        outcome(Observed(thing)).writes,
    ]
    assert steps[0] == (Remove("/apis/batch/v1/namespaces/ml/jobs/mnist-masters"),)
    assert steps[1] == (Remove(f"{base}/pods/p"),)
    assert steps[2] == ()
    removed = {one.path for one in steps[3] if isinstance(one, Remove)}
    assert {
        f"{base}/secrets/mnist-masters",
        f"{base}/configmaps/mnist-job",
        f"{base}/persistentvolumeclaims/mnist-log",
    } <= removed
    (last,) = steps[4]
    assert isinstance(last, Patch)
    assert last.body == {"metadata": {"finalizers": None, "resourceVersion": "7"}}


OWN = {reconcile.NOTE_LOGS: "u-1"}


@pytest.mark.parametrize(
    ("etcd", "notes", "erased"),
    [
        ("etcd://e", OWN, True),
        ("etcd://e", {}, False),
        ("etcd://e", {reconcile.NOTE_LOGS: "u-0"}, False),
        ("", OWN, False),
        *(("etcd://e", {**OWN, reconcile.NOTE_KEEP_LOG: said}, False) for said in ("true", "True", "yes", "1", "")),
        *(("etcd://e", {**OWN, reconcile.NOTE_KEEP_LOG: said}, True) for said in ("false", "False", "no", "0")),
    ],
)
def test_what_an_etcd_has_of_a_deleted_job_goes_too(etcd: str, notes: Json, erased: bool) -> None:
    """Last, before the name is free for another job; not where an annotation keeps it, or masters were never made for it."""
    thing = kept(deletionTimestamp=NOW, annotations=notes)
    *first, last = reconcile.reconcile(Observed(thing), SETTINGS._replace(etcd=etcd)).writes
    assert first == ([reconcile.Erase("ml", "mnist", "u-1")] if erased else [])
    assert isinstance(last, Patch)
    still = reconcile.reconcile(Observed(thing, left=True), SETTINGS._replace(etcd=etcd)).writes
    assert all(isinstance(one, Remove) for one in still)


def test_a_job_with_a_log_in_etcd_is_marked() -> None:
    """Once its Secret and Service are its own, before its masters are made; not where it only waits, and without an etcd."""
    etcd = SETTINGS._replace(etcd="etcd://e:2379")
    *others, mark, last = outcome(Observed(kept()), etcd).writes
    assert all(isinstance(one, Make) for one in others)
    assert mark == Patch(reconcile.path_of(kept()), {"metadata": {"annotations": OWN}})
    assert isinstance(last, Make)
    assert last.object["kind"] == "Job"
    suspended = kept()
    suspended["spec"]["suspend"] = True
    for seen, settings in (
        (kept(annotations=OWN), etcd),
        (suspended, etcd),
        (kept(), SETTINGS),
    ):
        assert not [one for one in outcome(Observed(seen), settings).writes if isinstance(one, Patch)]


def test_masters_pods_end_before_nodes_are_removed() -> None:
    """A master that ends slowly would make a pod for each that is removed."""
    thing, ends = kept(deletionTimestamp=NOW), {"deletionTimestamp": NOW}
    labels = {masters.LABEL_ROLE: masters.ROLE}
    master = node("m", "Running", **ends)
    master["metadata"]["labels"] = labels
    assert outcome(Observed(thing, None, (master, node("a", "Running")))).writes == ()
    master["status"] = {"phase": "Succeeded"}
    (only,) = outcome(Observed(thing, None, (master, node("a", "Running")))).writes
    assert isinstance(only, Remove)
    assert only.path.endswith("/pods/a")


@pytest.mark.parametrize("phase", ["Running", "Pending", "silent", "Succeeded"])
def test_a_pod_on_a_lost_host_keeps_no_job(phase: str) -> None:
    """Its host alone could end it. It is waited for while its host may still do so; one that has ended but stays, always."""
    thing, pod = kept(deletionTimestamp=NOW), node("a", phase, deletionTimestamp=NOW)
    if phase == "silent":
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [{"name": "node", "ready": True, "state": {"running": {}}}],
        }
    assert outcome(Observed(thing, None, (pod,))).writes == ()
    pod["metadata"]["deletionTimestamp"] = "2025-12-31T23:58:59Z"
    assert bool(outcome(Observed(thing, None, (pod,))).writes) == (phase in {"Pending", "silent"})


def test_all_that_is_made_is_removed() -> None:
    """Whatever is made for a job stands in the list of what is removed with it."""
    for settings in (SETTINGS, SETTINGS._replace(etcd="etcd://e:2379")):
        made = [one.object for one in outcome(Observed(job()), settings).writes if isinstance(one, Make)]
        assert {reconcile.path_of(one) for one in made} <= set(reconcile.belongings(job()))


def test_other_finalizers_stay() -> None:
    """Only ours comes and goes."""
    (first, *_) = outcome(Observed(job(finalizers=["a/b"]))).writes
    assert isinstance(first, Patch)
    assert first.body["metadata"]["finalizers"] == ["a/b", reconcile.FINALIZER]
    (last,) = outcome(Observed(kept(finalizers=["a/b", reconcile.FINALIZER], deletionTimestamp=NOW))).writes
    assert isinstance(last, Patch)
    assert last.body["metadata"]["finalizers"] == ["a/b"]
    assert outcome(Observed(job(deletionTimestamp=NOW, finalizers=["a/b"]))).writes == ()


@pytest.mark.parametrize(
    ("metadata", "status", "annotated", "ours"),
    [
        ({}, None, False, True),
        ({}, None, True, False),
        ({"annotations": {reconcile.NOTE_TAKE: "dlrover-core"}}, {"phase": "Created"}, True, True),
        ({"annotations": {reconcile.NOTE_TAKE: "none"}}, None, False, False),
        ({}, {"phase": "Created"}, False, False),
        ({}, {"phase": "Running", "operator": "dlrover-core"}, False, True),
        ({"finalizers": [reconcile.FINALIZER]}, {"phase": "Running"}, True, True),
    ],
)
def test_whose_jobs_are_taken(metadata: Json, status: Json | None, annotated: bool, ours: bool) -> None:
    """Beside DLRover's own operator only annotated jobs are ours, and those that were; that one's jobs are left alone."""
    assert reconcile.is_ours(job(status=status, **metadata), SETTINGS._replace(annotated=annotated)) == ours


@pytest.mark.parametrize(
    ("manager", "metadata", "ours"),
    [
        ("dlrover-core/operator", {}, True),
        ("kueue.x-k8s.io/multikueue", {}, False),
        ("kueue.x-k8s.io/multikueue", {"annotations": {reconcile.NOTE_TAKE: "dlrover-core"}}, False),
        ("kueue.x-k8s.io/multikueue", {"finalizers": [reconcile.FINALIZER]}, True),
    ],
)
def test_another_controllers_job_is_left_to_it(manager: str, metadata: Json, ours: bool) -> None:
    """By ``managedBy``, as other jobs of Kubernetes have it; what was ours is ours to its end."""
    thing = job(**metadata)
    thing["spec"]["managedBy"] = manager
    assert schemas.causes(crd.schema(), thing) == []
    assert reconcile.is_ours(thing, SETTINGS) == ours
    assert not any("managedBy" in one for one in translate.read(thing).notes)
