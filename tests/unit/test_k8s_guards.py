"""What guards the nodes of an attached job, as masters in pods guard theirs."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from k8s_inside import Inside

from dlrover_backends.k8s import budgets, names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import ApiError, Busy, Forbidden, Request, Unreachable
from dlrover_core.runtime.backend import GroupSize, Wanted
from dlrover_core.runtime.backends import BackendContext
from dlrover_core.testing.backend_stand import make_launch, watching

Json = dict[str, Any]

HERE = BackendContext("digits", "r-1", ("m:1",), "t" * 8, arguments=("x.py",), args="image=i,namespace=ml")
SIZE = GroupSize("worker", "worker", 4, 4)


def sized(server: Inside, *sizes: tuple[int, int], state: str = "running", args: str = HERE.args) -> None:
    """Let a backend know a job's sizes, one after another."""

    async def story() -> None:
        backend = KubernetesBackend(dataclasses.replace(HERE, args=args), server)
        for fewest, most in sizes:
            await backend.sized(Wanted((SIZE._replace(nodes_min=fewest, nodes_max=most),), state), 1)

    asyncio.run(asyncio.wait_for(story(), 20))


def guards(server: Inside) -> list[Json]:
    """The NetworkPolicies and the budgets that there are."""
    return [*server.objects("networkpolicies", "networking.k8s.io"), *server.objects("poddisruptionbudgets", "policy")]


def kept(server: Inside) -> int:
    """How many nodes a drain leaves."""
    (budget,) = server.objects("poddisruptionbudgets", "policy")
    return int(budget["spec"]["minAvailable"])


def test_nodes_are_reached_from_their_job_alone() -> None:
    """A NetworkPolicy of the run's Secret, which selects its nodes, and lets its pods in."""
    server = Inside()
    sized(server, (4, 4))
    policy, budget = guards(server)
    (secret,) = server.objects("secrets")
    assert {one["metadata"]["ownerReferences"][0]["uid"] for one in (policy, budget)} == {secret["metadata"]["uid"]}
    selected = policy["spec"]["podSelector"]
    assert selected == {"matchLabels": names.labels("digits", "r-1")}, "standbys, too, which are no nodes yet"
    nodes = [{"key": names.LABEL_NODE, "operator": "Exists"}]
    assert budget["spec"]["selector"] == {**selected, "matchExpressions": nodes}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": selected["matchLabels"]}}]}]


def test_a_drain_takes_one_node_at_a_time() -> None:
    """The budget follows the sizes until nodes are seen, whoever masters it; what is so already is not written again."""
    server = Inside()
    for size, left in (((4, 4), 3), ((2, 4), 3), ((1, 1), 0)):
        sized(server, size)  # each time by another master
        assert kept(server) == left
    asked = len(server.asked)
    sized(server, (1, 1), (1, 1), (1, 1))
    writes = [method for method, path in server.asked[asked:] if method == "PATCH" and "poddisruptionbudgets" in path]
    assert (writes, kept(server)) == (["PATCH"], 0)


def test_a_new_master_goes_on_with_what_the_budget_keeps() -> None:
    """A job of 2 to 5 nodes of which 2 run: whoever follows its master does not count five, which would hold up a drain."""

    async def story() -> None:
        server, clock, wanted = Inside(), [0.0], Wanted((SIZE._replace(nodes_min=2, nodes_max=5),))
        first = KubernetesBackend(HERE, server, now=lambda: clock[0])
        for index in range(2):
            await first.launch(make_launch(index, job="digits"), 1)
            await runs(server, index)
        async with watching(first) as watch:
            await watch.running(*(make_launch(index, job="digits").name for index in range(2)))
            for clock[0] in (0.0, 0.0, budgets.SETTLED_S):
                await first.sized(wanted, 1)
        assert kept(server) == 1
        await KubernetesBackend(HERE, server, now=lambda: clock[0]).sized(wanted, 2)
        assert kept(server) == 1

    asyncio.run(asyncio.wait_for(story(), 20))


async def runs(server: Inside, index: int) -> None:
    """Let the pod of a node run."""
    status = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
    name = names.pod_name(make_launch(index, job="digits").name, "r-1")
    await server.ask("PATCH", f"/api/v1/namespaces/ml/pods/{name}/status", body={"status": status})


def test_the_budget_counts_nodes_that_run() -> None:
    """More count at once. Fewer count after two minutes, in which a drained node's successor starts: as many as ran at most."""
    clock = [0.0]
    count, sizes = budgets.Count(lambda: clock[0]), [SIZE._replace(nodes_min=2)]
    assert count.kept(sizes) == 3
    for at, runs, left in (
        (0.0, 0, 3),  # they begin
        (60.0, 4, 3),
        (100.0, 3, 3),  # one is drained
        (110.0, 2, 3),  # and one fails
        (219.0, 3, 3),
        (220.0, 2, 2),  # for as long there was no room for a fourth
        (230.0, 3, 2),
        (231.0, 5, 4),  # others are to go, as the job got smaller
        (232.0, 4, 3),
    ):
        clock[0] = at
        count.running(runs)
        assert count.more is (at == 231.0), at
        assert count.kept(sizes) == left, at


