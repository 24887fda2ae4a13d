"""What the desk believes of hosts, beyond what Ray says."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_backends.ray.endings import observation
from dlrover_backends.ray.lookout import Lookout
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import Actor, Group, Host, Place, Snapshot


class ActorUnavailableError(Exception):
    """As Ray calls it."""


def answer(error: Exception | None) -> Any:
    """What a call of Ray's has come to."""
    return SimpleNamespace(exception=lambda: error)


def test_a_raylet_that_has_ended() -> None:
    """An actor is out of reach, and its host says that nobody listens there: the node has failed, before Ray knows.

    A host that answers, whose actors all answer, or that was never reached from here, is believed in; and of a host that Ray has
    given up Ray's word counts.
    """
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.create_server(("127.0.0.1", 0)) as closed:
        port, gone = raylet.getsockname()[1], closed.getsockname()[1]
        closed.close()
        hosts = {
            "a": Host("a", "host-a", "127.0.0.1", port=gone),
            "b": Host("b", "host-b", "127.0.0.1", port=port),
            "c": Host("c", "host-c", "127.0.0.1", port=gone),
        }
        actors = {f"j-worker-{key}-0": Actor(f"id-{key}", f"j-worker-{key}-0", host_id=key) for key in hosts}
        seen = Snapshot(actors, hosts, {})
        cluster = SimpleNamespace(ended=set[str]())

        async def told() -> None:
            lookout = Lookout(cast(Any, cluster))
            assert lookout._believed(seen) == seen
            lookout._answered("id-a", answer(ActorUnavailableError()))
            assert lookout._believed(seen) == seen, "the host was never reached"
            for key in ("a", "b"):
                lookout._answered(f"id-{key}", answer(None))
                lookout._answered(f"id-{key}", answer(ActorUnavailableError()))
            believed = lookout._believed(seen)
            assert cluster.ended == {"a"}
            found = {name: observation(one, believed, None, Place(), time.time()) for name, one in actors.items()}
            assert found["j-worker-a-0"].phase == "failed"
            assert found["j-worker-a-0"].reason == "NODE_DIED: the raylet of host-a has ended"
            assert {found[f"j-worker-{key}-0"].phase for key in "bc"} == {"running"}
            lookout._believed(seen._replace(hosts={**hosts, "a": hosts["a"]._replace(alive=False)}))
            assert cluster.ended == set()

        asyncio.run(told())


def test_an_actor_out_of_reach_is_looked_at_once() -> None:
    """What stays out of reach does not keep the desk looking all the time."""

    async def told() -> None:
        lookout = Lookout(cast(Any, SimpleNamespace(ended=set[str]())))
        woken = []
        for error in (ActorUnavailableError(), ActorUnavailableError(), None, ActorUnavailableError(), RuntimeError()):
            lookout._wake.clear()
            lookout._answered("id", answer(error))
            await asyncio.sleep(0)
            woken.append(lookout._wake.is_set())
        assert woken == [True, False, True, True, True]

    asyncio.run(told())


@pytest.mark.parametrize("slow", [False, True])
def test_an_actor_that_ray_forgot_is_killed(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place stands, and it gets no process, as after a restart of the state service. One that waits for a place stays."""
    killed: list[str] = []
    run = Run("j", "r")
    cluster = SimpleNamespace(ended=set[str](), run=run, handle=lambda _: None, kill=killed.append)
    actors = {name: Actor(f"id-{name}", name, state="PENDING_CREATION") for name in ("forgotten", "waits")}
    actors["placed"] = Actor("id-placed", "placed", state="PENDING_CREATION", host_id="a")
    states = {"forgotten": "CREATED", "waits": "PENDING", "placed": "CREATED"}
    groups = {run.group(name): Group("g", run.group(name), state) for name, state in states.items()}
    seen = Snapshot(actors, {}, groups)

    async def told() -> None:
        lookout = Lookout(cast(Any, cluster))
        lookout._places = dict.fromkeys(actors, Place(slow=slow))
        lookout._tidy(seen, set())
        lookout._tidy(seen, set())
        assert killed == []
        monkeypatch.setattr(
            "dlrover_backends.ray.lookout.SLOW_S" if slow else "dlrover_backends.ray.lookout.UNPLACED_S", -1.0
        )
        lookout._tidy(seen, set())
        assert killed == ["forgotten"]
        lookout._tidy(seen._replace(actors={"forgotten": actors["forgotten"]._replace(state="ALIVE")}), set())
        assert "id-forgotten" not in lookout._unplaced

    asyncio.run(told())
