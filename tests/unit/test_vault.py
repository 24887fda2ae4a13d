"""The vault: who gets which memory, what is refused, and that nobody who misbehaves harms anybody else. No process, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from dlrover_adapters.agent.checkpoints import budget
from dlrover_adapters.agent.checkpoints import vault as server
from dlrover_adapters.agent.checkpoints.arenas import Arena, Arenas, NoRoom, Owner, State
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.checkpoints.hashing import hash_newest
from dlrover_adapters.agent.checkpoints.ranks import Began
from dlrover_adapters.agent.checkpoints.site import Keeping
from dlrover_adapters.agent.checkpoints.slots import Slots
from dlrover_adapters.checkpoint.hashing import digest, digests
from dlrover_adapters.checkpoint.slotview import SlotGone, SlotView
from dlrover_adapters.checkpoint.table import Table
from dlrover_adapters.torch.checkpoint import vault as client
from dlrover_adapters.torch.checkpoint.flash import CUDA_LAG
from dlrover_adapters.torch.checkpoint.line import spare_slots
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken, Control, Geometry, Stamp
from dlrover_core.checkpoint.slots import LAG, slots_for
from dlrover_core.job.checkpoints import Keep
from dlrover_core.job.orders import Order
from dlrover_core.runtime.granted import Granted
from dlrover_core.runtime.launcher import WorkersLaunch

MIB = 1 << 20
GEOMETRY = Geometry(2, 1000, 100, 5000)
LAUNCH = WorkersLaunch("run", 3, 2, 2, 4, 1, 2, "h:1", 2, 3, node="n-0-1")


def machine(root: Path, *, available: int = 2**40, limit: int | None = None, used: int = 0, cache: int = 0) -> Path:
    """A root that says so much memory is left; in bytes."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    if limit is not None:
        group = root / "sys/fs/cgroup/pod"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"inactive_file {cache}\n")
    return root


def run(test: Callable[[], Any]) -> None:
    """On a loop of its own."""
    asyncio.run(asyncio.wait_for(test(), 20))


@contextlib.asynccontextmanager
async def opened(folder: Path, **memory: int) -> Any:
    """A vault of a node with ranks 2 and 3 of 4."""
    vault = server.Vault(str(folder), machine(folder / "root", **memory))
    vault.open()
    vault.begin(LAUNCH)
    try:
        yield vault
    finally:
        await vault.close()
        assert not os.path.lexists(vault.path)  # noqa: ASYNC240  # at once, and nothing waits for it


async def connected(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 2) -> client.Vault:
    """One of its ranks."""
    monkeypatch.setenv("DLROVER_AGENT_SOCKET", str(folder / "agent.sock"))
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank - 2), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    return await asyncio.to_thread(client.Vault.connect)


def descriptors() -> int:
    """How many are open here."""
    return len([*Path("/proc/self/fd").iterdir()])


def filled(fd: int, geometry: Geometry, owner: Owner, *, local_rank: int = 0) -> tuple[mmap.mmap, Control]:
    """An arena as its worker makes it."""
    memory = mmap.mmap(fd, geometry.total_bytes)
    control = Control(memory, geometry)
    table = Table(owner.layout, owner.world, owner.rank, ((owner.rank,),), ()).packed()
    memory[PAGE : PAGE + len(table)] = table
    control.make(
        layout=owner.layout,
        rank=owner.rank,
        world=owner.world,
        local_rank=local_rank,
        table_bytes=len(table),
        table_digest=digest(table),
    )
    return memory, control


# ---- the protocol


