"""A cluster that is there in place of the fake one: nodes of a test's own join it, whose pods are processes of this machine.

``KUBECONFIG_CONTRACT`` names its kubeconfig, of an administrator. The cluster brings its API server, scheduler and controllers.
Everything is made in a namespace of its own, which is deleted at the end, as the nodes are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dlrover_backends.fake_k8s.ground import drained
from dlrover_backends.fake_k8s.kubelet import Kubelet, from_kubeconfig
from dlrover_backends.fake_k8s.kubelet.client import MERGE, STRATEGIC, Denied
from dlrover_backends.fake_k8s.kubelet.network import Network

T = TypeVar("T")

CONTRACT = "KUBECONFIG_CONTRACT"
POOL = "dlrover-core/contract"
BOUND_S = 60.0


class Joined:
    """What `Ground` offers to the tests of the contract, of the cluster of a kubeconfig, for `with`."""

    def __init__(self, config: str | Path, nodes: int = 2, **of_kubelet: Any) -> None:
        mark = secrets.token_hex(4)
        self.config, self.namespace, self.pool = Path(config), f"contract-{mark}", {POOL: mark}
        self.nodes = [f"contract-{mark}-{index}" for index in range(nodes)]
        self._network = Network()
        self._of_kubelet = {**of_kubelet, "network": self._network}
        self._folder = tempfile.TemporaryDirectory(prefix="contract-k8s-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="contract-k8s", daemon=True)

    def __enter__(self) -> Joined:  # noqa: PYI034  typing.Self is of Python 3.11
        self._thread.start()
        self.run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOUND_S)
        self._loop.close()
        self._folder.cleanup()
        self._network.close()

    async def _begin(self) -> None:
        self.client = await from_kubeconfig(str(self.config))
        await self.client.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        with contextlib.suppress(Denied):  # its controller may be faster
            path = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
            await self.client.ask("POST", path, {"metadata": {"name": "default"}})
        labels = dict.fromkeys(self.nodes, self.pool)
        self.kubelet = Kubelet(self.client, Path(self._folder.name) / "pods", labels, **self._of_kubelet)
        await self.kubelet.start()

    async def _end(self) -> None:
        await self.kubelet.stop()
        for path in (f"namespaces/{self.namespace}", *(f"nodes/{one}" for one in self.nodes)):
            await self.client.surely("DELETE", f"/api/v1/{path}")
        await self.client.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the kubelet's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(BOUND_S)

    def strike(self, what: Callable[[Kubelet], Any]) -> Any:
        """Let something go wrong on the nodes. A lost one is told by its own last word: clusters take most of a minute to see."""

        async def once() -> Any:
            before = set(self._silent())
            found = what(self.kubelet)
            for node in set(self._silent()) - before:
                condition = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "lost"}
                body = {"status": {"conditions": [condition]}}
                await self.client.surely("PATCH", f"/api/v1/nodes/{node}/status", body, STRATEGIC)
            return found

        return self.run(once())

    def _silent(self) -> list[str]:
        return [name for name in self.nodes if not self.kubelet.speaks(name)]

    def drain(self, node: str) -> list[str]:
        """As `Ground.drain`."""
        return self.run(drained(self.client, node))

    def uncordon(self, node: str) -> None:
        """As `Ground.uncordon`."""
        self.run(self.client.surely("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}}, MERGE))

    def objects(self, plural: str, group: str = "", namespace: str | None = None) -> list[dict[str, Any]]:
        """All objects of a kind in the tests' namespace, as they are now."""
        assert (group, namespace) in {("", None), ("", self.namespace)}
        path = f"/api/v1/namespaces/{self.namespace}/{plural}"
        found = self.run(self.client.ask("GET", path))["items"]
        return [one for one in found if one["metadata"].get("labels")]  # the cluster's own have none

    def until(self, holds: Callable[[], bool], timeout_s: float = BOUND_S) -> None:
        """Wait until something holds. Raises `TimeoutError`."""
        until = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {timeout_s} s")
            threading.Event().wait(0.05)  # nobody tells when

    def kubeconfig(self, _path: Path) -> Path:
        """The file itself: what it names may be relative to it. Its namespace is not the tests'."""
        return self.config


def asked_for() -> str:
    """The kubeconfig of the cluster that tests are to run against; empty: the fake one."""
    return os.environ.get(CONTRACT, "")
