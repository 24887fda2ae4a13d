"""When a backend is told which standbys answer: it makes and removes standbys only then."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_core.job.nodes import Node
from dlrover_core.job.world import Member, World, WorldSlice
from dlrover_core.runtime.levelling import Leveller


class Reserves:
    """A backend with standbys that is told who answers."""

    def __init__(self) -> None:
        self.told: list[Collection[str]] = []

    def heard(self, seats: Collection[str]) -> None:
        """As `Reserving.heard`."""
        self.told.append(seats)


def node(index: int, incarnation: int = 0, **fields: Any) -> Node:
    """A node of the group worker."""
    return Node(f"worker-{index}-{incarnation}", "worker", index, incarnation, 0, **fields)


def leveller(*nodes: Node, world: World = World()) -> tuple[Leveller, Reserves, dict[str, Node]]:  # noqa: B008
    """One whose master has these nodes, and had this world."""
    here = {one.node: one for one in nodes}
    state = SimpleNamespace(nodes=SimpleNamespace(nodes=here), world=WorldSlice({"worker": world}))
    master: Any = SimpleNamespace(state=state, may_order=lambda: True)
    backend: Any = Reserves()
    return Leveller(master, backend, SimpleNamespace(heard=frozenset)), backend, here  # type: ignore[arg-type]


JOINED = {"state": "running", "joined": True}


@pytest.mark.parametrize(
    ("nodes", "begun"),
    [
        ((), False),
        ((node(0), node(1)), False),
        ((node(0, state="running"), node(1, state="running")), False),
        ((node(0, **JOINED), node(1, state="running")), False),
        ((node(0, **JOINED), node(1, **JOINED)), True),
        ((node(0, **JOINED), node(1, waits="no room")), True),
        ((node(0, waits="no room"), node(1, waits="no room")), False),
        ((node(0, **JOINED), node(1, released="removed")), True),
        ((node(0, **JOINED), node(1, 1, state="pending")), True),
    ],
    ids=[
        "no nodes",
        "planned",
        "no agent yet",
        "one agent yet",
        "all",
        "no room for one",
        "no room",
        "removed",
        "again",
    ],
)
def test_standbys_come_after_the_first_nodes(nodes: tuple[Node, ...], begun: bool) -> None:
    """Not before the agents of all nodes have joined for which the platform has room; a node that comes back is no start."""
    one, backend, _ = leveller(*nodes)
    one._tell_heard()
    assert bool(backend.told) is begun


def test_a_job_that_has_begun_goes_on() -> None:
    """A job that grows has its standbys looked after all the time: they may have to give way to what comes."""
    one, backend, here = leveller(node(0, **JOINED))
    one._tell_heard()
    here["worker-1-0"] = node(1)
    one._tell_heard()
    assert len(backend.told) == 2


@pytest.mark.parametrize(
    ("nodes", "begun"),
    [
        ((node(0, state="running"),), True),
        ((node(0, 1, state="planned"),), True),
        ((node(0, state="failed"), node(1, state="running")), False),
    ],
    ids=["left", "replaced", "another one starts"],
)
def test_a_new_leader_looks_after_the_standbys_of_dead_nodes(nodes: tuple[Node, ...], begun: bool) -> None:
    """It takes over while no node of the world is joined: standbys are what the job needs most just then."""
    one, backend, _ = leveller(*nodes, world=World(1, members=(Member("worker-0-0", 1, 0),)))
    one._tell_heard()
    assert bool(backend.told) is begun