def test_a_rank_gets_its_memory_and_its_successor_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rank, world, layout and sizes: the same pages; anything else: other memory, and the old one stays."""

    async def test() -> None:
        async with opened(tmp_path) as vault:
            one = await connected(tmp_path, monkeypatch)
            told = one.told
            assert (told.generation, told.node, told.nodes, told.node_rank, told.run) == (3, "n-0-1", 2, 1, "run")
            assert (told.replica, told.committed, told.lenders, told.copies) == ("", -1, (), False)
            arena = await asyncio.to_thread(one.arena, 2**64 - 1, GEOMETRY)
            assert (arena.fresh, os.fstat(arena.fd).st_size) == (True, GEOMETRY.total_bytes)
            memory, control = filled(arena.fd, GEOMETRY, Owner(2, 4, 2**64 - 1))
            await asyncio.to_thread(one.ready, arena.id, [[0, 2], [1, 3]])
            control.publish(1, Stamp(3, 17, 1, 0, 0))
            vault.begin(LAUNCH._replace(generation=4))
            two = await connected(tmp_path, monkeypatch)
            again = await asyncio.to_thread(two.arena, 2**64 - 1, GEOMETRY)
            assert (again.id, again.fresh, os.fstat(again.fd).st_ino) == (arena.id, False, os.fstat(arena.fd).st_ino)
            other = await asyncio.to_thread(two.arena, 5, GEOMETRY)
            assert other.fresh
            found = await asyncio.to_thread(two.inventory)
            assert found.holdings == (client.Holding(arena.id, "memory", 2, 4, 3, 17, 2**64 - 1, 1),)
            borrowed = await asyncio.to_thread(two.borrow, arena.id)
            assert os.fstat(borrowed).st_ino == os.fstat(arena.fd).st_ino
            control.release()
            memory.close()
            for fd in (arena.fd, again.fd, other.fd, borrowed):
                os.close(fd)
            with pytest.raises(client.VaultRefused, match="generation 3 is over"):
                await asyncio.to_thread(one.arena, 1, GEOMETRY)
            one.close()
            two.close()

    run(test)


def test_strangers_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with other ranks (a launcher inside of a worker) is told whose agent this is; without a vault there is none."""

    async def test() -> None:
        async with opened(tmp_path):
            assert not client.Vault.here()
            monkeypatch.setenv("RANK", "x")
            with pytest.raises(client.VaultGone, match="is no rank"):
                await asyncio.to_thread(client.Vault.connect)
            with pytest.raises(
                client.VaultRefused, match=r"rank 5 .* is not one of this agent's workers: ranks 2 to 3 of 4"
            ):
                await connected(tmp_path, monkeypatch, rank=5)
            assert client.Vault.here()
        assert not client.Vault.here()

    run(test)


def test_a_question_that_makes_no_sense_ends_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, also where the answer would take its time: whoever asked would wait for it as long as it may take."""

    async def test() -> None:
        async with opened(tmp_path) as vault:
            one = await connected(tmp_path, monkeypatch)
            asking = asyncio.create_task(asyncio.to_thread(one.fetch, "10.0.0.1:1", 0, 1, -1, 0))
            with pytest.raises(client.VaultGone) as gone:
                await asyncio.wait_for(asyncio.shield(asking), 20.0)
            assert not isinstance(gone.value, client.VaultRefused)
            assert not vault._open
            one.close()

    run(test)


def test_what_is_told_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose agent does not listen goes on: what is told is dropped, and told again by the words in the arena."""

    async def test() -> None:
        async with opened(tmp_path):
            one = await connected(tmp_path, monkeypatch)
            for step in range(4_000):  # the loop does not run meanwhile, so nobody reads
                one.saved(1, 0, step, due=False)
            assert one.gone == ""
            assert (await asyncio.to_thread(one.inventory)).holdings == ()
            one.close()
            one.saved(1, 0, 1, due=False)

    run(test)


