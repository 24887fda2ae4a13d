"""The cluster of one run: Ray's calls, as few and as plain as the desk needs them. All of them block.

Only the desk's process and ``dlrover ray`` import this. What is no public API of Ray is in `private`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
import structlog
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dlrover_backends.ray import names, private, settings, tables
from dlrover_backends.ray.deletions import Deletions
from dlrover_backends.ray.fencing import Fence
from dlrover_backends.ray.keeper import ORDERS, Keeper
from dlrover_backends.ray.names import Run
from dlrover_backends.ray.records import ORPHAN_S, Actor, Group, Host, Place, Snapshot
from dlrover_backends.ray.seating import RETIRED, Seating
from dlrover_core.errors import CoreError, LaunchRefused

CLEAR_S, CLEAR_LOOK_S = 20.0, 0.1
AGAIN_PART = 0.2
"""So much more of the time to remove a run has the second look."""
CLEAR_GRACE_S = 2.0
"""An agent that is asked removes its own folder; one that is killed leaves it to the next agent on its host."""

log = structlog.get_logger("dlrover.desk")


class Order(NamedTuple):
    """What a node is launched with.

    name:        the node's name
    wants:       the resources of its bundle
    gpus_if_any: GPUs that it wants as well if the cluster has any
    labels:      label selectors by key
    avoid:       names of hosts that it must not run on
    runtime_env: Ray's runtime environment
    plan:        how its keeper starts the agent: a `keeper.Plan` as a dictionary
    again:       is the node the next one of its place? Then a standby may be it
    group:       of a standby, its group; empty: it is a node
    shape:       of a standby, what nodes it fits
    """

    name: str
    wants: Mapping[str, float]
    gpus_if_any: int = 0
    labels: Mapping[str, str] = {}  # never written to
    avoid: tuple[str, ...] = ()
    runtime_env: Mapping[str, Any] = {}  # as above
    plan: Mapping[str, Any] = {}  # as above
    again: bool = False
    group: str = ""
    shape: str = ""


class Made(NamedTuple):
    """What an order has come to.

    new:  was it made by this order?
    seat: the standby that the node is; empty: it has an actor of its own
    """

    new: bool
    seat: str = ""


class StillAlive(CoreError):
    """Actors of a run that did not end in time. ``actors``: their names."""

    def __init__(self, run: Run, actors: list[str], bound_s: float) -> None:
        self.actors = sorted(actors)
        super().__init__(
            f"actors of job {run.job}, run {run.run}, have not ended within {bound_s:g} s: {', '.join(self.actors)}; they end "
            "when the cluster reaches their hosts, or finds these dead: do this again then"
        )


class Cluster:
    """A run's actors, placement groups and keys. Connect first; a process connects once.

    ``address``: of the cluster's state service, once it is connected
    ``ended``: ids of hosts whose raylet has ended, though Ray does not know it yet; no node is placed there
    ``tables``: the cluster's tables, cached
    ``seating``: which nodes standbys are; ``deletions``: the names that are used up; ``fence``: whose orders count
    """

    def __init__(self, run: Run) -> None:
        self.run, self.address = run, ""
        self.ended: set[str] = set()
        self.seating, self.deletions, self.fence = Seating(run), Deletions(run), Fence(run)
        source = tables.Source(lambda: private.actors(self.run.space), _hosts, lambda: groups(self.run.space + "/"))
        self.tables = tables.Cache(run, source)

    def connect(self, address: str) -> None:
        """Join the cluster as a driver. Raises whatever Ray does: `faults.of_connect` knows what it means."""
        lacks = private.missing()
        if lacks:
            raise RuntimeError(f"Ray {ray.__version__} has no {lacks}")
        os.environ.setdefault(
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
        )  # said anew by the release; silences its warning
        private.authenticate(settings.address_of(address))
        with private.patient():
            ray.init(
                address=address or "auto",
                namespace=self.run.space,
                log_to_driver=True,
                logging_level=logging.ERROR,
            )
        self.address = ray.get_runtime_context().gcs_address

    # ---- what is there

    def look(self, *, anew: bool = True) -> Snapshot:
        """All of the run as it is now. ``anew``: nothing that was published counts, and all tables are read."""
        drains, known = private.draining(), self.tables.read(anew=anew)
        hosts = {one.id: one._replace(drain_ms=drains[one.id]) if one.id in drains else one for one in known.hosts}
        actors, standbys, retired = dict[str, Actor](), dict[str, Actor](), set[str]()
        for actor in known.actors:
            node = self.seating.taker(actor.name) if names.is_standby(actor.name) else actor.name
            if not node:
                standbys[actor.name] = actor
                retired.update({actor.name} if node == RETIRED else ())
            elif node not in actors or not actor.is_dead:
                actors[node] = actor if node == actor.name else actor._replace(name=node, seat=actor.name)
        return Snapshot(actors, hosts, {one.name: one for one in known.groups}, standbys, frozenset(retired))

    def free(self) -> Mapping[str, Mapping[str, float]]:
        """The resources that each host has left, by its id."""
        return private.free()

    def place(self, name: str) -> Place:
        """What a node, or a standby, was launched with."""
        raw = private.get(self.run.key(names.PLACE, name))
        told = json.loads(raw) if raw else {}
        avoid = tuple(told.get("avoid") or ())
        return Place(
            told.get("wants") or {}, avoid, told.get("group", ""), told.get("shape", ""), bool(told.get("slow"))
        )

    # ---- orders

    def admit(self, token: int) -> None:
        """An order comes that makes something. Raises `StaleToken`, and `LaunchRefused` for a run that was removed."""
        self.fence.check(token)
        if self.fence.is_removed:
            raise self._removed()

    def create(
        self,
        order: Order,
        fitting: Sequence[str] = (),
        without: Collection[str] = (),
        token: int | None = None,
    ) -> Made:
        """Make a node's placement group and its keeper, unless a standby becomes it.

        ``fitting``: standbys that may, the best first; ``without``: ids of hosts that it must not run on; ``token``: of who
        orders it. Raises `ValueError` for what Ray refuses, `LaunchRefused`, and `StaleToken`.
        """
        key = self.run.key(names.PLACE, order.name)
        raw = private.get(key)
        if raw is not None and json.loads(raw).get("made"):  # dead or alive: a name is used once
            return Made(new=False, seat=self.seating.seat_of(order.name) if order.again else "")
        hosts = [one for one in self.tables.hosts() if one.alive]
        wants = dict(order.wants)
        if order.gpus_if_any and any(one.has.get("GPU") for one in hosts):
            wants["GPU"] = float(order.gpus_if_any)
        kept: dict[str, Any] = {"wants": wants, "avoid": list(order.avoid)}
        if set(order.runtime_env) - {"env_vars"}:
            kept["slow"] = True
        if order.group:
            kept |= {"group": order.group, "shape": order.shape}
        first = raw is None and private.put(key, json.dumps(kept).encode(), overwrite=False)
        seat = self.seating.decide(order.name, fitting) if order.again else ""
        new = bool(seat) or self._make(order, wants, self._labels(order, hosts, without), token, first=first)
        self._must_stand(order.name)  # whoever removed the keys meanwhile looks for actors once more
        private.put(key, json.dumps({**kept, "made": True}).encode())
        self._must_stand(order.name)  # nor does this key stay, if they were removed before it was written
        return Made(new, seat)

    def _make(
        self,
        order: Order,
        wants: Mapping[str, float],
        labels: Mapping[str, str],
        token: int | None,
        *,
        first: bool,
    ) -> bool:
        """The group and the actor, unless a desk that died here before has made them; False: another desk was faster.

        ``first``: this order was the first to write the name down, and nobody can have made anything of that name before. Ray has
        one group of a name: whoever makes it makes the actor.
        """
        env = self.sent(order.runtime_env)  # it may take long, and comes before whatever others could see
        self._must_stand(order.name)
        if not first and self._was_made(order.name):
            return True
        if token is not None:
            self.admit(token)
        self._must_stand(order.name)
        group = placement_group(
            [dict(wants)],
            strategy="STRICT_PACK",
            name=self.run.group(order.name),
            lifetime="detached",
            bundle_label_selector=[dict(labels)] if labels else None,
        )
        try:
            self._keeper(order, wants, group, env)
        except BaseException as error:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
            if isinstance(error, ValueError) and self._has_actor(order.name):
                return False
            raise
        return True

    def _must_stand(self, name: str) -> None:
        """Raise `LaunchRefused` where the run was removed, or its keys since an order wrote this name down.

        What the order made goes, too, and all keys: whoever removed the run may have looked for the last time.
        """
        if private.get(self.run.key(names.PLACE, name)) is not None and not self.fence.is_barred():
            return
        self.kill(name)
        for group in self._groups(name):
            self.remove_group(group)
        private.remove(self.run.space + "/")
        self.fence.is_removed = True
        raise self._removed()

    def sweep(self) -> None:
        """Take away what an order has written down of a run that was removed meanwhile."""
        if self.fence.is_barred():
            private.remove(self.run.space + "/")

    def _removed(self) -> LaunchRefused:
        what = f"run {self.run.run} of job {self.run.job} was removed from the cluster, as dlrover ray rm does it"
        return LaunchRefused(what, permanent=True)

    def _was_made(self, name: str) -> bool:
        """Has another order made the actor? A group that stays without one is removed."""
        left = self._groups(name)
        if left and not self._has_actor(name):
            time.sleep(ORPHAN_S)
        if self._has_actor(name):
            return True
        for one in left:
            self.remove_group(one)
        return False

    def _labels(self, order: Order, hosts: Iterable[Host], without: Collection[str]) -> Mapping[str, str]:
        """The label selectors of a node, which keep it off the hosts that it must not run on."""
        avoided = [one.id for one in hosts if one.name in order.avoid or one.id in self.ended or one.id in without]
        return {**order.labels, settings.NODE_ID: f"!in({','.join(avoided)})"} if avoided else order.labels

    def _has_actor(self, name: str) -> bool:
        """Is there an actor of that name, a living or a dead one? The living one is asked for first: that reads no table.

        The table is read anew: where the actor's end was published and missed, its name would be used twice.
        """
        return self.handle(name) is not None or any(one.name == name for one in self.tables.read(anew=True).actors)

    def _groups(self, name: str) -> list[Group]:
        wanted = self.run.group(name)
        return [one for one in groups(wanted) if one.name == wanted]

    def sent(self, env: Mapping[str, Any]) -> dict[str, Any]:
        """The runtime environment with the folders that it names sent to the cluster, once for the run.

        Nodes that are launched hours later, by another desk, get the same files.
        """
        env = names.plain(env)
        if not names.folders(env):
            return env
        known = self._sent_before(env)
        if not known or not all(private.is_there(one) for one in names.packages(known)):
            before, known = known, private.uploaded(env)
            if before not in ({}, known):
                log.warning(
                    "a folder is sent anew, as it is now", before=names.packages(before), now=names.packages(known)
                )
            private.put(self.run.key(names.ENV, names.digest(env)), json.dumps(known).encode())
        return known

    def _sent_before(self, env: Mapping[str, Any]) -> dict[str, Any]:
        """The same as it was sent last, whether or not the cluster still has it; empty: it never was."""
        raw = private.get(self.run.key(names.ENV, names.digest(env)))
        return dict(json.loads(raw)) if raw else {}

    def shape(self, shape: str, env: Mapping[str, Any]) -> str:
        """The shape of a node with this runtime environment, whoever orders it.

        Masters beside the command that was typed name folders of their host, those in the cluster what was made of them there.
        """
        env = names.plain(env)
        sent = self._sent_before(env) if names.folders(env) else {}
        return f"{shape}-{names.digest(sent or self.sent(env))}"

    def _keeper(self, order: Order, wants: Mapping[str, float], group: Any, env: Mapping[str, Any]) -> None:
        custom = {name: amount for name, amount in wants.items() if name not in {"CPU", "GPU", "memory"}}
        actor = ray.remote(concurrency_groups={ORDERS: 4})(with_orders(Keeper))
        actor.options(
            name=order.name,
            namespace=self.run.space,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            num_cpus=wants.get("CPU", 0),
            num_gpus=wants.get("GPU", 0),
            memory=wants.get("memory") or None,
            resources=custom or None,
            runtime_env=dict(env) or None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        ).remote(dict(order.plan))

    def handle(self, name: str) -> Any:
        """The living or pending actor of that name; None: there is none."""
        try:
            return ray.get_actor(name, namespace=self.run.space)
        except ValueError:
            return None

    def kill(self, name: str) -> None:
        """End an actor at once. Its processes end a moment later."""
        found = self.handle(name)
        if found is not None:
            ray.kill(found, no_restart=True)

    def remove_group(self, group: Group) -> None:
        """Give back the place of a node. An actor in it ends."""
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.id))))

    def end(self, actor: Actor, grace_s: float) -> None:
        """Have an actor end. Its keeper buries its agent before; one that is not there yet has none.

        Of one that was not seen to run the cluster is asked: that it runs may be published late.
        """
        handle = self.handle(actor.called)
        if handle is not None and (actor.state == "ALIVE" or private.state_of(actor.id) == "ALIVE"):
            handle.stop.remote(grace_s)
        elif handle is not None:
            ray.kill(handle, no_restart=True)

    def others(self) -> list[tuple[str, int]]:
        """Other runs of a job of this name that have nodes in the cluster now, and how many."""
        found = [
            (run.run, sum(not one.is_dead for one in actors))
            for space, actors in runs().items()
            if (run := names.run_of(space)) is not None and run.job == self.run.job and run != self.run
        ]
        return [(run, count) for run, count in found if count]

    def clear(self, bound_s: float) -> None:
        """Remove all of the run: actors, placement groups, keys. Keepers have half of ``bound_s`` to end by themselves.

        A second look has `AGAIN_PART` of it more.
        Raises `StillAlive` where actors are left. Orders are refused then as before: the keys stay, or the run is barred.
        """
        barred = self.fence.is_barred()
        # An order that was not refused is done by the second look. Without a mark a missing key refuses it: so keys go before.
        for last, part in ((False, 1.0), (True, AGAIN_PART)):
            seen, living = self._emptied(part * bound_s)
            for group in seen.groups.values():
                self.remove_group(group)
            if living:
                if last and not barred:
                    self.fence.bar()
                raise StillAlive(self.run, [actor.called for actor in living], bound_s)
            if last or not barred:
                private.remove(self.run.space + "/")

    def _emptied(self, bound_s: float) -> tuple[Snapshot, list[Actor]]:
        """End all actors; what was seen at last, and those that live on after ``bound_s``."""
        told, began = set[str](), time.monotonic()
        while True:
            seen, spent_s = self.look(), time.monotonic() - began
            living = [one for one in (*seen.actors.values(), *seen.standbys.values()) if not one.is_dead]
            if not living or spent_s > bound_s:
                return seen, living
            for actor in living:
                if spent_s > bound_s / 2:
                    self.kill(actor.called)
                elif actor.id not in told:
                    self.end(actor, CLEAR_GRACE_S)
                told.add(actor.id)
            time.sleep(CLEAR_LOOK_S)


def _hosts() -> list[Host]:
    """The cluster's hosts; whether one is drained is not said here."""
    return [
        Host(
            one["NodeID"],
            one.get("NodeName") or one["NodeManagerAddress"],
            one["NodeManagerAddress"],
            bool(one["Alive"]),
            one.get("Resources") or {},
            one.get("Labels") or {},
            port=int(one.get("NodeManagerPort") or 0),
        )
        for one in ray.nodes()
    ]


