"""A job's masters in the cluster: their name is claimed, their keepers are made, found and removed. All of it blocks.

The name is claimed in the cluster's key-value store, once for the whole cluster. Whoever finds it claimed by a job that is
over, or that nobody leads and that has not just been started, takes it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import unquote

import structlog

from dlrover_backends.ray import mastery, parting, private
from dlrover_backends.ray.endings import ending
from dlrover_backends.ray.masters_keeper import SETTLE_S, MastersKeeper, environment_of
from dlrover_backends.ray.mastery import SPACE, Plan, Record
from dlrover_backends.ray.records import Actor
from dlrover_core.errors import CoreError

log = structlog.get_logger("dlrover.backend")

LOOK_S, READY_S, GONE_S = 0.1, 60.0, 20.0
YOUNG_S, ANSWER_S = 60.0, 1.0
_GONE = ""
"""The id of a keeper that is not there."""
ASK_S = 2.0
"""So long a keeper has to end its masters itself, before it is killed."""
SLIVER = 0.001
"""So much of a host's own resource pins a keeper there.

So much of a resource that each host has, and that nobody else asks for, has Ray ask the maker's own raylet for a place, and not
any: one that has just joined knows no other host. A node's resources are left alone.
"""
_SOMEBODY = "job {!r} has just been started in this cluster by somebody else; give this one another --job-id"


class InUse(CoreError):
    """The job's name is another job's, which masters in this cluster keep."""


class NotKept(CoreError):
    """A keeper of masters has ended before it was ready, or the job's name is not its run's."""


class StillKept(CoreError):
    """Keepers of masters did not end in time."""


class Found(NamedTuple):
    """A job that the cluster knows: its record, and its masters' keepers that are not over."""

    record: Record
    keepers: tuple[Actor, ...]


def find(job: str) -> Found | None:
    """The job of that name; None: the cluster does not know it."""
    record = mastery.record_of(job, _parts(job))
    return None if record is None else Found(record, tuple(alive(job, record.run)))


def jobs() -> list[str]:
    """The names of all jobs that the cluster knows masters of."""
    found = [one.removeprefix(mastery.PREFIX).partition("/") for one in private.keys(mastery.PREFIX)]
    return sorted({unquote(job) for job, _, part in found if part.startswith(mastery.CLAIM)})


def kept() -> set[tuple[str, str]]:
    """Jobs and runs that have keepers, even if nobody claims their names."""
    return {mastery.run_of(one.name) for one in private.actors(SPACE) if not one.is_dead}


def claim(job: str, run: str, token: str, driver: str = "", *, encrypts: bool = False) -> None:
    """Write down that the name is this run's, which may have claimed it before. Raises `InUse`.

    ``driver``: ``host:port`` of masters beside the claimant; ``encrypts``: they show a certificate

    A claim is one key with a number of its own. Whoever has written one looks again: if there is one that it has not judged, it
    takes its own back. So two may fail, and never do two succeed.
    """
    fields = {"run": run, "token": token, "driver": driver, "encrypts": encrypts}
    told = json.dumps({**fields, "since": int(time.time()), "claimant": private.own_driver()}).encode()
    parts = _parts(job)
    before, record = mastery.claims(parts), mastery.record_of(job, parts)
    if record is not None and record.run == run:
        number = record.claim
        private.remove(mastery.key(job, mastery.end(run)))
        private.put(mastery.key(job, mastery.claimed(number)), told)
    else:
        if record is not None and _lives(record):
            raise InUse(
                f"job {job!r} is in this cluster already, as run {record.run}: dlrover stop ray:{job} ends it, and dlrover ray "
                f"rm {job} where its masters are gone; or give this one another --job-id"
            )
        number = max(before, default=0) + 1
        if not private.put(mastery.key(job, mastery.claimed(number)), told, overwrite=False):
            raise InUse(_SOMEBODY.format(job))
    after = mastery.claims(_parts(job))
    if any(before.get(one) != value for one, value in after.items() if one != number):
        private.remove(mastery.key(job, mastery.claimed(number)))
        raise InUse(_SOMEBODY.format(job))
    for one, value in before.items():
        if one != number:
            _forget(job, one, json.loads(value)["run"])


