"""A job whose log is an etcd of three members: masters on three hosts, training on two, and all that must hold of them.

Every master reaches etcd through proxies of its own, one for each member, so that one master alone can be cut off. All the
while a `Petitioner` asks whoever leads for something, and remembers what it was answered; a `Witness` asks every master who
leads; ``dlrover events --follow`` reads along. After each outage `Stage.verify` reads the log from every member by itself and
compares it with all of them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from bystanders import LOOK_S, Petition, Petitioner, Witness
from chain import PAUSE_S, Link, flaws, links
from hosts_net import TOKEN, Host, Net, loopback
from running import BOUND_S, SCRIPTS, Process, eventually
from tools.etcd_cluster import Cluster

from dlrover_adapters.cli import scratch
from dlrover_adapters.etcd.keys import Head, Keys, end_of
from dlrover_adapters.http.client import fetch_status
from dlrover_core.errors import CoreError
from dlrover_core.job import job
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.testing import invariants
from dlrover_core.testing.proxy import Proxy

if TYPE_CHECKING:
    from typing_extensions import Self

MASTERS, TRAINERS, IMPOSTOR, READER = "abc", "de", "f", "g"
JOB, PREFIX = "many", "outages"
TTL_S = 2.0
QUOTA_BYTES = 48 * 1024 * 1024
GAP_S = 2.0
"""The longest a rank may go without a step of 50 ms: much less than any outage lasts, and much for a busy machine.

Not counted is for how long the machine itself stood still, as a `Metronome` tells.
"""
STOOD_S = 0.25
DECIDES_S = 20.0
TXN_BYTES = 200
"""An append is larger, and what else goes to etcd all the time is smaller: renewals of the lease, pings."""
# Masters that are stopped stay stopped: what a leader does that goes on after its lease is a matter of the log.
# An agent on a busy machine may take seconds to leave a stopped master: it is not taken for a dead one meanwhile.
QUICK = ("--set", "silence_s=6", "--set", "heartbeat_s=0.3", "--set", "last_call_s=0.5", "--set", "stop_grace_s=5")
QUICK += ("--set", "hung_s=0")

T = TypeVar("T")


class Void(Exception):
    """etcd's members differ: its known fault (3.5.0 to 3.5.2, killed under load), and nothing is proven about us."""


