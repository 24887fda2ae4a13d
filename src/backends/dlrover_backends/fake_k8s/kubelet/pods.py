"""One pod on its node: from the binding to the last status, and through its deletion."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover_backends.fake_k8s.cluster import kubeconfig
from dlrover_backends.fake_k8s.kubelet import statuses
from dlrover_backends.fake_k8s.kubelet.client import STRATEGIC, Client, path_of
from dlrover_backends.fake_k8s.kubelet.processes import CANNOT_START, Container, kill_pod, last_words
from dlrover_backends.fake_k8s.kubelet.sandbox import Look, Misconfigured, Sandbox, Unbound

Object = dict[str, Any]

BACKOFF_MAX_S = 300.0


@dataclass
class Ending:
    """Why the kubelet ends a pod for the node's sake.

    Attributes:
        reason: `status.reason`.
        message: `status.message`.
        grace_s: between SIGTERM and SIGKILL.
        platform: whether the condition DisruptionTarget says so.
    """

    reason: str
    message: str
    grace_s: float
    platform: bool = True


@dataclass
class Settings:
    """What all pods of a kubelet share.

    Attributes:
        root: folder of pods' folders.
        extra: variables of every container.
        backoff_s: before the first restart of a container; it doubles.
        retry_s: between tries to pull an image or to find a configuration.
        bad_images: images that cannot be pulled.
        instance: this kubelet, among all of the machine.
    """

    root: Path
    extra: Mapping[str, str] = field(default_factory=dict)
    backoff_s: float = 10.0
    retry_s: float = 0.2
    bad_images: set[str] = field(default_factory=set)
    instance: str = field(default_factory=lambda: secrets.token_hex(6))


class Pod:
    """Runs one pod.

    Args:
        obj: the pod as it was bound.
        client: where its status goes.
        address: its IP.
        look: finds what it refers to.
        settings: of the kubelet.
        speaks: set while its node speaks to the server; nothing is told while it does not.
    """

    def __init__(
        self, obj: Object, client: Client, address: str, look: Look, settings: Settings, speaks: asyncio.Event
    ) -> None:
        self.obj = obj
        self.uid: str = obj["metadata"]["uid"]
        self._client = client
        self._settings = settings
        self._speaks = speaks
        self._address = address
        self.mark = f"{settings.instance}.{self.uid}"
        self.sandbox = Sandbox(settings.root, obj, address, look, settings.extra, self.mark)
        self._began = statuses.stamp()
        self._states: dict[str, Object] = {}
        self._running: dict[str, Container] = {}
        self._sidecars: list[asyncio.Task[None]] = []
        self._ending: Ending | None = None
        self._end = asyncio.Event()
        self._told: Object = {}
        self._telling = asyncio.Lock()
        self.gone = False  # the server's object is gone: end at once, and tell nobody

    # -- what happens to it ------------------------------------------------------------------------------------

    def see(self, obj: Object) -> None:
        """The pod changed: a deletion may have begun."""
        self.obj = obj
        if "deletionTimestamp" in obj["metadata"]:
            self._end.set()

    @property
    def doubted(self) -> bool:
        """Has the node controller taken Ready away, while all that this node knows is well?"""
        status = self.obj["status"]
        told = [one for one in self._told.get("conditions") or [] if one["type"] == "Ready" and one["status"] == "True"]
        found = [one for one in status.get("conditions") or [] if one["type"] == "Ready"]
        return bool(told and found) and found[0]["status"] == "False" and not found[0].get("reason")

    def vanish(self) -> None:
        """The object is gone from the server: what runs is killed."""
        self.gone = True
        self._end.set()

    def end(self, ending: Ending) -> None:
        """End the pod for the node's sake."""
        if self._ending is None:
            self._ending = ending
            self._end.set()

    def strike(self, number: int, *, container: str = "", reason: str = "") -> bool:
        """Signal a container; `reason` is the platform's word for its end: `OOMKilled`."""
        for name, one in self._running.items():
            if container in {"", name}:
                one.reason = reason
                one.signal(number)
                return True
        return False

    @property
    def pids(self) -> list[int]:
        """The containers' first processes."""
        return [one.pid for one in self._running.values() if one.pid is not None]

    # -- its life ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the pod is over, and if it is being deleted until the server has forgotten it."""
        if self.obj["status"].get("phase") not in {"Succeeded", "Failed"}:
            try:
                status = await self._live()
            finally:
                for one in self._running.values():
                    one.signal(signal.SIGKILL)
                await asyncio.get_running_loop().run_in_executor(None, kill_pod, self.mark)
                self.sandbox.ended()
            if not self.gone:
                await self._tell(status)
        while not self.gone and "deletionTimestamp" not in self.obj["metadata"]:
            self._end.clear()
            await self._end.wait()
        if not self.gone:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
            await self._speaks.wait()
            await self._client.surely("DELETE", path_of(self.obj), options)
        self.sandbox.remove()

    async def _live(self) -> Object:
        """Start and watch the containers; returns the last status."""
        spec = self.obj["spec"]
        for one in spec["containers"]:
            self._states[one["name"]] = statuses.container(one, statuses.waiting("ContainerCreating"))
        await self._tell(statuses.pending(self._listed(), self._began))
        over = asyncio.create_task(self._work())
        stopped = asyncio.create_task(self._end.wait())
        limit_s = spec.get("activeDeadlineSeconds")
        try:
            done, _ = await asyncio.wait([over, stopped], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._ending = Ending("DeadlineExceeded", statuses.DEADLINE, self._grace_s(), platform=False)
            if over not in done:
                await self._stop(over)
        finally:
            for task in (over, stopped, *self._sidecars):
                task.cancel()
            await asyncio.gather(over, stopped, *self._sidecars, return_exceptions=True)
        return self._last()

    def _last(self) -> Object:
        ending = self._ending
        failed = ending is not None or any(
            (one["state"].get("terminated") or {"exitCode": 1})["exitCode"] != 0 for one in self._states.values()
        )
        if ending is None:
            return statuses.ended(self._listed(), failed=failed)
        return statuses.ended(
            self._listed(), failed=True, reason=ending.reason, message=ending.message, platform=ending.platform
        )

    def _grace_s(self) -> float:
        metadata = self.obj["metadata"]
        if self.gone:
            return 0.0
        if "deletionGracePeriodSeconds" in metadata:
            return float(metadata["deletionGracePeriodSeconds"])
        return float(self.obj["spec"].get("terminationGracePeriodSeconds") or 30)

    async def _stop(self, over: asyncio.Task[None]) -> None:
        """SIGTERM to every container, SIGKILL after the grace, or sooner if the grace is shortened meanwhile."""
        self._stopping = True
        grace_s = self._ending.grace_s if self._ending is not None else self._grace_s()
        began = asyncio.get_running_loop().time()
        stops = [asyncio.create_task(one.stop(grace_s)) for one in self._running.values()]
        if not stops:
            over.cancel()
        while not over.done():
            self._end.clear()
            hurry = asyncio.create_task(self._end.wait())
            left_s = max(0.0, began + min(grace_s, self._grace_s()) - asyncio.get_running_loop().time())
            await asyncio.wait([over, hurry], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not over.done() and asyncio.get_running_loop().time() >= began + min(grace_s, self._grace_s()):
                for one in self._running.values():
                    one.signal(signal.SIGKILL)
                await asyncio.wait([over])
        await asyncio.gather(*stops, return_exceptions=True)

    _stopping = False

    async def _work(self) -> None:
        """Init containers one by one, then all containers, until they have ended for good."""
        spec = self.obj["spec"]
        await self._prepared()
        await self._allowed()
        for one in spec.get("initContainers") or []:
            if one.get("restartPolicy") == "Always":
                self._sidecars.append(asyncio.create_task(self._sidecar(one)))
                continue
            while not self._stopping and await self._once(one, 0) != 0:
                if spec.get("restartPolicy") == "Never":
                    return
                await asyncio.sleep(self._settings.backoff_s)
        if not self._stopping:
            await asyncio.gather(*(self._container(one) for one in spec["containers"]))

    async def _prepared(self) -> None:
        """Pull images and find what volumes and variables refer to, as long as that takes."""
        shown = ""
        while True:
            reason, message = self._obstacle()
            if not reason:
                return
            if message != shown:
                shown = message
                for one in self.obj["spec"]["containers"]:
                    self._states[one["name"]] = statuses.container(one, statuses.waiting(reason, message))
                await self._tell(statuses.pending(self._listed(), self._began))
            await asyncio.sleep(self._settings.retry_s)

    async def _allowed(self) -> None:
        """The rights of its service account, for a pod that asks for them in so many words."""
        if self.obj["spec"].get("automountServiceAccountToken") is not True:
            return
        where, name = self.obj["metadata"]["namespace"], self.obj["spec"].get("serviceAccountName") or "default"
        path = f"/api/v1/namespaces/{where}/serviceaccounts/{name}/token"
        kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        given = await self._client.surely("POST", path, {**kind, "spec": {"expirationSeconds": 3607}})
        if given is not None:
            self.sandbox.allow(kubeconfig(self._client.url, given["status"]["token"], where))

    def _obstacle(self) -> tuple[str, str]:
        for one in self.obj["spec"]["containers"]:
            if one.get("image") in self._settings.bad_images:
                return "ImagePullBackOff", f'Back-off pulling image "{one["image"]}"'
        try:
            self.sandbox.prepare()
            for one in self.obj["spec"]["containers"]:
                self.sandbox.environment(one)
        except Unbound as wrong:
            return "ContainerCreating", str(wrong)
        except Misconfigured as wrong:
            return "CreateContainerConfigError", str(wrong)
        return "", ""

    async def _sidecar(self, spec: Object) -> None:
        restarts = 0
        while not self._stopping:
            await self._once(spec, restarts)
            restarts += 1
            await asyncio.sleep(self._settings.backoff_s)

    async def _container(self, spec: Object) -> None:
        """Run a container, again where the pod's policy says so."""
        policy = self.obj["spec"].get("restartPolicy", "Always")
        restarts, wait_s = 0, self._settings.backoff_s
        while True:
            code = await self._once(spec, restarts)
            if self._stopping or policy == "Never" or (policy == "OnFailure" and code == 0):
                return
            last = self._states[spec["name"]]["state"]
            message = f"back-off {int(wait_s)}s restarting failed container={spec['name']}"
            waiting = statuses.waiting("CrashLoopBackOff", message)
            self._states[spec["name"]] = statuses.container(spec, waiting, restarts=restarts, last=last)
            await self._tell_running()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_MAX_S)
            restarts += 1

    async def _once(self, spec: Object, restarts: int) -> int:
        """Run a container once; returns its exit code."""
        name = spec["name"]
        log, began = self.sandbox.log(name), statuses.stamp()
        environment = self.sandbox.environment(spec)
        run = Container(self.sandbox.command(spec, environment), environment, self.sandbox.home(spec), log)
        refused = await run.start()
        last = (self._states.get(name) or {}).get("lastState")
        if refused:
            ended = statuses.terminated(CANNOT_START, began, reason="StartError", message=refused)
            self._states[name] = statuses.container(spec, ended, restarts=restarts, last=last)
            return CANNOT_START
        self._running[name] = run
        shown = name in {one["name"] for one in self.obj["spec"]["containers"]}
        if shown:
            state = {"running": {"startedAt": began}}
            self._states[name] = statuses.container(spec, state, restarts=restarts, last=last)
            await self._tell_running()
        code = await run.ended()
        if self._running.get(name) is run:
            del self._running[name]
        policy = spec.get("terminationMessagePolicy", "File")
        message = last_words(self.sandbox.message(name), log, policy=policy, failed=code != 0)
        ended = statuses.terminated(code, began, reason=run.reason, message=message)
        if shown:
            self._states[name] = statuses.container(spec, ended, restarts=restarts, last=last)
            if not self._stopping:  # kubelets tell this first, and how the pod has ended once nothing of it is left
                await self._tell_running()
        return code

    # -- what it tells -----------------------------------------------------------------------------------------

    def _listed(self) -> list[Object]:
        return list(self._states.values())

    async def _tell_running(self) -> None:
        await self._tell(statuses.running(self._listed(), self._address, self._began))

    async def _tell(self, status: Object) -> None:
        """Write a status; lost requests are repeated, and a pod that is gone is no error."""
        if self.gone:
            return
        self._told = status
        await self.tell_again()

    async def tell_again(self) -> None:
        """Write the newest status, whatever the server has."""
        async with self._telling:
            await self._speaks.wait()
            body = {"metadata": {"uid": self.uid}, "status": self._told}
            await self._client.surely("PATCH", path_of(self.obj, "status"), body, STRATEGIC)
