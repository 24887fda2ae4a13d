"""The outages: what is done to a `Stage`, and what is waited for. What must hold afterwards is the stage's to say.

Each is a function of the stage, and of a die that says how; `OUTAGES` has all of them by name.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import time
import urllib.error
from collections.abc import Callable, Iterator
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any

from hosts_net import TOKEN
from running import Process, eventually
from shared_log import DECIDES_S, JOB, TRAINERS, TTL_S, MasterHost, Stage, Void
from tools.etcd_cluster import EtcdError

from dlrover_adapters.http import HttpListener, bind
from dlrover_core.errors import ConnectionLost
from dlrover_core.job.orders import Order
from dlrover_core.runtime import messages
from dlrover_core.runtime.transport import Connection

Outage = Callable[[Stage, random.Random], None]
OUTAGES: dict[str, Outage] = {}
SHORT_S, LONG_S = TTL_S / 4, 1.5 * TTL_S
"""Much less than the lease, and much more."""


def outage(play: Outage) -> Outage:
    """Count it among the outages."""
    OUTAGES[play.__name__] = play
    return play


def play(stage: Stage, name: str, seed: int) -> float:
    """Let an outage happen, and check everything; the longest time in which nothing was decided, in seconds.

    Raises AssertionError, which names the outage and its seed, and `Void` where etcd itself has lost data.
    """
    began = time.monotonic()
    try:
        OUTAGES[name](stage, random.Random(f"{name}.{seed}"))
        stage.decides()
        undecided = stage.undecided(began)
        stage.verify()
    except (AssertionError, EtcdError, TimeoutError) as error:
        with contextlib.suppress(EtcdError):
            if found := stage.differ():
                raise Void(f"{name}: {found}") from error
        raise AssertionError(f"{name}, seed {seed}: {error}") from error
    if found := stage.differ():
        raise Void(f"{name}: {found}")
    return undecided


# ---- members of etcd


@contextlib.contextmanager
def _without(stage: Stage, members: list[int], how: str) -> Iterator[None]:
    """These members are killed, or stopped, and come back."""
    for one in members:
        (stage.etcd.kill if how == "kill" else stage.etcd.pause)(one)
    try:
        yield
    finally:
        for one in members:
            (stage.etcd.start if how == "kill" else stage.etcd.resume)(one)


def _one_member(stage: Stage, how: str, *, leading: bool, dice: random.Random) -> None:
    first = stage.etcd.leader()
    member = first if leading else dice.choice([one for one in range(3) if one != first])
    stage.leader()[0].uses(member)
    with _without(stage, [member], how):
        stage.decides()
        stage.hold(LONG_S if how == "stop" else SHORT_S)
        # Those that are left are a majority: the master that asked the one that is gone asks another.
        stage.decides()


@outage
def etcd_leader_killed(stage: Stage, dice: random.Random) -> None:
    """The other two elect one of them, and decisions go on."""
    _one_member(stage, "kill", leading=True, dice=dice)


@outage
def etcd_leader_stopped(stage: Stage, dice: random.Random) -> None:
    """It keeps its connections and says nothing."""
    _one_member(stage, "stop", leading=True, dice=dice)


@outage
def etcd_follower_killed(stage: Stage, dice: random.Random) -> None:
    """Nobody need notice: the same master goes on leading."""
    token = stage.token()
    _one_member(stage, "kill", leading=False, dice=dice)
    assert stage.token() == token, "another leadership, for one follower"


@outage
def etcd_follower_stopped(stage: Stage, dice: random.Random) -> None:
    """The same for one that says nothing."""
    token = stage.token()
    _one_member(stage, "stop", leading=False, dice=dice)
    assert stage.token() == token, "another leadership, for one follower"


@outage
def quorum_lost(stage: Stage, dice: random.Random) -> None:
    """Two members are killed or stopped for longer than the lease: the control plane says that it is degraded, and comes back."""
    seen = len(stage.witness.degraded)
    with _without(stage, dice.sample(range(3), 2), dice.choice(("kill", "stop"))):
        eventually(lambda: len(stage.witness.degraded) > seen, "a degraded control plane", DECIDES_S)
        stage.hold(LONG_S)
    told = stage.witness.degraded[-1].status
    assert told["degraded_since"] > 0, told


@outage
def all_members_restarted(stage: Stage, dice: random.Random) -> None:
    """Power is lost: all members at once, and back only when every lease would be over."""
    with _without(stage, [0, 1, 2], "kill"):
        stage.hold(dice.uniform(SHORT_S, LONG_S))


# ---- masters


@outage
def leading_host_killed(stage: Stage, dice: random.Random) -> None:
    """The whole host of the leading master is gone, and comes back."""
    host, _ = stage.leader()
    host.die()
    stage.follows(host)
    stage.start(host)


@outage
def all_masters_killed(stage: Stage, dice: random.Random) -> None:
    """There is no control plane at all for longer than any lease; then there is, and the very run goes on."""
    for host in stage.masters.values():
        host.die()
    stage.hold(LONG_S)
    for host in stage.masters.values():
        stage.start(host)


@outage
def leading_master_killed(stage: Stage, dice: random.Random) -> None:
    """Its launcher lives, and starts another one."""
    host, status = stage.leader()
    host.master().kill(SIGKILL)
    eventually(lambda: stage.token() > status["token"], "another leadership", DECIDES_S)


@outage
def zombie(stage: Stage, dice: random.Random) -> None:
    """The leading master is stopped for longer than its lease and goes on: what it was asked for meanwhile is not done."""
    host, _ = stage.leader()
    master = host.master()
    master.kill(SIGSTOP)
    with _asked(stage, host):
        stage.follows(host)
        stage.decides()
        master.kill(SIGCONT)
    eventually(lambda: stage.status(host).get("role") == "standby", "the zombie stands by", DECIDES_S)


@outage
def zombie_with_an_append(stage: Stage, dice: random.Random) -> None:
    """The same; and what it had just sent to etcd arrives there when another one leads: it must be fenced."""
    host, _ = stage.leader()
    master = host.master()
    host.block(down=False)
    with _asked(stage, host):
        stage.hold(SHORT_S)
        master.kill(SIGSTOP)
        stage.follows(host)
        stage.decides()
        host.heal()
        stage.decides()
        master.kill(SIGCONT)
    eventually(lambda: stage.status(host).get("role") == "standby", "the zombie stands by", DECIDES_S)


@contextlib.contextmanager
def _asked(stage: Stage, host: MasterHost) -> Iterator[None]:
    """A master is asked for something meanwhile; what becomes of it is on the petitioner's list."""
    with stage.loop.awaiting(stage.petitioner.ask(host.at, 60.0)):
        yield


