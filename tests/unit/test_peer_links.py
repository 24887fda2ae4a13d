"""Links between savers that break, lie or hang: a transfer is whole or not at all, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from saver_nodes import IDLE_S, OURS, Between, Home, Node, fetched, opened, same, until
from saver_nodes import node as node  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.checkpoint import peer_door
from dlrover_adapters.checkpoint.peer_line import FRAME_BYTES_MAX, Line, Pace, dial
from dlrover_adapters.checkpoint.peers import (
    PeerFailed,
    PeerRefused,
    fetch,
    send,
)
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_core.checkpoint.arena import BLOCK_BYTES, ArenaBroken, Control


def test_overwritten_while_it_is_sent(node: Callable[..., Node]) -> None:
    """A slot that moves on under the sender is no copy of anything; the older copy stays."""
    home, partner = Home(), node()
    send(partner.address, home.save(1), OURS, generation=1)
    view = home.save(2)

    class Meanwhile(Pace):
        def wait(self, size: int) -> None:
            home.control.begin(0)

    with pytest.raises(PeerFailed, match="overwritten"):
        send(partner.address, view, OURS, generation=1, pace=Meanwhile(1e12))
    (copy,) = partner.made
    until(lambda: any("overwritten" in one for one in partner.complaints))
    assert [stamp.step for _, stamp in Control(mmap.mmap(copy.fd, 0)).stamps()] == [1]


def test_damaged_before_it_is_sent(node: Callable[..., Node]) -> None:
    """What the saver hashed at publication is what must arrive: a byte that changed in memory since is caught."""
    home, peer = Home(), node()
    view = home.save(1)
    wanted = peer.has(view)
    home.memory[home.sizes.data_at(0) + 17] ^= 1
    with pytest.raises(PeerFailed, match="block 0 was damaged"):
        fetched(peer, wanted)


def flipped(at: int) -> Callable[[bytearray, int], bytes | None]:
    """A change of one bit."""

    def change(piece: bytearray, passed: int) -> bytes:
        if passed <= at < passed + len(piece):
            piece[at - passed] ^= 0x10
        return piece

    return change


@pytest.mark.parametrize("at", [3, 20, 60, 75, 95, 130, 300, 5_000, 1_000_000, BLOCK_BYTES + 1_000])
def test_flipped_on_the_way(node: Callable[..., Node], at: int) -> None:
    """One bit flipped anywhere on the line, greeting and frames too: nothing is kept."""
    peer = node()
    wanted = peer.has(Home().save(1))
    with Between(peer.address, flipped(at)) as between, pytest.raises(PeerFailed):
        fetch(between.address, wanted, OURS, generation=1, idle_s=1.0)


@pytest.mark.parametrize("at", [0, 50, 100, 1_000, 5_000_000])
def test_cut_on_the_way(node: Callable[..., Node], at: int) -> None:
    """A connection that ends in the middle leaves nothing."""
    peer = node()
    wanted = peer.has(Home().save(1))
    cut = Between(peer.address, lambda piece, passed: None if passed + len(piece) > at else piece)
    with cut, pytest.raises(PeerFailed):
        fetch(cut.address, wanted, OURS, generation=1, idle_s=1.0)


def test_cut_once(node: Callable[..., Node]) -> None:
    """A connection that ends in the middle is made once more."""
    peer, home = node(), Home()
    view = home.save(1)
    wanted, cuts = peer.has(view), [None]

    def change(piece: bytearray, passed: int) -> bytes | None:
        return cuts.pop() if cuts and passed > 100_000 else piece

    with Between(peer.address, change) as between:
        assert same(view, opened(fetch(between.address, wanted, OURS, generation=1).fd))
    assert not cuts


def test_memory_is_found_before_bytes_come(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long whoever asks takes to find memory, nothing is sent meanwhile, and nobody calls it silent."""
    sent = threading.Event()
    wait = Pace.wait
    monkeypatch.setattr(Pace, "wait", lambda self, size: (sent.set(), wait(self, size))[1])
    peer = node(idle_s=0.1)
    view = Home().save(1)
    early: list[bool] = []

    def allow(_size: int) -> str:
        early.append(sent.wait(0.3))
        return ""

    assert same(view, fetched(peer, peer.has(view), allow=allow))
    assert early == [False]
    assert sent.is_set()
    assert peer.complaints == []


def test_the_sender_dies(node: Callable[..., Node]) -> None:
    """A copy that stops coming is not there, the older one is, and the next one is taken."""
    home, partner = Home(), node()
    send(partner.address, home.save(1), OURS, generation=1)

    class Dies(Pace):
        def wait(self, size: int) -> None:
            raise PeerFailed("killed")

    with pytest.raises(PeerFailed, match="killed"):
        send(partner.address, home.save(2), OURS, generation=1, pace=Dies(1))
    until(lambda: len(partner.complaints) == 1)
    (copy,) = partner.made
    assert [stamp.step for _, stamp in Control(mmap.mmap(copy.fd, 0)).stamps()] == [1]
    send(partner.address, home.save(3), OURS, generation=1)
    assert sorted(stamp.step for _, stamp in Control(mmap.mmap(copy.fd, 0)).stamps()) == [1, 3]


def test_no_more_threads(node: Callable[..., Node], refused: dict[str, int]) -> None:
    """Where the system has no thread for a connection it is closed, and the next one is served: the server goes on listening."""
    home, peer = Home(), node()
    view = home.save(120)
    wanted = peer.has(view)
    refused["peer"] = 1
    with contextlib.suppress(PeerFailed):  # a reader may try twice by itself
        fetched(peer, wanted)
    assert same(view, fetched(peer, wanted))


