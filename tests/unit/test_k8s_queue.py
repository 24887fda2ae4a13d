"""Jobs in Kueue's queue: waiting costs nothing, MIN starts, quota makes it grow and shrink, and an evicted job comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from k8s_virtual import HOUR_S, Queued, tell

from dlrover_backends.k8s import queues, settings
from dlrover_backends.k8s.api import Api
from dlrover_backends.k8s.queues import EVICT_S, Queue
from dlrover_core import BackendContext, LaunchRefused
from dlrover_core.job import job, operations
from dlrover_core.testing.backend_stand import make_launch


def blameless(on: Queued) -> None:
    """No incident opened, and no budget was touched."""
    state = on.cluster.state
    assert (state.incidents.number, state.incidents.relaunches) == (0, {})


def lost(on: Queued) -> int:
    """Steps that were made twice."""
    steps = [step for _, step in on.cluster.training.log]
    return len(steps) - len(set(steps))


def conditions(on: Queued, place: str = "") -> dict[str, str]:
    """The conditions of the Workload of a place."""
    (found,) = (one for one in on.kueue.workloads if one["metadata"]["annotations"]["dlrover-core/place"] == place)
    return {one["type"]: one["status"] for one in found["status"]["conditions"]}


def test_six_hours_in_a_queue() -> None:
    """Nothing fits for six hours: no pod is made, no incident opens, the status has Kueue's words; then the job starts."""

    async def story(on: Queued) -> None:
        await asyncio.sleep(6 * HOUR_S)
        assert on.pods == []
        assert len(on.kueue.workloads) == 1, "nodes above MIN ask for nothing yet"
        waits = {node.waits for node in on.cluster.state.nodes.nodes.values()}
        assert len(waits) == 1
        assert "insufficient unused quota for cpu in flavor default-flavor, 2 more needed" in waits.pop()
        assert len(await on.cluster.records()) < 100
        on.kueue.quota = 2
        at = asyncio.get_running_loop().time()
        await on.cluster.until(lambda: on.step > 0)
        assert asyncio.get_running_loop().time() - at < 10
        assert on.size == 2
        blameless(on)

    tell(story, quota=0)


def test_a_template_that_is_missing_is_waited_for() -> None:
    """Masters whose ConfigMap is gone say so, and go on once it is back: nothing can be asked of Kueue before."""

    async def story(on: Queued) -> None:
        said = "Template: there is no ConfigMap mine, which holds the template of the nodes: put it back, or start the job anew"
        await on.cluster.until(lambda: [one.waits for one in on.cluster.state.nodes.nodes.values()] == [said] * 4)
        assert on.kueue.workloads == []
        node = {"name": "node", "image": "i", "resources": {"requests": {"cpu": "1"}}}
        made = {"metadata": {"name": "mine"}, "data": {"default": json.dumps({"spec": {"containers": [node]}})}}
        await on.api.ask("POST", "/api/v1/namespaces/ml/configmaps", body=made)
        await on.cluster.until(lambda: on.size == 4)
        blameless(on)

    tell(story, quota=9, args=",template=configmap:mine")


def test_it_grows_with_quota() -> None:
    """Each node above MIN is admitted by itself, and its pod goes where its flavor is."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 2 and on.step > 3)
        assert len(on.kueue.workloads) == 3
        assert conditions(on)["PodsReady"] == "True"
        on.kueue.quota = 3
        await on.cluster.until(lambda: on.size == 3)
        on.kueue.quota = 9
        await on.cluster.until(lambda: on.size == 4)
        for pod in on.pods:
            assert pod["spec"]["nodeSelector"] == {"pool": "h100"}
            assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
            assert not any("kueue" in key for key in pod["metadata"]["labels"]), "no group of pods of Kueue's"
        assert on.kueue.used == 4
        blameless(on)
        assert lost(on) == 0

    toleration = {"key": "gpu", "operator": "Exists"}
    tell(story, quota=2, labels={"pool": "h100"}, tolerations=[toleration])


def test_a_node_above_min_is_evicted() -> None:
    """It leaves at a step boundary, its quota is given back when its pod is gone, and it comes back with quota."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 4 and on.step > 3)
        on.kueue.quota = 3
        on.kueue.evict(1)
        assert on.kueue.used == 4, "an evicted one keeps its quota until it is given back"
        at = asyncio.get_running_loop().time()
        await on.cluster.until(lambda: on.size == 3)
        await on.cluster.until(lambda: on.kueue.used == 3)
        assert len(on.pods) == 3
        assert asyncio.get_running_loop().time() - at < EVICT_S + 10
        await asyncio.sleep(HOUR_S)
        assert on.size == 3
        on.kueue.quota = 4
        await on.cluster.until(lambda: on.size == 4)
        blameless(on)
        assert lost(on) == 0

    tell(story, quota=4)