@outage
def impostor(stage: Stage, dice: random.Random) -> None:
    """There are no masters, and agents come to one who gives orders under an old token: to stop the workers and to leave."""
    heard = _Impostor(stage.impostor)
    with stage.loop.keeping(heard.run()):
        for host in stage.masters.values():
            host.die()
        eventually(lambda: len(heard.orders) >= 2 * len(TRAINERS), "agents that ask an impostor", DECIDES_S)
        for host in stage.masters.values():
            stage.start(host)
        stage.decides()


class _Impostor:
    """Says it is a master: greets one agent under an old token, and the next one well, only to order under an old one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.orders: list[int] = []

    async def run(self) -> None:
        """Until cancelled."""
        host, _, port = self._address.rpartition(":")
        listener = HttpListener(bind(host, int(port)), TOKEN, job=JOB)
        await listener.serve(self._accept, lambda: {"job": JOB})
        try:
            await asyncio.Event().wait()
        finally:
            await listener.close()

    async def _accept(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionLost):
            hello = messages.decode(await connection.receive())
            assert isinstance(hello, messages.Hello)
            old = max(0, hello.token - 1)
            greets = hello.token if len(self.orders) % 2 else old
            welcome = messages.Welcome(
                messages.VERSION, hello.run, greets, 300_000, 2_000_000, 300_000_000, 30_000_000, 3
            )
            await connection.send(messages.encode(welcome))
            order = Order(leave=True, reason="an impostor says so", grace_us=0)
            await connection.send(messages.encode(messages.level(old, order)))
            self.orders.append(hello.token)
            while True:
                await connection.receive()


@outage
def handed_over(stage: Stage, dice: random.Random) -> None:
    """The leading master is asked to go: the next one leads at once."""
    host, _ = stage.leader()
    host.master().kill(SIGTERM)
    stage.follows(host)


@outage
def worker_killed_while_nobody_leads(stage: Stage, dice: random.Random) -> None:
    """The leading host and a worker die at one moment: the next leader hears of it from the agent, and restarts once."""
    host, status = stage.leader()
    host.die()
    stage.kill_a_worker(dice)
    stage.follows(host)
    stage.start(host)
    _restarted(stage, status)


@outage
def worker_killed_without_a_quorum(stage: Stage, dice: random.Random) -> None:
    """It is restarted when there is a majority again, once."""
    _, status = stage.leader()
    with _without(stage, dice.sample(range(3), 2), dice.choice(("kill", "stop"))):
        stage.kill_a_worker(dice)
        stage.hold(LONG_S)
    _restarted(stage, status)


def _restarted(stage: Stage, before: dict[str, Any]) -> None:
    eventually(lambda: stage.lived() == stage.lives, "the next generation", DECIDES_S)
    told = eventually(lambda: stage.closed(before["incidents"] + 1), "the end of the incident", DECIDES_S)
    assert told["incidents"] == before["incidents"] + 1, "one death, several incidents"


# ---- the network between a master and etcd


def _cut_off(stage: Stage, dice: random.Random, *, up: bool, down: bool) -> None:
    """For longer than the lease: another master leads, and the first one stands by when it is back."""
    host, _ = stage.leader()
    host.block(up=up, down=down)
    with _asked(stage, host):
        stage.follows(host)
        stage.decides()
        # Agents that it kept would be silent to the next one.
        eventually(lambda: stage.leader()[1]["agents"] == len(TRAINERS), "all agents with the next leader", DECIDES_S)
        host.heal()
    eventually(lambda: stage.status(host).get("role") == "standby", "who was cut off stands by", DECIDES_S)


@outage
def cut_off(stage: Stage, dice: random.Random) -> None:
    """Nothing goes to etcd and nothing comes back."""
    _cut_off(stage, dice, up=True, down=True)


@outage
def cut_off_from_answers(stage: Stage, dice: random.Random) -> None:
    """What the master says arrives, so its lease lives as long as it says so; but it hears nothing."""
    _cut_off(stage, dice, up=False, down=True)


@outage
def cut_off_from_asking(stage: Stage, dice: random.Random) -> None:
    """The other way round."""
    _cut_off(stage, dice, up=True, down=False)


@outage
def cut_off_shortly(stage: Stage, dice: random.Random) -> None:
    """For much less than the lease, one way or both: the same master goes on leading."""
    host, status = stage.leader()
    up, down = dice.choice(((True, True), (True, False), (False, True)))
    host.block(up=up, down=down)
    stage.hold(SHORT_S)
    host.heal()
    stage.decides()
    assert stage.token() == status["token"], "another leadership, for a moment without etcd"


@outage
def answers_lost(stage: Stage, dice: random.Random) -> None:
    """Again and again a transaction arrives and its answer does not: it is not made twice, and the same master leads."""
    host, status = stage.leader()
    for _ in range(8):
        cuts = host.lost_answers
        host.lose_answer()
        eventually(lambda before=cuts: host.lost_answers > before, "a lost answer", DECIDES_S)
        stage.hold(dice.uniform(0.0, SHORT_S / 2))
    host.heal()
    stage.decides()
    assert stage.token() == status["token"], "another leadership, for lost answers"


@outage
def started_on_a_bad_day(stage: Stage, dice: random.Random) -> None:
    """A host of masters is started while its connections break and answers get lost: it comes up and stands by all the same."""
    host = dice.choice(stage.standbys())
    host.die()
    stage.start(host)
    for _ in range(12):
        match dice.randrange(4):
            case 0:
                host.block(up=dice.random() < 0.5)
            case 1:
                host.cut()
            case _:
                host.lose_answer(dice.choice((1, 40, 80)))
        stage.hold(dice.uniform(0.0, SHORT_S))
        host.heal()


# ---- everything at once


@outage
def leaders_killed_together(stage: Stage, dice: random.Random) -> None:
    """Etcd's leader and the leading master were on one host."""
    host, _ = stage.leader()
    member = stage.etcd.leader()
    stage.etcd.kill(member)
    host.die()
    stage.follows(host)
    stage.etcd.start(member)
    stage.start(host)