def _lives(record: Record) -> bool:
    """Is the job led, or about to be? Keepers of an attached job come seconds after its claim, while the claimant lives."""
    if record.over is not None:
        return False
    is_young = abs(time.time() - record.since) < YOUNG_S and not private.has_ended(record.claimant)
    if is_young or alive(record.job, record.run):
        return True
    return bool(record.driver) and _answers(record.driver)


def led_outside(job: str, run: str) -> str:
    """Where masters of a run answer that no keeper keeps: those beside the command that was typed. Empty: there are none.

    Their removal is not ours: they end with that command. Where the log is on the driver's host, the keeper there goes on at the
    driver's port once it is dead.
    """
    record = mastery.record_of(job, _parts(job))
    if record is None or record.run != run or record.over is not None or not record.driver:
        return ""
    ports = {one.rpartition(":")[2] for one in record.addresses.values()}
    return record.driver if record.driver.rpartition(":")[2] not in ports and _answers(record.driver) else ""


def _answers(address: str) -> bool:
    """Does somebody listen there? One that cannot be reached from here does not answer. Blocks, `ANSWER_S`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True


def keep(plan: Plan) -> dict[str, str]:
    """Make the keepers that are not there yet, and return the ids of the hosts that these should be on, by their names.

    Raises `NotKept` where the name is not the run's, and whatever Ray does.
    """
    if not _is_of(plan):
        raise NotKept(f"the name of job {plan.job!r} is not claimed by run {plan.run}")
    import ray

    there = {one.name: one.host_id for one in alive(plan.job, plan.run)}
    alive_ids = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
    staying = _staying()  # Ray places nothing on the others
    hosts = [one for one in alive_ids if one in staying] or alive_ids
    own = ray.get_runtime_context().get_node_id()
    # The driver's host comes last: its masters, or those that wait for its death, are there already.
    hosts.sort(key=lambda one: (one in there.values(), one == own))
    if plan.driver:  # it can be seen to die on its own machine alone
        plan = replace(plan, pinned=f"node:{ray.util.get_node_ip_address()}")
    names = _names(plan)
    wanted = dict(zip((one for one in names if one not in there), itertools.cycle(hosts), strict=False))
    for number, name in enumerate(names):
        if name in wanted:
            _make(plan, number, wanted[name])
    return {} if plan.pinned else wanted


def settle(plan: Plan, wanted: Mapping[str, str]) -> None:
    """Wait until keepers are on the hosts that they should be on, `SETTLE_S` at most; one that is elsewhere is made anew.

    A raylet that has just joined does not know all hosts yet, and starts itself what it is asked to place. A keeper that is moved
    has not started masters yet. Raises `NotKept` where one that was ended could not be made again within `GONE_S` more, and
    whatever Ray does.
    """
    deadline, moving = time.monotonic() + SETTLE_S, dict[str, str]()
    while wanted:
        fault: Exception | None = None
        try:
            if _is_settled(plan, wanted, moving, may_move=time.monotonic() < deadline):
                return
        except Exception as error:  # noqa: BLE001  # Ray raises anything, and what was ended has to be made again
            fault = error
        now = time.monotonic()
        if moving and now > deadline + GONE_S:
            raise NotKept(
                f"{', '.join(sorted(moving))}: ended on another host than meant, and is not kept any more: "
                f"{type(fault).__name__ + ': ' + str(fault) if fault else 'Ray has not ended it yet'}"
            ) from fault
        if not moving and now > deadline:
            if fault is not None:
                raise fault
            return
        time.sleep(LOOK_S)


def _is_settled(plan: Plan, wanted: Mapping[str, str], moving: dict[str, str], *, may_move: bool) -> bool:
    """Is there nothing to wait for? Otherwise keepers are ended, and made again, as far as that can be done now.

    ``moving``: the names of keepers that were ended, and are to be made again, with the ids of those that were ended. What Ray
    raises may come after Ray has done what was asked; so each step begins with what the cluster's table says.
    """
    living = {one.name: one for one in alive(plan.job, plan.run)}
    for name in [one for one, ended in moving.items() if one in living and living[one].id != ended]:
        del moving[name]
    gone = moving.keys() - living.keys()
    if gone and not _is_of(plan):
        return True
    for name in gone:
        _make(plan, int(name.rpartition("#")[2]), wanted[name])
        del moving[name]
    hosts = _staying()
    placed = [(living[one], host) for one, host in wanted.items() if one in living and host in hosts]
    elsewhere = [one for one, host in placed if one.host_id != host]
    for one in elsewhere:
        if one.host_id and may_move and one.name not in moving:
            moving[one.name] = one.id
            if one.state == "ALIVE":
                _ask(one.name)
    for name in moving.keys() & living.keys():
        _kill(name)
    return not (gone or elsewhere or moving)


def part(plan: Plan, number: int, over: Callable[[float], bool]) -> None:
    """As keeper ``number``, part keepers that have come to share a host, and make those again that are gone. Blocks.

    ``over``: wait so many seconds; is it over?
    """
    own, before = mastery.called(plan.job, plan.run, number), dict[str, str]()
    well, left_out = frozenset[str](), 0
    while not over(parting.LOOK_S):
        try:
            hosts = _staying()
            left_out += 1
            if hosts == well and left_out < parting.SELDOM:
                continue
            well, left_out = frozenset(), 0
            before, is_well = _part(plan, own, before, hosts)
            well = hosts if is_well else well
        except Exception as error:  # noqa: BLE001  # Ray raises anything
            log.warning("masters' keepers may share a host, or be gone", error=f"{type(error).__name__}: {error}")


def _staying() -> frozenset[str]:
    """The ids of the hosts that live and will stay. Raises whatever Ray does."""
    import ray

    drained = private.draining()
    return frozenset(one["NodeID"] for one in ray.nodes() if one["Alive"] and one["NodeID"] not in drained)


def _part(plan: Plan, own: str, before: Mapping[str, str], hosts: frozenset[str]) -> tuple[dict[str, str], bool]:
    """Move the keepers that are to be moved as they were before, and make those that were gone before.

    Returns the ids of those that are to be moved now, empty for those that are gone; and whether all are where they should be.
    Raises whatever Ray does.
    """
    there, names = alive(plan.job, plan.run), _names(plan)
    gone = parting.gone(own, names, there, hosts)
    found = {} if len(there) < len(names) else parting.moves(own, there, hosts)
    wanted = {name: host for name, (key, host) in found.items() if before.get(name) == key}
    if wanted:
        settle(plan, wanted)
        log.warning("masters' keepers shared a host, and are parted", moved=sorted(wanted))
    again = [name for name in gone if before.get(name) == _GONE]
    if again and _is_wanted(plan):
        for name in again:
            _make(plan, names.index(name), gone[name])
        log.warning("masters' keepers were gone, and are made again", made=again)
    seen = {name: key for name, (key, _) in found.items()} | dict.fromkeys(gone, _GONE)
    return seen, not seen and parting.is_well(names, there, hosts)


def _names(plan: Plan) -> list[str]:
    """What the keepers of a plan are called, by their numbers."""
    return [mastery.called(plan.job, plan.run, number) for number in range(plan.keepers)]


def _is_wanted(plan: Plan) -> bool:
    """Is the job's name that of this run, which is not over? Its keepers end one after the other when it is."""
    record = mastery.record_of(plan.job, _parts(plan.job))
    return record is not None and record.run == plan.run and record.over is None


