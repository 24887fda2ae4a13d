"""Warm pods: real masters and agents, the production backend and the fake API server in virtual time; pods are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from k8s_inside import EPOCH, Inside
from k8s_virtual import PODS, Pods

from dlrover_backends.k8s import claims, names, standbys
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import Busy, Conflict, Request
from dlrover_backends.k8s.warm import DEAF_S, FENCE_S
from dlrover_core import BackendContext
from dlrover_core.errors import LaunchRefused
from dlrover_core.history import incident_of, render_story
from dlrover_core.job import job
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.backend import GroupSize, Wanted
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.platform import Platform
from dlrover_core.testing.training import MemoryLauncher, Training

HERE = BackendContext("warm", "run-1", ("m:1",), "t", arguments=("a.py",), args="image=i,namespace=ml")
SIZE = GroupSize("worker", "worker", 2, 2, standby=1)
OWNER = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own", "uid": "u-0"}}


class Warmed(Cluster):
    """A cluster some of whose machines are standbys. ``boots`` are the agents' boots by their pods' names."""

    def agent(self, node: NodeLaunch, host: str) -> Agent:
        """The agent of a pod; a standby's has no name."""
        if not node.node.startswith(standbys.STANDBY_SEAT):
            return super().agent(node, host)
        launcher = self.launchers[node.node] = MemoryLauncher(node.node, 1, self.training)
        self._boots += 1
        made = Agent(
            "",
            launcher=launcher,
            dialer=self.network.dialer(node.node),
            masters=self.addresses,
            boot=self._boots,
            host=host,
            address=node.node,
            seat=node.node,
            duties=self.training.duties(),
        )
        self.agents[node.node] = made
        return made

    def training_of(self, node: str) -> Training:
        """There is one set."""
        return self.training


class Kubelet(Pods):
    """Lets each pod be a machine of its own name, a standby's too."""

    def machine(self, pod: dict[str, Any]) -> NodeLaunch:
        """What a pod is on the platform."""
        notes = pod["metadata"]["annotations"]
        node = notes.get(names.NOTE_NODE) or standbys.seat_of(pod)
        avoid = tuple(filter(None, notes.get(names.NOTE_AVOID, "").split(",")))
        return NodeLaunch(pod["metadata"]["name"], node, "worker", 0, 0, 1, avoid)


class Stage:
    """A job with standbys, and its pods."""

    def __init__(self, cluster: Warmed, api: Inside) -> None:
        self.cluster, self.api = cluster, api

    def pods(self) -> dict[str, dict[str, Any]]:
        """Living pods of nodes, by node."""
        found = [one for one in self.api.objects("pods") if standbys.lives(one) and not standbys.is_free(one)]
        return {one["metadata"]["annotations"][names.NOTE_NODE]: one for one in found}

    def free(self) -> list[dict[str, Any]]:
        """Free standbys that live and stay."""
        found = [one for one in self.api.objects("pods") if standbys.is_free(one) and standbys.lives(one)]
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    async def warm(self, count: int = 1) -> None:
        """Wait until so many standbys answer the leader."""
        await self.cluster.until(lambda: len(self.cluster.master.sessions.standbys) == count == len(self.free()))

    def kill(self, pod: dict[str, Any], word: str = "OOMKilled") -> None:
        """Kill a pod's processes."""
        self.cluster.platform.kill(pod["metadata"]["name"], word)

    def generation(self) -> int:
        """The world that trains; 0: none does."""
        world = self.cluster.state.world.worlds.get("worker")
        return world.generation if world is not None and world.active else 0

    async def steps(self) -> None:
        """Wait for a step in the present world."""
        done = self.cluster.training.done
        await self.cluster.until(lambda: self.cluster.training.done > done + 1)


