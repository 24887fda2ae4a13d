"""What an agent does beside its workers: it begins with the node, hears everything, reports to the leader, ends with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_agent import NODE, WAIT, Stage, run_order

from dlrover_core.job.checkpoints import OfferReplica
from dlrover_core.job.evidence import ReportEvidence
from dlrover_core.job.orders import Order
from dlrover_core.job.world import ReportFinished, WithdrawStore
from dlrover_core.runtime import messages
from dlrover_core.runtime.duties import TOLD_EACH_S, TOLD_S, Desk
from dlrover_core.runtime.launcher import Notice, WorkerExit
from dlrover_core.testing import virtual_loop


class Watch:
    """A duty that keeps what it hears."""

    def __init__(self) -> None:
        self.began: asyncio.Future[Desk] = asyncio.get_running_loop().create_future()
        self.orders: list[Order] = []
        self.notices: list[Notice] = []
        self.ended = False

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        self.began.set_result(desk)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True

    def ordered(self, order: Order) -> None:
        """Kept."""
        self.orders.append(order)

    def noticed(self, notice: Notice) -> None:
        """Kept."""
        self.notices.append(notice)


SEEN = ReportEvidence(NODE, "hang", "hang.rank", "rank 0 hangs", rank=0, generation=1)


def test_a_duty_hears_orders_and_notices() -> None:
    """Every order and every notice reaches a duty; its desk says which generation runs, of which run."""

    async def story() -> None:
        watch = Watch()
        stage = Stage(duties=[watch])
        await stage.listener.serve(stage.accept, dict)
        running = virtual_loop.spawn("agent", stage.agent.run())
        desk = await watch.began
        stage.version = messages.VERSION
        connection, _ = await stage.greet()
        await stage.order(connection, WAIT)
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        assert [order.generation for order in watch.orders] == [0, 1]
        assert (desk.node, desk.run, desk.generation, desk.order.generation) == (NODE, "run-1", 1, 1)
        stage.launcher.kill(0)
        await asyncio.sleep(1)
        assert any(isinstance(one, WorkerExit) for one in watch.notices)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert watch.ended

    virtual_loop.run(story())


@pytest.mark.parametrize(("version", "reaches"), [(messages.VERSION, True), (messages.VERSION - 1, False)])
def test_older_masters_are_spared(version: int, reaches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that an older master cannot read is not sent to it: it would end the connection, again and again."""
    monkeypatch.setattr(ReportEvidence, "__since__", messages.VERSION)

    async def story() -> None:
        watch = Watch()
        stage = Stage(duties=[watch])
        stage.version = version
        await stage.listener.serve(stage.accept, dict)
        running = virtual_loop.spawn("agent", stage.agent.run())
        desk = await watch.began
        await stage.greet()
        await asyncio.sleep(1)
        desk.send(SEEN)
        await asyncio.sleep(5)
        assert stage.commands(ReportEvidence) == ([SEEN] if reaches else [])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtual_loop.run(story())


def at_work(story: Any, version: int = messages.VERSION) -> None:
    """Tell a story to an agent whose workers run, and to its duty."""

    async def told() -> None:
        watch = Watch()
        stage = Stage(duties=[watch])
        stage.version = version
        await stage.listener.serve(stage.accept, dict)
        running = virtual_loop.spawn("agent", stage.agent.run())
        desk = await watch.began
        connection, _ = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        await story(stage, desk, connection)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtual_loop.run(told())


def test_workers_have_finished_once_nothing_is_under_way() -> None:
    """Workers that ended well are said to have finished when no duty has anything on its way any more, and not before."""

    async def story(stage: Stage, desk: Desk, _: Any) -> None:
        desk.at_rest.clear()
        stage.launcher.kill(0, code=0)
        await asyncio.sleep(100)
        assert stage.commands(ReportFinished) == []
        desk.at_rest.set()
        await asyncio.sleep(1)
        assert [one.generation for one in stage.commands(ReportFinished)] == [1]  # type: ignore[attr-defined]

    at_work(story)


