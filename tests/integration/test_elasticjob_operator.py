"""The operator over sockets, against the fake API server with scripted masters: what kubectl shows, what becomes of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.chaos.operator_seeds import BASE, NAME, Stand, job, standing, trial

from dlrover_backends.k8s import names
from dlrover_backends.k8s.elasticjob import deploy, leader, operator, reconcile, translate
from dlrover_backends.k8s.elasticjob.leader import Leader
from dlrover_backends.k8s.errors import Conflict
from dlrover_core.errors import LogUnavailable

Object = dict[str, Any]

pytestmark = pytest.mark.slow_loop(reason="the server, the operator and the scripted masters share one loop")
BOUND_S = 60.0


def in_a_stand(test: Callable[[Stand], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test with a stand, and a loop, of its own."""

    @functools.wraps(test)
    def run() -> None:
        async def story() -> None:
            async with standing() as stand:
                await test(stand)

        asyncio.run(asyncio.wait_for(story(), BOUND_S))

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would take its argument for a fixture
    return run


async def applied(stand: Stand, thing: Object) -> Object:
    """The object, as `kubectl apply` makes it."""
    return await stand.api.ask("POST", BASE, body=thing)


@in_a_stand
async def test_a_job_from_its_object_to_its_end(stand: Stand) -> None:
    """Applied, it runs; `kubectl get`, `scale`, `patch` and `delete` do what they say; nothing of it stays."""
    await stand.begin()
    made = await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    assert stand.status()["run"] == made["metadata"]["uid"]
    names = ("Name", "Phase", "Ready", "Step", "Goodput", "Last incident", "Age")
    table = dict(zip(names, await columns(stand), strict=True))
    assert (table["Name"], table["Phase"], table["Ready"], table["Goodput"]) == (NAME, "Running", "4/4", "50%")
    await stand.api.ask("PATCH", f"{BASE}/{NAME}/scale", body={"spec": {"replicas": 6}})
    await stand.until(lambda: stand.status().get("ready") == "6/6", "six nodes")
    assert [one["command"] for _, one in stand.tells.commands] == ["scale"]
    await stand.api.ask("PATCH", f"{BASE}/{NAME}", body={"spec": {"suspend": True}})
    await stand.until(lambda: stand.condition("Suspended")[0] == "True", "it is suspended")
    await stand.api.ask("PATCH", f"{BASE}/{NAME}", body={"spec": {"suspend": False}})
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs again")
    reasons = {one["reason"] for one in stand.objects("events")}
    assert {"Running", "Suspended"} <= reasons
    await stand.api.ask("DELETE", f"{BASE}/{NAME}")
    await stand.until(lambda: stand.job() is None and not stand.left(), "all gone")


@in_a_stand
async def test_an_etcd_that_does_not_answer_keeps_the_object(stand: Stand) -> None:
    """A deleted job stays until its log is removed, and says why, and how to leave the log there, while all of it is there."""
    answers, half, forgotten = asyncio.Event(), asyncio.Event(), list[tuple[str, str, str]]()

    async def forget(namespace: str, name: str, run: str, begun: Callable[[], None]) -> None:
        if half.is_set():
            begun()
        if not answers.is_set():
            raise LogUnavailable("no member answers")
        forgotten.append((namespace, name, run))

    stand.forget, stand.settings = forget, stand.settings._replace(etcd="etcd://e:2379")
    await stand.begin()
    made = await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    await stand.api.ask("DELETE", f"{BASE}/{NAME}")
    await stand.until(lambda: stand.condition("Reconciled")[0] == "False", "it is told")
    said = stand.condition("Reconciled")[1]
    assert "no member answers" in said
    assert f"annotate elasticjobs.{translate.GROUP} {NAME} {reconcile.NOTE_KEEP_LOG}=true" in said
    half.set()
    await stand.until(lambda: "a part of it has gone" in stand.condition("Reconciled")[1], "it is told")
    assert reconcile.NOTE_KEEP_LOG not in stand.condition("Reconciled")[1]
    answers.set()
    await stand.until(lambda: stand.job() is None and not stand.left(), "all gone")
    assert forgotten == [("train", NAME, made["metadata"]["uid"])]


