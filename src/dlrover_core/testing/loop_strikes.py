"""The faults of level "loop", each done to real masters and agents on a virtual-time loop. `stage` says when, this says how.

Each kind of fault is the method of its name. It returns False where there is nobody to be struck at this moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any

from dlrover_core.errors import NotLeading, PlanError, Refused
from dlrover_core.logs.memory import Deposed, LostAck, SlowAck, Stuck
from dlrover_core.runtime import messages
from dlrover_core.runtime.master import Master
from dlrover_core.sim.faults import Fault, amount
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.training import MemoryLauncher

FOR_S = 60.0
"""How long a slow worker is slow, and a bad link late."""
REPAIR_S = 3600.0
"""How long a host without power is away, once that is seen."""
TTL_S = 5.0
HELD = "the queue is held"
ASK_AGAIN_S = 1.0


class LoopStrikes:
    """What can be done to a `Cluster`. ``succeed_in`` says how soon the next master to end is to be replaced."""

    def __init__(self, cluster: Cluster, failover_s: float, succeed_in: Callable[[float], None]) -> None:
        self._cluster, self._failover_s, self._succeed_in = cluster, failover_s, succeed_in
        self._held: Counter[str] = Counter()
        self._errands: set[asyncio.Task[None]] = set()
        self._crash_in: list[float] = []

    def strike(self, fault: Fault) -> bool:
        """Do it. False: there is nobody to do it to now. Raises `PlanError` where the target cannot be."""
        done = getattr(self, f"_{fault.kind}")(fault)
        return done is not False

    async def close(self) -> None:
        """Nothing that is still to come comes."""
        errands = list(self._errands)
        for errand in errands:
            errand.cancel()
        await asyncio.gather(*errands, return_exceptions=True)

    # ---- whom, and when

    def _later(self, after_s: float, call: Callable[..., object], *args: Any) -> None:
        Context().run(asyncio.get_running_loop().call_later, after_s, call, *args)

    def _errand(self, work: Coroutine[Any, Any, None]) -> None:
        task = virtual_loop.spawn("people", work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _hold(self, what: str, for_s: float, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Begin it and end it after a while; where it is held twice, when the last one lets go."""
        self._held[what] += 1
        if self._held[what] == 1:
            begin()

        def release() -> None:
            self._held[what] -= 1
            if not self._held[what]:
                end()

        self._later(for_s, release)

    def _nodes(self) -> list[str]:
        return sorted(self._cluster.platform.booted, key=_by_number)

    def _node(self, target: str | int) -> str:
        """The node's newest incarnation that lives; empty: there is none."""
        nodes = self._nodes()
        if isinstance(target, int):
            return nodes[target % len(nodes)] if nodes else ""
        return next((one for one in reversed(nodes) if one == target or one.rpartition("-")[0] == target), "")

    def _workers(self) -> list[tuple[int, MemoryLauncher]]:
        """Of one coupling set after another, as their first nodes booted; in each by rank."""
        launchers, sets = self._cluster.launchers.values(), list(self._cluster.trainings.values())
        living = [(rank, one) for one in launchers for rank in one.ranks]
        return sorted(living, key=lambda found: (sets.index(found[1].training), found[0]))

    def _worker(self, target: str | int) -> tuple[int, MemoryLauncher] | None:
        """By number among all that live; by a node's name its first one."""
        workers = self._workers()
        if isinstance(target, int):
            return workers[target % len(workers)] if workers else None
        node = self._node(target)
        return next((one for one in workers if one[1].node == node), None)

    def _host(self, target: str | int) -> str:
        """By number among those on which something runs; by a node's name the one that it runs on."""
        platform = self._cluster.platform
        if isinstance(target, int):
            taken = sorted(platform.occupied(), key=_by_number)
            return taken[target % len(taken)] if taken else ""
        if not target.startswith("host-"):
            node = self._node(target)
            return platform.host_of(node) if node else ""
        if not platform.has(target):
            raise PlanError(f"there is no host {target!r}: there are {', '.join(platform.hosts)}")
        return target

    def _leader(self) -> Master | None:
        return next((master for master in self._cluster.masters if master.leading), None)

    # ---- processes and machines

    def _kill_worker(self, fault: Fault, code: int = -9, error: str = "") -> bool:
        found = self._worker(fault.target)
        if found is not None:
            rank, launcher = found
            launcher.kill(rank, code, error)
        return found is not None

    def _fail_worker(self, fault: Fault) -> bool:
        return self._kill_worker(fault, 1, fault.cause or "RuntimeError: so it was written in the plan")

    def _kill_node(self, fault: Fault) -> bool:
        node = self._node(fault.target)
        if node:
            self._cluster.platform.kill(self._cluster.platform.of(node))
        return bool(node)

    def _kill_host(self, fault: Fault, told_after_s: float | None = None, back_after_s: float = 0.0) -> bool:
        host = self._host(fault.target)
        if host:
            self._cluster.platform.take_down(host, "host down", told_after_s)
            self._later(back_after_s or amount(fault), self._cluster.platform.bring_up, host)
        return bool(host)

    def _lose_host(self, fault: Fault) -> bool:
        return self._kill_host(fault, amount(fault), amount(fault) + REPAIR_S)

    def _silence_node(self, fault: Fault) -> bool:
        node = self._node(fault.target)
        if node:
            cluster = self._cluster
            self._hold(f"silence {node}", amount(fault), lambda: cluster.freeze(node), lambda: cluster.thaw(node))
        return bool(node)

    def _hang_worker(self, fault: Fault) -> bool:
        found = self._worker(fault.target)
        if found is None:
            return False
        rank, launcher = found
        training, generation = launcher.training, launcher.generation
        training.hang(generation, rank)
        if fault.amount:
            self._later(fault.amount, training.go_on, generation, rank)
        return True

    def _slow_worker(self, fault: Fault) -> bool:
        found = self._worker(fault.target)
        if found is None:
            return False
        rank, launcher = found
        factors = launcher.training.slow.setdefault(launcher.place(rank), [1.0])
        factors.append(amount(fault))
        self._later(FOR_S, factors.remove, amount(fault))
        return True

    def _unreach_node(self, fault: Fault) -> bool:
        return self._to_machine(fault, lambda name: self._unreach(name, amount(fault)))

    def _unreach(self, name: str, for_s: float) -> None:
        platform = self._cluster.platform
        self._hold(
            f"unreach {name}",
            for_s,
            lambda: platform.reach(name, lost=True),
            lambda: platform.reach(name, lost=False),
        )

    def _dark_host(self, fault: Fault) -> bool:
        host, platform = self._host(fault.target), self._cluster.platform
        if host:
            name = platform.machine_on(host)
            self._later(platform.notice_s, lambda: platform.reach(name, lost=True))
            platform.take_down(host, "its host had no power", amount(fault))
            self._later(amount(fault) + REPAIR_S, platform.bring_up, host)
        return bool(host)

    def _flap_node(self, fault: Fault) -> bool:
        return self._to_machine(fault, lambda name: self._cluster.platform.flap(name, amount(fault)))

    def _to_machine(self, fault: Fault, act: Callable[[str], None]) -> bool:
        node = self._node(fault.target)
        if node:
            act(self._cluster.platform.of(node))
        return bool(node)

    # ---- networks

    def _partition(self, fault: Fault) -> bool:
        node, network = self._node(fault.target), self._cluster.network
        if node:
            self._hold(f"cut {node}", amount(fault), lambda: network.cut(node), lambda: network.heal(node))
        return bool(node)

    def _drop(self, fault: Fault) -> bool:
        return self._vanish(fault, mute=1, deaf=1)

    def _drop_to_master(self, fault: Fault) -> bool:
        return self._vanish(fault, mute=1)

    def _drop_to_node(self, fault: Fault) -> bool:
        return self._vanish(fault, deaf=1)

    def _vanish(self, fault: Fault, mute: int = 0, deaf: int = 0) -> bool:
        return self._to_link(fault, amount(fault), mute=mute, deaf=deaf)

    def _delay(self, fault: Fault) -> bool:
        return self._to_link(fault, FOR_S, late_s=amount(fault))

    def _lose_messages(self, fault: Fault) -> bool:
        return self._to_link(fault, 0.0, lose=round(amount(fault)))

    def _double_messages(self, fault: Fault) -> bool:
        return self._to_link(fault, 0.0, double=round(amount(fault)))

    def _reorder_messages(self, fault: Fault) -> bool:
        return self._to_link(fault, 0.0, reorder=round(amount(fault)))

    def _to_link(self, fault: Fault, for_s: float, **more: float) -> bool:
        """Add to what a link does; for a while, if one is said."""
        node = self._node(fault.target)
        if not node:
            return False
        link = self._cluster.network.link(node)

        def change(sign: int) -> None:
            for name, value in more.items():
                setattr(link, name, getattr(link, name) + sign * value)

        change(1)
        if for_s:
            self._later(for_s, change, -1)
        return True

    # ---- the log

    def _ack_lost(self, _: Fault) -> None:
        self._cluster.log.faults.at_next(LostAck())

    def _log_slow(self, fault: Fault) -> None:
        self._cluster.log.faults.at_next(SlowAck(amount(fault)))

    def _log_down(self, fault: Fault) -> None:
        self._switch("unavailable", amount(fault))

    def _log_full(self, fault: Fault) -> None:
        self._switch("full", amount(fault))

    def _switch(self, name: str, for_s: float) -> None:
        faults = self._cluster.log.faults
        self._hold(f"log {name}", for_s, lambda: setattr(faults, name, True), lambda: setattr(faults, name, False))

    def _log_fenced(self, _: Fault) -> None:
        self._cluster.log.faults.at_next(Deposed())

    # ---- clocks

    def _clock_jump(self, fault: Fault) -> bool:
        leader = self._leader()
        if leader is not None:
            jumped = self._cluster.jumped_us
            jumped[leader._holder] = jumped.get(leader._holder, 0) + round(amount(fault) * 1e6)
        return leader is not None

    def _clock_skew(self, fault: Fault) -> None:
        self._cluster.skew_us += round(amount(fault) * 1e6)

    def _node_clock(self, fault: Fault) -> bool:
        node = self._node(fault.target)
        if node:
            self._cluster._loop.skew(node, amount(fault))
        return bool(node)

    # ---- masters

    def _crash_master(self, fault: Fault) -> bool:
        leads = self._leader() is not None
        if leads:
            self._succeed_in(fault.amount or self._failover_s)
            self._cluster.kill_leader()
        return leads

    def _crash_before_append(self, fault: Fault) -> None:
        self._crash_in.append(fault.amount or self._failover_s)
        self._cluster.log.faults.at_next(Stuck(lands=False))

    def _crash_after_append(self, fault: Fault) -> None:
        self._crash_in.append(fault.amount or self._failover_s)
        self._cluster.log.faults.at_next(Stuck(lands=True))

    def stuck(self) -> None:
        """An append hangs, as one of the two above wants it: now its master is killed."""
        self._succeed_in(self._crash_in.pop(0))
        if self._leader() is not None:
            self._cluster.kill_leader()

    def _pause_master(self, fault: Fault) -> bool:
        leader, cluster = self._leader(), self._cluster
        if leader is None:
            return False
        holder = leader._holder
        self._hold(f"pause {holder}", amount(fault), lambda: cluster.freeze(holder), lambda: cluster.thaw(holder))
        if amount(fault) > TTL_S:
            self._later(TTL_S, self._expire, leader)
        return True

    def _expire(self, paused: Master) -> None:
        """Its lease has run out. Where somebody stands by, they lead."""
        others = [one for one in self._cluster.masters if one is not paused and self._cluster.alive(one)]
        if self._held[f"pause {paused._holder}"] and paused.leading and others:
            self._cluster.log.expire(self._cluster.spec.job)

    def _second_master(self, _: Fault) -> None:
        self._cluster.start_master()

    def _hand_over(self, _: Fault) -> bool:
        leader = self._leader()
        if leader is not None:
            leader.hand_over("somebody asked")
        return leader is not None

    def _old_agent(self, _: Fault) -> None:
        self._cluster.agent_version = messages.OLDEST_VERSION

    # ---- schedulers that lie

    def _create_error(self, fault: Fault) -> None:
        self._cluster.platform.errors += round(amount(fault))

    def _create_stuck(self, fault: Fault) -> None:
        self._cluster.platform.stuck += round(amount(fault))

    def _stale_list(self, fault: Fault) -> None:
        self._cluster.platform.stale_s = amount(fault)
        self._cluster.platform.break_streams()

    def _relist(self, _: Fault) -> None:
        self._cluster.platform.break_streams()

    def _quota(self, fault: Fault) -> None:
        platform = self._cluster.platform
        self._hold(
            "quota",
            amount(fault),
            lambda: setattr(platform, "no_quota", True),
            lambda: setattr(platform, "no_quota", False),
        )

    def _preempt(self, fault: Fault) -> bool:
        return self._to_machine(fault, lambda name: self._cluster.platform.give_notice(name, amount(fault)))

    def _preempt_sooner(self, fault: Fault) -> bool:
        return self._to_machine(fault, lambda name: self._notices(name, amount(fault), 0.25, 0.25))

    def _preempt_later(self, fault: Fault) -> bool:
        return self._to_machine(fault, lambda name: self._notices(name, amount(fault), 0.5, 1.5))

    def _notices(self, name: str, notice_s: float, when: float, then: float) -> None:
        """Its end is announced; after such a part of the time another one is, in such a part from there."""
        platform = self._cluster.platform
        platform.give_notice(name, notice_s)
        self._later(notice_s * when, platform.give_notice, name, notice_s * then)

    def _preempt_withdrawn(self, fault: Fault) -> bool:
        return self._to_machine(fault, lambda name: self._withdrawn(name, amount(fault)))

    def _withdrawn(self, name: str, notice_s: float) -> None:
        platform = self._cluster.platform
        platform.give_notice(name, notice_s)
        self._later(notice_s / 2, platform.withdraw_notice, name)

    def _hold_queue(self, fault: Fault) -> None:
        pool = self._cluster.platform.pool
        self._hold("queue", amount(fault), lambda: pool.hold(HELD), lambda: pool.hold(""))

    def _preempt_now(self, fault: Fault) -> bool:
        return self._to_machine(fault, self._cluster.platform.take)

    # ---- what people ask for

    def _scale(self, fault: Fault) -> bool:
        groups = [group.name for group in self._cluster.spec.groups]
        group = fault.target if isinstance(fault.target, str) else groups[fault.target % len(groups)]
        return self._ask({"command": "scale", "group": group, "nodes_max": round(amount(fault))})

    def _drain(self, fault: Fault) -> bool:
        leader = self._leader()
        present = sorted(leader.state.nodes.nodes, key=_by_number) if leader is not None else []
        if isinstance(fault.target, int):
            node = present[fault.target % len(present)] if present else ""
        else:
            target = fault.target
            node = next((one for one in reversed(present) if one == target or one.rpartition("-")[0] == target), "")
        return bool(node) and self._ask({"command": "drain", "node": node})

    def _suspend(self, fault: Fault) -> bool:
        leader = self._leader()
        if leader is not None:
            self._errand(self._pause_job(leader, amount(fault)))
        return leader is not None

    def _ask(self, what: Mapping[str, object]) -> bool:
        leader = self._leader()
        if leader is not None:
            self._errand(self._obeyed(leader, what))
        return leader is not None

    async def _obeyed(self, leader: Master, what: Mapping[str, object]) -> None:
        """People are told no, and live with it."""
        with contextlib.suppress(Refused, NotLeading):
            await leader.obey(what)

    async def _pause_job(self, leader: Master, for_s: float) -> None:
        """Whoever suspends a job waits for the answer, and lets it go on: asks until it does, whatever the answer was.

        Every other time, by its length, the nodes are given back.
        """
        await self._obeyed(leader, {"command": "suspend", "keep_nodes": round(for_s) % 2 == 0, "lose": True})
        await asyncio.sleep(for_s)
        while self._cluster.state.job.state == "suspended" or self._cluster.state.job.pausing:
            now = self._leader()
            if now is not None:
                await self._obeyed(now, {"command": "resume"})
            await asyncio.sleep(ASK_AGAIN_S)


def _by_number(name: str) -> tuple[object, ...]:
    """``worker-10-0`` comes after ``worker-9-0``."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("-"))
