"""What the desk believes of hosts, beyond what Ray says."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

from dlrover_backends.ray.endings import observation
from dlrover_backends.ray.lookout import Lookout
from dlrover_backends.ray.records import Actor, Host, Place, Snapshot


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