def tell(
    story: Callable[[Stage], Awaitable[None]],
    *,
    standby: int = 1,
    hosts: tuple[str, ...] = (),
    args: str = "",
    memory_mib: int = 0,
) -> None:
    """Tell a story of a job of two nodes in virtual time."""

    async def whole() -> None:
        loop, api = asyncio.get_running_loop(), Inside()
        api.tick()
        here = HERE if not args else BackendContext(**{**vars(HERE), "args": f"{HERE.args},{args}"})

        def made(_: Platform) -> KubernetesBackend:
            return KubernetesBackend(here, api, now=loop.time, wall=lambda: EPOCH.timestamp() + loop.time())

        spec = JobSpec("warm", (GroupSpec(nodes_min=2, nodes_max=2, nproc=1, standby=standby, memory_mib=memory_mib),))
        cluster = Warmed(spec, training=Training(10**6, step_s=0.1), backend=made, hosts=hosts)
        async with cluster:
            kubelet = asyncio.ensure_future(Kubelet(api, cluster.platform).run())
            try:
                await story(Stage(cluster, api))
            finally:
                kubelet.cancel()
                await asyncio.gather(kubelet, return_exceptions=True)

    virtual_loop.run(whole(), limit_s=40_000)


def test_a_dead_node_is_followed_by_the_warm_pod() -> None:
    """The standby's pod is the next incarnation, sooner than any pod boots; another standby is made; the log says so."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        assert warm["metadata"]["labels"][names.LABEL_STANDBY] == "worker"
        assert names.LABEL_NODE not in warm["metadata"]["labels"]
        assert set(on.cluster.state.nodes.nodes) == {"worker-0-0", "worker-1-0"}, "it is no node"
        at, before = asyncio.get_running_loop().time(), on.generation()
        on.kill(on.pods()["worker-1-0"])
        await on.cluster.until(lambda: on.generation() > before)
        assert asyncio.get_running_loop().time() - at < on.cluster.platform.boot_s / 2
        node = on.pods()["worker-1-1"]
        assert node["metadata"]["uid"] == warm["metadata"]["uid"]
        assert node["metadata"]["labels"][names.LABEL_INDEX] == "1"
        assert names.LABEL_STANDBY not in node["metadata"]["labels"]
        await on.steps()
        await on.warm()
        assert on.free()[0]["metadata"]["uid"] != warm["metadata"]["uid"]
        told = incident_of(await on.cluster.records())
        assert told is not None
        assert "NodeJoined: a warm standby on host-0 became worker-1-1, with 1 worker" in render_story.story(told)
        assert on.cluster.state.incidents.relaunches == {"worker-1": 1}

    tell(story)


def test_two_nodes_die_and_one_is_warm() -> None:
    """One takes the standby and the other a new pod; no node has two."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        for pod in on.pods().values():
            on.kill(pod)
        await on.cluster.until(lambda: on.generation() > 1 and on.cluster.training.done > 10)
        found = on.pods()
        assert set(found) == {"worker-0-1", "worker-1-1"}
        assert [one["metadata"]["uid"] == warm["metadata"]["uid"] for one in found.values()].count(True) == 1
        await on.warm()

    tell(story)


def test_the_next_master_names_what_was_claimed() -> None:
    """A master dies between the claim and the name: its successor gives the name, and the pod stays the one."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        asked = on.api.ask

        async def dies(method: str, path: str, **rest: Any) -> dict[str, Any]:
            answer = await asked(method, path, **rest)
            if method == "PATCH" and path.endswith(warm["metadata"]["name"]):
                on.api.ask = asked  # type: ignore[method-assign]
                on.cluster.kill_master()
                on.cluster.start_master()
                await asyncio.sleep(3600)
            return answer

        on.api.ask = dies  # type: ignore[method-assign]
        on.kill(on.pods()["worker-1-0"])
        await on.cluster.until(lambda: len(on.cluster.masters) == 2 and on.generation() > 1)
        await on.steps()
        assert on.pods()["worker-1-1"]["metadata"]["uid"] == warm["metadata"]["uid"]
        assert set(on.pods()) == {"worker-0-0", "worker-1-1"}
        assert on.cluster.state.incidents.relaunches == {"worker-1": 1}
        await on.warm()

    tell(story)


def test_a_standby_that_dies_costs_nothing() -> None:
    """It is replaced at growing intervals; no incident opens and nothing is recorded."""

    async def story(on: Stage) -> None:
        waits = []
        for _ in range(3):
            await on.warm()
            seq, at = on.cluster.state.seq, asyncio.get_running_loop().time()
            on.kill(on.free()[0])
            await on.cluster.until(lambda: not on.free())
            await on.warm()
            waits.append(asyncio.get_running_loop().time() - at)
            assert on.cluster.state.seq == seq
        assert waits[0] < waits[1] < waits[2]
        assert (on.cluster.state.incidents.number, on.cluster.state.incidents.relaunches) == (0, {})

    tell(story)


def test_an_avoided_host_s_standby_is_not_taken() -> None:
    """A standby beside the node that is moved off a host stays no standby there: the node and it are elsewhere."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        host = standbys.host_of(warm)
        backend: Any = on.cluster.master._leveller._backend  # type: ignore[union-attr]
        owner, node = await backend._owned(), NodeLaunch("warm-worker-1-1", "worker-1-1", "worker", 1, 1, 1, (host,))
        assert await backend._warm.take(node, owner, backend._template, 99) is None
        await on.cluster.until(lambda: bool(on.free()) and on.free()[0]["metadata"]["uid"] != warm["metadata"]["uid"])
        assert on.free()[0]["metadata"]["annotations"][names.NOTE_AVOID] == host

    tell(story, hosts=("a", "b", "c", "d"))


