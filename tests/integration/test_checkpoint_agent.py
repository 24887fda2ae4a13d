"""The agent's half of checkpoints with real processes: launcher, vault, saver, memfds; ranks are small scripts without torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgpack
import pytest
from running import eventually

from dlrover_adapters.agent.checkpoints.arenas import State
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_core.data.cut import Place, pack
from dlrover_core.job.checkpoints import (
    Keep,
    OfferReplica,
    Persist,
    ReportArmed,
    ReportHeld,
    ReportKeeping,
    ReportRestored,
    ReportStorage,
)
from dlrover_core.job.orders import Order, Work
from dlrover_core.job.plans import Boundary
from dlrover_core.job.shards import Datasets, RegisterDataset, Terms
from dlrover_core.kernel.wire import Part, find
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import Everywhere, KeptBeat
from dlrover_core.runtime.launcher import WorkersGone

Make = Callable[..., Any]
Gone = Callable[[int], Awaitable[None]]
BOUND_S = 30.0
SCRIPTS = Path(__file__).parent / "scripts"
RUNS = Order(leave=False, reason="", grace_us=5_000_000, work=Work(1, nproc=1, world_size=1, nodes=1))

pytestmark = pytest.mark.timeout(120)

HEAD = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import mmap, os, signal
from vaulting import *
from dlrover_core.data.cut import Place, pack
ranks(NPROC)
vault = Vault.connect()
generation = vault.told.generation
"""


def run(test: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, within a minute and a half."""
    asyncio.run(asyncio.wait_for(test, 90))


def cut(step: int) -> bytes:
    """The position in the data after a step, packed."""
    return pack((Place("train", 0, 4 * step, ""),))


class Node:
    """A rig with the checkpoint duty, and what it said to the leader."""

    def __init__(self, rig: Any, duty: CheckpointDuty, desk: Desk) -> None:
        self.rig, self.duty, self.desk = rig, duty, desk
        self.sent: list[Any] = []
        self.news = asyncio.Event()

    def say(self, command: Any) -> None:
        """What the duty sends."""
        self.sent.append(command)
        self.news.set()

    def order(self, *parts: Part, generation: int = 1) -> None:
        """The leader's newest word."""
        order = self.desk.order.telling(*parts)
        self.desk.order = order._replace(work=order.work._replace(generation=generation))
        self.duty.ordered(self.desk.order)

    @property
    def kept(self) -> KeptBeat:
        """What the next beat tells."""
        return find(self.desk.told.values(), KeptBeat)

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until this is so; looked at whenever the duty says something or hurries, and at every tick of it."""
        async with asyncio.timeout(BOUND_S) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
            while not holds():
                self.news.clear()
                hurried = asyncio.ensure_future(self.desk.hurried.wait())
                news = asyncio.ensure_future(self.news.wait())
                await asyncio.wait([hurried, news], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                hurried.cancel()
                news.cancel()
                self.desk.hurried.clear()

    def of(self, kind: type) -> list[Any]:
        """What was sent of this kind."""
        return [one for one in self.sent if isinstance(one, kind)]

    async def ended(self, generation: int) -> None:
        """Its workers are gone, and the duty knows."""
        while not isinstance(notice := await self.next(), WorkersGone) or notice.generation != generation:
            pass

    async def next(self) -> Any:
        """The next notice, which the duty hears, too."""
        notice = await self.rig.next()
        self.duty.noticed(notice)
        return notice


@pytest.fixture
def node(rig: Make) -> Make:
    """A node whose ranks run a script; ``async with`` it."""

    @contextlib.asynccontextmanager
    async def make(script: str, *, nproc: int = 1, **fields: Any) -> AsyncIterator[Node]:
        text = HEAD.replace("NPROC", str(nproc)) + textwrap.dedent(script)
        others = memfds(os.getpid())  # of tests before this one, in the same process
        async with rig(text, nproc=nproc, **fields) as one:
            duty = CheckpointDuty(one.launcher, token=b"secret", host="127.0.0.1", bind="127.0.0.1")
            found = Node(
                one,
                duty,
                Desk(
                    "n-0-0",
                    "run",
                    RUNS._replace(work=RUNS.work._replace(nproc=nproc, world_size=nproc)),
                    lambda _: None,
                ),
            )
            found.desk._send = found.say
            task = asyncio.ensure_future(duty.run(found.desk))
            await asyncio.sleep(0)
            try:
                yield found
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                # A memfd of a dead worker's is the agent's, and goes with it.
        assert memfds(os.getpid()) <= others

    return make


def mode(path: str) -> int:
    """Who may open it."""
    return Path(path).stat().st_mode & 0o777


def memfds(pid: int) -> int:
    """How many descriptors of arenas a process has."""
    found = 0
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found += "memfd:dlrover" in str(one.readlink())
    return found


# ---- memory that outlives its worker


def test_a_killed_workers_states_are_there_for_the_next(node: Make) -> None:
    """After SIGKILL in the middle of a save the older slot is whole, and the next generation finds it there, unchanged."""
    script = """
    shelf = Shelf(vault)
    if generation == 1:
        shelf.keeps("")
        shelf.save(10)
        shelf.save(11)
        shelf.control.begin(0)
        tell("torn", shelf.arena.fresh)
        os.kill(os.getpid(), signal.SIGKILL)
    found = [one for one in vault.inventory().holdings]
    fd = vault.borrow(found[0].id)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE) as old:
        tell(shelf.arena.fresh, [list(one[1:]) for one in found], bytes_of(old, found[0].slot))
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            assert (await one.rig.told())[1:] == ["torn", True]
            await one.ended(1)
            await one.until(lambda: one.of(ReportHeld))
            assert one.of(ReportHeld) == [ReportHeld("n-0-0", 1, (11,))]
            await one.rig.start()
            fresh, found, values = (await one.rig.told())[1:]
            assert (fresh, found, values) == (False, [["memory", 0, 1, 1, 11, 7, 1]], [11])
            await one.ended(2)

    run(test())


