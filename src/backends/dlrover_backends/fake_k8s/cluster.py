"""The fake API server in a thread of its own, with a kubeconfig: what tests and benchmarks start."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dlrover_backends.fake_k8s.faults import Faults
from dlrover_backends.fake_k8s.rights import User
from dlrover_backends.fake_k8s.server import FakeServer
from dlrover_backends.fake_k8s.store import Change

Object = dict[str, Any]
T = TypeVar("T")

STOP_S = 10.0


class FakeCluster:
    """A fake API server in its own thread, for `with`.

    Args:
        namespace: made at the start, and named by the kubeconfig.
        options: of `FakeServer`.
    """

    def __init__(self, namespace: str = "train", **options: Any) -> None:
        self.namespace = namespace
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-k8s", daemon=True)
        self.server: FakeServer

    def __enter__(self) -> FakeCluster:  # noqa: PYI034  typing.Self is of Python 3.11
        self._thread.start()
        self.run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _begin(self) -> None:
        self.server = FakeServer(**self._options)
        kind = self.server.api.kind("", "v1", "namespaces")
        if self.namespace != "default":
            self.server.api.create(kind, "", {"metadata": {"name": self.namespace}})
        await self.server.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the server's thread."""

        async def once() -> T:
            return function()

        return self.run(once())

    @property
    def faults(self) -> Faults:
        """The server's faults."""
        return self.server.faults

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.server.url

    def user(self, token: str, user: User) -> None:
        """Let a token stand for a user."""
        self.call(lambda: self.server.rights.tokens.update({token: user}))

    def away(self) -> None:
        """Kill the server: connections break, and new ones are refused."""
        self.run(self.server.kill())

    def back(self, *, compacted: bool = False) -> None:
        """Start the server again on its port, with its objects; `compacted` forgets the history, as a restart does."""

        async def again() -> None:
            if compacted:
                self.server.compact()
            await self.server.start()

        self.run(again())

    def objects(self, plural: str, group: str = "", namespace: str | None = None) -> list[Object]:
        """All objects of a kind, as they are now."""

        def read() -> list[Object]:
            shelf = self.server.api.store.shelf((group, plural))
            return [one.obj for key, one in sorted(shelf.objects.items()) if namespace in {None, key[0]}]

        return self.call(read)

    def until(self, holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until something holds; asked after each write to the server, and now and then.

        Raises:
            TimeoutError: it did not hold in time.
        """
        news = threading.Event()

        def heard(_kind: tuple[str, str], _change: Change) -> None:
            news.set()

        listeners = self.server.api.store.listeners
        self.call(lambda: listeners.append(heard))
        try:
            until = time.monotonic() + timeout_s
            while not holds():
                if time.monotonic() > until:
                    raise TimeoutError(f"not within {timeout_s} s")
                news.wait(0.05)
                news.clear()
        finally:
            self.call(lambda: listeners.remove(heard))

    def kubeconfig(self, path: Path, token: str | None = None) -> Path:
        """Write a kubeconfig for this server, and return its path."""
        path.write_text(json.dumps(kubeconfig(self.url, token or self.server.token, self.namespace), indent=1))
        return path


def kubeconfig(url: str, token: str, namespace: str) -> Object:
    """A kubeconfig of one cluster; JSON is YAML. A server with a certificate is not asked whose it is."""
    cluster = {"server": url, **({"insecure-skip-tls-verify": True} if url.startswith("https:") else {})}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": cluster}],
        "users": [{"name": "fake", "user": {"token": token}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
    }
