"""The agent's side of leased data of a model that is restored: generations, and what a rank takes of its loader processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_data_duty import LAUNCH, NOBODY, TERMS, Stand
from test_data_duty import play as play  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.agent import data_socket
from dlrover_adapters.data.leases import DataGone, LeaseLine, Wait
from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.errors import SpecError
from dlrover_core.job.leases import Leases, LeaseTold, ReportRepeated, RestoreLeases, spans_of
from dlrover_core.job.shards import MODEL_LEASE
from dlrover_core.runtime.launcher import WorkersGone

MODEL_TERMS = TERMS._replace(assignment=MODEL_LEASE)


def restored_leases(one: Stand, *spans: tuple[int, int], generation: int) -> None:
    """The leader tells leases of a generation."""
    told = LeaseTold(*TERMS[:6], spans=Ranges(spans).pack(), assignment=MODEL_LEASE, generation=generation)
    one.duty.ordered(NOBODY.telling(Leases((told,))))


async def resuming(one: Stand, line: LeaseLine) -> asyncio.Future[None]:
    """Rank 0 says where its generation goes on, and waits for the leader's word, which is asked for."""
    resumed = asyncio.ensure_future(asyncio.to_thread(line.restored, MODEL_TERMS, 1, 7, Ranges([(0, 4)])))
    await one.until(lambda: one.sent and isinstance(one.sent[-1], RestoreLeases))
    assert not resumed.done()
    return resumed


def test_nothing_is_handed_out_before_the_ranks_have_resumed(play: Any) -> None:
    """Rank 0 says where; then leases of its generation are handed out, and nothing is kept of others."""

    async def test(one: Stand) -> None:
        line = await one.line(opened=False)
        await asyncio.to_thread(line.open, MODEL_TERMS, 4)
        restored_leases(one, generation=0)
        waits = await one.draw(line, within_s=0.01)
        assert "call FlashCheckpoint.restore(); if every rank did, look for what is refused" in waits.why
        resumed = await resuming(one, line)
        assert one.sent[-1] == RestoreLeases("n-0-1", LAUNCH.generation, "eval", 1, 7, Ranges([(0, 4)]).pack())
        restored_leases(one, (4, 40), generation=LAUNCH.generation)
        await resumed
        assert await one.draw(line, within_s=0.01) == (4, 8)
        assert await one.draw(line, Span(4, 8), within_s=0.01) == (8, 12)
        await one.until(lambda: spans_of(one.ask.acked) == ((4, 8),))
        assert one.ask.generation == LAUNCH.generation
        restored_leases(one, (4, 40), generation=LAUNCH.generation + 1)
        assert isinstance(await one.draw(line, Span(8, 12), within_s=0.01), Wait)
        await one.until(lambda: one.ask.generation == LAUNCH.generation + 1)
        assert spans_of(one.ask.acked) == ()

    play(test)


def test_a_restore_that_the_master_refuses_ends_its_worker(play: Any) -> None:
    """Nothing would ever be handed out: who restores, waits or draws next hears what was refused, and of which dataset."""

    async def test(one: Stand) -> None:
        line, other = await one.line(opened=False), await one.line(opened=False, local_rank=1)
        for opened in (line, other):
            await asyncio.to_thread(opened.open, MODEL_TERMS, 4)
        restored_leases(one, generation=0)
        resumed = await resuming(one, line)
        waits = asyncio.ensure_future(one.draw(other))
        await one.until(lambda: one.launcher.data.waiting)
        one.desk.answered(len(one.sent), "step 7 of generation 1 was trained on 5 samples")
        for drawn in (resumed, waits, one.draw(line)):
            with pytest.raises(
                SpecError, match="dataset 'eval': the job's master refuses where this generation goes on: step 7"
            ):
                await drawn
        assert "step 7" in one.duty.why("eval")
        (words,) = one.told
        assert "refuses where this generation goes on: step 7" in words
        assert "No rank of this generation is handed samples" in words
        restored_leases(one, (4, 40), generation=LAUNCH.generation)  # another node's word was heard
        assert await one.draw(line) == (4, 8)

    play(test)