def test_another_layout_gets_new_memory_and_the_old_one_stays_for_reading(node: Make) -> None:
    """A rank of another world or layout gets a fresh arena; the old one goes once a step of the new generation is whole."""
    script = """
    shelf = Shelf(vault, layout=generation)
    shelf.keeps("")
    tell(shelf.arena.fresh, held(vault))
    shelf.save(generation * 10)
    if generation == 2:
        tell(held(vault))
        forever()
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            assert (await one.rig.told())[1:] == [True, []]
            await one.ended(1)
            await one.rig.start()
            assert (await one.rig.told())[1:] == [True, [[0, 1, 10]]]
            assert (await one.rig.told())[1:] == [[[0, 1, 10], [0, 2, 20]]]
            await one.until(lambda: one.kept.held == (20,))
            assert len(list(one.rig.launcher.vault.arenas)) == 2
            one.desk.seen((Everywhere(20),))
            one.order()
            await one.until(lambda: len(list(one.rig.launcher.vault.arenas)) == 1)
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


@pytest.mark.slow_loop(
    reason="the saver is executed by the main thread, with which it dies: under load that counts 60 ms"
)
@pytest.mark.parametrize("preload", [(), None], ids=["forked", "executed"])
def test_what_is_told(node: Make, preload: tuple[str, ...] | None, tmp_path: Path) -> None:
    """Keeping, holdings, restores, plans and boundaries reach the leader once each, when all local ranks have said so.

    Positions in the data come along: as the ranks restored them, and as they lie in the slots of the states.
    """
    script = """
    cut = lambda step: pack((Place("train", 0, 4 * step, ""),))
    vault.restored(5, "memory", 100 + RANK, [["peer", "no answer"]] if RANK else [], 0, cut(5))
    shelf = Shelf(vault)
    shelf.keeps("", every=2, store_every=0)
    shelf.save(6, cut=cut(6))
    tell("saved")
    while not shelf.control.armed: pass
    vault.acked(shelf.control.armed)
    shelf.control.acked = shelf.control.armed
    while not shelf.control.go: pass
    shelf.save(7, cut=cut(7))
    shelf.control.boundary = 8
    vault.boundary(shelf.control.armed, 7)
    while shelf.control.armed: pass
    tell(shelf.control.committed, shelf.control.mtbf_s)
    """

    async def test() -> None:
        async with node(script, nproc=2, preload=preload) as one:
            await one.rig.start()
            await one.rig.all_told()
            await one.until(lambda: one.kept.held == (6,) and one.of(OfferReplica))
            assert one.of(ReportKeeping) == [
                ReportKeeping("n-0-0", 1, "", 2, 0, 0, True, one.of(ReportKeeping)[0].node_bytes, 1)
            ]
            fell = (("peer", "no answer"),)
            assert one.of(ReportRestored) == [ReportRestored("n-0-0", 1, 5, "memory", 101, fell, 0, cut(5))]
            assert one.rig.launcher.pids["saver"] > 0
            assert not one.of(ReportArmed)
            one.order(Boundary(3), Keep(4, mtbf_s=77))
            await one.until(lambda: one.of(ReportArmed))
            one.order(Boundary(3, go=True))
            await one.until(lambda: one.of(ReportHeld))
            assert one.of(ReportArmed) == [ReportArmed("n-0-0", 3)]
            assert one.of(ReportHeld) == [ReportHeld("n-0-0", 1, (7,), 3, (), cut(7))]
            one.order(Boundary())
            assert await one.rig.all_told() == {0: [5, 77], 1: [5, 77]}
            await one.ended(1)
            await one.until(lambda: len(one.of(ReportHeld)) == 2)
            assert (one.of(ReportHeld)[1].steps, one.of(ReportHeld)[1].cut) == ((6, 7), cut(7))

    run(test())


def test_datasets_are_registered_and_others_of_that_name_refused(node: Make) -> None:
    """The node of rank 0 sends what the leader does not know, once; a rank with another dataset of that name hears both."""
    script = """
    terms = ["train", 1000, 7, "shuffled", "f00d", 3, 32, "cursor"]
    vault.dataset(terms)
    vault.dataset(terms)
    tell("told")
    signal.sigwait([signal.SIGUSR1])
    try:
        vault.dataset(["train", 999, *terms[2:]])
    except VaultRefused as error:
        tell(str(error))
    vault.dataset(["other", 5, *terms[2:]])
    tell("told")
    forever()
    """
    script = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n    " + script.strip()

    async def test() -> None:
        train = Terms("train", 1000, 7, "shuffled", "f00d", 3, 32, "cursor")
        async with node("\n    " + script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.of(RegisterDataset))
            assert one.of(RegisterDataset) == [RegisterDataset("n-0-0", 1, *train)]
            one.order(Datasets((train, train._replace(name="other", size=5))))
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            _, said = await one.rig.told()
            assert said == (
                f"dataset 'train': the job has it with {train}; this one has {train._replace(size=999)}: give it another name"
            )
            await one.rig.told()
            await one.until(lambda: one.of(OfferReplica))
            assert len(one.of(RegisterDataset)) == 1
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


def test_a_global_batch_is_filled_in_once_it_is_known(node: Make) -> None:
    """A rank names its dataset before its loop has divided the batch, and again with it; one that is late takes nothing back."""
    script = """
    first = ["train", 1000, 7, "shuffled", "f00d", 3, 0, "cursor"]
    whole = [*first[:6], 32, "cursor"]
    for terms in (first, whole, first):
        vault.dataset(terms)
        tell("told")
        signal.sigwait([signal.SIGUSR1])
    forever()
    """
    script = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n    " + script.strip()

    async def test() -> None:
        train = Terms("train", 1000, 7, "shuffled", "f00d", 3, 32, "cursor")
        unknown = train._replace(global_batch=0)
        async with node("\n    " + script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.of(RegisterDataset))
            one.order(Datasets((unknown,)))
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            await one.rig.told()
            await one.until(lambda: len(one.of(RegisterDataset)) == 2)
            one.order(Datasets((train,)))
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            await one.rig.told()
            await one.until(lambda: one.of(OfferReplica))
            assert one.of(RegisterDataset) == [RegisterDataset("n-0-0", 1, *each) for each in (unknown, train)]
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


# ---- storage


def test_what_is_due_goes_to_storage_and_is_sealed(node: Make, tmp_path: Path) -> None:
    """A due step of all local ranks is written behind their backs, told with the beat, and sealed once it is committed."""
    from dlrover_adapters.checkpoint.places import Place
    from dlrover_adapters.checkpoint.reader import read_seal

    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt")
    shelf.save(3)
    shelf.save(4, due=True, cut=pack((Place("train", 0, 16, ""),)))
    tell("saved")
    forever()
    """

    async def test() -> None:
        async with node(script, nproc=2) as one:
            await one.rig.start()
            await one.rig.all_told()
            await one.until(lambda: one.kept.written)
            (written,) = one.kept.written
            assert written.cut == cut(4)
            assert (written.step, written.generation, written.places, one.kept.writes) == (4, 1, 0, True)
            place = Place(str(tmp_path / "ckpt"))
            assert read_seal(place, 4) is None
            one.order(Keep(4, 1))
            await one.until(lambda: read_seal(place, 4) is not None)
            arenas = one.rig.launcher.vault.arenas
            assert arenas.whole(2) == [State(1, 3), State(1, 4)]
            await one.until(lambda: not any(a.control.pinned(s) for a in arenas for s in (0, 1)))
            await one.until(lambda: all(a.control.hashed(0) for a in arenas))  # the newest are in slot 0
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


