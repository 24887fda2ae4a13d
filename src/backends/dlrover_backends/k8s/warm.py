"""Warm pods: so many standbys are kept, and a node that is launched again takes one instead of a new pod.

A standby is a pod of the run without a node's name (`standbys`): its image is pulled, its agent has imported what workers need,
and waits for the leader to name it. No list of nodes has it, and nothing of it is recorded: one that ends is replaced, at
growing intervals, and costs no budget. Which node it becomes is decided in the run's book (`claims`), so no node has two pods.

Standbys give way: none is made before all nodes run, and none stays where a node waits for room or quota.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import structlog

from dlrover_backends.k8s import claims, endings, names, refusals, standbys
from dlrover_backends.k8s.api import Ask, Json, uid_of
from dlrover_backends.k8s.backoff import BackOff
from dlrover_backends.k8s.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from dlrover_backends.k8s.settings import Settings
from dlrover_core.errors import CoreError, LaunchRefused
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import ENDS, RUNNING, GroupSize, Observation, Wanted
from dlrover_core.runtime.backends import BackendContext

TRIES = 4
"""So often a claim is decided anew before the node is refused for now."""
FAIL_S = (1.0, 5.0, 30.0, 120.0, 300.0)
"""How long no standby is made after one has ended or was refused, for each time in a row."""
CALM_S = 300.0
"""A standby that lived for so long counts as none that failed."""
DEAF_S = 300.0
"""A standby that has run for so long, and whose agent no master hears, is replaced."""
CROWDED_S = 60.0
"""For so long after a node was refused for now no standby is made: it would take what the node waits for."""
FENCE_S = 5.0
"""Standbys are made and removed only within so long after the leader has said which of them answer: it says so all the time."""
LOOK_S = 60.0

Owned = Callable[[], Awaitable[Json]]
Template = Callable[[str], Awaitable[Json | None]]

log = structlog.get_logger("dlrover.backend")


class Group(NamedTuple):
    """The standbys of one group.

    standby:   how many there should be
    nodes_min: nodes that must run before one is made
    node:      what each needs
    owner, template: as for a node's pod
    shape:     of those that are made now; an older one fits no node
    """

    standby: int
    nodes_min: int
    node: NodeLaunch
    owner: Json
    template: Json | None
    shape: str


class Sized(NamedTuple):
    """What the leader said last, and how to learn what pods are made from."""

    wanted: Wanted
    owned: Owned
    template: Template


class Cluster(Protocol):
    """What standbys see of the backend."""

    @property
    def namespace(self) -> str:
        """Where everything is made."""
        ...

    @property
    def nodes(self) -> Mapping[str, Observation] | None:
        """The run's nodes by their true names, as they were last told; None: they were not listed yet."""
        ...

    def is_ours(self, pod: Json, owner: Json) -> bool:
        """Is this pod of this run?"""
        ...