def groups(prefix: str) -> list[Group]:
    """The placement groups that are not removed and whose names begin so."""
    return [
        Group(
            one["placement_group_id"],
            one["name"],
            one["state"],
            str((one.get("stats") or {}).get("scheduling_state", "")),
            (one.get("bundles") or {}).get(0) or {},
        )
        for one in placement_group_table().values()
        if one["name"].startswith(prefix) and one["state"] != "REMOVED"
    ]


def runs() -> dict[str, list[Actor]]:
    """Actors, dead ones too, of each run that has anything in the cluster now, by its namespace."""
    found: dict[str, list[Actor]] = {}
    for actor in private.actors(names.PREFIX):
        found.setdefault(actor.namespace, []).append(actor)
    with_groups = {group.name.partition("/")[0] for group in groups(names.PREFIX)}
    with_keys = {key.partition("/")[0] for key in private.keys(names.PREFIX)}
    living = {space for space, actors in found.items() if not all(one.is_dead for one in actors)}
    return {space: found.get(space, []) for space in with_groups | with_keys | living}


def with_orders(keeper: type) -> type:
    """The keeper's class, with the methods that are called while it waits in a concurrency group of their own."""
    for name in ("ready", "stop"):
        ray.method(concurrency_group=ORDERS)(getattr(keeper, name))
    return keeper