def test_a_job_that_pauses_or_ends_has_none() -> None:
    """Standbys go with the nodes, and come back after them."""

    async def story(on: Stage) -> None:
        await on.warm()
        await on.cluster.leader.submit(job.SuspendJob("later", keep_nodes=False, lose=True))
        await on.cluster.until(lambda: not on.api.objects("pods"))
        await on.cluster.leader.submit(job.ResumeJob("now"))
        await on.warm()
        await on.cluster.leader.submit(job.StopJob("enough"))
        await on.cluster.outcome()
        await on.cluster.until(lambda: not on.free())

    tell(story)


def test_standbys_give_way_to_a_node_that_waits() -> None:
    """There are three hosts and a standby is on the third: a node that cannot be it gets the room."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        path = f"{PODS}/{warm['metadata']['name']}"
        await on.api.ask("PATCH", path, body={"metadata": {"annotations": {names.NOTE_SHAPE: "another"}}})
        on.kill(on.pods()["worker-1-0"])
        await on.cluster.until(lambda: on.generation() > 1)
        assert on.pods()["worker-1-1"]["metadata"]["uid"] != warm["metadata"]["uid"]
        await on.steps()

    tell(story, hosts=("a", "b", "c"))


def test_a_gang_has_no_standbys() -> None:
    """Beside a gang none is made, whatever the spec says."""

    async def story(on: Stage) -> None:
        backend = KubernetesBackend(BackendContext(**{**vars(HERE), "args": "image=i,queue=q"}), on.api)
        assert backend._warm is None
        await backend.close()

    tell(story)


@pytest.mark.parametrize("args", ["namespace=ml", "namespace=ml,template=configmap:none"])
def test_standbys_that_cannot_be_described_hold_up_nothing(args: str) -> None:
    """Without an image or a template the sizes are known all the same: each launch says what is wrong."""

    async def story() -> None:
        backend = KubernetesBackend(BackendContext(**{**vars(HERE), "args": args}), Inside())
        assert backend._warm is not None
        await backend.sized(Wanted((SIZE,)), 1)
        assert backend._warm.used

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_broken_template_leaves_standbys_and_claims() -> None:
    """A master that leads while the template is broken deletes no standby, and a node stays what the book says."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        heir: Any = KubernetesBackend(HERE, on.api, now=asyncio.get_running_loop().time)

        async def broken(group: str) -> None:
            raise LaunchRefused(f"template of {group}: no JSON", permanent=True)

        heir._template = broken
        owner, uid, keeper = await heir._owned(), warm["metadata"]["uid"], heir._warm
        await heir.sized(Wanted((SIZE,)), 1)
        assert keeper._unfit(uid, warm) == ""
        said = claims.Standby(warm["metadata"]["name"], uid)
        assert await keeper._claims.write(await keeper._claims.read(owner), "worker-1-1", said.text)
        node = NodeLaunch("warm-worker-1-1", "worker-1-1", "worker", 1, 1, 1, ())
        assert await heir.launch(node, 1) == standbys.seat_of(warm)

    tell(story)


