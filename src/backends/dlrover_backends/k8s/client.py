"""The `Backend` port over Kubernetes: a node is a pod, found by its labels and believed by its owner.

Nothing is remembered that the cluster does not say, but for which names are used up: so any master finds every node. All pods of
a run are owned by one object, a Secret with the job's token: when that is deleted, by us at the end or by anybody, they go too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Union

import structlog

from dlrover_backends.k8s import (
    due,
    endings,
    gangs,
    guarding,
    kept,
    names,
    pods,
    queues,
    refusals,
    settings,
    standbys,
    templates,
)
from dlrover_backends.k8s.api import Api, Json, only, uid_of
from dlrover_backends.k8s.errors import ApiError, Busy, Conflict, Forbidden, NotFound, Unreachable
from dlrover_backends.k8s.hosts import Hosts
from dlrover_backends.k8s.listwatch import READ_S, ListWatch, Snapshot
from dlrover_backends.k8s.stuck import Patience
from dlrover_backends.k8s.warm import Warm
from dlrover_core.errors import CoreError, LaunchRefused, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import DELETED, Admission, Changed, Listed, Observation, Wanted
from dlrover_core.runtime.backends import BackendContext

MADE_S = 900.0
"""How long it is remembered that a pod was made: longer than any list takes."""
RETRY_AFTER_MAX_S, TRIES, OWNER_AGAIN_S, OWNER_S = 5.0, 3, 0.5, 5.0
"""`OWNER_S`: for so long the owner is presumed to be as it was."""

log = structlog.get_logger("dlrover.backend")


class Deposed(CoreError):
    """An order came with a lower token than one before it: its master has a successor."""


class KubernetesBackend:
    """Pods of one run. ``api``: None for the cluster that the arguments and the environment name."""

    def __init__(
        self,
        here: BackendContext,
        api: Api | None = None,
        *,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
        read_s: float = READ_S,
    ) -> None:
        self._here, self._told = here, settings.read(here)
        self._api, self._own = api, api is None
        self._wall, self._now, self._read_s, self._namespace = wall, now, read_s, self._told.namespace
        self._highest = 0
        self._owner: Json | None = None
        self._owner_at = float("-inf")
        self._owning, self._connecting = asyncio.Lock(), asyncio.Lock()
        # By a node's true name: when its pod was made, and the pod; its uid; and of each place the incarnation that is over.
        self._made: dict[str, tuple[float, Json]] = {}
        self._uids: dict[str, str] = {}
        self._over: dict[str, int] = {}
        self._pods: dict[str, Json] | None = None  # by true name, once they were listed
        self._gangs = gangs.Gangs(here, self._told, self._ask, lambda: self._namespace) if self._told.gang else None
        self._guarding = guarding.Guarding(
            here, self._told, self._ask, lambda: self._namespace, self._connected, self._owned, now
        )
        self._list = Snapshot((), 0.0)  # the last one, without its objects
        self._kept = kept.Kept(here, self._ask, lambda: self._path("pods"), self.is_ours)
        self._ended: set[str] = set()
        self._hosts, self._patience = Hosts(now), Patience(now)
        self._dues = due.Dues(self._patience, wall)
        self._queue: queues.Queue | None = None
        if self._told.queue and self._told.gang != settings.VOLCANO:
            self._queue = queues.Queue(here, self._told, self._ask, cluster=self, now=now, wall=wall)
        # What was told of nodes, each with its pod's uid; and the pods of nodes that were standbys, whose names are their own.
        self._shown: dict[str, tuple[str, Observation]] | None = None
        self._named: dict[str, str] = {}
        self._warm: Warm | None = None
        if not (self._told.queue or self._told.gang):  # a standby would take from the quota, or be missing in the gang
            self._warm = Warm(here, self._told, self._ask, cluster=self, now=now)

    # ---- the port

    async def launch(self, node: NodeLaunch, token: int) -> str | None:
        """Let a standby's pod be the node, or make it one. Returns the standby's seat.

        Raises `LaunchRefused`, `Deposed`, and `ApiError` where the outcome is unknown.
        """
        self._fence(token)
        place, incarnation = _place(node.name)
        if self._over.get(place, -1) >= incarnation:
            raise LaunchRefused(f"{node.name} has been deleted, and a name is used once", permanent=True)
        try:
            owner = await self._owned()
            await self._see_to_stray(place, incarnation, owner)
            standby = await self._warm.take(node, owner, self._template, token) if self._warm is not None else None
            if standby is not None:
                await self._confirm(node.name, standby)
                self._note_made(node.name, standby)
                return standbys.seat_of(standby)
            template = await self._template(node.group)
            pod = pods.manifest(self._here, self._told, node, owner, template, token)
            if self._gangs is not None:
                self._gangs.admit(node.group, pod)
            if self._queue is not None:
                self._queue.admit(node, pod)
            made = await self._ask("POST", self._path("pods"), pod)
        except Conflict as error:
            made = await self._look_at(node.name, error)
        except ApiError as error:
            refused = refusals.of_launch(error)
            if refused is None:
                raise
            if self._warm is not None and not refused.permanent:
                self._warm.refused()
            raise refused from error
        await self._confirm(node.name, made)
        self._note_made(node.name, made)
        return None

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Delete the node's pod, with at least a second of grace; keep one that has failed. Raises `Deposed`, `ApiError`."""
        self._fence(token)
        place, incarnation = _place(name)
        self._over[place] = max(incarnation, self._over.get(place, -1))
        self._made.pop(name, None)
        await self._connected()
        path, uid = self._path_of(name), self._uids.get(name)
        with contextlib.suppress(NotFound, Conflict):  # it is gone, or another one has its name
            if uid is not None:
                if not await self._keeps(name, path.rpartition("/")[2], uid):
                    await self._delete(path, uid, grace_s)
                return
            for found in await self._of_node(name):
                if self.is_ours(found, await self._owned()):
                    await self._delete(f"{self._path('pods')}/{found['metadata']['name']}", uid_of(found), grace_s)

    async def _keeps(self, name: str, pod: str, uid: str) -> bool:
        shown_uid, shown = (self._shown or {}).get(name, ("", None))
        if self._owner is None or shown is None or (shown.phase, shown_uid) != ("failed", uid):
            return False
        return await self._kept.keep(name, pod, uid, self._owner)

    async def _of_node(self, name: str) -> list[Json]:
        """The pods of a node that no list has shown. Raises `ApiError`."""
        with contextlib.suppress(NotFound):
            return [await self._ask("GET", self._path_of(name))]
        if self._warm is None or not self._warm.used:
            return []
        return [one for one in await self._labelled() if endings.true_name(one) == name]

    async def _labelled(self) -> list[Json]:
        """Pods with the run's labels. Raises `ApiError`."""
        query = names.query(names.labels(self._here.job, self._here.run))
        return list((await self._ask("GET", f"{self._path('pods')}?{query}")).get("items") or ())

    def heard(self, seats: Collection[str]) -> None:
        """Agents wait in these seats, and answer."""
        if self._warm is not None:
            self._warm.heard(seats)

    async def observe(self) -> AsyncIterator[Union[Listed, Changed, Admission]]:
        """`Listed` first and after every gap, then one `Changed` for every change. Raises `ApiError` for a missing right.

        Where a queue admits the job, its `Admission` too.
        """
        await self._connected()  # the queue asks at once
        both = queues.merged(self._observed(), self._queue.run()) if self._queue is not None else self._observed()
        async with aclosing(both) as seen:
            async for one in seen:
                if isinstance(one, queues.Again):
                    for pod in [each for each in (self._pods or {}).values() if queues.place_of(each) == one.place]:
                        yield Changed(await self._judged(self._seen(pod, fresh=True)))
                else:
                    yield one

    async def _observed(self) -> AsyncGenerator[Union[Listed, Changed]]:
        owner = await self._owned()
        assert self._api is not None
        where = self._path("pods")
        loop = ListWatch(
            self._api, where, names.selector(self._here.job, self._here.run), now=self._now, read_s=self._read_s
        )
        told: dict[str, tuple[str, Observation]] = {}
        keeping = asyncio.ensure_future(self._warm.run()) if self._warm is not None else None
        try:
            async with aclosing(self._dues.beside(loop.run())) as seen:
                async for one in seen:
                    if isinstance(one, Snapshot):
                        ours, self._list = self._ours(one, owner), one._replace(objects=())
                        told = self._shown = {name: (uid_of(pod), self._seen(pod)) for name, pod in ours.items()}
                        self._uids |= {name: uid_of(pod) for name, pod in ours.items()}
                        self._note_pods(ours)
                        self._guarding.seen(node for _, node in told.values())
                        shown = [await self._judged(node) for _, node in told.values() if node.phase != "gone"]
                        yield Listed(tuple(shown))
                    elif (change := self._change(one.type, one.object, owner, told)) is not None:
                        self._guarding.seen(node for _, node in told.values())
                        yield Changed(await self._judged(change))
        except Forbidden as error:
            raise CoreError(refusals.missing_right(error)) from error
        finally:
            self._shown = None
            await self._guarding.rest()
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def room(self, group: str) -> int | None:  # noqa: ARG002  # the port's
        """Only the scheduler knows what would start now."""
        return None

    async def sized(self, wanted: Wanted, token: int) -> None:
        """Let the cluster know the whole job, where a gang, a queue or a budget depends on it. Raises `Deposed`, `ApiError`."""
        self._fence(token)
        if self._gangs is not None:
            await self._gangs.sized(wanted, await self._owned())
        if self._warm is not None:
            await self._warm.sized(wanted, self._owned, self._template, token)
        if self._queue is not None:
            owner, made = await self._owned(), dict[str, Json]()
            for one in wanted.groups:
                node = NodeLaunch(
                    one.name, one.name, one.name, 0, 0, one.nproc, (), one.memory_mib, one.cpu_m, one.gpus
                )
                with contextlib.suppress(LaunchRefused):  # as each launch will be
                    made[one.name] = pods.manifest(self._here, self._told, node, owner, await self._template(one.name))
            if len(made) == len(wanted.groups):
                self._queue.sized(wanted, owner, made)
        await self._guarding.sized(wanted)

    async def check(self) -> None:
        """Ask for pods, gangs and queues. Raises `SpecError` for missing credentials, rights or kinds, and `ApiError`."""
        await self._connected()
        try:
            await self._ask("GET", f"{self._path('pods')}?limit=1")
        except Forbidden as error:
            raise SpecError("backend", refusals.missing_right(error)) from error
        if self._gangs is not None:
            await self._gangs.check()
        if self._queue is not None:
            await self._queue.check()

    async def show(self, write: Callable[[bytes], None]) -> None:
        """Pass on what nodes print, until cancelled. Raises `ApiError`, `LaunchRefused`."""
        from dlrover_backends.k8s.outputs import Outputs
        from dlrover_backends.k8s.transport import Transport

        owner: Json | None = None
        while owner is None:
            await self._connected()
            try:
                owner = await self._found_owner()
            except (Busy, Unreachable):
                owner = None
            if owner is None:  # the leading master makes it
                await asyncio.sleep(OWNER_AGAIN_S)
        assert isinstance(self._api, Transport)
        ours = owner
        selector = names.selector(self._here.job, self._here.run)
        await Outputs(self._api, self._path("pods"), selector, lambda pod: self.is_ours(pod, ours), write).run()

    # ---- when the job is over

    @property
    def remedy(self) -> str:
        """What a person types where `clear` could not."""
        where = f" -n {self._namespace}" if self._namespace else ""
        if self._told.owner:
            return (
                f"remove it with: kubectl{where} delete pods -l {names.LABEL_RUN}={names.label_value(self._here.run)}"
            )
        return f"remove it with: kubectl{where} delete secret {names.owner_name(self._here.job, self._here.run)}"

    async def clear(self) -> None:
        """Remove everything that the run has made, pods first. Raises `ApiError`, `SpecError`."""
        try:
            await self._clear()
        finally:
            await self.close()

    async def _clear(self) -> None:
        await self._connected()
        owner = await self._found_owner()
        for pod in await self._labelled():
            if owner is not None and self.is_ours(pod, owner):
                path = f"{self._path('pods')}/{pod['metadata']['name']}"
                with contextlib.suppress(NotFound, Conflict):
                    await self._delete(path, uid_of(pod), 0.0)  # the masters gave them their grace
        if owner is not None and not self._told.owner:
            await self._kept.clear(owner)
            with contextlib.suppress(NotFound, Conflict):
                await self._ask("DELETE", self._owner_path(), only(uid_of(owner)))
        with contextlib.suppress(OSError):
            self._marker().unlink()  # a run of the same owner may begin again

    async def close(self) -> None:
        """Close connections of one's own."""
        api, self._api = (self._api, None) if self._own else (None, self._api)
        if api is not None:
            from dlrover_backends.k8s.transport import Transport

            assert isinstance(api, Transport)
            await api.close()

    async def _see_to_stray(self, place: str, incarnation: int, owner: Json) -> None:
        """Let the pod of the last incarnation end, where somebody took its labels away: no list shows it, and it trains on.

        Raises `LaunchRefused` while it lives.
        """
        last = f"{place}-{incarnation - 1}"
        if incarnation == 0 or last in self._ended:
            return
        path = self._path_of(last)
        try:
            found = await self._ask("GET", path)
        except NotFound:
            return
        labels, wanted = found["metadata"].get("labels") or {}, names.labels(self._here.job, self._here.run)
        listed = all(labels.get(key) == value for key, value in wanted.items())
        seen = endings.observation(found, self._wall())
        if listed or not self.is_ours(found, owner) or seen.phase not in {"pending", "running"}:
            return
        if not endings.is_deleted(found):
            with contextlib.suppress(NotFound, Conflict):
                await self._delete(path, uid_of(found), self._here.stop_grace_s)
        raise LaunchRefused(
            f"pod {found['metadata']['name']} of {last} has lost its labels and still runs; it is being deleted",
            permanent=False,
        )

    async def _template(self, group: str) -> Json | None:
        return await templates.of_group(self._here, self._told, group, self._ask, self._path("configmaps"))

    # ---- what is there

    @property
    def api(self) -> Api:
        """The connection, once there is one."""
        assert self._api is not None
        return self._api

    @property
    def namespace(self) -> str:
        """Where everything is made, once there is a connection."""
        return self._namespace

    @property
    def living(self) -> list[Json] | None:
        """The run's pods that are not gone; None: they were not listed yet."""
        return None if self._pods is None else list(self._pods.values())

    @property
    def nodes(self) -> dict[str, Observation] | None:
        """The run's nodes, as they were last told; None: they were not listed yet."""
        return None if self._shown is None else {name: seen for name, (_, seen) in self._shown.items()}

    def _ours(self, listed: Snapshot, owner: Json) -> dict[str, Json]:
        """Our pods by their nodes' names; those that were made since the list began are there, whether it has them or not."""
        ours = [pod for pod in listed.objects if self.is_ours(pod, owner)]
        if self._warm is not None:
            self._warm.listed([pod for pod in ours if standbys.is_free(pod)], listed.began)
        found = {endings.true_name(pod): pod for pod in ours if not standbys.is_free(pod)}
        self._named |= {name: pod["metadata"]["name"] for name, pod in found.items() if standbys.is_standby(pod)}
        late = {name: pod for name, (at, pod) in self._made.items() if listed.may_lack(pod, at)}
        return {**late, **found}

    def _change(
        self, type_: str, pod: Json, owner: Json, told: dict[str, tuple[str, Observation]]
    ) -> Observation | None:
        """What is news of a change; None: nothing."""
        if not self.is_ours(pod, owner):
            return None
        if self._warm is not None and standbys.is_standby(pod):
            self._warm.changed(type_, pod)
            if standbys.is_free(pod):
                return None
            self._named[endings.true_name(pod)] = str(pod["metadata"]["name"])
        name, uid = endings.true_name(pod), uid_of(pod)
        before = told.get(name)
        if type_ == "DELETED":
            if before is None or before[0] != uid:
                return None  # late news of a pod that a list has told the end of
            del told[name]
            if endings.is_deleted(pod) or before[1].phase in {"failed", "succeeded"}:
                self._ended.add(name)
                self._named.pop(name, None)
            self._uids.pop(name, None)
            self._made.pop(name, None)
            self._note_pods({}, name)
            if self._warm is not None:
                self._warm.news()
            if before[1].phase == "gone":
                return None
            return endings.removed(pod, before[1], self._queue.taken(name) if self._queue is not None else "")
        self._uids[name] = uid
        self._note_pods({name: pod}, name)
        node = self._seen(pod, fresh=True)
        told[name] = (uid, node)
        if self._warm is not None:
            self._warm.news()
        return node if before is None or before[1] != node else None

    async def _judged(self, seen: Observation) -> Observation:
        """The same, with what the cluster says of its host, where the pod alone does not say enough."""
        if seen.host and self._told.rack and self._api is not None:
            rack = await self._hosts.rack(self._api, seen.host, self._told.rack)
            seen = seen._replace(domain=rack or seen.domain)
        if not seen.host or not (seen.phase == "lost" or (seen.phase == "gone" and seen.reason in {"", DELETED})):
            return seen
        assert self._api is not None
        # A person who deletes a pod of a cordoned host means the pod: a cordon is nothing against a host.
        words = await self._hosts.wrong(self._api, seen.host, away=seen.reason == DELETED)
        return seen._replace(reason="; ".join(filter(None, (seen.reason, words)))) if words else seen

    def _seen(self, pod: Json, *, fresh: bool = False) -> Observation:
        self._kept.see(pod)
        seen = self._patience.judged(pod, endings.observation(pod, self._wall()))
        self._dues.note(pod, seen)
        if self._queue is not None:
            seen = self._queue.marked(seen, queues.place_of(pod))
        seen = seen._replace(seat=standbys.seat_of(pod))
        return seen._replace(age_us=0) if fresh else seen

    def is_ours(self, pod: Json, owner: Json) -> bool:
        """Labels find a pod; only its owner's uid, which nobody can choose, proves it to be of this run."""
        owners = (pod.get("metadata") or {}).get("ownerReferences") or ()
        return any(one.get("uid") == uid_of(owner) for one in owners)

    async def _look_at(self, name: str, taken: Conflict) -> Json:
        """The name of a pod is taken: by this node, which is then launched already and returned, or by a stranger."""
        pod_name = names.pod_name(name, self._here.run)
        found = await self._ask("GET", f"{self._path('pods')}/{pod_name}")
        if not self.is_ours(found, await self._owned()):
            raise refusals.of_stranger(found, self._namespace) from taken
        return found

    async def _confirm(self, name: str, made: Json) -> None:
        """Ask for a pod that a list lacks which was taken after the pod was made, and told before: no watch says that it is gone.

        Raises `LaunchRefused` where the pod is gone, and `ApiError`.
        """
        if self._shown is None or name in self._shown or not self._list.follows(made):
            return
        with contextlib.suppress(NotFound):
            found = await self._ask("GET", f"{self._path('pods')}/{made['metadata']['name']}")
            if uid_of(found) == uid_of(made):
                return  # its labels were taken away
        raise refusals.of_removed(made)

    def _note_pods(self, found: dict[str, Json], name: str = "") -> None:
        """Know the pods that are there: all of them, or one that is or is not among them."""
        if self._queue is None:
            return
        self._pods = (
            found if not name else {**{one: pod for one, pod in (self._pods or {}).items() if one != name}, **found}
        )
        self._queue.news()

    def _note_made(self, name: str, pod: Json) -> None:
        now = self._now()
        self._made = {one: made for one, made in self._made.items() if now - made[0] < MADE_S}
        self._made[name] = (now, pod)
        self._uids[name] = uid_of(pod)
        if standbys.is_standby(pod):
            self._named[name] = str(pod["metadata"]["name"])
        if self._pods is not None:
            self._note_pods({name: pod}, name)

    # ---- the owner

    async def _owned(self) -> Json:
        """The object that owns the run's pods, made if need be. Raises `LaunchRefused` while it is being deleted, `ApiError`."""
        async with self._owning:
            await self._connected()
            if self._owner is not None and self._now() - self._owner_at < OWNER_S:
                return self._owner
            found = await self._found_owner()
            if found is None and (self._told.owner or self._owner is not None or self._marker().exists()):
                kind, name = self._owner_path().split("/")[-2:]
                raise LaunchRefused(
                    f"{kind.removesuffix('s')} {name}, which owns the job's pods, was deleted: so is the job",
                    permanent=True,
                )
            if found is None:
                found = await self._make_owner()
            if found["metadata"].get("deletionTimestamp"):
                raise LaunchRefused("what owns the job's pods is being deleted", permanent=True)
            self._owner, self._owner_at = found, self._now()
            return found

    async def _found_owner(self) -> Json | None:
        try:
            found = await self._ask("GET", self._owner_path())
        except NotFound:
            return None
        if self._told.owner:
            return found if uid_of(found) == self._here.run else None
        labels = (found.get("metadata") or {}).get("labels") or {}
        ours = names.labels(self._here.job, self._here.run)
        if any(labels.get(key) != value for key, value in ours.items()):
            raise LaunchRefused(
                f"secret {self._owner_path().rpartition('/')[2]} in namespace {self._namespace} is not of this run",
                permanent=True,
            )
        return found

    async def _make_owner(self) -> Json:
        try:
            made = await self._ask("POST", self._path("secrets"), pods.owner_object(self._here))
        except Conflict:
            made = await self._ask("GET", self._owner_path())
        with contextlib.suppress(OSError):
            self._marker().write_text(uid_of(made), encoding="utf-8")
        return made

    def _marker(self) -> Path:
        """On the masters' host: the owner has been made, and is not made again when somebody has deleted it."""
        return Path(self._here.directory or "/nonexistent", f"{names.owner_name(self._here.job, self._here.run)}.uid")

    def _owner_path(self) -> str:
        if self._told.owner:
            version, plural, name = self._told.owner.rsplit("/", 2)
            return f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/{self._namespace}/{plural}/{name}"
        return f"{self._path('secrets')}/{names.owner_name(self._here.job, self._here.run)}"

    # ---- requests

    async def _connected(self) -> None:
        async with self._connecting:  # once: several ask at the start
            if self._api is None:
                # Its imports must not hold the master's loop.
                await asyncio.to_thread(importlib.import_module, "dlrover_backends.k8s.transport")
                from dlrover_backends.k8s.transport import Transport

                transport = Transport(self._told.kubeconfig, self._told.context)
                await transport.open()
                self._namespace = self._told.namespace or transport.namespace or "default"
                self._api = transport
            self._namespace = self._namespace or "default"

    async def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """One request, sent again where the server says when. Raises `ApiError`."""
        assert self._api is not None
        for left in reversed(range(TRIES)):
            try:
                return await self._api.ask(method, path, body=body)
            except Busy as error:
                after = error.retry_after_s
                if not left or after is None or after > RETRY_AFTER_MAX_S:
                    raise
                await asyncio.sleep(after)
        raise AssertionError

    async def _delete(self, path: str, uid: str, grace_s: float) -> None:
        await self._ask("DELETE", path, {**only(uid), "gracePeriodSeconds": pods.grace(grace_s)})

    def _path(self, resource: str) -> str:
        return f"/api/v1/namespaces/{self._namespace}/{resource}"

    def _path_of(self, name: str) -> str:
        """Where a node's pod is."""
        return f"{self._path('pods')}/{self._named.get(name) or names.pod_name(name, self._here.run)}"

    def _fence(self, token: int) -> None:
        if token < self._highest:
            raise Deposed(f"token {token}: a master with token {self._highest} has given orders")
        self._highest = token


def _place(name: str) -> tuple[str, int]:
    """A node's place and its incarnation, out of its name."""
    place, _, incarnation = name.rpartition("-")
    return (place, int(incarnation)) if incarnation.isascii() and incarnation.isdecimal() else (name, 0)
