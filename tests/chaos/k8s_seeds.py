"""The Kubernetes backend against a faulty API server: one seed is one history of faults and deaths; the end must be right.

The production backend speaks over real sockets to the fake API server. Pods have no processes here: a script binds and runs them,
and ends them. A master of a few lines keeps one pod per place, as the leader's levelling does: the next incarnation is
launched when the one before is observed to be over. What must hold:

* no place ever has two living pods;
* each death leads to exactly one new incarnation, and nothing else does;
* when the faults end, every place has its pod; when the job ends, nothing of it is left.

Some seeds keep standbys, which take the places of dead nodes: a pod is a node's by what it is called at any moment. At the end
there are as many free ones as are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

from dlrover_backends.fake_k8s import FakeServer, What, kubeconfig
from dlrover_backends.fake_k8s.store import Change
from dlrover_backends.k8s import backoff, client, listwatch
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.names import LABEL_KEPT
from dlrover_backends.k8s.transport import Transport
from dlrover_core.errors import CoreError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Changed, GroupSize, Listed, Observation, Wanted
from dlrover_core.runtime.backends import BackendContext

Object = dict[str, Any]

PODS = ("", "pods")
RATES = {
    What.ERROR: 0.08,
    What.LOST: 0.12,
    What.REFUSED: 0.06,
    What.THROTTLED: 0.06,
    What.SLOW: 0.12,
    What.EXPIRED: 0.08,
    What.STALE: 0.08,
    What.CUT: 0.1,
    What.FROZEN: 0.06,
    What.ENDED: 0.06,
}
READ_S = 0.3  # a silent watch is given up
PAUSE_MAX_S = 0.02  # what waits for tenths of seconds in a cluster waits for this long here
SETTLE_S = 15.0
TRIAL_S = 40.0
ENDINGS = ("OOMKilled", "Error", "Evicted", "removed", "evicted")


def trial(seed: int) -> dict[str, Any]:
    """One seed; what happened. Raises where a promise is broken."""
    assert Transport  # imported by now: on a busy machine this takes longer than a trial may
    with _quick():
        return asyncio.run(asyncio.wait_for(_Trial(seed).run(), TRIAL_S))


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """Pauses of the production loop, cut short; and nothing that the backend warns of is printed."""

    async def pause(seconds: float) -> None:
        await asyncio.sleep(min(seconds, PAUSE_MAX_S))

    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    quick = functools.partial(listwatch.ListWatch, pause=pause)
    with mock.patch.object(client, "ListWatch", quick), mock.patch.object(backoff, "LONGEST_S", PAUSE_MAX_S):
        try:
            yield
        finally:
            structlog.configure(**before)


class _Trial:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seed = seed
        self.places = [f"worker-{index}" for index in range(self.draw.randint(2, 6))]
        self.server = FakeServer(seed=seed, bookmark_s=0.05, future_s=0.05)
        self.deaths: Counter[str] = Counter()
        self.broken: list[str] = []
        self.incarnations = dict.fromkeys(self.places, 0)  # what a log would keep
        self.launched: set[str] = set()
        self.masters = self.claimed = 0
        self.standby = random.Random(f"standby {seed}").choice((0, 0, 1, 2))

    async def run(self) -> dict[str, Any]:
        server = self.server
        server.api.create(server.api.kind("", "v1", "namespaces"), "", {"metadata": {"name": "train"}})
        server.api.listen(self._heard)
        await server.start()
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            (self.folder / "config").write_text(_json(kubeconfig(server.url, server.token, "train")))
            try:
                return await self._play()
            finally:
                await server.stop()

    async def _play(self) -> dict[str, Any]:
        self.server.faults.seeded(self.seed, RATES, most=60)
        self.master = self._elect()
        try:
            return await self._history()
        finally:
            await self.master.stop()

    async def _history(self) -> dict[str, Any]:
        for _ in range(self.draw.randint(6, 14)):
            await asyncio.sleep(self.draw.uniform(0.01, 0.12))
            await self._something()
        happened = Counter(what for what, *_ in self.server.faults.happened)
        self.server.faults.clear()
        self.server.thaw()
        await self._until_right()
        deaths = sum(self.deaths.values())
        assert not self.broken, self.broken[0]
        for place, incarnation in self.incarnations.items():
            assert incarnation == self.deaths[place], f"{place}: {self.deaths[place]} deaths, incarnation {incarnation}"
        await self.master.stop()
        await KubernetesBackend(self.context(), read_s=READ_S).clear()
        await asyncio.wait_for(self._emptied(), SETTLE_S)
        counts = dict(sorted(happened.items()))
        told = {"faults": sum(counts.values()), "deaths": deaths, "masters": self.masters, "claimed": self.claimed}
        return {**counts, **told}

    def context(self) -> BackendContext:
        args = f"image=trainer:dev,kubeconfig={self.folder / 'config'},namespace=train"
        return BackendContext("j", "run1", ("127.0.0.1:1",), "secret", directory=str(self.folder), args=args)

    def _elect(self) -> _Master:
        self.masters += 1
        return _Master(self, self.masters)

    # -- what goes wrong ---------------------------------------------------------------------------------------

    async def _something(self) -> None:
        what = self.draw.choice(("death", "death", "death", "master", "away", "freeze", "cut", "silence", "compact"))
        server = self.server
        if what == "death":
            self._kill_one()
        elif what == "master":
            await self.master.stop()
            self.master = self._elect()
        elif what == "away":
            await server.kill()
            await asyncio.sleep(self.draw.uniform(0.0, 0.1))
            if self.draw.random() < 0.5:
                server.compact()
            self._kill_one()
            await server.start()
        elif what == "freeze":
            server.freeze()
            await asyncio.sleep(self.draw.uniform(0.0, 0.2))
            server.thaw()
        elif what == "cut":
            server.end_watches(self.draw.choice(("cut", "end", "expired")))
        elif what == "silence":
            server.freeze_watches()
            self._kill_one()
        elif what == "compact":
            server.compact()
            server.end_watches("cut")

    def _kill_one(self) -> None:
        """End a pod that runs and that nobody ends already."""
        shelf = self.server.api.store.shelf(PODS).objects
        found = [
            one.obj
            for _, one in sorted(shelf.items())
            if one.obj["status"]["phase"] == "Running"
            and "deletionTimestamp" not in one.obj["metadata"]
            and not _is_free(one.obj)
            # One whose creation was never answered may be made again under its name: nobody saw it live.
            and one.obj["metadata"]["annotations"]["dlrover-core/name"] in self.launched
        ]
        if not found:
            return
        pod = self.draw.choice(found)
        self.deaths[_place(pod)] += 1
        how = self.draw.choice(ENDINGS)
        name = pod["metadata"]["name"]
        if how == "removed":
            self._delete(name, 0)
        elif how == "evicted":
            self.server.deletion.evict("train", name, {})
        else:
            reason = "Evicted" if how == "Evicted" else None
            self._status(name, "Failed", 137, how if how == "OOMKilled" else "Error", reason)

    # -- pods --------------------------------------------------------------------------------------------------

    def _heard(self, kind: tuple[str, str], change: Change) -> None:
        if kind != PODS:
            return
        pod = change.now.obj
        loop = asyncio.get_running_loop()
        if change.was is None:
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            loop.call_later(self.draw.uniform(0.0, 0.03), lambda: self._run_pod(name, uid))
        if change.was is None or (_is_free(change.was.obj) and not _is_free(pod)):
            self.claimed += change.was is not None
            shelf = [one.obj for one in self.server.api.store.shelf(PODS).objects.values()]
            living = [one for one in shelf if _lives(one) and not _is_free(one)]
            twice = [place for place, count in Counter(map(_place, living)).items() if count > 1]
            if twice:
                names = sorted(one["metadata"]["annotations"]["dlrover-core/name"] for one in living)
                self.broken.append(f"two living pods of {twice}: {names}")
        if change.was is None:
            return
        if not change.deleted and pod["metadata"].get("deletionGracePeriodSeconds"):
            name = pod["metadata"]["name"]
            loop.call_later(self.draw.uniform(0.0, 0.05), lambda: self._delete(name, 0))

    def _run_pod(self, name: str, uid: str) -> None:
        found = self.server.api.store.get(PODS, ("train", name))
        if found is not None and found.obj["metadata"]["uid"] == uid and "nodeName" not in found.obj["spec"]:
            with contextlib.suppress(Exception):
                self.server.api.bind("train", name, "node-0")
                self._status(name, "Running")

    def _status(self, name: str, phase: str, code: int = 0, why: str = "", reason: str | None = None) -> None:
        def change(pod: Object) -> Object:
            state: Object = {"terminated": {"exitCode": code, "reason": why}} if why else {"running": {}}
            one = {"name": pod["spec"]["containers"][0]["name"], "state": state, "ready": not why, "restartCount": 0}
            pod["status"].update(phase=phase, containerStatuses=[one])
            if reason:
                pod["status"]["reason"] = reason
            return pod

        self.server.api.patch_status(self.server.api.kind("", "v1", "pods"), "train", name, change)

    def _delete(self, name: str, grace_s: int) -> None:
        kind = self.server.api.kind("", "v1", "pods")
        with contextlib.suppress(Exception):
            self.server.deletion.delete(kind, "train", name, {"gracePeriodSeconds": grace_s})

    # -- the end -----------------------------------------------------------------------------------------------

    async def _until_right(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLE_S
        while not self._right():
            assert loop.time() < until, f"not right: {self._picture()}"
            await asyncio.sleep(0.01)

    def _right(self) -> bool:
        there = [one.obj for one in self.server.api.store.shelf(PODS).objects.values()]
        shelf = [one for one in there if LABEL_KEPT not in one["metadata"]["labels"]]
        if any(_lives(one) for one in there if one not in shelf):
            return False
        pods = [one for one in shelf if not _is_free(one)]
        if len(shelf) != len(pods) + self.standby or not all(map(_lives, shelf)):
            return False
        running = sorted(
            one["metadata"]["annotations"]["dlrover-core/name"]
            for one in pods
            if one["status"]["phase"] == "Running" and "deletionTimestamp" not in one["metadata"]
        )
        return running == sorted(f"{place}-{n}" for place, n in self.incarnations.items()) and len(running) == len(pods)

    def _picture(self) -> str:
        pods = [one.obj for one in self.server.api.store.shelf(PODS).objects.values()]
        shown = [
            (one["metadata"]["annotations"].get("dlrover-core/name", "standby"), one["status"]["phase"]) for one in pods
        ]
        return f"{sorted(shown)}; {self.standby} standbys; incarnations {self.incarnations}; deaths {dict(self.deaths)}"

    async def _emptied(self) -> None:
        while any(self.server.api.store.shelf(("", plural)).objects for plural in ("pods", "secrets")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class _Master:
    """Keeps one node per place over the backend, until it is stopped as kill -9 stops."""

    def __init__(self, of: _Trial, token: int) -> None:
        self._of = of
        self._token = token
        self._backend = KubernetesBackend(of.context(), read_s=READ_S)
        self._seen: dict[str, Observation] = {}
        self._news = asyncio.Event()
        self._listed = False
        self._work = [asyncio.create_task(self._observe()), asyncio.create_task(self._level())]

    async def stop(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await self._backend.close()

    async def _observe(self) -> None:
        while True:
            with contextlib.suppress(CoreError):
                async for told in self._backend.observe():
                    self._take(told)
                    self._news.set()
            self._listed = False
            await asyncio.sleep(0.01)

    def _take(self, told: Listed | Changed) -> None:
        if isinstance(told, Listed):
            self._listed = True
            now = {one.name: one for one in told.nodes}
            for name in self._of.launched - now.keys():
                self._over(name)
            self._seen = now
        elif told.node.phase == "gone":
            self._seen.pop(told.node.name, None)
            self._over(told.node.name)
        else:
            self._seen[told.node.name] = told.node
        for one in list(self._seen.values()):
            if one.phase in {"failed", "succeeded"}:
                self._over(one.name)

    def _over(self, name: str) -> None:
        """A node has ended: its place gets the next incarnation."""
        place, _, incarnation = name.rpartition("-")
        self._of.launched.discard(name)
        if self._of.incarnations[place] == int(incarnation):
            self._of.incarnations[place] += 1

    async def _level(self) -> None:
        size = GroupSize("worker", "worker", 1, len(self._of.places), standby=self._of.standby)
        while True:
            if self._of.standby:
                self._backend.heard(())
                with contextlib.suppress(CoreError):
                    await self._backend.sized(Wanted((size,)), self._token)
            if self._listed:
                await asyncio.gather(*(self._place(place) for place in self._of.places))
            tick = asyncio.get_running_loop().call_later(0.05, self._news.set)
            await self._news.wait()
            tick.cancel()
            self._news.clear()

    async def _place(self, place: str) -> None:
        incarnation = self._of.incarnations[place]
        name = f"{place}-{incarnation}"
        for old in [one for one in self._seen if one.rpartition("-")[0] == place and one != name]:
            with contextlib.suppress(CoreError):
                await self._backend.delete(old, self._token, 1.0)
        if name in self._of.launched or self._of.incarnations[place] != incarnation:
            return  # it is there, or its end was told while the older ones were deleted
        node = NodeLaunch(name, place, "worker", int(place.rpartition("-")[2]), incarnation, 1, ())
        with contextlib.suppress(CoreError):
            await self._backend.launch(node, self._token)
            if self._of.incarnations[place] == incarnation:
                self._of.launched.add(name)


def _place(pod: Object) -> str:
    return str(pod["metadata"]["annotations"]["dlrover-core/name"]).rpartition("-")[0]


def _is_free(pod: Object) -> bool:
    """A standby that no node has become."""
    return "dlrover-core/name" not in pod["metadata"]["annotations"]


def _lives(pod: Object) -> bool:
    return pod["status"]["phase"] not in {"Succeeded", "Failed"}


def _json(value: Object) -> str:
    import json

    return json.dumps(value)