def test_a_saver_killed_over_a_step_is_replaced_and_the_step_written(node: Make, tmp_path: Path, gone: Gone) -> None:
    """SIGKILL of the saver in the middle of writing, twice: its successor unpins what it had pinned, and writes the step."""
    fifo = tmp_path / "ckpt" / "step-0000000004"
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt")
    tell("here")
    signal.sigwait([signal.SIGUSR1])
    shelf.save(4, due=True)
    forever()
    """
    script = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n    " + script.strip()

    async def test() -> None:
        async with node("\n    " + script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.rig.launcher.pids.get("saver") and one.of(OfferReplica))
            pids = one.rig.launcher.pids
            # Stopped, it is sure to be in the middle of its order when it is killed.
            os.kill(pids["saver"], signal.SIGSTOP)
            os.kill(pids["rank 0"], signal.SIGUSR1)
            for _ in range(2):
                saver = one.rig.launcher.pids["saver"]
                await one.until(lambda: one.rig.launcher.saving._pending or one.kept.written)
                os.kill(saver, signal.SIGKILL)
                await gone(saver)
                await one.until(lambda saver=saver: one.rig.launcher.pids["saver"] not in {0, saver})
            await one.until(lambda: one.kept.written)
            assert one.kept.written[0].step == 4
            arena = next(iter(one.rig.launcher.vault.arenas))
            await one.until(lambda: not arena.control.pinned(0) and not arena.control.pinned(1))
            assert fifo.exists()
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


@pytest.mark.nightly(reason="a stopped keeper (test_zygote.py) stands for it in make test")
def test_a_stopped_saver_is_replaced(node: Make) -> None:
    """A saver that does not answer is killed after six times ``hung_s``, and its successor writes what it was to write."""
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt")
    tell("here")
    signal.sigwait([signal.SIGUSR1])
    shelf.save(4, due=True)
    forever()
    """
    script = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n    " + script.strip()

    async def test() -> None:
        async with node("\n    " + script, hung_s=0.5) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.rig.launcher.pids.get("saver") and one.of(OfferReplica))
            pids = one.rig.launcher.pids
            os.kill(pids["saver"], signal.SIGSTOP)
            os.kill(pids["rank 0"], signal.SIGUSR1)
            await one.until(lambda: one.kept.written)
            assert one.kept.written[0].step == 4
            assert one.rig.launcher.pids["saver"] != pids["saver"]
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