def test_nothing_is_said_of_a_generation_that_is_over(play: Any) -> None:
    """What its rank 0 had said is not sent again, and a late refusal is no word about the ranks of today."""

    async def test(one: Stand) -> None:
        line = await one.line(opened=False)
        await asyncio.to_thread(line.open, MODEL_TERMS, 4)
        restored_leases(one, generation=0)
        resumed = await resuming(one, line)
        number, before = len(one.sent), asyncio.get_running_loop().time()
        one.duty.noticed(WorkersGone(LAUNCH.generation))
        one.desk.answered(number, "this node does not run rank 0")
        with pytest.raises(DataGone):
            await resumed
        assert one.told == []
        assert "does not run rank 0" not in one.duty.why("eval")
        for restoring in one.duty._restoring.values():
            restoring.due_s = before
        one.duty._tell(one.desk, one.launcher.data)
        assert len(one.sent) == number

    play(test)


def test_a_generation_that_is_over_is_not_sent_again(play: Any) -> None:
    """The leader has not answered when its workers end: it fails over, and rank 0 lives elsewhere then."""

    async def test(one: Stand) -> None:
        line = await one.line(opened=False)
        await asyncio.to_thread(line.open, MODEL_TERMS, 4)
        restored_leases(one, generation=0)
        resumed = await resuming(one, line)
        (restoring,) = one.duty._restoring.values()
        restoring.due_s = 0.0
        number = len(one.sent)
        one.duty.noticed(WorkersGone(LAUNCH.generation - 1))
        one.duty._tell(one.desk, one.launcher.data)
        assert len(one.sent) == number + 1
        restoring.due_s = 0.0
        one.duty.noticed(WorkersGone(LAUNCH.generation))
        one.duty._tell(one.desk, one.launcher.data)
        assert len(one.sent) == number + 1
        with pytest.raises(DataGone):
            await resumed

    play(test)


def test_what_a_loader_process_has_is_taken_once(play: Any) -> None:
    """By its session; what nobody has taken goes to others as it ends, and no repetition is told."""

    async def test(one: Stand) -> None:
        rank, loader = [await one.line(opened=False) for _ in range(2)]
        for line in (rank, loader):
            await asyncio.to_thread(line.open, MODEL_TERMS, 4)
        restored_leases(one, (0, 12), generation=LAUNCH.generation)
        assert [await one.draw(loader) for _ in range(2)] == [(0, 4), (4, 8)]
        assert await asyncio.to_thread(rank.claim, "eval", Span(0, 2), loader.session)
        assert not await asyncio.to_thread(rank.claim, "eval", Span(0, 2), loader.session)
        assert not await asyncio.to_thread(rank.claim, "eval", Span(2, 4), rank.session)
        loader.close()
        await one.until(lambda: one.ask.todo == 10)
        assert not await asyncio.to_thread(rank.claim, "eval", Span(2, 4), loader.session)
        assert [sent for sent in one.sent if isinstance(sent, ReportRepeated)] == []
        await one.until(lambda: spans_of(one.ask.acked) == ((0, 2),))

    play(test)


def test_a_dataset_of_acknowledgements_is_not_restored(play: Any) -> None:
    """And one of a model is none of those."""

    async def test(one: Stand) -> None:
        line = await one.line()
        with pytest.raises(SpecError, match=r'lineage: "server" of dataset .eval.: it is not restored'):
            await asyncio.to_thread(line.restored, TERMS, 0, 0, Ranges())
        other = await one.line(opened=False)
        with pytest.raises(SpecError, match=r"lease, epochs 2; this one has .*lease-model, epochs 2"):
            await asyncio.to_thread(other.open, MODEL_TERMS, 4)

    play(test)


def test_a_leader_that_says_nothing_is_not_waited_for(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may begin while a master is replaced; what that one refuses is heard by those that draw."""
    monkeypatch.setattr(data_socket, "RESTORED_S", 0.01)

    async def test(one: Stand) -> None:
        line = await one.line(opened=False)
        await asyncio.to_thread(line.open, MODEL_TERMS, 4)
        restored_leases(one, generation=0)
        await asyncio.to_thread(line.restored, MODEL_TERMS, 1, 7, Ranges([(0, 4)]))
        one.desk.answered(len(one.sent), "step 7 of generation 1 was trained on 5 samples")
        with pytest.raises(SpecError, match="refuses where this generation goes on: step 7"):
            await one.draw(line)

    play(test)