def test_whatever_a_rank_tells_is_heard_and_ends_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm among them: a packet that the agent does not know would cut the rank off from its memory."""

    async def test() -> None:
        async with opened(tmp_path) as vault:
            heard: list[str] = []
            last = asyncio.Event()

            def told(_: Any, body: dict[str, Any]) -> None:
                heard.append(body["op"])
                if body["op"] == "boundary":
                    last.set()

            vault.listener = SimpleNamespace(greeted=lambda _: None, greeting=server.Greeting, told=told)
            one = await connected(tmp_path, monkeypatch)
            one.saved(1, 0, 1, due=False)
            one.keeping(client.Keeping("", 1, 0, 3, "dcp", True, 0, True))
            one.restored(1, "memory", 1)
            one.alarm("step 1 was not saved")
            one.lost("training begins anew")
            one.acked(1)
            one.boundary(1, 1)
            await asyncio.wait_for(last.wait(), 10)
            assert heard == ["saved", "keeping", "restored", "alarm", "lost", "acked", "boundary"]
            one.alarm("step 2 was not saved")
            assert one.gone == ""
            one.close()

    run(test)


def test_a_forked_child_has_no_vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader worker says nothing in its parent's name, and its questions fail at once."""

    async def test() -> None:
        async with opened(tmp_path):
            one = await connected(tmp_path, monkeypatch)
            with monkeypatch.context() as forked:
                forked.setattr(os, "getpid", lambda: -1)
                assert one.gone == "a forked child has no vault"
                one.saved(1, 0, 1, due=False)
                with pytest.raises(client.VaultGone, match="forked"):
                    one.inventory()
            assert one.gone == ""
            one.close()

    run(test)


def test_an_agent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question has a bound; after it the line is gone for good, for a late answer would be taken for another's."""
    monkeypatch.setattr(client, "ANSWER_S", 0.05)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one = client.Vault(mine, rank=0, local_rank=0, world=1, nproc=1)
    with theirs:
        with pytest.raises(client.VaultGone, match="no answer to 'inventory'"):
            one._ask({"op": "inventory"}, timeout_s=0.05)
        theirs.send(msgpack.packb({"n": 1}))
        with pytest.raises(client.VaultGone, match="no answer"):
            one.inventory()
    one.close()


def test_an_agent_is_waited_for_as_long_as_a_job_bears_its_silence() -> None:
    """Ten seconds of a busy host are no reason to lose a generation; an agent that is dead hangs up at once."""
    assert Granted().unreachable_s == client.ANSWER_S


@pytest.mark.parametrize("bind", ["0.0.0.0", ""])
def test_who_takes_copies_is_told_before_it_can_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bind: str
) -> None:
    """A saver that is late to listen costs no rank the slots that are kept for copies, for as long as the generation lasts."""

    async def test() -> None:
        async with opened(tmp_path) as vault:
            keeps: Any = SimpleNamespace(vault=vault, saving=None)
            duty = CheckpointDuty(keeps, token=b"", host="h", bind=bind)
            order = Order(leave=False, reason="", grace_us=0)
            site: Any = SimpleNamespace(saving=SimpleNamespace(address=""), order=order, keep=Keep())
            duty._site = site
            monkeypatch.setattr(duty, "greeted", lambda _caller: None)
            vault.listener = duty
            one: Any = await connected(tmp_path, monkeypatch)
            assert (one.told.replica, one.told.copies) == ("", bool(bind))
            monkeypatch.setattr(one, "inventory", lambda: pytest.fail("it waits for the saver"))
            assert spare_slots(one, ((0, 1), (2, 3))) == (2 if bind else 0)
            one.close()

    run(test)