@outage
def storm(stage: Stage, dice: random.Random) -> None:
    """One thing after another, and nobody waits until the one before is over."""
    members, hosts = list(range(3)), list(stage.masters.values())
    killed, stopped, frozen = set[int](), set[int](), list[Process]()
    for _ in range(14):
        host, member = dice.choice(hosts), dice.choice(members)
        what = dice.choice(_STORM)
        if what == "kill member" and member not in killed:
            stage.etcd.kill(member)
            killed.add(member)
            stopped.discard(member)
        elif what == "stop member" and member not in killed | stopped:
            stage.etcd.pause(member)
            stopped.add(member)
        elif what in _SIGNALS:
            for master in host.processes("dlrover-master"):
                master.kill(_SIGNALS[what])
                if what == "stop":
                    frozen.append(master)
        elif what == "block":
            host.block(up=dice.random() < 0.7, down=dice.random() < 0.7)
        elif what == "cut":
            host.cut()
        elif what == "lose":
            host.lose_answer()
        elif what == "calm":
            _calm(stage, killed, stopped, frozen)
        stage.hold(dice.uniform(0.0, TTL_S / 2))
    _calm(stage, killed, stopped, frozen)


_STORM = ("kill member", "stop member", "kill", "stop", "hand over", "block", "cut", "lose", "lose", "calm", "calm")
_SIGNALS = {"kill": SIGKILL, "stop": SIGSTOP, "hand over": SIGTERM}


