"""Ports that an agent keeps for its workers, what it offers, and what its workers find of it in their environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent import addresses, ports
from dlrover_adapters.agent.addresses import Addresses, PeersFile
from dlrover_adapters.agent.ports import Ports
from dlrover_core.job.clusters import Cluster, OfferPorts, Places
from dlrover_core.job.orders import Order
from dlrover_core.runtime.duties import Desk

HERE = "127.0.0.1"
ORDER = Order(leave=False, reason="", grace_us=0)
Made = Callable[[], Ports]


@pytest.fixture
def make() -> Iterator[Made]:
    """Makes agents' ports; all are given back at the end."""
    with contextlib.ExitStack() as stack:

        def one() -> Ports:
            made = Ports(HERE)
            stack.callback(made.close)
            return made

        yield one


def unique() -> str:
    """A place that no other test run on this host has."""
    return f"run-{uuid.uuid4()}/rollout-0"


def worker(port: int) -> socket.socket:
    """A worker's own socket."""
    return socket.create_server((HERE, port), reuse_port=True)


# ---- ports


def test_a_worker_listens_at_a_port_that_its_agent_keeps(make: Made) -> None:
    """Callers reach the worker, and are refused while there is none; its successor has the port again, whatever lingers."""
    agent = make()
    port = agent.keep(unique(), 2) + 1
    for _ in range(2):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((HERE, port)):
            pytest.fail("nobody listens, and a connection was made")
        with worker(port) as server, socket.create_connection((HERE, port)) as caller:
            called, _ = server.accept()
            called.close()  # first: the connection lingers on the worker's side
            assert caller.recv(1) == b""


def test_nobody_else_is_given_them(make: Made) -> None:
    """Neither another agent of the same user, by whatever wish, nor a program that binds as most do."""
    agent, name = make(), unique()
    first = agent.keep(name, 2)
    other = make()
    assert other.keep(name, 2, again=first) not in (first - 1, first, first + 1)
    for reused in (0, 1):
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reused)
            with pytest.raises(OSError, match="in use"):
                stranger.bind((HERE, first))


def test_a_place_has_its_ports_again(make: Made) -> None:
    """By its name, and by what it is told: after its predecessor has closed them, and whatever lingers of that one's worker."""
    agent, name = make(), unique()
    first = agent.keep(name, 2)
    assert agent.keep(name, 2) == first, "asked twice, it has them still"
    with worker(first) as server, socket.create_connection((HERE, first)):
        server.accept()[0].close()
        agent.close()
    assert make().keep(name, 2) == first
    moved = make()
    elsewhere = moved.keep(name, 2)
    moved.close()
    assert make().keep(unique(), 2, again=elsewhere) == elsewhere


def test_ports_outlast_a_worker_that_outlives_its_agent(make: Made) -> None:
    """The kernel ends workers with their agent, and not at once: a successor does not wait for it."""
    agent, name = make(), unique()
    first = agent.keep(name, 1)
    with worker(first):
        agent.close()
        assert make().keep(unique(), 1, again=first) == first


def test_a_killed_agent_leaves_them_to_its_successor(make: Made) -> None:
    """What holds them goes with the process: nothing lies about that would keep a successor off."""
    code = "import sys; from dlrover_adapters.agent.ports import Ports; made = Ports(sys.argv[1])\n"
    code += "print(made.keep(sys.argv[2], 3), flush=True); sys.stdin.read()"
    name = unique()
    line = [sys.executable, "-c", code, HERE, name]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        first = int(agent.stdout.readline())
        assert make().keep(name, 3, again=first) != first
        agent.kill()
        agent.wait()
        assert make().keep(name, 3, again=first) == first


def test_where_a_port_is_a_strangers_there_are_others(make: Made) -> None:
    """All of a node's ports move: they are in a row."""
    agent, name = make(), unique()
    first = agent.keep(name, 2)
    agent.close()
    with socket.create_server((HERE, first + 1)):
        assert make().keep(name, 2, again=first) not in (first, first + 1)