def test_answers_that_nobody_reads_end_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks and never reads is hung up on; descriptors that are sent to the vault are closed."""

    async def test() -> None:
        async with opened(tmp_path) as vault:
            one = await connected(tmp_path, monkeypatch)
            hello = msgpack.packb({"op": "hello", "rank": 3, "local_rank": 1, "world": 4, "nproc": 2})
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
                rude.connect(vault.path)
                rude.setblocking(False)
                before = descriptors()
                socket.send_fds(rude, [hello], [rude.fileno()] * 8)
                loop = asyncio.get_running_loop()
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for _ in range(20_000):
                        with contextlib.suppress(BlockingIOError):
                            rude.send(hello)
                        await asyncio.sleep(0)
                        if len(vault._open) == 1 and loop.time():
                            break
                assert len(vault._open) == 1
                assert descriptors() <= before + 1
            assert (await asyncio.to_thread(one.inventory)).holdings == ()
            one.close()

    run(test)


def test_no_more_connections_than_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound new connections are closed at once; those that are there go on."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)

    async def test() -> None:
        async with opened(tmp_path):
            one = await connected(tmp_path, monkeypatch)
            two = await connected(tmp_path, monkeypatch, rank=3)
            with pytest.raises(client.VaultGone):
                await connected(tmp_path, monkeypatch)
            assert (await asyncio.to_thread(two.inventory)).committed == -1
            one.close()
            two.close()

    run(test)


def test_packets_that_make_no_sense_say_nothing() -> None:
    """What ranks tell is checked field by field: what is not as declared is as if it was never said."""
    keeping = client.Keeping("file:///x", 2, 10, 3, "dcp", True, 5, True)._asdict()
    assert Keeping.of(keeping) == Keeping("file:///x", 2, 10, 3, "dcp", True, 5, True, "")
    for name, wrong in (
        ("url", 5),
        ("url", "x" * 5000),
        ("every", -1),
        ("every", True),
        ("planned", 1),
        ("writes", None),
    ):
        assert Keeping.of({**keeping, name: wrong}) is None
    assert Keeping.of({}) is None
    began = {"step": 5, "tier": "peer", "took_us": 7, "fell": [["memory", "damaged"]]}
    assert Began.of(began) == Began(5, "peer", 7, (("memory", "damaged"),))
    for name, wrong in (
        ("step", -1),
        ("step", "5"),
        ("tier", "moon"),
        ("fell", [["memory"]]),
        ("fell", [[1, 2]]),
        ("fell", 3),
    ):
        assert Began.of({**began, name: wrong}) is None


@pytest.mark.parametrize(
    ("holders", "nproc", "nodes", "spread"),
    [
        ([[0, 2], [1, 3]], 2, 2, 1),
        ([[0], [1], [2], [3]], 2, 2, 0),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], 2, 4, 2),
        ([[0]], 1, 1, 1),
    ],
)
def test_over_how_many_nodes_a_state_is(holders: list[list[int]], nproc: int, nodes: int, spread: int) -> None:
    """Replicated, sharded over all, sharded within groups of nodes, one node."""
    assert client.spread_of(holders, nproc, nodes) == spread


# ---- the memory budget


def test_what_is_left_by_the_tightest_limit(tmp_path: Path) -> None:
    """The control group's limit less what is used (page cache gives way), or the host's available memory."""
    host = machine(tmp_path / "a", available=900 * MIB)
    assert budget.room(host) == budget.Room(900 * MIB, "the host's available memory")
    pod = machine(tmp_path / "b", available=900 * MIB, limit=1000 * MIB, used=800 * MIB, cache=100 * MIB)
    assert budget.room(pod) == budget.Room(300 * MIB, "the limit of control group /pod")
    assert budget.left(pod, []).free == 44 * MIB
    assert budget.left(machine(tmp_path / "c", available=1), []).free == 0
    assert budget.room(tmp_path / "nothing").free == budget.UNKNOWN_BYTES


def test_what_was_promised_counts(tmp_path: Path) -> None:
    """Pages that are not written yet are not counted by the kernel: they come off what may still be promised."""
    arenas = Arenas(machine(tmp_path, available=budget.RESERVE_BYTES + 10 * MIB))
    sizes = Geometry(2, 0, 0, 3 * MIB)
    first, _, _ = arenas.open(Owner(0, 2, 1), sizes, 1, 0)
    assert arenas.left().free < 4 * MIB
    with pytest.raises(NoRoom) as refused:
        arenas.open(Owner(1, 2, 1), sizes, 1, 1)
    assert str(refused.value).startswith(
        "no memory for checkpoints: 7 MiB are needed, 4 MiB may be used beside what arenas"
    )
    assert "raise the container's memory limit" in str(refused.value)
    with mmap.mmap(first.fd, first.total_bytes) as memory:
        memory[:] = bytes(len(memory))
    assert arenas.left().free == 10 * MIB, "written: the kernel counts it now, and this machine's file does not"
    arenas.forget(first)


def test_a_refusal_names_from_which_interval_on_two_slots_are_enough() -> None:
    """On GPUs a state is proven a call later, so that more steps are needed between two saves."""
    words = budget.refusal(2**30, budget.Room(0, "the host's available memory"), 0)
    for kind, lag in (("without", LAG), ("with", CUDA_LAG)):
        least = next(every for every in range(1, 9) if slots_for(every, 2, lag) == 2)
        assert f"every={least} {kind} GPUs" in words


def test_what_ranks_stage_themselves_needs_room_too(tmp_path: Path) -> None:
    """Copies beside the arena, which are not there yet: with them it does not fit."""
    arenas = Arenas(machine(tmp_path, available=budget.RESERVE_BYTES + 10 * MIB))
    sizes = Geometry(2, 0, 0, 3 * MIB)
    with pytest.raises(NoRoom, match="7 MiB and 4 MiB for copies that ranks stage are needed, 10 MiB may be used"):
        arenas.open(Owner(0, 1, 1), sizes, 1, 0, 4 * MIB)
    arenas.forget(arenas.open(Owner(0, 1, 1), sizes, 1, 0, 3 * MIB)[0])


# ---- what is whole


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[Arenas]:
    """Arenas of a machine with much memory."""
    found = Arenas(machine(tmp_path))
    yield found
    for one in found:
        found.forget(one)


def made(arenas: Arenas, rank: int, generation: int = 1, layout: int = 1) -> Arena:
    """One rank's arena, ready."""
    owner = Owner(rank, 2, layout)
    arena, fresh, _ = arenas.open(owner, GEOMETRY, generation, rank)
    if fresh:
        memory, control = filled(arena.fd, GEOMETRY, owner, local_rank=rank)
        control.release()
        memory.close()
    arena.look()
    return arena