def test_oversized_frame(node: Callable[..., Node]) -> None:
    """A frame larger than any of ours ends the connection before memory is taken for it."""
    peer = node()
    line = dial(peer.address, OURS)
    line.send((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(16))
    until(lambda: any("at most" in one for one in peer.complaints))
    line.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "put", "state": None},
        {"op": "put", "state": [0] * 8},
        {"op": "put", "state": [0, 1, 0, 0, 0, 0, 0, 1 << 60, [1, 1, 1, 0, 0, 0]]},
        {"op": "put", "state": [0, 1, 0, 0, 0, 0, 8, 8, [1, 1, 1, 9, 0, 0]]},
        {"op": "put", "state": [0, 1, 0, 0, 0, 0, 8, -8, [1, 1, 1, 8, 0, 0]]},
        {"op": "put", "state": [0, 1, 0, "0", 0, 0, 8, 8, [1, 1, 1, 8, 0, 0]]},
        {"op": "get", "wanted": [1, 2, 3]},
        {"op": "get", "wanted": {}},
        {"op": "else"},
    ],
)
def test_nonsense(node: Callable[..., Node], asked: dict[str, Any]) -> None:
    """Who knows the token and talks nonsense gets an error, and the server goes on."""
    peer = node()
    line = dial(peer.address, OURS)
    line.say({"run": "run-1", "generation": 1, **asked})
    with pytest.raises(PeerRefused):
        line.hear()
    line.close()
    assert fetched(peer, peer.has(Home().save(1)))


def test_head(node: Callable[..., Node]) -> None:
    """Table and objects alone come without the data, of which nobody may think that they are there."""
    home, peer = Home(), node()
    view = home.save(7)
    wanted = peer.has(view)
    got = fetch(peer.address, wanted, OURS, generation=1, whole=False)
    assert got.size == view.control.table_used + len(view.blob)
    memory = mmap.mmap(got.fd, 0)
    os.close(got.fd)
    found = SlotView(memory, 0)
    assert found.table == view.table
    assert found.objects() == view.objects() == {"step": b"7"}
    assert found.stamp[:2] == (1, 7)
    with pytest.raises(ArenaBroken, match="lies outside of the data"):
        found.raw(found.table.items[0])
    send(peer.address, home.save(8), OURS, generation=1)
    got = fetch(peer.address, wanted._replace(step=8), OURS, generation=1, whole=False)  # of a copy, too
    os.close(got.fd)


def test_silence_is_bounded(node: Callable[..., Node]) -> None:
    """A peer that takes nothing more is left after a while; so is one that never greets."""
    peer = node(idle_s=0.2)
    wanted = peer.has(Home().save(1))
    line = dial(peer.address, OURS)
    line.say({"op": "get", "run": "run-1", "generation": 1, "wanted": list(wanted)})
    until(lambda: any("silent" in one for one in peer.complaints))
    line.close()


def test_a_peer_that_trickles_is_left() -> None:
    """Bytes now and then do not keep a transfer alive: it has a least speed on the whole."""
    near, far = socket.socketpair()
    line = Line(near, b"key", serves=False, idle_s=0.05)
    line.allow(0)
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.01):
                far.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(PeerFailed, match=r"too slow|silent"):
        line.receive_into(bytearray(1_000_000))
    stop.set()
    thread.join(IDLE_S)
    line.close()
    far.close()


def test_connections_are_bounded(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than so many connections of savers are turned away in words, and the first one to end makes room."""
    monkeypatch.setattr(peer_door, "CONNECTIONS_MAX", 3)
    peer = node()
    wanted = peer.has(Home().save(1))
    lines = [dial(peer.address, OURS) for _ in range(3)]
    with pytest.raises(PeerRefused, match="3 other savers are connected; try again later"):
        fetched(peer, wanted)
    for line in lines:
        line.close()
    until(lambda: not len(peer.server._door))
    assert fetched(peer, wanted)


def test_another_version_is_named() -> None:
    """A saver of another release is refused at its greeting, by the numbers of both protocols."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def older() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(b"DLRPEER2" + bytes(32))
                sock.recv(1024)

        thread = threading.Thread(target=older)
        thread.start()
        with pytest.raises(
            PeerFailed, match=r"of another version: it speaks protocol 2, this one 3; install one release"
        ):
            dial(f"127.0.0.1:{listener.getsockname()[1]}", OURS)
        thread.join(IDLE_S)


def test_stop_ends_transfers(node: Callable[..., Node]) -> None:
    """A server that stops waits for nobody, however slow its pace."""
    peer = node(pace_bytes_s=1000.0)
    wanted = peer.has(Home().save(1))
    ended: list[Exception] = []

    def fetching() -> None:
        try:
            fetch(peer.address, wanted, OURS, generation=1)
        except PeerFailed as error:
            ended.append(error)

    thread = threading.Thread(target=fetching)
    thread.start()
    until(lambda: bool(len(peer.server._door)))
    peer.server.stop()
    thread.join(IDLE_S)
    assert len(ended) == 1


def test_pace() -> None:
    """Bytes wait for those before them at the speed that was chosen."""
    waited: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    pace = Pace(1000.0, Stopped())
    for _ in range(3):
        pace.wait(500)
    assert waited == pytest.approx([0.5, 1.0], abs=0.2)