def test_where_there_are_none_it_is_said(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bounded number of tries; what was taken on the way is given back."""
    agent = make()
    first = agent.keep(unique(), 1)
    monkeypatch.setattr(ports, "_range", lambda: (first - 1, first + 1))
    with pytest.raises(
        OSError, match=rf"no 2 ports in a row are free on 127\.0\.0\.1 between {first - 1} and {first + 1}"
    ):
        make().keep(unique(), 2)
    make().keep(unique(), 1, again=first - 1)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("32768\t60999\n", (20_000, 29_000)),
        ("24000 60999", (20_000, 24_000)),
        ("1024 65535", (20_000, 29_000)),
        ("", (20_000, 29_000)),
        (None, (20_000, 29_000)),
    ],
)
def test_ports_lie_below_those_that_the_kernel_hands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, found: tuple[int, int]
) -> None:
    """So that between an agent's death and its successor nobody is given them by chance; and below our masters' ports."""
    file = tmp_path / "range"
    if said is not None:
        file.write_text(said)
    monkeypatch.setattr(ports, "_RANGE", str(file))
    assert ports._range() == found


# ---- the duty


class Stage:
    """An agent's addresses, ordered about."""

    def __init__(self, folder: Path, run: str) -> None:
        self.said: list[str] = []
        self.sent: list[Any] = []
        self.duty = Addresses(address="10.0.0.7", bind=HERE, say=self.said.append)
        self.duty.file.open(str(folder))
        self._desk = Desk("rollout-0-0", run, ORDER, self.sent.append)

    async def begin(self) -> None:
        """Until it is cancelled."""
        await self.duty.run(self._desk)

    async def told(self, cluster: Cluster, nproc: int = 2) -> list[dict[str, str]]:
        """What workers find that start once this is ordered."""
        self.duty.ordered(ORDER.telling(cluster))
        return list(await self.duty.environment(nproc))


@contextlib.asynccontextmanager
async def staged(folder: Path, run: str) -> AsyncIterator[Stage]:
    """One that runs."""
    stage = Stage(folder, run)
    task = asyncio.create_task(stage.begin())
    try:
        yield stage
    finally:
        task.cancel()
        await asyncio.wait({task})


def play(story: Coroutine[Any, Any, None]) -> None:
    """To its end."""
    asyncio.run(story)


def written(folder: Path) -> dict[str, Any]:
    """What the file says."""
    return dict(json.loads((folder / "peers.json").read_text()))


def test_workers_are_told_where_to_listen_and_whom_to_call(tmp_path: Path) -> None:
    """One port for each, offered once under the address that others reach; the file is there before any worker starts."""

    async def story() -> None:
        async with staged(tmp_path, unique()) as stage:
            first, second = await stage.told(Cluster(ports=2, version=3, peers='{"trainer":{"0":["a",1,1]}}'))
            (offer,) = stage.sent
            assert offer == OfferPorts("rollout-0-0", "10.0.0.7", offer.first, 2)
            file = str(tmp_path / "peers.json")
            assert first == {"DLROVER_PEERS": file, "DLROVER_LISTEN": f"127.0.0.1:{offer.first}"}
            assert second == {"DLROVER_PEERS": file, "DLROVER_LISTEN": f"127.0.0.1:{offer.first + 1}"}
            assert written(tmp_path) == {"format": 1, "version": 3, "groups": {"trainer": {"0": ["a:1"]}}}

            await stage.told(Cluster(ports=2, version=4, peers='{"trainer":{}}'))
            assert written(tmp_path)["version"] == 4
            assert (len(stage.sent), stage.said) == (1, [])

    play(story())


def test_who_calls_nobody_and_is_called_by_nobody_is_told_nothing(tmp_path: Path) -> None:
    """No port is taken, no file is written; who only calls has no port, who is only called no file."""

    async def story() -> None:
        async with staged(tmp_path, unique()) as stage:
            assert await stage.told(Cluster()) == [{}, {}]
            assert stage.sent == []
            with pytest.raises(FileNotFoundError):
                written(tmp_path)
            assert await stage.told(Cluster(version=1, peers='{"ps":{}}'), 1) == [
                {"DLROVER_PEERS": str(tmp_path / "peers.json")}
            ]
        async with staged(tmp_path, unique()) as stage:
            assert [list(one) for one in await stage.told(Cluster(ports=1), 1)] == [["DLROVER_LISTEN"]]

    play(story())


def test_a_successor_on_the_same_host_offers_its_places_ports(tmp_path: Path, make: Made) -> None:
    """As it is told; what another host had is no wish here."""

    async def story() -> None:
        wanted = make()
        first = wanted.keep(unique(), 2)
        wanted.close()
        async with staged(tmp_path, unique()) as stage:
            await stage.told(Cluster(ports=2, address="10.0.0.7", first=first))
            assert stage.sent[0].first == first
        async with staged(tmp_path, unique()) as stage:
            await stage.told(Cluster(ports=2, address="10.0.0.9", first=first))
            assert stage.sent[0].first != first
        async with staged(tmp_path, unique()) as stage:
            await stage.told(Cluster(ports=2, address="10.0.0.7", first=first))
            assert stage.sent[0].first == first, "an agent that has gone has given its ports back"

    play(story())


def test_without_a_free_port_workers_start_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """People are told once; nobody is told a port that is not there."""

    def none(self: Ports, name: str, count: int, again: int = 0) -> int:
        raise OSError("no 2 ports in a row are free")

    monkeypatch.setattr(Ports, "keep", none)

    async def story() -> None:
        async with staged(tmp_path, unique()) as stage:
            for version in (2, 3):
                told = await stage.told(Cluster(ports=2, version=version, peers='{"trainer":{}}'))
                assert [list(one) for one in told] == [["DLROVER_PEERS"]] * 2
            assert stage.sent == []
            (said,) = stage.said
            assert said.startswith(
                "others cannot call the workers of rollout-0-0: no 2 ports in a row are free; free some"
            )

    play(story())


def test_addresses_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    """The workers keep what they have."""

    async def story() -> None:
        async with staged(tmp_path, unique()) as stage:
            await stage.told(Cluster(version=2, peers='{"trainer":{}}'))
            await stage.told(Cluster(version=3, peers="{"))
            assert written(tmp_path)["version"] == 2
            stage.duty.file.open(str(tmp_path / "nowhere"))
            await stage.told(Cluster(version=4, peers='{"trainer":{}}'))
        assert [one.partition(":")[0] for one in stage.said] == [
            f"workers are not told the addresses of version {version}" for version in (3, 4)
        ]

    play(story())


def test_workers_that_start_wait_for_what_was_ordered_and_no_longer_than_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs holds up no start for ever."""
    monkeypatch.setattr(addresses, "READY_S", 0.01)
    hangs = threading.Event()

    def write(self: PeersFile, version: int, groups: Places) -> None:
        assert hangs.wait(60.0)

    monkeypatch.setattr(PeersFile, "write", write)

    async def story() -> None:
        async with staged(tmp_path, unique()) as stage:
            told = await stage.told(Cluster(version=2, peers="{}"), 1)
            assert [list(one) for one in told] == [["DLROVER_PEERS"]], "they may wait for it"
            hangs.set()

    try:
        play(story())
    finally:
        hangs.set()


def test_a_file_that_was_removed_is_written_again(tmp_path: Path) -> None:
    """What there is nothing to say of is not."""
    file = PeersFile()
    file.open(str(tmp_path))
    assert not file.restore()
    file.write(2, {"trainer": {}})
    assert not file.restore()
    (tmp_path / "peers.json").unlink()
    assert file.restore()
    assert written(tmp_path)["version"] == 2


def test_a_file_that_is_being_written_is_not_taken_for_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would write it at once, and one of them would find its half gone; people would be told of a cleaner."""
    file, really = PeersFile(), PeersFile._put
    file.open(str(tmp_path))
    restored: list[bool] = []

    def put(self: PeersFile, text: str) -> None:
        restored.append(file.restore())
        really(self, text)

    monkeypatch.setattr(PeersFile, "_put", put)
    file.write(2, {"trainer": {}})
    (tmp_path / "peers.json").unlink()
    file.write(3, {"trainer": {}})
    assert restored == [False, False]
    assert written(tmp_path)["version"] == 3