def test_min_is_evicted_and_comes_back() -> None:
    """The job saves at one step, frees everything, waits for hours, and goes on from that step; nothing is lost or charged."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 4 and on.step > 5)
        on.kueue.quota = 0
        on.kueue.evict(2)
        await on.cluster.until(lambda: on.pods == [])
        await on.cluster.until(lambda: on.kueue.used == 0)
        step = on.step
        assert on.cluster.state.job.freed
        assert "Kueue: queue research: Preempted: Preempted to accommodate" in on.cluster.state.job.reason
        await asyncio.sleep(6 * HOUR_S)
        assert conditions(on)["Requeued"] == "True"
        assert len(on.kueue.workloads) == 1
        on.kueue.quota = 4
        await on.cluster.until(lambda: on.size == 4 and on.step > step)
        assert on.cluster.training.saving is not None
        assert on.cluster.training.saving.restores[-1].state[1] == step
        blameless(on)
        assert lost(on) == 0

    tell(story, quota=4)


def test_a_workload_that_somebody_deactivates() -> None:
    """``spec.active: false`` is an eviction, and the job waits until it is true again; we do not set it."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.step > 5)
        name = next(
            one["metadata"]["name"]
            for one in on.kueue.workloads
            if not one["metadata"]["annotations"]["dlrover-core/place"]
        )
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads/{name}"
        await on.api.ask("PATCH", path, body={"spec": {"active": False}})
        await on.cluster.until(lambda: on.kueue.used == 0)
        await asyncio.sleep(HOUR_S)
        assert on.pods == []
        await on.api.ask("PATCH", path, body={"spec": {"active": True}})
        await on.cluster.until(lambda: on.size == 4)
        blameless(on)

    tell(story, quota=4)


def test_a_person_suspends() -> None:
    """Quota is given back, admission does not wake the job, and when the person resumes it, it queues anew."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.step > 5)
        await on.cluster.master.submit(job.SuspendJob("the night", keep_nodes=False, lose=True))
        await on.cluster.until(lambda: on.kueue.used == 0)
        assert (on.pods, on.kueue.workloads) == ([], [])
        await asyncio.sleep(HOUR_S)
        assert on.kueue.workloads == []
        await on.cluster.master.submit(job.ResumeJob("the morning"))
        await on.cluster.until(lambda: on.size == 4)
        blameless(on)

    tell(story, quota=4)


def test_the_end_of_the_job_is_told() -> None:
    """Every Workload is finished when the job is, so that its quota is free."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 3)
        await on.cluster.master.submit(job.StopJob("enough"))
        await on.cluster.outcome()
        assert on.kueue.used == 0
        assert conditions(on)["Finished"] == "True"

    tell(story, quota=3)


def test_a_workload_that_is_deleted() -> None:
    """Somebody deletes the Workload under a job that trains: it is asked for anew, and the job goes on when it is admitted."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 4 and on.step > 5)
        for one in on.kueue.workloads:
            await on.api.ask(
                "DELETE", f"/apis/kueue.x-k8s.io/v1beta2/namespaces/ml/workloads/{one['metadata']['name']}"
            )
        step = on.step
        await on.cluster.until(lambda: on.size == 4 and on.step > step + 5)
        assert on.kueue.used == 4
        blameless(on)
        assert lost(on) == 0

    tell(story, quota=4)


def test_a_new_master_in_the_middle_of_an_eviction() -> None:
    """The leader dies when it has heard of the eviction: its successor frees everything, gives the quota back, and resumes."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 4 and on.step > 5)
        on.kueue.quota = 0
        on.kueue.evict(2)
        await on.cluster.until(lambda: on.cluster.state.job.suspension is not None)
        on.cluster.kill_master()
        on.cluster.start_master()
        await on.cluster.until(lambda: on.kueue.used == 0)
        assert on.pods == []
        on.kueue.quota = 4
        await on.cluster.until(lambda: on.size == 4)
        blameless(on)

    tell(story, quota=4)


def test_min_that_is_scaled_while_it_waits() -> None:
    """Pod sets of a Workload cannot change: one that holds no quota is made anew in the new size."""

    async def story(on: Queued) -> None:
        await asyncio.sleep(60)
        assert on.kueue.used == 0
        await on.cluster.master.submit(operations.ScaleGroup("worker", 1, 2, "less"))
        await on.cluster.until(lambda: on.size == 1)
        await on.cluster.master.submit(operations.ScaleGroup("worker", 1, 1, "less"))
        await on.cluster.until(lambda: len(on.kueue.workloads) == 1)
        blameless(on)

    tell(story, quota=1)


def test_a_node_that_dies_keeps_its_quota() -> None:
    """A failure is ours: the successor is launched at once under the same admission, and Kueue hears of no other size."""

    async def story(on: Queued) -> None:
        await on.cluster.until(lambda: on.size == 4 and on.step > 5)
        names = {one["metadata"]["uid"] for one in on.kueue.workloads}
        on.cluster.platform.kill("queued-worker-0-0")
        await on.cluster.until(lambda: on.size == 4 and "worker-0-1" in on.cluster.state.world.worlds["worker"].places)
        assert on.cluster.state.incidents.number == 1
        assert {one["metadata"]["uid"] for one in on.kueue.workloads} == names
        assert on.kueue.used == 4
        await on.cluster.until(lambda: conditions(on)["PodsReady"] == "True")

    tell(story, quota=4)


def test_whatever_ends_the_watch_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are refused in its words. Pods are observed meanwhile: the loop beside them ends with no error."""
    monkeypatch.setattr(queues, "RETRY_S", (0.0,))

    class Odd:
        namespace, living = "ml", None
        asked, again = 0, asyncio.Event()

        @property
        def api(self) -> Api:
            self.asked += 1
            if self.asked == 3:
                self.again.set()
            raise KeyError("metadata")

    async def ask(method: str, path: str, body: object = None) -> Any:
        raise AssertionError(f"{method} {path}")

    async def story() -> None:
        here, cluster = BackendContext("queued", "run-1", ("m:1",), "t", args="image=i,queue=research"), Odd()
        queue = Queue(here, settings.read(here), ask, cluster=cluster)
        running = asyncio.ensure_future(anext(queue.run()))
        await cluster.again.wait()
        with pytest.raises(LaunchRefused, match="its Workloads cannot be watched: KeyError: 'metadata'"):
            queue.admit(make_launch(), {})
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 20))
