"""Node checks for agents that cannot be checked, because another launcher, such as torch's elastic agent, owns the workers."""

from __future__ import annotations

from dlrover_core.job.checks import CheckWork, ReportCheck
from dlrover_core.runtime.duties import Desk, Orders


class Unchecked(Orders):
    """Reports at once that all is well, so that no check waits for this node or takes its silence for a failure."""

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        told = (0, 0)
        while True:
            check = (await self.news(desk)).part(CheckWork)
            if check.number and (check.number, check.round) > told:
                told = (check.number, check.round)
                desk.send(ReportCheck(desk.node, *told, True))
