"""The operator of ElasticJobs against a faulty API server: one seed is one history of faults, edits and deaths.

The operator and its client are the production ones, over real sockets. Masters are scripted: those of a job answer once its Job
is there, and do what they are told. What must hold:

* nothing that was made for a job is made a second time while the job is there, whatever becomes of operators;
* when the faults end, the masters have the sizes and the pause that the object asks for, and its status says so, whatever
  nonsense it was edited to meanwhile;
* nothing is in the way of writing any more, and the status says that, too;
* when the object is deleted all of its objects are gone, and strangers' are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

from dlrover_backends.fake_k8s import FakeServer, User, What, kubeconfig
from dlrover_backends.fake_k8s.rights import ADMIN
from dlrover_backends.fake_k8s.store import Change
from dlrover_backends.k8s import backoff, listwatch, masters, names
from dlrover_backends.k8s.elasticjob import crd, operator, translate
from dlrover_backends.k8s.elasticjob.operator import Operator
from dlrover_backends.k8s.elasticjob.reconcile import Settings
from dlrover_backends.k8s.elasticjob.telling import At, Size, Told
from dlrover_backends.k8s.transport import Transport
from dlrover_core.errors import ConnectionLost, Refused

Object = dict[str, Any]

RATES = {
    What.ERROR: 0.08,
    What.CONFLICT: 0.06,
    What.LOST: 0.12,
    What.REFUSED: 0.06,
    What.THROTTLED: 0.04,
    What.SLOW: 0.08,
    What.EXPIRED: 0.06,
    What.CUT: 0.08,
    What.ENDED: 0.06,
}
JOBS = (translate.GROUP, translate.PLURAL)
PAUSE_MAX_S, LOOK_S, SETTLE_S, TRIAL_S = 0.02, 0.05, 15.0, 60.0
NAME, OPERATOR = "mnist", "operator-0"
SETTINGS = Settings("registry/dlrover-core:1")
BASE = f"/apis/{translate.GROUP}/{translate.VERSION}/namespaces/train/{translate.PLURAL}"


def job(name: str = NAME, *, replicas: int = 4, line: str = "dlrover-run --nnodes=1:$NODE_NUM train.py") -> Object:
    """An ElasticJob."""
    container = {"name": "main", "image": "registry/mnist:1", "command": ["bash", "-c", line]}
    worker = {"replicas": replicas, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": f"{translate.GROUP}/{translate.VERSION}",
        "kind": translate.KIND,
        "metadata": {"name": name, "namespace": "train"},
        "spec": {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": worker}},
    }


class Scripted:
    """Masters of all jobs: they answer where their Job is, and do what they are told."""

    def __init__(self, server: FakeServer, draw: random.Random) -> None:
        self._server, self._draw = server, draw
        self.jobs: dict[str, Told] = {}
        self.commands: list[tuple[str, Object]] = []
        self.refuses = ""

    async def look(self, at: At) -> Told:
        """What the masters of this job say."""
        found = self._server.api.store.get(("batch", "jobs"), ("train", f"{masters.name_of(at.job)}-masters"))
        if found is None or self._draw.random() < 0.05:
            raise ConnectionLost(f"nobody answers at {at.address}")
        assert at.token not in {"", "made-by-the-operator"}, "the Secret has no token of its own"
        told = self.jobs.setdefault(at.run, Told("running", step=0, goodput=0.5, groups={"worker": Size(1, 4, 4)}))
        self.jobs[at.run] = told._replace(step=told.step + 1)
        return self.jobs[at.run]

    async def tell(self, at: At, asked: Mapping[str, Any]) -> None:
        """Do it, or refuse."""
        self.commands.append((at.job, dict(asked)))
        if self.refuses:
            raise Refused(self.refuses)
        told = self.jobs[at.run]
        if asked["command"] == "scale":
            size = Size(asked["nodes_min"], asked["nodes_max"], asked["nodes_max"])
            told = told._replace(groups={**told.groups, asked["group"]: size})
        else:
            told = told._replace(state={"suspend": "suspended", "resume": "running"}[asked["command"]])
        self.jobs[at.run] = told
        if self._draw.random() < 0.1:
            raise ConnectionLost("the answer was lost")

    def forget(self, run: str) -> None:
        """Scripts forget nothing."""


class Stand:
    """A fake API server with the definitions, an operator, and scripted masters."""

    def __init__(self, server: FakeServer, folder: Path, draw: random.Random, settings: Settings) -> None:
        self.server, self.settings = server, settings
        self.tells = Scripted(server, draw)
        configs = []
        for token in (server.token, OPERATOR):
            path = folder / token
            path.write_text(json.dumps(kubeconfig(server.url, token, "train")), encoding="utf-8")
            configs.append(str(path))
        config, self._operators = configs
        self.api = Transport(config)
        self._own: Transport | None = None
        self.running: asyncio.Future[None] | None = None
        self.forget: operator.Forget | None = None
        self.made: Counter[tuple[str, str]] = Counter()
        server.api.listen(self._heard)

    def _heard(self, kind: tuple[str, str], change: Change) -> None:
        if change.was is None and not change.deleted and kind[1] != "events":
            self.made[(kind[1], change.now.obj["metadata"]["name"])] += 1

    async def begin(self, rules: list[Object] | None = None) -> None:
        """Start an operator. ``rules``: all that it may do, as in a Role; None: everything."""
        user = ADMIN if rules is None else User("system:serviceaccount:train:operator", rules=tuple(rules))
        self.server.rights.tokens[OPERATOR] = user
        self._own = Transport(self._operators)
        made = Operator(self._own, self.tells, self.settings, "train", look_s=LOOK_S, forget=self.forget)
        self.running = asyncio.ensure_future(made.run())

    async def kill(self) -> None:
        """End the operator wherever it is."""
        running, own = self.running, self._own
        self.running = self._own = None
        if running is not None and own is not None:
            running.cancel()
            await asyncio.wait({running}, timeout=SETTLE_S)
            assert running.done(), "the operator does not end"
            await own.close()

    def objects(self, plural: str, group: str = "") -> list[Object]:
        """All objects of a kind."""
        return [one.obj for _, one in sorted(self.server.api.store.shelf((group, plural)).objects.items())]

    def job(self, name: str = NAME) -> Object | None:
        """The ElasticJob as it is now."""
        found = self.server.api.store.get(JOBS, ("train", name))
        return found.obj if found is not None else None

    def status(self, name: str = NAME) -> Object:
        """Its status."""
        found = self.job(name)
        return dict(found.get("status") or {}) if found is not None else {}

    def condition(self, kind: str, name: str = NAME) -> tuple[str, str]:
        """Status and message of a condition."""
        found = [one for one in self.status(name).get("conditions", ()) if one["type"] == kind]
        return (found[0]["status"], found[0]["message"]) if found else ("", "")

    def left(self) -> list[str]:
        """What there is that belongs to an ElasticJob."""
        found = []
        for group, plural in self.server.api.store.kinds():
            for one in self.objects(plural, group):
                owners = one["metadata"].get("ownerReferences") or ()
                if any(each["kind"] == translate.KIND for each in owners):
                    found.append(f"{plural}/{one['metadata']['name']}")
        return found

    async def until(
        self, holds: Callable[[], object], what: str, seconds: float = SETTLE_S, say: Callable[[], str] = str
    ) -> None:
        """Wait until something holds. ``say``: what keeps it from that."""
        until = time.monotonic() + seconds
        while not holds():
            if self.running is not None and self.running.done():
                self.running.result()
            assert time.monotonic() < until, (
                f"not within {seconds} s: {what}; {say()}; status {self.status()}; left {self.left()}"
            )
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def standing(seed: int = 0, settings: Settings = SETTINGS) -> AsyncIterator[Stand]:
    """A stand, of which nothing is left; pauses of the production code are cut short."""
    server = FakeServer(seed=seed, bookmark_s=0.05, future_s=0.05)
    server.api.create(server.api.kind("", "v1", "namespaces"), "", {"metadata": {"name": "train"}})
    await server.start()
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    quick = mock.patch.object(backoff, "LONGEST_S", PAUSE_MAX_S)
    again = mock.patch.object(operator, "AGAIN_S", PAUSE_MAX_S)
    relist = mock.patch.object(listwatch, "RELIST_S", (2.0, 3.0))
    with tempfile.TemporaryDirectory() as folder, quick, again, relist:
        stand = Stand(server, Path(folder), random.Random(seed), settings)
        try:
            for group in (translate.GROUP, translate.OLD_GROUP):
                path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                await stand.api.ask("POST", path, body=crd.definition(group))
            await _served(stand)
            yield stand
        finally:
            await stand.kill()
            await stand.api.close()
            for _ in range(10):  # connections that are closed on one side are told on the other
                await asyncio.sleep(0)
            await server.stop()
            structlog.configure(**before)


async def _served(stand: Stand) -> None:
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            await stand.api.ask("GET", BASE)
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the definition is not served")


# ---- one seed


def trial(seed: int) -> dict[str, Any]:
    """One seed; what happened. Raises where a promise is broken."""
    return asyncio.run(asyncio.wait_for(_trial(seed), TRIAL_S))


STRANGERS = (
    {"kind": "Secret", "metadata": {"name": "mine", "namespace": "train", "labels": {names.LABEL_BY: names.BY}}},
    {
        "kind": "ConfigMap",
        "metadata": {
            "name": "also-mine",
            "namespace": "train",
            "labels": {names.LABEL_BY: names.BY, names.LABEL_JOB: NAME},
        },
    },
)


async def _trial(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    async with standing(seed) as stand:
        for one in STRANGERS:
            plural = f"{one['kind'].lower()}s"  # type: ignore[attr-defined]
            stand.server.api.create(stand.server.api.kind("", "v1", plural), "train", copy.deepcopy(one))
        stand.server.faults.seeded(seed, RATES, most=50)
        await stand.begin()
        jobs = stand.server.api.kind(translate.GROUP, translate.VERSION, translate.PLURAL)
        stand.server.api.create(jobs, "train", job())
        wanted = await _history(stand, draw)
        happened = Counter(what for what, *_ in stand.server.faults.happened)
        stand.server.faults.clear()
        if stand.running is None or stand.running.done():
            await stand.kill()
            await stand.begin()
        what = "the masters as the object asks"
        await stand.until(lambda: not _wrong(stand, wanted), what, say=lambda: _wrong(stand, wanted))
        twice = [key for key, count in stand.made.items() if count > 1 and key[0] != "pods"]
        assert not twice, f"made twice: {twice}"
        stand.server.deletion.delete(jobs, "train", NAME, {})
        if draw.random() < 0.5:
            await stand.kill()
            await stand.begin()
        await stand.until(lambda: stand.job() is None and not stand.left(), "all gone")
        assert [one["metadata"]["name"] for one in stand.objects("secrets")] == ["mine"]
        assert [one["metadata"]["name"] for one in stand.objects("configmaps")] == ["also-mine"]
        return {"faults": dict(happened), "commands": len(stand.tells.commands)}


class _Wanted:
    """What the object asks for."""

    def __init__(self) -> None:
        self.replicas, self.suspend = 4, False


async def _history(stand: Stand, draw: random.Random) -> _Wanted:
    """Edits and deaths."""
    wanted = _Wanted()
    jobs = stand.server.api.kind(translate.GROUP, translate.VERSION, translate.PLURAL)

    def edit(change: Callable[[Object], None]) -> None:
        thing = copy.deepcopy(stand.job())
        assert thing is not None
        change(thing["spec"])
        stand.server.api.write(jobs, "train", NAME, thing)

    if draw.random() < 0.5:  # else edits come before the job is made
        await stand.until(lambda: stand.status().get("phase") == "Running", "it runs, whatever the server does")
    for _ in range(draw.randint(4, 9)):
        await asyncio.sleep(draw.uniform(0.0, 0.12) if draw.random() < 0.8 else 0.4)
        what = draw.choice(("size", "pause", "kill", "image", "cut", "kill", "nonsense"))
        if what == "size":
            wanted.replicas = draw.randint(1, 8)
            edit(lambda spec: spec["replicaSpecs"]["worker"].update(replicas=wanted.replicas))
        elif what == "pause":
            wanted.suspend = not wanted.suspend
            edit(lambda spec: spec.update(suspend=wanted.suspend))
        elif what == "image":
            tag = draw.randint(2, 99)
            edit(
                lambda spec, tag=tag: spec["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0].update(  # type: ignore[misc]
                    image=f"registry/mnist:{tag}"
                )
            )
        elif what == "nonsense":
            edit(
                lambda spec: spec["replicaSpecs"]["worker"].update(template={"spec": {"containers": [{"env": ["A"]}]}})
            )
            if draw.random() < 0.5:  # else what comes next finds it so
                await asyncio.sleep(draw.uniform(0.0, 0.12))
            template = job()["spec"]["replicaSpecs"]["worker"]["template"]
            edit(lambda spec, template=template: spec["replicaSpecs"]["worker"].update(template=template))  # type: ignore[misc]
        elif what == "cut":
            stand.server.end_watches(draw.choice(("cut", "end", "expired")))
        else:
            await stand.kill()
            await stand.begin()
    return wanted


def _wrong(stand: Stand, wanted: _Wanted) -> str:
    """In what the job, its masters and its status are not as the object asks; empty: in nothing."""
    thing = stand.job()
    if thing is None:
        return "no object"
    status, spec = stand.status(), thing["spec"]["replicaSpecs"]["worker"]
    for kind, holds in (("Reconciled", stand.condition("Reconciled")[0] != "False"), ("Accepted", _accepted(stand))):
        if not holds:
            return f"{kind}: {stand.condition(kind)}"
    if wanted.suspend:
        seen = (status.get("phase"), status.get("observedGeneration"))
        return "" if seen == ("Suspended", thing["metadata"]["generation"]) else f"not suspended: {seen}"
    told = stand.tells.jobs.get(thing["metadata"]["uid"])
    if told is None or told.state != "running" or told.groups["worker"].nodes_max != wanted.replicas:
        return f"{wanted.replicas} nodes are wanted, and the masters have {told}; the object has {spec['replicas']}"
    config = stand.server.api.store.get(("", "configmaps"), ("train", f"{NAME}-masters"))
    image = spec["template"]["spec"]["containers"][0]["image"]
    if config is None or image not in config.obj["data"]["worker"]:
        made = [one["metadata"].get("annotations") for one in stand.objects("jobs", "batch")]
        return f"image {image} is wanted, and the ConfigMap has {config and config.obj['data']}; annotations {made}"
    seen, ready = (status.get("phase"), status.get("ready")), f"{wanted.replicas}/{wanted.replicas}"
    return "" if seen == ("Running", ready) else f"the status is {seen}, and Running, {ready} are wanted"


def _accepted(stand: Stand) -> bool:
    return stand.condition("Accepted")[0] == "True"
