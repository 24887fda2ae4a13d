"""States from saver to saver: whole or not at all, and only among those that know the token."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.checkpoint import peer_door, peer_line, peer_state
from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.hashing import digests as digests_of
from dlrover_adapters.checkpoint.peer_door import STRANGERS_MAX
from dlrover_adapters.checkpoint.peer_line import FRAME_BYTES_MAX, GREETING_S, MAGIC, Line, Pace, dial
from dlrover_adapters.checkpoint.peers import (
    Copy,
    Credentials,
    PeerFailed,
    PeerRefused,
    Server,
    StrangerRefused,
    Tls,
    Wanted,
    fetch,
    send,
)
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken, Control, Geometry, Stamp

OURS = Credentials("run-1", b"the token of this job")
LAYOUT = 7
DATA_BYTES = BLOCK_BYTES + 12_345
IDLE_S = 5.0


class Home:
    """An arena of one rank, as its node has it."""

    def __init__(
        self,
        rank: int = 0,
        *,
        data_bytes: int = DATA_BYTES,
        layout: int = LAYOUT,
        world: int = 2,
        own: int = 0,
        live: int = 0,
        blob_room: int = 4096,
    ) -> None:
        """``own``: so many of its bytes are a tensor that only this rank has; ``live``: and so many one that others write."""
        rest = data_bytes - own
        items = (
            Item("w", "uint8", (rest,), (0,), (rest,), 0, rest),
            *([Item(f"rank.{rank}.extra.t", "uint8", (own,), (0,), (own,), rest, own)] if own else []),
            *([Item("buffer", "uint8", (live,), (0,), (live,), 64, live, live=True)] if live else []),
        )
        table = Table(layout, world, rank, ((0,), (1,)), items, own=(0, 1)).packed()
        self.sizes = Geometry(2, len(table), blob_room, data_bytes)
        self.memory = mmap.mmap(-1, self.sizes.total_bytes)
        self.memory[PAGE : PAGE + len(table)] = table
        self.control = Control(self.memory, self.sizes)
        self.control.make(
            layout=layout, rank=rank, world=world, local_rank=0, table_bytes=len(table), table_digest=digest(table)
        )
        self.sequence = 0

    def save(self, step: int, *, generation: int = 1, slot: int = 0, hashed: bool = True) -> SlotView:
        """A state of its own for each step; the view of its slot."""
        self.sequence += 1
        self.control.begin(slot)
        at, size = self.sizes.data_at(slot), self.sizes.data_bytes
        self.memory[at : at + size] = (bytes([step % 251, generation]) + os.urandom(62)) * (size // 64) + bytes(
            size % 64
        )
        blob = pack_blob({"step": b"%d" % step})
        at = self.sizes.blob_at(slot)
        self.memory[at : at + len(blob)] = blob
        self.control.publish(slot, Stamp(generation, step, self.sequence, len(blob), digest(blob)))
        view = SlotView(self.memory, slot)
        if hashed:
            for number, one in enumerate(digests_of(view.data)):
                at = self.sizes.digests_at(slot) + 8 * number
                self.memory[at : at + 8] = one.to_bytes(8, "little")
            self.control.note_hashed(slot, self.sequence)
        return view


class Node:
    """A server, what it has at home, and what it told."""

    def __init__(self, credentials: Credentials = OURS, **more: Any) -> None:
        self.home: dict[tuple[int, int, int, int], SlotView] = {}
        self.made: list[Copy] = []
        self.gone: list[Copy] = []
        self.complaints: list[str] = []
        self.at = 0
        self.room = ""
        self.server = Server(
            credentials,
            lookup=self.lookup,
            allow=lambda _size: self.room,
            made=self.made.append,
            gone=self.gone.append,
            generation=lambda: self.at,
            refused=lambda _address, why: self.complaints.append(why),
            **{"idle_s": IDLE_S, **more},
        )
        self.address = f"127.0.0.1:{self.server.start('127.0.0.1')}"

    @contextlib.contextmanager
    def lookup(self, wanted: Wanted) -> Iterator[SlotView | None]:
        """The server's."""
        yield self.home.get(tuple(wanted))

    def has(self, view: SlotView) -> Wanted:
        """From now on; what to ask for."""
        words = view.control
        wanted = Wanted(words.rank, view.stamp.generation, view.stamp.step, words.layout)
        self.home[tuple(wanted)] = view
        return wanted


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    """Nodes that are stopped in the end."""
    made: list[Node] = []

    def one(*args: Any, **more: Any) -> Node:
        made.append(Node(*args, **more))
        return made[-1]

    yield one
    for each in made:
        each.server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name in {"peers", "peer"} and thread.is_alive()]


