"""What a pod means changes with time alone: nobody tells of that, and the backend does not wait for the next list."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from k8s_scripted import Server

from dlrover_backends.k8s import names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.endings import STRANDED_S
from dlrover_backends.k8s.stuck import STUCK_S
from dlrover_core import BackendContext
from dlrover_core.runtime.backend import Changed, Listed
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.backend_stand import make_launch, watching

SOON_S = 5.0
NODE = make_launch()
HERE = BackendContext("conformance", "r1", ("m:1",), "t", arguments=("train.py",), args="image=i:1,namespace=ml")
PATH = f"/api/v1/namespaces/ml/pods/{names.pod_name(NODE.name, 'r1')}"
SLOW = {"reason": "CreateContainerError", "message": "context deadline exceeded"}


def waiting(message: dict[str, str]) -> dict[str, Any]:
    """The status of a pod whose container waits."""
    return {"phase": "Pending", "containerStatuses": [{"name": "node", "state": {"waiting": message}}]}


class Stage:
    """A backend whose node's pod is on a host, and is listed."""

    def __init__(self) -> None:
        self.loop, self.server = asyncio.get_running_loop(), Server()
        self.backend = KubernetesBackend(HERE, self.server, now=self.loop.time, wall=self.loop.time)

    def change(self, *, tell: bool = True, **status: Any) -> dict[str, Any]:
        """Let the pod have this status, and be told so."""
        pod = self.server.objects[PATH]
        pod["spec"]["nodeName"] = "host-1"
        pod |= status
        if tell:
            self.server.tell("MODIFIED", pod)
        return pod

    def delete(self) -> None:
        """Let the pod be one that is being deleted, and was to be gone now."""
        at = dt.datetime.fromtimestamp(self.loop.time(), dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.server.objects[PATH]["metadata"]["deletionTimestamp"] = at


def told(story: Callable[[Stage, Any], Awaitable[None]]) -> None:
    """Tell a story in virtual time."""

    async def whole() -> None:
        on = Stage()
        await on.backend.launch(NODE, 1)
        async with watching(on.backend) as watch:
            await asyncio.sleep(1)  # virtual: the watch begins after the list was told
            await story(on, watch)

    virtual_loop.run(whole(), limit_s=4 * STUCK_S)


async def phase_within(watch: Any, seconds: float, phase: str) -> Any:
    """The node's observation, once it is in this phase, which it is within so many seconds."""

    def found() -> Any:
        said = [one.node for one in watch.told if isinstance(one, Changed)]
        return next((one for one in said if one.phase == phase), None)

    await asyncio.wait_for(watch.until(lambda _: found() is not None), seconds)
    return found()


def test_a_kubelet_that_is_stuck_is_told_when_it_is_due() -> None:
    """No list and no change of the pod is needed: ten minutes after it was first seen the node has failed."""

    async def story(on: Stage, watch: Any) -> None:
        on.change(status=waiting(SLOW))
        seen = await phase_within(watch, STUCK_S + SOON_S, "failed")
        assert seen.reason.startswith("KubeletStuck: for 10 min the kubelet of host-1 has not started it")
        assert on.loop.time() >= STUCK_S

    told(story)


def test_a_pod_on_a_dead_host_is_told_when_it_is_due() -> None:
    """A minute after it was to be gone, its host is lost."""

    async def story(on: Stage, watch: Any) -> None:
        on.delete()
        on.change(status={"phase": "Pending"})
        seen = await phase_within(watch, STRANDED_S + SOON_S, "lost")
        assert seen.host == "host-1"

    told(story)


@pytest.mark.parametrize("end", ["runs", "gone"])
def test_what_has_changed_meanwhile_is_not_told_when_it_would_have_been_due(end: str) -> None:
    """The pod as it was is forgotten: one that runs has not failed, and one that is gone comes not back."""

    async def story(on: Stage, watch: Any) -> None:
        on.change(status=waiting(SLOW))
        await asyncio.sleep(STUCK_S - 1)  # virtual
        if end == "runs":
            running = {"name": "node", "ready": True, "state": {"running": {}}}
            on.change(status={"phase": "Running", "containerStatuses": [running]})
        else:
            on.server.tell("DELETED", on.server.objects.pop(PATH))
        count = len(watch.told)
        await asyncio.sleep(2 * STUCK_S)  # virtual
        phases = [one.node.phase for one in watch.told[count:] if isinstance(one, Changed)]
        assert phases == [{"runs": "running", "gone": "gone"}[end]]

    told(story)


def test_an_observation_begins_with_its_list() -> None:
    """A pod that has come due between two of them was shown by the first: before its list the second one knows of none."""

    async def whole() -> None:
        on = Stage()
        await on.backend.launch(NODE, 1)
        async with watching(on.backend) as watch:
            await asyncio.sleep(1)  # virtual
            on.change(status=waiting(SLOW))
            await watch.until(lambda _: any(isinstance(one, Changed) for one in watch.told))
        await asyncio.sleep(2 * STUCK_S)  # virtual
        ask = on.server.ask

        async def late(*what: Any, **more: Any) -> Any:
            await asyncio.sleep(1)  # virtual
            return await ask(*what, **more)

        on.server.ask = late  # type: ignore[method-assign]
        async with watching(on.backend) as watch:
            assert isinstance(watch.told[0], Listed)
            assert [one.phase for one in watch.told[0].nodes] == ["failed"]

    virtual_loop.run(whole(), limit_s=4 * STUCK_S)


def test_the_first_of_several_is_not_waited_for_behind_the_last() -> None:
    """A pod that is due sooner than the one that is waited for is told in its time."""

    async def story(on: Stage, watch: Any) -> None:
        on.change(status=waiting(SLOW))
        await asyncio.sleep(1)  # virtual
        on.delete()
        on.change(status=waiting(SLOW))
        await phase_within(watch, STRANDED_S + SOON_S, "lost")

    told(story)