def test_a_node_more_is_counted_as_it_begins_to_run() -> None:
    """The budget does not wait for the leader, which says the sizes once a minute."""

    async def story() -> None:
        server, clock = Inside(), [0.0]
        backend = KubernetesBackend(HERE, server, now=lambda: clock[0])
        wanted = Wanted((SIZE._replace(nodes_min=1, nodes_max=2),))
        async with watching(backend) as watch:
            await watch.until(lambda nodes: nodes == {})
            for clock[0] in (0.0, 0.0, budgets.SETTLED_S):
                await backend.sized(wanted, 1)
            assert kept(server) == 0
            written = asyncio.Event()
            patch = server.ask

            async def ask(method: str, path: str, **more: Any) -> Json:
                answer = await patch(method, path, **more)
                if method == "PATCH" and "poddisruptionbudgets" in path:
                    written.set()
                return answer

            server.ask = ask  # type: ignore[method-assign]
            for index in range(2):
                await backend.launch(make_launch(index, job="digits"), 1)
                await runs(server, index)
            await written.wait()
            assert kept(server) == 1

    asyncio.run(asyncio.wait_for(story(), 20))


class Without(Inside):
    """A cluster that refuses to make or change so many policies and budgets."""

    def __init__(self, refusals: int = 10**6, error: type[ApiError] = Forbidden, status: int = 403) -> None:
        super().__init__()
        self.refusals, self._error, self._status = refusals, error, status

    async def ask(self, method: str, path: str, **more: Any) -> Json:
        """Everything else."""
        if path.startswith("/apis/") and method != "GET" and self.refusals:
            self.refusals -= 1
            raise self._error(Request(method, path), self._status, 'User "u" cannot create resource')
        return await super().ask(method, path, **more)


@pytest.mark.parametrize(("error", "status"), [(Forbidden, 403), (Busy, 500), (Unreachable, 0)])
def test_guards_are_in_nobodys_way(error: type[ApiError], status: int) -> None:
    """Without the rights, or while the API server fails, the job runs all the same."""
    server = Without(error=error, status=status)
    sized(server, (4, 4), (4, 4), (2, 2))
    assert guards(server) == []


@pytest.mark.parametrize(("error", "status"), [(Forbidden, 403), (Busy, 500)])
def test_guards_are_made_later(error: type[ApiError], status: int) -> None:
    """What was not made is made once it may be: it is not taken for something that is there."""
    server = Without(2, error, status)
    sized(server, (4, 4), (4, 4), (4, 4))
    assert (len(guards(server)), kept(server)) == (2, 3)


def test_guards_that_somebody_deleted_come_back() -> None:
    """A change of sizes finds none to change, and the next time it is made."""

    async def story() -> None:
        server = Inside()
        backend = KubernetesBackend(HERE, server)
        for most in (4, 3):
            for _ in range(2):
                await backend.sized(Wanted((SIZE._replace(nodes_min=2, nodes_max=most),)), 1)
            if most == 4:
                (budget,) = server.objects("poddisruptionbudgets", "policy")
                where = "/apis/policy/v1/namespaces/ml/poddisruptionbudgets"
                await server.ask("DELETE", f"{where}/{budget['metadata']['name']}")
        assert kept(server) == 2

    asyncio.run(asyncio.wait_for(story(), 20))


def test_masters_in_pods_have_theirs() -> None:
    """What belongs to another owner is guarded by whoever made that; a job that is over by nobody."""
    server = Inside()
    sized(server, (4, 4), args="image=i,namespace=ml,owner=v1/secrets/own")
    sized(server, (4, 4), state="succeeded")
    assert guards(server) == []


@pytest.mark.parametrize(("error", "status"), [(Forbidden, 403), (Busy, 500)])
def test_a_budget_of_masters_in_pods_follows_later(error: type[ApiError], status: int) -> None:
    """A change of size that was refused is made once it may be, and is in no launch's way."""
    server = Without(0, error, status)
    where = "/apis/policy/v1/namespaces/ml/poddisruptionbudgets"

    async def story() -> None:
        await server.ask("POST", where, body={"metadata": {"name": "b"}, "spec": {"minAvailable": 3, "selector": {}}})
        args = "image=i,namespace=ml,budget=b,owner=v1/secrets/own"
        backend = KubernetesBackend(dataclasses.replace(HERE, args=args), server)
        server.refusals = 1
        for left in (3, 1):
            await backend.sized(Wanted((SIZE._replace(nodes_min=2, nodes_max=2),)), 1)
            assert kept(server) == left

    asyncio.run(asyncio.wait_for(story(), 20))