@in_a_stand
async def test_jobs_are_kept_while_an_etcd_does_not_answer(stand: Stand) -> None:
    """Erasing takes nobody's turn; and a log that is to stay after all, while others are erased, stays."""
    asked, answers = list[str](), asyncio.Event()

    async def forget(_: str, name: str, *_more: object) -> None:
        asked.append(name)
        await answers.wait()

    stand.forget, stand.settings = forget, stand.settings._replace(etcd="etcd://e:2379")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "AT_ONCE", 1)
        patch.setattr(operator, "ERASES_AT_ONCE", 1)
        await stand.begin()
    for name in ("first", "second"):
        await applied(stand, job(name))
        await stand.until(lambda name=name: stand.status(name).get("phase") == "Running", "it runs")  # type: ignore[misc]
        await stand.api.ask("DELETE", f"{BASE}/{name}")
        await stand.until(lambda: asked == ["first"] and not stand.left(), "its log alone is left")
    await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "another one runs")
    keeps = {"metadata": {"annotations": {reconcile.NOTE_KEEP_LOG: "true"}}}
    await stand.api.ask("PATCH", f"{BASE}/second", body=keeps)
    await applied(stand, job("last"))
    await stand.until(lambda: stand.status("last").get("phase") == "Running", "the operator has heard of it")
    answers.set()
    await stand.until(lambda: stand.job("first") is None and stand.job("second") is None, "both gone")
    assert asked == ["first"]


async def columns(stand: Stand) -> list[Any]:
    """What `kubectl get elasticjob` prints of the first job."""
    import aiohttp

    headers = {
        "Authorization": f"Bearer {stand.server.token}",
        "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io",
    }
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{stand.server.url}{BASE}") as answer:
        return list((await answer.json())["rows"][0]["cells"])


@in_a_stand
async def test_the_end_of_the_masters_is_the_jobs(stand: Stand) -> None:
    """When the masters' Job is complete so is the object, and a new operator makes nothing again."""
    await stand.begin()
    await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    body = {"status": {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}}
    await stand.api.ask("PATCH", f"/apis/batch/v1/namespaces/train/jobs/{NAME}-masters/status", body=body)
    await stand.until(lambda: stand.condition("Succeeded")[0] == "True", "it has succeeded")
    await stand.api.ask("DELETE", f"/apis/batch/v1/namespaces/train/jobs/{NAME}-masters")
    before = dict(stand.made)
    await stand.kill()
    await stand.begin()
    await applied(stand, job("another"))
    await stand.until(lambda: stand.status("another").get("phase") == "Running", "another one runs")
    assert all(count == before[key] for key, count in stand.made.items() if key in before)