def published(arena: Arena, slot: int, generation: int, step: int, sequence: int = 1) -> None:
    """Something whole lies there."""
    assert arena.control is not None
    arena.control.publish(slot, Stamp(generation, step, sequence, 0, digest(b"")))


def test_whole_is_what_all_local_ranks_hold(arenas: Arenas) -> None:
    """States are told apart by generation and step; also while some ranks of the next generation have not begun yet."""
    zero, one = made(arenas, 0), made(arenas, 1)
    published(zero, 0, 1, 8)
    published(zero, 1, 1, 9)
    published(one, 0, 1, 9)
    published(one, 1, 1, 10)
    assert arenas.whole(2) == [State(1, 9)]
    made(arenas, 0, generation=2)
    assert arenas.whole(2) == [State(1, 9)]
    published(zero, 0, 2, 9)
    published(one, 1, 2, 9)
    assert arenas.whole(2) == [State(1, 9), State(2, 9)]
    assert arenas.superseded(2) == [one], "rank 1 has not come yet"


def test_only_ranks_with_parts_count(arenas: Arenas) -> None:
    """Where rank 0 alone saves, the others are not waited for."""
    zero = made(arenas, 0)
    published(zero, 0, 1, 8)
    assert arenas.whole(2) == []
    zero.members = frozenset({0})
    assert arenas.whole(2) == [State(1, 8)]


def test_an_arena_that_is_not_what_was_agreed_on(arenas: Arenas) -> None:
    """The agent reads no control page that belongs to somebody else, or says other sizes than the memory has."""
    arena, _, _ = arenas.open(Owner(0, 2, 1), GEOMETRY, 1, 0)
    with pytest.raises(ArenaBroken, match="no arena of this version"):
        arena.look()
    memory, control = filled(arena.fd, GEOMETRY, Owner(1, 2, 1))
    with pytest.raises(ArenaBroken, match=r"rank=1.* was agreed on"):
        arena.look()
    control.rank = 0
    arena.look()
    control.release()
    memory.close()


def test_what_was_brought_in_any_layout_says_which_it_is(arenas: Arenas) -> None:
    """Who does not know the layout of what a node lends asks for any; whoever asks again, knowing it, is given the same."""
    fd = os.memfd_create("brought")
    os.truncate(fd, GEOMETRY.total_bytes)
    memory, control = filled(fd, GEOMETRY, Owner(0, 2, 7))
    found = arenas.fetched((0, 1, 8, 0), fd)
    assert found.owner == Owner(0, 2, 7)
    asked = ((0, 1, 8, 0), (0, 1, 8, 7), (0, 1, 8, 6), (0, 1, 9, 7), (1, 1, 8, 7))
    assert [found.brought(slot) for slot in asked] == [True, True, False, False, False]
    control.release()
    memory.close()


