"""A job's masters in the cluster: their name is claimed, their keepers are made, found and removed. All of it blocks.

The name is claimed in the cluster's key-value store, once for the whole cluster. Whoever finds it claimed by a job of which
nobody keeps masters, or which is over, takes it.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dlrover_backends.ray import mastery, private
from dlrover_backends.ray.endings import ending
from dlrover_backends.ray.masters_keeper import MastersKeeper, environment_of
from dlrover_backends.ray.mastery import SPACE, Plan, Record
from dlrover_backends.ray.records import Actor
from dlrover_core.errors import CoreError

LOOK_S, READY_S, GONE_S = 0.1, 60.0, 20.0
SLIVER = 0.001
"""So much of a host's own resource pins a keeper there."""


class InUse(CoreError):
    """The job's name is another job's, which masters in this cluster keep."""


class NotKept(CoreError):
    """A keeper of masters has ended before it was ready."""


class Found(NamedTuple):
    """A job that the cluster knows: its record, and its masters' keepers that are not over."""

    record: Record
    keepers: tuple[Actor, ...]


def find(job: str) -> Found | None:
    """The job of that name; None: the cluster does not know it."""
    prefix = mastery.key(job)
    parts = {one.removeprefix(prefix): private.get(one) or b"" for one in private.keys(prefix)}
    record = mastery.record_of(job, parts)
    if record is None:
        return None
    return Found(record, tuple(one for one in _keepers(job) if not one.is_dead))


def jobs() -> list[str]:
    """The names of all jobs that the cluster knows masters of."""
    from urllib.parse import unquote

    found = {one.removeprefix(mastery.PREFIX).partition("/")[0] for one in private.keys(mastery.PREFIX)}
    return sorted(unquote(one) for one in found)


def claim(job: str, run: str, token: str, driver: str = "") -> None:
    """Write down that the name is this run's. Raises `InUse`."""
    record = json.dumps({"run": run, "token": token, "driver": driver, "since": int(time.time())}).encode()
    found = find(job)
    if found is not None and found.record.run != run:
        if found.keepers and found.record.over is None:
            raise InUse(
                f"job {job!r} is in this cluster already, as run {found.record.run}: dlrover stop ray:{job} ends it; or give "
                "this one another --job-id"
            )
        private.remove(mastery.key(job))
        found = None
    if found is not None and found.record.over is not None:
        private.remove(mastery.key(job, "end"))
    if not private.put(mastery.key(job), record, overwrite=found is not None):
        raise InUse(
            f"job {job!r} has just been started in this cluster by somebody else; give this one another --job-id"
        )


def keep(plan: Plan) -> None:
    """Make the keepers that are not there yet. The job's name is claimed. Raises whatever Ray does."""
    there = {one.name for one in _keepers(plan.job) if not one.is_dead}
    hosts = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
    own = ray.get_runtime_context().get_node_id()
    # The driver's host comes last: its masters, or those that wait for its death, are there already.
    hosts.sort(key=lambda one: one == own)
    if plan.driver:  # it can be seen to die on its own machine alone
        plan = replace(plan, pinned=f"node:{ray.util.get_node_ip_address()}")
    for number in range(plan.keepers):
        if mastery.called(plan.job, number) not in there:
            _make(plan, number, hosts[number % len(hosts)])


def _make(plan: Plan, number: int, host: str) -> None:
    env = environment_of(plan)
    ray.remote(concurrency_groups={"orders": 2})(_with_orders()).options(
        name=mastery.called(plan.job, number),
        namespace=SPACE,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        resources={plan.pinned: SLIVER} if plan.pinned else None,
        runtime_env=dict(env) or None,
        scheduling_strategy=None if plan.pinned else NodeAffinitySchedulingStrategy(host, soft=True),
    ).remote(plan.to_map(), number)


def _with_orders() -> type:
    ray.method(concurrency_group="orders")(MastersKeeper.ready)
    return MastersKeeper


def await_ready(job: str) -> None:
    """Wait until all keepers of a job run, or it is over already. Raises `NotKept`."""
    deadline = time.monotonic() + READY_S
    while True:
        actors, found = _keepers(job), find(job)
        if found is None:
            raise NotKept("its masters were removed at once, by somebody else")
        if found.record.over is not None:
            return
        dead = [one for one in actors if one.is_dead]
        if dead and not any(not one.is_dead for one in actors):
            raise NotKept(f"its masters cannot be kept: {ending(dead[-1].cause)[2]}")
        if actors and all(one.state == "ALIVE" for one in actors if not one.is_dead):
            return
        if time.monotonic() > deadline:
            waits = ", ".join(f"{one.name} is {one.state}" for one in actors)
            raise NotKept(f"its masters' keepers did not start within {READY_S:g} s: {waits}")
        time.sleep(LOOK_S)


def release(job: str, run: str) -> None:
    """Remove the keepers of a run, and what the store says of it. A keeper's masters die with it; nodes do not."""
    found = find(job)
    if found is None or found.record.run != run:
        return
    deadline = time.monotonic() + GONE_S
    while living := [one for one in _keepers(job) if not one.is_dead]:
        if time.monotonic() > deadline:
            break
        for one in living:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(one.name, namespace=SPACE), no_restart=True)
        time.sleep(LOOK_S)
    private.remove(mastery.key(job))


def await_over(job: str, bound_s: float) -> Record | None:
    """Wait until the masters of a job are over; None: they are not within ``bound_s``, or the job is gone."""
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        found = find(job)
        if found is None:
            return None
        if found.record.over is not None:
            return found.record
        time.sleep(LOOK_S)
    return None


def persistent() -> bool:
    """Does the cluster's state outlive the process that holds it?"""
    return private.storage() not in {"", "memory"}


def head_name() -> str:
    """The name of the host of the cluster's head. Raises `NotKept` where no living host is it."""
    for one in ray.nodes():
        if one["Alive"] and one["Resources"].get(mastery.HEAD):
            return str(one.get("NodeName") or one["NodeManagerAddress"])
    raise NotKept(
        "the host of the cluster's head takes no actors, so that a log on it cannot be kept: say --log etcd://HOST:2379"
    )


def _keepers(job: str) -> list[Actor]:
    """All keepers of a job, dead ones too."""
    return [one for one in private.actors(SPACE) if mastery.job_of(one.name) == job]