@in_a_stand
async def test_what_is_no_job_is_told_and_then_taken(stand: Stand) -> None:
    """`Accepted` is false with what to write, and true once that is written."""
    await stand.begin()
    await applied(stand, job(line="dlrover-run --nproc_per_node=$HOW_MANY train.py"))
    await stand.until(lambda: stand.condition("Accepted")[0] == "False", "it is refused")
    assert "--nproc-per-node=$HOW_MANY: only the node could tell; write a number" in stand.condition("Accepted")[1]
    assert stand.left() == []
    await stand.api.ask("PATCH", f"{BASE}/{NAME}", body=job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    assert stand.condition("Accepted")[0] == "True"


@in_a_stand
async def test_a_stranger_with_a_name_of_ours(stand: Stand) -> None:
    """A Service that is somebody's under the name of ours stays as it is, and an event names it; what etcd has is theirs, too."""
    forgotten = list[str]()

    async def forget(*what: str) -> None:
        forgotten.extend(what)

    stand.forget, stand.settings = forget, stand.settings._replace(etcd="etcd://e:2379")
    theirs = {"metadata": {"name": f"{NAME}-masters"}, "spec": {"ports": [{"port": 80}]}}
    made = await stand.api.ask("POST", "/api/v1/namespaces/train/services", body=theirs)
    await stand.begin()
    await applied(stand, job())
    await stand.until(lambda: any(one["reason"] == "NameTaken" for one in stand.objects("events")), "it is told")
    (event,) = (one for one in stand.objects("events") if one["reason"] == "NameTaken")
    assert f"Service {NAME}-masters is there, and is not of this job" in event["message"]
    await stand.api.ask("DELETE", f"{BASE}/{NAME}")
    await stand.until(lambda: stand.job() is None and not stand.left(), "all gone")
    assert stand.objects("services")[0]["metadata"]["uid"] == made["metadata"]["uid"]
    assert forgotten == []


@in_a_stand
async def test_beside_dlrovers_own_operator(stand: Stand) -> None:
    """Where that one runs, a job without the annotation is left alone."""
    rival = {"name": "manager", "image": "easydl/elasticjob-controller:master"}
    body = {
        "metadata": {"name": "dlrover-controller-manager-x", "labels": {"control-plane": "controller-manager"}},
        "spec": {"containers": [rival]},
    }
    await stand.api.ask("POST", "/api/v1/namespaces/train/pods", body=body)
    await stand.begin()
    await applied(stand, job("theirs"))
    ours = job()
    ours["metadata"]["annotations"] = {reconcile.NOTE_TAKE: "dlrover-core"}
    await applied(stand, ours)
    await stand.until(lambda: stand.status().get("phase") == "Running", "ours runs")
    assert stand.status("theirs") == {}
    assert "finalizers" not in (stand.job("theirs") or {})["metadata"]


@in_a_stand
async def test_a_missing_right_is_told_and_waited_for(stand: Stand) -> None:
    """A 403 is a condition and an event that name verb, resource and what grants it; with the right the job is made."""
    rules = [one for one in deploy.rules() if "networkpolicies" not in one["resources"]]
    await stand.begin(rules)
    await applied(stand, job())
    await stand.until(lambda: stand.condition("Reconciled")[0] == "False", "it is told")
    words = "no right to create networkpolicies.networking.k8s.io in namespace train: kubectl apply -k deploy/overlays/"
    assert stand.condition("Reconciled")[1].startswith(words)
    assert (stand.status()["phase"], stand.status()["ready"]) == ("Pending", "0/4")
    await stand.until(lambda: any(one["reason"] == "MissingRight" for one in stand.objects("events")), "an event")
    await stand.kill()
    await stand.begin(deploy.rules())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    assert stand.condition("Reconciled") == ("True", "")
    assert len([one for one in stand.objects("events") if one["reason"] == "MissingRight"]) == 1


@in_a_stand
async def test_the_status_goes_on_where_something_cannot_be_written(stand: Stand) -> None:
    """A right that went away while a job runs freezes neither its step nor its end."""
    await stand.begin()
    await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    await stand.kill()
    without = [one for one in deploy.rules() if "configmaps" not in one["resources"]]
    await stand.begin(without)
    change = {"spec": {"replicaSpecs": {"worker": {"replicas": 5}}}}
    await stand.api.ask("PATCH", f"{BASE}/{NAME}", body=change)
    await stand.until(lambda: stand.condition("Reconciled")[0] == "False", "it is told")
    assert "no right to get configmaps in namespace train" in stand.condition("Reconciled")[1]
    body = {"status": {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}}
    await stand.api.ask("PATCH", f"/apis/batch/v1/namespaces/train/jobs/{NAME}-masters/status", body=body)
    await stand.until(lambda: stand.status().get("phase") == "Succeeded", "its end is told")


@in_a_stand
async def test_masters_that_cannot_be_asked(stand: Stand) -> None:
    """Without the right to read the token the status says that, and not that masters start."""
    await stand.begin()
    await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    await stand.kill()
    rules = [{**one, "resources": [each for each in one["resources"] if each != "secrets"]} for one in deploy.rules()]
    await stand.begin(rules)
    words = "no master answers: no right to get secrets in namespace train"
    await stand.until(lambda: stand.condition("Running")[1].startswith(words), "it is told")
    assert stand.status()["phase"] == "Running"


@in_a_stand
async def test_a_fault_of_ours_leaves_no_empty_status(stand: Stand) -> None:
    """Where the operator itself fails a condition says how, and the job is kept once it no longer does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconcile, "plan_of", lambda *_: 1 / 0)
        await stand.begin()
        await applied(stand, job())
        await stand.until(lambda: stand.condition("Accepted")[0] == "False", "a reading that fails is told")
        assert "ZeroDivisionError" in stand.condition("Accepted")[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconcile, "_keeping", lambda *_: 1 / 0)
        await stand.until(lambda: stand.condition("Reconciled")[0] == "False", "a fault is told")
        assert stand.condition("Reconciled")[1].startswith("ZeroDivisionError: division by zero")
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    assert (stand.condition("Reconciled")[0], stand.condition("Accepted")[0]) == ("True", "True")


@in_a_stand
async def test_owners_alone_are_believed(stand: Stand) -> None:
    """A pod of a stranger's Job, whatever its notes say, outlives a job that is deleted; one of its masters does not."""
    await stand.begin()
    made = await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")
    spec = {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "a", "image": "a"}]}}}
    jobs, pods = "/apis/batch/v1/namespaces/train/jobs", "/api/v1/namespaces/train/pods"
    theirs = await stand.api.ask("POST", jobs, body={"metadata": {"name": "theirs"}, "spec": spec})
    ours = await stand.api.ask("GET", f"{jobs}/{NAME}-masters")
    for name, owner in (("stranger", theirs), (f"{NAME}-masters-0", ours)):
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner["metadata"]["name"]}
        metadata = {
            "name": name,
            "labels": {names.LABEL_BY: names.BY},
            "annotations": {"dlrover-core/elasticjob-uid": made["metadata"]["uid"]},
            "ownerReferences": [{**reference, "uid": owner["metadata"]["uid"]}],
        }
        body = {"metadata": metadata, "spec": {"containers": [{"name": "a", "image": "a"}]}}
        await stand.api.ask("POST", pods, body=body)
    await stand.api.ask("DELETE", f"{BASE}/{NAME}")
    await stand.until(lambda: stand.job() is None and not stand.left(), "all gone")
    assert [one["metadata"]["name"] for one in stand.objects("pods")] == ["stranger"]