def test_what_is_ordered_of_an_ended_generation(node: Make, tmp_path: Path) -> None:
    """When workers die, the newest they hold stays pinned until the leader has it written; the other slot is free."""
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt", store_every=0)
    if generation == 1:
        shelf.save(8)
        shelf.save(9)
        os.kill(os.getpid(), signal.SIGKILL)
    tell([shelf.control.pinned(slot) for slot in (0, 1)])
    forever()
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.ended(1)
            await one.until(lambda: one.of(ReportHeld))
            assert one.of(ReportHeld)[0].steps == (8, 9)
            arena = next(iter(one.rig.launcher.vault.arenas))
            await one.until(lambda: arena.control.pinned(1))
            await one.rig.start()
            assert (await one.rig.told())[1:] == [[False, True]]
            one.order(Persist(9, 1, (0,)), generation=2)
            await one.until(lambda: one.kept.written)
            assert one.kept.written[0][::3] == (9, 1)
            assert one.kept.written[0].places == 1
            assert (one.kept.before, one.kept.wrote) == (1, True)
            await one.until(lambda: not arena.control.pinned(0) and not arena.control.pinned(1))
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


def test_a_storage_that_fails(node: Make, tmp_path: Path) -> None:
    """It is told once and tried again; the step goes to the host's own folder meanwhile; training is not touched."""
    (tmp_path / "ckpt").write_text("a file where the folder should be")
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt", local=os.environ["FOLDER"] + "/local")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    shelf.save(4, due=True)
    tell("saved")
    signal.sigwait([signal.SIGUSR1])
    shelf.save(5, due=True)
    forever()
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.of(ReportStorage))
            (failed,) = one.of(ReportStorage)
            assert failed.url == str(tmp_path / "ckpt")
            assert failed.reason
            await one.until((tmp_path / "local" / "step-0000000004" / "part-0.json").exists)
            assert not one.kept.written
            (tmp_path / "ckpt").unlink()
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            await one.until(lambda: one.kept.written)
            await one.until(lambda: len(one.of(ReportStorage)) > 1)
            assert [bool(each.reason) for each in one.of(ReportStorage)] == [True, False]
            assert await one.rig.launcher.stop(0.0, 5.0)

    run(test())