def _calm(stage: Stage, killed: set[int], stopped: set[int], frozen: list[Process]) -> None:
    for host in stage.masters.values():
        host.heal()
    for master in frozen:
        with contextlib.suppress(ProcessLookupError):
            master.kill(SIGCONT)
    for member in killed:
        stage.etcd.start(member)
    for member in stopped:
        stage.etcd.resume(member)
    killed.clear()
    stopped.clear()
    frozen.clear()


# ---- what people and etcd itself do to the keys


@outage
def compaction(stage: Stage, dice: random.Random) -> None:
    """While a standby is stopped etcd forgets the revisions that it would have watched."""
    host = dice.choice(stage.standbys())
    master = host.master()
    master.kill(SIGSTOP)
    for _ in range(5):
        stage.decides()
    stage.etcd.compact()
    stage.decides()
    stage.etcd.compact()
    master.kill(SIGCONT)


@outage
def lease_revoked(stage: Stage, dice: random.Random) -> None:
    """Somebody, or an old leader of etcd, ends the leader's lease early."""
    token = stage.token()
    stage.etcd.revoke(stage.etcd.lease_of(stage.keys.leader))
    eventually(lambda: stage.token() > token, "a newer leadership", DECIDES_S)


@outage
def out_of_space(stage: Stage, dice: random.Random) -> None:
    """Somebody else fills etcd: it is read only, status says so; when there is room again decisions go on."""
    seen, full = len(stage.witness.degraded), False
    ballast = base64.b64encode(bytes(1024 * 1024)).decode()
    for number in range(200):
        key = base64.b64encode(f"ballast/{number}".encode()).decode()
        try:
            stage.gateway(0, "kv/put", {"key": key, "value": ballast})
        except urllib.error.HTTPError as error:
            full = b"space exceeded" in error.read()
            break
    assert full, "etcd is not full"
    eventually(lambda: len(stage.witness.degraded) > seen, "a degraded control plane", DECIDES_S)
    assert any("space" in one.status["degraded"] for one in stage.witness.degraded[seen:]), stage.witness.degraded[
        seen:
    ]
    stage.hold(LONG_S)
    stage.etcd.delete("ballast/")
    stage.etcd.make_room()


__all__ = ["OUTAGES", "Outage", "play"]
