"""The agent's half of checkpoints with real processes: launcher, vault, saver, memfds; ranks are small scripts without torch."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest
from checkpoint_node import Gone, Make, cut, run
from checkpoint_node import node as node  # noqa: PLC0414 - the fixture is taken over

from dlrover_core.job.checkpoints import (
    Keep,
    OfferReplica,
    ReportArmed,
    ReportHeld,
    ReportKeeping,
    ReportRestored,
)
from dlrover_core.job.plans import Boundary
from dlrover_core.job.shards import Datasets, RegisterDataset, Terms
from dlrover_core.runtime.keeping import Everywhere

pytestmark = pytest.mark.timeout(120)


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
                f"dataset 'train': the job has it with {train}; this one has {train._replace(size=999)}: "
                "give all ranks the same data, and other data another name"
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