def opened(fd: int, slot: int = 0, *, close: bool = True) -> SlotView:
    """What lies in received memory, every byte compared."""
    memory = mmap.mmap(fd, 0)
    if close:
        os.close(fd)
    view = SlotView(memory, slot)
    assert view.hashed
    assert view.verify()
    return view


def fetched(node: Node, wanted: Wanted, credentials: Credentials = OURS, **more: Any) -> SlotView:
    """What comes from a node."""
    return opened(fetch(node.address, wanted, credentials, generation=1, **more).fd)


def same(one: SlotView, other: SlotView) -> bool:
    """Bit for bit."""
    return bytes(one.data) == bytes(other.data) and bytes(one.blob) == bytes(other.blob) and one.table == other.table


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("data_bytes", [0, 1, DATA_BYTES])
def test_fetch(node: Callable[..., Node], data_bytes: int, hashed: bool) -> None:
    """What a node has is fetched bit for bit, hashed by its saver already or not."""
    home, peer = Home(data_bytes=data_bytes), node()
    view = home.save(120, hashed=hashed)
    found = fetched(peer, peer.has(view))
    assert same(view, found)
    assert found.stamp[:2] == (1, 120)


def test_what_is_fetched_goes_into_fresh_memory_without_mapping_it(node: Callable[..., Node]) -> None:
    """A page fault for every 4 KiB, and clearing each page first, took a third of the time that a lost node waits."""
    data_bytes = 2 * BLOCK_BYTES + 1
    home, peer = Home(data_bytes=data_bytes), node()
    wanted = peer.has(home.save(3))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    came = fetch(peer.address, wanted, OURS, generation=1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < data_bytes // PAGE // 4
    view = opened(came.fd)
    view.verify()
    assert view.hashed


def test_no_memory_in_the_middle_is_told(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come with the data, so they may run out then."""
    peer = node()
    wanted = peer.has(Home().save(3))

    def full(_fd: int, _content: object, _at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(PeerRefused, match=r"no memory for [\d,]+ bytes: No space left"):
        fetch(peer.address, wanted, OURS, generation=1)


def test_send_and_fetch_back(node: Callable[..., Node]) -> None:
    """A copy left with a partner is memory that the agent is told of, and comes back as it was when the node is gone."""
    home, partner = Home(1), node()
    view = home.save(7)
    sent = send(partner.address, view, OURS, generation=1)
    assert not sent.had
    assert sent.size > DATA_BYTES
    (copy,) = partner.made
    assert (copy.rank, copy.world, copy.layout) == (1, 2, LAYOUT)
    assert same(view, opened(copy.fd, close=False))
    assert same(view, fetched(partner, Wanted(1, 1, 7, LAYOUT)))


def test_newer_replaces_older_in_turn(node: Callable[..., Node]) -> None:
    """Two slots, taken in turn: the one before the newest stays, memory is made once, and what was there is not sent again."""
    home, partner = Home(), node()
    for step in (10, 20, 30):
        view = home.save(step)
        send(partner.address, view, OURS, generation=1)
    assert send(partner.address, view, OURS, generation=1).had
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [20, 30]
    assert send(partner.address, home.save(10), OURS, generation=1).there == {(1, 10), (1, 30)}


def test_an_older_step_is_taken_and_never_replaces_the_newest(node: Callable[..., Node]) -> None:
    """The others may have left the newest out. Of another world's workers nothing older is taken."""
    home, partner = Home(own=4096), node()
    for step in (10, 30):
        sent = send(partner.address, home.save(step), OURS, generation=1, light=True)
    assert sent.there == {(1, 10), (1, 30)}
    older = home.save(20)
    assert not send(partner.address, older, OURS, generation=1, light=True).had
    again = send(partner.address, older, OURS, generation=1, light=True)
    assert again.had
    assert again.there == {(1, 10), (1, 20), (1, 30)}
    send(partner.address, home.save(2, generation=2), OURS, generation=2, light=True)
    with pytest.raises(PeerRefused, match="older than what is here"):
        send(partner.address, home.save(40), OURS, generation=2, light=True)


@pytest.mark.parametrize("light", [False, True])
def test_a_step_that_was_saved_again_takes_the_place_of_its_first_copy(node: Callable[..., Node], light: bool) -> None:
    """The partner tells the two apart by their stamps, has one of them at a time, and keeps the step before."""
    home, partner = Home(own=4096), node()
    for step in (10, 20):
        send(partner.address, home.save(step), OURS, generation=1, light=light)
    view = home.save(20)
    assert not send(partner.address, view, OURS, generation=1, light=light).had
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [10, 20]
    got = fetched(partner, Wanted(0, 1, 20, LAYOUT))
    assert got.stamp.same(view.stamp)
    assert same(view, got) or light
    name = "rank.0.extra.t"
    mine, theirs = (next(item for item in one.table.items if item.name == name) for one in (view, got))
    assert bytes(view.raw(mine)) == bytes(got.raw(theirs))
    assert send(partner.address, view, OURS, generation=1, light=light).had


def test_a_first_copy_that_is_being_read_is_not_overwritten(node: Callable[..., Node]) -> None:
    """The second one is refused until then; no slot ever holds a mixture."""
    home, partner = Home(), node()
    first = home.save(20, slot=0)
    send(partner.address, first, OURS, generation=1)
    second = home.save(20, slot=1)
    with partner.server.copied(Wanted(0, 1, 20, LAYOUT)) as read:
        assert read is not None
        with pytest.raises(PeerRefused, match="being read"):
            send(partner.address, second, OURS, generation=1)
        assert same(first, read)
    send(partner.address, second, OURS, generation=1)
    assert same(second, fetched(partner, Wanted(0, 1, 20, LAYOUT)))


def test_a_second_copy_that_needs_other_memory_leaves_no_first_one(node: Callable[..., Node]) -> None:
    """Where the step's objects have outgrown their room, the first copy lies in other memory, and is let go."""
    home, partner = Home(), node()
    send(partner.address, home.save(20), OURS, generation=1)
    grown = Home(blob_room=8192)
    grown.sequence = home.sequence
    view = grown.save(20)
    assert not send(partner.address, view, OURS, generation=1).had
    assert len(partner.made) == 2
    assert not list(Control(mmap.mmap(partner.made[0].fd, 0)).stamps())
    assert same(view, fetched(partner, Wanted(0, 1, 20, LAYOUT)))


@pytest.mark.parametrize(("own", "live"), [(0, 0), (4096, 0), (4000, 33), (1000, BLOCK_BYTES + 100)])
def test_light(node: Callable[..., Node], own: int, live: int) -> None:
    """A light copy leaves out the tensors that are the same on every node, and says so in its table."""
    home, partner = Home(1, own=own, live=live), node()
    view = home.save(7)
    assert send(partner.address, view, OURS, generation=1, light=True).size < 16_384 + live
    (copy,) = partner.made
    assert copy.light
    got = fetched(partner, Wanted(1, 1, 7, LAYOUT))
    assert bytes(got.blob) == bytes(view.blob)
    got.verify()
    assert [one.name for one in got.table.elsewhere] == ["w"]
    assert [bytes(got.raw(one)) for one in got.table.items] == [bytes(view.raw(one)) for one in view.table.items[1:]]


def test_light_copies_of_many_steps(node: Callable[..., Node]) -> None:
    """Without tensors a copy is small, so the last steps are kept; a whole one takes their place."""
    home, partner = Home(1), node()
    for step in range(1, 13):
        send(partner.address, home.save(step), OURS, generation=1, light=True)
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == list(range(5, 13))
    for step in (13, 14):
        send(partner.address, home.save(step), OURS, generation=1)
    assert [one.light for one in partner.server.copies()] == [False]


def test_what_is_to_be_kept_is_not_overwritten(node: Callable[..., Node]) -> None:
    """A step that all nodes have copied stays although a newer one was begun and given up, until the sender says otherwise."""
    home, partner = Home(), node()
    for step in (10, 20, 30):
        send(partner.address, home.save(step), OURS, generation=1, keep=(1, 10))
    (copy,) = partner.made
    control = Control(mmap.mmap(copy.fd, 0))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [10, 30]
    send(partner.address, home.save(40), OURS, generation=1, keep=(1, 30))
    assert sorted(stamp.step for _, stamp in control.stamps()) == [30, 40]


def test_another_layout_takes_new_memory(node: Callable[..., Node]) -> None:
    """After a change of the world the old copies stay until two newer ones are there."""
    partner = node()
    send(partner.address, Home().save(10), OURS, generation=1)
    after = Home(layout=8, world=4)
    send(partner.address, after.save(11, generation=2), OURS, generation=2)
    assert [copy.layout for copy in partner.server.copies()] == [LAYOUT, 8]
    send(partner.address, after.save(12, generation=2), OURS, generation=2)
    assert [copy.layout for copy in partner.server.copies()] == [8]
    assert [copy.layout for copy in partner.gone] == [LAYOUT]


def test_forget(node: Callable[..., Node]) -> None:
    """The agent can let copies go."""
    partner = node()
    send(partner.address, Home().save(10), OURS, generation=1)
    partner.server.forget(lambda copy: copy.rank == 0)
    assert not partner.server.copies()
    with pytest.raises(PeerRefused, match="has no step 10"):
        fetched(partner, Wanted(0, 1, 10, LAYOUT))


def test_adopted(node: Callable[..., Node]) -> None:
    """A saver that took over from one that died serves its copies, and goes on with them; what is no arena is left out."""
    home, dead, partner = Home(), node(), node()
    view = home.save(10)
    send(dead.address, view, OURS, generation=1)
    (copy,) = dead.made
    fd = os.dup(copy.fd)
    dead.server.stop()
    none = os.memfd_create("none")
    os.ftruncate(none, PAGE)
    partner.server.adopt([copy._replace(fd=fd), copy._replace(fd=none)])
    os.close(fd)
    os.close(none)
    assert same(view, fetched(partner, Wanted(0, 1, 10, LAYOUT)))
    send(partner.address, home.save(11), OURS, generation=1)
    assert not partner.made
    with partner.server.copied(Wanted(0, 1, 11, LAYOUT)) as found:
        assert found is not None


def test_wrong_token(node: Callable[..., Node]) -> None:
    """Who does not know the token gets nothing, and is told so; the token is never on the line."""
    peer = node()
    wanted = peer.has(Home().save(1))
    with pytest.raises(StrangerRefused, match="does not know this job's token"):
        fetched(peer, wanted, Credentials("run-1", b"another token"))


def test_a_false_server_is_found_out() -> None:
    """A listener that does not know the token either cannot pretend: it gets a challenge's answer and nothing else."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(MAGIC + bytes(32))
                heard.append(sock.recv(1024))
                sock.sendall(bytes(32))
                heard.append(sock.recv(1024))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(StrangerRefused):
            dial(f"127.0.0.1:{listener.getsockname()[1]}", OURS)
        thread.join(IDLE_S)
    assert OURS.token not in b"".join(heard)
    assert heard[1] == b""


def test_another_run_and_an_older_generation(node: Callable[..., Node]) -> None:
    """A transfer is fenced by the run and by the generation that it is for."""
    peer = node()
    wanted = peer.has(Home().save(1))
    with pytest.raises(PeerRefused, match="another run"):
        fetched(peer, wanted, OURS._replace(run="run-2"))
    peer.at = 5
    with pytest.raises(PeerRefused, match="generation 1 is over, this node is at 5"):
        fetched(peer, wanted)
    with pytest.raises(PeerRefused, match="generation 4 is over"):
        send(peer.address, Home().save(1), OURS, generation=4)
    assert not peer.server.copies()


def test_no_room(node: Callable[..., Node]) -> None:
    """Where the agent says that there is no memory, nothing is taken, and the sender learns why."""
    partner = node()
    partner.room = "this node has 1 GiB for checkpoints; raise its limit"
    with pytest.raises(PeerRefused, match="raise its limit"):
        send(partner.address, Home().save(1), OURS, generation=1)
    partner.room = ""
    wanted = partner.has(Home().save(1))
    with pytest.raises(PeerRefused, match="full here"):
        fetched(partner, wanted, allow=lambda _size: "full here")


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


def until(there: Callable[[], bool]) -> None:
    """Until another thread has got there."""
    waiting = threading.Event()
    for _ in range(2000):
        if there():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not happen")


def test_damaged_before_it_is_sent(node: Callable[..., Node]) -> None:
    """What the saver hashed at publication is what must arrive: a byte that changed in memory since is caught."""
    home, peer = Home(), node()
    view = home.save(1)
    wanted = peer.has(view)
    home.memory[home.sizes.data_at(0) + 17] ^= 1
    with pytest.raises(PeerFailed, match="block 0 was damaged"):
        fetched(peer, wanted)


class Between:
    """A proxy that changes what passes."""

    def __init__(
        self,
        address: str,
        change: Callable[[bytearray, int], bytes | None],
        back: Callable[[bytearray, int], bytes | None] = lambda piece, _: piece,
    ) -> None:
        """``change``: a piece from the server, and how much passed before; None cuts the line. ``back``: one to the server."""
        host, _, port = address.rpartition(":")
        self.to, self.change, self.back = (host, int(port)), change, back
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.run)]
        self.threads[0].start()

    def run(self) -> None:
        """One connection after the other."""
        with contextlib.suppress(OSError):
            while True:
                self.one(self.listener.accept()[0])

    def one(self, dialled: socket.socket) -> None:
        """A connection, to its end."""
        with dialled as near, socket.create_connection(self.to) as far:
            back = threading.Thread(target=self.copy, args=(near, far, self.back))
            back.start()
            self.copy(far, near, self.change)
            back.join(IDLE_S)

    @staticmethod
    def copy(source: socket.socket, sink: socket.socket, change: Callable[[bytearray, int], bytes | None]) -> None:
        """Until either end."""
        passed = 0
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(1 << 16)):
                changed = change(piece, passed)
                if changed is None:
                    break
                passed += len(piece)
                sink.sendall(changed)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Between:  # noqa: PYI034  # not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self.listener.close()
        self.threads[0].join(IDLE_S)


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


class Forger:
    """Somebody on the way who replaces the objects of a state by others of the same XXH3, which is no cryptographic digest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, view: SlotView) -> None:
        self.true = bytes(view.blob)
        self.false = self.true.replace(b"step", b"EVIL")
        assert len(self.true) == len(self.false) != 0
        real = peer_state.digest
        # Finding such bytes takes no computing to speak of; here the digest is made to overlook these.
        monkeypatch.setattr(
            peer_state, "digest", lambda raw: real(self.true if bytes(raw) == self.false else bytes(raw))
        )

    def __call__(self, piece: bytearray, _passed: int) -> bytes:
        """As `Between` wants it."""
        return bytes(piece).replace(self.true, self.false)


@pytest.mark.parametrize("whole", [True, False])
def test_forged_objects_are_not_fetched(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Objects are unpickled by workers: without TLS, too, nobody on the way can put others in their place."""
    peer = node()
    view = Home().save(1)
    wanted = peer.has(view)
    with Between(peer.address, Forger(monkeypatch, view)) as between:
        with pytest.raises(PeerFailed, match="step 1 of rank 0: its table or its objects were changed on the way"):
            fetch(between.address, wanted, OURS, generation=1, whole=whole)
        assert fetch(peer.address, wanted, OURS, generation=1, whole=whole)


def test_forged_objects_are_no_copy(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose objects somebody changed on the way is not published: nobody ever reads it."""
    partner, home = node(), Home()
    send(partner.address, home.save(1), OURS, generation=1)
    view = home.save(2)
    changed = "step 2 of rank 0: its table or its objects were changed on the way"
    between = Between(partner.address, lambda piece, _: piece, Forger(monkeypatch, view))
    with between, pytest.raises(PeerRefused, match=changed):
        send(between.address, view, OURS, generation=1)
    (copy,) = partner.made
    assert [stamp.step for _, stamp in Control(mmap.mmap(copy.fd, 0)).stamps()] == [1]


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


@pytest.mark.parametrize("encrypted", [False, True])
def test_strangers_keep_nobody_out(node: Callable[..., Node], tls: dict[str, Tls], encrypted: bool) -> None:
    """1,000 connections that never greet, and more all the time: copies and fetches go through; the oldest strangers are left."""
    credentials = OURS._replace(tls=tls["ours"]) if encrypted else OURS
    peer, home = node(credentials), Home(1)
    host, _, port = peer.address.rpartition(":")
    wanted, stop = peer.has(Home().save(1)), threading.Event()

    def stranger() -> socket.socket:
        return socket.create_connection((host, int(port)), timeout=IDLE_S)

    strangers = [stranger() for _ in range(1000)]

    def more() -> None:
        while not stop.wait(0.01):
            strangers.append(stranger())

    thread = threading.Thread(target=more)
    thread.start()
    try:
        for step in range(1, 4):
            began = time.monotonic()
            assert send(peer.address, home.save(step), credentials, generation=1).size
            assert fetched(peer, wanted, credentials)
            assert time.monotonic() - began < GREETING_S  # no time-out of a stranger was waited for
    finally:
        stop.set()
        thread.join()
    until(lambda: len(peer.server._door) <= STRANGERS_MAX)
    strangers[0].settimeout(IDLE_S)
    with contextlib.suppress(ConnectionResetError):
        while strangers[0].recv(1024):  # what there is of a greeting, and then the end
            pass
    for one in strangers:
        one.close()


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


# ---- TLS


def _certificates(folder: Path) -> dict[str, Tls]:
    """Two CAs with a node's certificate each."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make certificates")

    def openssl(*line: str) -> None:
        subprocess.run(["/usr/bin/env", "openssl", *line], check=True, capture_output=True, cwd=folder)

    made = {}
    for name in ("ours", "theirs"):
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            "req", "-x509", *curve, "-subj", f"/CN={name}-ca", "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem",
            "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key",
            "-CAcreateserial", "-days", "2", "-out", f"{name}.pem",
        )  # fmt: skip
        made[name] = Tls(*(str(folder / f"{name}{end}") for end in ("-ca.pem", ".pem", ".key")))
    return made


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    """Certificates of this job's CA, and of another one."""
    return _certificates(tmp_path_factory.mktemp("certificates"))


def test_tls(node: Callable[..., Node], tls: dict[str, Tls]) -> None:
    """With certificates everything is encrypted: a state passes, and its bytes are not to be seen on the way."""
    sealed = OURS._replace(tls=tls["ours"])
    peer, home = node(sealed), Home()
    view = home.save(1)
    seen = bytearray()

    def look(piece: bytearray, passed: int) -> bytes:
        seen.extend(piece)
        return piece

    wanted = peer.has(view)
    with Between(peer.address, look) as between:
        found = opened(fetch(between.address, wanted, sealed, generation=1).fd)
    assert same(view, found)
    assert bytes(view.data[:64]) not in seen
    assert MAGIC not in seen
    assert not send(peer.address, Home(1).save(2), sealed, generation=1).had


def test_tls_strangers(node: Callable[..., Node], tls: dict[str, Tls], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another CA's certificate, none, and no TLS at the other end: nothing passes, with the right token too."""
    monkeypatch.setattr(peer_line, "GREETING_S", 0.5)  # both ends wait for the other one's first word
    sealed = OURS._replace(tls=tls["ours"])
    peer, plain = node(sealed), node()
    wanted = peer.has(Home().save(1))
    plain.has(Home().save(1))
    for credentials, address in (
        (OURS._replace(tls=tls["theirs"]), peer.address),
        (OURS._replace(tls=Tls(tls["ours"].ca, *tls["theirs"][1:])), peer.address),
        (OURS, peer.address),
        (sealed, plain.address),
    ):
        with pytest.raises(PeerFailed):
            fetch(address, wanted, credentials, generation=1, idle_s=1.0)


def test_tls_nobody_in_between(node: Callable[..., Node], tls: dict[str, Tls], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who relays the challenge with another certificate, of the right CA too, fails: the certificate is part of the proof."""
    sealed = OURS._replace(tls=tls["ours"])
    peer = node(sealed)
    wanted = peer.has(Home().save(1))
    monkeypatch.setattr(peer_line.Tls, "shown", lambda _self: b"another certificate")
    with pytest.raises(StrangerRefused, match="token"):
        fetch(peer.address, wanted, sealed, generation=1)