def _is_of(plan: Plan) -> bool:
    """Is the job's name still that of this run?"""
    record = mastery.record_of(plan.job, _parts(plan.job))
    return record is not None and record.run == plan.run


def _make(plan: Plan, number: int, host: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    env = environment_of(plan)
    ray.remote(concurrency_groups={"orders": 2})(_with_orders()).options(
        name=mastery.called(plan.job, plan.run, number),
        namespace=SPACE,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        resources={plan.pinned or private.implicit(SPACE): SLIVER},
        runtime_env=dict(env) or None,
        scheduling_strategy=None if plan.pinned else NodeAffinitySchedulingStrategy(host, soft=True),
    ).remote(plan.to_map(), number, "" if plan.pinned else host, part if plan.keepers > 1 else None)


def _with_orders() -> type:
    import ray

    for order in (MastersKeeper.ready, MastersKeeper.leave):
        ray.method(concurrency_group="orders")(order)
    return MastersKeeper


def await_ready(plan: Plan) -> None:
    """Wait until all keepers of a plan work, or its run is over already. Raises `NotKept`."""
    deadline = time.monotonic() + READY_S
    names = _names(plan)
    while True:
        actors, found = _keepers(plan.job, plan.run), find(plan.job)
        if found is None or found.record.run != plan.run:
            raise NotKept("its masters were removed at once, by somebody else")
        if found.record.over is not None:
            return
        living = {one.name: one.state for one in actors if not one.is_dead}
        dead = [one for one in actors if one.is_dead and one.name not in living]
        if dead:
            raise NotKept(f"its masters cannot be kept: {ending(dead[-1].cause)[2]}")
        if all(living.get(one) == "ALIVE" for one in names):
            return
        if time.monotonic() > deadline:
            waits = ", ".join(f"{one} is {living.get(one, 'not there')}" for one in names)
            raise NotKept(f"its masters' keepers did not start within {READY_S:g} s: {waits}")
        time.sleep(LOOK_S)


def release(job: str, run: str) -> None:
    """Remove the keepers of a run, and what the store says of it. A keeper's masters die with it; nodes do not.

    Raises `StillKept` where keepers are left. Then the store still says that the name is theirs.
    """
    deadline, asked = time.monotonic() + GONE_S, set[str]()
    while living := alive(job, run):
        if time.monotonic() > deadline:
            raise StillKept(
                f"masters of job {job}, run {run}, are still kept after {GONE_S:g} s, by "
                f"{', '.join(one.name for one in living)}; they end when the cluster reaches their hosts, or finds these dead: "
                "do this again then"
            )
        for one in living:
            if one.state == "ALIVE" and one.name not in asked:
                asked.add(one.name)
                _ask(one.name)
            _kill(one.name)
        time.sleep(LOOK_S)
    mine = [one for one, value in mastery.claims(_parts(job)).items() if json.loads(value)["run"] == run]
    for number in mine or [0]:
        _forget(job, number, run)


def _ask(keeper: str) -> None:
    """Have its masters, and its task, ended before it is killed; one that does not answer in time is killed all the same."""
    import ray

    with contextlib.suppress(Exception):  # Ray raises anything
        ray.get(ray.get_actor(keeper, namespace=SPACE).leave.remote(), timeout=ASK_S)


def _kill(keeper: str) -> None:
    import ray

    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(keeper, namespace=SPACE), no_restart=True)