def test_what_is_not_on_storage_is_told_with_the_end() -> None:
    """Asked when nothing is on its way any more, since only then it is known."""

    async def story(stage: Stage, desk: Desk, _: Any) -> None:
        said = "", -1
        desk.unstored = lambda: said
        desk.at_rest.clear()
        stage.launcher.kill(0, code=0)
        await asyncio.sleep(100)
        said = "step 16 is not a checkpoint on storage", 16
        desk.at_rest.set()
        await asyncio.sleep(1)
        assert [(one.unstored, one.due) for one in stage.commands(ReportFinished)] == [said]  # type: ignore[attr-defined]

    at_work(story)


def test_what_is_under_way_is_waited_for_and_told_of() -> None:
    """However long it takes: nobody here knows how much it is. But people are told after a moment, and then now and then."""

    async def story(stage: Stage, desk: Desk, _: Any) -> None:
        told: list[float] = []
        desk.waits = told.append
        desk.at_rest.clear()
        stage.launcher.kill(0, code=0)
        await asyncio.sleep(7200)
        assert stage.commands(ReportFinished) == []
        assert told[:3] == pytest.approx([TOLD_S, TOLD_S + TOLD_EACH_S, TOLD_S + 2 * TOLD_EACH_S])
        assert len(told) == pytest.approx(7200 / TOLD_EACH_S, abs=1)
        desk.at_rest.set()
        await asyncio.sleep(1)
        assert len(stage.commands(ReportFinished)) == 1

    at_work(story)


def test_who_is_told_to_leave_does_not_wait() -> None:
    """The job is stopped while something is still under way: the agent goes at once."""

    async def story(stage: Stage, desk: Desk, connection: Any) -> None:
        desk.at_rest.clear()
        stage.launcher.kill(0, code=0)
        await asyncio.sleep(100)
        await stage.order(connection, WAIT._replace(leave=True, reason="stopped"))
        await asyncio.sleep(1)
        assert stage.commands(ReportFinished) == []
        assert stage.agent.leaving == "stopped"

    at_work(story)


def test_who_is_needed_again_has_not_finished() -> None:
    """Where another generation is ordered meanwhile, nothing is said of the one before."""

    async def story(stage: Stage, desk: Desk, connection: Any) -> None:
        desk.at_rest.clear()
        stage.launcher.kill(0, code=0)
        await asyncio.sleep(1)
        await stage.order(connection, run_order(2))
        await asyncio.sleep(5)
        desk.at_rest.set()
        await asyncio.sleep(5)
        assert stage.commands(ReportFinished) == []
        assert desk.generation == 2

    at_work(story)


def test_a_duty_hears_what_became_of_its_report() -> None:
    """Done, refused and why, or lost because the master is too old."""

    async def story(stage: Stage, desk: Desk, _: Any) -> None:
        heard: list[str] = []
        assert desk.send(SEEN, heard.append)
        await asyncio.sleep(1)
        stage.refuses = "no room"
        assert desk.send(SEEN, heard.append)
        assert desk.send(SEEN)
        await asyncio.sleep(1)
        assert heard == ["", "no room"]
        stage.agent._peer_version = -1
        assert not desk.send(SEEN, heard.append)

    at_work(story)


def test_what_was_queued_before_an_older_master_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a duty said before it was known how old its master is leaves no gap in the numbers, and nothing unreadable."""
    for cls in (ReportEvidence, OfferReplica):
        monkeypatch.setattr(cls, "__since__", messages.VERSION)

    async def story() -> None:
        watch = Watch()
        stage = Stage(duties=[watch])
        stage.version = messages.VERSION - 1
        await stage.listener.serve(stage.accept, dict)
        running = virtual_loop.spawn("agent", stage.agent.run())
        desk = await watch.began
        desk.send(SEEN)
        desk.send(OfferReplica(NODE, "h:1"))
        await stage.greet()
        await asyncio.sleep(1)
        assert stage.commands(ReportEvidence) == stage.commands(OfferReplica) == []
        assert stage.commands(WithdrawStore) == [WithdrawStore(NODE, "")] * 2
        numbers = [number for number, _ in stage.got]
        assert numbers == list(range(1, len(numbers) + 1))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    virtual_loop.run(story())