class Warm:
    """The standbys of one run. ``ask``: sends a request, as `Api.ask`; ``now``: steady seconds."""

    def __init__(
        self,
        here: BackendContext,
        told: Settings,
        ask: Ask,
        *,
        cluster: Cluster,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here, self._told, self._ask, self._cluster, self._now = here, told, ask, cluster, now
        self._claims = claims.Claims(here, ask, lambda: cluster.namespace)
        # Groups with standbys, None before they are known, and those of them that could be described so far.
        self._booked: frozenset[str] | None = None
        self._groups: dict[str, Group] = {}
        # What the leader said last; and when groups are described again for which the API server had an error; None: for none.
        self._sized: Sized | None = None
        self._describe_at: float | None = None
        self._describing = BackOff(lambda: 1.0)
        self._state, self._token = RUNNING, 0
        # Free standbys by uid, since when each is known, and runs; when others ceased to be free, for lists are older.
        self._free: dict[str, Json] = {}
        self._since: dict[str, float] = {}
        self._ran: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._heard: frozenset[str] = frozenset()
        self._led_since = self._led_at = float("-inf")
        self._heard_at: dict[str, float] = {}
        self._avoid: dict[str, tuple[str, ...]] = {}
        self._taking: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._crowded_until = 0.0
        self._ended: set[str] = set()
        self._deciding = asyncio.Lock()
        self._news = asyncio.Event()

    @property
    def used(self) -> bool:
        """Does the job have standbys?"""
        return bool(self._booked)

    # ---- what the backend says

    async def sized(self, wanted: Wanted, owned: Owned, template: Template, token: int) -> None:
        """The job wants this. ``owned``: the owner of pods; ``template``: that of a group.

        Nothing waits for standbys, so no failure is raised: a group that cannot be described now stays as it was.
        """
        self._state, self._token = wanted.state, token
        self._booked = frozenset(one.name for one in wanted.groups if one.standby)
        self._sized = Sized(wanted, owned, template)
        await self._describe(self._sized)
        self._news.set()

    async def _describe(self, sized: Sized) -> None:
        """Describe the standbys of every group."""
        found: dict[str, Group] = {}
        failed: ApiError | None = None
        for one in sized.wanted.groups:
            former = self._groups.get(one.name)
            if one.standby and former is not None:
                found[one.name] = former._replace(standby=one.standby, nodes_min=one.nodes_min)
            if one.standby and sized.wanted.state not in ENDS:
                try:
                    found[one.name] = await self._described(one, await sized.owned(), sized.template)
                except CoreError as error:
                    log.warning("standbys stay as they are", group=one.name, error=str(error))
                    failed = error if isinstance(error, ApiError) else failed
        if self._sized is sized:
            self._groups, self._describe_at = found, None
            if failed is None:
                self._describing.went_well(self._now())
            else:
                self._describe_at = self._now() + self._describing.failed(self._now(), failed.retry_after_s)

    async def _described(self, one: GroupSize, owner: Json, template: Template) -> Group:
        """The standbys of a group. Raises `CoreError`."""
        node, found = standbys.node_of(one), await template(one.name)
        pod = standbys.manifest(self._here, self._told, node, owner, found)
        return Group(one.standby, one.nodes_min, node, owner, found, standbys.shape_of(pod))

    def heard(self, seats: Collection[str]) -> None:
        """Agents wait in these seats, and answer."""
        now = self._now()
        if not self._is_led():
            self._led_since = now
            self._news.set()
        self._led_at = now
        self._heard = frozenset(seats)
        self._heard_at |= dict.fromkeys(seats, now)

    def _is_led(self) -> bool:
        """Does a master that may order look after the standbys?"""
        return self._now() - self._led_at <= FENCE_S

    def refused(self) -> None:
        """A node was refused for now: it needs what standbys have."""
        if self._groups:
            self._crowded_until = self._now() + CROWDED_S
            self._news.set()

    def listed(self, free: list[Json], began: float) -> None:
        """These are the free standbys, by a list that began then."""
        self._left = {uid: at for uid, at in self._left.items() if at >= began}
        now = {uid_of(pod): pod for pod in free if uid_of(pod) not in self._left}
        late = {uid: pod for uid, pod in self._free.items() if self._since.get(uid, 0.0) >= began}
        self._free = {**late, **now}
        self._since = {uid: at for uid, at in self._since.items() if uid in self._free}
        self._ran = {uid: at for uid, at in self._ran.items() if uid in self._free}
        for uid in self._free:
            self._note_times(uid)
        self._news.set()

    def changed(self, type_: str, pod: Json) -> None:
        """A free standby has changed, or a pod that is none any more."""
        uid = uid_of(pod)
        if type_ == "DELETED" or not standbys.is_free(pod):
            if self._free.pop(uid, None) is not None:
                self._left[uid] = self._now()
                self._news.set()
        elif uid not in self._left:
            self._free[uid] = pod
            self._note_times(uid)
            self._news.set()

    def _note_times(self, uid: str) -> None:
        self._since.setdefault(uid, self._now())
        if standbys.runs(self._free[uid]):
            self._ran.setdefault(uid, self._now())

    def news(self) -> None:
        """Nodes have changed."""
        if self._groups:
            self._news.set()

    # ---- a node is launched

    async def take(self, node: NodeLaunch, owner: Json, template: Template, token: int) -> Json | None:
        """The pod of the standby that is the node from now on; None: it is to have one of its own.

        Raises `LaunchRefused` where it cannot be decided now, and `ApiError` where the outcome is not known.
        """
        self._avoid[node.group] = node.avoid
        if node.incarnation == 0 or node.group not in (self._booked or ()):
            return None  # only the place of a dead node is a standby's
        self._news.set()
        over = ""
        try:
            for _ in range(TRIES):
                said = await self._decided(node, owner, template, over)
                if isinstance(said, str):
                    return None
                if (pod := await self._claimed(said, node, owner, token)) is not None:
                    return pod
                over = said.text  # this standby is another node's, or has ended
        except (Forbidden, Invalid) as error:
            self._missing(error)
            return None
        raise LaunchRefused(f"{node.name}: its standbys end one after another", permanent=False)

    async def _decided(self, node: NodeLaunch, owner: Json, template: Template, over: str) -> claims.Standby | str:
        """What the node is by the book, which decides now if it has not, or has said ``over``.

        One launch at a time: those of one master do not compete. Raises `LaunchRefused`, `ApiError`.
        """
        key = f"{node.group}-{node.index}-{node.incarnation}"
        async with self._deciding:
            for _ in range(TRIES):
                book = await self._claims.read(owner)
                if book.is_past(key):
                    raise LaunchRefused(f"{node.name}: a later node of its place was launched", permanent=True)
                said = book.says(key)
                if said is not None and (isinstance(said, str) or said.text != over):
                    return said
                what = await self._made_as(node, owner)
                what = what or await self._best(node, owner, template, book.taken) or claims.OWN
                if await self._claims.write(book, key, what if isinstance(what, str) else what.text):
                    return what
        raise LaunchRefused(f"{node.name}: its standby is not decided yet", permanent=False)

    async def _made_as(self, node: NodeLaunch, owner: Json) -> claims.Standby | str | None:
        """What the node is already, whatever the book says: it may have been lost, or not kept. Raises `ApiError`."""
        from urllib.parse import urlencode

        label = f"{names.LABEL_NODE}={names.label_value(node.node)}"
        query = urlencode({"labelSelector": f"{names.selector(self._here.job, self._here.run)},{label}"})
        found = await self._ask("GET", f"{self._path('pods')}?{query}")
        for pod in found.get("items") or ():
            if endings.true_name(pod) == node.name and self._cluster.is_ours(pod, owner):
                return claims.Standby(pod["metadata"]["name"], uid_of(pod)) if standbys.is_standby(pod) else claims.OWN
        try:  # its labels may be gone
            await self._ask("GET", f"{self._path('pods')}/{names.pod_name(node.name, self._here.run)}")
        except NotFound:
            return None
        return claims.OWN

    async def _best(
        self, node: NodeLaunch, owner: Json, template: Template, taken: Collection[str]
    ) -> claims.Standby | None:
        """The free standby that would train soonest: one that answers, then one that runs, then the oldest."""
        free = {uid: pod for uid, pod in self._free.items() if uid not in taken and uid not in self._taking}
        if not any(standbys.group_of(pod) == node.group for pod in free.values()):
            return None
        wanted = standbys.manifest(self._here, self._told, node, owner, await template(node.group))
        shape = standbys.shape_of(wanted)
        fitting = [
            (standbys.seat_of(pod) not in self._heard, not standbys.runs(pod), standbys.number_of(pod), uid)
            for uid, pod in free.items()
            if uid in self._free and standbys.may_be(pod, node, shape)
        ]
        if not fitting:
            return None
        uid = min(fitting)[-1]
        return claims.Standby(str(free[uid]["metadata"]["name"]), uid)

    async def _claimed(self, one: claims.Standby, node: NodeLaunch, owner: Json, token: int) -> Json | None:
        """The standby, as the node; None: it cannot be any more. Raises `ApiError`, `LaunchRefused`."""
        path = f"{self._path('pods')}/{one.pod}"
        self._taking.add(one.uid)
        try:
            for _ in range(TRIES):
                found = await self._ask("GET", path)
                if uid_of(found) != one.uid or not self._cluster.is_ours(found, owner):
                    return None
                if not standbys.is_free(found):
                    return found if endings.true_name(found) == node.name else None
                if endings.is_deleted(found) or not standbys.lives(found):
                    return None
                try:
                    made = await self._ask("PATCH", path, standbys.claim(found, node, token))
                except Conflict:
                    continue  # the kubelet has written something, or another master was faster
                self._is_taken(one.uid, node)
                return made
            raise LaunchRefused(f"standby {one.pod} changes too fast to become {node.name}", permanent=False)
        except NotFound:
            return None
        finally:
            self._taking.discard(one.uid)

    def _is_taken(self, uid: str, node: NodeLaunch) -> None:
        self._free.pop(uid, None)
        self._left[uid] = self._now()
        self._failures.pop(node.group, None)
        self._news.set()

    def _missing(self, error: ApiError) -> None:
        why = refusals.missing_right(error) if isinstance(error, Forbidden) else str(error)
        log.error("standbys cannot be taken", error=why)

    # ---- so many are kept

    async def run(self) -> None:
        """Keep as many as are wanted, until cancelled."""
        again = BackOff(lambda: 1.0)
        while True:
            self._news.clear()
            wait_s = LOOK_S
            try:
                wait_s = min(wait_s, await self._level())
                again.went_well(self._now())
            except Exception as error:  # noqa: BLE001  # not even a mistake of ours may be the end of all standbys
                wait_s = again.failed(self._now(), error.retry_after_s if isinstance(error, ApiError) else None)
                why = str(error) if isinstance(error, CoreError) else f"{type(error).__name__}: {error}"
                log.warning("standbys are looked after again", error=why, in_s=round(wait_s, 1))
            timer = asyncio.get_running_loop().call_later(wait_s, self._news.set)
            try:
                await self._news.wait()
            finally:
                timer.cancel()

    async def _level(self) -> float:
        """One pass; seconds until the next one. Raises `ApiError`."""
        nodes = self._cluster.nodes
        if nodes is None or self._booked is None or not self._is_led():
            return LOOK_S
        for uid, pod in list(self._free.items()):
            why = self._unfit(uid, pod) if uid in self._free else ""  # it may have ceased to be free meanwhile
            if why and uid not in self._taking:
                await self._remove(uid, pod, why)
        waits = LOOK_S
        for name, group in self._groups.items():
            here = self._of(name)
            for uid, pod in here[group.standby :]:
                await self._remove(uid, pod, "there is one too many")
            if len(here) < group.standby and self._state == RUNNING:
                waits = min(waits, await self._fill(name, group, nodes, group.standby - len(here)))
        if self._sized is None or self._describe_at is None:
            return waits
        if self._describe_at <= self._now():
            await self._describe(self._sized)
            return 0.0
        return min(waits, self._describe_at - self._now())

    def _of(self, group: str) -> list[tuple[str, Json]]:
        """The free standbys of a group that live and stay, the oldest first."""
        found = [
            (uid, pod)
            for uid, pod in self._free.items()
            if standbys.group_of(pod) == group and standbys.lives(pod) and not endings.is_deleted(pod)
        ]
        return sorted(found, key=lambda one: standbys.number_of(one[1]))

    def _unfit(self, uid: str, pod: Json) -> str:
        """Why a free standby is of no use; empty: it is."""
        if endings.is_deleted(pod):
            return ""  # it goes
        group = self._groups.get(standbys.group_of(pod))
        if standbys.group_of(pod) not in (self._booked or ()) or self._state != RUNNING:
            return "the job wants none"
        seen = endings.observation(pod)
        if seen.phase not in {"pending", "running"}:
            return f"{seen.phase}: {seen.reason}"
        if group is not None and standbys.shape_of(pod) != group.shape:
            return "nodes are made otherwise by now"
        if seen.host and seen.host in self._avoid.get(standbys.group_of(pod), ()):
            return f"nodes must not run on {seen.host}"
        if self._is_crowded():
            return "a node waits for room"
        runs_since = self._ran.get(uid, self._now())
        heard_at = self._heard_at.get(standbys.seat_of(pod), 0.0)
        silent_s = self._now() - max(runs_since, heard_at, self._led_since)
        if standbys.runs(pod) and silent_s > DEAF_S:
            return f"no master has heard its agent for {silent_s:.0f} s"
        return ""

    def _is_crowded(self) -> bool:
        """Does a node wait for what standbys have?"""
        nodes = (self._cluster.nodes or {}).values()
        return self._now() < self._crowded_until or any(
            one.phase == "pending" and one.waits and not one.host for one in nodes
        )

    async def _remove(self, uid: str, pod: Json, why: str) -> None:
        if not self._is_led():
            return
        group = standbys.group_of(pod)
        failed = not standbys.lives(pod) or why.startswith(("failed", "no master"))
        if failed and self._state == RUNNING and uid not in self._ended:
            self._ended.add(uid)
            log.warning("a standby has ended, and another one is made", pod=pod["metadata"]["name"], reason=why)
            self._note_failure(group, lived_s=self._now() - self._ran.get(uid, self._now()))
        # One that has become a node meanwhile stays: its version is another one.
        seen = {"uid": uid, "resourceVersion": str(pod["metadata"].get("resourceVersion") or "")}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": seen}
        try:
            await self._ask("DELETE", f"{self._path('pods')}/{pod['metadata']['name']}", options)
        except NotFound:
            self._free.pop(uid, None)
        except Conflict:
            return  # it has changed, and the watch will tell

    def _note_failure(self, group: str, *, lived_s: float = 0.0) -> float:
        """Seconds until a standby of the group may be made again."""
        times = 0 if lived_s >= CALM_S else self._failures.get(group, 0)
        self._failures[group] = times + 1
        wait_s = FAIL_S[min(times, len(FAIL_S) - 1)]
        self._not_before[group] = self._now() + wait_s
        return wait_s

    async def _fill(self, name: str, group: Group, nodes: Mapping[str, Observation], missing: int) -> float:
        """Make the standbys that are missing, if it is time; seconds until it is. Raises `ApiError`."""
        left_s = self._not_before.get(name, 0.0) - self._now()
        if left_s > 0:
            return left_s
        if self._is_crowded() or not self._settled(name, group.nodes_min, nodes):
            return max(1.0, min(LOOK_S, self._crowded_until - self._now()))
        for _ in range(missing):
            if not self._is_led():
                return LOOK_S
            try:
                await self._make(name, group)
            except Forbidden as error:
                refused = refusals.of_forbidden(error)
                log.warning("no standby is made for now", reason=refused.reason)
                return self._note_failure(name)
            except Invalid as error:
                log.error("no standby is made for now", reason=str(error))
                return self._note_failure(name)
        return LOOK_S

    async def _make(self, name: str, group: Group) -> None:
        number = max([self._numbers.get(name, -1), *map(standbys.number_of, self._free.values())]) + 1
        pod = standbys.manifest(
            self._here,
            self._told,
            group.node,
            group.owner,
            group.template,
            number=number,
            avoid=self._avoid.get(name, ()),
            token=self._token,
        )
        try:
            made = await self._ask("POST", self._path("pods"), pod)
        except Conflict:
            made = await self._ask("GET", f"{self._path('pods')}/{pod['metadata']['name']}")
        self._numbers[name] = number
        if not standbys.is_free(made) or endings.is_deleted(made) or not self._cluster.is_ours(made, group.owner):
            self._news.set()  # the name is an older one's: the next number is tried
        elif uid_of(made) not in self._left:
            self._free[uid_of(made)] = made
            self._note_times(uid_of(made))

    def _settled(self, group: str, nodes_min: int, nodes: Mapping[str, Observation]) -> bool:
        """Do enough nodes of the group run, and does none wait to?"""
        own = {group, f"{self._here.job}-{group}"}
        running = sum(one.phase == "running" and name.rsplit("-", 2)[0] in own for name, one in nodes.items())
        return running >= nodes_min and all(one.phase != "pending" for one in nodes.values())

    def _path(self, resource: str) -> str:
        return f"/api/v1/namespaces/{self._cluster.namespace}/{resource}"