def test_the_newest_state_is_written_before_the_agent_goes(node: Make, tmp_path: Path) -> None:
    """A drained agent writes what is newest in memory, due or not, within the grace."""
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt", store_every=0)
    shelf.save(8)
    shelf.save(9)
    tell("saved")
    forever()
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.kept.held == (8, 9))
            assert await one.rig.launcher.stop(0.0, 5.0)
            await one.duty.settle(one.desk.order._replace(leave=True, grace_us=20_000_000))
            assert one.duty._storage is not None
            assert [each.step for each in one.duty._storage.written] == [9]
            assert (tmp_path / "ckpt" / "step-0000000009" / "part-0.json").exists()

    run(test())


# ---- copies on other nodes


def test_copies_survive_the_saver_and_are_fetched(node: Make, gone: Gone) -> None:
    """A copy that a node keeps for another one outlives its saver; it is told at the end, and fetched once, verified."""
    script = """
    shelf = Shelf(vault)
    shelf.keeps("", store_every=0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    shelf.save(8)
    tell("saved")
    signal.sigwait([signal.SIGUSR1])
    found = vault.inventory()
    first, again = (vault.fetch(found.replica, 0, 1, 8, 7) for _ in range(2))
    with mmap.mmap(first.fd, 0) as copy:
        tell(sorted(one.kind for one in found.holdings), bytes_of(copy, 0), first.id == again.id, again.took_us)
    before = vault.inventory().holdings
    head, again = (vault.head(found.replica, 0, 1, 8, 7) for _ in range(2))
    with mmap.mmap(head.fd, 0) as memory:
        view = SlotView(memory, 0)
        tell(view.stamp.step, len(view.data), again.took_us, vault.inventory().holdings == before)
        view.release()
    try:
        vault.fetch(found.replica, 0, 1, 9, 7)
    except VaultGone as refused:
        tell(str(refused), vault.gone)
    """

    async def test() -> None:
        async with node(
            "from dlrover_adapters.checkpoint.slotview import SlotView\n"
            "from dlrover_adapters.torch.checkpoint.vault import VaultGone\n" + textwrap.dedent(script)
        ) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.of(OfferReplica))
            # It is its own partner: what counts is the way there and back.
            one.order(Keep(replica_to=one.of(OfferReplica)[0].address))
            await one.until(lambda: one.kept.copied == 8)
            saver = one.rig.launcher.pids["saver"]
            os.kill(saver, signal.SIGKILL)
            await gone(saver)
            await one.until(lambda: len([each for each in one.of(OfferReplica) if each.address]) == 2)
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            assert (await one.rig.told())[1:] == [["memory", "replica"], [8], True, 0]
            assert (await one.rig.told())[1:] == [
                8,
                0,
                0,
                True,
            ]  # table and objects alone, once, and no copy to count on
            refused, vault_gone = (await one.rig.told())[1:]
            assert "no step 9 of generation 1 of rank 0" in refused
            assert vault_gone == ""
            await one.ended(1)
            await one.until(lambda: one.of(ReportHeld))
            assert one.of(ReportHeld)[0].copies == ((0, 8),)

    run(test())


# ---- whoever misbehaves


