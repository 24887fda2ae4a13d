"""The agent's half of checkpoints on storage: what is due is written and sealed, whoever dies or fails over it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from checkpoint_node import Gone, Make, cut, run
from checkpoint_node import node as node  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.agent.checkpoints.arenas import State
from dlrover_core.job.checkpoints import (
    Keep,
    OfferReplica,
    Persist,
    ReportHeld,
    ReportStorage,
)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.slow_loop(
        reason="the main thread executes savers, as they die with it: under load that counts 60 to 110 ms"
    ),
]

SAVES_WHEN_TOLD = """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    shelf = Shelf(vault)
    shelf.keeps(os.environ["FOLDER"] + "/ckpt")
    tell("here")
    signal.sigwait([signal.SIGUSR1])
    shelf.save(4, due=True)
    forever()
    """
"""A rank that saves step 4 at SIGUSR1, and no step before."""


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

    async def test() -> None:
        async with node(SAVES_WHEN_TOLD) as one:
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

    async def test() -> None:
        async with node(SAVES_WHEN_TOLD, hung_s=0.5) as one:
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
            assert (one.kept.written[0].step, one.kept.written[0].generation) == (9, 1)
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