# ---- the lease


@in_a_stand
async def test_one_operator_leads(stand: Stand) -> None:
    """A second one waits; a lease that is given up is taken at once, one that is not when it is over."""
    now = [time.monotonic()]
    began: list[str] = []

    def make(who: str) -> tuple[Leader, Callable[[], Coroutine[Any, Any, None]]]:
        async def work() -> None:
            began.append(who)
            await asyncio.Event().wait()

        return Leader(stand.api, "train", who, now=lambda: now[0], wall=time.time), work

    first, second = make("a"), make("b")
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(leader, "TRY_S", 0.02)
        one = asyncio.ensure_future(first[0].lead(first[1]))
        await stand.until(lambda: began == ["a"], "the first leads")
        two = asyncio.ensure_future(second[0].lead(second[1]))
        lease = stand.objects("leases", "coordination.k8s.io")[0]
        assert lease["spec"]["holderIdentity"] == "a"
        assert "." in lease["spec"]["renewTime"]
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        await stand.until(lambda: began == ["a", "b"], "the second leads")
        third = make("c")
        quick.setattr(Leader, "_release", lambda _: asyncio.sleep(0))  # as one that was killed
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        three = asyncio.ensure_future(third[0].lead(third[1]))
        looks = stand.server.requests
        await stand.until(lambda: stand.server.requests > looks + 3, "the third has looked")
        assert began == ["a", "b"]
        now[0] += leader.DURATION_S
        await stand.until(lambda: began == ["a", "b", "c"], "the third leads")
        three.cancel()
        await asyncio.gather(three, return_exceptions=True)


@in_a_stand
async def test_a_lease_that_is_lost_ends_the_work(stand: Stand) -> None:
    """A leader whose lease another one holds stops at its next renewal."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(leader, "TRY_S", 0.02)
        made = Leader(stand.api, "train", "a", now=time.monotonic, wall=time.time, lease_s=0.6)
        one = asyncio.ensure_future(made.lead(work))
        await asyncio.wait_for(began.wait(), BOUND_S)
        path = "/apis/coordination.k8s.io/v1/namespaces/train/leases/dlrover-operator"
        taken = False
        while not taken:
            found = await stand.api.ask("GET", path)
            with contextlib.suppress(Conflict):
                await stand.api.ask("PUT", path, body={**found, "spec": {**found["spec"], "holderIdentity": "b"}})
                taken = True
        await asyncio.wait_for(ended.wait(), BOUND_S)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
    assert stand.objects("leases", "coordination.k8s.io")[0]["spec"]["holderIdentity"] == "b"


# ---- seeds


@pytest.mark.parametrize("seed", range(6))
def test_every_seed_ends_right(seed: int) -> None:
    """Faults of the server, edits, and operators that die: sizes and pauses are as asked, nothing is made twice, or stays."""
    trial(seed)
