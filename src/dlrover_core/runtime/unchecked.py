"""For agents that cannot be checked: workers are another launcher's, as torch's own elastic agent's are."""

from __future__ import annotations

import asyncio

from dlrover_core.job.health import ReportCheck
from dlrover_core.job.state import Order
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.launcher import Notice


class Unchecked:
    """Says at once that all is well, so that nobody waits for a check, or takes the silence for a failure."""

    def __init__(self) -> None:
        self._order: Order | None = None
        self._news = asyncio.Event()

    def ordered(self, order: Order) -> None:
        """A new order."""
        self._order = order
        self._news.set()

    def noticed(self, notice: Notice) -> None:
        """Nothing follows."""

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        told = (0, 0)
        while True:
            order = self._order
            if order is not None and order.check and (order.check, order.check_round) > told:
                told = (order.check, order.check_round)
                desk.send(ReportCheck(desk.node, *told, True))
            self._news.clear()
            await self._news.wait()