def test_hostile_packets_end_their_connection_only(node: Make) -> None:
    """Oversized, malformed and impossible packets are hung up on or refused; honest ranks go on."""
    script = """
    shelf = Shelf(vault)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    tell(os.environ["DLROVER_AGENT_SOCKET"])
    signal.sigwait([signal.SIGUSR1])
    shelf.save(1)
    tell(held(vault))
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            agent = (await one.rig.told())[1]
            loop = asyncio.get_running_loop()
            path = str(Path(agent).with_name("vault.sock"))
            assert mode(path) == 0o600
            hello = {"op": "hello", "rank": 0, "local_rank": 0, "world": 1, "nproc": 1}
            arena = {"op": "arena", "layout": 1, "slots": 2, "table_bytes": 1, "blob_bytes": 1, "data_bytes": 2**45}
            for packets in (
                [b"\xc1"],
                [msgpack.packb([1])],
                [b"x" * (100 * 1024)],
                [msgpack.packb({"op": "inventory"})],
                [msgpack.packb(hello), msgpack.packb({"op": "borrow", "id": "x"})],
                [msgpack.packb(hello), msgpack.packb({**arena, "slots": -1})],
                [msgpack.packb(hello), msgpack.packb({"op": "nothing"})],
            ):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                    line.setblocking(False)
                    await loop.sock_connect(line, path)
                    for packet in packets:
                        await loop.sock_sendall(line, packet)
                    answers = [await asyncio.wait_for(loop.sock_recv(line, 65536), BOUND_S) for _ in packets]
                    assert answers[-1] == b"", packets
            for refused in (arena, {**arena, "slots": 9}, {"op": "borrow", "id": 99}, {"op": "ready", "id": 99}):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                    line.setblocking(False)
                    await loop.sock_connect(line, path)
                    for packet in (hello, refused):
                        await loop.sock_sendall(line, msgpack.packb(packet))
                        answer = msgpack.unpackb(await asyncio.wait_for(loop.sock_recv(line, 65536), BOUND_S))
                    assert "error" in answer, refused
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            assert (await one.rig.told())[1:] == [[[0, 1, 1]]]
            await one.ended(1)

    run(test())


def test_memory_is_refused_before_it_is_used(node: Make, tmp_path: Path) -> None:
    """An arena that does not fit within the container's limit is refused in a sentence with numbers, and training goes on."""
    from dlrover_adapters.agent.checkpoints.budget import RESERVE_BYTES

    script = """
    from dlrover_adapters.torch.checkpoint.vault import VaultRefused
    told = []
    for size in (64 * MIB, 1 * MIB):
        try:
            Shelf(vault, size).keeps("")
            told.append("there")
        except VaultRefused as refused:
            told.append(str(refused))
    tell(*told, vault.gone)
    """

    async def test() -> None:
        async with node(script) as one:
            root = tmp_path / "root"
            await asyncio.to_thread(limited, root, 32 * 2**20 + RESERVE_BYTES)
            one.rig.launcher.vault.arenas._root = root
            await one.rig.start()
            _, refused, there, gone = await one.rig.told()
            assert refused.startswith("no memory for checkpoints: 129 MiB are needed, 32 MiB may be used")
            assert "the limit of control group /pod" in refused
            assert (there, gone) == ("there", "")
            await one.ended(1)

    run(test())


def limited(root: Path, left: int) -> None:
    """A machine of which a control group may use only so many bytes more."""
    group = root / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    (root / "proc/meminfo").write_text(f"MemAvailable: {2**40 // 1024} kB\n")
    (group / "memory.max").write_text(str(2**30 + left))
    (group / "memory.current").write_text(str(2**30))
    (group / "memory.stat").write_text("inactive_file 0\n")


AGENT = """
import asyncio, os, sys
sys.path.insert(0, SCRIPTS)
from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.launcher import LinuxLauncher
from dlrover_core.job.orders import Order, Work
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import KeptBeat
from dlrover_core.runtime.launcher import WorkersLaunch

async def main():
    folder, place = sys.argv[1:]
    env = {"FOLDER": folder, "PYTHONPATH": os.environ["PYTHONPATH"]}
    config = LaunchConfig((folder + "/script.py",), env=env, stores=False, run_dir=place, framework="bare")
    launcher = LinuxLauncher(config)
    await launcher.open()
    duty = CheckpointDuty(launcher, token=b"x", host="127.0.0.1", bind="127.0.0.1")
    desk = Desk("n-0-0", "run", Order(leave=False, reason="", grace_us=0, work=Work(generation=1)), lambda command: None)
    running = asyncio.ensure_future(duty.run(desk))
    await launcher.start(WorkersLaunch("run", 1, 0, 1, 1, 0, 1, "127.0.0.1:1", 0, 3))
    while KeptBeat not in desk.told or not launcher.saving.address:
        await asyncio.sleep(0.01)
    print(*launcher.pids.values(), flush=True)
    await running
asyncio.run(main())
"""