def _forget(job: str, number: int, run: str) -> None:
    """Remove a claim, and what its run has written, which the claim says to belong to somebody.

    Twice: a keeper's process outlives its actor for a moment, and may write until it finds that the claim is gone.
    """
    written = (mastery.of_run("at", run), mastery.end(run))
    for part in (*written, mastery.claimed(number), *written):
        private.remove(mastery.key(job, part))


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
    import ray

    for one in ray.nodes():
        if one["Alive"] and one["Resources"].get(mastery.HEAD):
            return str(one.get("NodeName") or one["NodeManagerAddress"])
    raise NotKept(
        "the host of the cluster's head takes no actors, so that a log on it cannot be kept: say --log etcd://HOST:2379"
    )


def _parts(job: str) -> dict[str, bytes]:
    """All that the store has of a job, by the ends of the keys."""
    prefix = mastery.key(job)
    return {one.removeprefix(prefix): private.get(one) or b"" for one in private.keys(prefix)}


def _keepers(job: str, run: str) -> list[Actor]:
    """All keepers of a run, dead ones too."""
    return [one for one in private.actors(SPACE) if mastery.run_of(one.name) == (job, run)]


def alive(job: str, run: str) -> list[Actor]:
    """The keepers of a run's masters that are not over. Raises whatever Ray does."""
    return [one for one in _keepers(job, run) if not one.is_dead]
