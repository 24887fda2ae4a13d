"""What an agent does beside its workers: it begins with the node, hears everything, reports to the leader, ends with it."""

from __future__ import annotations

import asyncio

import pytest
from test_agent import NODE, WAIT, Stage, run_order

from dlrover_core.job.evidence import ReportEvidence
from dlrover_core.job.state import Order
from dlrover_core.runtime import messages
from dlrover_core.runtime.duties import Desk
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


@pytest.mark.parametrize(("version", "reaches"), [(messages.VERSION, True), (messages.DUTIES_VERSION - 1, False)])
def test_older_masters_are_spared(version: int, reaches: bool) -> None:
    """A command that an older master cannot read is not sent to it: it would end the connection, again and again."""

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