RUNNING = pytest.mark.nightly(reason="a stopped saver stands for it in make test: whoever ends that one ends any")


@pytest.mark.parametrize("stopped", [pytest.param(False, marks=RUNNING), True], ids=["running", "its saver stopped"])
def test_nothing_outlives_a_killed_agent(rig: Make, gone: Gone, tmp_path: Path, stopped: bool) -> None:
    """SIGKILL of the agent ends saver, zygote and workers; nobody holds the arena any more, so its memory is free."""
    text = HEAD.replace("NPROC", "1") + ("shelf = Shelf(vault)\nshelf.keeps('')\nshelf.save(1)\nforever()\n")

    async def test() -> None:
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as ending:
            async with rig(text) as one:
                agent_file = tmp_path / "agent.py"
                agent_file.write_text(AGENT.replace("SCRIPTS", repr(str(SCRIPTS))))
                line = [sys.executable, str(agent_file), str(tmp_path), place]
                env = {**os.environ, "PYTHONPATH": one.launcher._config.env["PYTHONPATH"]}
                agent = await asyncio.create_subprocess_exec(*line, env=env, stdout=asyncio.subprocess.PIPE)
                assert agent.stdout is not None
                ending.callback(agent.kill)
                pids = [int(word) for word in (await agent.stdout.readline()).split() if int(word)]
                assert len(pids) == 3, "zygote, saver and worker"
                arena = inodes(agent.pid)
                assert len(arena) == 1
                await asyncio.to_thread(
                    eventually, lambda: all(holders(arena, pids)[1:]), "saver and worker have it mapped"
                )
                if stopped:
                    os.kill(pids[1], signal.SIGSTOP)
                ending.pop_all().close()
                await agent.wait()
                for pid in pids:
                    await gone(pid)
                assert not any(
                    await asyncio.to_thread(lambda: holders(arena, everybody()))
                )  # as many maps as there are

    run(test())


def inodes(pid: int) -> set[str]:
    """The arenas that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:dlrover-arena" in line:
                found.add(line.split()[4])
    return found


def everybody() -> list[int]:
    """All processes of this machine."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def holders(arena: set[str], pids: list[int]) -> list[bool]:
    """Who of them has these arenas."""
    return [bool(arena & inodes(pid)) for pid in pids]


def test_a_full_disk(node: Make, tmp_path: Path) -> None:
    """A storage without room is a failure in words: nothing of the step is there, and what comes later is written."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False).returncode:  # noqa: S607
        pytest.skip("tmpfs cannot be mounted here")
    script = """
    shelf = Shelf(vault, 4 * MIB)
    shelf.keeps(os.environ["FOLDER"] + "/small/ckpt")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    shelf.save(4, due=True)
    tell("saved")
    signal.sigwait([signal.SIGUSR1])
    shelf.save(5, due=True)
    forever()
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.rig.told()
            await one.until(lambda: one.of(ReportStorage))
            assert "No space left" in one.of(ReportStorage)[0].reason
            assert not list((small / "ckpt").glob("step-*/part-*"))
            remount = ["mount", "-o", "remount,size=64m", str(small)]
            subprocess.run(remount, check=True)  # noqa: ASYNC221
            os.kill(one.rig.launcher.pids["rank 0"], signal.SIGUSR1)
            await one.until(lambda: one.kept.written)
            assert one.kept.written[0].step in {4, 5}
            assert await one.rig.launcher.stop(0.0, 5.0)

    try:
        run(test())
    finally:
        subprocess.run(["umount", str(small)], check=True)  # noqa: S607


def test_a_script_that_ends_well_is_waited_for(node: Make) -> None:
    """The last step that was due is written, committed and sealed before the agent says that its workers have finished."""
    script = """
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt")
    shelf.save(4, due=True)
    """

    async def test() -> None:
        async with node(script) as one:
            await one.rig.start()
            await one.ended(1)
            assert not one.desk.at_rest.is_set()
            await one.until(lambda: one.kept.written)
            assert not one.desk.at_rest.is_set()
            one.order(Keep(4, 1))
            await asyncio.wait_for(one.desk.at_rest.wait(), BOUND_S)
            assert (one.rig.folder / "ckpt" / "step-0000000004" / "manifest.json").exists()

    run(test())