# ---- the saver's pins and hashes


@pytest.fixture
def slots(arenas: Arenas) -> Iterator[tuple[Slots, Arena]]:
    """An arena of two blocks, as the saver has it."""
    sizes, owner = Geometry(2, 1000, 100, BLOCK_BYTES + 5), Owner(0, 1, 1)
    arena, _, _ = arenas.open(owner, sizes, 1, 0)
    memory, control = filled(arena.fd, sizes, owner)
    control.pin(1)  # by a saver that was killed
    control.release()
    memory.close()
    arena.look()
    published(arena, 0, 1, 8)
    found = Slots()
    found.add(arena.id, os.dup(arena.fd), 0)
    yield found, arena
    found.forget(arena.id)


def test_pins_are_counted_and_never_left(slots: tuple[Slots, Arena]) -> None:
    """A predecessor's pins are taken back; a slot is free when its last reader is done, however, and no hold is on it."""
    found, arena = slots
    words, mapped = arena.control, found.get(arena.id)
    assert words is not None
    assert not words.pinned(1)
    with contextlib.suppress(RuntimeError), mapped.view(1, 8), mapped.view(1, 8) as view:
        assert (view.stamp.step, words.pinned(0)) == (8, True)
        raise RuntimeError
    assert not words.pinned(0)
    found.hold([[arena.id, 0, 1, 8]])
    with mapped.view(1, 8):
        pass
    assert words.pinned(0), "still held"
    with mapped.view(1, 8):
        found.hold([])
        assert words.pinned(0), "still read"
    assert not words.pinned(0)


def test_a_slot_that_is_overwritten_before_it_is_pinned(
    slots: tuple[Slots, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver pins and looks again: a worker that had begun meanwhile wins, and nothing is read."""
    found, arena = slots
    mapped, pin = found.get(arena.id), Control.pin

    def late(control: Control, slot: int) -> None:
        pin(control, slot)
        assert arena.control is not None
        arena.control.begin(slot)

    monkeypatch.setattr(Control, "pin", late)
    with pytest.raises(SlotGone), mapped.view(1, 8):
        pass
    assert arena.control is not None
    assert not arena.control.pinned(0)


def test_a_state_is_found_in_its_layout_or_in_any(slots: tuple[Slots, Arena]) -> None:
    """Nodes that have nothing of a state that another one lends do not know its layout: 0."""
    found, arena = slots
    assert [found.of(0, 1, 8, layout) is found.get(arena.id) for layout in (1, 0, 2)] == [True, True, False]
    assert found.of(0, 1, 9, 0) is found.of(1, 1, 8, 0) is None


def test_the_newest_slot_is_hashed(slots: tuple[Slots, Arena]) -> None:
    """Digests of every block, told only when all of them are of that publication."""
    found, arena = slots
    mapped, words = found.get(arena.id), arena.control
    assert words is not None
    mapped.memory[arena.geometry.data_at(0)] = 77  # type: ignore[union-attr]
    assert hash_newest(mapped)
    assert words.hashed(0) == 1
    view = SlotView(mapped.memory, 0)
    assert view.digests() == tuple(digests(view.data))
    assert view.verify()
    view.release()
    assert not hash_newest(mapped), "it is done"


def test_hashing_gives_way(slots: tuple[Slots, Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is overwritten while it is hashed is dropped: no digests are told of it."""
    from dlrover_adapters.agent.checkpoints import hashing

    found, arena = slots

    def overwritten(content: Any) -> int:
        assert arena.control is not None
        arena.control.begin(0)
        return digest(content)

    monkeypatch.setattr(hashing, "digest", overwritten)
    assert not hash_newest(found.get(arena.id))
    assert arena.control is not None
    assert arena.control.hashed(0) == 0
