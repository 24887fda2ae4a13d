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

from dlrover_backends.fake_k8s import Fault, What
from dlrover_backends.k8s.elasticjob import leader, reconcile
from dlrover_backends.k8s.elasticjob.leader import Leader
from dlrover_backends.k8s.errors import Conflict

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
    """A Service that is somebody's under the name of ours stays as it is, and an event names it."""
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
async def test_a_missing_right_is_waited_for(stand: Stand) -> None:
    """A 403 stops nothing for good: once the right is there, the job is made."""
    stand.server.faults.add(Fault(What.ERROR, frozenset({"create"}), "services", code=403, times=3))
    await stand.begin()
    await applied(stand, job())
    await stand.until(lambda: stand.status().get("phase") == "Running", "it runs")


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