class Loop:
    """An event loop in a thread: what is asynchronous of a test that is not."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outages")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, what: Coroutine[Any, Any, T], bound_s: float = BOUND_S) -> T:
        """What it returns."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(bound_s)

    def call(self, what: Callable[[], object]) -> None:
        """Have it called there, and wait for that."""

        async def called() -> None:
            what()

        self.do(called())

    @contextlib.contextmanager
    def keeping(self, what: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Have it run meanwhile; its error is ours."""
        running: list[asyncio.Task[None]] = []

        async def end() -> None:
            running[0].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running[0]

        self.call(lambda: running.append(asyncio.ensure_future(what)))
        try:
            yield
        finally:
            self.do(end())

    @contextlib.contextmanager
    def awaiting(self, what: Coroutine[Any, Any, object], bound_s: float = BOUND_S) -> Iterator[None]:
        """Have it run meanwhile, and wait for its end."""
        running = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            yield
            running.result(bound_s)
        finally:
            running.cancel()


class Metronome:
    """Beats as a rank makes steps, beside them and without a job: when it is late, the machine or its disk stood still."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "metronome"
        self._beats = [time.monotonic()]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metronome")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        part = self._file.with_suffix(".part")
        while not self._over.wait(PAUSE_S):
            part.write_text(f"{len(self._beats)}")
            part.replace(self._file)
            self._beats.append(time.monotonic())

    def stood_s(self, since: float, until: float) -> float:
        """For how long of this time it did not beat: every pause of more than `STOOD_S` counts, as far as it lies therein."""
        beats = [*self._beats, time.monotonic()]
        pauses = ((before, after) for before, after in itertools.pairwise(beats) if after - before > STOOD_S)
        return sum(max(0.0, min(after, until) - max(before, since)) for before, after in pauses)


class MasterHost(Host):
    """A host with masters, and its ways to etcd, by member."""

    def __init__(self, net: Net, name: str, folder: Path, ways: Sequence[Proxy], loop: Loop) -> None:
        super().__init__(net, name, folder)
        self._ways, self._loop = ways, loop

    @property
    def at(self) -> str:
        """Where its masters listen."""
        return f"{self.address}:{self.net.port}"

    @property
    def urls(self) -> list[str]:
        """The members, as this host sees them."""
        return [one.address for one in self._ways]

    def master(self) -> Process:
        """The process of its master."""
        return self.one("dlrover-master")

    def block(self, *, up: bool = True, down: bool = True) -> None:
        """Let nothing through, to etcd and back; or one way only."""
        self._loop.call(lambda: [one.block(up=up, down=down) for one in self._ways])

    def heal(self) -> None:
        """Let everything through, what was held first."""
        self._loop.call(lambda: [one.heal() for one in self._ways])

    def uses(self, member: int) -> None:
        """Its master talks to etcd through this member from now on."""

        def asked() -> bool:
            before = [one.bytes_up for one in self._ways]
            threading.Event().wait(LOOK_S)
            gains = [one.bytes_up - was for one, was in zip(self._ways, before, strict=True)]
            if gains[member] == max(gains) > 0:
                return True
            self._loop.call(lambda: [one.cut() for number, one in enumerate(self._ways) if number != member])
            return False

        eventually(asked, f"host {self.name}'s master asks member {member}", DECIDES_S)

    def lose_answer(self, at_least_bytes: int = TXN_BYTES) -> None:
        """The next transaction that goes to a member arrives there, and its answer does not arrive here."""
        self._loop.call(
            lambda: [one.cut_after_request(at_least_bytes=at_least_bytes, linger_s=0.02) for one in self._ways]
        )

    def cut(self) -> None:
        """Reset all connections."""
        self._loop.call(lambda: [one.cut() for one in self._ways])

    @property
    def lost_answers(self) -> int:
        """How many connections the proxies have cut."""
        return sum(one.cuts for one in self._ways)


class Stage:
    """All of it, running. ``lives``: how many processes each rank should have had by now; ``bereaved``: this outage takes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.training = folder / "training"
        self.training.mkdir(parents=True)
        self.lives = 1
        self.bereaved = False
        self.keys = Keys(PREFIX, JOB)
        self._stack = contextlib.ExitStack()
        self._since = 0.0
        self._lied = 0

    def __enter__(self) -> Self:
        with self._stack:
            enter = self._stack.enter_context
            self._stack.callback(scratch.sweep)
            self.etcd = enter(Cluster(members=3, directory=self.folder, quota_bytes=QUOTA_BYTES))
            self.loop = enter(Loop())
            net = enter(loopback())
            for number, name in enumerate(TRAINERS + IMPOSTOR + READER, start=5):
                net.addresses[name], net.prefixes[name] = f"127.0.0.{number}", []
                net.options[name] = ["--local-addr", net.addresses[name]]
            self.metronome = enter(Metronome(self.training))
            self.masters = {name: enter(self._master_host(net, name)) for name in MASTERS}
            self.trainers = [enter(Host(net, name, self.folder)) for name in TRAINERS]
            self.reader = enter(Host(net, READER, self.folder))
            self.impostor = f"{net.addresses[IMPOSTOR]}:{net.port}"
            for host in self.masters.values():
                self.start(host)
            line = [*(host.at for host in self.masters.values()), self.impostor]
            for trainer in self.trainers:
                script = (str(SCRIPTS / "chain.py"), str(self.training))
                rest = ("--nnodes", "2", "--rdzv-id", JOB, *QUICK, *script)
                trainer.start("--master", ",".join(line), *rest)
            self.petitioner = self.loop.do(_made(lambda: Petitioner([one.at for one in self.masters.values()])))
            self.witness = Witness(list(self.masters.values()))
            eventually(lambda: len(self.links(0)) > 5 and len(self.links(1)) > 5, "steps of both ranks")
            self.reader.start("events", JOB, "--follow", "--json", "--log", self.etcd.url(PREFIX), program="dlrover")
            self._stack.enter_context(self.loop.keeping(self.witness.run()))
            self._stack.enter_context(self.loop.keeping(self.petitioner.run()))
            self.settled()
            self._since = time.monotonic()
            self._kept = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.__exit__(kind, error, trace)

    def _master_host(self, net: Net, name: str) -> MasterHost:
        ways = [self.loop.do(_made(lambda at=at: Proxy(at))) for at in self.etcd.endpoints]
        for way in ways:
            self.loop.do(way.__aenter__())
            self._stack.callback(lambda way=way: self.loop.do(way.__aexit__(None, None, None)))
        return MasterHost(net, name, self.folder, ways, self.loop)

    def start(self, host: MasterHost) -> None:
        """Start (again) what leads or stands by on a host."""
        url = self.etcd.url(PREFIX, endpoints=host.urls, ttl=f"{TTL_S:g}")
        size = ("--nnodes", "2", "--nproc-per-node", "1", "--job-id", JOB)
        host.start("master", *size, *QUICK, "--bind", host.at, "--log", url, program="dlrover")

    # ---- what they say

    def status(self, host: MasterHost) -> dict[str, Any]:
        """What a master says; nothing where it does not answer."""
        with contextlib.suppress(CoreError):
            return dict(self.loop.do(fetch_status(host.at, TOKEN, timeout_s=2.0)))
        return {}

    def leads(self) -> tuple[MasterHost, dict[str, Any]] | None:
        """The host of the newest master that says it leads, and what it says."""
        told = [(host, self.status(host)) for host in self.masters.values()]
        leading = [one for one in told if one[1].get("role") == "leader"]
        return max(leading, key=lambda one: int(one[1]["token"]), default=None)

    def leader(self) -> tuple[MasterHost, dict[str, Any]]:
        """The same, as soon as there is one."""
        return eventually(self.leads, "a master that leads", DECIDES_S)

    def standbys(self) -> list[MasterHost]:
        """The hosts of the others."""
        leads = self.leader()[0]
        return [host for host in self.masters.values() if host is not leads]

    def token(self) -> int:
        """That of the leader."""
        return int(self.leader()[1]["token"])

    def follows(self, before: MasterHost, bound_s: float = DECIDES_S) -> MasterHost:
        """Another host than ``before`` leads."""

        def look() -> MasterHost | None:
            found = self.leads()
            return found[0] if found is not None and found[0] is not before else None

        return eventually(look, f"another master than host {before.name}'s leads", bound_s)

    def decides(self, bound_s: float = DECIDES_S) -> float:
        """Wait until something is asked from now on, and done; how long that took in seconds."""
        began = time.monotonic()

        def look() -> Petition | None:
            newest = reversed(self.petitioner.petitions[-50:])
            return next((one for one in newest if one.seq > 0 and one.asked_at >= began), None)

        return eventually(look, "decisions", bound_s).told_at - began

    def kill_a_worker(self, dice: random.Random) -> None:
        """One of them dies: both ranks have another life, and are without steps until then."""
        workers = [one for host in self.trainers for one in host.processes() if one.name.startswith("worker-")]
        dice.choice(sorted(workers, key=lambda one: one.name)).kill()
        self.lives, self.bereaved = self.lives + 1, True

    def lived(self) -> int:
        """How many processes both ranks have had at least."""
        return min(len({one.pid for one in self.links(rank)}) for rank in (0, 1))

    def closed(self, incident: int) -> dict[str, Any] | None:
        """What the leader says when this incident is over, and no other is open."""
        found = self.leads()
        told = found[1] if found is not None else {}
        return told if told.get("incidents", 0) >= incident and not told["open_incidents"] else None

    def undecided(self, since: float) -> float:
        """The longest time since then in which nothing was decided, in seconds."""
        done = [one.told_at for one in self.petitioner.petitions if one.seq > 0 and one.told_at > since]
        return max(after - before for before, after in itertools.pairwise([since, *done]))

    def hold(self, seconds: float) -> None:
        """Let an outage last; what is waited for is that training goes on, as `verify` finds."""
        threading.Event().wait(seconds)

    def settled(self) -> None:
        """Wait until one master leads and nothing is wrong with it, the others stand by, and everybody is there."""
        self.etcd.wait_healthy()
        told: list[dict[str, Any]] = []

        def look() -> bool:
            told[:] = [self.status(host) for host in self.masters.values()]
            roles = sorted(str(one.get("role")) for one in told)
            if roles != ["leader", "standby", "standby"] or any(one["degraded"] for one in told):
                return False
            leads = next(one for one in told if one["role"] == "leader")
            joined = [one for one in leads["nodes"].values() if one["state"] == "running" and one["joined"]]
            return leads["agents"] == len(joined) == len(TRAINERS) and not leads["open_incidents"]

        try:
            eventually(look, "everything is well again")
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(told)}") from error

    # ---- what must hold

    def verify(self) -> JobState:
        """Compare everybody with everybody. Raises AssertionError with what is not as it should be, and `Void`."""
        self.settled()
        self.loop.do(self.petitioner.pause())
        try:
            batches = self._same_log()
            records = [record for batch in batches for record in batch.records]
            state = self._in_order(batches, records)
            self._agrees(records)
            self._read_out(records)
        finally:
            self.loop.call(self.petitioner.go_on)
        self._kept_its_word(records)
        self._trained()
        lies, self._lied = self.witness.lies[self._lied :], len(self.witness.lies)
        assert not lies, lies
        created = [one.event for one in records if isinstance(one.event, job.JobCreated)]
        assert len(created) == 1, f"not one run: {created}"
        self._since, self.bereaved = time.monotonic(), False
        return state

    def differ(self) -> str:
        """Which keys members tell differently, or only the hashes; empty where they agree."""
        self.etcd.wait_healthy()
        if self.etcd.members_agree():
            return ""
        revision = self.etcd.revision()
        told = [dict(self._range_of(number, "\0", revision, "\0")) for number in range(3)]
        keys = [key for key in sorted({*told[0], *told[1], *told[2]}) if len({one.get(key) for one in told}) > 1]
        return f"the members' hashes differ, {len(keys)} keys: {keys[:3]}"

    def _same_log(self) -> list[Batch]:
        """The log of every member, by its own word, without asking the others; they must be one."""
        revision = self.etcd.revision()
        told = [self._log_of(number, revision) for number in range(3)]
        if not told[0] == told[1] == told[2]:
            if found := self.differ():
                raise Void(found)
            raise AssertionError("members with the same hash tell different logs")
        heads = {self._range_of(number, self.keys.head, revision)[0][1] for number in range(3)}
        batches = [CODEC.decode(value) for _, value in told[0]]
        for (key, _), batch in zip(told[0], batches, strict=True):
            assert key == self.keys.batch(batch.last_seq), f"{key} holds the records up to {batch.last_seq}"
        last = batches[-1]
        assert heads == {Head(last.last_seq, last.token, last.counter).packed()}, f"the head is {heads}, not at {last}"
        return batches

    def _log_of(self, member: int, revision: int) -> list[tuple[str, bytes]]:
        return self._range_of(member, self.keys.log, revision, end_of(self.keys.log))

    def _range_of(self, member: int, key: str, revision: int, end: str = "") -> list[tuple[str, bytes]]:
        asked = {"key": _b64(key), "range_end": _b64(end), "serializable": True, "revision": revision}

        def look() -> dict[str, Any] | None:
            # Where this member has not come to that revision yet it says so.
            with contextlib.suppress(OSError):
                return self.gateway(member, "kv/range", asked)
            return None

        told = eventually(look, f"revision {revision} at member {member}")
        pairs = ((base64.b64decode(one["key"]), base64.b64decode(one.get("value", ""))) for one in told.get("kvs", ()))
        return [(raw.decode(), value) for raw, value in pairs]

    def gateway(self, member: int, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """What one member answers over HTTP. Raises `OSError`."""
        url = f"http://{self.etcd.endpoints[member]}/v3/{method}"
        with urllib.request.urlopen(url, json.dumps(request).encode(), timeout=5.0) as reply:
            return dict(json.loads(reply.read()))

    def _in_order(self, batches: Sequence[Batch], records: Sequence[Record]) -> JobState:
        identities = [(batch.token, batch.counter) for batch in batches]
        assert len(set(identities)) == len(identities), "a batch stands in the log twice"
        return invariants.check_history(records)

    def _agrees(self, records: list[Record]) -> None:
        """Every master, leading or standing by, has folded what stands in the log."""
        told: dict[str, dict[str, Any]] = {}

        def look() -> bool:
            # What the leader itself notices may still come in.
            for name, host in self.masters.items():
                told[name] = self.status(host)
            return len({one.get("seq") for one in told.values()}) == 1

        try:
            eventually(look, "all masters at one record", 10.0)
        except AssertionError as error:
            seen = {name: (one.get("role"), one.get("seq")) for name, one in told.items()}
            raise AssertionError(f"{error}: {seen}, the log ends at {records[-1].seq}") from error
        views = {name: {key: one.get(key) for key in _FOLDED} for name, one in told.items()}
        assert all(one == views["a"] for one in views.values()), f"masters fold differently: {views}"
        assert views["a"]["seq"] >= records[-1].seq, f"{views['a']['seq']} of {records[-1].seq} records"

    def _read_out(self, records: Sequence[Record]) -> None:
        """``dlrover events --follow``, begun when the job began, has told all of it in order, nothing twice."""

        def look() -> list[dict[str, Any]] | None:
            assert self.reader.process is not None
            assert self.reader.process.poll() is None, f"dlrover events --follow has ended: {self.reader.said()}"
            text = (self.reader.folder / "out-1").read_text()
            found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            return found if len(found) >= len(records) else None

        told = eventually(look, f"all {len(records)} events told to a follower", 10.0)
        expected = [(one.seq, type(one.event).__name__) for one in records]
        assert [(one["seq"], one["event"]) for one in told[: len(records)]] == expected, "a follower was told otherwise"

    def _kept_its_word(self, records: Sequence[Record]) -> None:
        """What was acknowledged stands where it was said to; what was refused nowhere; nothing twice."""
        made: dict[str, list[int]] = {}
        for record in records:
            if isinstance(record.event, job.GroupScaled):
                made.setdefault(record.event.reason, []).append(record.seq)
        twice = {name: seqs for name, seqs in made.items() if len(seqs) > 1}
        assert not twice, f"done twice: {twice}"
        for one in self.petitioner.petitions:
            found = made.get(one.name, [])
            if one.seq > records[-1].seq:
                continue  # asked since
            expected = [[one.seq]] if one.seq > 0 else [[]] if one.seq == 0 else [[], found]
            assert found in expected, f"{one} stands at {found}"

    def _trained(self) -> None:
        """Both ranks made steps all the while, and no worker was started that need not be."""
        for rank in (0, 1):
            links = self.links(rank)
            wrong = flaws(links, rank)
            assert not wrong, f"rank {rank}: {wrong[:5]}"
            lives = len({one.pid for one in links})
            assert lives == self.lives, f"rank {rank} has had {lives} processes, not {self.lives}"
            moments = [self._since, *(one.at for one in links if one.at > self._since), time.monotonic()]
            for before, after in itertools.pairwise(moments):
                if self.bereaved or after - before < GAP_S:
                    continue
                stood_s = self.metronome.stood_s(before, after)
                assert after - before - stood_s < GAP_S, (
                    f"rank {rank} made no step for {after - before:.1f} s, {before - self._since:.1f} s after the outage "
                    f"began; for {stood_s:.1f} s of that the machine stood still"
                )

    def links(self, rank: int) -> list[Link]:
        """The steps of a rank so far."""
        return links(self.training, rank)

    # ---- the end

    def finish(self) -> None:
        """Let the training end: everybody leaves by themselves, and nothing is left."""
        self.reader.signal()
        assert self.reader.ended() == 130
        (self.training / "finish").touch()
        assert [host.ended() for host in self.trainers] == [0, 0]
        for host in self.masters.values():
            code = host.ended()
            assert code == 0, f"dlrover master on host {host.name} ended with {code}: {host.said()[-2000:]}"
        left = [host.left() for host in (*self.masters.values(), *self.trainers, self.reader)]
        assert not any(left), left


_FOLDED = ("job", "run", "state", "seq", "generation", "incidents", "open_incidents", "nodes")


async def _made(what: Callable[[], T]) -> T:
    return what()


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