def test_standbys_that_could_not_be_described_for_a_moment() -> None:
    """An error of the API that passes delays them by a back-off, and not until the leader says the sizes again."""

    async def story(on: Stage) -> None:
        await on.warm()
        backend: Any = on.cluster.master._leveller._backend  # type: ignore[union-attr]
        described, failed = backend._template, list[float]()

        async def fails(group: str) -> Any:
            if len(failed) == 3:
                return await described(group)
            failed.append(asyncio.get_running_loop().time())
            raise Busy(Request("GET", "/api/v1/namespaces/ml/configmaps/mine"), 503, "etcd is away")

        backend._template = fails
        on.cluster.state.incidents.memory["worker"] = 2048
        await on.cluster.until(lambda: [_memory(one) for one in on.free()] == ["2048Mi"])
        assert len(failed) == 3
        assert asyncio.get_running_loop().time() - failed[0] < 10

    tell(story, memory_mib=1024)


def test_silence_counts_from_when_it_runs() -> None:
    """A standby that was pending for long is not deaf the moment it runs."""
    at = [0.0]
    backend: Any = KubernetesBackend(HERE, Inside(), now=lambda: at[0])
    pod: Any = standbys.manifest(HERE, backend._told, standbys.node_of(SIZE), OWNER)
    pod["metadata"] |= {"uid": "u-1", "resourceVersion": "1"}

    async def story() -> None:
        async def owned() -> Any:
            return OWNER

        async def template(_: str) -> None:
            return None

        keeper = backend._warm
        await keeper.sized(Wanted((SIZE,)), owned, template, 1)
        keeper.changed("ADDED", pod)
        at[0] += 2 * DEAF_S
        running = {**pod, "status": {"phase": "Running"}}
        keeper.changed("MODIFIED", running)
        assert keeper._unfit("u-1", running) == ""
        at[0] += DEAF_S + 1
        assert "no master has heard" in keeper._unfit("u-1", running)
        keeper.heard(())
        assert keeper._unfit("u-1", running) == "", "nobody listened until now: its agent may come yet"
        for _ in range(int(DEAF_S) + 1):
            at[0] += 1
            keeper.heard(())
        assert "no master has heard" in keeper._unfit("u-1", running)

    asyncio.run(story())


def test_a_mistake_is_not_the_end_of_standbys() -> None:
    """An error of our own is logged, and standbys are made all the same afterwards."""

    async def story(on: Stage) -> None:
        backend: Any = on.cluster.master._leveller._backend  # type: ignore[union-attr]
        keeper, failed = backend._warm, []
        level = keeper._level

        async def fails() -> float:
            failed.append(1)
            keeper._level = level
            raise KeyError("gone")

        await on.warm()
        keeper._level = fails
        on.kill(on.free()[0])
        await on.cluster.until(lambda: bool(failed))
        await on.cluster.until(lambda: not on.free())
        await on.warm()

    tell(story)


def test_standbys_get_the_memory_that_nodes_get() -> None:
    """Once nodes are launched with more memory than the spec says, standbys are made with it too, and fit."""

    async def story(on: Stage) -> None:
        await on.warm()
        on.cluster.state.incidents.memory["worker"] = 2048
        await on.cluster.until(lambda: [_memory(one) for one in on.free()] == ["2048Mi"])
        await on.warm()
        (warm,) = on.free()
        on.kill(on.pods()["worker-1-0"])
        await on.cluster.until(lambda: "worker-1-1" in on.pods())
        assert on.pods()["worker-1-1"]["metadata"]["uid"] == warm["metadata"]["uid"]
        assert on.cluster.state.nodes.nodes["worker-1-1"].memory_mib == 2048

    tell(story, memory_mib=1024)


def _memory(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["resources"]["limits"]["memory"])


