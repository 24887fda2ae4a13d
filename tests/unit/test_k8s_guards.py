"""What guards the nodes of an attached job, as masters in pods guard theirs."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from k8s_inside import Inside

from dlrover_backends.k8s import names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import Forbidden, Request
from dlrover_core.runtime.backend import GroupSize, Wanted
from dlrover_core.runtime.backends import BackendContext

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
    assert selected == budget["spec"]["selector"]
    assert selected["matchLabels"] == names.labels("digits", "r-1")
    assert selected["matchExpressions"] == [{"key": names.LABEL_NODE, "operator": "Exists"}]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": selected["matchLabels"]}}]}]


def test_a_drain_leaves_what_the_job_needs() -> None:
    """The budget follows the sizes, whoever masters it; what is so already is not written again."""
    server = Inside()
    for size, left in (((4, 4), 3), ((2, 5), 2), ((1, 1), 0)):
        sized(server, size)  # each time by another master
        assert kept(server) == left
    asked = len(server.asked)
    sized(server, (1, 1), (1, 1), (1, 1), (2, 2))
    writes = [method for method, path in server.asked[asked:] if method == "PATCH" and "poddisruptionbudgets" in path]
    assert (writes, kept(server)) == (["PATCH", "PATCH"], 1)


class Without(Inside):
    """A cluster in which nobody has a right to policies and budgets."""

    async def ask(self, method: str, path: str, **more: Any) -> Json:
        """Everything else."""
        if path.startswith("/apis/") and method != "GET":
            raise Forbidden(Request(method, path), 403, 'User "u" cannot create resource')
        return await super().ask(method, path, **more)


def test_guards_are_in_nobodys_way() -> None:
    """Without the rights the job runs all the same."""
    server = Without()
    sized(server, (4, 4), (4, 4), (2, 2))
    assert guards(server) == []


def test_masters_in_pods_have_theirs() -> None:
    """What belongs to another owner is guarded by whoever made that; a job that is over by nobody."""
    server = Inside()
    sized(server, (4, 4), args="image=i,namespace=ml,owner=v1/secrets/own")
    sized(server, (4, 4), state="succeeded")
    assert guards(server) == []