def test_a_master_that_may_not_order_leaves_standbys_alone() -> None:
    """None is made or removed meanwhile, and none is deaf for what nobody listened to."""

    async def story(on: Stage) -> None:
        await on.warm(2)
        kept, leader = on.free()[0], on.cluster.leader
        may: Any = leader.may_order
        leader.may_order = lambda: False  # type: ignore[method-assign]
        await asyncio.sleep(2 * FENCE_S)
        on.kill(on.free()[1])
        await on.cluster.until(lambda: len(on.free()) == 1)
        asked = len(on.api.asked)
        await asyncio.sleep(2 * DEAF_S)
        made = [one for one in on.api.asked[asked:] if one[0] in {"POST", "DELETE"} and "/pods" in one[1]]
        assert not [one for one in made if "binding" not in one[1]]
        leader.may_order = may  # type: ignore[method-assign]
        await on.warm(2)
        assert kept["metadata"]["uid"] in {one["metadata"]["uid"] for one in on.free()}

    tell(story, standby=2)


def test_launches_of_one_master_do_not_compete_for_the_book() -> None:
    """Sixteen nodes are launched at once: each is decided at its first try, and no standby is two nodes."""

    async def story(on: Stage) -> None:
        await on.warm(2)
        backend: Any = on.cluster.master._leveller._backend  # type: ignore[union-attr]
        asked, inside = on.api.ask, on.api
        refused: list[str] = []

        async def slow(method: str, path: str, **rest: Any) -> dict[str, Any]:
            await asyncio.sleep(0.01)
            try:
                return await asked(method, path, **rest)
            except Conflict:
                refused.append(path)
                raise

        inside.ask = slow  # type: ignore[method-assign]
        nodes = [NodeLaunch(f"warm-worker-{n}-1", f"worker-{n}-1", "worker", n, 1, 1, ()) for n in range(2, 18)]
        seats = await asyncio.gather(*(backend.launch(one, 99) for one in nodes))
        inside.ask = asked  # type: ignore[method-assign]
        taken = [one for one in seats if one is not None]
        assert len(taken) == len(set(taken)) >= 2
        assert not [one for one in refused if "configmaps" in one]

    tell(story, standby=2)


def test_the_book_forgets_earlier_nodes_alone() -> None:
    """A decision for a node leaves later ones of its place, and other places, where they are."""
    said = {"w-1-2": "own", "w-1-3": "own", "w-1-10": "own", "w-11-1": "own", "v-w-1-1": "own"}
    book = claims.Book({"metadata": {"uid": "u", "resourceVersion": "1"}, "data": said})
    assert book.decision("w-1-3", "own")["data"] == {"w-1-2": None, "w-1-3": "own"}
    assert [node for node in said if book.is_past(node)] == ["w-1-2", "w-1-3"]


def test_a_late_launch_and_a_lost_book() -> None:
    """A launch that a later one of its place has overtaken is refused; without a book a node stays the pod that it is."""

    async def story(on: Stage) -> None:
        await on.warm()
        (warm,) = on.free()
        backend: Any = on.cluster.master._leveller._backend  # type: ignore[union-attr]
        node = NodeLaunch("warm-worker-7-2", "worker-7-2", "worker", 7, 2, 1, ())
        assert await backend.launch(node, 99) == standbys.seat_of(warm)
        earlier = node._replace(name="warm-worker-7-1", node="worker-7-1", incarnation=1)
        with pytest.raises(LaunchRefused, match="a later node of its place") as refused:
            await backend.launch(earlier, 99)
        assert refused.value.permanent
        await on.api.ask("DELETE", f"/api/v1/namespaces/ml/configmaps/{names.claims_name('warm', 'run-1')}")
        assert await backend.launch(node, 99) == standbys.seat_of(warm)

    tell(story)


@pytest.mark.parametrize(
    ("status", "may"),
    [
        ({"phase": "Running"}, True),
        ({"phase": "Pending"}, True),
        ({"phase": "Unknown"}, False),
        ({"phase": "Failed"}, False),
        (
            {"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "Evicted"}]},
            False,
        ),
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]}, False),
    ],
)
def test_a_standby_that_is_not_well_is_not_taken(status: dict[str, Any], may: bool) -> None:
    """Nor one that is about to be taken away."""
    backend, node = KubernetesBackend(HERE, Inside()), standbys.node_of(SIZE)
    pod = standbys.manifest(HERE, backend._told, node, OWNER)
    assert standbys.may_be({**pod, "status": status}, node, standbys.shape_of(pod)) == may
